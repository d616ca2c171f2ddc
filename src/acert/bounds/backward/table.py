"""The table of backward rules: how the walk goes back through which operation."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from acert.bounds.table import RULES, Function

__all__ = [
    "BACKWARD", "LOCAL", "REACHING", "RELAXED", "SUMS", "backward", "crossing", "everywhere",
]  # fmt: skip

# Keyed by forward rules, so that all spellings of an operation share one row, and an operation
# that a user gave a rule of his own is not taken for ours.
BACKWARD: dict[Function, Callable[..., None]] = {}
# Those that put lines around a curve, with the elements whose lines a narrower box brings nearer.
RELAXED: dict[Function, Callable[[Tensor, Tensor], Tensor]] = {}
# Those that work element by element, so that a part of the result takes that part of the input.
LOCAL: set[Function] = set()
# Those that look up by themselves what a part of the result takes.
REACHING: set[Function] = set()
# Those that add up several elements of one interval, after which elements depend on each other.
SUMS: set[Function] = set()


def backward(
    *functions: Function,
    relaxed: Callable[[Tensor, Tensor], Tensor] | None = None,
    sums: bool = False,
    local: bool = False,
    reaching: bool = False,
) -> Callable[[Function], Function]:
    """Decorator: the walk back through every operation that has the forward rule of these."""

    def add(rule: Function) -> Function:
        for forward in (RULES[function].rule for function in functions):
            BACKWARD[forward] = rule
            if relaxed is not None:
                RELAXED[forward] = relaxed
            for wanted, names in ((sums, SUMS), (local, LOCAL), (reaching, REACHING)):
                if wanted:
                    names.add(forward)
        return rule

    return add


def crossing(lower: Tensor, upper: Tensor) -> Tensor:
    """Where 0 is inside: a function with its kink there is a line on either side."""
    return (lower < 0) & (upper > 0)


def everywhere(lower: Tensor, upper: Tensor) -> Tensor:
    """Wherever there is more than one point."""
    return lower < upper
