"""Batched root finding: by hand, against SciPy, by law, compiled, and what it refuses."""

import doctest
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, elementwise
from torch import Tensor

import acert.rootfind
from acert.errors import InvalidInput
from acert.rootfind import Bisection, Brent, PowerLaw, RootResult, RootStatus, Solver

SOLVERS = [Brent, Bisection, PowerLaw]
Array = npt.NDArray[np.float64]
Function = Callable[[Tensor], Tensor]


def vector(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def names(result: RootResult) -> list[str]:
    return [RootStatus(code).name for code in result.status.tolist()]


def equal(first: RootResult, second: RootResult) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Recorder:
    """f, and every batch of points it was asked for."""

    def __init__(self, f: Function) -> None:
        self.f = f
        self.points: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.points.append(x.clone())
        return self.f(x)


# By hand.


def test_three_bisections_by_hand():
    f = Recorder(lambda x: x - vector(0.3, 0.9))
    result = Bisection(max_steps=3).solve(f, vector(0, 0), vector(1, 1))
    assert torch.equal(torch.stack(f.points)[:, 0], vector(0, 1, 0.5, 0.25, 0.375))
    assert torch.equal(result.lower, vector(0.25, 0.875))
    assert torch.equal(result.upper, vector(0.375, 1))
    torch.testing.assert_close(result.estimate, vector(0.3, 0.9), rtol=1e-12, atol=0)
    assert names(result) == ["UNCONVERGED"] * 2
    assert result.steps.tolist() == [3, 3]
    assert (result.status.dtype, result.steps.dtype) == (torch.uint8, torch.int32)


def test_bisection_stops_once_the_bracket_is_within_tolerance():
    # 2**-9 < 0.003 < 2**-8, so that the ninth halving is the first that is enough.
    result = Bisection(xtol=0.003, rtol=0.0).solve(lambda x: x - 0.7, vector(0), vector(1))
    assert result.steps.item() == 9
    assert names(result) == ["CONVERGED"]


def test_first_steps_of_brent_by_hand():
    # 2x^2 + 2x - 1: the ends -1 and 3 give the secant root 1/4. The inverse parabola through
    # (0, -1), (1/4, -3/8) and (1, 3) has its root at 48/135 + 1/36 = 23/60.
    # x^2 - 1/4: the secant root is 1/4 again. The inverse parabola's root 0.85 is further away
    # than half the step before last, so the step is a bisection of [1/4, 1].
    f = Recorder(lambda x: vector(2, 1) * x**2 + vector(2, 0) * x - vector(1, 0.25))
    Brent(max_steps=2).solve(f, vector(0, 0), vector(1, 1))
    expected = torch.stack([vector(0.25, 0.25), vector(23 / 60, 0.625)])
    torch.testing.assert_close(torch.stack(f.points[2:]), expected, rtol=1e-15, atol=0)


def test_linear_function_takes_one_secant_and_one_confirming_step():
    result = Brent(xtol=1e-6, rtol=0.0).solve(lambda x: 2 * x - 1, vector(0), vector(2))
    assert result.steps.item() == 2
    assert result.upper.item() == 0.5
    assert result.lower.item() == pytest.approx(0.5 - 0.5e-6, abs=1e-15)
    assert result.estimate.item() == 0.5


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_status(solver):
    targets = vector(-1, 0, 0.5, 1, 2)
    ends = torch.zeros_like(targets), torch.ones_like(targets)
    result = solver().solve(lambda x: x**3 - targets, *ends)
    assert names(result) == [
        "POSITIVE_THROUGHOUT",
        "POSITIVE_THROUGHOUT",
        "CONVERGED",
        "CONVERGED",
        "NEGATIVE_THROUGHOUT",
    ]
    for end in (result.lower, result.upper, result.estimate):
        assert end[[0, 1, 4]].tolist() == [0, 0, 1]
    assert result.upper[3].item() == 1
    assert 1 - 1.1e-5 < result.lower[3].item() < 1
    assert result.steps[[0, 1, 4]].tolist() == [0, 0, 0]
    hasty = solver(max_steps=1).solve(lambda x: x**3 - targets, *ends)
    assert names(hasty)[2] == "UNCONVERGED"


@pytest.mark.parametrize("solver", SOLVERS)
def test_bracket_of_no_width(solver):
    result = solver().solve(lambda x: x - vector(0.2, 0.4), vector(0.3, 0.3), vector(0.3, 0.3))
    assert names(result) == ["POSITIVE_THROUGHOUT", "NEGATIVE_THROUGHOUT"]
    assert result.estimate.tolist() == [0.3, 0.3]


def test_known_values_at_the_ends_are_not_evaluated_again():
    plain, saving = Recorder(lambda x: x**3 - 0.3), Recorder(lambda x: x**3 - 0.3)
    ends = vector(0), vector(1)
    expected = Brent().solve(plain, *ends)
    result = Brent().solve(saving, *ends, f_lower=vector(-0.3), f_upper=vector(0.7))
    assert torch.equal(torch.cat(saving.points), torch.cat(plain.points[2:]))
    assert equal(result, expected)
    assert len(plain.points) == expected.steps.item() + 2


def test_known_nan_counts_as_positive():
    known = {"f_lower": vector(math.nan, -0.3), "f_upper": vector(1, math.nan)}
    result = Brent().solve(lambda x: x - 0.3, vector(0, 0), vector(1, 1), **known)
    assert names(result) == ["POSITIVE_THROUGHOUT", "CONVERGED"]
    assert result.estimate[1].item() == pytest.approx(0.3, rel=1e-5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_empty_batch(solver):
    result = solver().solve(lambda x: x, torch.zeros(0), torch.zeros(0))
    assert [len(field) for field in result] == [0] * 5


def test_docstring_example_runs():
    failed, attempted = doctest.testmod(acert.rootfind)
    assert failed == 0
    assert attempted > 0


# Values that are not numbers, and dtypes.


def infinite_above(x: Tensor) -> Tensor:
    return torch.where(x > 0.6, math.inf, x**3 - 0.027)


def nan_above(x: Tensor) -> Tensor:
    return torch.where(x >= 0.3, math.nan, x - 0.5)


def only_infinities(x: Tensor) -> Tensor:
    return torch.where(x < 0.3, -math.inf, math.inf).to(x.dtype)


def minus_infinity_below(x: Tensor) -> Tensor:
    return torch.where(x < 0.2, -math.inf, x**3 - 0.027)


def huge(x: Tensor) -> Tensor:
    return torch.where(x < 0.3, -1.0, 1.0).to(x.dtype) * torch.finfo(x.dtype).max


@pytest.mark.parametrize("power", [0.5, 1.0, 1.7, 3.0])
def test_a_power_law_is_solved_in_one_step(power):
    roots = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    zero, one = torch.zeros_like(roots), torch.ones_like(roots)
    result = PowerLaw(max_steps=1).solve(lambda x: 5 * (x.pow(power) - roots.pow(power)), zero, one)
    torch.testing.assert_close(result.estimate, roots, atol=1e-9, rtol=1e-9)
    shifted = PowerLaw(max_steps=1).solve(
        lambda x: (x - 3).pow(power) - roots.pow(power), zero + 3, one + 3
    )
    torch.testing.assert_close(shifted.estimate, roots + 3, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("exponent", [0.0, -1.0, math.inf, math.nan])
def test_an_exponent_is_positive(exponent):
    with pytest.raises(InvalidInput, match=r"`exponent` must be positive and finite; got"):
        PowerLaw(exponent=exponent)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "f", [infinite_above, nan_above, only_infinities, minus_infinity_below, huge]
)
def test_infinite_and_nan_values_do_no_harm(f, dtype, solver):
    ends = torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype)
    result = solver().solve(f, *ends)
    assert names(result) == ["CONVERGED"]
    assert (f(result.lower) < 0).item()
    assert not (f(result.upper) < 0).item()
    for end in (result.lower, result.upper, result.estimate):
        assert end.item() == pytest.approx(0.3, rel=1.1e-5)
    assert result.steps.item() <= Bisection().solve(f, *ends).steps.item() + 3
    # With few steps the bracket still ends at infinity; the estimate has to stay inside.
    early = solver(max_steps=1).solve(f, *ends)
    assert (early.lower <= early.estimate).item()
    assert (early.estimate <= early.upper).item()


def test_brent_bisects_while_an_end_is_infinite():
    f = Recorder(lambda x: torch.where(x > 0.95, math.inf, x - 0.9))
    Brent().solve(f, vector(0), vector(1))
    assert torch.cat(f.points[:6]).tolist() == [0, 1, 0.5, 0.75, 0.875, 0.9375]


def test_estimate_is_the_midpoint_while_an_end_is_infinite():
    known = {"f_lower": vector(-0.3, -math.inf), "f_upper": vector(math.inf, 0.3)}
    f = Recorder(lambda x: x - vector(0.3, 0.2))
    result = Bisection(max_steps=1).solve(f, vector(0, 0), vector(0.5, 0.5), **known)
    assert result.lower.tolist() == [0.25, 0]
    assert result.upper.tolist() == [0.5, 0.25]
    assert result.estimate.tolist() == [0.375, 0.125]


@pytest.mark.parametrize("solver", SOLVERS)
def test_widest_bracket_does_not_overflow(solver):
    largest = torch.finfo(torch.float32).max
    roots = torch.tensor([3.0, -3.0, 0.9 * largest, -0.9 * largest])
    ends = torch.full_like(roots, -largest), torch.full_like(roots, largest)
    result = solver(max_steps=300).solve(lambda x: torch.sign(x - roots), *ends)
    assert set(names(result)) == {"CONVERGED"}
    torch.testing.assert_close(result.estimate, roots, rtol=1e-5, atol=0)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_tolerance_below_rounding_still_terminates(dtype, solver):
    roots = torch.tensor([0.0, 0.0101, 0.3, 1.9, -0.6, -1.7], dtype=dtype)
    ends = torch.full_like(roots, -2), torch.full_like(roots, 2)
    finest = solver(xtol=1e-320, rtol=0.0, max_steps=1100)
    result = finest.solve(lambda x: torch.sign(x - roots), *ends)
    assert set(names(result)) == {"CONVERGED"}
    assert result.lower.dtype == result.estimate.dtype == dtype
    assert (result.lower < roots).all()
    assert (result.upper >= roots).all()
    kind = torch.finfo(dtype)
    width = result.upper.double() - result.lower.double()
    assert (width <= kind.tiny + 4 * kind.eps * roots.double().abs()).all()


# Against SciPy.


class Family(NamedTuple):
    """Increasing functions on [0, 1] with one row of parameters each."""

    name: str
    f: Callable[..., Any]  # (t, *parameters), for arrays and for single numbers
    parameters: Array  # (functions, parameters)


def kinked(t: Any, *parameters: Any) -> Any:
    count = len(parameters) // 2
    value = parameters[0] * t
    for i in range(count):
        bend = parameters[i + 1] - parameters[i]
        value = value + bend * np.maximum(t - parameters[count + 1 + i], 0.0)
    return value


def families(count: int, seed: int) -> list[Family]:
    rng = np.random.default_rng(seed)

    def uniform(low: float, high: float, columns: int = 1) -> Array:
        return rng.uniform(low, high, (count, columns))

    def powers(low: float, high: float, columns: int = 1) -> Array:
        return 10 ** uniform(low, high, columns)

    def kinks(low: float, high: float, number: int, *, convex: bool = False) -> Array:
        slopes = powers(low, high, number + 1)
        slopes = np.cumsum(slopes, axis=1) if convex else slopes
        return np.hstack([slopes, np.sort(uniform(0, 1, number), axis=1)])

    centre = uniform(0, 1)
    odd = rng.choice([3.0, 5.0, 7.0], (count, 1))
    degree = rng.choice([2.0, 3.0, 5.0, 7.0, 9.0], (count, 1))
    return [
        Family("exp", lambda t, a: np.exp(a * t), uniform(1, 40)),
        Family("log", lambda t, a: np.log(t + a), powers(-4, 0)),
        Family("polynomial", lambda t, a, p: (1 + a * t) ** p, np.hstack([powers(-1, 1), degree])),
        Family(
            "tanh",
            lambda t, a, c: np.tanh(a * (t - c)) + 1e-3 * t,
            np.hstack([powers(0, 2), centre]),
        ),
        Family(
            "sharp sigmoid",
            lambda t, a, c: 1 / (1 + np.exp(-a * (t - c))) + 1e-3 * t,
            np.hstack([powers(1, 2.8), centre]),
        ),
        Family("one kink", kinked, kinks(-2, 2, 1)),
        Family("four kinks", kinked, kinks(-3, 2, 4)),
        Family("convex kinks", kinked, kinks(-1, 2, 12, convex=True)),
        Family("cubic", lambda t, a, c: a * (t - c) ** 3 + t, np.hstack([powers(0, 4), centre])),
        Family(
            "flat", lambda t, c, p: np.copysign(np.abs(t - c) ** p, t - c), np.hstack([centre, odd])
        ),
    ]


class Problem(NamedTuple):
    """One batch with all families: g(x) = f((x - offset) / scale) - f(root)."""

    families: list[Family]
    level: Array
    offset: Array
    scale: Array

    @classmethod
    def random(cls, count: int, seed: int) -> "Problem":
        rng = np.random.default_rng(seed)
        members = families(count, seed)
        total = count * len(members)
        roots = rng.uniform(0.02, 0.98, total)
        # Flat functions have their root at their centre, where they are flat.
        roots[-count:] = members[-1].parameters[:, 0]
        problem = cls(members, np.zeros(total), np.zeros(total), np.ones(total))
        level = problem.batch(torch.from_numpy(roots)).numpy()
        offset, scale = rng.uniform(-1, 1, total), 10 ** rng.uniform(-1, 1, total)
        return problem._replace(level=level, offset=offset, scale=scale)

    def batch(self, x: Tensor) -> Tensor:
        t = np.split((x.numpy() - self.offset) / self.scale, len(self.families))
        values = [m.f(part, *m.parameters.T) for m, part in zip(self.families, t, strict=True)]
        return torch.from_numpy(np.concatenate(values) - self.level)

    def single(self, i: int) -> Callable[[float], float]:
        member, row = divmod(i, len(self.level) // len(self.families))
        f, parameters = self.families[member].f, self.families[member].parameters[row]
        return lambda x: float(f((x - self.offset[i]) / self.scale[i], *parameters) - self.level[i])

    def ends(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.offset), torch.from_numpy(self.offset + self.scale)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem.random(count=1000, seed=0)


def test_brent_agrees_with_brentq_at_nearly_its_cost(problem):
    solver = Brent()
    lower, upper = problem.ends()
    result = solver.solve(problem.batch, lower, upper)
    assert set(names(result)) == {"CONVERGED"}

    roots, calls = [], []
    for i, ends in enumerate(zip(lower.tolist(), upper.tolist(), strict=True)):
        g = problem.single(i)
        roots.append(brentq(g, *ends, xtol=1e-15, rtol=1e-15, maxiter=1000))
        same = {"xtol": solver.xtol, "rtol": solver.rtol, "full_output": True, "maxiter": 1000}
        calls.append(brentq(g, *ends, **same)[1].function_calls)
    root = torch.tensor(roots, dtype=torch.float64)
    tolerance = solver.xtol + solver.rtol * root.abs()
    for end in (result.lower, result.estimate, result.upper):
        assert ((end - root).abs() <= tolerance).all()

    extra = (2 + result.steps - torch.tensor(calls)).double().view(len(problem.families), -1)
    assert extra.mean() <= 1
    # brentq is slow on flat functions. The gain there must not pay for losses elsewhere.
    assert [member.name for member in problem.families].index("flat") == len(extra) - 1
    assert extra[:-1].mean() <= 1


@pytest.mark.parametrize(
    ("f", "upper", "xtol"),
    [
        pytest.param(lambda x: x**3 - 2.0, 2.0, 1e-10, id="smooth"),
        pytest.param(lambda x: x / (x + 0.01) - 0.95, 1.0, 1e-10, id="steep"),
        pytest.param(lambda x: x**4 + 0.3 * x - 0.52, 3.0, 1e-10, id="steps must halve"),
        pytest.param(lambda x: x**6 + 0.2 * x - 0.62, 1.0, 1e-10, id="not past three quarters"),
        pytest.param(lambda t: (t - 0.2) ** 15 + 1e-4 * (t - 0.2), 1.0, 3e-3, id="short steps end"),
        pytest.param(
            lambda x: x**3 + 0.9 * x - 1.54 + 10.4 * (x * (2 - x)) ** 2 * (x - 1),
            2.0,
            1e-10,
            id="not monotone, f may grow",
        ),
    ],
)
def test_brent_visits_the_points_of_brentq(f, upper, xtol):
    # Each function needs another of Brent's rules; none of them falls behind bisection.
    visited = []

    def noted(x: float) -> float:
        visited.append(x)
        return float(f(x))

    brentq(noted, 0.0, upper, xtol=xtol, rtol=1e-5)
    mine = Recorder(f)
    Brent(xtol=xtol).solve(mine, vector(0), vector(upper))
    assert len(visited) >= 6
    np.testing.assert_allclose(torch.cat(mine.points).numpy(), visited, rtol=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_agree_with_find_root(problem, solver):
    lower, upper = problem.ends()
    bracket = (lower.numpy(), upper.numpy())
    result = solver().solve(problem.batch, lower, upper)

    def g(x: Array, i: Array) -> Array:
        # find_root drops finished functions; the batch wants all of them.
        everyone = lower.numpy().copy()
        everyone[i] = x
        values: Array = problem.batch(torch.from_numpy(everyone)).numpy()[i]
        return values

    oracle = elementwise.find_root(g, bracket, args=(np.arange(len(lower)),))
    assert oracle.success.all()
    tolerance = 1e-10 + 1e-5 * np.abs(oracle.x)
    for end in (result.lower, result.estimate, result.upper):
        assert (np.abs(end.numpy() - oracle.x) <= tolerance + 1e-12).all()


# Plateaus.


class Plateaus(NamedTuple):
    """Functions that are 0 exactly on [left, right], with further steps below and above zero."""

    left: Tensor
    right: Tensor
    slope: Tensor  # (2, B), below and above
    power: Tensor
    level: Tensor  # (2, B): left end of another plateau, below and above
    width: Tensor

    @classmethod
    def random(cls, count: int, seed: int) -> "Plateaus":
        generator = torch.Generator().manual_seed(seed)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64)

        left = 0.01 + 0.9 * uniform(count)
        right = left + uniform(count) ** 3 * (0.99 - left)
        powers = vector(1 / 3, 0.5, 1, 2, 3, 5)
        power = powers[torch.randint(len(powers), (2, count), generator=generator)]
        room = torch.stack([left, 1 - right])
        level = torch.stack([torch.zeros_like(left), right])
        level += room * (0.1 + 0.4 * uniform(2, count))
        width = 0.4 * room * uniform(2, count) * (uniform(2, count) < 0.5)
        return cls(left, right, 10 ** (8 * uniform(2, count) - 4), power, level, width)

    def __call__(self, x: Tensor) -> Tensor:
        below, above = torch.where((x > self.level) & (x < self.level + self.width), self.level, x)
        below = self.slope[0] * (self.left - below).clamp(min=0) ** self.power[0]
        return self.slope[1] * (above - self.right).clamp(min=0) ** self.power[1] - below


def bisection_steps(roots: Tensor, *, xtol: float, rtol: float) -> Tensor:
    """Halvings of [0, 1] until it is no wider than the tolerance at the root, in plain Python."""
    steps = []
    for root in roots.tolist():
        low, high, count = 0.0, 1.0, 0
        while high - low >= xtol + rtol * min(abs(low), abs(high)):
            middle = (low + high) / 2
            low, high = (middle, high) if middle < root else (low, middle)
            count += 1
        steps.append(count)
    return torch.tensor(steps)


@pytest.mark.parametrize(("xtol", "rtol"), [(1e-10, 1e-5), (1e-6, 1e-3), (1e-12, 0.0)])
def test_plateaus_give_the_left_end_at_nearly_the_cost_of_bisection(xtol, rtol):
    f = Plateaus.random(2000, seed=1)
    zero, one = torch.zeros_like(f.left), torch.ones_like(f.left)
    result = Brent(xtol=xtol, rtol=rtol).solve(f, zero, one)
    assert set(names(result)) == {"CONVERGED"}
    tolerance = xtol + rtol * f.left
    assert (result.lower < f.left).all()
    assert (result.upper >= f.left).all()
    assert (f.left - result.lower <= tolerance).all()
    assert (result.upper - f.left <= tolerance).all()
    plain = bisection_steps(f.left, xtol=xtol, rtol=rtol)
    assert (result.steps <= plain + 3).all()
    halving = Bisection(xtol=xtol, rtol=rtol).solve(f, zero, one)
    assert torch.equal(halving.steps.long(), plain)


def test_no_function_costs_more_than_three_steps_over_bisection(problem):
    ends = problem.ends()
    halving = Bisection().solve(problem.batch, *ends)
    assert (Brent().solve(problem.batch, *ends).steps <= halving.steps + 3).all()


# Laws.


class Steps(NamedTuple):
    """Non-decreasing functions with kinks, jumps and plateaus, from exact operations alone."""

    slopes: Tensor  # (4, B), zeros among them
    knots: Tensor  # (4, B)
    jumps: Tensor  # (4, B), zeros among them
    level: Tensor  # (B,)

    def __call__(self, x: Tensor) -> Tensor:
        return self.rows(x, slice(None))

    def rows(self, x: Tensor, index: Tensor | slice) -> Tensor:
        value = -self.level[index]
        for slopes, knots, jumps in zip(self.slopes, self.knots, self.jumps, strict=True):
            beyond = (x - knots[index]).clamp(min=0)
            value = value + slopes[index] * beyond + jumps[index] * (beyond > 0)
        return value

    def at(self, index: Tensor) -> "Steps":
        return Steps(*[field[..., index] for field in self])


def columns(*choices: float) -> st.SearchStrategy[list[float]]:
    some = st.sampled_from(choices) | st.floats(0, 1, width=32)
    return st.lists(some, min_size=4, max_size=4)


@st.composite
def step_functions(draw: st.DrawFn) -> Steps:
    count = draw(st.integers(1, 9))
    kind = draw(st.sampled_from([torch.float32, torch.float64]))

    def drawn(*choices: float) -> Tensor:
        rows = [draw(columns(*choices)) for _ in range(count)]
        return torch.tensor(rows, dtype=kind).T.contiguous()

    slopes, knots, jumps = drawn(0, 0, 1, 1e-3, 1e4), drawn(0, 0.5), drawn(0, 0, 0, 1e6)
    level = drawn(0, 0.5, 2, 1e-8)[0]
    return Steps(slopes, knots, jumps, level)


def ends_of(f: Steps) -> tuple[Tensor, Tensor]:
    return torch.full_like(f.level, -0.25), torch.full_like(f.level, 1.5)


law = settings(deadline=None, derandomize=True, max_examples=60)
any_solver = st.sampled_from(SOLVERS)
any_steps = st.integers(1, 40)


@law
@given(
    f=step_functions(), solver=any_solver, max_steps=any_steps, rtol=st.sampled_from([1e-5, 0.9])
)
def test_bracket_holds_and_was_evaluated(f, solver, max_steps, rtol):
    recorder = Recorder(f)
    lower, upper = ends_of(f)
    result = solver(max_steps=max_steps, rtol=rtol).solve(recorder, lower, upper)
    points = torch.stack(recorder.points)
    positive = result.status == RootStatus.POSITIVE_THROUGHOUT
    negative = result.status == RootStatus.NEGATIVE_THROUGHOUT
    assert torch.equal(positive, f(lower) >= 0)
    assert torch.equal(negative, f(upper) < 0)
    assert ((f(result.lower) < 0) | positive).all()
    assert ((f(result.upper) >= 0) | negative).all()
    assert (points == result.lower).any(dim=0).all()
    assert (points == result.upper).any(dim=0).all()
    assert ((lower <= points) & (points <= upper)).all()
    assert (result.lower <= result.estimate).all()
    assert (result.estimate <= result.upper).all()
    assert (result.steps <= max_steps).all()


@law
@given(f=step_functions(), max_steps=any_steps)
def test_steps_stay_within_three_of_bisection(f, max_steps):
    brent = Brent(max_steps=max_steps + 3).solve(f, *ends_of(f))
    halving = Bisection(max_steps=max_steps).solve(f, *ends_of(f))
    assert (brent.steps <= halving.steps + 3).all()
    done = halving.status != RootStatus.UNCONVERGED
    assert torch.equal(brent.status[done], halving.status[done])


@law
@given(f=step_functions(), solver=any_solver, data=st.data())
def test_result_does_not_depend_on_the_rest_of_the_batch(f, solver, data):
    count = len(f.level)
    members = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=40))
    index = torch.tensor(members)
    whole = solver().solve(f, *ends_of(f))
    part = solver().solve(f.at(index), *ends_of(f.at(index)))
    assert equal(part, RootResult(*[field[index] for field in whole]))


@law
@given(f=step_functions(), solver=any_solver, max_steps=any_steps)
def test_modes_agree(f, solver, max_steps):
    chosen = solver(max_steps=max_steps)
    plain = chosen.solve(f, *ends_of(f))
    assert equal(plain, chosen.solve(f.rows, *ends_of(f), indexed=True))
    assert equal(plain, chosen.solve(f, *ends_of(f), fixed_steps=True))


@law
@given(f=step_functions(), solver=any_solver, max_steps=any_steps)
def test_more_steps_never_widen_the_bracket(f, solver, max_steps):
    few = solver(max_steps=max_steps).solve(f, *ends_of(f), fixed_steps=True)
    more = solver(max_steps=max_steps + 1).solve(f, *ends_of(f), fixed_steps=True)
    assert (more.lower >= few.lower).all()
    assert (more.upper <= few.upper).all()
    unfinished = few.status == RootStatus.UNCONVERGED
    shrunk = (more.upper - more.lower) < (few.upper - few.lower)
    assert torch.equal(shrunk, unfinished)


# Modes.


def test_indexed_mode_asks_for_unfinished_samples_only():
    targets = vector(-1, 0.5, 0.001, 2)
    asked: list[list[int]] = []

    def f(x: Tensor, index: Tensor) -> Tensor:
        assert index.dtype == torch.int64
        assert x.shape == index.shape
        asked.append(index.tolist())
        return x**5 - targets[index]

    result = Brent().solve(f, torch.zeros(4).double(), torch.ones(4).double(), indexed=True)
    assert asked[:3] == [[0, 1, 2, 3], [1, 2, 3], [1, 2]]
    for sample in (1, 2):
        assert sum(sample in index for index in asked) == 2 + result.steps[sample].item()
    assert result.steps[[0, 3]].tolist() == [0, 0]


def test_indexed_mode_never_asks_for_nothing():
    def f(x: Tensor, index: Tensor) -> Tensor:
        assert len(index) > 0
        return x + 1

    result = Brent().solve(f, vector(0, 1), vector(1, 2), indexed=True)
    assert names(result) == ["POSITIVE_THROUGHOUT"] * 2


def test_early_stop_ends_with_the_slowest_sample():
    f = Recorder(lambda x: x**5 - vector(0.5, 0.001))
    result = Brent().solve(f, vector(0, 0), vector(1, 1))
    assert len(f.points) == 2 + result.steps.max().item()
    assert result.steps[0] != result.steps[1]


def test_fixed_steps_always_evaluate_the_whole_batch():
    f = Recorder(lambda x: x - 0.5)
    result = Brent(max_steps=20).solve(f, vector(0, 1), vector(1, 2), fixed_steps=True)
    assert len(f.points) == 22
    assert {point.shape for point in f.points} == {(2,)}
    # Finished samples stay at a point where f is known to be defined.
    assert torch.equal(f.points[-1], result.lower)
    assert result.steps.tolist() == [2, 0]


@pytest.mark.parametrize("solver", SOLVERS)
def test_fixed_steps_never_look_at_a_value(solver):
    # Meta tensors have no values: anything that synchronises with the host fails on them.
    ends = torch.zeros(3, device="meta"), torch.ones(3, device="meta")
    result = solver(max_steps=3).solve(lambda x: x - 0.5, *ends, fixed_steps=True)
    assert {field.device.type for field in result} == {"meta"}
    with pytest.raises(RuntimeError, match="meta"):
        solver(max_steps=3).solve(lambda x: x - 0.5, *ends)


def test_search_builds_no_graph():
    target = vector(0.5).requires_grad_()

    def f(x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return x - target

    result = Brent().solve(f, vector(0), vector(1).requires_grad_())
    assert not any(field.requires_grad for field in result)


def fixed_cube_roots(solver: Solver) -> Callable[[Tensor, Tensor, Tensor], RootResult]:
    return lambda cubes, lower, upper: solver.solve(
        lambda x: x**3 - cubes, lower, upper, fixed_steps=True
    )


def cubes_and_ends(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    cubes = torch.linspace(-1, 30, 37, dtype=dtype, device=device)
    return cubes, torch.zeros_like(cubes), torch.full_like(cubes, 3)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_equals_eager(solver, dtype):
    solve, tensors = fixed_cube_roots(solver(max_steps=4)), cubes_and_ends(dtype)
    torch._dynamo.reset()
    compiled = torch.compile(solve, backend="aot_eager", fullgraph=True)
    assert equal(compiled(*tensors), solve(*tensors))


# Importing Inductor touches a deprecated part of torch itself.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
def test_inductor_solves_as_eager_does():
    solve, tensors = fixed_cube_roots(Brent(max_steps=2)), cubes_and_ends(torch.float64)
    torch._dynamo.reset()
    compiled, eager = torch.compile(solve, fullgraph=True)(*tensors), solve(*tensors)
    for got, expected in zip(compiled, eager, strict=True):
        # Fused kernels may round differently.
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cuda_graph_solves_as_the_cpu_does(solver, dtype):
    solve, tensors = fixed_cube_roots(solver(max_steps=40)), cubes_and_ends(dtype, "cuda")
    early = solver(max_steps=40).solve(lambda x: x**3 - tensors[0], *tensors[1:])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = solve(*tensors)
    graph.replay()
    expected = solve(*cubes_and_ends(dtype))
    for result in (captured, early):
        assert torch.equal(result.status.cpu(), expected.status)
        for got, wanted in zip(result[:3], expected[:3], strict=True):
            torch.testing.assert_close(got.cpu(), wanted, rtol=2e-5, atol=1e-10)


# Refusals.


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_steps", 0, r"`max_steps` must be at least 1; got 0"),
        ("max_steps", 1.5, r"`max_steps` must be a whole number; got 1.5"),
        ("xtol", "1", r"`xtol` must be a number; got '1'"),
        ("rtol", None, r"`rtol` must be a number; got None"),
        ("xtol", 0.0, r"`xtol` must be positive and finite; got 0.0"),
        ("xtol", math.nan, r"`xtol` must be positive and finite; got nan"),
        ("xtol", math.inf, r"`xtol` must be positive and finite; got inf"),
        ("rtol", -1e-3, r"`rtol` must be in \[0, 1\); got -0.001"),
        ("rtol", 1.0, r"`rtol` must be in \[0, 1\); got 1.0"),
        ("rtol", math.nan, r"`rtol` must be in \[0, 1\); got nan"),
    ],
)
def test_impossible_settings_are_refused(solver, field, value, message):
    with pytest.raises(InvalidInput, match=message):
        solver(**{field: value})


@pytest.mark.parametrize(
    ("lower", "upper", "message"),
    [
        (torch.zeros(2, 3), torch.ones(2, 3), r"`lower` must have shape \(B,\); got \(2, 3\)"),
        (torch.tensor(0.0), torch.tensor(1.0), r"`lower` must have shape \(B,\); got \(\)"),
        (torch.zeros(2).long(), torch.ones(2).long(), r"`lower` .* floating-point.*torch.int64"),
        (torch.zeros(2), torch.ones(3), r"`upper` must have shape \(2,\).*; got \(3,\)"),
        (
            torch.zeros(2),
            torch.ones(2).double(),
            r"`upper` .* torch.float32 .*; got .*torch.float64",
        ),
        (torch.zeros(2), torch.ones(2, device="meta"), r"`upper` .* device cpu; got .* and meta"),
    ],
)
@pytest.mark.parametrize("fixed_steps", [False, True])
def test_ends_of_the_wrong_kind_are_refused(lower, upper, message, fixed_steps):
    with pytest.raises(InvalidInput, match=message):
        Brent(max_steps=2).solve(lambda x: x, lower, upper, fixed_steps=fixed_steps)


@pytest.mark.parametrize(
    ("lower", "upper", "message"),
    [
        ((0.0, math.nan), (1.0, 1.0), r"`lower` must be finite; got nan"),
        ((0.0, 0.0), (1.0, math.inf), r"`upper` must be finite; got inf"),
        ((0.0, 2.0), (1.0, 1.5), r"`upper` must be at least `lower`; got 1.5 with `lower` 2.0"),
    ],
)
def test_ends_of_impossible_value_are_refused(lower, upper, message):
    with pytest.raises(InvalidInput, match=message):
        Brent().solve(lambda x: x, vector(*lower), vector(*upper))


@pytest.mark.parametrize("indexed", [False, True])
def test_values_of_the_wrong_kind_are_refused(indexed):
    ends = torch.zeros(2), torch.ones(2)
    with pytest.raises(InvalidInput, match=r"`f\(x\)` must have shape \(2,\).*; got \(2, 1\)"):
        Brent().solve(lambda x, *index: x[:, None], *ends, indexed=indexed)
    with pytest.raises(InvalidInput, match=r"`f\(x\)` .* dtype torch.float32 .*; got .*float64"):
        Brent().solve(lambda x, *index: x.double(), *ends, indexed=indexed)


@pytest.mark.parametrize("name", ["f_lower", "f_upper"])
def test_known_values_of_the_wrong_shape_are_refused(name):
    with pytest.raises(InvalidInput, match=rf"`{name}` must have shape \(2,\).*; got \(1,\)"):
        Brent().solve(lambda x: x - 1, torch.zeros(2), torch.ones(2), **{name: torch.ones(1)})


def test_indexed_fixed_steps_are_refused():
    with pytest.raises(InvalidInput, match=r"`indexed` must be False .* `fixed_steps`.*; got True"):
        Brent().solve(lambda x: x, vector(0), vector(1), fixed_steps=True, indexed=True)
