"""Operations that only move elements: the same for both ends, and exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acert.bounds.interval import Interval, constant, intervals_in
from acert.bounds.refusals import refuse
from acert.bounds.rounding import FLOAT32
from acert.bounds.table import Function, rule


def rearrangement(function: Function) -> Any:
    def rearrange(input: Interval, *args: Any, **kwargs: Any) -> Interval:
        viewed = function is torch.Tensor.view
        # A rule may have laid channels last where a model has them second.
        output = input.map(lambda x: function(x.contiguous() if viewed else x, *args, **kwargs))
        if output.dtype != input.dtype:
            refuse(function, f"it must keep the type of its input; got {output.dtype}")
        return output

    return rearrange


for _function in (
    torch.flatten, torch.Tensor.flatten, torch.unflatten,
    torch.Tensor.view, torch.reshape, torch.Tensor.reshape, torch.Tensor.contiguous,
    torch.permute, torch.Tensor.permute, torch.transpose, torch.Tensor.transpose,
    torch.swapaxes, torch.Tensor.swapaxes, torch.movedim, torch.Tensor.movedim,
    torch.t, torch.Tensor.t, torch.squeeze, torch.Tensor.squeeze,
    torch.unsqueeze, torch.Tensor.unsqueeze, torch.Tensor.expand,
    torch.Tensor.__getitem__, torch.select, torch.Tensor.select,
    torch.narrow, torch.Tensor.narrow, torch.Tensor.detach, torch.diagonal, torch.Tensor.diagonal,
    torch.Tensor.unfold,
):  # fmt: skip
    rule(_function, ulps=0, view=True)(rearrangement(_function))
# These write a new tensor, and some put zeros into it, of which the radius is 0 too.
for _function in (  # type: ignore[assignment]  # one type for the functions of two loops
    torch.roll, torch.Tensor.roll, torch.flip, torch.Tensor.flip, torch.Tensor.repeat,
    torch.tile, torch.Tensor.tile, torch.repeat_interleave, torch.Tensor.repeat_interleave,
    torch.index_select, torch.Tensor.index_select, torch.gather, torch.Tensor.gather,
    torch.take_along_dim, torch.Tensor.take_along_dim, torch.diag_embed, torch.Tensor.diag_embed,
    F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle, F.unfold,
    torch.tril, torch.Tensor.tril, torch.triu, torch.Tensor.triu,
):  # fmt: skip
    rule(_function, ulps=0)(rearrangement(_function))
# Of the two spellings only the function compiles.
rule(torch.Tensor.unflatten, ulps=0, view=True)(rearrangement(torch.unflatten))


def shaping(function: Function) -> Any:
    """Takes the shape of a second tensor, which may depend on the model's input too."""

    def as_another(input: Interval | Tensor, other: Interval | Tensor) -> Interval:
        if not isinstance(input, Interval):
            refuse(function, "it takes its shape from the model's input: write it with `x.shape`")
        like = torch.empty(other.shape, dtype=input.dtype, device="meta")
        return input.map(lambda x: function(x.contiguous(), like))

    return as_another


for _as in (torch.Tensor.expand_as, torch.Tensor.view_as, torch.Tensor.reshape_as):
    rule(_as, ulps=0, view=True, mixed=True)(shaping(_as))


@rule(torch.clone, torch.Tensor.clone, ulps=0)
def clone(input: Interval, *, memory_format: torch.memory_format | None = None) -> Interval:
    return input.map(torch.clone)


def conversion(function: Function) -> Any:
    """Casts to float32 or wider: bounds keep their own type, which holds every such value."""

    def converted(input: Interval | Tensor, *args: Any, **kwargs: Any) -> Interval:
        if not isinstance(input, Interval) or [*intervals_in((*args, *kwargs.values()))]:
            refuse(function, "it takes its type from the model's input: write `.to(x.dtype)`")
        like = function(torch.empty([1] * input.ndim, dtype=input.dtype), *args, **kwargs)
        wanted = [
            value for value in (*args, *kwargs.values()) if isinstance(value, torch.device | str)
        ]
        if any(torch.device(device).type != input.device.type for device in wanted):
            refuse(function, f"it must stay on its input's device, {input.device}; got {wanted[0]}")
        if like.dtype not in (torch.float32, torch.float64):
            refuse(function, f"it must not lose precision; got {like.dtype}")
        return input.map(lambda x: x)

    return converted


for _cast in (torch.Tensor.to, torch.Tensor.float, torch.Tensor.double):
    rule(_cast, ulps=0, view=True, mixed=True)(conversion(_cast))


@rule(torch.Tensor.type_as, ulps=0, view=True, mixed=True)
def type_as(input: Interval | Tensor, other: Interval | Tensor) -> Interval:
    converted: Interval = conversion(torch.Tensor.to)(input, other.dtype)
    return converted


def _parts(function: Function) -> Any:
    def parts(input: Interval, *args: Any, **kwargs: Any) -> tuple[Interval, ...]:
        count = len(function(input.center, *args, **kwargs))
        return tuple(
            input.map(lambda x, part=part: function(x, *args, **kwargs)[part])  # type: ignore[misc]
            for part in range(count)
        )

    return parts


for _split in (
    torch.split, torch.Tensor.split, torch.chunk, torch.Tensor.chunk,
    torch.unbind, torch.Tensor.unbind, torch.tensor_split, torch.Tensor.tensor_split,
):  # fmt: skip
    rule(_split, ulps=0, view=True)(_parts(_split))


def _held(value: Tensor, like: Interval) -> tuple[Tensor, Tensor]:
    """Both ends of a constant that the network rounds to its own precision, if need be.

    What is out of range is infinite there, or the largest number of the network's own type, as
    masks have it, which is another one than that of ours.
    """
    rounding = like.rounding
    if rounding is None:
        return value, value
    slack = 2 * rounding.unit * value.abs() + rounding.tiny
    slack = torch.where(value.float() == value, 0.0, slack)
    lower, upper = value - slack, value + slack
    most = FLOAT32.largest
    lower = torch.where(value < -most, -math.inf, torch.where(value > most, most, lower))
    upper = torch.where(value > most, math.inf, torch.where(value < -most, -most, upper))
    return lower, upper


def ends_of(*parts: Interval | Tensor | float) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The lower ends of all parts and the upper ones; of a constant as a network holds it."""
    first = next(intervals_in(parts))
    ends = [
        part.ends() if isinstance(part, Interval) else _held(constant(part, first), first)
        for part in parts
    ]
    lower, upper = zip(*ends, strict=True)
    return lower, upper


def joining(function: Callable[..., Tensor]) -> Any:
    def join(tensors: Sequence[Interval | Tensor], dim: int = 0, **kwargs: Any) -> Interval:
        if isinstance(tensors, Interval):  # PyTorch does not take it apart either
            refuse(function, "it must be given a list or tuple of tensors; got one")
        lower, upper = ends_of(*tensors)
        dim = kwargs.get("axis", dim)
        return Interval(function(lower, dim=dim), function(upper, dim=dim))

    return join


for _cat in (torch.cat, torch.concat, torch.concatenate):
    rule(_cat, ulps=0, mixed=True)(joining(torch.cat))
rule(torch.stack, ulps=0, mixed=True)(joining(torch.stack))


@rule(torch.where, ulps=0, mixed=True)
def where(condition: Tensor, input: Any = None, other: Any = None) -> Interval:
    if isinstance(condition, Interval):
        refuse(torch.where, "its condition must not depend on the model's input")
    lower, upper = ends_of(input, other)
    return Interval(*(torch.where(condition, end[0], end[1]) for end in (lower, upper)))


@rule(torch.Tensor.where, ulps=0, mixed=True)
def where_method(input: Any, condition: Tensor, other: Any) -> Interval:
    return where(condition, input, other)


@rule(
    torch.masked_fill, torch.Tensor.masked_fill, inplace=(torch.Tensor.masked_fill_,),
    ulps=0,
)  # fmt: skip
def masked_fill(input: Interval, mask: Tensor, value: Tensor | float) -> Interval:
    return where(mask, value, input)


@rule(F.pad, ulps=0)
def pad(
    input: Interval, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Interval:
    lower, upper = input.ends()
    low = high = value
    if value and input.rounding is not None:
        # The network rounds the constant to its own precision.
        slack = 2 * input.rounding.unit * abs(value) + input.rounding.tiny
        low, high = value - slack, value + slack
    return Interval(F.pad(lower, pad, mode, low), F.pad(upper, pad, mode, high))
