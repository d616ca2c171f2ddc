"""A root near a guess: the guess made finer, and a bracket proven around it.

Like the solvers, it knows no networks: the margin is any function of radii and of whose they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from acert.rootfind import RootResult, Solver

__all__ = ["finer", "prove"]


def finer(
    guess: Tensor, margin_at: Callable[[Tensor, Tensor], Tensor], max_radius: float, *, error: float
) -> tuple[Tensor, Tensor]:
    """The guess with more digits, and the slope there: by the secant through two points around it.

    What these two evaluations in float32 add would take as many in float64. The slope is NaN where
    nothing can be said of it.
    """
    everyone = torch.arange(len(guess), device=guess.device)
    below, above = guess * (1 - error), (guess * (1 + error)).clamp(max=max_radius)
    f_below, f_above = margin_at(below, everyone), margin_at(above, everyone)
    slope = (f_above - f_below) / (above - below)
    root = below - f_below / slope
    # A secant that leads far away is none of a root; nor is one of a flat or infinite margin.
    near = ((root - guess).abs() <= 4 * error * guess) & f_above.isfinite()
    return torch.where(near, root, guess), torch.where(near, slope, math.nan)


def prove(
    guess: Tensor,
    margin_at: Callable[[Tensor, Tensor], Tensor],
    max_radius: float,
    solver: Solver,
    *,
    slope: Tensor | None = None,
) -> RootResult:
    """The root of the proven margin, searched from a guess: two evaluations if it is good.

    The first bracket around the guess is narrower than the solver's tolerance; each side that
    does not hold is moved 16 times further out, and at last to 0 or `max_radius`. Where the slope
    is known, an evaluation at the guess tells first how far off it is: three evaluations in all.
    """
    ends = [torch.full_like(guess, math.nan), torch.full_like(guess, math.nan)]
    values = [torch.full_like(guess, -math.inf), torch.full_like(guess, math.inf)]
    steps = torch.zeros_like(guess, dtype=torch.int32)

    def probe(radius: Tensor, wanted: Tensor) -> None:
        index = wanted.nonzero().squeeze(1)
        if not len(index):
            return
        radius = radius[index]
        value = margin_at(radius, index)
        steps[index] += 1
        for end, known, fits in zip(ends, values, (value < 0, ~(value < 0)), strict=True):
            end[index] = torch.where(fits, radius, end[index])
            known[index] = torch.where(fits, value, known[index])

    def lacking(side: int) -> Tensor:
        """Samples without this side, unless the other one has reached its very end."""
        return ends[side].isnan() & ~(ends[1 - side] == (0.0, max_radius)[side])

    if slope is not None:
        probe(guess, slope > 0)
        value = torch.where(ends[0].isnan(), values[1], values[0])
        move = value / slope
        tolerance = solver.rtol * guess + solver.xtol
        known = move.isfinite() & (guess - move <= max_radius) & (guess - move >= 0)
        # An end that is too far off would leave the solver a bracket to make narrower.
        far = known & (move.abs() > 0.5 * tolerance)
        for end in ends:
            end.masked_fill_(far, math.nan)
        guess = torch.where(known, guess - move, guess)
    slack = 0.4 * (solver.rtol * guess + solver.xtol)
    for _ in range(4):
        below = torch.where(guess < max_radius, guess - slack, guess)
        probe(below.clamp(min=0.0), lacking(0))
        probe((guess + slack).clamp(max=max_radius), lacking(1))
        slack = 16 * slack
    probe(torch.zeros_like(guess), lacking(0))
    probe(torch.full_like(guess, max_radius), lacking(1))
    # A side still lacking says that the margin is of one sign throughout.
    lower, upper = ends[0].nan_to_num(nan=0.0), ends[1].nan_to_num(nan=max_radius)
    root = solver.solve(
        margin_at, lower, upper, indexed=True,
        f_lower=torch.where(ends[0].isnan(), math.inf, values[0]),
        f_upper=torch.where(ends[1].isnan(), -math.inf, values[1]),
    )  # fmt: skip
    return root._replace(steps=root.steps + steps)
