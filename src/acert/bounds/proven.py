"""The certified margin (Eq. 3) with rounding-safe bounds: what a proof evaluates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from acert.bounds.bound_pass import Kept
from acert.bounds.checks import Domain
from acert.bounds.interval import Interval
from acert.bounds.margin import (
    bounding,
    box,
    margin,
    plain_worst_case,
    tighter_differences,
    upper_differences,
)
from acert.bounds.propagation import propagate
from acert.bounds.rounding import OWN_UNIT, Rounding

__all__ = ["proven_margin"]


def proven_margin(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    radius: Tensor,
    *,
    rounding: Rounding | None,
    elide: bool = True,
    domain: Domain = (0.0, 1.0),
    bounds: str = "ibp",
    fold: bool = False,
    kept: dict[int, Kept] | None = None,
) -> Tensor:
    """The certified margin with rounding-safe bounds, in float64; +inf where nothing is proven.

    `images` and `radius` are float64 and checked already. Without `rounding` it is the plain
    margin of any precision. `fold` and `kept` make passes cheaper: see `BoundPass`.
    """
    start = box(images, radius, domain, rounding=rounding)
    bound_pass = bounding(bounds, rounding=rounding, fold=fold, kept=kept)
    output = propagate(model, start.within(bound_pass))
    value = _margin(output, labels, elide=elide, bounds=bounds)
    return value.masked_fill(~value.isfinite(), torch.inf)


def _margin(output: Interval, labels: Tensor, *, elide: bool, bounds: str) -> Tensor:
    """The certified margin (Eq. 3), as safe against rounding as the pass."""
    if elide:
        worst_case = upper_differences(output, labels)
    elif output.rounding is None:
        worst_case = plain_worst_case(output, labels)
    else:
        worst_case = _lifted(output, labels)
    if bounds != "ibp":
        worst_case = tighter_differences(output, labels, worst_case)
    return margin(worst_case, labels)


def _lifted(output: Interval, labels: Tensor) -> Tensor:
    """Plain worst-case logits, raised by the rounding of the subtraction that follows."""
    worst_case = plain_worst_case(output, labels)
    size = worst_case.abs()
    slack = 4 * OWN_UNIT * (size + size.gather(1, labels.unsqueeze(1)))
    own = torch.nn.functional.one_hot(labels, worst_case.shape[1]).bool()
    return torch.where(own, worst_case, worst_case + slack)
