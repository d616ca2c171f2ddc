"""Calling a model with other tensors in place of its own: copies of buffers, fixed parameters.

Each module is named once and ties are not looked for. PyTorch's own search for ties finds a module
that has two names twice, and then leaves the other tensors in it for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

__all__ = [
    "called_with", "copied_buffers", "fixed_parameters", "other_buffers", "own_buffers",
    "own_parameters",
]  # fmt: skip


def own_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every module's parameters by name; one that two modules share has a name in each."""
    return {
        f"{path}.{name}" if path else name: parameter
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    }


def own_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Every module's buffers by name; one that two modules share has a name in each."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
    }


def fixed_parameters(model: nn.Module) -> dict[str, Tensor]:
    """All parameters by name, for `called_with`, without gradient."""
    return {name: parameter.detach() for name, parameter in own_parameters(model).items()}


def copied_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers by name, for `called_with`: models count batches and the like there.

    A buffer that two modules share is one copy: what one of them writes, the other reads.
    """
    buffers = own_buffers(model)
    copies = {buffer: buffer.clone() for buffer in buffers.values()}
    return {name: copies[buffer] for name, buffer in buffers.items()}


@contextmanager
def other_buffers(model: nn.Module) -> Iterator[None]:
    """Copies in place of all buffers meanwhile: `called_with` in less time, not to be compiled."""
    places = [
        (module._buffers, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    copies = {buffer: buffer.clone() for _, _, buffer in places}
    try:
        for buffers, name, buffer in places:
            buffers[name] = copies[buffer]
        yield
    finally:
        for buffers, name, buffer in places:
            buffers[name] = buffer


def called_with(model: nn.Module, tensors: dict[str, Tensor], *inputs: Any) -> Any:
    """The model's output with other tensors in place of its own, which it has back afterwards.

    Of tensors it gets copies: it may work in place.
    """
    copies = tuple(each.clone() if isinstance(each, Tensor) else each for each in inputs)
    return functional_call(model, tensors, copies, tie_weights=False)
