"""Softmax and attention: ends at corners, safe against overflow, in balls and in float32."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from flint import arb
from tests import ball
from tests.rule_cases import Apply, Case, sampled

import acert
from acert.bounds import Interval, propagate
from acert.bounds.bound_pass import BoundPass
from acert.bounds.rounding import FLOAT32, REAL


def exactly(rows):
    """The softmax of each row of float64 numbers, in balls."""
    found = []
    for row in ball.array(rows):
        # A shift keeps exponentials of balls in range and changes nothing.
        powers = [(x - max(row, key=lambda each: float(each.mid()))).exp() for x in row]
        total = sum(powers, arb(0))
        found += [power / total for power in powers]
    return ball._array(found, rows.shape)


def boxes(count, *, scale, r, rows=4):
    center = scale * torch.randn(rows, count, dtype=torch.float64)
    radius = r * torch.rand(rows, count, dtype=torch.float64)
    return (center - radius).float().double(), (center + radius).float().double()


def bounds_of(lower, upper, rounding=None):
    return F.softmax(Interval(lower, upper).within(BoundPass(rounding)), -1)


def test_both_ends_are_reached_at_corners():
    lower, upper = boxes(4, scale=1.0, r=1.0)
    bounds = bounds_of(lower, upper)
    shares = [torch.tensor(choice) for choice in itertools.product((0.0, 1.0), repeat=4)]
    values = torch.stack([(lower + share * (upper - lower)).softmax(-1) for share in shares])
    torch.testing.assert_close(bounds.lower, values.amin(0))
    torch.testing.assert_close(bounds.upper, values.amax(0))


@pytest.mark.parametrize("r", [0.0, 1e-7, 1.0, 50.0, 900.0])
@pytest.mark.parametrize("scale", [1e-3, 3.0, 100.0, 1000.0])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_exact_values_are_inside(count, scale, r):
    lower, upper = boxes(count, scale=scale, r=r)
    bounds = bounds_of(lower, upper, REAL)
    assert bool((bounds.lower >= 0).all())
    assert bool((bounds.upper <= 1 + 1e-9).all())
    for points in sampled(lower, upper, 6):
        values = exactly(points)
        assert ball.inside(values, bounds.lower, bounds.upper, torch.zeros_like(lower))
    # The corner that each end stands for, where rounding is not hidden by the width.
    for element in range(count):
        for ends in ((lower, upper), (upper, lower)):
            points = ends[1].clone()
            points[:, element] = ends[0][:, element]
            values = exactly(points)
            assert ball.inside(values, bounds.lower, bounds.upper, torch.zeros_like(lower))


def with_a_running_maximum(x):
    """One pass over the row, as kernels that never hold it whole."""
    top, total = x[:, 0], torch.ones_like(x[:, 0])
    for value in x.unbind(1)[1:]:
        new = torch.maximum(top, value)
        total, top = total * (top - new).exp() + (value - new).exp(), new
    return (x - top.unsqueeze(1)).exp() / total.unsqueeze(1)


def by_powers_of_two(x):
    scaled = x * (1 / math.log(2))
    powers = torch.exp2(scaled - scaled.amax(1, keepdim=True))
    return powers * (1 / powers.sum(1, keepdim=True))


def by_logarithm(x):
    return (x - x.logsumexp(1, keepdim=True)).exp()


def directly(x):
    return F.softmax(x, 1)


@pytest.mark.parametrize(
    "evaluated", [directly, with_a_running_maximum, by_powers_of_two, by_logarithm]
)
@pytest.mark.parametrize("r", [0.0, 1e-7, 1.0])
@pytest.mark.parametrize("scale", [1e-3, 3.0, 100.0, 5000.0])
@pytest.mark.parametrize("count", [1, 2, 9, 300])
def test_every_float32_evaluation_is_inside(count, scale, r, evaluated):
    lower, upper = boxes(count, scale=scale, r=r)
    bounds = bounds_of(lower, upper, FLOAT32)
    assert bool(bounds.upper.isfinite().all())
    for points in sampled(lower.float(), upper.float(), 6):
        value = evaluated(points).double()
        assert bool((value >= bounds.lower).all())
        assert bool((value <= bounds.upper).all())


def test_nothing_is_proven_where_float32_cannot_tell_logits_apart():
    lower = torch.tensor([[1e6, 1e6 + 0.01]]).double()
    assert bounds_of(lower, lower, FLOAT32).upper.isnan().all()
    assert bounds_of(lower, lower, REAL).upper.isfinite().all()


def test_bounds_and_gradients_of_wide_boxes_are_numbers():
    lower = torch.tensor([[-1e4, 0.0, 5.0], [0.0, 1e4, -1e4]], requires_grad=True)
    upper = torch.tensor([[1e4, 0.0, 6.0], [1e4, 2e4, 3e4]], requires_grad=True)
    bounds = bounds_of(lower, upper)
    assert bool((bounds.lower <= bounds.upper).all())
    for gradient in torch.autograd.grad((bounds.upper - bounds.lower).sum(), (lower, upper)):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("F.softmax(x)", "`dim` must be given; got None"),
        ("x.softmax(1, torch.float16)", "it must not lose precision; got torch.float16"),
        (
            "F.scaled_dot_product_attention(x, x, x, is_causal=True)",
            "`is_causal` must be left at its default",
        ),
        (
            "F.scaled_dot_product_attention(x, x, x, torch.ones(3, 3))",
            "`attn_mask` must be left at its default",
        ),
    ],
)
def test_what_has_no_bounds_is_refused(expression, message):
    model = Case(expression, (3, 3)).build()
    with pytest.raises(acert.UnsupportedOperation, match=message):
        acert.interval_bounds(model, torch.zeros(2, 3, 3), torch.ones(2, 3, 3))


@pytest.mark.parametrize("scale", [None, 2.5])
def test_attention_encloses_float32_kernels_and_its_written_form(scale):
    def fused(x):
        return F.scaled_dot_product_attention(x, 2 * x, x - 1, scale=scale)

    def written(x):
        weights = torch.matmul(x, (2 * x).mT) * (scale or 1 / math.sqrt(8))
        return torch.matmul(weights.softmax(-1), x - 1)

    x = torch.randn(2, 3, 70, 8)
    exact = Interval(x.double(), x.double()).within(BoundPass(FLOAT32))
    bounds = propagate(Apply(fused), exact)
    for computed in (fused(x), written(x), fused(x.double())):
        assert bool(((computed >= bounds.lower) & (computed <= bounds.upper)).all())
    assert float((bounds.upper - bounds.lower).max()) < 0.02


def test_attention_proves_nothing_where_scaled_queries_overflow():
    query, key = torch.full((1, 2, 2), 1e19).double(), torch.full((1, 2, 2), 1e-19).double()
    key = Interval(key, key).within(BoundPass(FLOAT32))
    for scale, proven in ((1.0, True), (1e20, False)):
        assert bool(attention_of(query, key, scale).upper.isfinite().all()) == proven


def test_attention_proves_nothing_where_the_values_overflow_before_they_are_averaged():
    query, value = torch.zeros(1, 1, 8, 4), torch.full((1, 1, 8, 4), 5e37)
    assert F.scaled_dot_product_attention(query, query, value).isinf().any()
    for size, rounding, proven in (
        (5e37, FLOAT32, False),
        (1e37, FLOAT32, True),
        (5e37, REAL, True),
    ):
        values = torch.full((1, 1, 8, 4), size).double()
        values = Interval(values, values).within(BoundPass(rounding))
        bounds = F.scaled_dot_product_attention(query, query, values)
        assert bool(bounds.upper.isfinite().all()) == proven


def attention_of(query, key, scale):
    return F.scaled_dot_product_attention(query, key, key, scale=scale)
