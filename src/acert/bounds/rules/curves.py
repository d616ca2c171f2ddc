"""Curves of one number: waves, hyperbolic functions, and exponentials and logarithms of others.

What a kernel is off by is measured at the largest magnitude that any usual one meets: at 1 where
some compute log(1 + x), e^x - 1 or (e^x - e^-x) / 2 as written, at x where it is reduced by turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from acert.bounds.interval import Interval
from acert.bounds.refusals import refuse
from acert.bounds.rules.elementwise import EXP_ULPS, positive, relative, settled
from acert.bounds.rules.powers import exponential
from acert.bounds.table import rule, unary

_TURN = 2 * math.pi


def _wave(input: Interval, function: Callable[[Tensor], Tensor], top: float) -> Interval:
    """Bounds of a function that is 1 at `top`, -1 half a turn from there, and so on."""
    lower, upper = input.ends()
    magnitude = input.magnitude
    # Up to there turns are counted to a hundredth of one. A top that is missed is next to an end,
    # and higher by less than the rounding of that end, which is added below, moves it.
    far = magnitude > 1 / (64 * torch.finfo(lower.dtype).eps)
    lower, upper = lower.masked_fill(far, 0.0), upper.masked_fill(far, 0.0)

    def inside(place: float) -> Tensor:
        return far | (((upper - place) / _TURN).floor() >= ((lower - place) / _TURN).ceil())

    ends = function(lower), function(upper)
    least = torch.where(inside(top + math.pi), -1.0, torch.minimum(*ends))
    most = torch.where(inside(top), 1.0, torch.maximum(*ends))
    rounding = input.rounding
    if rounding is None:
        return Interval(least, most)
    off = rounding.widen(torch.zeros_like(least), magnitude.clamp(min=1.0), ulps=8)
    largest = 1 + 32 * rounding.unit
    return Interval((least - off).clamp(min=-largest), (most + off).clamp(max=largest))


@unary("sin", ulps=None)
def sin(input: Interval) -> Interval:
    return _wave(input, torch.sin, math.pi / 2)


@unary("cos", ulps=None)
def cos(input: Interval) -> Interval:
    return _wave(input, torch.cos, 0.0)


@unary("atan", "arctan", ulps=None)
def atan(input: Interval) -> Interval:
    return settled(input, torch.atan, ulps=8)


def _held(input: Interval, size: Tensor) -> list[Tensor]:
    """Both ends; NaN where e^size may overflow. Where e^x does, gradients would be NaN, too."""
    ends = input.ends()
    if input.rounding is None:
        return [*ends]
    known = size <= math.log(input.rounding.largest)
    return [torch.where(known, end, math.nan) for end in ends]


@unary("sinh", ulps=None)
def sinh(input: Interval) -> Interval:
    # e^x is twice as large.
    lower, upper = _held(input, input.magnitude)
    return relative(input, lower.sinh(), upper.sinh(), ulps=2 * EXP_ULPS, met=1.0)


# In place PyTorch has no gradient of it.
@rule(torch.asinh, torch.arcsinh, torch.Tensor.asinh, torch.Tensor.arcsinh, ulps=None)
def asinh(input: Interval) -> Interval:
    lower, upper = input.ends()
    return relative(input, lower.asinh(), upper.asinh(), ulps=12, met=1.0)


@unary("exp2", ulps=None)
def exp2(input: Interval) -> Interval:
    lower, upper = _held(input, input.upper * math.log(2))
    return exponential(input, lower.exp2(), upper.exp2(), exponents=(lower, upper))


@unary("expm1", ulps=None)
def expm1(input: Interval) -> Interval:
    lower, upper = _held(input, input.upper)
    # e^x is at most 2 where the result is below 1, and at most twice the result elsewhere.
    return relative(input, lower.expm1(), upper.expm1(), ulps=2 * EXP_ULPS + 2, met=1.0)


@unary("log2", ulps=None)
def log2(input: Interval) -> Interval:
    return relative(input, *positive(input, torch.log2), ulps=12, met=1.0)


@unary("log10", ulps=None)
def log10(input: Interval) -> Interval:
    return relative(input, *positive(input, torch.log10), ulps=12, met=1.0)


@unary("log1p", ulps=None)
def log1p(input: Interval) -> Interval:
    # 1 + x is off by a share of itself, and its logarithm by that much, near -1 as well.
    known = input.lower > -1
    values = (torch.where(known, end, 0.0).log1p() for end in input.ends())
    return relative(
        input, *(torch.where(known, value, math.nan) for value in values), ulps=12, met=1.0
    )


@unary("logit", ulps=None)
def logit(input: Interval, eps: float | None = None) -> Interval:
    if eps is not None:
        if not 0 <= eps < 0.5:
            refuse(torch.logit, f"`eps` must be None, or from 0 to 0.5; got {eps}")
        clamped: Interval = input.clamp(eps, 1 - eps)
        return logit(clamped)
    smallest = 0.0 if input.rounding is None else input.rounding.tiny
    known = (input.lower > smallest) & (input.upper < 1)
    values = (torch.where(known, end, 0.5).logit() for end in input.ends())
    return relative(
        input, *(torch.where(known, value, math.nan) for value in values), ulps=16, met=1.0
    )
