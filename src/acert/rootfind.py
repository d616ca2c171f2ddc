"""Leftmost roots of a batch of non-decreasing scalar functions: Brent's method and bisection.

Every sample has a bracket with f(lower) < 0 <= f(upper). One loop narrows all brackets at once; a
solver only proposes the next points. f = 0 counts as positive, so that on a plateau of zeros the
bracket closes on the left end (Thm. A.1). NaN counts as +inf.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, final

import torch
from torch import Tensor

from acert.errors import InvalidInput
from acert.fields import check_fields

__all__ = ["Bisection", "Brent", "PowerLaw", "RootResult", "RootStatus", "Solver"]

# After k steps a bracket of Brent's is at most _LAG * 2**-k of the first one. 2**3 would mean three
# steps behind bisection; a little less, because the tolerance depends on where the bracket ends up.
_LAG = 7.0


class RootStatus(IntEnum):
    """How the search for one sample's root ended.

    POSITIVE_THROUGHOUT: f(lower) >= 0. NEGATIVE_THROUGHOUT: f(upper) < 0.
    CONVERGED: the bracket is within the tolerance.
    UNCONVERGED: `max_steps` are used up; the bracket still holds the root.
    """

    POSITIVE_THROUGHOUT = 0
    NEGATIVE_THROUGHOUT = 1
    CONVERGED = 2
    UNCONVERGED = 3


class RootResult(NamedTuple):
    """Bracket, estimate, status and cost per sample, each of shape (B,).

    `lower` is the last point with f < 0 and `upper` the first with f >= 0; f was evaluated at both.
    Where f >= 0 throughout, both are the given lower end; where f < 0 throughout, the upper end.
    """

    lower: Tensor
    upper: Tensor
    estimate: Tensor  # root of the secant through the bracket; its midpoint where f is infinite
    status: Tensor  # uint8, values of RootStatus
    steps: Tensor  # int32, evaluations of f besides those at the two given ends


class _State(NamedTuple):
    """Brackets and what Brent's method remembers, each (B,); a to e are Brent's names.

    What it remembers of a sample that is done means nothing.
    """

    lower: Tensor
    f_lower: Tensor
    upper: Tensor
    f_upper: Tensor
    b: Tensor  # the end of the bracket with the smaller |f|
    f_b: Tensor
    c: Tensor  # the other end
    f_c: Tensor
    a: Tensor  # the best point before the present one
    f_a: Tensor
    d: Tensor  # the last step
    e: Tensor  # the step before the last
    schedule: Tensor  # half-width that a late bisection would have reached by now
    first: tuple[Tensor, Tensor, Tensor, Tensor]  # the ends and values of the first bracket

    @classmethod
    def start(cls, lower: Tensor, f_lower: Tensor, upper: Tensor, f_upper: Tensor) -> "_State":
        ends = lower, f_lower, upper, f_upper
        b, f_b, c, f_c = _best_first(*ends)
        width = upper - lower
        return cls(*ends, b, f_b, c, f_c, c, f_c, width, width, (0.5 * _LAG) * width, ends)

    def midpoint(self) -> Tensor:
        return 0.5 * self.lower + 0.5 * self.upper  # the sum itself may overflow

    def half_width(self) -> Tensor:
        return 0.5 * (self.upper - self.lower)

    def narrowed(self, x: Tensor, f_x: Tensor, active: Tensor, *, last: bool) -> "_State":
        """The state once f(x) is known; brackets that are not active stay as they are.

        After the `last` step nothing has to be remembered.
        """
        below = f_x < 0
        raised = active & below
        lowered = active ^ raised
        ends = (
            torch.where(raised, x, self.lower),
            torch.where(raised, f_x, self.f_lower),
            torch.where(lowered, x, self.upper),
            torch.where(lowered, f_x, self.f_upper),
        )
        if last:
            lower, f_lower, upper, f_upper = ends
            return self._replace(lower=lower, f_lower=f_lower, upper=upper, f_upper=f_upper)
        b, f_b, c, f_c = _best_first(*ends)
        x_is_best = b == x
        a = torch.where(x_is_best, self.b, x)
        f_a = torch.where(x_is_best, self.f_b, f_x)
        d = x - self.b
        # After a bisection or a change of sign, older steps say nothing about the next one.
        forget = (x == self.midpoint()) | (below != (self.f_b < 0))
        e = torch.where(forget, d, self.d)
        return _State(*ends, b, f_b, c, f_c, a, f_a, d, e, 0.5 * self.schedule, self.first)


def _best_first(
    lower: Tensor, f_lower: Tensor, upper: Tensor, f_upper: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Brent's b, f(b), c, f(c): |f| is smaller at b."""
    lower_is_best = -f_lower < f_upper  # these are |f| where a sample is not done
    b = torch.where(lower_is_best, lower, upper)
    f_b = torch.where(lower_is_best, f_lower, f_upper)
    c = torch.where(lower_is_best, upper, lower)
    f_c = torch.where(lower_is_best, f_upper, f_lower)
    return b, f_b, c, f_c


@dataclass(frozen=True, kw_only=True)
class Solver(ABC):
    """Root finder that stops when both ends are within `xtol + rtol * |root|` of the root.

    `rtol` counts as at least four machine epsilons, so that every dtype can reach it.
    """

    xtol: float = 1e-10
    rtol: float = 1e-5
    max_steps: int = 100

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))
        if not 0 < self.xtol < math.inf:
            raise InvalidInput(f"`xtol` must be positive and finite; got {self.xtol}")
        # From 1 on, Brent's shortest step could leave the bracket.
        if not 0 <= self.rtol < 1:
            raise InvalidInput(f"`rtol` must be in [0, 1); got {self.rtol}")
        if self.max_steps < 1:
            raise InvalidInput(f"`max_steps` must be at least 1; got {self.max_steps}")

    @abstractmethod
    def _proposal(self, state: _State) -> Tensor:
        """Next points to evaluate, inside the bracket of every unfinished sample."""

    @abstractmethod
    def _estimate(self, state: _State) -> Tensor:
        """Where the root is likely to be, once no more points are evaluated."""

    @torch.no_grad()
    def solve(
        self,
        f: Callable[..., Tensor],
        lower: Tensor,
        upper: Tensor,
        *,
        f_lower: Tensor | None = None,
        f_upper: Tensor | None = None,
        fixed_steps: bool = False,
        indexed: bool = False,
    ) -> RootResult:
        """Leftmost root in [lower, upper] of each of the non-decreasing functions f: (B,) -> (B,).

        `f_lower` and `f_upper` are values already known at the ends. By default the search stops
        when all samples are done. With `indexed=True` it calls `f(x, index)` for the unfinished
        samples only; `index` holds their int64 positions. `fixed_steps=True` runs `max_steps`
        rounds on the whole batch without a host sync, for `torch.compile` and CUDA graphs; the
        values of the ends are not checked then.

        >>> cubes = torch.tensor([-1.0, 5.0, 1000.0])
        >>> result = Brent().solve(lambda x: x**3 - cubes, torch.zeros(3), torch.full((3,), 4.0))
        >>> result.estimate
        tensor([0.0000, 1.7100, 4.0000])
        >>> [RootStatus(code).name for code in result.status.tolist()]
        ['POSITIVE_THROUGHOUT', 'CONVERGED', 'NEGATIVE_THROUGHOUT']
        """
        if fixed_steps and indexed:
            raise InvalidInput("`indexed` must be False where `fixed_steps` is True; got True")
        if not callable(f):
            raise InvalidInput(f"`f` must be a function; got {type(f).__name__}")
        _check_ends(lower, upper, values=not (fixed_steps or torch.compiler.is_compiling()))

        def evaluated(x: Tensor, active: Tensor) -> Tensor:
            if not indexed:
                return _values("f(x)", f(x), like=x)
            f_x = torch.full_like(x, math.inf)
            index = active.nonzero().squeeze(1)
            if len(index) > 0:
                f_x[index] = _values("f(x)", f(x[index], index), like=x[index])
            return f_x

        if f_lower is None:
            f_lower = evaluated(lower, torch.ones_like(lower, dtype=torch.bool))
        else:
            f_lower = _values("f_lower", f_lower, like=lower)
        positive = f_lower >= 0
        if f_upper is None:
            f_upper = evaluated(upper, ~positive)
        else:
            f_upper = _values("f_upper", f_upper, like=upper)
        negative = ~positive & (f_upper < 0)
        done = positive | negative

        state = _State.start(lower, f_lower, upper, f_upper)
        steps = torch.zeros_like(lower, dtype=torch.int32)
        for left in reversed(range(self.max_steps)):
            active = ~(done | self._converged(state))
            if not fixed_steps and not active.any():
                break
            x = torch.where(active, self._proposal(state), state.lower)
            state = state.narrowed(x, evaluated(x, active), active, last=not left)
            steps = steps + active

        status = torch.full_like(lower, RootStatus.UNCONVERGED, dtype=torch.uint8)
        status = status.masked_fill(self._converged(state), RootStatus.CONVERGED)
        status = status.masked_fill(negative, RootStatus.NEGATIVE_THROUGHOUT)
        status = status.masked_fill(positive, RootStatus.POSITIVE_THROUGHOUT)
        below = torch.where(negative, upper, state.lower)
        above = torch.where(positive, lower, state.upper)
        return RootResult(below, above, self._estimate(state).clamp(below, above), status, steps)

    def _tolerance(self, magnitude: Tensor) -> Tensor:
        kind = torch.finfo(magnitude.dtype)
        return max(self.xtol, kind.tiny) + max(self.rtol, 4 * kind.eps) * magnitude

    def _converged(self, state: _State) -> Tensor:
        # The end nearer to zero gives the smaller tolerance: the root's own is no smaller.
        nearest = torch.minimum(state.lower.abs(), state.upper.abs())
        return state.upper - state.lower < self._tolerance(nearest)


@final
@dataclass(frozen=True, kw_only=True)
class Bisection(Solver):
    """Halves the bracket each step."""

    def _proposal(self, state: _State) -> Tensor:
        return state.midpoint()

    def _estimate(self, state: _State) -> Tensor:
        return _secant_root(state)


@final
@dataclass(frozen=True, kw_only=True)
class Brent(Solver):
    """Brent's method (1973, chapter 4), at most three steps behind bisection on any function.

    Inverse quadratic interpolation or the secant where they look safe, else bisection. Brent's
    own safeguard lets flat functions and plateaus cost bisection's count squared; a second one,
    the projection of Oliveira and Takahashi (ITP, 2021), prevents that.
    """

    def _proposal(self, state: _State) -> Tensor:
        a, f_a, b, f_b, c, f_c = state.a, state.f_a, state.b, state.f_b, state.c, state.f_c
        width = c - b
        # The shortest step. Anything less, and the far end would never come near the root.
        delta = 0.5 * self._tolerance(b.abs())

        s = f_b / f_a
        step = width * s / (s - 1)  # the secant's
        if a is not c:  # in the first step it is, for all samples
            q, r = f_a / f_c, f_b / f_c
            top = s * (width * q * (q - r) - (b - a) * (r - 1))
            quadratic = top / ((q - 1) * (r - 1) * (1 - s))
            step = torch.where(a == c, step, quadratic)

        length, before = step.abs(), state.e.abs()
        safe = (f_c.abs() < math.inf) & (f_b.abs() < f_a.abs()) & (before > delta)
        safe &= 2 * length < torch.minimum(before, 1.5 * width.abs() - delta)
        arrived = safe & (length <= delta)
        step = torch.where(arrived, delta.copysign(width), step)
        return _on_schedule(state, torch.where(safe, b + step, state.midpoint()), arrived)

    def _estimate(self, state: _State) -> Tensor:
        return _secant_root(state)


# Exponents beyond these come from values that say nothing, such as two that are nearly equal.
_POWERS = (0.4, 8.0)


@final
@dataclass(frozen=True, kw_only=True)
class PowerLaw(Solver):
    """Takes f for f(lower) + A (x - lower)^p, the shape of a certified margin over the radius.

    The exponent is that of the points known around the root; before there are any, `exponent`. For
    few steps: after two of them radii are nearer to their roots than by Brent's method, and no
    longer too small on average; training at them has helped on digits and not on CIFAR-10
    (docs/performance.md). On any function at most three steps behind bisection, as Brent's method
    is here.
    """

    exponent: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.exponent < math.inf:
            raise InvalidInput(f"`exponent` must be positive and finite; got {self.exponent}")

    def _proposal(self, state: _State) -> Tensor:
        x = self._estimate(state)
        # Nearer to an end than this, and the bracket would hardly get smaller.
        gap = torch.minimum(0.5 * self._tolerance(x.abs()), state.half_width())
        x = x.clamp(state.lower + gap, state.upper - gap)
        return _on_schedule(state, x, torch.zeros_like(x, dtype=torch.bool))

    def _estimate(self, state: _State) -> Tensor:
        start, f_start, end, f_end = state.first
        left, right = state.lower - start, state.upper - start
        f_left, f_right = state.f_lower - f_start, state.f_upper - f_start
        # Both ends where the lower one has moved, else the upper one and the first of all.
        ends = (f_right / f_left).log() / (right / left).log()
        beyond = ((f_end - f_start) / f_right).log() / ((end - start) / right).log()
        power = torch.where(left > 0, ends, beyond)
        known = power.isfinite() & ((left > 0) | (state.upper < end))
        power = torch.where(known, power.clamp(*_POWERS), self.exponent)
        near = (state.f_lower.abs() < state.f_upper.abs()) & (left > 0)
        length, rise = torch.where(near, left, right), torch.where(near, f_left, f_right)
        x = start + length * (-f_start / rise).pow(1 / power)
        inside = (x >= state.lower) & (x <= state.upper)  # neither is true of NaN
        return torch.where(inside, x, state.midpoint())


def _on_schedule(state: _State, x: Tensor, arrived: Tensor) -> Tensor:
    """x, moved towards the midpoint where the larger part it may leave would be too large.

    That part is half the bracket for bisection and `schedule` at most. A step goes no further than
    their geometric mean, so that a later step still has something to risk. Only a step that claims
    to have arrived at the root may risk all.
    """
    geometric_mean = state.half_width().sqrt() * state.schedule.sqrt()
    larger_side = torch.where(arrived, state.schedule, geometric_mean)
    return x.clamp(state.upper - larger_side, state.lower + larger_side)


def _secant_root(state: _State) -> Tensor:
    finite = torch.maximum(state.f_lower.abs(), state.f_upper.abs()) < math.inf
    # The ratio may overflow harmlessly; the difference of the two would give inf / inf.
    ratio = state.f_upper / state.f_lower
    weight = torch.where(finite & (ratio <= 0), 1 / (1 - ratio), 0.5)
    return (1 - weight) * state.lower + weight * state.upper


def _values(name: str, values: Tensor, *, like: Tensor) -> Tensor:
    """The values, of the right kind, with +inf for NaN."""
    _check_like(name, values, like)
    return values.nan_to_num(math.inf, math.inf, -math.inf)


def _check_like(name: str, values: Tensor, like: Tensor) -> None:
    _check_tensor(name, values)
    got, wanted = ((tuple(t.shape), t.dtype, t.device) for t in (values, like))
    if got != wanted:
        words = "`{}` must have shape {}, dtype {} and device {}; got {}, {} and {}"
        raise InvalidInput(words.format(name, *wanted, *got))


def _check_tensor(name: str, values: object) -> None:
    if not isinstance(values, Tensor):
        raise InvalidInput(f"`{name}` must be a tensor; got {type(values).__name__}")


def _check_ends(lower: Tensor, upper: Tensor, *, values: bool) -> None:
    _check_tensor("lower", lower)
    if lower.ndim != 1:
        raise InvalidInput(f"`lower` must have shape (B,); got {tuple(lower.shape)}")
    if not lower.is_floating_point():
        raise InvalidInput(f"`lower` must have a floating-point dtype; got {lower.dtype}")
    _check_like("upper", upper, lower)
    if not values:
        return
    for name, end in (("lower", lower), ("upper", upper)):
        if not (finite := end.isfinite()).all():
            raise InvalidInput(f"`{name}` must be finite; got {end[~finite][0].item()}")
    if (crossed := lower > upper).any():
        low, high = lower[crossed][0].item(), upper[crossed][0].item()
        raise InvalidInput(f"`upper` must be at least `lower`; got {high} with `lower` {low}")
