"""The rule table: which function bounds which PyTorch operation, and how it rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from acert.errors import InvalidInput

__all__ = ["RULES", "Entry", "register_rule", "rule"]

Function = Callable[..., Any]


@dataclass(frozen=True)
class Entry:
    """One row of the table.

    `ulps` is how many units in the last place of the largest magnitude met (inputs and
    result, element by element) the operation may be off when a network evaluates it. It is
    0 for exact operations, and None where the rule adds its own error because it depends on
    more than that (sums, products).
    `view` marks results that share memory with their input, `inplace` operations that
    overwrite it, `mixed` rules that take intervals elsewhere than as their first argument.
    """

    rule: Function
    ulps: float | None
    view: bool = False
    inplace: bool = False
    mixed: bool = False


RULES: dict[Function, Entry] = {}


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
            RULES[spelling] = Entry(function, ulps, view=view, mixed=mixed)
        for spelling in inplace:
            RULES[spelling] = Entry(function, ulps, inplace=True, mixed=mixed)
        return function

    return add


def register_rule(function: Any, rule: Any, *, ulps: float) -> None:
    """Bounds `function` by `rule(interval, *arguments, **keywords) -> Interval` from now on.

    The rule is called with the arguments of the function, an `Interval` in place of every
    tensor that depends on the input; an `inplace` keyword is taken care of. `ulps` says how
    far a network's own evaluation may be off, in units in the last place of the largest
    magnitude met, intermediate results included. Without it no certificate could hold in
    floating point, so there is no default.
    """
    if not callable(function) or not callable(rule):
        raise InvalidInput(f"`function` and `rule` must be callable; got {function!r} and {rule!r}")
    if not ulps >= 0:
        raise InvalidInput(f"`ulps` must be at least 0; got {ulps}")
    RULES[function] = Entry(rule, float(ulps), mixed=True)
