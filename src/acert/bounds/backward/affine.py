"""Affine operations seen backward: coefficients go through W the other way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acert.bounds.backward.table import backward
from acert.bounds.interval import Interval
from acert.bounds.linear_bound import Step
from acert.bounds.refusals import refuse
from acert.bounds.rules.affine import normalization
from acert.bounds.table import RULES, Function


@backward(F.linear, sums=True)
def _linear(step: Step, input: Interval, weight: Tensor, bias: Tensor | None = None) -> None:
    if weight.ndim != 2:
        refuse(F.linear, f"CROWN needs a matrix as its weight; got {weight.ndim} axes")
    if input.ndim < 2:
        batched(step, input, 0)
    weight = weight.to(step.A.dtype)
    bias = None if bias is None else bias.to(weight.dtype)
    step.bound.send(input, step.A @ weight)
    if bias is not None:
        step.bound.shift(step.A, bias)
    step.bound.allow(
        step.A,
        lambda: F.linear(input.magnitude, weight.abs(), None if bias is None else bias.abs()),
        network=weight.shape[1],
        own=weight.shape[0],
        factor=weight.abs().amax(),
        reach=lambda: input.magnitude,
    )


@backward(torch.matmul, sums=True)
def _matmul(step: Step, input: Interval, other: Tensor) -> None:
    _linear(step, input, other.mT)


_CONVOLUTIONS: dict[int, tuple[Function, Function]] = {
    1: (F.conv1d, F.conv_transpose1d),
    2: (F.conv2d, F.conv_transpose2d),
    3: (F.conv3d, F.conv_transpose3d),
}


def batched(step: Step, input: Interval, spatial: int) -> None:
    """Refuses an input without a batch axis, which PyTorch takes for one sample."""
    if input.ndim != spatial + 2:
        refuse(step.source.function, "CROWN needs a batch axis; got an input without one")


def _prepared(
    step: Step, input: Interval, weight: Tensor, bias: Tensor | None
) -> tuple[Function, Function, Tensor, Tensor | None]:
    """Both convolutions of as many axes, weight and bias in the format of the walk."""
    spatial = weight.ndim - 2
    batched(step, input, spatial)
    weight = weight.to(step.A.dtype)
    return *_CONVOLUTIONS[spatial], weight, None if bias is None else bias.to(weight.dtype)


@backward(F.conv1d, F.conv2d, F.conv3d, sums=True, reaching=True)
def convolution(
    step: Step,
    input: Interval,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> None:
    """The walk back through a convolution: one transposed, cut to the input."""
    forward, transposed, weight, bias = _prepared(step, input, weight, bias)
    kernel, spatial = weight.shape[2:], input.ndim - 2
    stride, dilation = each(stride, spatial), each(dilation, spatial)
    before = _padding_before(padding, kernel, dilation)
    input, before = step.under(input, kernel, stride, before, dilation)
    trimmed: list[int] = []
    room: list[int] = []
    cut: list[int] = []
    sides: list[int] = []
    for axis, left in enumerate(before):
        reached = (step.A.shape[3 + axis] - 1) * stride[axis] + dilation[axis] * (kernel[axis] - 1)
        right = reached + 1 - left - input.shape[2 + axis]
        # The transposed one trims both ends alike; what the stride never reached has coefficient 0.
        fits = left - right < max(stride[axis], dilation[axis])
        trimmed.append(left if fits else right)
        room.append(max(left - right, 0) if fits else 0)
        cut = [trimmed[-1] - left, min(left - right, 0), *cut]
        sides = [left, max(right, 0), *sides]
    coefficients = transposed(
        step.A.flatten(0, 1), weight, None, stride, trimmed, room, groups, dilation
    )
    _send_kernel(
        step, input, weight, bias, F.pad(coefficients, cut) if any(cut) else coefficients,
        lambda x, w, b: forward(F.pad(x, sides), w, b, stride, 0, dilation, groups),
        network=weight.shape[1], own=weight.shape[0] // groups,
    )  # fmt: skip


@backward(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, sums=True)
def _transposed_convolution(
    step: Step,
    input: Interval,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> None:
    forward, transposed, weight, bias = _prepared(step, input, weight, bias)
    full = forward(step.A.flatten(0, 1), weight, None, stride, padding, dilation, groups)
    # `output_padding` may leave room for coefficients of elements that the input does not have.
    sides: list[int] = []
    for axis in range(2, input.ndim):
        sides = [0, input.shape[axis] - full.shape[axis], *sides]
    _send_kernel(
        step, input, weight, bias, F.pad(full, sides),
        lambda x, w, b: transposed(x, w, b, stride, padding, output_padding, groups, dilation),
        network=weight.shape[0] // groups, own=weight.shape[1],
    )  # fmt: skip


def _send_kernel(
    step: Step,
    input: Interval,
    weight: Tensor,
    bias: Tensor | None,
    coefficients: Tensor,
    function: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    *,
    network: int,
    own: int,
) -> None:
    """Hands on the coefficients that a kernel leaves, with its bias and its rounding.

    `network` and `own` count the channels that a network's sums and ours go over.
    """
    kernel = weight.shape[2:]
    step.bound.send(input, coefficients.reshape(*step.A.shape[:2], *input.shape[1:]))
    if bias is not None:
        step.bound.shift(step.A, bias.reshape(-1, *[1] * len(kernel)))
    step.bound.allow(
        step.A,
        lambda: function(input.magnitude, weight.abs(), None if bias is None else bias.abs()),
        network=network * kernel.numel(),
        own=own * kernel.numel(),
        factor=weight.abs().amax(),
        reach=lambda: input.magnitude,
    )


def _padding_before(padding: Any, kernel: torch.Size, dilation: Any) -> list[int]:
    if padding == "valid":
        return [0] * len(kernel)
    if padding == "same":  # PyTorch puts the odd one behind
        spread = each(dilation, len(kernel))
        return [step * (size - 1) // 2 for step, size in zip(spread, kernel, strict=True)]
    return each(padding, len(kernel))


def each(value: Any, count: int) -> list[int]:
    """One number an axis."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    return list(value) * count if len(value) == 1 else list(value)


def _reduction(step: Step, input: Interval, dim: Any = None, *_: Any, **keywords: Any) -> None:
    dim = keywords.get("axis") if dim is None else dim
    axes = {axis % input.ndim for axis in ([dim] if isinstance(dim, int) else dim or [0])}
    if 0 in axes:
        refuse(step.source.function, "CROWN has a backward rule only for axes besides the batch")
    kept = [1 if axis in axes else input.shape[axis] for axis in range(1, input.ndim)]
    summands = math.prod([input.shape[axis] for axis in axes])  # a list, so that it compiles
    factor = 1.0 if step.source.rule is RULES[torch.sum].rule else 1 / summands
    A = (step.A * factor).reshape(*step.A.shape[:2], *kept)
    step.bound.send(input, A.expand(*A.shape[:2], *input.shape[1:]))
    step.bound.allow(
        step.A,
        lambda: (input.magnitude * factor).sum(tuple(axes)).reshape(-1, *step.A.shape[2:]),
        network=summands,
        own=2,
        reach=lambda: input.magnitude,
    )


backward(torch.sum, torch.mean, sums=True)(_reduction)


@backward(F.batch_norm, local=True)
def _batch_norm(
    step: Step,
    input: Interval,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> None:
    taken = step.statistics if training else (running_mean, running_var)
    assert taken is not None  # the forward pass has seen to it
    mean, variance = taken
    assert mean is not None and variance is not None
    mean, inverse, factor, shift = normalization(
        mean, variance, weight, bias, eps=eps, dtype=step.A.dtype, ndim=input.ndim
    )
    # A network may multiply in any order.
    largest = ((1 + mean.abs()) * (1 + inverse) * (1 + factor.abs())).amax()
    scale = inverse * factor
    step.scale(
        input, scale, shift - mean * scale, largest=largest,
        # Parts that cancel in the shift do not cancel in its error.
        magnitude=lambda: (input.magnitude + mean.abs()) * scale.abs() + shift.abs(),
    )  # fmt: skip
