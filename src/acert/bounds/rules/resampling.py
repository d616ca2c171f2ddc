"""Images made larger or smaller, `F.interpolate` and `nn.Upsample`, or put together of patches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from acert.bounds.interval import Interval
from acert.bounds.refusals import refuse
from acert.bounds.rules.affine import averaged, sizes_of
from acert.bounds.table import RULES, rule

_POOLS = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)


@rule(F.interpolate, ulps=None)
def interpolate(
    input: Interval,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Interval:
    def resampled(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size, scale_factor, mode, align_corners, recompute_scale_factor)

    if antialias:
        refuse(F.interpolate, "antialias=True has no bound rule; `antialias=False` has one")
    old = input.shape[2:]
    new = resampled(torch.empty(1, 1, *old, device="meta")).shape[2:]
    if not math.prod(new):
        refuse(F.interpolate, f"it must leave some elements; got the size {tuple(new)}")
    if mode == "area":
        output: Interval = RULES[_POOLS[len(old) - 1]].rule(input, new)
        return output
    if mode.startswith("nearest"):
        factors = sizes_of(None if recompute_scale_factor else scale_factor, len(old))
        for count, wanted, factor in zip(old, new, factors, strict=True):
            if not _picks_agree(count, wanted, factor, exact=mode != "nearest"):
                refuse(
                    F.interpolate,
                    f"mode={mode!r} picks other elements in float32 than in float64 where "
                    f"{count} become {wanted}; `mode='bilinear'` has bounds",
                )
        return input.map(resampled)
    center, radius = input.as_ball()
    cubic = mode == "bicubic"
    if cubic:  # some of its weights are negative
        rows, columns = (_weights(resampled, radius, axis).abs() for axis in (0, 1))
        radius = rows @ radius @ columns.mT
    else:
        radius = resampled(radius)
    center = resampled(center)
    rounding = input.rounding
    if rounding is not None:
        # Where a network looks for a new element is off by a few roundings of the last place of an
        # axis, and the result by as much times the difference of two neighbours. Of a cubic four
        # weights change by up to 4.2 times as much, and those of the other axis add up to 1.4.
        largest = input.magnitude.amax(tuple(range(2, input.ndim)), keepdim=True)
        ulps = (24 if cubic else 16) * (sum(old) + sum(new)) + (128 if cubic else 64)
        radius = rounding.widen(radius, largest.expand_as(radius), ulps=ulps)
    return Interval.ball(center, radius)


def _weights(
    resampled: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor, axis: int
) -> torch.Tensor:
    """What each element along an axis of an image contributes to each new one, (new, old)."""
    count = like.shape[2 + axis]
    unit = torch.eye(count, dtype=like.dtype, device=like.device)
    shape = (count, 1, *(count if at == axis else 1 for at in (0, 1)))
    # Alike along the other axis, where weights add up to 1.
    images = unit.reshape(shape).expand(count, 1, *like.shape[2:])
    return resampled(images)[:, 0].select(2 - axis, 0).mT


@rule(F.fold, ulps=None)
def fold(
    input: Interval, output_size: Any, kernel_size: Any, *args: Any, **kwargs: Any
) -> Interval:
    return averaged(
        input,
        lambda x: F.fold(x, output_size, kernel_size, *args, **kwargs),
        summands=math.prod(sizes_of(kernel_size, 2)),
    )


def _picks_agree(count: int, wanted: int, factor: float | None, *, exact: bool) -> bool:
    """Whether float32 and float64 take the same of `count` elements for each of `wanted`.

    PyTorch computes the place of the one to take in the precision of the images.
    """
    if factor is not None and wanted in (count, 2 * count) and factor != wanted / count:
        return False  # some kernels see a copy, or each element twice, and do not ask the factor
    shift = 0.5 if exact else 0.0
    double = count / wanted if factor is None else 1 / factor
    single = _single(double)
    for place in range(wanted):
        found = (place + shift) * double
        # The float64 kernel of a CPU rounds the place to float32 too before it cuts the fraction.
        picks = {math.floor(_single((place + shift) * single)), math.floor(_single(found))}
        if picks != {math.floor(found)}:
            return False
    return True


def _single(number: float) -> float:
    """The float32 next to a number of ordinary size; torch.compile knows no other way to it."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(math.ldexp(mantissa, 24)), exponent - 24)
