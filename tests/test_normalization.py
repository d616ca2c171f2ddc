"""Group, layer and instance norm: exact values, and all ways of float32, lie inside the bounds."""

import math

import pytest
import torch
import torch.nn.functional as F
from flint import arb
from scipy.optimize import minimize_scalar
from tests import ball
from tests.rule_cases import sampled
from torch import nn

import acert
from acert.bounds import Interval, propagate
from acert.bounds.bound_pass import BoundPass
from acert.bounds.rounding import FLOAT32, REAL
from acert.bounds.rules import normalization
from acert.bounds.rules.normalization import least_squares


def exactly(rows, eps):
    """Layer norm of each row of float64 numbers, in balls."""
    found = []
    for row in ball.array(rows):
        mean = sum(row, arb(0)) / len(row)
        variance = sum(((x - mean) ** 2 for x in row), arb(0)) / len(row)
        found += [(x - mean) / (variance + arb(eps)).sqrt() for x in row]
    return ball._array(found, rows.shape)


def boxes(count, *, offset, scale, share, rows=6):
    center = offset + scale * torch.randn(rows, count, dtype=torch.float64)
    radius = share * scale * torch.rand(rows, count, dtype=torch.float64)
    radius[:, 0] = 0
    return (center - radius).float().double(), (center + radius).float().double()


def bounds_of(lower, upper, rounding, **options):
    box = Interval(lower, upper).within(BoundPass(rounding))
    return F.layer_norm(box, lower.shape[1:], **options)


@pytest.mark.parametrize("eps", [1e-5, 1e-12, 1.0])
@pytest.mark.parametrize(("offset", "scale"), [(0.0, 1.0), (300.0, 1.0), (-1e6, 1e3), (1e-4, 1e-4)])
@pytest.mark.parametrize("count", [2, 3, 17])
def test_exact_values_are_inside(count, offset, scale, eps):
    for share in (0.0, 1e-6, 0.1, 3.0):
        lower, upper = boxes(count, offset=offset, scale=scale, share=share)
        bounds = bounds_of(lower, upper, REAL, eps=eps)
        known = bounds.lower.isfinite() & bounds.upper.isfinite()
        assert known.all() or scale / offset < 0.1
        for points in sampled(lower, upper, 4):
            values = exactly(points, eps)[known.numpy()]
            low, high = bounds.lower[known], bounds.upper[known]
            assert ball.inside(values, low, high, torch.zeros_like(low))


# -- ways to compute it in float32 --------------------------------------------------------


def running(x):
    """Welford's updates, one element after the other."""
    mean, squares = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
    for index, value in enumerate(x.unbind(1), 1):
        gap = value - mean
        mean = mean + gap * (1 / torch.tensor(float(index)))
        squares = squares + gap * (value - mean)
    return mean, squares / x.shape[1]


def one_pass(x):
    total, squares = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
    for value in x.unbind(1):
        total, squares = total + value, squares + value * value
    mean = total / x.shape[1]
    return mean, squares / x.shape[1] - mean * mean


def two_passes(x):
    total, squares = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
    for value in x.unbind(1):
        total = total + value
    mean = total / x.shape[1]
    for value in x.unbind(1):
        squares = squares + (value - mean) ** 2
    return mean, squares / x.shape[1]


def by_blocks(x):
    """Means and squares of parts, joined by Chan's formula."""
    parts = [(part, *two_passes(part)) for part in x.split(max(1, x.shape[1] // 3), 1)]
    mean, squares, seen = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), 0
    for part, own_mean, own_variance in parts:
        count = part.shape[1]
        gap = own_mean - mean
        mean = mean + gap * (count / (seen + count))
        squares = squares + own_variance * count + gap * gap * (seen * count / (seen + count))
        seen += count
    return mean, squares / seen


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("moments", [running, one_pass, two_passes, by_blocks])
@pytest.mark.parametrize(("offset", "scale"), [(0.0, 1.0), (30.0, 1.0), (-1e3, 50.0)])
@pytest.mark.parametrize("count", [2, 8, 1000])
def test_every_float32_evaluation_is_inside(count, offset, scale, moments, fused):
    weight, bias = torch.randn(count), torch.randn(count)
    proven = 0
    for share in (0.0, 0.01, 0.2):
        lower, upper = boxes(count, offset=offset, scale=scale, share=share)
        bounds = bounds_of(lower, upper, FLOAT32, weight=weight, bias=bias)
        known = bounds.lower.isfinite() & bounds.upper.isfinite()
        proven += int(known.sum())
        for points in sampled(lower.float(), upper.float(), 4):
            mean, variance = (part.unsqueeze(1) for part in moments(points))
            inverse = 1 / (variance + 1e-5).sqrt()
            if fused:
                output = points * (inverse * weight) + (bias - mean * (inverse * weight))
            else:
                output = (points - mean) * inverse * weight + bias
            for computed in (output, F.layer_norm(points, (count,), weight, bias)):
                outside = (computed < bounds.lower) | ~(computed <= bounds.upper)
                assert not (outside & known).any()
    assert proven > 0 or scale / abs(offset) < 0.1


def test_group_norm_in_channels_last_is_inside():
    """PyTorch has kernels of its own for that layout."""
    layer = nn.GroupNorm(4, 16)
    images = 5 + torch.rand(4, 16, 9, 9)
    exact = images.double()
    bounds = propagate(layer, Interval(exact, exact).within(BoundPass(FLOAT32)))
    with torch.no_grad():
        for layout in (torch.contiguous_format, torch.channels_last):
            computed = layer(images.contiguous(memory_format=layout)).double()
            assert bool(((bounds.lower <= computed) & (computed <= bounds.upper)).all())


# -- tightness, and where nothing can be said ---------------------------------------------


def test_two_elements_are_bounded_exactly():
    """At d / sqrt(d^2 + eps), d being half the difference."""
    lower, upper = torch.tensor([[0.0, 1.0]]).double(), torch.tensor([[0.5, 1.5]]).double()
    bounds = F.layer_norm(Interval(lower, upper), (2,), eps=0.1)
    least, most = (half / math.sqrt(half**2 + 0.1) for half in (0.25, 0.75))
    assert bounds.lower[0].tolist() == pytest.approx([-most, least])
    assert bounds.upper[0].tolist() == pytest.approx([-least, most])


def test_the_least_variance_is_found():
    """Against SciPy's minimum over the one point that the sum of distances depends on."""
    for share in (0.0, 0.1, 1.0, 3.0):
        lower, upper = boxes(20, offset=3.0, scale=1.0, share=share)
        center, radius = (lower + upper) / 2, (upper - lower) / 2
        found = least_squares(center, radius, safe=False).flatten()
        proven = least_squares(center, radius, safe=True).flatten()
        for low, high, squares, safe in zip(lower, upper, found, proven, strict=True):

            def distances(point, low=low, high=high):
                return float((point - torch.clamp(torch.tensor(point), low, high)).square().sum())

            wanted = minimize_scalar(distances, bounds=(-5, 11), method="bounded").fun
            assert squares.item() == pytest.approx(wanted, rel=1e-6, abs=1e-9)
            assert squares * (1 - 1e-9) - 1e-9 <= safe <= squares


def test_the_least_variance_is_sound_before_its_point_is_found(monkeypatch):
    monkeypatch.setattr(normalization, "_STEPS", 0)
    for share in (0.1, 1.0):
        lower, upper = boxes(5, offset=0.0, scale=1.0, share=share)
        upper[:, 1] += 20
        least = least_squares((lower + upper) / 2, (upper - lower) / 2, safe=False)
        for points in sampled(lower, upper, 300):
            assert bool((points.var(1, correction=0, keepdim=True) * 5 >= least - 1e-12).all())


def test_no_bound_exceeds_the_root_of_the_others():
    lower = -torch.rand(3, 10, dtype=torch.float64)
    bounds = F.layer_norm(Interval(lower, lower + 100), (10,))
    assert bounds.upper.max() <= 3 + 1e-12
    assert bounds.lower.min() >= -3 - 1e-12


def test_one_element_is_its_bias():
    box = Interval(torch.zeros(2, 1), torch.ones(2, 1))
    bounds = F.layer_norm(box, (1,), bias=torch.tensor([0.7]))
    assert bounds.lower.tolist() == bounds.upper.tolist() == torch.full((2, 1), 0.7).tolist()


def test_nothing_is_proven_where_float32_may_lose_the_variance():
    """The mean of squares less the squared mean is off by more than `eps` here."""
    values = torch.full((1, 64), 1000.1) + 1e-3 * torch.randn(1, 64)
    _, variance = one_pass(values)
    assert (variance.double() - values.double().var(correction=0)).abs() > 1e-2
    exact = values.double()
    assert bounds_of(exact, exact, FLOAT32).upper.isnan().all()
    assert bounds_of(exact, exact, REAL).upper.isfinite().all()


def test_nothing_is_proven_where_squares_overflow():
    values = torch.tensor([[1e20, -1e20, 3e19]])
    exact = values.double()
    assert bounds_of(exact, exact, FLOAT32).upper.isnan().all()
    assert bounds_of(exact, exact, REAL).upper.isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: F.layer_norm(x, (3,)),
            r"`normalized_shape` must be the last axes .* \(3,\) for",
        ),
        (lambda x: F.group_norm(x, 3), "`num_groups` must divide the 4 channels; got 3"),
        (
            lambda x: F.instance_norm(x, torch.zeros(4), torch.ones(4)),
            "it is another function in evaluation, by its running statistics",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(acert.UnsupportedOperation, match=message):
        call(Interval(torch.zeros(2, 4, 2), torch.ones(2, 4, 2)))


def test_gradients_are_numbers_where_a_group_is_constant():
    """At radius 0 and without spread, all roots are of 0."""
    lower = torch.full((1, 6), 0.5, requires_grad=True)
    bounds = F.layer_norm(Interval(lower, lower + 0), (6,))
    (gradient,) = torch.autograd.grad((bounds.upper - bounds.lower).sum(), lower)
    assert bool(gradient.isfinite().all())
