"""Lengths and what is divided by them: reached at known points, and exact values lie inside."""

import math

import pytest
import torch
import torch.nn.functional as F
from flint import arb
from tests import ball
from tests.rule_cases import sampled

from acert.bounds import Interval
from acert.bounds.bound_pass import BoundPass
from acert.bounds.rounding import FLOAT32, REAL

FUNCTIONS = {
    "normalize": lambda x: F.normalize(x, dim=1),
    "normalize, eps 2": lambda x: F.normalize(x, dim=1, eps=2.0),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[1:], eps=0.01),
}
by_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=[*FUNCTIONS])


def boxes(count, *, offset=0.0, scale=1.0, share=1.0, rows=6):
    center = offset + scale * torch.randn(rows, count, dtype=torch.float64)
    radius = share * scale * torch.rand(rows, count, dtype=torch.float64)
    radius[:, 0] = 0
    return (center - radius).float().double(), (center + radius).float().double()


def bounds_of(function, lower, upper, rounding=None):
    return function(Interval(lower, upper).within(BoundPass(rounding)))


@by_function
@pytest.mark.parametrize("offset", [0.0, 1.0, -3.0])
def test_each_end_is_the_value_at_a_point_of_the_box(function, offset):
    """One element at its end, the others as near to 0 as they get or as far from it."""
    lower, upper = boxes(5, offset=offset, rows=20)
    bounds = bounds_of(function, lower, upper)
    near = torch.zeros_like(lower).clamp(lower, upper)
    far = torch.where(upper > -lower, upper, lower)
    for element in range(5):
        ends = []
        for end in (lower, upper):
            points = [others.clone() for others in (near, far)]
            for point in points:
                point[:, element] = end[:, element]
            ends.append(torch.stack([function(point)[:, element] for point in points]))
        torch.testing.assert_close(bounds.lower[:, element], ends[0].amin(0))
        torch.testing.assert_close(bounds.upper[:, element], ends[1].amax(0))


def test_lengths_are_those_of_the_nearest_and_the_farthest_point():
    lower, upper = boxes(5, rows=20)
    near = torch.zeros_like(lower).clamp(lower, upper)
    far = torch.where(upper > -lower, upper, lower)
    for order in (1, 2, math.inf):
        bounds = torch.linalg.vector_norm(Interval(lower, upper), order, 1)
        torch.testing.assert_close(bounds.lower, torch.linalg.vector_norm(near, order, 1))
        torch.testing.assert_close(bounds.upper, torch.linalg.vector_norm(far, order, 1))


def exactly(name, rows):
    """The function on rows of float64 numbers, in balls."""
    found = []
    for row in ball.array(rows):
        squares = sum((x * x for x in row), arb(0))
        length = squares.sqrt()
        if name == "rms_norm":
            length = (squares / len(row) + arb(0.01)).sqrt()
        elif name == "normalize, eps 2":
            length = length.max(arb(2.0))
        else:
            length = length.max(arb(1e-12))
        found += [x / length for x in row]
    return ball._array(found, rows.shape)


SCALES = [(0.0, 1.0), (300.0, 1.0), (-1e6, 1e3), (1e-4, 1e-4), (1e-13, 1e-13), (0.0, 1e15)]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("offset", "scale"), SCALES)
@pytest.mark.parametrize("count", [1, 2, 17])
def test_exact_values_are_inside(name, count, offset, scale):
    for share in (0.0, 1e-9, 0.1, 3.0):
        lower, upper = boxes(count, offset=offset, scale=scale, share=share)
        bounds = bounds_of(FUNCTIONS[name], lower, upper, REAL)
        assert bounds.lower.isfinite().all()
        for points in sampled(lower, upper, 8):
            values = exactly(name, points)
            assert ball.inside(values, bounds.lower, bounds.upper, torch.zeros_like(lower))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("offset", "scale"), [*SCALES[:4], (0.0, 1e-15), (0.0, 1e-25)])
def test_every_float32_evaluation_is_inside(name, offset, scale):
    """One by one from either end, by pairs, with flushed squares; and PyTorch's own."""
    count = 33
    for share in (0.0, 0.1, 3.0):
        lower, upper = boxes(count, offset=offset, scale=scale, share=share)
        bounds = bounds_of(FUNCTIONS[name], lower, upper, FLOAT32)
        known = bounds.lower.isfinite() & bounds.upper.isfinite()
        assert known.all() or scale < 1e-13
        for points in sampled(lower, upper, 8):
            single = points.float()
            squares = single.square()
            squares = torch.where(squares < torch.finfo(torch.float32).tiny, 0.0, squares)
            sums = [squares.sum(1), squares.flip(1).sum(1)]
            sums += [order.cumsum(1)[:, -1] for order in (squares, squares.flip(1))]
            for total in sums:
                if name == "rms_norm":
                    length = (total[:, None] / count + 0.01).sqrt()
                else:
                    length = total[:, None].sqrt().clamp(min=2.0 if "2" in name else 1e-12)
                for value in (single / length, single * (1 / length)):
                    value = value.double()
                    assert bool(((bounds.lower <= value) & (value <= bounds.upper))[known].all())
            value = FUNCTIONS[name](single).double()
            assert bool(((bounds.lower <= value) & (value <= bounds.upper))[known].all())


@pytest.mark.parametrize("function", [*FUNCTIONS.values(), lambda x: x.norm(dim=1)])
def test_nothing_is_proven_where_squares_overflow(function):
    lower = torch.full((1, 3), 1e20, dtype=torch.float64)
    for upper in (lower, 2 * lower):
        assert bounds_of(function, lower, upper, FLOAT32).upper.isnan().all()
        assert bounds_of(function, lower, upper, REAL).upper.isfinite().all()


@by_function
def test_gradients_are_numbers_at_0(function):
    center = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    radius = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 2.0]], dtype=torch.float64)
    bounds = function(Interval.ball(center, radius))
    (bounds.upper - bounds.lower).sum().backward()
    assert center.grad.isfinite().all()


@pytest.mark.parametrize("rounding", [REAL, FLOAT32], ids=["real", "float32"])
@pytest.mark.parametrize("p", [1, 2])
def test_pools_by_norm_hold_at_all_scales(p, rounding):
    """Next to 0 a root makes much of what its argument is off by; squares may be flushed."""
    torch.manual_seed(0)
    dtype = torch.float64 if rounding is REAL else torch.float32
    values = torch.randn(200, 1, 8) * torch.logspace(-25, 18, 200).reshape(-1, 1, 1)
    values[::7] = 0
    width = values.abs() * torch.rand(200, 1, 1) * torch.randint(2, (200, 1, 1))
    lower, upper = values - width, values + width
    box = Interval(lower.double(), upper.double()).within(BoundPass(rounding))
    bounds = F.lp_pool1d(box, p, 4, 2)
    for _ in range(50):
        points = torch.clamp(lower + torch.rand(lower.shape) * (upper - lower), lower, upper)
        found = F.lp_pool1d(points.to(dtype), p, 4, 2).double()
        outside = (found < bounds.lower) | (found > bounds.upper)
        assert not bool(outside.any())
    assert bool((bounds.lower.isfinite() & bounds.upper.isfinite())[:190].all())


def by_both_formulas(x, c, eps):
    """Each divided by its length first, or their product by both."""
    by_length = [part / part.norm(dim=-1, keepdim=True).clamp(min=eps) for part in (x, c)]
    yield (by_length[0] * by_length[1]).sum(-1)
    yield (by_length[0] * by_length[1]).flip(-1).cumsum(-1)[..., -1]
    yield (x * c).sum(-1) / x.norm(dim=-1).clamp(min=eps) / c.norm(dim=-1).clamp(min=eps)
    yield F.cosine_similarity(x, c, -1, eps)


@pytest.mark.parametrize("rounding", [REAL, FLOAT32], ids=["real", "float32"])
@pytest.mark.parametrize("count", [3, 300])
def test_similarities_hold_at_all_scales(count, rounding):
    torch.manual_seed(0)
    dtype = torch.float64 if rounding is REAL else torch.float32
    values = torch.randn(300, count) * torch.logspace(-12, 16, 300).reshape(-1, 1)
    width = values.abs() * torch.rand(300, 1) * torch.logspace(-9, 0, 10).repeat(30).reshape(-1, 1)
    lower, upper = values - width, values + width
    box = Interval(lower.double(), upper.double()).within(BoundPass(rounding))
    for c in (torch.randn(count), values[7].clone(), 1e-10 * torch.randn(300, count)):
        bounds = F.cosine_similarity(box, c, -1)
        for step in range(20):
            share = torch.rand(lower.shape) if step % 2 else torch.rand(lower.shape).round()
            points = torch.clamp(lower + share * (upper - lower), lower, upper)
            for found in by_both_formulas(points.to(dtype), c.to(dtype), 1e-8):
                assert bool((found.double() >= bounds.lower).all())
                assert bool((found.double() <= bounds.upper).all())
        assert bool((bounds.upper <= 1.01).all())
