"""Order statistics: sorting, the largest k, the k-th smallest, the median.

Each value rises with every element and is one of them, so that either end is the statistic of that
end. Which element it is depends on the point: indices are not certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from acert.bounds.interval import Interval
from acert.bounds.refusals import Uncertain, refuse
from acert.bounds.rules.maxima import Extremes
from acert.bounds.table import Function, rule


def _statistic(input: Interval, dim: int | None, function: Callable[[Tensor], Tensor]) -> Interval:
    """The statistic of both ends; NaN where any element it orders is unknown.

    NaN itself is sorted behind all numbers, and would leave ends of the others that do not hold.
    """
    lower, upper = input.ends()
    unknown = lower.isnan() | upper.isnan()
    unknown = unknown.any() if dim is None or not input.ndim else unknown.any(dim, keepdim=True)
    return Interval(*(function(end.masked_fill(unknown, math.nan)) for end in (lower, upper)))


@rule(torch.sort, torch.Tensor.sort, ulps=0)
def sort(
    input: Interval, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> Extremes:
    values = _statistic(input, dim, lambda x: torch.sort(x, dim=dim, descending=descending).values)
    return Extremes(values, Uncertain(torch.sort))


@rule(torch.msort, torch.Tensor.msort, ulps=0)
def msort(input: Interval) -> Interval:
    return _statistic(input, 0, torch.msort)


@rule(torch.topk, torch.Tensor.topk, ulps=0)
def topk(
    input: Interval, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Extremes:
    if not sorted:
        refuse(torch.topk, "`sorted` must be True: without it the order is not certain")
    values = _statistic(input, dim, lambda x: torch.topk(x, k, dim, largest).values)
    return Extremes(values, Uncertain(torch.topk))


@rule(torch.kthvalue, torch.Tensor.kthvalue, ulps=0)
def kthvalue(input: Interval, k: int, dim: int = -1, keepdim: bool = False) -> Extremes:
    values = _statistic(input, dim, lambda x: torch.kthvalue(x, k, dim, keepdim).values)
    return Extremes(values, Uncertain(torch.kthvalue))


@rule(torch.median, torch.Tensor.median, ulps=0)
def median(input: Interval, dim: int | None = None, keepdim: bool = False) -> Interval | Extremes:
    if dim is None:
        return _statistic(input, None, torch.median)
    values = _statistic(input, dim, lambda x: torch.median(x, dim, keepdim).values)
    return Extremes(values, Uncertain(torch.median))


def _indices(function: Function) -> Any:
    def indices(input: Interval, *args: Any, **kwargs: Any) -> Uncertain:
        return Uncertain(function)

    return indices


for _name in ("argmax", "argmin", "argsort"):
    _function = getattr(torch, _name)
    rule(_function, getattr(torch.Tensor, _name), ulps=0)(_indices(_function))
