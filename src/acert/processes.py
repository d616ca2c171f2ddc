"""Several processes that train as one: each holds a part of every batch.

What a step needs of the whole batch, means and sums, is added up over the processes, with
gradient through the addition. `join` finds out whether torchrun has started us, and with whom.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "ALONE", "Part", "Processes", "is_loss_of_a_process", "join", "local_device", "speaks_for_all",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Processes:
    """How many processes train together, and which of them this one is, from 0.

    `joined` says whether they talk to each other; torchrun may also start one alone.
    """

    rank: int = 0
    count: int = 1
    joined: bool = False

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and talks to the user."""
        return self.rank == 0

    def slice_of(self, size: int) -> slice:
        """Positions of a batch of `size` that are this process's; parts differ by 1 at most."""
        return slice(size * self.rank // self.count, size * (self.rank + 1) // self.count)

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place and without gradient."""
        if self.joined:
            dist.all_reduce(values)
        return values

    def as_first(self, value: Any) -> Any:
        """The first process's value, for all of them; anything that can be pickled."""
        if not self.joined:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def leave(self) -> None:
        """Ends the connection, once nothing is left to say."""
        if self.joined:
            dist.destroy_process_group()

    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes, in their order; anything that can be pickled."""
        if not self.joined:
            return [value]
        found = [None] * self.count
        dist.all_gather_object(found, value)
        return list(found)

    def tensors_as_first(
        self, tensors: dict[str, Tensor], device: torch.device
    ) -> dict[str, Tensor]:
        """The first process's tensors, for all of them; what the others hold is not looked at."""
        forms = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
        found = {}
        for name, (shape, dtype) in self.as_first(forms).items():
            mine = tensors[name].to(device).contiguous() if self.first else None
            found[name] = torch.empty(shape, dtype=dtype, device=device) if mine is None else mine
            dist.broadcast(found[name], src=0)
        return found


ALONE = Processes()


@dataclass(frozen=True)
class Part:
    """This process's part of a batch: `share` of its samples."""

    processes: Processes
    share: float

    def mean(self, values: Tensor, dims: Sequence[int]) -> Tensor:
        """The mean over the whole batch, of which `values` hold this part."""
        return _total(self.share * values.mean(tuple(dims)))

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes, number by number."""
        return _total(values)

    def once(self, value: Tensor) -> Tensor:
        """A value that every process has alike, divided so that all of them add up to it."""
        return value / self.processes.count


def local_device(name: str) -> str:
    """The device of this process: its own GPU where torchrun has started several on a machine."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if name == "cuda" and _started() else name


def join(device: torch.device) -> Processes:
    """The processes that torchrun has started, of which this is one; `ALONE` if it has not."""
    if not _started():
        return ALONE
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Processes(rank=dist.get_rank(), count=dist.get_world_size(), joined=True)


def speaks_for_all() -> bool:
    """Whether this process is to print what concerns all: the first of them that asks."""
    if not _started():
        return True
    # torchrun's own store outlives any of its processes, the first one too.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: Any = vars(dist)["TCPStore"]  # public, but not to mypy
    return bool(store(address, port, is_master=False).add("acert-speaker", 1) == 1)


def is_loss_of_a_process(error: RuntimeError) -> bool:
    """Whether an error says that another process does not answer any more."""
    # Gloo has no error class of its own.
    words = ("gloo", "nccl", "connection", "peer", "process group")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)


def _started() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


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
