"""Several processes that train as one: each holds a part of every batch.

What a step needs of the whole batch, means and sums, is added up over the processes, with
gradient through the addition. `torch.distributed` must be initialised by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ALONE", "Part", "Processes"]


@dataclass(frozen=True, kw_only=True)
class Processes:
    """How many processes train together, and which of them this one is, from 0."""

    rank: int = 0
    count: int = 1

    def slice_of(self, size: int) -> slice:
        """Positions of a batch of `size` that are this process's; parts differ by 1 at most."""
        return slice(size * self.rank // self.count, size * (self.rank + 1) // self.count)

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place and without gradient."""
        if self.count > 1:
            dist.all_reduce(values)
        return values


ALONE = Processes()


@dataclass(frozen=True)
class Part:
    """This process's part of a batch: `share` of its samples."""

    processes: Processes
    share: float

    def mean(self, values: Tensor, dims: Sequence[int] | None = None) -> Tensor:
        """The mean over the whole batch, of which `values` hold this part."""
        mean = values.mean() if dims is None else values.mean(tuple(dims))
        return _total(self.share * mean)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the whole batch."""
        return _total(values.sum())

    def once(self, value: Tensor) -> Tensor:
        """A value that every process has alike, divided so that all of them add up to it."""
        return value / self.processes.count


def _total(value: Tensor) -> Tensor:
    total: Tensor = _Total.apply(value)  # type: ignore[no-untyped-call]
    return total


class _Total(torch.autograd.Function):
    """The sum over all processes; each one's gradient is the sum of all gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total
