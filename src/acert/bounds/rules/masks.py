"""Comparisons, and what may be done with the masks they return.

An answer is certain where the ends of both sides leave no choice. These hold what the network
computes, so the answer is its own. Where it is unknown, either is allowed for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from acert.bounds.interval import Interval, constant, copied, intervals_in
from acert.bounds.masks import Mask, masks_in
from acert.bounds.refusals import refuse
from acert.bounds.rounding import Rounding
from acert.bounds.rules.arithmetic import Operand, add, mul
from acert.bounds.rules.shape import conversion, ends_of, rearrangement, shaping
from acert.bounds.table import MASKED, Function, rule

_WIDE = (torch.float32, torch.float64)


def _mask(function: Function, like: Interval, true: Tensor, false: Tensor) -> Mask:
    """The mask that is surely `true` and surely `false` at these elements."""
    one = torch.ones_like(true, dtype=like.dtype)
    lower, upper = torch.where(true, one, 0.0), torch.where(false, 0.0, one)
    return Mask(function, Interval(lower, upper).within(like.bound_pass))


def _flushed(end: Tensor, rounding: Rounding | None, *, upper: bool) -> Tensor:
    """An end of what a network compares: numbers below the smallest normal one may count as 0."""
    if rounding is None:
        return end
    tiny = (-end if upper else end) > 0
    return torch.where(tiny & (end.abs() < rounding.tiny), 0.0, end)


def _comparison(function: Function, *, less: bool, equal: bool) -> Any:
    def comparison(input: Operand, other: Operand) -> Mask:
        if less:
            input, other = other, input
        like = next(intervals_in((input, other)))
        ends = ends_of(input, other)
        low, other_low = (_flushed(end, like.rounding, upper=False) for end in ends[0])
        high, other_high = (_flushed(end, like.rounding, upper=True) for end in ends[1])
        # What has no bounds may be NaN, of which every comparison is false.
        known = ~((low + high).isnan() | (other_low + other_high).isnan())
        above = low >= other_high if equal else low > other_high
        below = high < other_low if equal else high <= other_low
        return _mask(function, like, known & above, known & below)

    return comparison


for _names, _less, _equal in (
    (["gt", "greater"], False, False),
    (["ge", "greater_equal"], False, True),
    (["lt", "less"], True, False),
    (["le", "less_equal"], True, True),
):
    _spellings = [getattr(where, name) for name in _names for where in (torch, torch.Tensor)]
    _spellings.append(getattr(torch.Tensor, f"__{_names[0]}__"))
    rule(*_spellings, ulps=0, mixed=True)(
        _comparison(getattr(torch.Tensor, _names[0]), less=_less, equal=_equal)
    )


def _ends_of_mask(operand: Any, like: Interval, function: Function) -> tuple[Tensor, Tensor]:
    if isinstance(operand, Mask):
        lower, upper = operand.numbers.ends()
        return lower, upper
    if isinstance(operand, bool) or (isinstance(operand, Tensor) and operand.dtype == torch.bool):
        certain = constant(operand, like)
        return certain, certain
    refuse(function, "beside a mask that depends on the model's input it takes masks")


def _logical(
    function: Function, combined: Callable[[Tensor, Tensor], Tensor], *, swapped: bool = False
) -> Any:
    def logical(input: Any, other: Any) -> Mask:
        if swapped and torch.compiler.is_compiling() and not isinstance(input, Mask):
            # `mask &= constant` comes as the same call, and changes what other names hold.
            refuse(function, "torch.compile swaps a mask and a constant: write it as a function")
        like = next(masks_in((input, other))).numbers
        (lower, upper), (low, high) = (
            _ends_of_mask(operand, like, function) for operand in (input, other)
        )
        numbers = Interval(combined(lower, low), combined(upper, high))
        return Mask(function, numbers.within(like.bound_pass))

    return logical


for _name, _combined in (("and", torch.minimum), ("or", torch.maximum)):
    _function, _bitwise = (getattr(torch, f"{kind}_{_name}") for kind in ("logical", "bitwise"))
    rule(
        _function, getattr(torch.Tensor, f"logical_{_name}"), _bitwise,
        getattr(torch.Tensor, f"__{_name}__"), ulps=0, mixed=True, table=MASKED,
    )(_logical(_function, _combined))  # fmt: skip
    rule(getattr(torch.Tensor, f"bitwise_{_name}"), ulps=0, mixed=True, table=MASKED)(
        _logical(_function, _combined, swapped=True)
    )


@rule(
    torch.logical_not, torch.Tensor.logical_not, torch.bitwise_not, torch.Tensor.bitwise_not,
    ulps=0, mixed=True, table=MASKED,
)  # fmt: skip
def logical_not(input: Mask) -> Mask:
    lower, upper = input.numbers.ends()
    numbers = Interval(1 - upper, 1 - lower)
    return Mask(torch.logical_not, numbers.within(input.numbers.bound_pass))


def _chosen(function: Function, mask: Any, input: Any, other: Any) -> Interval:
    """`input` where the mask is true, `other` where not, and either where it is unknown."""
    if not isinstance(mask, Mask) or [*masks_in((input, other))]:
        refuse(function, "of its arguments only the condition may be a comparison's answer")
    true, false = mask.numbers.lower > 0, mask.numbers.upper < 1
    (_, *lower), (_, *upper) = ends_of(mask.numbers, input, other)
    least, most = torch.minimum(*lower), torch.maximum(*upper)
    ends = ((least, lower), (most, upper))
    return Interval(
        *(torch.where(true, here[0], torch.where(false, here[1], both)) for both, here in ends)
    )


def _is_wide(value: Any) -> bool:
    """Whether a value makes numbers of float32 or wider of what it is joined with."""
    if isinstance(value, Tensor):
        return value.dtype in _WIDE
    return isinstance(value, (Interval, float))


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not _is_wide(value)


@rule(torch.where, ulps=0, mixed=True, table=MASKED)
def where(condition: Any, input: Any = None, other: Any = None) -> Interval:
    values = (input, other)
    if not any(map(_is_wide, values)) or any(map(_is_narrow, values)):
        refuse(torch.where, "beside a mask that depends on the model's input it takes " + _NUMBERS)
    if not any(isinstance(value, (Interval, Tensor)) and _is_wide(value) for value in values):
        like = next(intervals_in((condition,)))
        input, other = (_of_default_type(value, like) for value in values)
    return _chosen(torch.where, condition, input, other)


_NUMBERS = "numbers of float32 or wider: write `torch.where(mask, 1.0, 0.0)`"


@rule(torch.Tensor.where, ulps=0, mixed=True, table=MASKED)
def where_method(input: Any, condition: Any, other: Any) -> Interval:
    return where(condition, input, other)


@rule(
    torch.masked_fill, torch.Tensor.masked_fill, inplace=(torch.Tensor.masked_fill_,),
    ulps=0, mixed=True, table=MASKED,
)  # fmt: skip
def masked_fill(input: Any, mask: Any, value: Any) -> Interval:
    if not isinstance(input, (Interval, Tensor)) or not _is_wide(input):
        refuse(torch.masked_fill, "beside a mask that depends on the model's input it takes "
               "tensors of float32 or wider")  # fmt: skip
    return _chosen(torch.masked_fill, mask, value, input)


def _of_default_type(value: Any, like: Interval) -> Any:
    """A number of Python's as it is, and as PyTorch rounds it where no tensor gives the type."""
    if not isinstance(value, float):
        return value
    exact = constant(value, like)
    rounded = exact.to(torch.get_default_dtype()).to(exact.dtype)
    ends = torch.minimum(exact, rounded), torch.maximum(exact, rounded)
    return Interval(*ends).within(like.bound_pass)


def _with_numbers(function: Function, operation: Callable[..., Interval]) -> Any:
    """Takes a mask as the numbers 0 and 1 beside floating-point numbers, as PyTorch does."""

    def with_numbers(input: Any, other: Any, *, alpha: float = 1) -> Interval:
        if (
            alpha != 1
            or sum(isinstance(part, Mask) or not _is_wide(part) for part in (input, other)) != 1
        ):
            refuse(
                function,
                "beside a mask that depends on the model's input it takes numbers of float32 or "
                "wider: write `mask.float()`",
            )
        like = next(masks_in((input, other))).numbers
        return operation(
            *(
                copied(like) if isinstance(part, Mask) else _of_default_type(part, like)
                for part in (input, other)
            )
        )

    return with_numbers


for _operation, _names in ((mul, ["mul", "multiply"]), (add, ["add"])):
    _function = getattr(torch, _names[0])
    rule(
        *(getattr(where, name) for name in _names for where in (torch, torch.Tensor)),
        getattr(torch.Tensor, f"__{_names[0]}__"), getattr(torch.Tensor, f"__r{_names[0]}__"),
        inplace=tuple(
            getattr(torch.Tensor, name) for name in (f"{_names[0]}_", f"__i{_names[0]}__")
        ),
        ulps=None, mixed=True, table=MASKED,
    )(_with_numbers(_function, _operation))  # fmt: skip


def _as_numbers(function: Function) -> Any:
    """Casts of a mask to floating-point numbers."""

    def as_numbers(input: Any, *args: Any, **kwargs: Any) -> Interval | Mask:
        if not isinstance(input, Mask) or [*masks_in((*args, *kwargs.values()))]:
            refuse(function, "it takes its type from a comparison: write `.to(x.dtype)`")
        numbers: Interval = conversion(function)(input.numbers, *args, **kwargs)
        like = function(torch.empty([1] * input.ndim, dtype=torch.bool), *args, **kwargs)
        return input if like.dtype == torch.bool else numbers

    return as_numbers


for _cast in (torch.Tensor.to, torch.Tensor.float, torch.Tensor.double):
    rule(_cast, ulps=0, mixed=True, table=MASKED)(_as_numbers(_cast))


@rule(torch.Tensor.type_as, ulps=0, mixed=True, table=MASKED)
def type_as(input: Any, other: Any) -> Interval | Mask:
    if not isinstance(other, (Interval, Tensor)):
        refuse(torch.Tensor.type_as, "it takes its type from a comparison: write `.to(x.dtype)`")
    numbers: Interval | Mask = _as_numbers(torch.Tensor.to)(input, other.dtype)
    return numbers


def _moved(function: Function, operation: Callable[..., Interval]) -> Any:
    def moved(input: Any, *args: Any, **kwargs: Any) -> Mask:
        others = (*args, *kwargs.values())
        if not isinstance(input, Mask) or [*masks_in(others)]:
            refuse(function, "of its arguments only the first may be a comparison's answer")
        numbers = operation(input.numbers, *args, **kwargs)
        return Mask(input.function, numbers.within(input.numbers.bound_pass))

    return moved


for _function in (
    torch.flatten, torch.Tensor.flatten, torch.Tensor.view, torch.reshape, torch.Tensor.reshape,
    torch.permute, torch.Tensor.permute, torch.transpose, torch.Tensor.transpose,
    torch.squeeze, torch.Tensor.squeeze, torch.unsqueeze, torch.Tensor.unsqueeze,
    torch.Tensor.expand, torch.Tensor.__getitem__, torch.Tensor.detach,
):  # fmt: skip
    rule(_function, ulps=0, mixed=True, table=MASKED)(_moved(_function, rearrangement(_function)))
rule(torch.Tensor.expand_as, ulps=0, mixed=True, table=MASKED)(
    _moved(torch.Tensor.expand_as, shaping(torch.Tensor.expand_as))
)
