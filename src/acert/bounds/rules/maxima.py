"""The larger and the smaller of several: pooling by maximum, extremes of axes and of two tensors.

All of them rise with each element and move numbers as they are, so that either end is what the
operation makes of that end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from acert.bounds.interval import Interval
from acert.bounds.refusals import Uncertain, refuse
from acert.bounds.rules.arithmetic import Operand
from acert.bounds.rules.elementwise import increasing
from acert.bounds.rules.shape import ends_of
from acert.bounds.table import Function, rule


def _pooling(function: Callable[..., Tensor]) -> Any:
    def pooling(input: Interval, *args: Any, **kwargs: Any) -> Interval:
        return increasing(input, lambda x: function(x, *args, **kwargs))

    return pooling


def _with_indices(function: Callable[..., Tensor]) -> Any:
    def with_indices(*args: Any, **kwargs: Any) -> Interval:
        refuse(function, "`return_indices` must be False: the indices are not certain")

    return with_indices


for _indices, _values in (
    (F.max_pool1d_with_indices, F.max_pool1d),
    (F.max_pool2d_with_indices, F.max_pool2d),
    (F.max_pool3d_with_indices, F.max_pool3d),
    (F.adaptive_max_pool1d_with_indices, F.adaptive_max_pool1d),
    (F.adaptive_max_pool2d_with_indices, F.adaptive_max_pool2d),
    (F.adaptive_max_pool3d_with_indices, F.adaptive_max_pool3d),
):
    rule(_indices, ulps=0)(_with_indices(_values))
rule(F.max_pool1d, torch.max_pool1d, ulps=0)(_pooling(F.max_pool1d))
rule(F.max_pool2d, torch.max_pool2d, ulps=0)(_pooling(F.max_pool2d))
rule(F.max_pool3d, torch.max_pool3d, ulps=0)(_pooling(F.max_pool3d))
for _pool in (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d):
    rule(_pool, ulps=0)(_pooling(_pool))


def _of_axes(function: Callable[..., Tensor]) -> Any:
    def of_axes(input: Interval, dim: Any = (), keepdim: bool = False) -> Interval:
        return increasing(input, lambda x: function(x, dim=dim, keepdim=keepdim))

    return of_axes


rule(torch.amax, torch.Tensor.amax, ulps=0)(_of_axes(torch.amax))
rule(torch.amin, torch.Tensor.amin, ulps=0)(_of_axes(torch.amin))


def _of_two(function: Callable[..., Tensor]) -> Any:
    def of_two(input: Operand, other: Operand) -> Interval:
        lower, upper = ends_of(input, other)
        return Interval(function(*lower), function(*upper))

    return of_two


class Extremes(NamedTuple):
    """What `torch.max` returns for an axis."""

    values: Interval
    indices: Uncertain


def _of_either(function: Function, along: Any, of_two: Any) -> Any:
    """`torch.max` and `torch.min`: of two tensors, along an axis, or of all elements."""

    def of_either(input: Operand, *args: Any, **kwargs: Any) -> Any:
        if "other" in kwargs or (args and isinstance(args[0], (Tensor, Interval))):
            return of_two(input, *args, **kwargs)
        if not isinstance(input, Interval):
            refuse(function, "its first argument must depend on the model's input")
        if not args and not kwargs:
            return along(input)
        return Extremes(along(input, *args, **kwargs), Uncertain(function))

    return of_either


for _both, _along, _either in (
    ((torch.maximum, torch.Tensor.maximum), torch.amax, (torch.max, torch.Tensor.max)),
    ((torch.minimum, torch.Tensor.minimum), torch.amin, (torch.min, torch.Tensor.min)),
):
    _two = rule(*_both, ulps=0, mixed=True)(_of_two(_both[0]))
    rule(*_either, ulps=0, mixed=True)(_of_either(_either[0], _of_axes(_along), _two))
