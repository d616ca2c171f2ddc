"""From a guess to a proven bracket: how many evaluations it takes, and that nothing misleads it."""

import math

import pytest
import torch

from acert.root_proof import finer, prove
from acert.rootfind import Brent, RootStatus

SOLVER = Brent(xtol=1e-10, rtol=1e-5, max_steps=100)
ROOTS = torch.tensor([0.01, 0.1, 0.37, 0.5, 0.999], dtype=torch.float64)


def margin(radius, index):
    """About the square of the radius, as margins are; each sample has a root and a scale."""
    return (3.0 + index) * (radius**2.1 - ROOTS[index] ** 2.1)


def slopes():
    return (3.0 + torch.arange(len(ROOTS))) * 2.1 * ROOTS**1.1


def check(result):
    assert (result.status == RootStatus.CONVERGED).all()
    assert (margin(result.lower, torch.arange(len(ROOTS))) < 0).all()
    assert (result.lower <= ROOTS).all()
    assert (result.upper >= ROOTS).all()
    assert (result.upper - result.lower <= SOLVER.xtol + SOLVER.rtol * ROOTS).all()


@pytest.mark.parametrize(
    ("error", "with_slope", "without"), [(1e-8, 2, 2), (4.5e-6, 2, 3), (3e-5, 3, 4), (-3e-4, 3, 5)]
)
def test_a_slope_saves_evaluations(error, with_slope, without):
    guess = ROOTS * (1 + error)
    known = prove(guess, margin, 1.0, SOLVER, slope=slopes())
    check(known)
    assert known.steps.tolist() == [with_slope] * len(ROOTS)
    blind = prove(guess, margin, 1.0, SOLVER)
    check(blind)
    assert blind.steps.min() >= without


@pytest.mark.parametrize("factor", [0.0, -1.0, 1e-30, 0.3, 0.9, 1.1, 4.0, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("error", [-0.5, -1e-4, -1e-6, 0.0, 1e-6, 1e-4, 0.5])
def test_a_wrong_slope_costs_no_more_than_time(factor, error):
    guess = (ROOTS * (1 + error)).clamp(max=1.0)
    result = prove(guess, margin, 1.0, SOLVER, slope=factor * slopes())
    check(result)
    blind = prove(guess, margin, 1.0, SOLVER)
    assert (result.steps <= blind.steps + 4).all()


@pytest.mark.parametrize("slope", [None, 0.1, 100.0])
@pytest.mark.parametrize("guess", [0.2, 0.9999999, 1.0])
def test_margins_of_one_sign(slope, guess):
    """Proven up to the cap, proven nowhere, and a root just below the cap."""
    signs = torch.tensor([-1.0, 1.0, 0.0], dtype=torch.float64)

    def constant(radius, index):
        return torch.where(signs[index] == 0, radius - 0.99999999, signs[index])

    result = prove(
        torch.full((3,), guess, dtype=torch.float64), constant, 1.0, SOLVER,
        slope=None if slope is None else torch.full((3,), slope),
    )  # fmt: skip
    assert result.status.tolist() == [
        RootStatus.NEGATIVE_THROUGHOUT, RootStatus.POSITIVE_THROUGHOUT, RootStatus.CONVERGED,
    ]  # fmt: skip
    assert result.lower[0] == 1.0
    assert result.lower[2] < 0.99999999 <= result.upper[2]


def test_a_secant_gives_digits_and_slope():
    guess = (ROOTS * 1.0007).float()
    found, slope = finer(guess, lambda r, i: margin(r.double(), i), 1.0, error=1e-3)
    assert torch.allclose(found.double(), ROOTS, rtol=2e-6)
    assert torch.allclose(slope.double(), slopes(), rtol=2e-3)


def test_a_margin_that_is_infinite_above_its_root_leaves_the_guess_alone():
    guess = torch.tensor([0.1, 0.2])

    def margin_at(radius, index):
        root = guess[index] * 1.0005
        return torch.where(radius < root, radius - root, torch.tensor([math.inf, 1.0])[index])

    found, slope = finer(guess, margin_at, 1.0, error=1e-3)
    assert found[0] == guess[0]
    assert found[1] != guess[1]
    assert slope.isnan().tolist() == [True, False]
