"""Regularisers of the warm-up: tight bounds and balanced ReLUs. Boxes in, scalar out.

Both look at the boxes that enter the ReLUs and are averaged over them; where several processes
hold a `part` of the batch each, means and sums are those of the whole. Denominators are
guarded before the division: a NaN that is only masked afterwards still poisons the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acert.bounds import Interval
from acert.processes import Part

__all__ = ["l1_norm", "relu_balance", "tightness"]

_TAU = 0.5
_SMALLEST = 1e-30


def tightness(
    first: Interval, relu_inputs: Sequence[Interval], *, part: Part | None = None
) -> Tensor:
    """relu(tau - r0 / ri) / tau, averaged over the ReLUs: boxes should not outgrow the input's.

    r0 is the mean radius at the first layer, behind the normalisation and after clamping; ri
    that at the input of ReLU i.
    """
    # Not `mean`, whose gradient is a tensor of its own in the default layout: added to the rest, it
    # would turn the gradients of channels-last convolutions.
    means = torch.stack([_radii(box) / box.numel() for box in (first, *relu_inputs)])
    if part is not None:
        means = part.total(part.share * means)
    start, here = means[0], means[1:]
    return (F.relu(_TAU - start / here.clamp(min=_SMALLEST)) / _TAU).mean()


def relu_balance(relu_inputs: Sequence[Interval], *, part: Part | None = None) -> Tensor:
    """relu(tau - rho) / tau for the balance of means and of variances, averaged over the ReLUs.

    rho compares what the surely active neurons hold with what the surely inactive ones do: the
    smaller over the larger. A ReLU with neither has nothing to balance and adds 0.
    """
    sums = torch.stack([_sums(box) for box in relu_inputs])
    share = 1.0
    if part is not None:
        sums, share = part.total(sums), part.share
    terms = []
    for box, (whole, on, off, on_square, off_square, on_count, off_count) in zip(
        relu_inputs, sums, strict=True
    ):
        mean = whole * (share / box.numel())
        # Sums of (center - mean)^2: multiplied out, one look at the activations serves them all.
        on_spread = on_square - 2 * mean * on + mean.square() * on_count
        off_spread = off_square - 2 * mean * off + mean.square() * off_count
        terms += [_imbalance(on, -off), _imbalance(on_spread, off_spread)]
    return torch.stack(terms).sum() / len(relu_inputs)


def _sums(box: Interval) -> Tensor:
    """Of the centers: their sum, then sums, sums of squares and counts of the on and the off."""
    if box.scaled is not None and box.scaled.sums is not None:
        return box.scaled.sums[:-1]
    center = box.center
    lower, upper = box.ends()
    active, inactive = (lower > 0).to(center.dtype), (upper < 0).to(center.dtype)
    on, off = center * active, center * inactive
    values = (center, on, off, on * center, off * center, active, inactive)
    return torch.stack([_total(value) for value in values])


def _radii(box: Interval) -> Tensor:
    """Their sum."""
    if box.scaled is not None and box.scaled.sums is not None:
        return box.scaled.sums[-1]
    return _total(box.radius)


def _total(values: Tensor) -> Tensor:
    """Their sum, which half precision could not hold."""
    return values.sum(dtype=torch.promote_types(values.dtype, torch.float32))


def _imbalance(one: Tensor, other: Tensor) -> Tensor:
    smaller, larger = torch.minimum(one, other), torch.maximum(one, other)
    rho = smaller / larger.clamp(min=_SMALLEST)
    return F.relu(_TAU - rho) / _TAU * (larger > _SMALLEST)


def l1_norm(model: nn.Module) -> Tensor:
    """Sum of |W| over all weights of two or more axes: those of convolutions and linear layers."""
    parameters = list(model.parameters())
    weights = [parameter.abs().sum() for parameter in parameters if parameter.ndim > 1]
    return torch.stack(weights).sum() if weights else parameters[0].new_zeros(())
