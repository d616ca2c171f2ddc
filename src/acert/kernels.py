"""CUDA only: updates of optimisers as Triton kernels, one pass over the memory each.

Their numbers change from step to step, so they are read from tensors; PyTorch's own fused Adam has
its betas fixed. Where Triton is missing, `acert.optimizers` does the same in several passes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["adam_", "nesterov_", "subtract_"]

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
