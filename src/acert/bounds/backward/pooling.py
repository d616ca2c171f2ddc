"""Pooling seen backward: averages are convolutions, maxima have lines above and below."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acert.bounds.backward.affine import batched, convolution, each
from acert.bounds.backward.table import backward, everywhere
from acert.bounds.interval import Interval
from acert.bounds.linear_bound import Step
from acert.bounds.refusals import refuse
from acert.bounds.table import RULES, Function

# How many axes the windows of an operation have.
_SPATIAL: dict[Function, int] = {
    RULES[function].rule: axes
    for axes, functions in {
        1: (F.avg_pool1d, F.adaptive_avg_pool1d, F.max_pool1d),
        2: (F.avg_pool2d, F.adaptive_avg_pool2d, F.max_pool2d),
        3: (F.avg_pool3d, F.adaptive_avg_pool3d, F.max_pool3d),
    }.items()
    for function in functions
}


def _spatial(step: Step, input: Interval) -> int:
    spatial = _SPATIAL[step.source.rule]
    batched(step, input, spatial)
    return spatial


@backward(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, sums=True, reaching=True)
def _avg_pool(
    step: Step,
    input: Interval,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> None:
    spatial = _spatial(step, input)
    kernel = each(kernel_size, spatial)
    if ceil_mode or (any(each(padding, spatial)) and not count_include_pad):
        refuse(
            step.source.function,
            "CROWN has a backward rule only where all its windows weigh the same",
        )
    channels = input.shape[1]
    weight = step.A.new_full((channels, 1, *kernel), 1 / (divisor_override or math.prod(kernel)))
    convolution(step, input, weight, None, stride or kernel, padding, 1, channels)


@backward(
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, sums=True, reaching=True
)
def _adaptive_avg_pool(step: Step, input: Interval, output_size: Any) -> None:
    spatial = _spatial(step, input)
    sizes = list(input.shape[2:])
    wanted = [out or size for out, size in zip(each(output_size, spatial), sizes, strict=True)]
    if any(size % out for out, size in zip(wanted, sizes, strict=True)):
        refuse(
            step.source.function,
            f"CROWN has a backward rule only where {wanted} divides {sizes}",
        )
    _avg_pool(step, input, [size // out for out, size in zip(wanted, sizes, strict=True)])


@backward(F.max_pool1d, F.max_pool2d, F.max_pool3d, relaxed=everywhere, reaching=True)
def _max_pool(
    step: Step,
    input: Interval,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> None:
    """Below, the element with the largest lower end; above, it too, or else the largest upper end.

    A maximum is at least any element. It is the very element whose lower end no upper end of
    another exceeds, and never more than the largest upper end: nothing of that is rounded.
    """
    spatial = _spatial(step, input)
    kernel, dilation = each(kernel_size, spatial), each(dilation, spatial)
    stride = each(stride or kernel, spatial)
    input, before = step.under(input, kernel, stride, each(padding, spatial), dilation)

    def windows(x: Tensor, fill: float) -> Tensor:
        return _windows(x, step.A.shape[3:], kernel, stride, before, dilation, fill=fill)

    lower, upper = (windows(end, -math.inf) for end in input.ends())
    best = lower.argmax(-1, keepdim=True)
    highest, others = upper.amax(-1), upper.scatter(-1, best, -math.inf).amax(-1)
    certain = (lower.gather(-1, best).squeeze(-1) >= others).unsqueeze(1)
    positive, negative = step.A.clamp(min=0), torch.where(step.A < 0, step.A, 0.0)
    step.bound.shift(torch.where(certain, 0.0, positive), highest)
    # The number of the chosen element in its channel.
    count = math.prod(input.shape[2:])
    numbers = torch.arange(count, dtype=torch.float64, device=input.device)
    places = windows(numbers.reshape(1, 1, *input.shape[2:]), 0.0).expand(lower.shape)
    chosen = places.gather(-1, best).long().flatten(2).unsqueeze(1)
    A = (negative + torch.where(certain, positive, 0.0)).flatten(3)
    sent = A.new_zeros(*A.shape[:3], count).scatter_add(3, chosen.expand(A.shape), A)
    step.bound.send(input, sent.reshape(*A.shape[:3], *input.shape[2:]))
    # Windows that overlap add up the coefficients of one element, no more than a kernel has.
    step.bound.allow(step.A, lambda: windows(input.magnitude, 0.0).amax(-1), own=math.prod(kernel))


def _windows(
    x: Tensor,
    count: tuple[int, ...],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    *,
    fill: float,
) -> Tensor:
    """The elements of every window, (B, C, *count, elements), with `fill` outside of x."""
    spans = [step * (size - 1) + 1 for step, size in zip(dilation, kernel, strict=True)]
    sides: list[int] = []
    for axis, before in enumerate(padding):
        reached = (count[axis] - 1) * stride[axis] + spans[axis]
        sides = [before, reached - before - x.shape[2 + axis], *sides]
    x = F.pad(x, sides, value=fill)
    for axis, span in enumerate(spans):
        x = x.unfold(2 + axis, span, stride[axis])[..., :: dilation[axis]]
    return x.flatten(2 + len(kernel))
