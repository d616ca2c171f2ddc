"""Products of intervals: exact where signs are known, sound anywhere, in balls and in float32."""

import itertools

import pytest
import torch
from tests import ball
from tests.rule_cases import Apply, sampled

import acert
from acert.bounds import Interval
from acert.bounds.bound_pass import BoundPass
from acert.bounds.proven import proven_margin
from acert.bounds.rounding import FLOAT32, REAL


def product_of(left, right, rounding=None):
    """Bounds of the matrix product of two boxes, given by their ends."""
    bound_pass = BoundPass(rounding)
    return torch.matmul(Interval(*left).within(bound_pass), Interval(*right).within(bound_pass))


def box(*shape, around=0.0, r=1.0):
    center = around + torch.randn(shape, dtype=torch.float64)
    radius = r * torch.rand(shape, dtype=torch.float64)
    return (center - radius).float().double(), (center + radius).float().double()


def corners(lower, upper):
    for choice in itertools.product((0, 1), repeat=lower.numel()):
        share = torch.tensor(choice, dtype=lower.dtype).reshape(lower.shape)
        yield lower + share * (upper - lower)


@pytest.mark.parametrize("around", [4.0, -4.0, 0.0])
def test_bounds_are_those_of_the_corners_where_the_left_keeps_its_sign(around):
    left, right = box(1, 3, around=around, r=0.5), box(3, 1, r=2.0)
    bounds = product_of(left, right)
    values = torch.stack([a @ b for a in corners(*left) for b in corners(*right)])
    assert bool((bounds.lower <= values + 1e-12).all())
    assert bool((bounds.upper >= values - 1e-12).all())
    if around:
        torch.testing.assert_close(bounds.lower, values.amin(0))
        torch.testing.assert_close(bounds.upper, values.amax(0))


def test_a_ball_around_zero_is_exact():
    ends = torch.tensor([[-2.0]]), torch.tensor([[2.0]])
    bounds = product_of(ends, ends)
    assert (bounds.lower.item(), bounds.upper.item()) == (-4.0, 4.0)


@pytest.mark.parametrize("around", [0.0, 3.0])
@pytest.mark.parametrize("r", [0.0, 1e-9, 0.5])
@pytest.mark.parametrize("size", [1e-200, 1e-20, 1.0, 1e15])
def test_exact_products_are_inside(size, r, around):
    left = [size * end for end in box(3, 40, around=around, r=r)]
    right = box(40, 3, r=r)
    bounds = product_of(left, right, REAL)
    for a, b in zip(sampled(*left, 6), sampled(*right, 6), strict=True):
        values = ball._product(ball.array(a), ball.array(b))
        assert ball.inside(values, bounds.lower, bounds.upper, torch.zeros_like(bounds.lower))


@pytest.mark.parametrize("around", [0.0, 3.0])
@pytest.mark.parametrize("r", [0.0, 1e-9, 0.5])
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1.0, 1e15])
def test_float32_products_in_any_order_are_inside(size, r, around):
    left = [(size * end).float().double() for end in box(3, 300, around=around, r=r)]
    right = box(300, 3, r=r)
    bounds = product_of(left, right, FLOAT32)
    assert bool(bounds.upper.isfinite().all())
    for a, b in zip(sampled(*left, 6), sampled(*right, 6), strict=True):
        a, b = a.float(), b.float()
        terms = a.unsqueeze(2) * b.unsqueeze(0)
        ordered = [terms[:, torch.randperm(300)].cumsum(1)[:, -1] for _ in range(3)]
        for value in (a @ b, *ordered):
            assert bool((value >= bounds.lower).all())
            assert bool((value <= bounds.upper).all())


@pytest.mark.parametrize("equation", ["bij,bkj->bik", "bij,bij->j", "bij,bij", "bii,bki->k"])
def test_einsum_encloses_exact_sums_and_those_of_float32(equation):
    left, right = torch.randn(4, 9, 9), torch.randn(4, 9, 9)
    computed = torch.einsum(equation, left, right).double()
    # Products of float32 numbers are exact in float64, and its sums good to 1e-13.
    exact = torch.einsum(equation, left.double(), right.double())
    for rounding, values in ((REAL, exact), (FLOAT32, computed)):
        bound_pass = BoundPass(rounding)
        boxes = (Interval(x.double(), x.double()).within(bound_pass) for x in (left, right))
        bounds = torch.einsum(equation, *boxes)
        assert bool(((bounds.lower <= values) & (values <= bounds.upper)).all())
        assert bool((bounds.upper - bounds.lower <= 1e-2).all())


def test_einsum_takes_a_list_as_torch_compile_hands_it_on():
    box = Interval(torch.zeros(2, 3), torch.ones(2, 3))
    bounds = Interval.__torch_function__(torch.einsum, (), ("ij->i", [box]))
    assert bounds.upper.tolist() == [3.0, 3.0]


def test_einsum_refuses_to_sum_an_axis_that_is_broadcast():
    # PyTorch adds the large numbers up before it multiplies, and that overflows.
    large, small = torch.full((2, 8), 1e38), torch.full((2, 1), 1e-10)
    assert torch.einsum("bi,bi->b", large, small).isinf().all()
    box = Interval(large.double(), large.double()).within(BoundPass(FLOAT32))
    for operands in ((box, small), (small, box)):
        with pytest.raises(
            acert.UnsupportedOperation, match="must have one length; got 'bi,bi->b'"
        ):
            torch.einsum("bi,bi->b", *operands)
    # One that is kept is not summed by itself.
    assert torch.einsum("bi,bi->bi", box, small).upper.isfinite().all()


@pytest.mark.parametrize("dependent", [False, True])
def test_addmm_encloses_kernels_that_start_their_sums_with_the_first_matrix(dependent):
    first, left, right = torch.randn(3, 4), torch.randn(3, 64), 1e-3 * torch.randn(64, 4)
    # As a loop over the products has it, and a matrix product that adds to its result.
    total = first
    for i in range(64):
        total = total + left[:, i : i + 1] * right[i]
    bound_pass = BoundPass(FLOAT32)
    box, start = (Interval(x.double(), x.double()).within(bound_pass) for x in (left, first))
    bounds = torch.addmm(start if dependent else first, box, right)
    for computed in (total, torch.addmm(first, left, right)):
        assert bool(((bounds.lower <= computed) & (computed <= bounds.upper)).all())
    assert float((bounds.upper - bounds.lower).max()) < 1e-4
    huge = torch.full((3, 4), 1e38)
    assert torch.addmm(huge, box, right).upper.isnan().all()


def test_nothing_is_proven_where_products_overflow():
    left = torch.full((1, 4), 1e20, dtype=torch.float64)
    right = torch.full((4, 1), 1e20, dtype=torch.float64)
    assert product_of((left, left), (right, right), FLOAT32).upper.isnan().all()
    assert product_of((left, left), (right, right), REAL).upper.isfinite().all()


def test_a_batch_of_constants_is_widened_too():
    weight = torch.randn(5, 300, 4)
    values = torch.rand(5, 3, 300)
    exact = Interval(values.double(), values.double()).within(BoundPass(FLOAT32))
    for bounds, computed in (
        (torch.matmul(exact, weight), torch.matmul(values, weight)),
        (torch.matmul(weight.mT, exact.mT), torch.matmul(weight.mT, values.mT)),
    ):
        assert bool((bounds.lower < bounds.upper).all())
        assert bool(((bounds.lower <= computed) & (computed <= bounds.upper)).all())


def test_mm_and_addmm_of_the_last_layer_are_elided():
    weight, bias = torch.randn(4, 3), torch.randn(3)
    image, label = torch.rand(2, 4), torch.tensor([0, 1])
    linear = acert.certified_margin(Apply(lambda x: x @ weight), image, label, 0.1)
    found = acert.certified_margin(Apply(lambda x: torch.mm(x, weight)), image, label, 0.1)
    assert torch.equal(found, linear)
    shifted = Apply(lambda x: torch.addmm(bias, x, weight))
    torch.testing.assert_close(
        acert.certified_margin(shifted, image, label, 0.1),
        acert.certified_margin(Apply(lambda x: F_linear(x, weight, bias)), image, label, 0.1),
    )


def F_linear(x, weight, bias):  # noqa: N802  PyTorch's name
    return torch.nn.functional.linear(x, weight.mT, bias)


def test_crown_refuses_products_it_has_no_rule_for():
    model = Apply(lambda x: torch.matmul(x, x.mT).flatten(1))
    image, label = torch.rand(1, 2, 2).double(), torch.tensor([0])
    radius = torch.tensor([0.1], dtype=torch.float64)
    with pytest.raises(acert.UnsupportedOperation, match="CROWN has a backward rule only for"):
        proven_margin(model, image, label, radius, rounding=REAL, elide=False, bounds="crown-ibp")
