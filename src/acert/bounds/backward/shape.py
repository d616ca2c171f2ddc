"""Operations that only move elements, seen backward: coefficients move the other way.

A network rounds nothing here, and neither do we, but where an element is moved to several places:
its coefficients are added up. Samples must stay on the first axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from acert.bounds.backward.table import backward
from acert.bounds.interval import Interval
from acert.bounds.linear_bound import Step
from acert.bounds.refusals import refuse


def _refuse_mixed(step: Step) -> NoReturn:
    refuse(step.source.function, "CROWN needs the samples to stay on the first axis")


@backward(
    torch.flatten, torch.Tensor.flatten, torch.unflatten, torch.Tensor.unflatten,
    torch.Tensor.view, torch.reshape, torch.Tensor.reshape, torch.Tensor.contiguous,
    torch.squeeze, torch.Tensor.squeeze, torch.unsqueeze, torch.Tensor.unsqueeze,
    torch.clone, torch.Tensor.to, torch.Tensor.float, torch.Tensor.double, torch.Tensor.type_as,
    torch.Tensor.view_as, torch.Tensor.reshape_as,
)  # fmt: skip
def _reshape(step: Step, input: Interval, *_: Any, **__: Any) -> None:
    if input.shape[:1] != step.A.shape[:1]:
        _refuse_mixed(step)
    step.bound.send(input, step.A.reshape(*step.A.shape[:2], *input.shape[1:]))


@backward(
    torch.permute, torch.Tensor.permute, torch.transpose, torch.Tensor.transpose,
    torch.swapaxes, torch.Tensor.swapaxes, torch.movedim, torch.Tensor.movedim,
    torch.t, torch.Tensor.t,
)  # fmt: skip
def _permute(step: Step, input: Interval, *args: Any, **kwargs: Any) -> None:
    # Axes of different lengths show where each of them goes.
    lengths = [2 + axis for axis in range(input.ndim)]
    moved = step.source.function(torch.empty(()).expand(lengths), *args, **kwargs)
    order = [length - 2 for length in moved.shape]
    if order[:1] != [0]:
        _refuse_mixed(step)
    back = [1 + order.index(axis) for axis in range(1, input.ndim)]
    step.bound.send(input, step.A.permute(0, 1, *back))


@backward(torch.Tensor.expand, torch.Tensor.expand_as)
def _expand(step: Step, input: Interval, *_: Any, **__: Any) -> None:
    repeats = step.spread(input, step.A)
    step.bound.allow(step.A, lambda: input.magnitude, own=repeats)


# -- parts ------------------------------------------------------------------------------


def _places(input: Interval) -> Tensor:
    """The number of each element within its sample, (1, ...)."""
    count = math.prod(input.shape[1:])
    return torch.arange(count, device=input.device).reshape(1, *input.shape[1:])


def _taken(step: Step, input: Interval, places: Tensor, *, repeats: int = 1) -> None:
    """Replaces what holds the elements at `places`, each at most `repeats` times."""
    A = step.A.reshape(*step.A.shape[:2], -1)
    zeros = A.new_zeros(*A.shape[:2], math.prod(input.shape[1:]))
    sent = zeros.index_add(2, places.flatten(), A)
    step.bound.send(input, sent.reshape(*A.shape[:2], *input.shape[1:]))
    if repeats > 1:
        # |A| . (g m) for the sum of the coefficients of an element, as in `Step.spread`.
        shape = (len(A), *step.A.shape[2:])
        step.bound.allow(
            step.A,
            lambda: input.magnitude.flatten(1)[:, places.flatten()].reshape(shape),
            own=repeats,
        )


@backward(torch.select, torch.Tensor.select, torch.narrow, torch.Tensor.narrow)
def _along(step: Step, input: Interval, dim: int, *args: Any, **kwargs: Any) -> None:
    if dim % input.ndim == 0:
        _refuse_mixed(step)
    _taken(step, input, step.source.function(_places(input), dim, *args, **kwargs))


@backward(torch.index_select, torch.Tensor.index_select)
def _index_select(step: Step, input: Interval, dim: int, index: Tensor) -> None:
    if dim % input.ndim == 0:
        _refuse_mixed(step)
    _taken(step, input, _places(input).index_select(dim, index), repeats=index.numel())


@backward(torch.flip, torch.Tensor.flip)
def _flip(step: Step, input: Interval, *axes: Any, dims: Any = ()) -> None:
    axes = dims or axes
    if axes and isinstance(axes[0], list):  # as the record has tuples
        axes = tuple(axes[0])
    if any(axis % input.ndim == 0 for axis in axes):
        _refuse_mixed(step)
    _taken(step, input, _places(input).flip(axes))


@backward(torch.roll, torch.Tensor.roll)
def _roll(step: Step, input: Interval, shifts: Any, dims: Any = ()) -> None:
    axes = (dims,) if isinstance(dims, int) else tuple(dims)
    if not axes or any(axis % input.ndim == 0 for axis in axes):
        _refuse_mixed(step)
    _taken(step, input, _places(input).roll(shifts, axes))


@backward(F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle)
def _shuffled(step: Step, input: Interval, *args: Any, **kwargs: Any) -> None:
    of_pixels = step.source.function is not F.channel_shuffle
    if of_pixels and input.ndim < 4:  # its first axis is one of channels
        _refuse_mixed(step)
    _taken(step, input, step.source.function(_places(input), *args, **kwargs))


@backward(
    torch.split, torch.Tensor.split, torch.chunk, torch.Tensor.chunk,
    torch.tensor_split, torch.Tensor.tensor_split,
)  # fmt: skip
def _split(step: Step, input: Interval, size: Any = None, dim: int = 0, **keywords: Any) -> None:
    if dim % input.ndim == 0:
        _refuse_mixed(step)
    sizes = () if size is None else (size,)
    parts = step.source.function(_places(input), *sizes, dim=dim, **keywords)
    _taken(step, input, parts[step.source.part])


@backward(torch.unbind, torch.Tensor.unbind)
def _unbind(step: Step, input: Interval, dim: int = 0) -> None:
    if dim % input.ndim == 0:
        _refuse_mixed(step)
    _taken(step, input, _places(input).unbind(dim)[step.source.part])


@backward(torch.Tensor.__getitem__)
def _getitem(step: Step, input: Interval, index: Any) -> None:
    index = tuple(index) if isinstance(index, list) else (index,)  # as the record has tuples
    axes = [entry for entry in index if entry is not None and entry is not Ellipsis]
    first = index[0] if index else Ellipsis
    every = isinstance(first, slice) and first.indices(input.shape[0]) == (0, input.shape[0], 1)
    if not every and not (first is Ellipsis and len(axes) < input.ndim):
        _refuse_mixed(step)
    lists = [entry for entry in axes if not isinstance(entry, (int, slice))]
    masks = any(torch.as_tensor(entry).dtype in (torch.bool, torch.uint8) for entry in lists)
    # Several lists and numbers go together, and may move to the front.
    together = len(lists) > 1 or any(entry is None or isinstance(entry, int) for entry in index)
    if masks or (lists and together) or any(isinstance(entry, bool) for entry in index):
        refuse(step.source.function, "CROWN takes slices and numbers, or slices and one list")
    places = _places(input)[(slice(None), *index[1:]) if every else index]
    # A list may name an element more than once.
    _taken(step, input, places, repeats=places.numel() if lists else 1)


# -- joining ----------------------------------------------------------------------------


def _join(step: Step, parts: list[Any], pieces: Sequence[Tensor]) -> None:
    for part, A in zip(parts, pieces, strict=True):
        if isinstance(part, Interval):
            step.bound.send(part, A.contiguous())
        else:
            step.add_constant(A, step.cut(part.to(A)))


@backward(torch.cat, torch.concat, torch.concatenate, local=True)
def _cat(step: Step, tensors: list[Any], dim: int = 0, *, axis: int | None = None) -> None:
    dim = (dim if axis is None else axis) % (step.A.ndim - 1)
    if dim == 0:
        _refuse_mixed(step)
    # PyTorch lets an empty tensor of one axis join anything.
    parts = [part for part in tensors if part.numel()]
    sizes = [part.shape[dim] for part in parts]
    _join(step, parts, torch.tensor_split(step.A, [*accumulate(sizes[:-1])], dim + 1))


@backward(torch.stack)
def _stack(step: Step, tensors: list[Any], dim: int = 0) -> None:
    dim %= step.A.ndim - 1
    if dim == 0:
        _refuse_mixed(step)
    _join(step, tensors, step.A.unbind(dim + 1))


@backward(F.pad)
def _pad(
    step: Step,
    input: Interval,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> None:
    if len(pad) >= 2 * input.ndim and any(pad[2 * input.ndim - 2 :]):
        _refuse_mixed(step)
    pad = list(pad[: 2 * input.ndim - 2])
    if mode != "constant":
        # PyTorch pads no whole numbers, and float64 holds these exactly.
        places = F.pad(_places(input).double(), pad, mode).long()
        _taken(step, input, places, repeats=places.numel())
        return
    if step.rounding is not None and not abs(value or 0.0) <= step.rounding.largest:
        refuse(F.pad, f"`value` must be a number that the network can hold; got {value}")
    step.bound.send(input, F.pad(step.A, [-size for size in pad]))
    if value:
        inside = torch.zeros_like(input.center[:1])
        step.add_constant(step.A, F.pad(inside, pad, value=value))
