"""Writes the tables of docs/performance.md from the records under results/.

python benchmarks/performance.py            # fills the page
python benchmarks/performance.py --check    # exit status 1 if the page is stale
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # where `benchmarks` is, if this is run as a script

from acert.experiments.paper.comparison import filled  # noqa: E402

RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "performance.md"
UNMEASURED = "No record yet: `{}` writes it."
COMMANDS = {
    "step-cuda": "python benchmarks/step.py --device cuda",
    "step-cpu": "python benchmarks/step.py --cpu-targets",
    "certify-cuda": "python benchmarks/certify.py --run RUN --device cuda",
    "train-cuda": "python benchmarks/train.py --device cuda --dataset cifar10",
}


def read(name: str, results: Path) -> dict[str, Any] | None:
    path = results / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def source(record: dict[str, Any]) -> str:
    """Where the figures come from: hardware, versions, commit and command."""
    env = record["environment"]
    place = env.get("gpu") or f"{env['cpu']}, {env['threads']} threads"
    commit, dash, changed = (env["commit"] or "unknown").partition("-")
    commit = commit[:7] + dash + changed
    return f"{place}, torch {env['torch']}, commit {commit}: `{env['command']}`"


def step_table(record: dict[str, Any]) -> str:
    header = (
        "method, precision", "ms", "ms with regularisers", "GPU busy, ms", "kernels", "peak, MiB",
        "GFLOP", "floor, ms", "share of the peak",
    )  # fmt: skip
    rows = []
    with_them = {
        (row["method"], row["precision"]): row["ms"] for row in record["rows"] if row["regularized"]
    }
    for row in record["rows"]:
        if not row["regularized"]:
            key = (row["method"], row["precision"])
            share = row.get("share")
            rows.append((
                ", ".join(key), row["ms"], with_them.get(key), row.get("busy_ms"),
                row.get("kernels"), row["peak_mib"], row.get("gflop"), row.get("floor_ms"),
                None if share is None else f"{100 * share:.0f} %",
            ))  # fmt: skip
    peaks = ", ".join(f"{form} {peak:.3g}" for form, peak in record["peaks_tflops"].items())
    shape = (
        f"{record['shape']} shapes, CNN7 of width {record['width']}, batch {record['batch_size']}"
    )
    return (
        f"{shape}, {record['root_steps']} root steps. {source(record)}\n\n"
        f"{markdown(header, rows)}\n\nLarge matrix products, TFLOP/s: {peaks}."
    )


def cpu_table(record: dict[str, Any]) -> str:
    header = (
        "network", "acert, ms", "auto_LiRPA, ms", "times faster", "wanted", "bare products, ms",
        "times bare", "wanted", "times bare, cached",
    )  # fmt: skip
    rows = [
        (
            f"{name}, width {found['width']}", found["ms"]["acert"], found["ms"].get("auto_LiRPA"),
            found.get("times_faster"), found.get("times_faster_wanted"),
            found["ms"]["bare products"], found["times_bare"], found["times_bare_wanted"],
            found["times_bare_cached"],
        )
        for name, found in record["targets"].items()
    ]  # fmt: skip
    clock = {"wall": "wall-clock time", "cpu": "processor time"}[record["clock"]]
    loads = ", ".join(f"{found['load'][0]:g}" for found in record["targets"].values())
    return (
        f"Batch {record['batch_size']}, {record['root_steps']} root steps, load of the machine "
        f"before each: {loads}, {clock}. {source(record)}\n\n{markdown(header, rows)}"
    )


def certify_table(record: dict[str, Any]) -> str:
    header = (
        "arithmetic", "batch", "seconds", "guess", "proof", "rest", "proven evaluations",
        "peak, MiB",
    )  # fmt: skip
    keys = (
        "arithmetic", "batch_size", "seconds", "guess_s", "proof_s", "rest_s",
        "proven_evaluations", "peak_mib",
    )  # fmt: skip
    rows = [[row[key] for key in keys] for row in record["rows"]]
    passes = [(row["library"], row["batch_size"], row["seconds"]) for row in record["passes"]]
    return (
        f"{record['images']} images, {record['network']}. {source(record)}\n\n"
        f"{markdown(header, rows)}\n\nTen plain float32 passes over the same images:\n\n"
        f"{markdown(('library', 'batch', 'seconds'), passes)}"
    )


def train_table(record: dict[str, Any]) -> str:
    header = (
        "run", "to the first step, s", "training from there, s", "median epoch, s",
        "certification, s", "Acc", "ACR", "ART",
    )  # fmt: skip
    rows = [
        (
            f"{run['dataset']}, {run['method']}, kappa {run['kappa']:g}, {run['precision']}, "
            f"{run['epochs']} epochs, seed {run['seed']}",
            run["first_step_s"], run["training_s"], run["epoch_s"], run["certify_s"],
            *(f"{run[name]:.2f}" for name in ("accuracy", "acr", "art")),
        )
        for run in record["runs"]
    ]  # fmt: skip
    return f"{source(record['runs'][-1])}\n\n{markdown(header, rows)}"


TABLES = {
    "step-cuda": step_table,
    "step-cpu": cpu_table,
    "certify-cuda": certify_table,
    "train-cuda": train_table,
}


def rendered(text: str, results: Path = RESULTS) -> str:
    """The page with every table as its record has it."""
    made = {}
    for name, table in TABLES.items():
        record = read(name, results)
        made[name] = UNMEASURED.format(COMMANDS[name]) if record is None else table(record)
    return filled(text, made)


def main(words: Sequence[str] | None = None) -> int:
    text = PAGE.read_text(encoding="utf-8")
    made = rendered(text)
    if "--check" in (sys.argv[1:] if words is None else words):
        return int(made != text)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
