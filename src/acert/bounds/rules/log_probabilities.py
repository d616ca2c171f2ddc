"""Logarithms of sums of exponentials, and of probabilities.

log p_i = x_i - log sum_j e^x_j rises with x_i and falls with every other x_j, as p_i itself: each
end is reached at a corner. A log of the bounds of softmax would be minus infinity where p_i
underflows, which log p_i does not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acert.bounds.interval import Interval
from acert.bounds.refusals import refuse
from acert.bounds.rules.attention import error_of_shares
from acert.bounds.table import Function, rule


@rule(torch.logsumexp, torch.Tensor.logsumexp, torch.special.logsumexp, ulps=None)
def logsumexp(input: Interval, dim: int | tuple[int, ...], keepdim: bool = False) -> Interval:
    axes = (dim,) if isinstance(dim, int) else tuple(dim)
    if not axes:
        refuse(torch.logsumexp, "`dim` must name an axis; got ()")
    lower, upper = (_last(end, axes) for end in input.ends())
    ends = [end.logsumexp(-1) for end in (lower, upper)]
    rounding = input.rounding
    if rounding is not None:
        # The logarithm is off by the share of the sum; its own rounding and that of the largest
        # x, which is added to it, are no more than a spare part of it.
        share = error_of_shares(lower, upper, rounding).squeeze(-1)
        off = (share + 16 * lower.shape[-1] * rounding.tiny).masked_fill(share > 0.1, math.nan)
        ends = [ends[0] - off, ends[1] + off]
    if keepdim:
        shape = [*input.shape]
        for axis in axes:
            shape[axis] = 1
        ends = [end.reshape(shape) for end in ends]
    return Interval(*ends)


def _last(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The axes as one, behind the others."""
    return x.movedim(axes, tuple(range(-len(axes), 0))).flatten(-len(axes))


def _ends(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Both ends of the log-probabilities over the last axis: -log(1 + sum_j e^(x_j - x_i))."""
    count = lower.shape[-1]
    # Sums over the others, one by one: the whole less one's own would cancel.
    others = 1 - torch.eye(count, dtype=lower.dtype, device=lower.device)
    tiny = torch.finfo(lower.dtype).tiny  # of a sum that underflows, for the logarithm
    ends = []
    for own, rest in ((lower, upper), (upper, lower)):
        # A shift changes nothing, nor do gradients.
        top = rest.detach().amax(-1, keepdim=True)
        total = ((rest - top).exp() @ others).to(own.dtype)
        ends.append(F.logsigmoid(own - top - (total + tiny).log()))
    return ends[0], ends[1]


def _log_softmax(function: Function, input: Interval, dim: Any, dtype: Any) -> Interval:
    if dim is None:
        refuse(function, "`dim` must be given; got None")
    if dtype not in (None, torch.float32, torch.float64):
        refuse(function, f"it must not lose precision; got {dtype}")
    lower, upper = (end.movedim(dim, -1) for end in input.ends())
    least, most = _ends(lower, upper)
    rounding = input.rounding
    if rounding is not None:
        # As of the logarithm of the sum, and the roundings of x_i - max and of the result.
        share = error_of_shares(lower, upper, rounding)
        reach = torch.maximum(lower.abs(), upper.abs())
        met = reach + torch.maximum(least.abs(), most.abs())
        off = share + 16 * (rounding.unit * met + lower.shape[-1] * rounding.tiny)
        off = off.masked_fill(~((share <= 0.1) & (reach <= rounding.largest)), math.nan)
        least, most = least - off, most + off
    return Interval(least.movedim(-1, dim), most.movedim(-1, dim))


@rule(F.log_softmax, ulps=None)
def log_softmax(
    input: Interval, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Interval:
    return _log_softmax(F.log_softmax, input, dim, dtype)


@rule(torch.log_softmax, torch.Tensor.log_softmax, torch.special.log_softmax, ulps=None)
def log_softmax_function(
    input: Interval, dim: int | None = None, dtype: torch.dtype | None = None
) -> Interval:
    return _log_softmax(torch.log_softmax, input, dim, dtype)
