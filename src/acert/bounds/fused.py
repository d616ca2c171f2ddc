"""ReLU behind a batch norm, of a ball: one look at the memory forward, one backward.

Between two convolutions a training step on a GPU waits for memory, not for arithmetic, and a
compiler takes several passes for what is here one operator with its own gradient. Triton does it
on CUDA; the few lines of PyTorch beside it are what the tests compare it with, and do it anywhere
else. Balls are matrices here, (samples and pixels, channels).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["SUMS", "available", "relu_of_scaled"]

# What regularisers ask of the balls that enter a ReLU: of their centers the sum, the sums, squares
# and numbers of those surely above and surely below 0, and the sum of the radii.
SUMS = ("center", "on", "off", "on_square", "off_square", "on_count", "off_count", "radius")
_PIECES = 1024  # sums are added up by as many at the most


def relu_of_scaled(
    center: Tensor, radius: Tensor, mean: Tensor, inverse: Tensor, factor: Tensor, shift: Tensor,
    *, observe: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """ReLU of the ball around `(center - mean) * inverse * factor + shift`, and its sums.

    Center and radius keep the format they come in. The sums, in the order of `SUMS`, are those of
    the ball that enters the ReLU; they are 0 if nobody `observe`s it.
    """
    center, radius, sums = _forward(center, radius, mean, inverse, factor, shift, observe)
    return center, radius, sums.sum(0)


@cache
def available(device: torch.device) -> bool:
    """Whether Triton is there and builds kernels for the device: it wants a C compiler."""
    if device.type != "cuda":
        return False
    try:
        with torch.cuda.device(device), torch.enable_grad():  # Triton takes the current device
            ball = torch.zeros((2, 8, 4), dtype=torch.float16, device=device, requires_grad=True)
            channel = torch.ones((4, 4), device=device)
            output = relu_of_scaled(*ball, *channel, observe=True)
            torch.autograd.grad([part.sum() for part in output], ball)
            torch.cuda.synchronize(device)
    except Exception:  # Whatever is amiss, there is another way.
        return False
    return True


@torch.library.custom_op("acert::relu_of_scaled", mutates_args=())
def _forward(
    center: Tensor, radius: Tensor, mean: Tensor, inverse: Tensor, factor: Tensor, shift: Tensor,
    observe: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if center.is_cuda and mean.dtype == torch.float32:
        from acert import kernels

        numbers = (mean, inverse, factor, shift)
        return kernels.relu_of_scaled(center, radius, numbers, observe, _pieces(center))
    scale = inverse * factor
    middle, reach = (center.to(scale) - mean) * scale + shift, radius.to(scale) * scale.abs()
    half = (0.5 * (middle + reach)).relu()
    # NaN where one of these is infinite: a ball that overflowed is no point, wherever it lies.
    unknown = (half - half) + (middle - middle)
    output = torch.maximum(half, middle), torch.minimum(half, reach + unknown)
    sums = middle.new_zeros((_pieces(center), len(SUMS)))
    if observe:
        on, off = (middle > reach).to(scale), (middle + reach < 0).to(scale)
        above, below = middle * on, middle * off
        values = (middle, above, below, above.square(), below.square(), on, off, reach)
        sums[0] = torch.stack([value.sum() for value in values])
    return output[0].to(center.dtype), output[1].to(center.dtype), sums


@_forward.register_fake
def _(
    center: Tensor, radius: Tensor, mean: Tensor, inverse: Tensor, factor: Tensor, shift: Tensor,
    observe: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    sums = mean.new_empty((_pieces(center), len(SUMS)))
    return torch.empty_like(center), torch.empty_like(radius), sums


@torch.library.custom_op("acert::relu_of_scaled_backward", mutates_args=())
def _backward(
    by_center: Tensor, by_radius: Tensor, by_sums: Tensor, center: Tensor, radius: Tensor,
    mean: Tensor, inverse: Tensor, factor: Tensor, shift: Tensor, observe: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if center.is_cuda and mean.dtype == torch.float32:
        from acert import kernels

        numbers = (mean, inverse, factor, shift)
        return kernels.relu_of_scaled_backward(
            by_center, by_radius, by_sums, center, radius, numbers, observe, _pieces(center)
        )
    scale = inverse * factor
    moved, radius = center.to(scale) - mean, radius.to(scale)
    middle, reach = moved * scale + shift, radius * scale.abs()
    by_center, by_radius = by_center.to(scale), by_radius.to(scale)
    on, upper = (middle > reach).to(scale), middle + reach
    by_lower = 0.5 * (by_center - by_radius) * on
    by_upper = 0.5 * (by_center + by_radius) * (upper > 0)
    by_middle, by_reach = by_upper + by_lower, by_upper - by_lower
    if observe:
        off = (upper < 0).to(scale)
        whole, above, below, above_square, below_square, _, _, of_reach = by_sums.unbind()
        by_middle = by_middle + whole + on * above + off * below
        by_middle = by_middle + 2 * middle * (on * above_square + off * below_square)
        by_reach = by_reach + of_reach
    by_scale = by_middle * moved + scale.sign() * by_reach * radius
    sums = middle.new_zeros((2, _pieces(center), len(scale)))
    sums[0, 0], sums[1, 0] = by_scale.sum(0), by_middle.sum(0)
    by_middle, by_reach = by_middle * scale, by_reach * scale.abs()
    return by_middle.to(center.dtype), by_reach.to(center.dtype), sums


@_backward.register_fake
def _(
    by_center: Tensor, by_radius: Tensor, by_sums: Tensor, center: Tensor, radius: Tensor,
    mean: Tensor, inverse: Tensor, factor: Tensor, shift: Tensor, observe: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    sums = mean.new_empty((2, _pieces(center), len(mean)))
    return torch.empty_like(center), torch.empty_like(radius), sums


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.observe = inputs
    ctx.save_for_backward(*tensors)


def _gradient(
    ctx: Any, by_center: Tensor, by_radius: Tensor, by_sums: Tensor
) -> tuple[Tensor | None, ...]:
    # Every piece is added to the same sums, so that all have the same gradient.
    by_sums = by_sums[0].contiguous()
    by_center, by_radius = by_center.contiguous(), by_radius.contiguous()
    saved = ctx.saved_tensors  # once: checkpoints hand each out a single time
    by_center, by_radius, by_channel = _backward(by_center, by_radius, by_sums, *saved, ctx.observe)
    by_scale, by_shift = by_channel.sum(1).unbind()
    _, _, _, inverse, factor, _ = saved
    by_mean, by_inverse = -inverse * factor * by_shift, factor * by_scale
    return by_center, by_radius, by_mean, by_inverse, inverse * by_scale, by_shift, None


_forward.register_autograd(_gradient, setup_context=_save)


def _pieces(matrix: Tensor) -> int:
    """How many programs share the rows of a matrix, each looking at a thousand numbers at once."""
    return min(max(1, math.ceil(matrix.numel() / 1024)), _PIECES)
