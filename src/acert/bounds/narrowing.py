"""CROWN's own bounds of activations: the inputs of curves cut to what a walk back knows of them.

A pass with `BoundPass(record=True, narrow=narrowed)` gives CROWN nearer lines, at the price of one
walk for every activation layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from acert.bounds.backward import BACKWARD, RELAXED, SUMS
from acert.bounds.crown import walked_back
from acert.bounds.interval import Interval, intervals_in
from acert.bounds.linear_bound import LinearBound
from acert.bounds.table import Function
from acert.errors import UnsupportedOperation

__all__ = ["narrowed"]

# Coefficients of one walk: fewer of them take more calls, which cost more on CUDA.
_COEFFICIENTS = {"cpu": 2**22, "cuda": 2**26}


def narrowed(interval: Interval, rule: Function) -> Interval:
    """`interval` cut to CROWN's bounds of its elements, where the operation `rule` relaxes them.

    Both enclose what the network computes, so what they have in common does. Nothing is done
    where intervals are exact, or where the operation is a line. Nor behind an operation that has no
    way back: the walk from the logits names it, if they depend on it.
    """
    relaxed = RELAXED.get(rule)
    if relaxed is None or not interval.ndim or _is_exact(interval):
        return interval
    try:
        return _cut(interval, relaxed)
    except UnsupportedOperation:
        return interval


def _cut(interval: Interval, relaxed: Callable[[Tensor, Tensor], Tensor]) -> Interval:
    """`interval` where `relaxed` says that a narrower one helps, cut by walks from there."""
    samples = len(interval)
    lower, upper = (end.reshape(samples, -1) for end in interval.ends())
    wanted = relaxed(lower, upper)
    chosen = torch.arange(lower.shape[1], device=lower.device)
    if not torch.compiler.is_compiling():  # where all of them are taken: numbers are not known yet
        chosen = chosen[wanted.any(0)]
    room = _COEFFICIENTS.get(lower.device.type, _COEFFICIENTS["cpu"])
    at_once = max(1, room // (2 * samples * _largest(interval)))
    for start in range(0, len(chosen), at_once):
        some = chosen[start : start + at_once]
        unit = lower.new_zeros(len(some), lower.shape[1]).scatter(1, some.unsqueeze(1), 1.0)
        rows = torch.cat((unit, -unit)).reshape(2 * len(some), *interval.shape[1:])
        bound = LinearBound(interval, rows.expand(samples, *rows.shape))
        above, below = walked_back(bound).chunk(2, dim=1)
        # Not where other samples alone ask for it: a bound must not depend on those beside it.
        least, most, own = lower[:, some], upper[:, some], wanted[:, some]
        least = torch.where(own & (-below > least), -below, least)  # never a NaN of CROWN's
        most = torch.where(own & (above < most), above, most)
        # Plain bounds may cross by their rounding.
        lower = lower.index_copy(1, some, torch.minimum(least, most))
        upper = upper.index_copy(1, some, torch.maximum(least, most))
    return interval.between(lower.reshape(interval.shape), upper.reshape(interval.shape))


def _is_exact(interval: Interval) -> bool:
    """Whether intervals lose nothing on the way to each element.

    It is one sum over the box, or a curve whose input was narrowed, moved or scaled since. Or next
    to nothing, where padding repeats elements inside of a sum.
    """
    sums = 0
    while (source := interval.source) is not None:
        inputs = _inputs(interval)
        if source.rule in RELAXED:
            return sums == 0
        sums += source.rule in SUMS
        if source.rule not in BACKWARD or len(inputs) != 1 or sums > 1:
            return False
        interval = inputs[0]
    return True


def _largest(interval: Interval) -> int:
    """Elements a sample of the largest interval on the way back to the box."""
    largest, ahead, seen = 1, [interval], set()
    while ahead:
        interval = ahead.pop()
        largest = max(largest, interval.numel() // len(interval))
        if interval.source is not None and interval.source.step not in seen:
            seen.add(interval.source.step)
            ahead.extend(_inputs(interval))
    return largest


def _inputs(interval: Interval) -> list[Interval]:
    """The intervals that the call took which this one came out of."""
    assert interval.source is not None
    return list(intervals_in((interval.source.arguments, [*interval.source.keywords.values()])))
