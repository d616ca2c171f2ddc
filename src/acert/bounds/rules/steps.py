"""Functions that jump, or leave out a middle: signs, whole numbers, thresholds and shrinks.

The network's own number lies in the box, and these functions are exact. So the value at an end
is an end of the values, in floating point too, but for numbers that count as 0 there, and for
thresholds, which the network rounds: where it may see a number on either side, both sides count.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from acert.bounds.interval import Interval
from acert.bounds.refusals import refuse
from acert.bounds.rounding import Rounding
from acert.bounds.rules.elementwise import increasing
from acert.bounds.table import rule, unary


def _ends(input: Interval) -> tuple[Tensor, Tensor]:
    """Both ends, 0 among the numbers where one next to it may count as 0."""
    lower, upper = input.ends()
    if input.rounding is None:
        return lower, upper
    tiny = input.rounding.tiny
    return (
        torch.where((lower > 0) & (lower < tiny), 0.0, lower),
        torch.where((upper < 0) & (upper > -tiny), 0.0, upper),
    )


def _stepped(input: Interval, function: Callable[[Tensor], Tensor]) -> Interval:
    """Bounds of an exact function that never falls."""
    lower, upper = _ends(input)
    return Interval(function(lower), function(upper))


@unary("sign", "sgn", ulps=0)
def sign(input: Interval) -> Interval:
    # PyTorch's sign of NaN is 0.
    return _stepped(input, lambda x: torch.where(x.isnan(), x, x.sign()))


@unary("floor", ulps=0)
def floor(input: Interval) -> Interval:
    return _stepped(input, torch.floor)


@unary("ceil", ulps=0)
def ceil(input: Interval) -> Interval:
    return _stepped(input, torch.ceil)


@unary("trunc", "fix", ulps=0)
def trunc(input: Interval) -> Interval:
    return _stepped(input, torch.trunc)


@unary("round", ulps=0)
def to_whole(input: Interval, *, decimals: int = 0) -> Interval:
    if decimals:  # kernels multiply by a power of ten first
        refuse(torch.round, f"`decimals` must be 0; got {decimals}")
    return _stepped(input, torch.round)


@unary("frac", ulps=0)
def frac(input: Interval) -> Interval:
    """It rises between whole numbers, and falls back to 0 at each but 0 itself."""
    lower, upper = input.ends()
    jumps = lower.trunc() != upper.trunc()
    return Interval(
        torch.where(jumps, lower.clamp(-1.0, 0.0), lower.frac()),
        torch.where(jumps, upper.clamp(0.0, 1.0), upper.frac()),
    )


def _either_side(threshold: float, rounding: Rounding | None) -> tuple[float, float]:
    """Between these numbers the network may take x for one on either side of the threshold."""
    if rounding is None:
        return threshold, threshold
    off = 2 * (rounding.unit * abs(threshold) + rounding.tiny)
    return (threshold - off if threshold else 0.0), threshold + off


@rule(F.threshold, torch.threshold, inplace=(torch.threshold_,), ulps=0)
def threshold(input: Interval, threshold: float, value: float) -> Interval:
    """Numbers above the threshold stay, `value` replaces others: each end is that of either."""
    lower, upper = input.ends()
    first, last = _either_side(threshold, input.rounding)
    low = high = value
    if input.rounding is not None and value:
        off = 2 * input.rounding.unit * abs(value) + input.rounding.tiny
        known = abs(value) <= input.rounding.largest
        low, high = (value - off, value + off) if known else (math.nan, math.nan)
    replaced, passed = lower <= last, upper > first
    least = torch.where(passed, lower.clamp(min=first), math.inf)
    most = torch.where(passed, upper, -math.inf)
    least = torch.where(replaced, least.clamp(max=low), least)
    most = torch.where(replaced, most.clamp(min=high), most)
    unknown = lower.isnan() | upper.isnan()  # which a comparison makes numbers of
    return Interval(least.masked_fill(unknown, math.nan), most.masked_fill(unknown, math.nan))


@rule(F.hardshrink, torch.hardshrink, torch.Tensor.hardshrink, ulps=0)
def hardshrink(input: Interval, lambd: float = 0.5) -> Interval:
    """0 between -lambd and lambd, x elsewhere: the lower end takes what makes it less."""
    lower, upper = input.ends()
    # One below 0 leaves x as it is, and so does 0.
    first, last = (max(side, 0.0) for side in _either_side(lambd, input.rounding))
    return Interval(
        lower.masked_fill((lower >= -first) & (lower <= last), 0.0),
        upper.masked_fill((upper >= -last) & (upper <= first), 0.0),
    )


@rule(F.softshrink, torch._C._nn.softshrink, ulps=4)
def softshrink(input: Interval, lambd: float = 0.5) -> Interval:
    if lambd < 0:
        refuse(F.softshrink, f"`lambd` must be 0 or above; got {lambd}")
    # Where lambd is more than the numbers of the box, so is its rounding, but the result is 0.
    return increasing(input, lambda x: F.softshrink(x, lambd))


@rule(F.tanhshrink, ulps=8)
def tanhshrink(input: Interval) -> Interval:
    # x - tanh(x) cancels near 0: it is off by ulps of x.
    return increasing(input, F.tanhshrink)
