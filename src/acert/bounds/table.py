"""The rule table: which function bounds which PyTorch operation, and how it rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeVar

from acert.errors import InvalidInput

__all__ = ["RULES", "Entry", "register_rule", "rule"]

Function = Callable[..., Any]


@dataclass(frozen=True)
class Entry:
    """One row of the table.

    `ulps` is how many units in the last place of the largest magnitude met (inputs and
    result) the operation may be off when a network evaluates it. It is 0 for exact
    operations, and None where the rule adds its own error because it depends on more than
    that (sums, products). `elementwise` operations meet one element at a time, others the
    whole sample. `inplace_at` is the place of an `inplace` argument, if there is one.
    `view` marks results that share memory with their input, `inplace` operations that
    overwrite it, `mixed` rules that take intervals elsewhere than as their first argument.
    """

    rule: Function
    ulps: float | None
    view: bool = False
    inplace: bool = False
    mixed: bool = False
    elementwise: bool = True
    inplace_at: int | None = None


RULES: dict[Function, Entry] = {}


def _inplace_at(function: Function) -> int | None:
    """Where `function` takes `inplace`: PyTorch's own layers pass it by place."""
    try:
        names = list(signature(function).parameters)
    except (TypeError, ValueError):  # built-in functions tell nothing, and have no `inplace`
        return None
    return names.index("inplace") if "inplace" in names else None


_Rule = TypeVar("_Rule", bound=Function)


def rule(
    *functions: Function,
    ulps: float | None,
    view: bool = False,
    inplace: tuple[Function, ...] = (),
    mixed: bool = False,
) -> Callable[[_Rule], _Rule]:
    """Decorator: bounds every spelling in `functions`, and the overwriting ones in `inplace`."""

    def add(function: _Rule) -> _Rule:
        for spelling in functions:
            RULES[spelling] = Entry(
                function, ulps, view=view, mixed=mixed, inplace_at=_inplace_at(spelling)
            )
        for spelling in inplace:
            RULES[spelling] = Entry(function, ulps, inplace=True, mixed=mixed)
        return function

    return add


def register_rule(function: Any, rule: Any, *, ulps: float) -> None:
    """Bounds `function` by `rule(interval, *arguments, **keywords) -> Interval` from now on.

    The rule is called with the arguments of the function, an `Interval` in place of every
    tensor that depends on the input; an `inplace` keyword is taken care of. `ulps` says how
    far a network's own evaluation may be off, in units in the last place of the sample's
    largest magnitude among those intervals and the result; where constants or intermediate
    results are larger, state more. Without it no certificate could hold in floating point, so
    there is no default. docs/adding-a-layer.md adds one and tests it.
    """
    if not callable(function) or not callable(rule):
        raise InvalidInput(f"`function` and `rule` must be callable; got {function!r} and {rule!r}")
    if not ulps >= 0:
        raise InvalidInput(f"`ulps` must be at least 0; got {ulps}")
    RULES[function] = Entry(
        rule, float(ulps), mixed=True, elementwise=False, inplace_at=_inplace_at(function)
    )
