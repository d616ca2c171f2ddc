import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from acert.errors import InvalidInput
from acert.metrics import (
    accuracy,
    acr,
    art,
    certified_accuracy,
    certified_accuracy_curve,
    pareto_front,
    radius_distribution,
    spread,
)

# One wrong sample, one right but unproven, two in between, two at the cap of 0.4.
RADIUS = [0.0, 0.0, 0.1, 0.3, 0.4, 0.4]
CORRECT = [False, True, True, True, True, True]

fractions = st.floats(0, 1)
some_radii = arrays(np.float32, st.integers(1, 40), elements=st.floats(0, 0.25, width=32))


def made_up(count: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    correct = random.random(count) < 0.8
    radius = np.clip(random.normal(0.05, 0.05, count), 0, 0.1) * correct
    return radius.astype(np.float32), correct


def test_figures_by_hand() -> None:
    assert accuracy(CORRECT) == pytest.approx(5 / 6)
    assert acr(RADIUS, max_radius=0.4) == pytest.approx(1.2 / 6 / 0.4)
    assert art(0.64, 0.25) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("at", "count"), [(0.0, 5), (0.05, 4), (0.1, 4), (0.1001, 3), (0.3, 3), (0.4, 2), (0.5, 0)]
)
def test_certified_accuracy_by_hand(at: float, count: int) -> None:
    assert certified_accuracy(RADIUS, CORRECT, at=at) == pytest.approx(count / 6)


def test_a_correct_sample_of_radius_zero_counts_for_accuracy_only() -> None:
    assert certified_accuracy([0.0], [True], at=0.0) == 1.0
    assert certified_accuracy([0.0], [True], at=1e-9) == 0.0
    assert certified_accuracy([0.0], [False], at=0.0) == 0.0


# In float32, 0.7 is rounded down and 0.1 is rounded up.
@pytest.mark.parametrize("max_radius", [0.1, 0.4, 0.7, 8 / 255, 8.8 / 255, 1 / 255])
def test_a_float32_radius_reaches_the_cap_it_was_solved_to(max_radius: float) -> None:
    radius = torch.full((3,), max_radius)
    correct = torch.ones(3, dtype=torch.bool)
    assert certified_accuracy(radius, correct, at=max_radius) == 1.0
    assert acr(radius, max_radius=max_radius) == 1.0
    for points in (None, 11):
        curve = certified_accuracy_curve(radius, correct, max_radius=max_radius, points=points)
        assert curve.accuracy.tolist() == [1.0] * len(curve.radius)
    assert radius_distribution(radius, max_radius=max_radius).at_max == 1.0


def test_tensors_arrays_and_lists_give_the_same_figures() -> None:
    tensor = torch.tensor(RADIUS, dtype=torch.float64, requires_grad=True)
    for radius in (tensor, tensor.detach().numpy(), RADIUS):
        for correct in (torch.tensor(CORRECT), np.array(CORRECT), CORRECT):
            assert certified_accuracy(radius, correct, at=0.3) == 0.5
            assert accuracy(correct) == pytest.approx(5 / 6)
        assert acr(radius, max_radius=0.4) == pytest.approx(0.5)
    assert acr([0, 1], max_radius=2.0) == 0.25
    assert acr(torch.tensor([0.0, 0.5], dtype=torch.bfloat16), max_radius=1.0) == 0.25


def test_mean_of_many_float32_radii_keeps_its_digits() -> None:
    radius = np.full(2_000_000, 0.1, dtype=np.float32)
    radius[::2] = 0.0
    assert acr(radius, max_radius=0.1) == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize("count", [3, 359, 500, 1000])
@pytest.mark.parametrize("max_radius", [0.05, 0.4, 8.8 / 255])
def test_all_certified_to_max_is_an_acr_of_one(max_radius: float, count: int) -> None:
    everyone = acr(np.full(count, max_radius), max_radius=max_radius)
    assert everyone <= 1.0
    assert art(1.0, everyone) == pytest.approx(1.0, rel=1e-15)


def test_curve_by_hand() -> None:
    curve = certified_accuracy_curve(RADIUS, CORRECT, max_radius=0.5)
    assert curve.radius.tolist() == [0.0, 0.1, 0.3, 0.4, 0.5]
    assert curve.accuracy.tolist() == pytest.approx([5 / 6, 4 / 6, 3 / 6, 2 / 6, 0])
    assert curve.area == pytest.approx(0.1 * 4 / 6 + 0.2 * 3 / 6 + 0.1 * 2 / 6)


def test_area_under_the_curve_is_acr() -> None:
    radius, correct = made_up()
    curve = certified_accuracy_curve(radius, correct, max_radius=0.1)
    assert curve.area / 0.1 == pytest.approx(acr(radius, max_radius=0.1), abs=1e-6)
    assert curve.accuracy[0] == accuracy(correct)


@given(some_radii)
def test_area_is_acr_for_any_radii(radius: np.ndarray) -> None:
    curve = certified_accuracy_curve(radius, np.ones(len(radius), dtype=bool), max_radius=0.25)
    assert curve.area / 0.25 == pytest.approx(acr(radius, max_radius=0.25), abs=1e-6)
    assert (np.diff(curve.accuracy) <= 0).all()


@pytest.mark.parametrize("points", [None, 2, 17])
def test_curve_equals_certified_accuracy_at_every_knot(points: int | None) -> None:
    radius, correct = made_up(200)
    curve = certified_accuracy_curve(radius, correct, max_radius=0.1, points=points)
    expected = [certified_accuracy(radius, correct, at=float(at)) for at in curve.radius]
    assert curve.accuracy.tolist() == expected


def test_a_grid_reads_the_same_curve_and_its_area_is_a_lower_bound() -> None:
    radius, correct = made_up()
    whole = acr(radius, max_radius=0.1)
    curve = certified_accuracy_curve(radius, correct, max_radius=0.1, points=101)
    assert len(curve.radius) == 101
    assert 0 <= whole - curve.area / 0.1 < 0.01


@given(fractions, fractions, fractions)
def test_art_is_homogeneous(acc: float, average: float, factor: float) -> None:
    assert art(acc, factor * average) == pytest.approx(math.sqrt(factor) * art(acc, average))


def test_radius_distribution_counts_both_ends_on_their_own() -> None:
    found = radius_distribution(RADIUS, max_radius=0.4, bins=2)
    assert (found.at_zero, found.at_max) == pytest.approx((2 / 6, 2 / 6))
    assert found.edges.tolist() == pytest.approx([0, 0.2, 0.4])
    assert found.share.tolist() == pytest.approx([1 / 6, 1 / 6])


@given(some_radii, st.integers(1, 9))
def test_radius_distribution_holds_every_sample_once(radius: np.ndarray, bins: int) -> None:
    found = radius_distribution(radius, max_radius=0.25, bins=bins)
    assert found.share.sum() + found.at_zero + found.at_max == pytest.approx(1)
    assert len(found.edges) == len(found.share) + 1 == bins + 1


def test_pareto_front_by_hand() -> None:
    points = [(0.7, 0.2), (0.5, 0.5), (0.6, 0.3), (0.4, 0.4), (0.7, 0.1), (0.5, 0.5)]
    assert pareto_front(points) == [1, 5, 2, 0]
    assert pareto_front([]) == []
    assert pareto_front([(0.5, 0.1), (0.5, 0.2)]) == [1]


@given(st.lists(st.tuples(fractions, fractions), max_size=20))
def test_every_point_is_on_the_front_or_beaten_by_it(points: list[tuple[float, float]]) -> None:
    front = pareto_front(points)
    assert [points[i][0] for i in front] == sorted(points[i][0] for i in front)
    for i, (first, second) in enumerate(points):
        above = any(points[j][0] >= first and points[j][1] >= second for j in front)
        assert above
        strictly = any(points[j][0] > first and points[j][1] > second for j in front)
        assert not (strictly and i in front)


def test_spread_by_hand() -> None:
    found = spread([50.0, 51.0, 54.0])
    assert (found.n, found.low, found.high) == (3, 50.0, 54.0)
    assert found.mean == pytest.approx(155 / 3)
    assert found.std == pytest.approx(np.std([50.0, 51.0, 54.0], ddof=1))


def test_a_single_run_has_no_spread() -> None:
    found = spread([0.5])
    assert (found.n, found.mean, found.std, found.low, found.high) == (1, 0.5, None, 0.5, 0.5)


def test_a_certified_radius_of_a_wrong_sample_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"must be 0 where .* got 0\.2 at sample 1"):
        certified_accuracy([0.1, 0.2], [True, False], at=0.1)


@pytest.mark.parametrize("bad", [-0.1, 0.41, float("nan"), float("inf")])
def test_radii_outside_the_range_are_refused(bad: float) -> None:
    with pytest.raises(InvalidInput, match=r"`radius` must be in \[0, 0\.4\]; got .* at sample 2"):
        acr([0.1, 0.2, bad], max_radius=0.4)


def test_bad_shapes_and_types_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"`radius` must hold .* got float64 of shape \(0,\)"):
        acr([], max_radius=0.4)
    with pytest.raises(InvalidInput, match=r"`radius` must hold .* of shape \(1, 1\)"):
        acr([[0.1]], max_radius=0.4)
    with pytest.raises(InvalidInput, match=r"`correct` must hold one boolean .* got int64"):
        accuracy([1, 0])
    with pytest.raises(InvalidInput, match="of one length; got 2 and 1"):
        certified_accuracy([0.1, 0.1], [True], at=0.1)


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(InvalidInput, match="`max_radius` must be positive and finite; got 0"):
        acr([0.1], max_radius=0.0)
    for figure in (acr, radius_distribution):
        with pytest.raises(InvalidInput, match="`max_radius` must be positive and finite; got inf"):
            figure([0.1], max_radius=float("inf"))
    with pytest.raises(InvalidInput, match=r"`acr` must be a fraction .* got 41\.8"):
        art(0.62, 41.8)
    for at in (-0.1, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="`at` must be >= 0 and finite"):
            certified_accuracy([0.1], [True], at=at)
    with pytest.raises(InvalidInput, match="`points` must be >= 2; got 1"):
        certified_accuracy_curve([0.1], [True], max_radius=0.1, points=1)
    with pytest.raises(InvalidInput, match="`bins` must be >= 1; got 0"):
        radius_distribution([0.1], max_radius=0.1, bins=0)
    with pytest.raises(InvalidInput, match="`points` must be finite"):
        pareto_front([(0.1, float("nan"))])
    with pytest.raises(InvalidInput, match="one or more finite numbers"):
        spread([])
    with pytest.raises(InvalidInput, match="one or more finite numbers"):
        spread([0.1, float("nan")])
