"""The rule table: which function bounds which PyTorch operation, and how it rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeVar

import torch

__all__ = ["MASKED", "RULES", "Entry", "inplace_at", "rule", "unary"]

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
# The same of calls with a mask that depends on the model's input among their arguments.
MASKED: dict[Function, Entry] = {}


def inplace_at(function: Function) -> int | None:
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
    table: dict[Function, Entry] = RULES,
) -> Callable[[_Rule], _Rule]:
    """Decorator: bounds every spelling in `functions`, and the overwriting ones in `inplace`."""

    def add(function: _Rule) -> _Rule:
        for spelling in functions:
            table[spelling] = Entry(
                function, ulps, view=view, mixed=mixed, inplace_at=inplace_at(spelling)
            )
        for spelling in inplace:
            table[spelling] = Entry(function, ulps, inplace=True, mixed=mixed)
        return function

    return add


def unary(*names: str, ulps: float | None) -> Callable[[_Rule], _Rule]:
    """Decorator: bounds `torch.name`, `Tensor.name`, `torch.special.name` and what overwrites."""

    def spelled(name: str, *places: Any) -> list[Function]:
        return [getattr(place, name) for place in places if hasattr(place, name)]

    functions = [f for name in names for f in spelled(name, torch, torch.Tensor, torch.special)]
    inplace = [f for name in names for f in spelled(name + "_", torch, torch.Tensor)]
    return rule(*functions, ulps=ulps, inplace=tuple(inplace))
