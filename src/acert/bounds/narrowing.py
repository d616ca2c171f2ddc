"""CROWN's own bounds of activations: the inputs of curves cut to what a walk back knows of them.

A pass with `BoundPass(record=True, narrow=narrowed)` gives CROWN nearer lines, at the price of one
walk for every activation layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from acert.bounds.backward import BACKWARD, LOCAL, REACHING, RELAXED, SUMS
from acert.bounds.crown import walked_back
from acert.bounds.interval import Interval, cut, intervals_in
from acert.bounds.linear_bound import LinearBound
from acert.bounds.table import Function
from acert.errors import UnsupportedOperation

__all__ = ["narrowed"]

# Coefficients of one walk: fewer of them take more calls, which cost more on CUDA.
_COEFFICIENTS = {"cpu": 2**20, "cuda": 2**26}
# Elements of a tile: more of them see more of what is before, fewer take more calls. Whatever the
# batch is, because bounds must not depend on the samples beside one.
_TILES = {"cpu": 64, "cuda": 4096}


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
    lower, upper = (end.reshape(samples, -1) for end in interval.own_ends())
    wanted = relaxed(lower, upper)
    # Asked once, not for every tile: on CUDA the answer is waited for.
    asked = None if torch.compiler.is_compiling() else wanted.any(0).cpu()  # None: all of them
    places = torch.arange(lower.shape[1], device="cpu").reshape(interval.shape[1:])
    room = _COEFFICIENTS.get(lower.device.type, _COEFFICIENTS["cpu"]) // (2 * samples)
    largest, peak = _largest(interval), 0
    for start, stop in _tiles(interval, asked):
        tile = interval.cut(start, stop)
        inside = cut(places, start, stop).flatten()
        chosen = torch.arange(len(inside), device="cpu")
        if asked is not None:
            chosen = chosen[asked[inside]]
        while len(chosen):
            few, chosen = chosen.tensor_split([max(1, room // largest)])
            some, few = inside[few].to(lower.device), few.to(lower.device)
            unit = lower.new_zeros(len(few), len(inside)).scatter(1, few.unsqueeze(1), 1.0)
            rows = torch.cat((unit, -unit)).reshape(2 * len(few), *tile.shape[1:])
            bound = LinearBound(tile, rows.expand(samples, *rows.shape))
            above, below = walked_back(bound).chunk(2, dim=1)
            largest = peak = max(peak, bound.peak)
            # Not where other samples alone ask for it: a bound must not depend on those beside it.
            least, most, own = lower[:, some], upper[:, some], wanted[:, some]
            least = torch.where(own & (-below > least), -below, least)  # never a NaN of CROWN's
            most = torch.where(own & (above < most), above, most)
            # Plain bounds may cross by their rounding.
            lower.index_copy_(1, some, torch.minimum(least, most))
            upper.index_copy_(1, some, torch.maximum(least, most))
    return interval.between(lower.reshape(interval.shape), upper.reshape(interval.shape))


def _tiles(
    interval: Interval, asked: Tensor | None
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Where the parts begin and end whose elements are walked together, if any is asked for.

    Behind convolutions a few elements near each other see a small part of what is before them, and
    coefficients of the rest are 0. Nothing is cut elsewhere.
    """
    if asked is None or not _is_local(interval):  # compiled, every tile would be in the graph
        yield (), ()
        return
    channels, *sizes = interval.shape[1:]
    elements = _TILES.get(interval.device.type, _TILES["cpu"])
    edge = max(1, round((elements / channels) ** (1 / len(sizes))))
    places = asked.reshape(channels, *sizes).any(0).nonzero()  # often a small share of them
    for start in map(tuple, (places // edge * edge).unique(dim=0).tolist()):
        yield start, tuple(min(at + edge, size) for at, size in zip(start, sizes, strict=True))


def _is_local(interval: Interval) -> bool:
    """Whether its elements come out of windows over what is before them."""
    while interval.ndim > 2 and (source := interval.source) is not None:
        if source.rule not in LOCAL:
            return source.rule in REACHING
        interval = _inputs(interval)[0]
    return False


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
