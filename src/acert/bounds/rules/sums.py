"""Running sums, differences, and variances along axes.

The sum of squared deviations from the mean is the least sum of squared distances from any one
number t. So for every t the largest distances bound it from above, by the sum of
(|c_i - t| + r_i)^2; at the best t that is the largest value in the box, or next to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from acert.bounds.interval import Interval
from acert.bounds.refusals import refuse
from acert.bounds.rounding import OWN_UNIT, REAL, own_gamma
from acert.bounds.rules.affine import averaged
from acert.bounds.rules.arithmetic import sub
from acert.bounds.rules.normalization import least_squares
from acert.bounds.rules.powers import sqrt
from acert.bounds.rules.shape import joining
from acert.bounds.table import Function, rule


@rule(torch.cumsum, torch.Tensor.cumsum, inplace=(torch.Tensor.cumsum_,), ulps=None)
def cumsum(input: Interval, dim: int, *, dtype: torch.dtype | None = None) -> Interval:
    if dtype not in (None, input.dtype):
        refuse(torch.cumsum, f"`dtype` must be that of its input; got {dtype}")
    summands = input.shape[dim] if input.ndim else 1
    return averaged(input, lambda x: x.cumsum(dim), summands=summands)


@rule(torch.diff, torch.Tensor.diff, ulps=None)
def diff(
    input: Interval, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None
) -> Interval:
    if n != 1:
        refuse(torch.diff, f"`n` must be 1; got {n}")
    parts = [part for part in (prepend, input, append) if part is not None]
    if len(parts) > 1:
        joined = joining(torch.cat)(parts, dim)
        input = joined.within(input.bound_pass)
    last = max(0, input.shape[dim] - 1)
    later, earlier = (
        input.map(lambda x, start=start: x.narrow(dim, start, last)).within(input.bound_pass)  # type: ignore[misc]
        for start in (min(1, input.shape[dim]), 0)
    )
    return sub(later, earlier)


def _most_squares(center: Tensor, radius: Tensor, *, safe: bool) -> Tensor:
    """The largest sum of squared deviations from the mean in the box, or a little more.

    It is at a corner. Only an element whose center is t pulls t to both sides, so that it counts
    for more than it can; the one that is nearest to that stands at its lower and its upper end.
    """
    distance = (center - _balance(center, radius)).abs()
    place = distance.argmin(-1, keepdim=True)
    middle, reach = center.gather(-1, place), radius.gather(-1, place)
    left = 4 * OWN_UNIT * (middle.abs() + reach) if safe else torch.zeros_like(reach)
    radius = radius.scatter(-1, place, left)
    ends = (middle - reach, middle + reach)
    squares = torch.maximum(*(_farthest(center.scatter(-1, place, end), radius) for end in ends))
    if not safe:
        return squares
    return squares * (1 + 2 * own_gamma(center.shape[-1])) + REAL.tiny * center.shape[-1]


def _farthest(center: Tensor, radius: Tensor) -> Tensor:
    """The sum of the largest squared distances from the best t."""
    distance = (center - _balance(center, radius)).abs() + radius
    return distance.square().sum(-1, keepdim=True)


def _balance(center: Tensor, radius: Tensor) -> Tensor:
    """The t of the least sum of largest squared distances, which are as far to either side.

    Half the slope falls by n between two centers, and by twice the radius at each.
    """
    places, order = center.sort(-1)
    below = radius.gather(-1, order).cumsum(-1)
    pull = torch.cat((torch.zeros_like(below[..., :1]), below), -1)
    roots = center.mean(-1, keepdim=True) + (below[..., -1:] - 2 * pull) / center.shape[-1]
    places = torch.cat((places, torch.full_like(places[..., :1], math.inf)), -1)
    return torch.minimum(roots, places).amax(-1, keepdim=True)


def _variance(
    input: Interval, dims: Sequence[int], *, correction: float, keepdim: bool
) -> Interval:
    """Bounds of the variance over `dims`; NaN where float32 may overflow."""
    axes = [dim % input.ndim for dim in dims]
    last = range(-len(axes), 0)
    center, radius = (
        part.movedim(axes, tuple(last)).flatten(-len(axes)) for part in input.as_ball()
    )
    count = center.shape[-1]
    rounding = input.rounding
    safe = rounding is not None
    share = 1 / (count - correction)
    low = least_squares(center, radius, safe=safe) * share
    high = _most_squares(center, radius, safe=safe) * share
    if rounding is not None:
        size = center.abs() + radius
        largest = size.amax(-1, keepdim=True)
        squares = size.square().sum(-1, keepdim=True) * (1 + 2 * own_gamma(count))
        # One pass, two, or running updates: see `_network_error` of norms.
        off = 8 * rounding.gamma(count) * squares + 8 * count * rounding.tiny * (1 + largest)
        off = off * (share * (1 + 8 * OWN_UNIT))
        low, high = low - off, high + off
        low, high = low - 8 * rounding.unit * low.abs(), high + 8 * rounding.unit * high.abs()
        low, high = low - 8 * rounding.tiny, high + 8 * rounding.tiny
        if rounding is REAL:  # exact variances are not negative
            low = low.relu()
        # Running updates multiply a squared difference by the number of elements.
        usable = 4 * max(1.0, share) * count**2 * largest.square() <= rounding.largest
        usable = usable & (rounding.gamma(count) <= 0.1)  # what `off` says is of first order
        low, high = (torch.where(usable, end, math.nan) for end in (low, high))
    kept = [1 if axis in axes else size for axis, size in enumerate(input.shape)]
    shape = kept if keepdim else [size for axis, size in enumerate(input.shape) if axis not in axes]
    return Interval(low.reshape(shape), high.reshape(shape)).within(input.bound_pass)


def _spread(function: Function, *, root: bool, mean: bool) -> Any:
    def spread(input: Interval, *args: Any, **kwargs: Any) -> Any:
        if not input.ndim:
            refuse(function, "it must have an axis")
        dims, correction, keepdim = _options(*args, **kwargs)
        dims = dims or range(input.ndim)
        count = math.prod([input.shape[dim] for dim in dims])
        if not count > correction >= 0:
            refuse(function, f"it must have more than {correction} elements a result; got {count}")
        output = _variance(input, dims, correction=correction, keepdim=keepdim)
        output = sqrt(output).within(input.bound_pass) if root else output
        if not mean:
            return output
        # Means by running updates are off by twice as much as those by one sum.
        return output, averaged(
            input, lambda x: x.mean(tuple(dims), keepdim=keepdim), summands=2 * count + 16
        )

    return spread


def _options(
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Sequence[int], float, bool]:
    """Axes, correction and `keepdim` of both forms: (dim, unbiased) and by `correction`."""
    if isinstance(dim, bool):  # the form without axes
        dim, unbiased = None, dim
    axes = dim if isinstance(dim, Sequence) else [] if dim is None else [dim]
    if correction is None:
        correction = 1 if unbiased is None or unbiased else 0
    return axes, correction, keepdim


for _name, _root, _mean in (
    ("var", False, False), ("std", True, False), ("var_mean", False, True),
    ("std_mean", True, True),
):  # fmt: skip
    _function = getattr(torch, _name)
    _spellings = [_function] if _mean else [_function, getattr(torch.Tensor, _name)]
    rule(*_spellings, ulps=None)(_spread(_function, root=_root, mean=_mean))
