"""The table of backward rules: how the walk goes back through which operation."""

from __future__ import annotations

from collections.abc import Callable

from acert.bounds.table import RULES, Function

__all__ = ["BACKWARD", "backward"]

# Keyed by forward rules, so that all spellings of an operation share one row, and an operation
# that a user gave a rule of his own is not taken for ours.
BACKWARD: dict[Function, Callable[..., None]] = {}


def backward(*functions: Function) -> Callable[[Function], Function]:
    """Decorator: the walk back through every operation that has the forward rule of these."""

    def add(rule: Function) -> Function:
        for function in functions:
            BACKWARD[RULES[function].rule] = rule
        return rule

    return add
