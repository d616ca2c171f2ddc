"""The convolutions and matrix products of a computation: counted, and called again bare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class Layout:
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def random(self) -> Tensor:
        steps = zip(self.shape, self.strides, strict=True)
        held = 1 + sum((size - 1) * stride for size, stride in steps)
        numbers = torch.randn(held, device=self.device).to(self.dtype)
        return numbers.as_strided(self.shape, self.strides)


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every convolution and matrix product inside, backward ones included.

    They are those that PyTorch's FLOP counter knows: a multiplication and an addition count as
    two. `flop` holds their number by the dtype they were computed in.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Callable[..., Any], Any, Any]] = []
        self.flop: dict[torch.dtype, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            first = next(arg for arg in args if isinstance(arg, Tensor))
            counted = count(*args, **kwargs, out_val=output)
            self.flop[first.dtype] = self.flop.get(first.dtype, 0) + counted
            self.calls.append((func, *tree_map_only(Tensor, Layout.of, (args, kwargs))))
        return output

    @property
    def gflop(self) -> float:
        """All of them together, in units of 10^9."""
        return sum(self.flop.values()) / 1e9

    def bare(self, *, shared: bool = False) -> Callable[[], None]:
        """A function that makes the same calls on random tensors of the same layouts.

        Every call has tensors of its own, as in any computation. With `shared`, tensors of one
        layout are one tensor: the least that the calls can take, since what they read lies in the
        cache already.
        """
        made: dict[Layout, Tensor] = {}

        def tensor(layout: Layout) -> Tensor:
            return made.setdefault(layout, layout.random()) if shared else layout.random()

        calls = [
            (func, *tree_map_only(Layout, tensor, (args, kwargs)))
            for func, args, kwargs in self.calls
        ]

        def run() -> None:
            with torch.no_grad():
                for func, args, kwargs in calls:
                    func(*args, **kwargs)

        return run
