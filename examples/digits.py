"""Train a small network for certified radii on scikit-learn's digits, certify its test set.

    python examples/digits.py [--out demo] [--epochs 40]

Prints accuracy, ACR and ART with the certified accuracy at a few radii, and writes
certified_accuracy.png. Two networks are compared: one trained on the clean loss alone, one at
each sample's own certified radius (Eq. 9, kappa = 0.25), found by two root steps.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acert
from acert import data, metrics
from acert.schedules import OneCycle, SmoothRadius

MAX_RADIUS = 0.1
BATCH = 64


def adaptive_loss(model: nn.Module, images: Tensor, labels: Tensor, cap: float) -> Tensor:
    """The robust loss of Eq. 9: cross entropy at each sample's own radius, at most `cap`."""
    with torch.no_grad():

        def margin(radius: Tensor) -> Tensor:
            return acert.certified_margin(model, images, labels, radius)

        zero = torch.zeros(len(images))
        radius = acert.Brent(max_steps=2).solve(margin, zero, zero + cap).estimate
    return F.cross_entropy(acert.worst_case_logits(model, images, labels, radius), labels)


def train(images: Tensor, labels: Tensor, *, kappa: float, epochs: int) -> nn.Module:
    """A small network trained with the share `kappa` of standard loss (Eq. 11)."""
    torch.manual_seed(0)
    model = acert.models.ibp_init_(acert.models.small_cnn((1, 8, 8), 10))
    steps = len(images) // BATCH
    cap = SmoothRadius(start_epoch=2, length=epochs // 2)
    rate = OneCycle(max_rate=5e-3)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(epochs * steps):
        if step % steps == 0:
            order = torch.randperm(len(images))
        batch = order[step % steps * BATCH :][:BATCH]
        optimizer.param_groups[0]["lr"] = rate.rate(step, steps_per_epoch=steps, epochs=epochs)
        loss = kappa * F.cross_entropy(model(images[batch]), labels[batch])
        if kappa < 1:
            at_most = cap.cap(step, max_radius=MAX_RADIUS, steps_per_epoch=steps)
            loss = loss + (1 - kappa) * adaptive_loss(model, images[batch], labels[batch], at_most)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    """Runs both trainings, prints the table and writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the plot")
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    train_set = data.load("digits", train_on_all=True).train
    test_set = data.load_test("digits")
    images, labels = test_set.images, test_set.labels
    curves = {}
    print(f"{len(images)} test images, max_radius {MAX_RADIUS}, radii proven in real arithmetic")
    print(f"{'training':<22}{'Acc':>7}{'ACR':>7}{'ART':>7}{'cert@.02':>10}{'cert@.05':>10}{'s':>6}")
    for name, kappa in (("standard", 1.0), ("adaptive, kappa 0.25", 0.25)):
        start = time.perf_counter()
        model = train(train_set.images, train_set.labels, kappa=kappa, epochs=options.epochs)
        result = acert.certified_radius(model, images, labels, max_radius=MAX_RADIUS)
        correct = result.status != acert.Status.MISCLASSIFIED
        accuracy = metrics.accuracy(correct)
        acr = metrics.acr(result.value, max_radius=MAX_RADIUS)
        certified = [
            metrics.certified_accuracy(result.value, correct, at=radius) for radius in (0.02, 0.05)
        ]
        row = [100 * figure for figure in (accuracy, acr, metrics.art(accuracy, acr))]
        print(
            f"{name:<22}{row[0]:7.2f}{row[1]:7.2f}{row[2]:7.2f}"
            f"{100 * certified[0]:10.2f}{100 * certified[1]:10.2f}"
            f"{time.perf_counter() - start:6.1f}"
        )
        curves[name] = metrics.certified_accuracy_curve(
            result.value, correct, max_radius=MAX_RADIUS
        )
    print(f"plot: {plot(curves, options.out / 'certified_accuracy.png')}")


def plot(curves: dict[str, metrics.Curve], path: Path) -> Path:
    """Certified accuracy against the radius; the area under a curve is its ACR (Figure 3)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
    for (name, curve), style in zip(curves.items(), ("--", "-"), strict=True):
        axes.step(curve.radius, 100 * curve.accuracy, style, where="pre", label=name, linewidth=2)
    axes.set(
        xlabel="l-infinity radius", ylabel="certified accuracy, %", ylim=(0, 101),
        xlim=(0, MAX_RADIUS), title="Digits: share of test images proven robust",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
