"""Tanh and sigmoid seen backward: tangents and chords, raised until they hold.

Both are convex up to 0 and concave from there on, and f(x) + f(-x) is a constant. No line needs to
be a good one to be a sound one: `_line_above` takes any slope and raises the line for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from acert.bounds.backward.relaxation import relaxed
from acert.bounds.backward.table import backward, everywhere
from acert.bounds.interval import Interval
from acert.bounds.linear_bound import Step
from acert.bounds.rounding import OWN_UNIT

_HALVINGS, _NEWTON_STEPS = 10, 4
_NARROW = 1e-5  # where a chord would be all rounding


class Shape(NamedTuple):
    """The function, f' and f'' as functions of f, f(x) + f(-x), and what its ulps are those of."""

    function: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    bend: Callable[[Tensor], Tensor]
    total: float
    at_least: float


_TANH = Shape(torch.tanh, lambda y: 1 - y * y, lambda y: -2 * y * (1 - y * y), 0.0, 0.0)
_SIGMOID = Shape(
    torch.sigmoid, lambda y: y * (1 - y), lambda y: y * (1 - y) * (1 - 2 * y), 1.0, 1.0
)


@backward(torch.tanh, relaxed=everywhere, local=True)
def _tanh(step: Step, input: Interval) -> None:
    _s_shaped(step, input, _TANH)


@backward(torch.sigmoid, relaxed=everywhere, local=True)
def _sigmoid(step: Step, input: Interval) -> None:
    _s_shaped(step, input, _SIGMOID)


def _s_shaped(step: Step, input: Interval, shape: Shape) -> None:
    lower, upper = input.ends()
    safe = step.rounding is not None
    above = _line_above(lower, upper, shape, safe=safe)
    # f(x) = total - f(-x), and f(-x) lies below the line for the mirrored box.
    slope, lift = _line_above(-upper, -lower, shape, safe=safe)
    relaxed(step, input, above=above, below=(slope, shape.total - lift))
    # A network is off by the ulps of its result that the forward rule states.
    ends = torch.maximum(shape.function(lower).abs(), shape.function(upper).abs())
    step.bound.allow(
        step.A,
        lambda: ends.clamp(min=shape.at_least),
        own=2,
        network=16,
        reach=lambda: input.magnitude,
    )


def _line_above(lower: Tensor, upper: Tensor, shape: Shape, *, safe: bool) -> tuple[Tensor, Tensor]:
    """Slope and lift of a line above f for lower <= x <= upper.

    For x <= 0, f(x) less the line is convex, and largest at `lower` or at 0, or at `upper` if
    that comes first. For x >= 0, f lies below its tangent at `touch`, and the tangent less the line
    is largest at one of the ends of what is left of the box there. So the lift is the largest of
    f - slope x at both ends of the box and of that.
    """
    touch, slope = _choice(lower, upper, shape)
    at_touch = shape.function(touch)
    steeper = shape.slope(at_touch) - slope
    # f is good to 4 ulps, so that f' is off by no more than 20 units.
    spare = 32 * OWN_UNIT if safe else 0.0
    tangent = at_touch - slope * touch
    tangent = tangent + (steeper + spare).clamp(min=0) * (upper - touch)
    tangent = tangent + (spare - steeper).clamp(min=0) * (touch - lower.clamp(min=0))
    lift = torch.maximum(
        shape.function(lower) - slope * lower, shape.function(upper) - slope * upper
    )
    lift = torch.where(upper > 0, torch.maximum(lift, tangent), lift)
    if safe:
        # 4 ulps of f, which is at most 1, and the products, sums and differences above and of the
        # mirrored line: not half of this.
        lift = lift + 64 * OWN_UNIT * (1 + lower.abs() + upper.abs())
    return slope, lift


def _choice(lower: Tensor, upper: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Where to touch f, in the box and at 0 or above if there is such a point, and the slope.

    Of all lines the one that is lowest in the middle of the box has the least area above f. It is
    the tangent there, if that passes above f at `lower`; else the one from `lower` that touches f;
    else, where that would touch too late or f is convex, the chord.
    """
    middle = (lower + upper) / 2
    value, low = shape.function(middle), shape.function(lower)
    width = upper - lower
    narrow = width < _NARROW
    chord = (shape.function(upper) - low) / torch.where(narrow, 1.0, width)
    found, reached = _tangent_from(lower.detach(), upper.detach(), shape)
    # How the point moves with `lower`, for gradients.
    at_found = shape.function(found)
    turn = (shape.bend(at_found) * (lower.detach() - found)).clamp(min=1e-12)
    moves = (shape.slope(at_found) - shape.slope(low.detach())) / turn
    found = torch.maximum(found - moves * (lower - lower.detach()), middle)
    concave = lower >= 0
    touch = torch.where(
        concave | (narrow & (middle > 0)), middle, torch.where(reached, found, upper)
    )
    slope = torch.where(concave | reached, shape.slope(shape.function(touch)), chord)
    slope = torch.where(narrow, shape.slope(value), slope).clamp(0, 1)
    touch = torch.minimum(touch.clamp(min=0), upper.clamp(min=0))
    return torch.maximum(touch, lower.clamp(min=0)), slope


def _tangent_from(lower: Tensor, upper: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Where a line from `lower` < 0 touches f above 0, and whether that is before `upper`."""
    start = shape.function(lower)

    def gap(point: Tensor) -> tuple[Tensor, Tensor]:
        """How far the tangent at `point` passes above the start, and how that grows."""
        value = shape.function(point)
        passes = value + shape.slope(value) * (lower - point) - start
        return passes, shape.bend(value) * (lower - point)

    first, last = torch.zeros_like(upper), upper.clamp(min=0)
    reached = (lower < 0) & (upper > 0) & (gap(last)[0] > 0)
    for _ in range(_HALVINGS):
        middle = (first + last) / 2
        above = gap(middle)[0] > 0
        first, last = torch.where(above, first, middle), torch.where(above, middle, last)
    point = (first + last) / 2
    for _ in range(_NEWTON_STEPS):
        passes, grows = gap(point)
        point = point - torch.where(grows > 0, passes / grows.clamp(min=1e-300), 0.0)
        point = torch.minimum(torch.maximum(point, first), last)
    return point, reached
