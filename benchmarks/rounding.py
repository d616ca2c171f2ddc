"""What safety against rounding costs: ACR of a digits network, plain and proven.

    python benchmarks/rounding.py [--epochs 30]

Trains a small convolutional network on scikit-learn's digits for certified radii, then certifies
its 359 test images three times: plainly in float64, for exact arithmetic and for float32.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acert
from acert import data, metrics

MAX_RADIUS = 0.1
BATCH = 64
# Searched far beyond the default tolerance, or that would hide what "real" costs.
SOLVER = acert.Brent(xtol=1e-15, rtol=1e-13)
ARITHMETICS = ("nearest", "real", "float32")


class Cost(NamedTuple):
    """ACR in percent, the largest relative loss of one radius above 0.01, and seconds."""

    acr: float
    worst_loss: float
    seconds: float


def trained(*, epochs: int) -> nn.Sequential:
    """A small convolutional network, trained at a radius that grows to MAX_RADIUS / 2."""
    torch.manual_seed(0)
    split = data.load("digits", train_on_all=True).train
    model = acert.models.ibp_init_(acert.models.small_cnn((1, 8, 8)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        radius = 0.5 * MAX_RADIUS * min(1.0, 2 * epoch / epochs)
        for batch in torch.split(torch.randperm(len(split)), BATCH):
            images, labels = split.images[batch], split.labels[batch]
            worst_case = acert.worst_case_logits(model, images, labels, radius)
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(worst_case, labels))
            optimizer.step()
    return model.eval()


def costs(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Cost]:
    """What each arithmetic leaves of the plain radii."""
    found: dict[str, Cost] = {}
    plain = None
    for arithmetic in ARITHMETICS:
        start = time.perf_counter()
        radius = acert.certified_radius(
            model, images, labels, max_radius=MAX_RADIUS, arithmetic=arithmetic, solver=SOLVER
        ).value
        seconds = time.perf_counter() - start
        plain = radius if plain is None else plain
        large = plain > 0.01
        loss = (1 - radius[large] / plain[large]).max().item() if large.any() else 0.0
        acr = 100 * metrics.acr(radius, max_radius=MAX_RADIUS)
        found[arithmetic] = Cost(acr, loss, seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the order of sums decides what is learnt
    model = trained(epochs=options.epochs)
    split = data.load_test("digits")
    print(f"{len(split)} test images, max_radius {MAX_RADIUS}")
    print(f"{'arithmetic':<12}{'ACR, %':>12}{'worst loss of a radius':>26}{'s':>8}")
    for arithmetic, cost in costs(model, split.images, split.labels).items():
        print(f"{arithmetic:<12}{cost.acr:12.5f}{cost.worst_loss:26.2e}{cost.seconds:8.2f}")


if __name__ == "__main__":
    main()
