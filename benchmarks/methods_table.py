"""All methods on digits, three seeds: trains, certifies, writes the record and the table.

    python benchmarks/methods_table.py              train what is missing, write both files
    python benchmarks/methods_table.py --from-record   write the table of docs/methods.md anew

The record is results/digits-methods.json; the table stands between two markers in
docs/methods.md. Every run is that of `acert train --method METHOD --kappa KAPPA --seed SEED`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from acert import data, metrics, records
from acert.evaluation import certify
from acert.experiments.paper.comparison import filled
from acert.experiments.recipes import recipe
from acert.experiments.run import record_certification, train_run
from acert.methods import METHODS

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "results" / "digits-methods.json"
PAGE = ROOT / "docs" / "methods.md"
SEEDS = (0, 1, 2)
KAPPAS = (0.0, 0.5)
FIGURES = {"accuracy": "Acc", "acr": "ACR", "art": "ART", "acr_by_crown": "ACR by CROWN"}


def trained(method: str, kappa: float, seed: int, out: Path) -> dict[str, object]:
    """One run and the figures of its test set, in a process of its own."""
    torch.set_num_threads(1)
    experiment = recipe("digits", method, kappa=kappa, seed=seed)
    folder = out / f"{method}-k{kappa:g}-s{seed}"
    run = train_run(experiment, out=folder, resume=folder.exists(), progress=False)
    test_set = data.load_test("digits")
    radius = experiment.settings.max_radius
    found = certify(run.model, test_set, max_radius=radius)
    record_certification(folder, found, test_set)
    return {
        "method": method,
        "kappa": kappa,
        "seed": seed,
        "accuracy": found.accuracy,
        "acr": found.acr,
        "art": found.art,
        "acr_by_crown": certify(run.model, test_set, max_radius=radius, bounds="crown").acr,
        "environment": records.read_environment(folder),
    }


def record(out: Path) -> dict[str, object]:
    """The figures of every method and seed, with what is needed to repeat them."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        calls = [
            pool.submit(trained, method, kappa, seed, out)
            for method in METHODS
            for kappa in ((1.0,) if method == "standard" else KAPPAS)
            for seed in SEEDS
        ]
        runs = []
        for call in calls:
            runs.append(call.result())
            print(*(runs[-1][name] for name in ("method", "kappa", "seed", *FIGURES)), flush=True)
    environment = runs[0]["environment"]
    assert isinstance(environment, dict)
    kept = ("commit", "acert", "python", "torch", "system", "cpu", "cores", "threads")
    settings = recipe("digits", "acert").settings
    return {
        "command": "python benchmarks/methods_table.py",
        "environment": {name: environment.get(name) for name in kept},
        "test_images": len(data.load_test("digits")),
        "max_radius": settings.max_radius,
        "epochs": settings.epochs,
        "seeds": list(SEEDS),
        "runs": [
            {name: value for name, value in run.items() if name != "environment"} for run in runs
        ],
    }


def table(content: dict[str, object]) -> str:
    """The record as Markdown: mean and sample standard deviation in points, best mean bold."""
    runs = content["runs"]
    assert isinstance(runs, list)
    rows: dict[tuple[str, float], list[dict[str, float]]] = {}
    for run in runs:
        rows.setdefault((run["method"], run["kappa"]), []).append(run)
    spreads = {
        (row, figure): metrics.spread([run[figure] for run in mine])
        for row, mine in rows.items()
        for figure in FIGURES
    }
    best = {figure: max(spreads[row, figure].mean for row in rows) for figure in FIGURES}
    lines = [
        f"| method | kappa | {' | '.join(FIGURES.values())} |",
        f"| --- | --- |{' --- |' * len(FIGURES)}",
    ]
    for row in rows:
        cells = [row[0], f"{row[1]:g}"]
        for figure in FIGURES:
            found = spreads[row, figure]
            mean = f"{100 * found.mean:.2f}"
            mean = f"**{mean}**" if found.mean == best[figure] else mean
            cells.append(f"{mean} \N{PLUS-MINUS SIGN} {100 * (found.std or 0):.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    environment = content["environment"]
    assert isinstance(environment, dict)
    lines += [
        "",
        f"{content['test_images']} test images, max_radius {content['max_radius']}, "
        f"{content['epochs']} epochs, seeds {content['seeds']}; mean and sample standard "
        f"deviation in points, the best mean bold; interval bounds but in the last column, real "
        f"arithmetic; torch "
        f"{environment['torch']} on {environment['cpu']}.",
    ]
    return "\n".join(lines)


def write_page(text: str) -> None:
    """Puts the table between its markers."""
    page = filled(PAGE.read_text(encoding="utf-8"), {"digits-methods": text})
    PAGE.write_text(page, encoding="utf-8")


def main() -> None:
    """Makes the record, unless it is to be taken as it is, and the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--from-record", action="store_true", help="train nothing")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: a temporary one)")
    options = parser.parse_args()
    if not options.from_record:
        with tempfile.TemporaryDirectory() as temporary:
            content = record(options.runs or Path(temporary))
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_page(table(json.loads(RECORD.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
