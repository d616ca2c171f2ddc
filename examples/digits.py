"""ACERT and FastIBP on scikit-learn's digits: a table and the accuracy-robustness picture.

    python examples/digits.py [--out demo] [--kappas 0,0.5,0.9] [--seeds 1] [--epochs 60]

Trains each method at three shares `kappa` of standard loss, one run a core, and certifies the
test set. Prints accuracy, ACR and ART with the certified accuracy at a third of the largest
radius, and writes digits.png. Runs that are finished already are not trained again.

One seed shows how the tool is used; differences of a point or two are then chance.
docs/digits.png has `--seeds 3`.
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
from acert.report.drawing import Labelled, draw_contours, label_points

METHODS = {"acert": "ACERT", "fastibp": "FastIBP"}
# Blue and vermilion of Okabe and Ito, told apart by the colour-blind too; so are the markers.
COLORS = {"acert": "#0072B2", "fastibp": "#D55E00"}
MARKERS = {"acert": "o", "fastibp": "s"}


@dataclass(frozen=True)
class Point:
    """The networks of one method and kappa, one a seed, as certificates of the test set."""

    method: str
    kappa: float
    certificates: Sequence[Certificates]
    seconds: float

    def mean(self, figure: str) -> float:
        """Mean over the seeds of accuracy, acr or art, in percent."""
        return float(np.mean([100 * getattr(found, figure) for found in self.certificates]))

    def certified_accuracy(self, at: float) -> float:
        """Mean certified accuracy at a radius, in percent."""
        return float(np.mean([100 * found.certified_accuracy(at) for found in self.certificates]))


def trained(
    method: str, kappa: float, seed: int, epochs: int | None, out: Path
) -> tuple[Certificates, float]:
    """The certificates of one run and its seconds, in a process of its own."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    experiment = recipe("digits", method, kappa=kappa, seed=seed)
    if epochs is not None:
        experiment = with_epochs(experiment, epochs)
    folder = out / "runs" / f"{method}-k{kappa:g}-s{seed}-e{experiment.settings.epochs}"
    run = train_run(experiment, out=folder, resume=folder.exists(), progress=False)
    test_set = data.load_test("digits")
    certificates = certify(run.model, test_set, max_radius=experiment.settings.max_radius)
    record_certification(folder, certificates, test_set)
    return certificates, time.perf_counter() - began


def main() -> None:
    """Trains, prints the table and writes the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of runs and picture")
    parser.add_argument("--kappas", default="0,0.5,0.9", help="shares of standard loss")
    parser.add_argument(
        "--seeds", type=int, default=1, help="runs a point, of which it is the mean"
    )
    parser.add_argument("--epochs", type=int, help="other than the recipe's")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kappas = [float(kappa) for kappa in options.kappas.split(",")]

    points = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        calls = {
            (method, kappa): [
                pool.submit(trained, method, kappa, seed, options.epochs, options.out)
                for seed in range(options.seeds)
            ]
            for method in METHODS
            for kappa in kappas
        }
        for (method, kappa), runs in calls.items():
            results = [run.result() for run in runs]
            seconds = float(np.mean([seconds for _, seconds in results]))
            points.append(Point(method, kappa, [found for found, _ in results], seconds))
            if len(points) == 1:
                print(header(points[0]))
            print(row(points[-1]), flush=True)
    print(f"picture: {picture(points, options.out / 'digits.png')}")


def header(point: Point) -> str:
    """What the table shows, and its first line."""
    first = point.certificates[0]
    seeds = "" if len(point.certificates) == 1 else f"; means of {len(point.certificates)} seeds"
    return (
        f"digits: {len(first)} test images, radii proven in real arithmetic, largest "
        f"{first.max_radius:g}{seeds}\n{'method':<9}{'kappa':>6}{'Acc':>8}{'ACR':>8}{'ART':>8}"
        f"{f'cert@{first.max_radius / 3:.2g}':>11}{'s':>6}"
    )


def row(point: Point) -> str:
    """One line of the table."""
    third = point.certificates[0].max_radius / 3
    return (
        f"{METHODS[point.method]:<9}{point.kappa:6g}"
        + "".join(f"{point.mean(figure):8.2f}" for figure in ("accuracy", "acr", "art"))
        + f"{point.certified_accuracy(third):11.2f}{point.seconds:6.0f}"
    )


def picture(points: Sequence[Point], path: Path) -> Path:
    """Accuracy against ACR with lines of equal ART (Fig. 1), and certified accuracy (Fig. 3)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), dpi=160, layout="constrained")
    labels: list[Labelled] = []
    for method, name in METHODS.items():
        mine = sorted((p for p in points if p.method == method), key=lambda p: p.kappa)
        color, marker = COLORS[method], MARKERS[method]
        left.plot(
            [p.mean("acr") for p in mine], [p.mean("accuracy") for p in mine],
            color=color, marker=marker, markersize=8, label=name, zorder=3,
        )  # fmt: skip
        for point, style in zip(mine, ("-", "--", ":"), strict=False):
            label = f"\N{GREEK SMALL LETTER KAPPA} = {point.kappa:g}"
            labels.append(Labelled(label, point.mean("acr"), point.mean("accuracy"), 0, 0, color))
            if len(point.certificates) > 1:
                left.scatter(
                    [100 * found.acr for found in point.certificates],
                    [100 * found.accuracy for found in point.certificates],
                    color=color, marker=marker, s=14, alpha=0.35, linewidths=0,
                )  # fmt: skip
            # All seeds in one curve: its value is the mean of theirs.
            curve = metrics.certified_accuracy_curve(
                np.concatenate([found.radius for found in point.certificates]),
                np.concatenate([found.correct for found in point.certificates]),
                max_radius=point.certificates[0].max_radius,
            )
            right.step(
                curve.radius, 100 * curve.accuracy, style, where="pre", color=color,
                linewidth=1.8, label=f"{name}, {label}",
            )  # fmt: skip
    left.margins(x=0.22, y=0.15)  # room for the labels
    draw_contours(left, labels, size=8)
    left.set(
        xlabel="average certified radius (ACR), % of the largest", ylabel="accuracy, %",
        title="Accuracy against robustness",
    )  # fmt: skip
    left.legend(loc="center left", frameon=True)
    right.set(
        xlabel="l-infinity radius", ylabel="certified accuracy, %", ylim=(0, 101),
        xlim=(0, points[0].certificates[0].max_radius), title="Share of test images proven robust",
    )  # fmt: skip
    right.grid(alpha=0.3)
    right.legend(loc="best", frameon=True, fontsize=9)
    label_points(figure, left, labels, size=9)
    figure.savefig(path)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
