from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acert.errors import InvalidInput
from acert.schedules import (
    Constant,
    FullRadius,
    LearningRate,
    OneCycle,
    RadiusSchedule,
    SmoothRadius,
    StepDecay,
    epoch_of,
)

Schedule = SmoothRadius | FullRadius | OneCycle | StepDecay | Constant
RADIUS_SCHEDULES = [SmoothRadius(), SmoothRadius(start_epoch=1, length=20), FullRadius()]
LEARNING_RATES = [OneCycle(), StepDecay(epochs=(2, 3)), Constant()]


def cap_at_end_of(epoch: int, schedule: RadiusSchedule, *, steps_per_epoch: int) -> float:
    return schedule.cap(
        epoch * steps_per_epoch - 1, max_radius=1.0, steps_per_epoch=steps_per_epoch
    )


def test_epochs_count_from_one_and_steps_from_zero() -> None:
    assert [epoch_of(step, steps_per_epoch=3) for step in (0, 2, 3, 5, 6)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("steps_per_epoch", [1, 7, 391])
@pytest.mark.parametrize(
    ("epoch", "share"), [(11, 0.005), (21, 0.077), (31, 0.231), (41, 0.385), (61, 0.692), (81, 1.0)]
)
def test_smooth_radius_hits_the_reference_values(
    epoch: int, share: float, steps_per_epoch: int
) -> None:
    found = cap_at_end_of(epoch, SmoothRadius(), steps_per_epoch=steps_per_epoch)
    assert found == pytest.approx(share, abs=5e-4)


def test_smooth_radius_is_zero_before_its_start_and_full_after_its_end() -> None:
    schedule = SmoothRadius(start_epoch=3, length=4)
    caps = [schedule.cap(step, max_radius=0.4, steps_per_epoch=5) for step in range(40)]
    assert caps[:10] == [0.0] * 10
    assert 0 < caps[10] < caps[28] < 0.4
    assert caps[29:] == [0.4] * 11
    assert schedule.last_epoch == 6 == epoch_of(29, steps_per_epoch=5)


def test_smooth_radius_has_power_four_then_a_line_with_the_same_slope() -> None:
    schedule = SmoothRadius(start_epoch=1, length=1)

    def share(done: int) -> float:
        return schedule.cap(done - 1, max_radius=1.0, steps_per_epoch=4000)

    assert share(1000) / share(500) == pytest.approx(16)
    assert share(3000) - share(2000) == pytest.approx(share(2000) - share(1000))
    before, after = share(1000) - share(999), share(1001) - share(1000)
    assert before == pytest.approx(after, rel=2e-3)


def test_without_a_schedule_the_cap_is_full_from_the_first_step() -> None:
    schedule = FullRadius()
    assert schedule.cap(0, max_radius=0.1, steps_per_epoch=9) == 0.1
    assert schedule.last_epoch == 0


@given(
    step=st.integers(0, 3000),
    start_epoch=st.integers(1, 5),
    length=st.integers(1, 30),
    steps_per_epoch=st.integers(1, 50),
)
def test_smooth_radius_never_falls_and_stays_in_range(
    step: int, start_epoch: int, length: int, steps_per_epoch: int
) -> None:
    schedule = SmoothRadius(start_epoch=start_epoch, length=length)
    now, later = (
        schedule.cap(s, max_radius=0.3, steps_per_epoch=steps_per_epoch) for s in (step, step + 1)
    )
    assert 0 <= now <= later <= 0.3


@pytest.mark.parametrize("epochs", [1, 2, 3, 5, 10, 33, 100])
@pytest.mark.parametrize("steps_per_epoch", [1, 3, 7])
@pytest.mark.parametrize("end_divisor", [2500.0, 25e4])
def test_one_cycle_equals_pytorch_step_by_step(
    epochs: int, steps_per_epoch: int, end_divisor: float
) -> None:
    total = epochs * steps_per_epoch
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    reference = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=2e-3,
        total_steps=total,
        anneal_strategy="linear",
        three_phase=True,
        cycle_momentum=False,
        final_div_factor=end_divisor / 25,
    )
    schedule = OneCycle(max_rate=2e-3, end_divisor=end_divisor)
    for step in range(total):
        found = schedule.rate(step, steps_per_epoch=steps_per_epoch, epochs=epochs)
        assert found == pytest.approx(reference.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        if step < total - 1:
            reference.step()


def test_one_cycle_turns_where_its_phases_meet() -> None:
    rates = [
        OneCycle(max_rate=1.0).rate(step, steps_per_epoch=10, epochs=10) for step in range(100)
    ]
    assert rates[0] == pytest.approx(1 / 25)
    assert rates[29] == max(rates) == pytest.approx(1.0)
    assert rates[58] == pytest.approx(1 / 25)
    assert rates[99] == pytest.approx(1 / 2500)


def test_step_decay_falls_after_its_epochs_as_pytorch_does() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    reference = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4], gamma=0.2)
    schedule = StepDecay(initial_rate=0.5, epochs=(2, 4), factor=0.2)
    for epoch in range(1, 7):
        for batch in range(3):
            step = (epoch - 1) * 3 + batch
            found = schedule.rate(step, steps_per_epoch=3, epochs=6)
            assert found == pytest.approx(reference.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        reference.step()
    assert schedule.rate(5, steps_per_epoch=3, epochs=6) == 0.5
    assert schedule.rate(6, steps_per_epoch=3, epochs=6) == pytest.approx(0.1)


def test_constant_rate() -> None:
    rates = {Constant(constant_rate=0.3).rate(s, steps_per_epoch=2, epochs=3) for s in range(6)}
    assert rates == {0.3}


@pytest.mark.parametrize("schedule", [*RADIUS_SCHEDULES, *LEARNING_RATES])
def test_schedules_are_values(schedule: Schedule) -> None:
    twin = replace(schedule)
    assert twin is not schedule
    assert twin == schedule
    assert hash(twin) == hash(schedule)
    with pytest.raises(FrozenInstanceError):
        schedule.last_epoch = 1  # type: ignore[misc, union-attr]


@pytest.mark.parametrize("schedule", RADIUS_SCHEDULES)
def test_radius_schedules_refuse_bad_arguments(schedule: RadiusSchedule) -> None:
    with pytest.raises(InvalidInput, match="`step` must be >= 0; got -1"):
        schedule.cap(-1, max_radius=0.1, steps_per_epoch=1)
    with pytest.raises(InvalidInput, match="`steps_per_epoch` must be >= 1; got 0"):
        schedule.cap(0, max_radius=0.1, steps_per_epoch=0)
    for radius in (0.0, -0.1, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match=f"`max_radius` must be positive .* got {radius}"):
            schedule.cap(0, max_radius=radius, steps_per_epoch=1)


@pytest.mark.parametrize("schedule", LEARNING_RATES)
def test_learning_rates_refuse_steps_outside_the_run(schedule: LearningRate) -> None:
    for step in (-1, 12):
        with pytest.raises(InvalidInput, match=rf"`step` must be in \[0, 11\].* got {step}"):
            schedule.rate(step, steps_per_epoch=4, epochs=3)
    with pytest.raises(InvalidInput, match="`epochs` must be >= 1; got 0"):
        schedule.rate(0, steps_per_epoch=4, epochs=0)
    with pytest.raises(InvalidInput, match="`steps_per_epoch` must be >= 1; got 0"):
        schedule.rate(0, steps_per_epoch=0, epochs=3)


def test_hyperparameters_are_checked() -> None:
    with pytest.raises(InvalidInput, match="`start_epoch` must be >= 1; got 0"):
        SmoothRadius(start_epoch=0)
    with pytest.raises(InvalidInput, match="`length` must be >= 1; got 0"):
        SmoothRadius(length=0)
    with pytest.raises(InvalidInput, match=r"`length` must be a whole number; got 2\.5"):
        SmoothRadius(length=2.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="`max_rate` must be positive and finite; got '1'"):
        OneCycle(max_rate="1")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="`max_rate` must be positive"):
        OneCycle(max_rate=0.0)
    with pytest.raises(InvalidInput, match="`end_divisor` must be positive"):
        OneCycle(end_divisor=float("nan"))
    with pytest.raises(InvalidInput, match="`factor` must be positive"):
        StepDecay(factor=-0.2)
    with pytest.raises(InvalidInput, match=r"`epochs` must be .* rising; got \(4, 2\)"):
        StepDecay(epochs=(4, 2))
    with pytest.raises(InvalidInput, match=r"`epochs` must be >= 1 .* got \(0, 2\)"):
        StepDecay(epochs=(0, 2))
    with pytest.raises(InvalidInput, match="`constant_rate` must be positive"):
        Constant(constant_rate=float("inf"))
