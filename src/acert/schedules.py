"""Radius cap and learning rate as plain functions of the training step.

A schedule is a value without state: what it returns depends on the step alone, so a resumed run
needs to remember only its step. Steps count from 0, epochs from 1; one step is one batch.

>>> SmoothRadius(start_epoch=2, length=80).cap(40, max_radius=0.1, steps_per_epoch=1)
0.038461538461538464
>>> OneCycle(max_rate=2e-3).rate(0, steps_per_epoch=10, epochs=5)
8e-05
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Integral, Real

from acert.errors import InvalidInput

__all__ = [
    "Constant",
    "FullRadius",
    "LearningRate",
    "OneCycle",
    "RadiusSchedule",
    "SmoothRadius",
    "StepDecay",
    "epoch_of",
]

# Both pieces of the smooth schedule: a power over the first quarter, then a straight line.
_POWER = 4
_SEAM = 0.25
# Share of all steps in each of the first two phases of the cycle; the third takes the rest.
_CYCLE_PHASE = 0.3


def epoch_of(step: int, *, steps_per_epoch: int) -> int:
    """Epoch, counted from 1, that the step, counted from 0, belongs to."""
    _at_least("step", step, 0)
    _at_least("steps_per_epoch", steps_per_epoch, 1)
    return step // steps_per_epoch + 1


class RadiusSchedule(ABC):
    """What caps the training radius, eps_{max,t} in Section 4."""

    @property
    @abstractmethod
    def last_epoch(self) -> int:
        """Last epoch of the warm-up; regularisers are on until its end. 0 without a warm-up."""

    @abstractmethod
    def cap(self, step: int, *, max_radius: float, steps_per_epoch: int) -> float:
        """Largest radius that the batch of this step may be trained at, from 0 to max_radius."""


@dataclass(frozen=True, kw_only=True)
class SmoothRadius(RadiusSchedule):
    """Cap that rises from 0 to max_radius over `length` epochs: power 4, then linear.

    0 before `start_epoch`; a batch counts as soon as it is drawn, so the last batch of epoch
    `start_epoch + length - 1` is the first to be trained at max_radius.
    """

    start_epoch: int = 2
    length: int = 80

    def __post_init__(self) -> None:
        _at_least("start_epoch", self.start_epoch, 1)
        _at_least("length", self.length, 1)

    @property
    def last_epoch(self) -> int:
        """Epoch at whose end the cap reaches max_radius."""
        return self.start_epoch + self.length - 1

    def cap(self, step: int, *, max_radius: float, steps_per_epoch: int) -> float:
        """Largest radius of this step: max_radius times the share of the warm-up done."""
        _at_least("step", step, 0)
        _at_least("steps_per_epoch", steps_per_epoch, 1)
        _positive("max_radius", max_radius)
        done = step + 1 - (self.start_epoch - 1) * steps_per_epoch
        return max_radius * _smooth_rise(done / (self.length * steps_per_epoch))


@dataclass(frozen=True, kw_only=True)
class FullRadius(RadiusSchedule):
    """No schedule at all: max_radius from the first step on (Table 2)."""

    @property
    def last_epoch(self) -> int:
        """0: there is no warm-up."""
        return 0

    def cap(self, step: int, *, max_radius: float, steps_per_epoch: int) -> float:
        """The max_radius itself, whatever the step."""
        _at_least("step", step, 0)
        _at_least("steps_per_epoch", steps_per_epoch, 1)
        _positive("max_radius", max_radius)
        return max_radius


class LearningRate(ABC):
    """The optimiser's rate over a run of known length."""

    @abstractmethod
    def rate(self, step: int, *, steps_per_epoch: int, epochs: int) -> float:
        """Learning rate of this step in a run of `epochs` epochs."""

    def height(self, step: int, *, steps_per_epoch: int, epochs: int) -> float:
        """Share of the way from the foot of the cycle to its peak; 0 where there is no cycle."""
        return 0.0


@dataclass(frozen=True, kw_only=True)
class OneCycle(LearningRate):
    """Three straight lines: 30 % of the steps up to `max_rate`, 30 % down again, 40 % far down.

    It starts and ends its cycle at max_rate / start_divisor and goes on down to
    max_rate / end_divisor, which the last step has.
    """

    max_rate: float = 2e-3
    start_divisor: float = 25.0
    end_divisor: float = 2500.0

    def __post_init__(self) -> None:
        _positive("max_rate", self.max_rate)
        _positive("start_divisor", self.start_divisor)
        _positive("end_divisor", self.end_divisor)

    def rate(self, step: int, *, steps_per_epoch: int, epochs: int) -> float:
        """Rate on the line that this step falls on."""
        total = _run_length(step, steps_per_epoch=steps_per_epoch, epochs=epochs)
        low, end = self.max_rate / self.start_divisor, self.max_rate / self.end_divisor
        # The turning points lie between steps where the phases do not hold whole steps.
        peak, foot = _CYCLE_PHASE * total - 1, 2 * _CYCLE_PHASE * total - 2
        if step <= peak:
            return _between(low, self.max_rate, step / peak)
        if step <= foot:
            return _between(self.max_rate, low, (step - peak) / (foot - peak))
        return _between(low, end, (step - foot) / (total - 1 - foot))

    def height(self, step: int, *, steps_per_epoch: int, epochs: int) -> float:
        """1 at the peak, 0 at both feet and behind the second one."""
        low = self.max_rate / self.start_divisor
        rate = self.rate(step, steps_per_epoch=steps_per_epoch, epochs=epochs)
        return max(0.0, (rate - low) / (self.max_rate - low)) if self.max_rate > low else 0.0


@dataclass(frozen=True, kw_only=True)
class StepDecay(LearningRate):
    """`initial_rate`, times `factor` after each of `epochs` is over.

    With epochs (120, 140), epoch 120 still runs at the initial rate and epoch 121 at factor
    times it. The run's own length does not matter.
    """

    initial_rate: float = 5e-4
    epochs: tuple[int, ...] = (120, 140)
    factor: float = 0.2

    def __post_init__(self) -> None:
        _positive("initial_rate", self.initial_rate)
        _positive("factor", self.factor)
        if any(epoch < 1 for epoch in self.epochs) or list(self.epochs) != sorted(set(self.epochs)):
            raise InvalidInput(f"`epochs` must be >= 1 and strictly rising; got {self.epochs}")

    def rate(self, step: int, *, steps_per_epoch: int, epochs: int) -> float:
        """Initial rate times factor to the number of decay epochs left behind."""
        _run_length(step, steps_per_epoch=steps_per_epoch, epochs=epochs)
        now = epoch_of(step, steps_per_epoch=steps_per_epoch)
        return self.initial_rate * self.factor ** sum(now > epoch for epoch in self.epochs)


@dataclass(frozen=True, kw_only=True)
class Constant(LearningRate):
    """The same rate throughout."""

    constant_rate: float = 5e-4

    def __post_init__(self) -> None:
        _positive("constant_rate", self.constant_rate)

    def rate(self, step: int, *, steps_per_epoch: int, epochs: int) -> float:
        """The constant rate."""
        _run_length(step, steps_per_epoch=steps_per_epoch, epochs=epochs)
        return self.constant_rate


def _smooth_rise(progress: float) -> float:
    """Share of the rise at a share of its length: 0 up to 0, 1 from 1 on, slope continuous."""
    if progress <= 0:
        return 0.0
    if progress >= 1:
        return 1.0
    # With a power p and the seam at s, equal slopes and a total rise of 1 leave one height for
    # the seam: the line adds p (1 - s) / s times that height to it.
    height = 1 / (1 + _POWER * (1 - _SEAM) / _SEAM)
    if progress < _SEAM:
        return height * float((progress / _SEAM) ** _POWER)
    return _between(height, 1.0, (progress - _SEAM) / (1 - _SEAM))


def _between(start: float, end: float, share: float) -> float:
    return start + (end - start) * share


def _run_length(step: int, *, steps_per_epoch: int, epochs: int) -> int:
    """Number of steps in the run; the step must be one of them."""
    _at_least("steps_per_epoch", steps_per_epoch, 1)
    _at_least("epochs", epochs, 1)
    total = steps_per_epoch * epochs
    if not 0 <= step < total:
        raise InvalidInput(f"`step` must be in [0, {total - 1}] for this run; got {step}")
    return total


def _at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, Integral):
        raise InvalidInput(f"`{name}` must be a whole number; got {value!r}")
    if value < least:
        raise InvalidInput(f"`{name}` must be >= {least}; got {value}")


def _positive(name: str, value: float) -> None:
    if not (isinstance(value, Real) and value > 0 and math.isfinite(value)):
        raise InvalidInput(f"`{name}` must be positive and finite; got {value!r}")
