"""Powers: of the input to a number, of a number to the input, and roots.

x^p = e^(p log x) of positive x. Some kernels compute it that way, and round the exponent.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from acert.bounds.interval import Interval, constant
from acert.bounds.refusals import refuse
from acert.bounds.rules.arithmetic import reciprocal
from acert.bounds.rules.elementwise import EXP_ULPS, increasing, positive, relative, valley
from acert.bounds.table import rule

# Beyond it e^x is 0 or infinite in float64 as well.
_LARGEST_EXPONENT = 1000.0


def exponential(
    input: Interval, lower: Tensor, upper: Tensor, *, exponents: tuple[Tensor, Tensor]
) -> Interval:
    """Bounds of what lies between `lower` and `upper`, each an e^x of one of the `exponents`.

    An x off by a share of itself moves e^x by x times that share: e^x (1 - c|x|) rises with x. It
    is a logarithm times a number: 8 ulps, 16 units, and two roundings.
    """
    if input.rounding is not None:
        low, high = (x.abs().clamp(max=_LARGEST_EXPONENT) for x in exponents)
        share = 20 * input.rounding.unit
        lower, upper = lower * (1 - share * low), upper * (1 + share * high)
    return relative(input, lower, upper, ulps=EXP_ULPS, at_least=0.0)


@rule(
    torch.pow, torch.Tensor.pow, torch.Tensor.__pow__,
    inplace=(torch.Tensor.pow_, torch.Tensor.__ipow__), ulps=None, mixed=True,
)  # fmt: skip
def power(input: Interval | Tensor | float, exponent: Any) -> Interval:
    if isinstance(exponent, Interval):
        if isinstance(input, Interval):
            refuse(torch.pow, "its base or its exponent must not depend on the model's input")
        return _power_of_constant(input, exponent)
    assert isinstance(input, Interval)
    number = isinstance(exponent, (int, float)) and not isinstance(exponent, bool)
    if not number or not math.isfinite(exponent):
        refuse(torch.pow, f"`exponent` must be a finite number; got {exponent!r}")
    if abs(exponent) == 0.5:
        return sqrt(input) if exponent > 0 else rsqrt(input)
    if exponent % 1 != 0:
        return _real_power(input, exponent)
    if exponent == -1:
        return reciprocal(input)
    if exponent < 0:
        return reciprocal(power(input, -exponent).within(input.bound_pass))
    even = exponent % 2 == 0

    def function(x: Tensor) -> Tensor:
        return torch.pow(x, exponent)

    output = valley(input, function, 0.0) if even else increasing(input, function)
    # In whatever order, products of n factors are off by n - 1 roundings, half an ulp each;
    # `powf` by less than 16 ulps. Powers on the way are no larger than the last, or below 1, and
    # where one of these is flushed to zero, the last is smaller than that.
    return relative(input, *output.ends(), ulps=16 + exponent, at_least=0.0 if even else None)


@rule(torch.Tensor.__rpow__, ulps=None, mixed=True)
def rpow(input: Interval, other: Interval | Tensor | float) -> Interval:
    return power(other, input)


def _real_power(input: Interval, exponent: float) -> Interval:
    """x^p of x surely above 0, or of 0 and more if p is: elsewhere NaN."""
    lower, upper = input.ends()
    smallest = 0.0 if input.rounding is None else input.rounding.tiny
    if exponent > 0:
        known = (lower >= 0) & ~upper.isnan()
        lower = torch.where(lower < smallest, 0.0, lower)  # it may count as 0
    else:
        known = (lower > smallest) & ~upper.isnan()
        lower, upper = upper, lower

    def value(base: Tensor) -> tuple[Tensor, Tensor]:
        """The power and the exponent of e."""
        usable = known & (base > 0)
        base = torch.where(usable, base, 1.0)  # or gradients would be infinite
        found = torch.where(usable, base.pow(exponent), 0.0)
        return torch.where(known, found, math.nan), exponent * base.log()

    (low, least), (high, most) = value(lower), value(upper)
    return exponential(input, low, high, exponents=(least, most))


def _power_of_constant(base: Tensor | float, exponent: Interval) -> Interval:
    """a^x of a > 0: elsewhere NaN, or refused."""
    if not isinstance(base, Tensor) and not base > 0:
        refuse(torch.pow, f"the base must be above 0; got {base}")
    base, rounding = constant(base, exponent), exponent.rounding
    lower, upper = exponent.ends()
    if rounding is None:
        # PyTorch's 1 to the NaN is 1.
        known, share = (base > 0) & ~(lower.isnan() | upper.isnan()), None
    else:
        # A base that is rounded moves the exponent of e by that share of x.
        share = 8 * rounding.unit * exponent.magnitude
        known = (base >= rounding.tiny) & (base <= rounding.largest) & (share <= 0.1)
        share = torch.where(known, share, 0.0)
    # Elsewhere 1 to the 0, or gradients would be NaN.
    base = torch.where(known, base, 1.0)
    ends = [torch.where(known, end, 0.0) for end in (lower, upper)]
    exponents = [end * base.log() for end in ends]
    powers = [torch.pow(base, end) for end in ends]
    low, high = torch.minimum(*powers), torch.maximum(*powers)
    low, high = (torch.where(known, end, math.nan) for end in (low, high))
    if share is None:
        return Interval(low, high)
    least, most = torch.minimum(*exponents), torch.maximum(*exponents)
    low, high = low * (1 - share), high * (1 + share)
    return exponential(exponent, low, high, exponents=(least, most))


@rule(torch.square, torch.Tensor.square, inplace=(torch.square_, torch.Tensor.square_), ulps=None)
def square(input: Interval) -> Interval:
    return power(input, 2)


@rule(torch.sqrt, torch.Tensor.sqrt, inplace=(torch.sqrt_, torch.Tensor.sqrt_), ulps=None)
def sqrt(input: Interval) -> Interval:
    lower, upper = input.ends()
    known = lower >= 0
    if input.rounding is not None:  # what is as small as this may count as 0
        lower, upper = lower - input.rounding.tiny, upper + input.rounding.tiny
    lower, upper = (torch.where(known, square_root(end), math.nan) for end in (lower, upper))
    return relative(input, lower, upper, ulps=4, at_least=0.0)


@rule(torch.rsqrt, torch.Tensor.rsqrt, inplace=(torch.rsqrt_, torch.Tensor.rsqrt_), ulps=None)
def rsqrt(input: Interval) -> Interval:
    upper, lower = positive(input, torch.rsqrt)
    return relative(input, lower, upper, ulps=8, at_least=0.0)


def square_root(value: Tensor) -> Tensor:
    """sqrt, and 0 with gradient 0 where rounding left nothing or less; NaN stays."""
    nothing = value <= 0
    return torch.where(nothing, 1.0, value).sqrt().masked_fill(nothing, 0.0)
