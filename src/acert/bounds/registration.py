"""Rules of a user's own: how they come into the table, and what is asked of their results."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from acert.bounds.interval import intervals_in
from acert.bounds.refusals import refuse
from acert.bounds.table import RULES, Entry, Function, inplace_at
from acert.errors import InvalidInput

__all__ = ["register_rule"]


def register_rule(function: Any, rule: Any, *, ulps: float) -> None:
    """Bounds `function` by `rule(interval, *arguments, **keywords) -> Interval` from now on.

    The rule is called with the arguments of the function, an `Interval` in place of every
    tensor that depends on the input; an `inplace` keyword is taken care of. `ulps` says how
    far a network's own evaluation may be off, in units in the last place of the sample's
    largest magnitude among those intervals and the result; where constants or intermediate
    results are larger, state more. Without it no certificate could hold in floating point, so
    there is no default. docs/adding-a-layer.md adds one and tests it. A result whose ends are
    swapped, as those of a falling function easily are, is refused.
    """
    if not callable(function) or not callable(rule):
        raise InvalidInput(f"`function` and `rule` must be callable; got {function!r} and {rule!r}")
    if not ulps >= 0:
        raise InvalidInput(f"`ulps` must be at least 0; got {ulps}")
    RULES[function] = Entry(
        _ordered(function, rule, float(ulps)), float(ulps), mixed=True, elementwise=False,
        inplace_at=inplace_at(function),
    )  # fmt: skip


def _ordered(function: Function, rule: Function, ulps: float) -> Function:
    """The rule, refused where a lower end of its result is above the upper one.

    A negative radius takes away from the radii of later layers, and a certificate grows by what is
    wrong with it. Where the box is a point the ends may be swapped by rounding.
    """

    @wraps(rule)
    def ordered(*args: Any, **kwargs: Any) -> Any:
        result = rule(*args, **kwargs)
        if torch.compiler.is_compiling():
            return result
        inputs = [*intervals_in((*args, *kwargs.values()))]
        for output in intervals_in((result,)):
            # A training step that a graph captures must not wait for the device.
            if output.device.type != "cpu" and inputs[0].rounding is None:
                continue
            # Not the ends of a ball, which would be kept as they are before it is widened.
            gap = -2 * output.radius if output.is_ball else output.lower - output.upper
            largest = max(float(each.magnitude.detach().amax()) for each in (output, *inputs))
            if bool((gap > 2 * (ulps + 1) * torch.finfo(gap.dtype).eps * largest).any()):
                refuse(
                    function,
                    "its rule returned lower ends above upper ones, or a negative radius: of a "
                    "falling function the lower end is the value at the upper end of the box",
                )
        return result

    return ordered
