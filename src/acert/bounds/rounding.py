"""Rounding-safe arithmetic: how much wider a bound must be so that it holds in floating point.

Bounds are then computed in float64. Two networks can be enclosed: the one in exact
arithmetic (`REAL`), and the one float32 hardware evaluates, in any order of summation
(`FLOAT32`). The standard model of rounding does the rest: a sum of n products is off by at
most gamma(n) = (n + 16) u / (1 - (n + 16) u) times the sum of their absolute values, where
16 spare roundings pay for the few operations around the sum, our own included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FLOAT32", "HALVES", "OWN_UNIT", "REAL", "ROUNDINGS", "Rounding"]

# What autocast may compute products in; everything else of a pass stays in float32.
HALVES = (torch.float16, torch.bfloat16)

OWN_UNIT = 2.0**-53  # unit roundoff of float64, in which every safe bound is computed
_SPARE = 16


@dataclass(frozen=True)
class Rounding:
    """What one evaluation of the enclosed network may be off by.

    `unit` is the unit roundoff, half an ulp of 1; `tiny` the smallest normal number (anything
    below may be flushed to zero); `largest` half the largest finite number: what stays below
    that in exact arithmetic cannot be rounded up to infinity on the way.
    """

    name: str
    unit: float
    tiny: float
    largest: float

    def gamma(self, summands: int) -> float:
        """Relative error of a sum of `summands` products; infinite where nothing can be said."""
        return _gamma(self.unit, summands)

    def underflow(self, summands: int, weight: Tensor | float, value: Tensor | float) -> Tensor:
        """Absolute error of `summands` products whose factors or results may be flushed to zero."""
        error = 2 * summands * self.tiny * (1 + weight + value)
        return torch.as_tensor(error, dtype=torch.float64)  # as float32 it could be 0

    def widen(
        self, radius: Tensor, magnitude: Tensor, *, ulps: float, gain: Tensor | float = 1.0
    ) -> Tensor:
        """`radius` plus `ulps` of `magnitude`; NaN where the network may overflow.

        An ulp is two units of roundoff, and one more pays for our own arithmetic. `gain` is the
        steepest slope of the operation: an input flushed to zero moves the result by that much.
        NaN rather than infinity, because no later operation makes a number of it again.
        """
        radius = torch.add(radius, magnitude, alpha=2 * (ulps + 1) * self.unit)
        slack = 16 * self.tiny * (1 + gain)
        radius = radius + slack if isinstance(slack, Tensor) else radius.add_(slack)
        return radius.masked_fill_(~(magnitude <= self.largest), math.nan)


def own_gamma(summands: int) -> float:
    """Relative error of our own float64 sums."""
    return _gamma(OWN_UNIT, summands)


def _gamma(unit: float, summands: int) -> float:
    error = (summands + _SPARE) * unit
    return error / (1 - error) if error < 0.5 else math.inf


def largest_magnitude(center: Tensor, radius: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Largest |x| of the box over `dims`, kept as axes of length 1."""
    return (center.abs() + radius).amax(dim=dims, keepdim=True)


_SINGLE = torch.finfo(torch.float32)
_DOUBLE = torch.finfo(torch.float64)
REAL = Rounding("real", OWN_UNIT, _DOUBLE.tiny, _DOUBLE.max / 2)
FLOAT32 = Rounding("float32", 2.0**-24, _SINGLE.tiny, _SINGLE.max / 2)
ROUNDINGS = {rounding.name: rounding for rounding in (REAL, FLOAT32)}
