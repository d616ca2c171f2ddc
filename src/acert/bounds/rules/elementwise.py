"""Element-wise functions (Eqs. 18-19), gates, and dropout in evaluation.

Almost every activation falls to one minimum and rises after it; the monotone ones have
their minimum at minus infinity. So one rule serves all: the lower end is the value at the
point of the box nearest the minimum, the upper end the larger value at either end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from acert.bounds.interval import Interval
from acert.bounds.pending import ball_in_place
from acert.bounds.refusals import refuse
from acert.bounds.table import rule

# Where GELU and SiLU are smallest. The slope there is 0, so the last digit is of no account.
GELU_ARGMIN = -0.7517915246935645
GELU_TANH_ARGMIN = -0.7524614220710163
SILU_ARGMIN = -1.2784645427610737
MISH_ARGMIN = -1.1924312145154952

RANDOM = "it is random in training; switch the model to evaluation (`eval()`)"


def increasing(input: Interval, function: Callable[[Tensor], Tensor]) -> Interval:
    """Bounds of a non-decreasing function."""
    lower, upper = input.ends()
    return Interval(function(lower), function(upper))


def valley(input: Interval, function: Callable[[Tensor], Tensor], argmin: float) -> Interval:
    """Bounds of a function that falls up to `argmin` and rises from there."""
    lower, upper = input.ends()
    lowest = torch.minimum(lower.clamp(min=argmin), upper)
    return Interval(function(lowest), torch.maximum(function(lower), function(upper)))


@rule(F.relu, torch.relu, torch.Tensor.relu, inplace=(torch.relu_, torch.Tensor.relu_), ulps=0)
def relu(input: Interval) -> Interval:
    if input.scaled is not None and input.scaled.stored.graded == torch.is_grad_enabled():
        stored, seen = input.scaled.relu(observe=input.bound_pass.observe)
        if input.bound_pass.observe:
            input.bound_pass.relu_inputs.append(Interval.of(seen))
        return Interval.of(stored)
    if input.bound_pass.observe:
        # A copy: an in-place ReLU goes on to overwrite the interval itself.
        input.bound_pass.relu_inputs.append(input.map(lambda x: x))
    if input.bound_pass.fold and input.is_ball and not torch.compiler.is_compiling():
        if torch.is_grad_enabled():
            return Interval.ball(*_BallRelu.apply(*input.as_ball()))  # type: ignore[no-untyped-call]
        convolution = input.convolution
        if convolution is None or convolution.graded:
            return Interval.ball(*_relu_of_ball(*input.as_ball()))
        # Memory that nobody else sees; a model that asks for the input too has it computed again.
        return Interval.ball(*_relu_of_ball(*convolution.ball(), own=True))
    lower, upper = input.own_ends()
    return Interval(lower.relu_(), upper.relu_())


def _relu_of_ball(center: Tensor, radius: Tensor, *, own: bool = False) -> tuple[Tensor, Tensor]:
    """ReLU of a ball in few passes over memory, which cost an eager CPU more than arithmetic.

    Half the upper end, or 0 if that is negative, is center and radius of a ball cut by 0. One above
    0 has the larger center and the smaller radius and keeps both. The memory of the ball is
    overwritten if it is our `own`.
    """
    half = torch.lerp(center, radius, 0.5).relu_()
    smaller = torch.minimum(half, radius, out=radius if own else None)
    return torch.maximum(half, center, out=half), smaller


class _BallRelu(torch.autograd.Function):
    """ReLU of a ball with a backward pass of its own, in few passes over memory as well."""

    @staticmethod
    def forward(ctx: Any, center: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        center, radius = _relu_of_ball(center, radius)
        ctx.save_for_backward(center, radius)
        return center, radius

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_center: Tensor, by_radius: Tensor) -> tuple[Tensor, Tensor]:
        center, radius = ctx.saved_tensors
        # What came out tells which ends were above 0.
        end, lower = center - radius, by_center - by_radius
        torch.ops.aten.threshold_backward.grad_input(lower, end, 0, grad_input=lower)
        upper = torch.add(by_center, by_radius, out=end)
        torch.ops.aten.threshold_backward.grad_input(upper, center, 0, grad_input=upper)
        return ball_in_place(lower, upper)


@rule(torch.abs, torch.Tensor.abs, ulps=0)
def absolute(input: Interval) -> Interval:
    return valley(input, torch.abs, 0.0)


@rule(F.leaky_relu, torch._C._nn.leaky_relu, inplace=(F.leaky_relu_,), ulps=None)
def leaky_relu(input: Interval, negative_slope: float = 0.01) -> Interval:
    def function(x: Tensor) -> Tensor:
        return F.leaky_relu(x, negative_slope)

    output = increasing(input, function) if negative_slope >= 0 else valley(input, function, 0.0)
    return _steep(output, input, slope=negative_slope)


@rule(F.rrelu, torch.rrelu, inplace=(torch.rrelu_,), ulps=None)
def rrelu(
    input: Interval,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Interval:
    if training:
        refuse(F.rrelu, RANDOM)
    return leaky_relu(input, (lower + upper) / 2)


@rule(F.elu, torch._C._nn.elu, inplace=(F.elu_,), ulps=None)
def elu(input: Interval, alpha: float = 1.0) -> Interval:
    def function(x: Tensor) -> Tensor:
        return F.elu(x, alpha)

    output = increasing(input, function) if alpha >= 0 else valley(input, function, 0.0)
    # Some kernels subtract 1 from exp(x), onnxruntime's for one: that 1 is a magnitude met.
    return _steep(output, input, slope=alpha, at_least=abs(alpha))


@rule(F.selu, torch.selu, inplace=(torch.selu_,), ulps=None)
def selu(input: Interval) -> Interval:
    # 1.76 times ELU, and as there some kernels subtract a 1 from an exponential.
    return _steep(increasing(input, F.selu), input, slope=1.76, at_least=1.76)


@rule(F.celu, torch.celu, inplace=(torch.celu_,), ulps=None)
def celu(input: Interval, alpha: float = 1.0) -> Interval:
    if alpha <= 0:
        refuse(F.celu, f"`alpha` must be above 0; got {alpha}")
    return _steep(increasing(input, lambda x: F.celu(x, alpha)), input, slope=1, at_least=alpha)


@rule(torch.prelu, torch.Tensor.prelu, ulps=None)
def prelu(input: Interval, weight: Tensor) -> Interval:
    weight = weight.to(input.dtype)
    # One slope, or one for each channel of the second axis.
    slope = weight if weight.numel() == 1 else weight.reshape(-1, *[1] * (input.ndim - 2))

    def function(x: Tensor) -> Tensor:
        return torch.where(x < 0, slope * x, x)

    lower, upper = input.ends()
    # With a negative slope 0 is lowest, or the point of the box nearest to it.
    lowest = torch.where(slope < 0, torch.minimum(lower.relu(), upper), lower)
    output = Interval(function(lowest), torch.maximum(function(lower), function(upper)))
    return _steep(output, input, slope=slope)


def settled(
    input: Interval, function: Callable[[Tensor], Tensor], *, ulps: float = 1, at_least: float = 0
) -> Interval:
    """Bounds of a non-decreasing function that errs in ulps of its result, however large x is.

    The ulps are those of `at_least` where the result is smaller.
    """
    output = increasing(input, function).within(input.bound_pass)
    rounding = input.rounding
    if rounding is None:
        return output
    center, radius = output.as_ball()
    magnitude = output.magnitude.clamp(min=at_least)
    return Interval.ball(center, rounding.widen(radius, magnitude, ulps=ulps))


def _steep(
    output: Interval, input: Interval, *, slope: float | Tensor, at_least: float = 0.0
) -> Interval:
    """Adds the rounding of a function that is as steep as `slope` below zero.

    It meets magnitudes of `at_least` on the way.
    """
    rounding = input.rounding
    if rounding is None:
        return output
    output.within(input.bound_pass)
    magnitude = torch.maximum(input.magnitude, output.magnitude).clamp(min=at_least)
    center, radius = output.as_ball()
    size = slope.abs() if isinstance(slope, Tensor) else abs(slope)
    return Interval.ball(center, rounding.widen(radius, magnitude, ulps=4, gain=1 + size))


def relative(
    input: Interval,
    lower: Tensor,
    upper: Tensor,
    *,
    ulps: float,
    at_least: float | None = None,
    met: float = 0.0,
) -> Interval:
    """Bounds of a function of each element that errs in ulps of its own value, or of `met`.

    The error belongs to each end by itself: f - e max(|f|, m) rises with f as long as e < 1.
    `at_least` is what rounding does not fall below: it keeps signs.
    """
    rounding = input.rounding
    if rounding is None:
        return Interval(lower, upper)
    zero = torch.zeros_like(lower)
    low = lower - rounding.widen(zero, lower.abs().clamp(min=met), ulps=ulps)
    high = upper + rounding.widen(zero, upper.abs().clamp(min=met), ulps=ulps)
    low = low if at_least is None else low.clamp(min=at_least)
    # Where the network may overflow, neither end is known.
    known = torch.maximum(lower.abs(), upper.abs()) <= rounding.largest
    return Interval(torch.where(known, low, math.nan), torch.where(known, high, math.nan))


# Exponentials of PyTorch's own vectors are good to 20 ulps where it takes the fast ones, maths
# libraries and CUDA to 2.
EXP_ULPS = 24


@rule(torch.exp, torch.Tensor.exp, inplace=(torch.exp_, torch.Tensor.exp_), ulps=None)
def exp(input: Interval) -> Interval:
    lower, upper = input.ends()
    return relative(input, lower.exp(), upper.exp(), ulps=EXP_ULPS, at_least=0.0)


@rule(torch.log, torch.Tensor.log, inplace=(torch.log_, torch.Tensor.log_), ulps=None)
def log(input: Interval) -> Interval:
    return relative(input, *positive(input, torch.log), ulps=8)


def positive(input: Interval, function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """A function of positive numbers at both ends; NaN where they may be 0, or count as 0."""
    smallest = 0.0 if input.rounding is None else input.rounding.tiny
    known = input.lower > smallest
    # Elsewhere of 1, or gradients would be NaN.
    values = (function(torch.where(known, end, 1.0)) for end in input.ends())
    return [torch.where(known, value, math.nan) for value in values]


@rule(F.hardtanh, torch._C._nn.hardtanh, inplace=(F.hardtanh_,), ulps=None)
def hardtanh(input: Interval, min_val: float = -1.0, max_val: float = 1.0) -> Interval:
    return settled(input, lambda x: F.hardtanh(x, min_val, max_val))


@rule(F.relu6, torch._C._nn.relu6, ulps=0)
def relu6(input: Interval) -> Interval:
    return increasing(input, F.relu6)


def _clamp(function: Callable[..., Tensor]) -> Any:
    def clamp(input: Interval, *args: Any, **kwargs: Any) -> Interval:
        return settled(input, lambda x: function(x, *args, **kwargs).to(x.dtype))

    return clamp


for _name in ("clamp", "clip", "clamp_min", "clamp_max"):
    rule(
        getattr(torch, _name),
        getattr(torch.Tensor, _name),
        inplace=(getattr(torch, _name + "_"), getattr(torch.Tensor, _name + "_")),
        ulps=None,
    )(_clamp(getattr(torch, _name)))


@rule(
    torch.sigmoid, torch.Tensor.sigmoid, torch.special.expit,
    inplace=(torch.sigmoid_, torch.Tensor.sigmoid_), ulps=None,
)  # fmt: skip
def sigmoid(input: Interval) -> Interval:
    return settled(input, torch.sigmoid, ulps=4, at_least=1.0)


@rule(F.hardsigmoid, torch._C._nn.hardsigmoid, ulps=None)
def hardsigmoid(input: Interval) -> Interval:
    return settled(input, F.hardsigmoid, ulps=4, at_least=1.0)


@rule(
    torch.erf, torch.Tensor.erf, torch.special.erf, inplace=(torch.erf_, torch.Tensor.erf_),
    ulps=None,
)  # fmt: skip
def erf(input: Interval) -> Interval:
    # Some vector kernels are polynomials that are good to an ulp or two of 1 near 0 too.
    return settled(input, torch.erf, ulps=8, at_least=1.0)


@rule(F.softsign, ulps=None)
def softsign(input: Interval) -> Interval:
    return settled(input, F.softsign, ulps=4)


@rule(F.logsigmoid, torch._C._nn.log_sigmoid, ulps=None)
def logsigmoid(input: Interval) -> Interval:
    # -(max(0, -x) + log(1 + e^-|x|)): both parts have one sign, but the sum with 1 may be rounded.
    return settled(input, F.logsigmoid, ulps=EXP_ULPS + 8, at_least=1.0)


@rule(torch.tanh, torch.Tensor.tanh, inplace=(torch.tanh_, torch.Tensor.tanh_), ulps=None)
def tanh(input: Interval) -> Interval:
    return settled(input, torch.tanh, ulps=4)


@rule(F.softplus, ulps=8)
def softplus(input: Interval, beta: float = 1.0, threshold: float = 20.0) -> Interval:
    if beta <= 0:
        refuse(F.softplus, f"`beta` must be above 0; got {beta}")
    # PyTorch turns to the identity where beta x > threshold and drops by up to `gap` there.
    gap = (max(-threshold, 0.0) + math.log1p(math.exp(-abs(threshold)))) / beta
    lower, upper = input.ends()

    def smooth(x: Tensor) -> Tensor:
        return torch.logaddexp(x * beta, torch.zeros_like(x)) / beta

    near = 1e-6 * (1 + abs(threshold))
    crossing = upper * beta >= threshold - near
    beyond = lower * beta > threshold + near
    highest = torch.where(beyond, upper, smooth(upper))
    if input.rounding is not None and threshold > math.log(input.rounding.largest):
        # A network's exp(beta x) is infinite before the threshold is met.
        highest = torch.where(upper * beta < math.log(input.rounding.largest), highest, math.nan)
    return Interval(torch.where(beyond, lower, smooth(lower) - crossing.to(lower) * gap), highest)


@rule(F.gelu, ulps=8)
def gelu(input: Interval, approximate: str = "none") -> Interval:
    argmin = GELU_ARGMIN if approximate == "none" else GELU_TANH_ARGMIN
    return valley(input, lambda x: F.gelu(x, approximate=approximate), argmin)


@rule(F.silu, torch._C._nn.silu, ulps=8)
def silu(input: Interval) -> Interval:
    return valley(input, F.silu, SILU_ARGMIN)


@rule(F.mish, torch._C._nn.mish, ulps=EXP_ULPS + 8)
def mish(input: Interval) -> Interval:
    return valley(input, F.mish, MISH_ARGMIN)


@rule(F.hardswish, torch._C._nn.hardswish, ulps=None)
def hardswish(input: Interval) -> Interval:
    output = valley(input, F.hardswish, -1.5).within(input.bound_pass)
    if input.rounding is None:
        return output
    # A network multiplies by up to 6 before it divides by 6, and may overflow in between.
    magnitude = 6 * torch.maximum(input.magnitude, output.magnitude)
    center, radius = output.as_ball()
    return Interval.ball(center, input.rounding.widen(radius, magnitude, ulps=1))


@rule(F.glu, ulps=None)
def glu(input: Interval, dim: int = -1) -> Interval:
    if input.shape[dim] % 2:
        refuse(F.glu, f"it halves the axis {dim}, which has {input.shape[dim]} elements")
    (lower, low), (upper, high) = (end.chunk(2, dim) for end in input.ends())
    low, high = torch.sigmoid(low), torch.sigmoid(high)
    # The halves are independent, and a gate is above 0.
    output = Interval(
        torch.minimum(lower * low, lower * high), torch.maximum(upper * low, upper * high)
    ).within(input.bound_pass)
    if input.rounding is None:
        return output
    size = torch.maximum(-lower, upper)
    center, radius = output.as_ball()
    # A gate is off by ulps of 1, which the other half multiplies.
    return Interval.ball(center, input.rounding.widen(radius, size, ulps=8, gain=1 + size))


@rule(
    torch.nan_to_num, torch.Tensor.nan_to_num,
    inplace=(torch.nan_to_num_, torch.Tensor.nan_to_num_), ulps=0,
)  # fmt: skip
def nan_to_num(
    input: Interval,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Interval:
    # Of finite numbers it is the identity. Others stay NaN: nothing is known of them.
    lower, upper = input.ends()
    finite = lower.isfinite() & upper.isfinite()
    return Interval(torch.where(finite, lower, math.nan), torch.where(finite, upper, math.nan))


def _dropout(function: Callable[..., Tensor]) -> Any:
    unless_told = signature(function).parameters["training"].default

    def dropout(input: Interval, p: float = 0.5, training: bool = unless_told) -> Interval:
        if training and p > 0:
            refuse(function, RANDOM)
        return input

    return dropout


for _function in (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
):  # fmt: skip
    rule(_function, ulps=0)(_dropout(_function))
