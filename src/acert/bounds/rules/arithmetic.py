"""Sums, differences, products and quotients with numbers, tensors and other intervals.

A rounding error is measured at what was added, not at what is left after cancelling.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from acert.bounds.interval import Interval, constant
from acert.bounds.refusals import refuse
from acert.bounds.rounding import Rounding
from acert.bounds.rules.elementwise import valley
from acert.bounds.table import rule

Operand = Interval | Tensor | float


def _ball(operand: Operand, like: Interval) -> tuple[Tensor, Tensor | None]:
    """(center, radius) of an operand; a constant has no radius."""
    if isinstance(operand, Interval):
        return operand.as_ball()
    return constant(operand, like), None


def _interval(input: Operand, other: Operand) -> Interval:
    interval = input if isinstance(input, Interval) else other
    assert isinstance(interval, Interval)
    return interval


@rule(
    torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__,
    inplace=(torch.Tensor.add_, torch.Tensor.__iadd__), ulps=None, mixed=True,
)  # fmt: skip
def add(input: Operand, other: Operand, *, alpha: float = 1) -> Interval:
    like = _interval(input, other)
    if alpha != 1:
        if isinstance(other, Interval):
            other = mul(other, alpha).within(like.bound_pass)
        else:  # scaled in our precision, not in its own
            other = _ball(other, like)[0] * alpha
    constants = [part for part in (input, other) if not isinstance(part, Interval)]
    chain = _interval(input, other).chain
    if chain is not None and constants:
        shift = constant(constants[0], like)
        if chain.takes(shift):
            return Interval.of(chain.then(torch.add, shift))
    if like.rounding is not None and any(_some_infinite(part) for part in constants):
        return _masked(_interval(input, other), constant(constants[0], like))
    (center, radius), (shift, other_radius) = _ball(input, like), _ball(other, like)
    output = center + shift
    radii = [r for r in (radius, other_radius) if r is not None]
    total = (radii[0] + radii[1] if len(radii) == 2 else radii[0]).expand_as(output)
    if like.rounding is not None:
        total = like.rounding.widen(total, center.abs() + shift.abs() + total, ulps=1)
    return Interval.ball(output, total)


def _some_infinite(constant: Tensor | float) -> bool:
    """Whether a tensor masks by infinities; where a graph is made, nobody can tell."""
    if not isinstance(constant, Tensor) or torch.compiler.is_compiling():
        return False
    if constant.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return bool(constant.isinf().any())


def _masked(input: Interval, mask: Tensor) -> Interval:
    """The sum with a mask: where that is infinite, so is the sum with anything finite."""
    infinite = mask.isinf()
    lower, upper = add(input, mask.masked_fill(infinite, 0.0)).within(input.bound_pass).ends()
    hidden = infinite & lower.isfinite() & upper.isfinite()
    return Interval(torch.where(hidden, mask, lower), torch.where(hidden, mask, upper))


@rule(
    torch.sub, torch.Tensor.sub, torch.subtract, torch.Tensor.subtract, torch.Tensor.__sub__,
    inplace=(torch.Tensor.sub_, torch.Tensor.__isub__), ulps=None, mixed=True,
)  # fmt: skip
def sub(input: Operand, other: Operand, *, alpha: float = 1) -> Interval:
    return add(input, other, alpha=-alpha)


@rule(torch.rsub, torch.Tensor.__rsub__, ulps=None, mixed=True)
def rsub(input: Operand, other: Operand, *, alpha: float = 1) -> Interval:
    return sub(other, input, alpha=alpha)


@rule(torch.neg, torch.negative, torch.Tensor.neg, torch.Tensor.negative,
      inplace=(torch.neg_, torch.Tensor.neg_), ulps=0)  # fmt: skip
def neg(input: Interval) -> Interval:
    lower, upper = input.ends()
    return Interval(-upper, -lower)


@rule(
    torch.mul, torch.multiply, torch.Tensor.mul, torch.Tensor.multiply, torch.Tensor.__mul__,
    torch.Tensor.__rmul__, inplace=(torch.Tensor.mul_, torch.Tensor.__imul__),
    ulps=None, mixed=True,
)  # fmt: skip
def mul(input: Operand, other: Operand) -> Interval:
    if not isinstance(input, Interval):
        input, other = other, input
    assert isinstance(input, Interval)
    if isinstance(other, Interval):
        return _product(input, other)
    factor = constant(other, input)
    if input.chain is not None and input.chain.takes(factor):
        return Interval.of(input.chain.then(torch.mul, factor))
    center, radius = input.as_ball()
    return _scaled(input, center * factor, radius * factor.abs(), factor.abs())


@rule(torch.addcmul, torch.Tensor.addcmul, inplace=(torch.Tensor.addcmul_,), ulps=None, mixed=True)
def addcmul(input: Operand, tensor1: Operand, tensor2: Operand, *, value: float = 1) -> Interval:
    if value != 1:  # kernels differ in which two of the three factors they multiply first
        refuse(torch.addcmul, f"`value` must be 1; got {value}")
    if not isinstance(tensor1, Interval) and not isinstance(tensor2, Interval):
        assert isinstance(input, Interval)
        return add(input, constant(tensor1, input) * constant(tensor2, input))
    product = mul(tensor1, tensor2).within(_interval(tensor1, tensor2).bound_pass)
    return add(input, product)


@rule(torch.lerp, torch.Tensor.lerp, inplace=(torch.Tensor.lerp_,), ulps=None, mixed=True)
def lerp(input: Operand, end: Operand, weight: Operand) -> Interval:
    """(1 - w) of one end and w of the other, for any constant w."""
    if isinstance(weight, Interval):
        refuse(torch.lerp, "`weight` must not depend on the model's input")
    like = _interval(input, end)
    (start, radius), (stop, other_radius) = _ball(input, like), _ball(end, like)
    share = constant(weight, like)
    center = torch.lerp(start, stop, share)
    parts = ((1 - share, radius), (share, other_radius))
    total = torch.zeros_like(center)
    for factor, reach in parts:
        total = total if reach is None else total + factor.abs() * reach
    if like.rounding is not None:
        # Kernels add w (b - a) to a, or (1 - w) (a - b) to b.
        size = start.abs() + stop.abs() + sum(r for _, r in parts if r is not None)
        scale = 1 + share.abs()
        total = like.rounding.widen(total, size * scale, ulps=8, gain=size + scale)
    return Interval.ball(center, total)


@rule(
    torch.div, torch.divide, torch.true_divide, torch.Tensor.div, torch.Tensor.divide,
    torch.Tensor.true_divide, torch.Tensor.__truediv__,
    inplace=(torch.Tensor.div_, torch.Tensor.__itruediv__), ulps=None, mixed=True,
)  # fmt: skip
def div(input: Operand, other: Operand, *, rounding_mode: str | None = None) -> Interval:
    if rounding_mode is not None:
        refuse(torch.div, f"`rounding_mode` must be None; got {rounding_mode!r}")
    if isinstance(other, Interval):
        return _quotient(input, other)
    assert isinstance(input, Interval)
    divisor = constant(other, input)
    if input.chain is not None and input.chain.takes(divisor):
        return Interval.of(input.chain.then(torch.div, divisor))
    size = divisor.abs()
    center, radius = input.as_ball()
    return _scaled(input, center / divisor, radius / size, 1 / size)


def _scaled(input: Interval, center: Tensor, radius: Tensor, factor: Tensor) -> Interval:
    """The ball with the rounding of one product added."""
    if input.rounding is not None:
        radius = _rounded(input.rounding, center, radius, factor, input.as_ball()[0].abs())
    return Interval.ball(center, radius)


def _rounded(
    rounding: Rounding, center: Tensor, radius: Tensor, factor: Tensor, size: Tensor
) -> Tensor:
    """The radius of a product, with its rounding; `factor` and `size` are what is multiplied."""
    radius = rounding.widen(radius, center.abs() + radius, ulps=2)
    radius = radius + rounding.underflow(4, factor, size)
    # A divisor or factor below the smallest normal number may count as zero.
    usable = (factor <= 1 / rounding.tiny) & ((factor >= rounding.tiny) | (factor == 0))
    return torch.where(usable, radius, math.nan)


@rule(torch.reciprocal, torch.Tensor.reciprocal, ulps=None,
      inplace=(torch.reciprocal_, torch.Tensor.reciprocal_))  # fmt: skip
def reciprocal(input: Interval) -> Interval:
    return _quotient(1.0, input)


def _quotient(input: Operand, other: Interval) -> Interval:
    """A quotient by an interval; unbounded where that may be 0."""
    if isinstance(input, Interval):
        lower, upper = input.ends()
    else:
        lower = upper = constant(input, other)
    low, high = other.ends()
    nearest = torch.maximum(low, -high)
    known = nearest > 0 if other.rounding is None else nearest >= other.rounding.tiny
    # Elsewhere a divisor of 1, or gradients would be NaN.
    low, high = (torch.where(known, end, 1.0) for end in (low, high))
    corners = torch.stack((lower / low, lower / high, upper / low, upper / high))
    output = Interval(corners.amin(0), corners.amax(0)).within(other.bound_pass)
    center, radius = output.as_ball()
    if other.rounding is None:  # a center that is a number, for whatever saturates behind it
        return Interval.ball(center, torch.where(known, radius, math.inf))
    factor = 1 / nearest.clamp(min=other.rounding.tiny)
    size = torch.maximum(lower.abs(), upper.abs())
    known = known & (size <= other.rounding.largest)
    radius = _rounded(other.rounding, center, radius, factor, size)
    # 0 / 0 is no number, and no later operation may make one of it.
    return Interval.ball(center, torch.where(known, radius, math.nan))


def _product(input: Interval, other: Interval) -> Interval:
    if other is input:  # a square, which is nowhere below 0
        output = valley(input, torch.square, 0.0)
    else:
        (lower, upper), (low, high) = input.ends(), other.ends()
        corners = torch.stack((lower * low, lower * high, upper * low, upper * high))
        output = Interval(corners.amin(0), corners.amax(0))
    output.within(input.bound_pass)
    rounding = input.rounding
    if rounding is None:
        return output
    center, radius = output.as_ball()
    magnitude = output.magnitude
    radius = rounding.widen(radius, magnitude, ulps=2)
    radius = radius + rounding.underflow(4, input.magnitude, other.magnitude)
    return Interval.ball(center, radius)
