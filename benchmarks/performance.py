"""Writes the tables of docs/performance.md and docs/scale.md from the records under results/.

python benchmarks/performance.py            # fills the pages
python benchmarks/performance.py --check    # exit status 1 if a page is stale
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # where `benchmarks` is, if this is run as a script

from acert.experiments.experiment import Experiment  # noqa: E402
from acert.experiments.paper.comparison import filled  # noqa: E402
from acert.experiments.paper.publication import Record, read_records  # noqa: E402
from acert.experiments.recipes import recipe  # noqa: E402
from acert.methods import Acert  # noqa: E402
from acert.optimizers import Adam, Optimizer  # noqa: E402

RESULTS = ROOT / "results"
PAGES = ROOT / "docs" / "performance.md", ROOT / "docs" / "scale.md"
UNMEASURED = "No record yet: `{}` writes it."
COMMANDS = {
    "step-cuda": "python benchmarks/step.py --device cuda",
    "step-cuda-float16": "python benchmarks/step.py --device cuda --precisions float16",
    "step-cpu": "python benchmarks/step.py --cpu-targets",
    "certify-cuda": "python benchmarks/certify.py --run RUN --device cuda",
    "train-cuda": "python benchmarks/train.py --device cuda --dataset cifar10",
    "processes-cuda": "torchrun --nproc-per-node=1 benchmarks/processes.py --device cuda",
    "scale": "torchrun --nproc-per-node=1 benchmarks/processes.py --device cuda",
    "gradients-cpu": "python benchmarks/gradients.py --device cpu",
    "formats": "acert reproduce --rows table1/cifar10/acert-k0",
    "solvers": "acert reproduce --rows table6",
    "optimizers": "acert train --dataset cifar10 --set optimizer=Muon --train-on-all",
    "targets": "python benchmarks/step.py --device cuda",
}
# What one H200 is to do with CNN7, CIFAR-10 and batch 128: at the least, and at best.
TARGETS = {
    "FastIBP step, ms": (3.2, 1.8),
    "ACERT step, two root steps, ms": (4.2, 2.2),
    "200 epochs of ACERT from the first step, min": (5.6, 3),
    "from the command to the first step, s": (60, 20),
    "certify 10,000 images, proven, s": (4, 1.5),
    "ART, mean of seeds 0 and 1": (50.7, 51.3),
}
# An epoch of CIFAR-10 in batches of 128 is 391 steps: seconds of it that are a millisecond a step.
_EPOCH_MS = 0.391

# Assumed of the hardware, for the step on paper: bytes a second of an H200's memory, of NVLink in
# one direction at four fifths of its data sheet, and of a network of 400 Gbit/s; seconds a message.
MEMORY, NVLINK, NETWORK, LATENCY = 4.8e12, 360e9, 50e9, 1e-5
# How often a step reads or writes all weights or what has their size: Adam 7, clipping 3, |W| 2,
# adding up three gradients 6, and the linear layers, which hold nearly all weights: 9 forward
# products, 3 backward ones and 3 gradients.
WEIGHT_PASSES = 7 + 3 + 2 + 6 + 9 + 3 + 3
# Messages of a step of CNN7 with regularisers: mean and variance of six batch norms there and back,
# two of the regularisers there and back, gradients, terms.
MESSAGES = 2 * (2 * 6 + 2) + 2


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
        "certification, s", "Acc", "ACR", "ART", "commit",
    )  # fmt: skip
    later = ("training_s", "epoch_s", "certify_s")
    figures = ("accuracy", "acr", "art")
    rows = [
        (
            f"{run['dataset']}, {run['method']}, kappa {run['kappa']:g}, {run['precision']}, "
            f"{run['epochs']} epoch{'s' * (run['epochs'] > 1)}, seed {run['seed']}"
            + (f", {run['solver']}" if run.get("solver") else "") + _optimizer(run),
            run["first_step_s"],
            *(run[name] if _whole(run) else None for name in later),
            *(f"{run[name]:.2f}" if _whole(run) else None for name in figures),
            run["environment"]["commit"][:7],
        )
        for run in record["runs"]
    ]  # fmt: skip
    return f"{source(record['runs'][-1])}\n\n{markdown(header, rows)}"


def _optimizer(run: dict[str, Any]) -> str:
    """Behind what else is said of a run, if its optimiser is not Adam."""
    name = run.get("optimizer", "Adam")
    return "" if name == "Adam" else f", {name}"


def _whole(run: dict[str, Any]) -> bool:
    """Whether a run was certified on all of its test set, so that it is more than a first step."""
    return bool(run["certified"] == 10_000)


def processes_table(record: dict[str, Any]) -> str:
    rows = [(name, ms) for name, ms in record["ms"].items()]
    return (
        f"{record['shape']} shapes, CNN7 of width {record['width']}, batch "
        f"{record['batch_size']}, ACERT with two root steps and regularisers, "
        f"{record['precision']}, compiled and captured. {source(record)}\n\n"
        f"{markdown(('step', 'ms'), rows)}\n\n"
        f"Largest relative difference of the loss in {record['steps']} steps, each from the same "
        f"state: {record['largest_loss_difference']:.1e}."
    )


def scale_table(record: dict[str, Any]) -> str:
    """Milliseconds of a step on N GPUs by the formula of docs/scale.md."""
    plain, joined = float(record["ms"]["plain"]), float(record["ms"]["joined"])
    weights = float(record["gradient_mib"]) * 2**20
    fixed = 1e3 * WEIGHT_PASSES * weights / MEMORY

    def step(count: int, arithmetic: float, wire: float) -> float:
        alone = fixed + arithmetic * (plain - fixed) / count
        if count == 1:
            return alone
        sent = 2 * (count - 1) / count * weights / wire + MESSAGES * LATENCY
        return alone + (joined - plain) + 1e3 * sent

    cases = {
        "CIFAR-10, NVLink": (1, NVLINK),
        "CIFAR-10, network of 400 Gbit/s": (1, NETWORK),
        "TinyImageNet, NVLink": (6, NVLINK),
    }
    rows = []
    for count in (1, 2, 4, 8, 16):
        cells = []
        for arithmetic, wire in cases.values():
            ms = step(count, arithmetic, wire)
            cells.append(f"{ms:.1f} ({step(1, arithmetic, wire) / ms:.1f} times faster)")
        rows.append((count, *cells))
    return (
        f"From the measured step above: {plain:.2f} ms, of which {fixed:.2f} ms by the formula do "
        f"not depend on the batch; {joined - plain:.2f} ms for joining; "
        f"{record['gradient_mib']:.0f} MiB of gradients.\n\n{markdown(('GPUs', *cases), rows)}"
    )


def _figures(record: Record) -> list[str | None]:
    """Acc, ACR and ART in per cent, and milliseconds a step."""
    names = ("accuracy", "acr", "art")
    step = None if record.step_seconds is None else f"{1e3 * record.step_seconds:.2f}"
    return [*(f"{100 * getattr(record.certificates, name):.2f}" for name in names), step]


def formats_table(found: Sequence[Record]) -> str:
    """Runs of one recipe that differ in nothing but seed and number format."""
    header = ("format", "seed", "last loss", "Acc", "ACR", "ART", "ms a step", "minutes", "commit")
    rows = [
        (
            record.experiment.settings.precision, record.seed, f"{record.metrics[-1]['loss']:.4f}",
            *_figures(record),
            None if record.minutes is None else f"{record.minutes:.1f}",
            record.environment["commit"][:7],
        )
        for record in found
    ]  # fmt: skip
    return markdown(header, rows)


def solvers_table(found: Sequence[Record]) -> str:
    """Runs of one recipe that differ in nothing but seed and root finding."""
    header = ("solver", "steps", "seed", "Acc", "ACR", "ART", "ms a step", "commit")
    rows = [
        (
            _solver(record)[0], _solver(record)[1], record.seed,
            *_figures(record),
            record.environment["commit"][:7],
        )
        for record in sorted(found, key=lambda record: (*_solver(record), record.seed))
    ]  # fmt: skip
    return markdown(header, rows)


def optimizers_table(found: Sequence[Record]) -> str:
    """Runs of one recipe that differ in nothing but seed and optimiser."""
    header = ("optimiser", "seed", "last loss", "Acc", "ACR", "ART", "ms a step", "commit")
    rows = [
        (
            _named(record.experiment.settings.optimizer), record.seed,
            f"{record.metrics[-1]['loss']:.4f}",
            *_figures(record),
            record.environment["commit"][:7],
        )
        for record in sorted(found, key=_optimizer_and_seed)
    ]  # fmt: skip
    return markdown(header, rows)


def _optimizer_and_seed(record: Record) -> tuple[str, int]:
    return _named(record.experiment.settings.optimizer), record.seed


def _named(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    cycles = isinstance(optimizer, Adam) and optimizer.peak_momentum is not None
    return f"{name}, beta cycles" if cycles else name


def _solver(record: Record) -> tuple[str, int]:
    method = record.experiment.settings.method
    assert isinstance(method, Acert)
    return type(method.solver).__name__, method.solver.max_steps


def cifar_runs(results: Path) -> list[Record]:
    """ACERT's recipe for CIFAR-10 with kappa 0, any format, solver, optimiser and seed."""

    def plain(record: Record) -> Experiment:
        """Its experiment without what may differ."""
        settings = replace(
            record.experiment.settings,
            method=Acert(), precision="tf32", optimizer=Adam(), seed=0,
        )  # fmt: skip
        return replace(record.experiment, settings=settings, validate_every=1)

    wanted = recipe("cifar10", "acert", precision="tf32", train_on_all=True, validate_every=1)
    found = [
        record
        for record in read_records(results)[0]
        if isinstance(record.experiment.settings.method, Acert)
        and record.experiment.settings.method.kappa == 0
        and plain(record) == wanted
    ]
    return sorted(found, key=lambda r: (r.experiment.settings.precision != "tf32", r.seed))


def targets_table(results: Path, runs: Sequence[Record]) -> str:
    """Each target beside what the records say, "-" where none says anything."""
    # The later record comes last, and its figures stand.
    records = (read(name, results) for name in ("step-cuda", "step-cuda-float16"))
    steps = [row for record in records if record for row in record["rows"]]
    finished = read("train-cuda", results) or {"runs": []}

    def step(method: str) -> str:
        measured = {
            row["precision"]: f"{row['ms']:.2f}"
            for row in steps
            if row["method"] == method and not row["regularized"]
        }
        return _listed(measured.items())

    def training(key: str, unit: float, digits: int = 1) -> str:
        runs = [run for run in finished["runs"] if key == "first_step_s" or _whole(run)]
        # The last run of each kind: the table of finished models has them all.
        kinds = {
            run["precision"] + _optimizer(run): f"{run[key] / unit:.{digits}f}" for run in runs
        }
        return _listed(kinds.items())

    certified = sorted(
        [
            (record.environment["certification_seconds"], record.environment["commit"])
            for record in runs
            if "certification_seconds" in record.environment
        ]
        + [
            (run["certify_s"], run["environment"]["commit"])
            for run in finished["runs"]
            if _whole(run)
        ]
    )
    by_format: dict[str, dict[int, list[float]]] = {}
    for record in runs:
        settings = record.experiment.settings
        name = settings.precision + _optimizer({"optimizer": _named(settings.optimizer)})
        seeds = by_format.setdefault(name, {})
        seeds.setdefault(record.seed, []).append(100 * record.certificates.art)
    arts = []
    for form, seeds in by_format.items():
        found = {seed: sum(values) / len(values) for seed, values in seeds.items() if seed < 2}
        count = sum(len(seeds[seed]) for seed in found)
        number = f"{count} run{'s' * (count > 1)}"
        runs_of = "seeds 0 and 1" if len(found) == 2 else f"seed {', '.join(map(str, found))} alone"
        mean = sum(found.values()) / len(found)
        arts.append((form, f"{mean:.2f} ({runs_of}, {number})"))
    quickest = f"{certified[0][0]:.1f} at commit {certified[0][1][:7]}" if certified else "-"
    measured = (
        step("fastibp"), f"{step('acert')}; in training {training('epoch_s', _EPOCH_MS, 2)}",
        training("training_s", 60, 2), training("first_step_s", 1), quickest, _listed(arts),
    )  # fmt: skip
    rows = [(name, *TARGETS[name], found) for name, found in zip(TARGETS, measured, strict=True)]
    return markdown(("", "required", "goal", "measured"), rows)


def _listed(found: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{form} {value}" for form, value in found) or "-"


def gradients_table(record: dict[str, Any]) -> str:
    keys = ("rounded", "noise_percent", "bias_percent", "radius_percent")
    header = ("rounded", "noise, %", "bias, %", "change of radii, %")
    rows = [(row[keys[0]], *(f"{row[key]:.2f}" for key in keys[1:])) for row in record["rows"]]
    return (
        f"CNN7 of width {record['width']} after {record['epochs']} epochs on {record['images']} "
        f"images, {record['batches']} batches, cap {100 * record['cap_share']:.0f} % of eps_max. "
        f"{source(record)}\n\n{markdown(header, rows)}"
    )


TABLES = {
    "gradients-cpu": gradients_table,
    "processes-cuda": processes_table,
    "step-cuda": step_table,
    "step-cuda-float16": step_table,
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
    joined, all_runs = read("processes-cuda", results), cifar_runs(results)
    brent = [record for record in all_runs if _solver(record) == ("Brent", 2)]
    runs = [record for record in brent if record.experiment.settings.optimizer == Adam()]
    halves = [
        each
        for each in all_runs
        if each.experiment.settings.precision == "float16"
        and each.experiment.settings.optimizer == Adam()
    ]
    optimizers = [each for each in brent if each.experiment.settings.precision == "float16"]
    made["scale"] = scale_table(joined) if joined else UNMEASURED.format(COMMANDS["scale"])
    made["formats"] = formats_table(runs) if runs else UNMEASURED.format(COMMANDS["formats"])
    made["solvers"] = solvers_table(halves) if halves else UNMEASURED.format(COMMANDS["solvers"])
    made["optimizers"] = (
        optimizers_table(optimizers) if optimizers else UNMEASURED.format(COMMANDS["optimizers"])
    )
    made["targets"] = targets_table(results, brent)
    return filled(text, made)


def main(words: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    checks = parser.parse_args(words).check
    stale = False
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        made = rendered(text)
        stale |= made != text
        if not checks:
            page.write_text(made, encoding="utf-8")
    return int(checks and stale)


if __name__ == "__main__":
    sys.exit(main())
