"""CUDA only: Triton kernels, one pass over the memory each.

Updates of optimisers: their numbers change from step to step, so they are read from tensors;
PyTorch's own fused Adam has its betas fixed. And what a bound pass does between two products. Where
Triton is missing, `acert.optimizers` and the rules of `acert.bounds` do the same in several passes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["adam_", "nesterov_", "relu_of_scaled", "relu_of_scaled_backward", "subtract_"]

_BLOCK = 1024


@triton.jit
def _adam(
    weight, gradient, mean, square, numbers, share, epsilon, count, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep, momentum = tl.load(numbers), tl.load(numbers + 1)
    length, root = tl.load(numbers + 2), tl.load(numbers + 3)
    inside = at < tl.where(keep != 0, count, 0)
    g = tl.load(gradient + at, mask=inside)
    m = tl.load(mean + at, mask=inside)
    v = tl.load(square + at, mask=inside)
    m += (1 - momentum) * (g - m)
    v += share * (g * g - v)
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)
    w = tl.load(weight + at, mask=inside)
    tl.store(weight + at, w - length * m / (tl.sqrt(v) / root + epsilon), mask=inside)


@triton.jit
def _nesterov(
    average, gradient, out, numbers, count, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep, momentum = tl.load(numbers), tl.load(numbers + 1)
    inside = at < count
    kept = at < tl.where(keep != 0, count, 0)
    g = tl.load(gradient + at, mask=kept, other=0.0)
    m = tl.load(average + at, mask=kept, other=0.0)
    m += (1 - momentum) * (g - m)
    tl.store(average + at, m, mask=kept)
    tl.store(out + at, g + momentum * (m - g), mask=inside)


@triton.jit
def _subtract(
    weight, update, length, count, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    w = tl.load(weight + at, mask=inside)
    u = tl.load(update + at, mask=inside).to(tl.float32)
    tl.store(weight + at, w - tl.load(length) * u, mask=inside)


def adam_(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, numbers: Tensor, *,
    beta2: float, epsilon: float,
) -> None:  # fmt: skip
    """One update of Adam in place, by `numbers`: keep, first beta, length, root.

    The length is the rate over the first correction, the root that of the second one. Nothing is
    written where keep is 0.
    """
    count = weight.numel()
    _adam[_grid(count)](
        weight, gradient, mean, square, numbers, 1 - beta2, epsilon, count, BLOCK=_BLOCK
    )


def nesterov_(average: Tensor, gradient: Tensor, numbers: Tensor) -> Tensor:
    """Moves the average on, in place; Nesterov's direction in bfloat16, by `numbers`: keep, beta.

    Where keep is 0 the average stays as it is, and the direction is 0.
    """
    out = torch.empty_like(gradient, dtype=torch.bfloat16)
    count = average.numel()
    _nesterov[_grid(count)](average, gradient, out, numbers, count, BLOCK=_BLOCK)
    return out


def subtract_(weight: Tensor, update: Tensor, length: Tensor) -> None:
    """Takes `length` times the update from the weight, whatever the update's format."""
    count = weight.numel()
    _subtract[_grid(count)](weight, update, length, count, BLOCK=_BLOCK)


def _grid(count: int) -> Any:
    return (triton.cdiv(count, _BLOCK),)


@triton.jit
def _relu_of_scaled(
    center, radius, mean, inverse, factor, shift, out_center, out_radius, sums, rows, channels,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, TURNS: tl.constexpr, OBSERVE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)[None, :]
    real = column < channels
    # Zeros beside the channels: sums go over whole tiles.
    m = tl.load(mean + column, mask=real, other=0.0)
    a = tl.load(inverse + column, mask=real, other=0.0)
    a *= tl.load(factor + column, mask=real, other=0.0)
    b = tl.load(shift + column, mask=real, other=0.0)
    if OBSERVE:
        whole = tl.zeros([ROWS, WIDTH], tl.float32)
        above, below, of_radius = whole, whole, whole
        above_square, below_square, above_count, below_count = whole, whole, whole, whole
    for turn in range(TURNS):
        row = (turn * tl.num_programs(0) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = real & (row < rows)
        at = row.to(tl.int64) * channels + column
        c = (tl.load(center + at, mask=inside, other=0.0).to(tl.float32) - m) * a + b
        r = tl.load(radius + at, mask=inside, other=0.0).to(tl.float32) * tl.abs(a)
        upper = c + r
        # By themselves these take the number beside a NaN: a ball that overflowed would be a point.
        half = tl.maximum(0.5 * upper, 0.0, propagate_nan=tl.PropagateNan.ALL)
        middle = tl.maximum(half, c, propagate_nan=tl.PropagateNan.ALL)
        known = r + ((half - half) + (c - c))  # NaN where half or the center is infinite
        reach = tl.minimum(half, known, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out_center + at, middle, mask=inside)
        tl.store(out_radius + at, reach, mask=inside)
        if OBSERVE:
            on, off = inside & (c > r), inside & (upper < 0)
            whole += tl.where(inside, c, 0.0)
            of_radius += r
            above += tl.where(on, c, 0.0)
            below += tl.where(off, c, 0.0)
            above_square += tl.where(on, c * c, 0.0)
            below_square += tl.where(off, c * c, 0.0)
            above_count += tl.where(on, 1.0, 0.0)
            below_count += tl.where(off, 1.0, 0.0)
    if OBSERVE:  # in the order of `fused.SUMS`
        at = sums + tl.program_id(0) * 8
        tl.store(at, tl.sum(whole))
        tl.store(at + 1, tl.sum(above))
        tl.store(at + 2, tl.sum(below))
        tl.store(at + 3, tl.sum(above_square))
        tl.store(at + 4, tl.sum(below_square))
        tl.store(at + 5, tl.sum(above_count))
        tl.store(at + 6, tl.sum(below_count))
        tl.store(at + 7, tl.sum(of_radius))


@triton.jit
def _relu_of_scaled_backward(
    by_center, by_radius, by_sums, center, radius, mean, inverse, factor, shift,
    out_center, out_radius, by_channel, rows, channels,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, TURNS: tl.constexpr, OBSERVE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)[None, :]
    real = column < channels
    # Zeros beside the channels: sums go over whole tiles.
    m = tl.load(mean + column, mask=real, other=0.0)
    a = tl.load(inverse + column, mask=real, other=0.0)
    a *= tl.load(factor + column, mask=real, other=0.0)
    b = tl.load(shift + column, mask=real, other=0.0)
    size, sign = tl.abs(a), tl.where(a > 0, 1.0, tl.where(a < 0, -1.0, 0.0))
    if OBSERVE:
        whole, above, below = tl.load(by_sums), tl.load(by_sums + 1), tl.load(by_sums + 2)
        above_square, below_square = tl.load(by_sums + 3), tl.load(by_sums + 4)
        of_radius = tl.load(by_sums + 7)
    scales = tl.zeros([ROWS, WIDTH], tl.float32)
    shifts = tl.zeros([ROWS, WIDTH], tl.float32)
    for turn in range(TURNS):
        row = (turn * tl.num_programs(0) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = real & (row < rows)
        at = row.to(tl.int64) * channels + column
        middle = tl.load(center + at, mask=inside, other=0.0).to(tl.float32) - m
        reach = tl.load(radius + at, mask=inside, other=0.0).to(tl.float32)
        of_center = tl.load(by_center + at, mask=inside, other=0.0).to(tl.float32)
        of_reach = tl.load(by_radius + at, mask=inside, other=0.0).to(tl.float32)
        c, r = middle * a + b, reach * size
        upper = c + r
        of_lower = tl.where(c > r, 0.5 * (of_center - of_reach), 0.0)
        of_upper = tl.where(upper > 0, 0.5 * (of_center + of_reach), 0.0)
        of_center, of_reach = of_upper + of_lower, of_upper - of_lower
        if OBSERVE:
            of_center += whole
            of_center += tl.where(c > r, above + 2 * above_square * c, 0.0)
            of_center += tl.where(upper < 0, below + 2 * below_square * c, 0.0)
            of_reach += of_radius
        tl.store(out_center + at, of_center * a, mask=inside)
        tl.store(out_radius + at, of_reach * size, mask=inside)
        scales += tl.where(inside, of_center * middle + sign * of_reach * reach, 0.0)
        shifts += tl.where(inside, of_center, 0.0)
    channel = tl.arange(0, WIDTH)
    at = by_channel + tl.program_id(0) * channels + channel
    tl.store(at, tl.sum(scales, 0), mask=channel < channels)
    at += tl.num_programs(0) * channels
    tl.store(at, tl.sum(shifts, 0), mask=channel < channels)


def relu_of_scaled(
    center: Tensor, radius: Tensor, channel: Sequence[Tensor], observe: bool, pieces: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Center and radius of the result, and the sums of each of `pieces` programs.

    All are contiguous; the sums are not filled in where nobody observes them.
    """
    output = torch.empty_like(center), torch.empty_like(radius)
    sums = channel[0].new_zeros((pieces, 8))
    rows, channels = center.shape
    _relu_of_scaled[(pieces,)](
        center, radius, *channel, *output, sums, rows, channels, OBSERVE=observe,
        **_share(rows, channels, pieces),
    )  # fmt: skip
    return *output, sums


def relu_of_scaled_backward(
    by_center: Tensor, by_radius: Tensor, by_sums: Tensor, center: Tensor, radius: Tensor,
    channel: Sequence[Tensor], observe: bool, pieces: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of center and radius, and those of scale and shift by each of `pieces` programs.

    All are contiguous; the last is (2, pieces, channels).
    """
    output = torch.empty_like(center), torch.empty_like(radius)
    rows, channels = center.shape
    by_channel = channel[0].new_empty((2, pieces, channels))
    _relu_of_scaled_backward[(pieces,)](
        by_center, by_radius, by_sums, center, radius, *channel, *output, by_channel,
        rows, channels, OBSERVE=observe, **_share(rows, channels, pieces),
    )  # fmt: skip
    return *output, by_channel


def _share(rows: int, channels: int, pieces: int) -> dict[str, int]:
    """What each of `pieces` programs does: so many rows at a time, so many times."""
    width = triton.next_power_of_2(channels)
    at_once = max(1, _BLOCK // width)
    return {"ROWS": at_once, "WIDTH": width, "TURNS": triton.cdiv(rows, at_once * pieces)}
