"""Order statistics, running sums and variances: what the catalogue of rules cannot show."""

import itertools
import math

import pytest
import torch
from tests.rule_cases import Apply
from torch import nn

import acert
from acert.bounds import Interval, propagate
from acert.bounds.bound_pass import BoundPass
from acert.bounds.rounding import FLOAT32, REAL
from acert.bounds.rules.normalization import least_squares
from acert.bounds.rules.sums import _most_squares

STATISTICS = {
    "sort": lambda x: torch.sort(x, 1)[0],
    "descending": lambda x: x.sort(1, descending=True).values,
    "topk": lambda x: x.topk(2, 1)[0],
    "smallest": lambda x: x.topk(3, 1, largest=False)[0],
    "kthvalue": lambda x: x.kthvalue(2, 1)[0],
    "median": lambda x: x.median(1)[0],
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_with_ties_are_exact(name):
    """Whole numbers: the least and the greatest of all points are the ends."""
    function = STATISTICS[name]
    torch.manual_seed(0)
    for _ in range(20):
        lower = torch.randint(-2, 2, (1, 4)).double()
        upper = lower + torch.randint(0, 3, (1, 4))
        sides = [range(int(a), int(b) + 1) for a, b in zip(lower[0], upper[0], strict=True)]
        points = torch.tensor([*itertools.product(*sides)], dtype=torch.float64)
        values, bounds = function(points), function(Interval(lower, upper))
        assert torch.equal(bounds.lower[0], values.amin(0))
        assert torch.equal(bounds.upper[0], values.amax(0))


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("ends", [(math.nan, math.nan), (math.nan, 1.0), (0.0, math.nan)])
def test_statistics_beside_an_unknown_element_are_unknown(name, ends):
    """It may be the least of all, whereas NaN is sorted behind them."""
    lower = torch.tensor([[0.0, ends[0], 5.0, 7.0], [0.0, 1.0, 5.0, 7.0]])
    upper = torch.tensor([[1.0, ends[1], 6.0, 8.0], [1.0, 2.0, 6.0, 8.0]])
    bounds = STATISTICS[name](Interval(lower, upper))
    assert bool(bounds.lower[0].isnan().all() & bounds.upper[0].isnan().all())
    assert bool((bounds.lower[1] <= bounds.upper[1]).all())
    whole = torch.median(Interval(lower, upper))
    assert bool(whole.lower.isnan() & whole.upper.isnan())


def test_unbounded_elements_are_sorted():
    lower, upper = torch.tensor([[-math.inf, 0.0]]), torch.tensor([[math.inf, 1.0]])
    bounds = Interval(lower, upper).sort().values
    assert bounds.lower.tolist() == [[-math.inf, 0.0]]
    assert bounds.upper.tolist() == [[1.0, math.inf]]


@pytest.mark.parametrize("name", ["argmax", "argmin", "argsort"])
def test_indices_that_nobody_uses_do_no_harm(name):
    def unused(x):
        getattr(torch, name)(x, 1)
        getattr(x, name)()
        return x * 2

    bounds = acert.interval_bounds(Apply(unused), torch.zeros(1, 3), torch.ones(1, 3))
    assert bounds.upper.tolist() == [[2.0] * 3]
    for use in (lambda i, x: x * i, lambda i, x: x[:, i], lambda i, x: x.gather(1, i),
                lambda i, x: i, lambda i, x: x * (i == 0), lambda i, x: x if i else -x,
                lambda i, x: torch.where(i > 0, x, -x), lambda i, x: x * i.float()):  # fmt: skip
        model = Apply(lambda x, use=use: use(getattr(x, name)(1), x))
        with pytest.raises(acert.UnsupportedOperation):
            acert.interval_bounds(model, torch.zeros(1, 3), torch.ones(1, 3))


def test_overlapping_windows_are_not_overwritten():
    def function(x, size, step):
        return (x * 1).unfold(1, size, step).mul_(2)

    box = torch.zeros(1, 6), torch.ones(1, 6)
    found = acert.interval_bounds(Apply(lambda x: function(x, 2, 3)), *box)
    assert found.upper.tolist() == [[[2.0, 2.0], [2.0, 2.0]]]
    with pytest.raises(acert.UnsupportedOperation, match="whose elements share memory"):
        acert.interval_bounds(Apply(lambda x: function(x, 3, 2)), *box)
    # Slices and permuted axes share none.
    for view in (lambda x: x[:, ::2], lambda x: x.view(1, 2, 3).transpose(1, 2)):
        found = acert.interval_bounds(Apply(lambda x, view=view: view(x * 1).mul_(2)), *box)
        assert bool((found.upper == 2).all())


def test_a_diagonal_that_is_overwritten_leaves_its_matrix_unusable():
    def function(x):
        y = x * 1
        y.diagonal(dim1=1, dim2=2).mul_(2)
        return y

    with pytest.raises(acert.UnsupportedOperation, match="overwritten in place"):
        acert.interval_bounds(Apply(function), torch.zeros(1, 2, 2), torch.ones(1, 2, 2))


# -- running sums ---------------------------------------------------------------------------


def contains(bounds, values):
    return bool(((bounds.lower <= values.double()) & (values.double() <= bounds.upper)).all())


@pytest.mark.parametrize("scale", [1.0, 1e8])
def test_running_sums_hold_by_any_association(scale):
    torch.manual_seed(0)
    values = torch.randn(8, 500) * torch.logspace(0, 4, 500) * scale
    values[:, 250:] = -values[:, :250]  # what is left is rounding
    exact = Interval(values.double(), values.double())
    bounds = exact.within(BoundPass(FLOAT32)).cumsum(1)
    one_by_one = torch.zeros(8)
    for column in range(500):
        one_by_one = one_by_one + values[:, column]
        blocks = sum(part.sum(1) for part in values[:, : column + 1].split(17, 1))
        back = values[:, : column + 1].flip(1).cumsum(1)[:, -1]
        for found in (one_by_one, blocks, back):
            assert bool((bounds.lower[:, column] <= found.double()).all())
            assert bool((found.double() <= bounds.upper[:, column]).all())
    assert contains(exact.within(BoundPass(REAL)).cumsum(1), values.double().cumsum(1))


def test_running_sums_that_may_overflow_are_unknown_from_there_on():
    values = torch.tensor([[1.0, 3e38, 3e38, -3e38]])
    assert values.cumsum(1)[0, 2] == math.inf
    bounds = Interval(values.double(), values.double()).within(BoundPass(FLOAT32)).cumsum(1)
    assert bounds.lower.isfinite().tolist() == [[True, False, False, False]]


# -- variances ------------------------------------------------------------------------------


def corners(lower, upper):
    """Every corner of a box, (2^n, n)."""
    sides = torch.cartesian_prod(*[torch.tensor([0.0, 1.0]).double()] * len(lower))
    return lower + sides * (upper - lower)


def squares(points):
    return (points - points.mean(-1, keepdim=True)).square().sum(-1)


@pytest.mark.parametrize("safe", [False, True])
def test_the_largest_variance_is_that_of_a_corner_or_a_little_more(safe):
    torch.manual_seed(0)
    met = []
    for count in (2, 3, 5, 9):
        for _ in range(40):
            center = torch.randn(count).double()
            radius = torch.rand(count).double() * 10 ** (3 * torch.rand(()).double() - 2)
            radius[torch.rand(count) < 0.2] = 0
            bound = float(_most_squares(center, radius, safe=safe))
            largest = float(squares(corners(center - radius, center + radius)).amax())
            assert bound >= largest * (1 - 1e-14)
            met.append(bound / largest if largest else 1.0)
            inner = center + (2 * torch.rand(3000, count).double() - 1) * radius
            assert float(squares(inner).amin()) >= float(least_squares(center, radius, safe=safe))
    assert sorted(met)[len(met) // 2] < 1 + 1e-9  # in most boxes it is the corner's
    assert max(met) < 1.5


def by_all_formulas(x, correction):
    """Variances along the last axis: two passes, running updates, halves, and one pass."""
    count = x.shape[-1]
    free = count - correction
    yield (x - x.mean(-1, keepdim=True)).square().sum(-1) / free
    yield x.var(-1, correction=correction)
    yield ((x * x).mean(-1) - x.mean(-1) ** 2) * (count / free)
    yield ((x * x).sum(-1) - x.sum(-1) ** 2 / count) / free
    mean, total = torch.zeros_like(x[..., 0]), torch.zeros_like(x[..., 0])
    for index in range(count):
        step = x[..., index] - mean
        mean = mean + step / (index + 1)
        total = total + step * (x[..., index] - mean)
    yield total / free


@pytest.mark.parametrize("shift", [0.0, 1.0, 300.0, 1e5])
@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("count", [3, 40])
def test_variances_hold_in_float32_by_any_formula(shift, correction, count):
    torch.manual_seed(0)
    values = torch.randn(200, count) + shift
    for width in (0.0, 1e-6):
        lower, upper = values.double() - width, values.double() + width
        safe = Interval(lower, upper).within(BoundPass(FLOAT32))
        bounds = torch.var(safe, 1, correction=correction)
        deviations = torch.std(safe, 1, correction=correction)
        unknown = deviations.lower.isnan()
        for variance in by_all_formulas(values, correction):
            assert contains(bounds, variance)
            root = variance.sqrt().double()
            inside = (deviations.lower <= root) & (root <= deviations.upper)
            assert bool((inside | unknown).all())
        if shift <= 1:
            assert not unknown.any()
    if shift == 1e5:  # the test bites: one pass is off by more than the variance
        assert any((v < 0).any() for v in by_all_formulas(values, correction))


def test_variances_hold_the_exact_one():
    values = (torch.rand(50, 7) + 100).double()
    exact = Interval(values, values).within(BoundPass(REAL))
    found = torch.std(exact, 1)
    assert contains(found, values.std(1))
    assert bool((found.upper - found.lower < 1e-8).all())
    alike = torch.full((1, 4), 0.3, dtype=torch.float64)
    zero = torch.std(Interval(alike, alike).within(BoundPass(REAL)), 1)
    assert zero.lower == 0
    assert zero.upper < 1e-6


def test_a_deviation_is_unknown_where_a_float32_variance_may_be_negative():
    alike = torch.full((1, 4), 0.3, dtype=torch.float64)
    assert torch.std(Interval(alike, alike).within(BoundPass(FLOAT32)), 1).lower.isnan()
    assert torch.var(Interval(alike, alike).within(BoundPass(FLOAT32)), 1).lower <= 0


def test_variances_that_may_overflow_are_unknown():
    large = torch.tensor([[3e19, -3e19, 0.0]])
    assert large.var(1) == math.inf
    box = Interval(large.double(), large.double())
    assert torch.var(box.within(BoundPass(FLOAT32)), 1).upper.isnan()
    assert torch.var(box.within(BoundPass(REAL)), 1).upper.isfinite()


@pytest.mark.parametrize("operation", ["var", "std"])
def test_gradients_of_variances_are_numbers_where_all_are_alike(operation):
    lower = torch.zeros(1, 4, requires_grad=True)
    upper = torch.zeros(1, 4, requires_grad=True)
    bounds = getattr(Interval(lower, upper), operation)(1)
    for gradient in torch.autograd.grad((bounds.upper - bounds.lower).sum(), (lower, upper)):
        assert bool(gradient.isfinite().all())


def test_gradients_of_variances_match_finite_differences():
    torch.manual_seed(1)
    lower = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    upper = (lower.detach() + 0.2).requires_grad_()

    def ends(lower, upper):
        return torch.var(Interval(lower, upper), 1).ends()

    assert torch.autograd.gradcheck(ends, (lower, upper))


class Ordered(nn.Module):
    """A network with all of it: sorted features, running sums, and a deviation."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8 + 8 + 2, 3)

    def forward(self, x):
        x = self.first(x)
        x = torch.relu(x - x.median(1, keepdim=True).values)
        spread = torch.cat([x.var(1, keepdim=True), x.topk(1).values], 1)
        return self.last(torch.cat([x.sort(1).values, x.cumsum(1), spread], 1))


@pytest.mark.parametrize("rounding", [REAL, FLOAT32], ids=["real", "float32"])
def test_networks_with_order_are_enclosed(rounding):
    torch.manual_seed(0)
    model = Ordered().requires_grad_(False)
    images = torch.rand(8, 6)
    radius = torch.logspace(-8, -1, 8).reshape(-1, 1)
    lower, upper = images - radius, images + radius
    bounds = propagate(model, Interval(lower.double(), upper.double()).within(BoundPass(rounding)))
    dtype = torch.float64 if rounding is REAL else torch.float32
    points = torch.clamp(lower + torch.rand(1000, 8, 6) * (upper - lower), lower, upper)
    values = model.to(dtype)(points.to(dtype).flatten(0, 1)).unflatten(0, (1000, 8))
    assert contains(bounds, values)
    found = acert.certified_radius(model.float(), images, max_radius=0.1)
    assert bool((found.value > 0).any())
