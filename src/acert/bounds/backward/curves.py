"""Curves seen backward, whatever their shape: GELU, SiLU, ELU, Softplus and the like.

Any slope makes a sound line once it is known how far the curve rises above it. Between two points
of a grid a curve is no further above the larger of its two values there than |f''| h^2 / 8, h being
their distance; at kinks it is looked at too. Of two slopes, the chord's and that of the tangent in
the middle, each side takes the one whose line is nearer there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from acert.bounds.backward.relaxation import relaxed
from acert.bounds.backward.table import backward, everywhere
from acert.bounds.interval import Interval
from acert.bounds.linear_bound import Step
from acert.bounds.rounding import OWN_UNIT
from acert.bounds.rules.elementwise import EXP_ULPS

_PARTS = 16  # of a box
_NARROW = 1e-5  # where a chord would be all rounding

Function = Callable[[Tensor], Tensor]


class Curve(NamedTuple):
    """A function, its slope, and what a line around it has to allow for.

    `bend` bounds |f''| between two points with no kink between them. A network's value is off by
    `ulps` of the largest of its argument, itself and `at_least`, and may be lower by `drop`.
    """

    function: Function
    slope: Function
    bend: Callable[[Tensor, Tensor], Tensor | float]
    ulps: float
    kinks: tuple[float, ...] = ()
    at_least: float = 0.0
    drop: Tensor | float = 0.0


def _followed(step: Step, input: Interval, curve: Curve) -> None:
    """Replaces f(x), element by element, by lines above and below it."""
    lower, upper = input.ends()
    middle = (lower + upper) / 2
    low, high = curve.function(lower), curve.function(upper)
    narrow = upper - lower < _NARROW
    tangent = curve.slope(middle)
    chord = (high - low) / torch.where(narrow, 1.0, upper - lower)
    chord = torch.where(narrow, tangent, chord)
    most, least = _reach(lower, upper, torch.stack((tangent, chord)), curve)
    rise = (tangent - chord) * middle
    first = rise + most[0] <= most[1]
    above = torch.where(first, tangent, chord), torch.where(first, most[0], most[1])
    first = rise + least[0] >= least[1]
    below = torch.where(first, tangent, chord), torch.where(first, least[0], least[1]) - curve.drop
    size = torch.maximum(low.abs(), high.abs())
    steepest = torch.maximum(above[0].abs(), below[0].abs()).clamp(min=1)
    if step.rounding is not None:
        # Values are good to a few ulps of 1, x or themselves; products and differences to one each.
        slack = 64 * OWN_UNIT * ((1 + lower.abs() + upper.abs()) * steepest + size)
        above, below = (above[0], above[1] + slack), (below[0], below[1] - slack)
    relaxed(step, input, above=above, below=below)
    # What slopes above 1 cost beyond that.
    step.bound.allow(step.A, lambda: input.magnitude * steepest, own=2)
    if curve.ulps:
        magnitude = torch.maximum(input.magnitude, size).clamp(min=curve.at_least)
        step.bound.allow(
            step.A, lambda: magnitude, own=2, network=math.ceil(2 * curve.ulps) + 2,
            factor=steepest.reshape(len(steepest), -1).amax(1), reach=lambda: input.magnitude,
        )  # fmt: skip


def _reach(lower: Tensor, upper: Tensor, slopes: Tensor, curve: Curve) -> tuple[Tensor, Tensor]:
    """The largest and smallest value of f(x) - slope x for lower <= x <= upper, or beyond these.

    Of each of several `slopes`, the first axis.
    """

    def at(x: Tensor) -> Tensor:
        return curve.function(x) - slopes * x

    width = (upper - lower) / _PARTS
    before, value = lower, at(lower)
    most = least = value
    for kink in curve.kinks:
        there = at(lower.new_full((), kink).clamp(lower, upper))
        most, least = torch.maximum(most, there), torch.minimum(least, there)
    for part in range(1, _PARTS + 1):
        x = upper if part == _PARTS else lower + part * width
        after = at(x)
        bend = curve.bend(before, x) * width.square() / 8
        most = torch.maximum(most, torch.maximum(value, after) + bend)
        least = torch.minimum(least, torch.minimum(value, after) - bend)
        before, value = x, after
    return most, least


def _nearest(left: Tensor, right: Tensor) -> Tensor:
    """How far the points between two are from 0 at the least."""
    return torch.maximum(left, -right).clamp(min=0)


def _constant(value: float) -> Callable[[Tensor, Tensor], float]:
    return lambda left, right: value


# -- smooth ones ------------------------------------------------------------------------

_ROOT = math.sqrt(2)


def _density(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_slope(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / _ROOT)) + x * _density(x)


def _gelu_bend(left: Tensor, right: Tensor) -> Tensor:
    """Of density (2 - x^2), which falls to 0, has its lowest point at 2 and goes back to 0."""
    x = _nearest(left, right)
    size = (_density(x) * (2 - x * x)).abs()
    return torch.where(x < 2, size.clamp(min=0.109), size) * 1.0001


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    c, cubic = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(c * (x + cubic * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * cubic * x * x)


@backward(F.gelu, relaxed=everywhere, local=True)
def _gelu(step: Step, input: Interval, approximate: str = "none") -> None:
    if approximate == "none":
        curve = Curve(F.gelu, _gelu_slope, _gelu_bend, ulps=8)
    else:
        curve = Curve(
            lambda x: F.gelu(x, approximate=approximate), _gelu_tanh_slope, _constant(0.81), ulps=8
        )
    _followed(step, input, curve)


def _silu_slope(x: Tensor) -> Tensor:
    share = torch.sigmoid(x)
    return share * (1 + x * (1 - share))


@backward(F.silu, relaxed=everywhere, local=True)
def _silu(step: Step, input: Interval) -> None:
    _followed(step, input, Curve(F.silu, _silu_slope, _constant(0.5001), ulps=8))


def _mish_slope(x: Tensor) -> Tensor:
    t = torch.tanh(F.softplus(x))
    return t + x * (1 - t * t) * torch.sigmoid(x)


@backward(F.mish, relaxed=everywhere, local=True)
def _mish(step: Step, input: Interval) -> None:
    _followed(step, input, Curve(F.mish, _mish_slope, _constant(0.65), ulps=EXP_ULPS + 8))


@backward(F.softplus, relaxed=everywhere, local=True)
def _softplus(step: Step, input: Interval, beta: float = 1.0, threshold: float = 20.0) -> None:
    # From the threshold on PyTorch returns x itself, which is lower.
    gap = (max(-threshold, 0.0) + math.log1p(math.exp(-abs(threshold)))) / beta
    crossing = input.upper * beta >= threshold - 1e-6 * (1 + abs(threshold))

    def function(x: Tensor) -> Tensor:
        return torch.logaddexp(x * beta, torch.zeros_like(x)) / beta

    curve = Curve(
        function, lambda x: torch.sigmoid(beta * x), _constant(beta / 4), ulps=8,
        drop=crossing.to(input.upper) * gap,
    )  # fmt: skip
    _followed(step, input, curve)


@backward(F.logsigmoid, relaxed=everywhere, local=True)
def _logsigmoid(step: Step, input: Interval) -> None:
    slope: Function = lambda x: torch.sigmoid(-x)  # noqa: E731  a row of the table like the others
    curve = Curve(F.logsigmoid, slope, _constant(0.25), ulps=EXP_ULPS + 8, at_least=1.0)
    _followed(step, input, curve)


@backward(F.softsign, relaxed=everywhere, local=True)
def _softsign(step: Step, input: Interval) -> None:
    def bend(left: Tensor, right: Tensor) -> Tensor:
        return 2.0001 * (1 + _nearest(left, right)).pow(-3)

    _followed(step, input, Curve(F.softsign, lambda x: (1 + x.abs()).pow(-2), bend, ulps=4))


@backward(torch.erf, relaxed=everywhere, local=True)
def _erf(step: Step, input: Interval) -> None:
    slope: Function = lambda x: torch.exp(-x * x) * (2 / math.sqrt(math.pi))  # noqa: E731
    _followed(step, input, Curve(torch.erf, slope, _constant(0.97), ulps=8, at_least=1.0))


@backward(torch.exp, relaxed=everywhere, local=True)
def _exp(step: Step, input: Interval) -> None:
    curve = Curve(torch.exp, torch.exp, lambda left, right: 1.0001 * right.exp(), ulps=EXP_ULPS)
    _followed(step, input, curve)


@backward(torch.square, relaxed=everywhere, local=True)
def _square(step: Step, input: Interval) -> None:
    _followed(step, input, Curve(torch.square, lambda x: 2 * x, _constant(2.0001), ulps=18))


# -- those with a kink ------------------------------------------------------------------


def _exponential(scale: float, alpha: float, length: float) -> tuple[Function, Function, Function]:
    """`scale * x` above 0 and `scale * alpha * (exp(x / length) - 1)` below, its slope and bend."""

    def function(x: Tensor) -> Tensor:
        return scale * torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0) / length))

    def slope(x: Tensor) -> Tensor:
        below = alpha / length * torch.exp(x.clamp(max=0) / length)
        return scale * torch.where(x > 0, 1.0, below)

    def bend(x: Tensor) -> Tensor:
        size = abs(scale * alpha) / length**2
        return 1.0001 * size * torch.exp(x.clamp(max=0) / length)

    return function, slope, bend


def _elu_like(step: Step, input: Interval, *, scale: float, alpha: float, length: float) -> None:
    function, slope, size = _exponential(scale, alpha, length)

    def bend(left: Tensor, right: Tensor) -> Tensor:
        return torch.where(left < 0, size(right), 0.0)

    least = max(abs(scale * alpha), 1.0)
    curve = Curve(function, slope, bend, ulps=8 * max(scale, 1.0), kinks=(0.0,), at_least=least)
    _followed(step, input, curve)


@backward(F.elu, relaxed=everywhere, local=True)
def _elu(step: Step, input: Interval, alpha: float = 1.0) -> None:
    _elu_like(step, input, scale=1.0, alpha=alpha, length=1.0)


@backward(F.celu, relaxed=everywhere, local=True)
def _celu(step: Step, input: Interval, alpha: float = 1.0) -> None:
    _elu_like(step, input, scale=1.0, alpha=alpha, length=alpha)


@backward(F.selu, relaxed=everywhere, local=True)
def _selu(step: Step, input: Interval) -> None:
    _elu_like(
        step, input, scale=1.0507009873554804934193349852946,
        alpha=1.6732632423543772848170429916717, length=1.0,
    )  # fmt: skip


@backward(torch.prelu, relaxed=everywhere, local=True)
def _prelu(step: Step, input: Interval, weight: Tensor) -> None:
    weight = weight.to(input.dtype)
    # One slope, or one for each channel of the second axis.
    gentle = weight if weight.numel() == 1 else weight.reshape(-1, *[1] * (input.ndim - 2))
    curve = Curve(
        lambda x: torch.where(x < 0, gentle * x, x), lambda x: torch.where(x < 0, gentle, 1.0),
        _constant(0.0), ulps=8, kinks=(0.0,),
    )  # fmt: skip
    _followed(step, input, curve)


@backward(torch.abs, relaxed=everywhere, local=True)
def _abs(step: Step, input: Interval) -> None:
    slope: Function = lambda x: 1 - 2 * (x < 0).to(x)  # noqa: E731
    _followed(step, input, Curve(torch.abs, slope, _constant(0.0), ulps=0, kinks=(0.0,)))


@backward(F.hardsigmoid, relaxed=everywhere, local=True)
def _hardsigmoid(step: Step, input: Interval) -> None:
    slope: Function = lambda x: (x.abs() < 3).to(x) / 6  # noqa: E731
    curve = Curve(F.hardsigmoid, slope, _constant(0.0), ulps=8, kinks=(-3.0, 3.0), at_least=1.0)
    _followed(step, input, curve)


@backward(F.hardswish, relaxed=everywhere, local=True)
def _hardswish(step: Step, input: Interval) -> None:
    def slope(x: Tensor) -> Tensor:
        return torch.where(x.abs() < 3, x / 3 + 0.5, (x > 0).to(x))

    curve = Curve(F.hardswish, slope, _constant(0.3334), ulps=16, kinks=(-3.0, 3.0))
    _followed(step, input, curve)
