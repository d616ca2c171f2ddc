"""ACERT and FastIBP on scikit-learn's digits: a table and the accuracy-robustness picture.

    python examples/digits.py [--out demo] [--kappas 0,0.25,0.5] [--epochs 60]

Trains each method at three shares `kappa` of standard loss, one run a core, and certifies the
test set. Prints accuracy, ACR and ART with the certified accuracy at a third of the largest
radius, and writes digits.png. Runs that are finished already are not trained again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from acert import data, metrics
from acert.evaluation import Certificates, certify
from acert.experiments.recipes import recipe, with_epochs
from acert.experiments.run import record_certification, train_run

METHODS = {"acert": "ACERT", "fastibp": "FastIBP"}
# Blue and vermilion of Okabe and Ito, told apart by the colour-blind too; so are the markers.
COLORS = {"acert": "#0072B2", "fastibp": "#D55E00"}
MARKERS = {"acert": "o", "fastibp": "s"}


@dataclass(frozen=True)
class Point:
    """One trained network and its certificates."""

    method: str
    kappa: float
    certificates: Certificates
    seconds: float


def trained(method: str, kappa: float, epochs: int | None, out: Path) -> Point:
    """One run and the certificates of its test set, in a process of its own."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    experiment = recipe("digits", method, kappa=kappa)
    if epochs is not None:
        experiment = with_epochs(experiment, epochs)
    folder = out / "runs" / f"{method}-k{kappa:g}-e{experiment.settings.epochs}"
    run = train_run(experiment, out=folder, resume=folder.exists(), progress=False)
    test_set = data.load_test("digits")
    certificates = certify(run.model, test_set, max_radius=experiment.settings.max_radius)
    record_certification(folder, certificates, test_set)
    return Point(method, kappa, certificates, time.perf_counter() - began)


def main() -> None:
    """Trains, prints the table and writes the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of runs and picture")
    parser.add_argument("--kappas", default="0,0.25,0.5", help="shares of standard loss")
    parser.add_argument("--epochs", type=int, help="other than the recipe's")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kappas = [float(kappa) for kappa in options.kappas.split(",")]

    points = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        calls = [
            pool.submit(trained, method, kappa, options.epochs, options.out)
            for method in METHODS
            for kappa in kappas
        ]
        for number, call in enumerate(calls):
            points.append(call.result())
            if number == 0:
                print(header(points[0].certificates))
            print(row(points[-1]), flush=True)
    print(f"picture: {picture(points, options.out / 'digits.png')}")


def header(certificates: Certificates) -> str:
    """What the table shows, and its first line."""
    largest = certificates.max_radius
    return (
        f"digits: {len(certificates)} test images, radii proven in real arithmetic, largest "
        f"{largest:g}\n{'method':<9}{'kappa':>6}{'Acc':>8}{'ACR':>8}{'ART':>8}"
        f"{f'cert@{largest / 3:.2g}':>11}{'s':>6}"
    )


def row(point: Point) -> str:
    """One line of the table."""
    found = point.certificates
    figures = [found.accuracy, found.acr, found.art]
    return (
        f"{METHODS[point.method]:<9}{point.kappa:6g}"
        + "".join(f"{100 * figure:8.2f}" for figure in figures)
        + f"{100 * found.certified_accuracy(found.max_radius / 3):11.2f}{point.seconds:6.0f}"
    )


def picture(points: Sequence[Point], path: Path) -> Path:
    """Accuracy against ACR with lines of equal ART (Fig. 1), and certified accuracy (Fig. 3)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    acrs = np.array([100 * point.certificates.acr for point in points])
    accuracies = np.array([100 * point.certificates.accuracy for point in points])
    room = 0.25 * max(np.ptp(acrs), np.ptp(accuracies), 4.0)
    x = np.linspace(acrs.min() - room, acrs.max() + room, 200)
    y = np.linspace(accuracies.min() - room, min(100.0, accuracies.max() + room), 200)
    level = np.sqrt(x[None, :] * y[:, None])
    step = 1 if np.ptp(level) < 8 else 2 if np.ptp(level) < 20 else 5
    levels = np.arange(step * np.ceil(level.min() / step), level.max(), step)
    lines = left.contour(x, y, level, levels=levels, colors="0.8", linewidths=0.8)
    left.clabel(lines, fmt="ART %g", fontsize=8, colors="0.5")
    for method, name in METHODS.items():
        mine = sorted((p for p in points if p.method == method), key=lambda p: p.kappa)
        found = [p.certificates for p in mine]
        left.plot(
            [100 * f.acr for f in found], [100 * f.accuracy for f in found],
            color=COLORS[method], marker=MARKERS[method], markersize=8, label=name,
        )  # fmt: skip
        for point in mine:
            left.annotate(
                f"\N{GREEK SMALL LETTER KAPPA}={point.kappa:g}",
                (100 * point.certificates.acr, 100 * point.certificates.accuracy),
                xytext=(7, 5), textcoords="offset points", color=COLORS[method], fontsize=9,
            )  # fmt: skip
        for point, style in zip(mine, ("-", "--", ":"), strict=False):
            curve = metrics.certified_accuracy_curve(
                point.certificates.radius, point.certificates.correct,
                max_radius=point.certificates.max_radius,
            )  # fmt: skip
            right.step(
                curve.radius, 100 * curve.accuracy, style, where="pre", color=COLORS[method],
                linewidth=1.8, label=f"{name}, \N{GREEK SMALL LETTER KAPPA}={point.kappa:g}",
            )  # fmt: skip
    left.set(
        xlabel="average certified radius (ACR), % of the largest", ylabel="accuracy, %",
        title="Accuracy against robustness",
    )  # fmt: skip
    left.legend(loc="lower left", frameon=True)
    right.set(
        xlabel="l-infinity radius", ylabel="certified accuracy, %", ylim=(0, 101),
        xlim=(0, points[0].certificates.max_radius), title="Share of test images proven robust",
    )  # fmt: skip
    right.grid(alpha=0.3)
    right.legend(loc="lower left", frameon=True, fontsize=9)
    figure.savefig(path, dpi=160)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
