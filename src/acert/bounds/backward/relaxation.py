"""Operations with kinks, seen backward: a line above where A > 0, a line below where A < 0.

In a rounding-safe pass every line is moved until it holds for its slope as it is stored.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acert.bounds.backward.table import backward, crossing, everywhere
from acert.bounds.interval import Interval
from acert.bounds.linear_bound import Step, scaled
from acert.bounds.refusals import refuse
from acert.bounds.rounding import OWN_UNIT, REAL

Line = tuple[Tensor, Tensor | None]  # slope, and the value at 0; None for 0


def relaxed(step: Step, input: Interval, *, above: Line, below: Line) -> None:
    """Replaces f(x), element by element, by lines above and below it.

    It pays for the rounding of slopes up to 1; whoever draws steeper ones pays for the rest.
    """
    positive = step.A.clamp(min=0)
    # Not a second clamp: both would hand a gradient on to a coefficient of 0, as of a zero head.
    negative = step.A - positive
    step.bound.send(input, scaled(positive, above[0]) + scaled(negative, below[0]))
    offsets = [(A, line[1]) for A, line in ((positive, above), (negative, below))]
    for A, offset in offsets:
        if offset is not None:
            step.bound.shift(A, offset)
    # A times a slope and A . offset are rounded; the offsets cost nothing where they are 0.
    step.bound.allow(
        step.A,
        lambda: sum((o.abs() for _, o in offsets if o is not None), start=input.magnitude),
        own=2,
    )


@backward(F.relu, relaxed=crossing, local=True)
def _relu(step: Step, input: Interval) -> None:
    _kinked(step, input, 0.0)


@backward(F.leaky_relu, relaxed=crossing, local=True)
def _leaky_relu(step: Step, input: Interval, negative_slope: float = 0.01) -> None:
    if not 0 <= negative_slope <= 1:
        refuse(
            step.source.function,
            f"CROWN has a backward rule only for slopes in [0, 1]; got {negative_slope}",
        )
    _kinked(step, input, float(negative_slope))
    # A network rounds the slope and one product below zero.
    step.bound.allow(step.A, lambda: input.magnitude, own=2, network=16)


def _kinked(step: Step, input: Interval, slope: float) -> None:
    """Relaxes max(x, slope x), a convex function: its chord lies above, both its pieces below."""
    lower, upper = input.ends()
    # As tensors of this type: `torch.where` would round numbers to float32.
    steep, gentle = lower.new_ones(()), lower.new_full((), slope)
    both_sides = crossing(lower, upper)
    # The chord from (lower, slope lower) to (upper, upper), else the function itself.
    width = torch.where(both_sides, upper - lower, 1.0)
    piece = torch.where(lower >= 0, steep, gentle)
    chord = torch.where(both_sides, (upper - slope * lower) / width, piece)
    lift = torch.where(both_sides, (slope - chord) * lower, 0.0)
    if step.rounding is not None:  # the rounded slope would cut one of the ends off
        raised = torch.maximum(slope * lower - chord * lower, upper - chord * upper)
        # Two products, their difference and this sum: half an ulp of |lower| or |upper| each.
        raised = raised + 8 * OWN_UNIT * (upper - lower) + REAL.tiny
        lift = torch.where(both_sides, raised, 0.0)
    nearer = torch.where(upper > -lower, steep, gentle)
    relaxed(step, input, above=(chord, lift), below=(nearer, None))


# -- clamps -----------------------------------------------------------------------------


@backward(F.hardtanh, relaxed=everywhere, local=True)
def _hardtanh(step: Step, input: Interval, min_val: float = -1.0, max_val: float = 1.0) -> None:
    _clipped(step, input, min_val, max_val)


@backward(F.relu6, relaxed=everywhere, local=True)
def _relu6(step: Step, input: Interval) -> None:
    _clipped(step, input, 0.0, 6.0)


@backward(torch.clamp, torch.clip, relaxed=everywhere, local=True)
def _clamp(step: Step, input: Interval, min: Any = None, max: Any = None) -> None:
    _clipped(step, input, -math.inf if min is None else min, math.inf if max is None else max)


@backward(torch.clamp_min, relaxed=everywhere, local=True)
def _clamp_min(step: Step, input: Interval, min: Any) -> None:
    _clipped(step, input, min, math.inf)


@backward(torch.clamp_max, relaxed=everywhere, local=True)
def _clamp_max(step: Step, input: Interval, max: Any) -> None:
    _clipped(step, input, -math.inf, max)


def _clipped(step: Step, input: Interval, least: Any, most: Any) -> None:
    """Relaxes x cut to [least, most]."""
    for end in (least, most):
        if not isinstance(end, (int, float)):
            refuse(
                step.source.function, f"CROWN needs numbers to clamp to; got {type(end).__name__}"
            )
    if not least <= most:
        refuse(step.source.function, f"CROWN needs an interval to clamp to; got [{least}, {most}]")
    lower, upper = input.ends()
    safe = step.rounding is not None
    above = _line_above_clip(lower, upper, least, most, safe=safe)
    # -f(-x) cuts to [-most, -least], and a line above that is one below f.
    slope, lift = _line_above_clip(-upper, -lower, -most, -least, safe=safe)
    relaxed(step, input, above=above, below=(slope, -lift))
    # A network rounds both ends: where it meets one, by no more than that of its result.
    size = torch.maximum(lower.clamp(least, most).abs(), upper.clamp(least, most).abs())
    step.bound.allow(step.A, lambda: size, own=2, network=16, reach=lambda: input.magnitude)


def _line_above_clip(
    lower: Tensor, upper: Tensor, least: float, most: float, *, safe: bool
) -> tuple[Tensor, Tensor]:
    """Slope and lift of a line above x cut to [least, most], for lower <= x <= upper.

    The function is convex up to `most`, so that a line above it at `lower` and at `top`, the
    smaller of `upper` and `most`, is above it between them; further right, where the function no
    longer grows, any such line that does not fall is above it.
    """
    top = upper.clamp(max=most)
    left, right = lower.clamp(least, most), top.clamp(least, most)
    inside = (lower >= least) & (upper <= most)
    flat = (upper > most) & (upper - most > most - lower)  # the constant is nearer
    rising = (top > lower) & ~flat
    slope = torch.where(rising, (right - left) / torch.where(rising, top - lower, 1.0), 0.0)
    slope = torch.where(inside, 1.0, slope).clamp(0, 1)
    lift = torch.maximum(left - slope * lower, right - slope * top)
    if safe:
        # A product, a difference and this sum, each half an ulp of these.
        size = left.abs() + right.abs() + lower.abs() + top.abs()
        lift = lift + 8 * OWN_UNIT * size + REAL.tiny
    return slope, torch.where(inside, 0.0, lift)
