"""Masks: where comparisons are certain, and that nothing takes an uncertain one for a constant."""

import math
import operator
import re

import numpy as np
import pytest
import torch
from tests.rule_cases import Apply
from torch import nn

import acert
from acert.bounds import Interval, propagate
from acert.bounds.bound_pass import BoundPass
from acert.bounds.masks import Mask
from acert.bounds.rounding import FLOAT32, REAL
from acert.bounds.table import MASKED
from acert.errors import UnsupportedOperation

TINY = torch.finfo(torch.float32).tiny
TRUE, FALSE, UNKNOWN = (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)
COMPARISONS = [operator.gt, operator.ge, operator.lt, operator.le]
roundings = pytest.mark.parametrize("rounding", [None, REAL, FLOAT32], ids=str)


def box(lower, upper, rounding=None):
    lower, upper = (torch.tensor(end, dtype=torch.float64).reshape(1, -1) for end in (lower, upper))
    return Interval(lower, upper).within(BoundPass(rounding))


def answers(mask):
    assert isinstance(mask, Mask)
    lower, upper = mask.numbers.ends()
    return [*zip(lower.flatten().tolist(), upper.flatten().tolist(), strict=True)]


@roundings
@pytest.mark.parametrize(
    ("compared", "expected"),
    [
        (lambda x: x > 0, [FALSE, FALSE, UNKNOWN, UNKNOWN, TRUE, FALSE]),
        (lambda x: x >= 0, [FALSE, UNKNOWN, UNKNOWN, TRUE, TRUE, TRUE]),
        (lambda x: x < 0, [TRUE, UNKNOWN, UNKNOWN, FALSE, FALSE, FALSE]),
        (lambda x: x <= 0, [TRUE, TRUE, UNKNOWN, UNKNOWN, FALSE, TRUE]),
    ],
)
def test_answers_are_certain_where_the_ends_leave_no_choice(compared, expected, rounding):
    x = box([-2, -1, -1, 0, 1, 0], [-1, 0, 1, 1, 2, 0], rounding)
    assert answers(compared(x)) == expected
    assert answers(compared(x).unsqueeze(0)) == expected
    opposite = {TRUE: FALSE, FALSE: TRUE, UNKNOWN: UNKNOWN}
    assert answers(~compared(x)) == [opposite[answer] for answer in expected]


@pytest.mark.parametrize("compare", COMPARISONS)
def test_answers_hold_for_all_pairs_of_points(compare):
    """Small whole numbers, so that ends touch, by every order of the two sides."""
    torch.manual_seed(0)
    ends = torch.randint(-3, 4, (4, 400)).double().sort(0).values[torch.randperm(4)]
    (low, high), (other_low, other_high) = ends[:2].sort(0).values, ends[2:].sort(0).values
    steps = torch.linspace(0, 1, 7, dtype=torch.float64).reshape(-1, 1)
    points = low + steps * (high - low)
    others = other_low + steps * (other_high - other_low)
    values = compare(points[:, None], others[None]).flatten(0, 1)
    bounds = compare(Interval(low, high), Interval(other_low, other_high)).numbers
    assert torch.equal(bounds.lower > 0, values.all(0))
    assert torch.equal(bounds.upper > 0, values.any(0))


@roundings
@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("ends", [(math.nan, math.nan), (5.0, math.nan), (math.nan, -5.0)])
def test_what_has_no_bounds_has_no_answer(compare, ends, rounding):
    x = box([ends[0]], [ends[1]], rounding)
    one = torch.ones(1, dtype=torch.float64)
    for mask in (compare(x, 1.0), compare(one, x), compare(x, x * 0), compare(x, math.nan)):
        assert answers(mask) == [UNKNOWN]
    assert answers(compare(box([0], [1], rounding), math.nan)) == [UNKNOWN]


def test_a_mask_with_no_answer_allows_for_both_branches():
    x = box([math.nan], [math.nan], FLOAT32)
    found = torch.where(x > 0, 1.0, -1.0)
    assert (found.lower.item(), found.upper.item()) == (-1.0, 1.0)
    assert bool(torch.where(x > 0, x, 1.0).lower.isnan())
    assert bool((x * (x > 0)).lower.isnan())
    assert bool(x.masked_fill(x < 0, 0.0).upper.isnan())


def test_what_is_flushed_to_zero_is_not_surely_above_it():
    half = TINY / 2
    x = box([half, -half, TINY, -half], [1, -half, 1, half], FLOAT32)
    assert answers(x > 0) == [UNKNOWN, FALSE, TRUE, UNKNOWN]
    assert answers(x < 0) == [FALSE, UNKNOWN, FALSE, UNKNOWN]
    assert answers(x >= half) == [UNKNOWN, UNKNOWN, TRUE, UNKNOWN]
    if torch.set_flush_denormal(True):
        try:
            assert not bool((torch.tensor([half]) * 1.0 > 0).any())
        finally:
            torch.set_flush_denormal(False)


def test_constants_are_compared_as_a_network_rounds_them():
    """0.1 is 0.100000001 in float32: what lies between may be on either side of it."""
    near = float(torch.tensor(0.1))
    x = box([0.1, near], [0.1, near], FLOAT32)
    assert answers(x < 0.1) == [UNKNOWN, UNKNOWN]
    assert answers(x >= torch.tensor([0.1], dtype=torch.float64)) == [UNKNOWN, UNKNOWN]
    assert answers(box([near], [near], FLOAT32) <= torch.tensor([0.1])) == [TRUE]


def test_sums_that_rounding_decides_are_unknown():
    """In float32 x + 1e8 - 1e8 is 0 for small x, and x in exact arithmetic."""
    function = Apply(lambda x: ((x + 1e8) - 1e8 > 0).float())
    point = torch.full((1, 1), 0.5)
    for rounding, expected in ((REAL, (1.0, 1.0)), (FLOAT32, (0.0, 1.0))):
        exact = Interval(point.double(), point.double()).within(BoundPass(rounding))
        found = propagate(function, exact)
        assert (found.lower.item(), found.upper.item()) == expected
    assert function(point) == 0


@roundings
def test_a_number_that_python_gives_is_held_as_pytorch_rounds_it(rounding):
    x = box([1.0], [2.0], rounding)
    for found in (0.7 * (x > 0), (x > 0) + -0.3, torch.where(x > 0, 0.7, 0.1)):
        for number in (0.7, float(torch.tensor(0.7))):
            assert found.lower - 1e-15 <= number <= found.upper + 1e-15


CONSTANT = torch.tensor([True, False, True])
WHOLE = torch.tensor([3, 1, 2])
REFUSED = {
    "truth": lambda x, mask: x if mask else -x,
    "not": lambda x, mask: x * (not mask),
    "and": lambda x, mask: x * (mask and 2.0),
    "all": lambda x, mask: x if mask.all() else -x,
    "any": lambda x, mask: x * torch.any(mask),
    "python's all": lambda x, mask: x if all(mask) else -x,
    "sum as a number": lambda x, mask: x * int(mask.sum()),
    "sum": lambda x, mask: x * mask.sum(),
    "float()": lambda x, mask: x * float(mask[0, 0]),
    "index": lambda x, mask: x * [1.0, 2.0][mask[0, 0]],
    "range": lambda x, mask: x * len(range(mask[0, 0])),
    "len": lambda x, mask: x * len(mask),
    "iteration": lambda x, mask: x * sum(1.0 for _ in mask),
    "unpacking": lambda x, mask: x * torch.stack([*mask]),
    "item": lambda x, mask: x * mask[0, 0].item(),
    "tolist": lambda x, mask: x * torch.tensor(mask.tolist()),
    "numpy": lambda x, mask: x * torch.from_numpy(mask.numpy()),
    "asarray": lambda x, mask: x * torch.from_numpy(np.asarray(mask)),
    "array times mask": lambda x, mask: x + np.ones(3) * mask,
    "tensor": lambda x, mask: x * torch.tensor(mask),
    "as_tensor": lambda x, mask: x * torch.as_tensor(mask),
    "full": lambda x, mask: x * torch.full((3,), mask),
    "zeros_like": lambda x, mask: x * torch.zeros_like(mask),
    "nonzero": lambda x, mask: x * len(mask.nonzero()),
    "where alone": lambda x, mask: x * len(torch.where(mask)[0]),
    "count": lambda x, mask: x * torch.count_nonzero(mask),
    "equal": lambda x, mask: x * torch.equal(mask, CONSTANT),
    "== True": lambda x, mask: x * (mask == True),  # noqa: E712
    "!=": lambda x, mask: x * (mask != CONSTANT),
    "a mask compared": lambda x, mask: x * (mask > 0),
    "compared with a mask": lambda x, mask: x * (x > mask),
    "in": lambda x, mask: x * (mask in [CONSTANT]),
    "pick": lambda x, mask: x[mask],
    "pick a part": lambda x, mask: x[:, mask[0]],
    "pick of a constant": lambda x, mask: x * torch.arange(3.0)[mask[0]],
    "slice": lambda x, mask: x[:, : mask[0, 0]],
    "write": lambda x, mask: x.__setitem__(mask, 0.0),
    "write to a constant": lambda x, mask: torch.zeros(1, 3).__setitem__(mask, 1.0),
    "write to the mask": lambda x, mask: mask.__setitem__(0, True),
    "data": lambda x, mask: mask.__setattr__("data", CONSTANT),
    "read data": lambda x, mask: x * mask.data,
    "T": lambda x, mask: x * mask.T,
    "in-place and": lambda x, mask: x * operator.iand(mask, CONSTANT),
    "in-place or": lambda x, mask: x * operator.ior(mask, CONSTANT),
    "in-place product": lambda x, mask: operator.imul(mask, x),
    "in-place method": lambda x, mask: x * mask.logical_and_(CONSTANT),
    "into a constant": lambda x, mask: x * operator.iand(CONSTANT.clone(), mask),
    "xor": lambda x, mask: x * (mask ^ CONSTANT),
    "logical_xor": lambda x, mask: x * torch.logical_xor(mask, mask),
    "and of numbers": lambda x, mask: x * (mask & WHOLE),
    "and of a number": lambda x, mask: x * (mask & 2),
    "and with an interval": lambda x, mask: x * (x & mask),
    "logical_and with an interval": lambda x, mask: x * torch.logical_and(mask, x),
    "mask + mask": lambda x, mask: x * (mask + mask),
    "mask * mask": lambda x, mask: x * ((mask * mask) + (mask * mask)),
    "whole numbers": lambda x, mask: x * (mask * 300),
    "bytes": lambda x, mask: x * (mask * torch.tensor(200, dtype=torch.uint8) * 2),
    "half": lambda x, mask: x * (mask * torch.tensor(7e4, dtype=torch.float16)),
    "1 - mask": lambda x, mask: x * (1 - mask),
    "-mask": lambda x, mask: x * -mask,
    "x - mask": lambda x, mask: x - mask,
    "x / mask": lambda x, mask: x / mask,
    "x ** mask": lambda x, mask: x**mask,
    "alpha": lambda x, mask: torch.add(x, mask, alpha=2),
    "long": lambda x, mask: x * mask.long(),
    "to whole numbers": lambda x, mask: x * mask.to(torch.int64),
    "to half": lambda x, mask: x * mask.to(torch.float16),
    "view as numbers": lambda x, mask: x * mask.view(torch.uint8),
    "a constant's type": lambda x, mask: x * WHOLE.type_as(mask),
    "a constant to it": lambda x, mask: x * WHOLE.to(mask),
    "where of whole numbers": lambda x, mask: x * torch.where(mask, 3, 4),
    "where of half": lambda x, mask: x * torch.where(mask, 1e5, torch.tensor(1.0).half()),
    "where of masks": lambda x, mask: x * torch.where(CONSTANT, mask, mask),
    "masked_fill of whole numbers": lambda x, mask: x * WHOLE.masked_fill(mask, 7),
    "masked_fill of the mask": lambda x, mask: x * mask.masked_fill(CONSTANT, True),
    "masked_fill_ of a constant": lambda x, mask: x * torch.zeros(1, 3).masked_fill_(mask, 1.0),
    "masked_select": lambda x, mask: x * torch.masked_select(x, mask).sum(),
    "stack": lambda x, mask: x * torch.stack([mask, mask])[0],
    "cat": lambda x, mask: torch.cat([x, mask], 1),
    "clamp": lambda x, mask: x.clamp(min=mask),
    "lerp": lambda x, mask: torch.lerp(x, x, mask),
    "gather": lambda x, mask: x.gather(1, mask),
    "linear": lambda x, mask: nn.functional.linear(mask, torch.ones(3, 3)),
    "keyword": lambda x, mask: nn.functional.dropout(x, p=mask),
    "a list": lambda x, mask: nn.functional.pad(x, [mask, mask]),
    "returned": lambda x, mask: mask,
    "an index of argmax": lambda x, mask: x * torch.where(mask, x.argmax(1, True), 0.0),
    "greater in place": lambda x, mask: x.gt_(0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_asked_of_a_mask_is_refused(name):
    model = Apply(lambda x: REFUSED[name](x, x > 0.5))
    # Certain answers are no constants either: they are those of this box alone.
    for lower in (torch.zeros(1, 3), torch.ones(1, 3)):
        with pytest.raises(UnsupportedOperation) as refusal:
            acert.interval_bounds(model, lower, torch.ones(1, 3))
        assert re.search(SAID, str(refusal.value))


SAID = re.compile(
    r"[Mm]ask|answer|its type from|lose precision|only its first argument|indices are not certain|"
    r"keep the type|cannot hold the result|Tensor.gt_: it has no bound rule"
)


def test_the_refusal_names_the_comparison_and_what_to_write():
    with pytest.raises(UnsupportedOperation, match=r"torch.Tensor.gt: .*: choose by `torch.where`"):
        acert.interval_bounds(
            Apply(lambda x: x if (x > 0).reshape(-1)[0] else -x),
            torch.zeros(1, 1),
            torch.ones(1, 1),
        )
    with pytest.raises(UnsupportedOperation, match=r"torch.Tensor.any: it has no bound rule for a"):
        acert.interval_bounds(Apply(lambda x: (x > 0).any()), torch.zeros(1, 1), torch.ones(1, 1))


def test_a_mask_looks_like_one():
    mask = box([0, 1], [1, 2]) > 0.5
    assert (mask.shape, mask.ndim, mask.dim(), mask.dtype) == ((1, 2), 2, 2, torch.bool)
    assert (mask.size(), mask.size(1), mask.device.type) == ((1, 2), 2, "cpu")
    assert answers(mask.to("cpu")) == answers(mask)


def test_an_answer_stays_when_what_was_compared_is_overwritten():
    def function(x):
        y = x * 1
        mask = y > 0
        numbers = mask.float()
        numbers += 1
        y *= -1
        return torch.where(mask, y, 7.0) + 0 * numbers

    lower, upper = torch.tensor([[1.0, -2.0]]), torch.tensor([[2.0, -1.0]])
    found = acert.interval_bounds(Apply(function), lower, upper)
    assert (found.lower.tolist(), found.upper.tolist()) == ([[-2.0, 7.0]], [[-1.0, 7.0]])


def test_what_was_overwritten_through_another_view_is_not_compared():
    def function(x):
        y = x * 1
        part = y[:, :1]
        part += 1
        return torch.where(y > 0, 1.0, 0.0)

    with pytest.raises(UnsupportedOperation, match="overwritten in place through another view"):
        acert.interval_bounds(Apply(function), torch.zeros(1, 2), torch.ones(1, 2))


def test_every_spelling_that_takes_a_mask_is_one_of_pytorch():
    """None is left out of the tables' own tests by being misspelled."""
    for function in MASKED:
        assert callable(function)
    allowed = {getattr(function, "__name__", "") for function in MASKED}
    assert not allowed & {"sum", "any", "all", "item", "nonzero", "__setitem__", "eq", "sub"}


ACTIVATIONS = {
    "shrink": lambda x: torch.where(x.abs() > 0.3, x - torch.where(x > 0, 0.25, -0.25), 0 * x),
    "gate": lambda x: x * (x > 0) + 0.1 * x * (x <= 0).to(x.dtype),
    "band": lambda x: x.masked_fill((x < -0.2) | (x > 0.4), 0.25),
    "steps": lambda x: (x > 0).to(x.dtype) + 0.5 * (x > 0.3) + ~(x > -0.3) * 0.0 * x,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("rounding", [REAL, FLOAT32], ids=str)
def test_networks_of_home_made_activations_are_enclosed(name, rounding):
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(5, 12), Apply(ACTIVATIONS[name]), nn.Linear(12, 12), Apply(ACTIVATIONS[name]),
        nn.Linear(12, 3),
    )  # fmt: skip
    dtype = torch.float64 if rounding is REAL else torch.float32
    center = torch.rand(6, 5)
    radius = torch.logspace(-9, -1, 6).reshape(-1, 1)
    lower, upper = center - radius, center + radius
    with torch.no_grad():
        start = Interval(lower.double(), upper.double()).within(BoundPass(rounding))
        found = propagate(model, start)
        points = torch.clamp(lower + torch.rand(2000, 6, 5) * (upper - lower), lower, upper)
        values = model.to(dtype)(points.to(dtype)).double()
    assert bool(((values >= found.lower) & (values <= found.upper)).all())
    assert bool((found.upper - found.lower).isfinite().all())


@pytest.mark.parametrize("arithmetic", ["real", "float32"])
def test_no_certificate_reaches_beyond_a_jump(arithmetic):
    head = nn.Linear(1, 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[-1.0], [1.0]]))
        head.bias.copy_(torch.tensor([0.5, -0.5]))
    model = nn.Sequential(Apply(lambda x: torch.where(x > 0.6, 1.0, 0.0)), head)
    image = torch.tensor([[0.5]])
    found = acert.certified_radius(model, image, max_radius=0.5, arithmetic=arithmetic)
    assert 0.0999 < float(found.value) <= 0.1 + 1e-7
    assert model(image + 0.1001).argmax(1) != model(image).argmax(1)


def test_bounds_behind_masks_carry_gradients():
    lower = torch.tensor([[-0.5, 0.2, -2.0]], requires_grad=True)
    x = Interval(lower, lower + 1)
    total = sum(
        (found.upper - 2 * found.lower).sum()
        for found in (torch.where(x > 0, x, 0.1 * x), x * (x > 0), x.masked_fill(x < 0, 0.0))
    )
    (gradient,) = torch.autograd.grad(total, lower)
    assert bool(gradient.isfinite().all())
    assert bool((gradient != 0).any())


@pytest.mark.parametrize("combine", [operator.iand, operator.and_, operator.ior, operator.or_])
def test_a_mask_that_torch_compile_overwrites_is_refused(combine):
    """It hands on `mask &= constant` as `constant & mask`, and others hold the mask as well."""
    torch._dynamo.reset()
    model = Apply(lambda x: torch.where(combine(x > 0.5, CONSTANT), x, 0.0))

    def ends(lower, upper):
        return propagate(model, Interval(lower, upper)).ends()

    compiled = torch.compile(ends, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"torch.compile swaps|its answers depend|Failed to trace"):
        compiled(torch.zeros(1, 3), torch.ones(1, 3))


class _Numbers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask):
        return mask.float()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_a_mask_in_a_function_of_its_own_gradient_is_refused():
    """Its numbers have no gradient that would tell; what the function says it has would be lost."""
    layer = nn.Linear(3, 3)
    model = Apply(lambda x: _Numbers.apply(layer(x), layer(x) > 0))
    images = torch.rand(2, 3)
    with pytest.raises(acert.UnsupportedOperation, match="where gradients of bounds end"):
        acert.interval_bounds(model, images - 0.1, images + 0.1)
    with torch.no_grad():
        assert acert.interval_bounds(model, images - 0.1, images + 0.1).upper.max() <= 1


@pytest.mark.parametrize(
    "expression",
    ["x.cumsum(axis=1)", "x.var(axis=1, keepdims=True)", "torch.diff(x, axis=1)",
     "x.sort(axis=1).values", "x.topk(2, axis=1).values", "x.kthvalue(2, axis=1, keepdims=True)[0]",
     "x.amax(axis=1)", "torch.median(x, axis=1, keepdims=True).values"],
)  # fmt: skip
def test_the_names_that_numpy_has_are_taken_too(expression):
    model = Apply(eval(f"lambda x: {expression}", {"torch": torch}))
    images = torch.rand(2, 3).double()
    found = acert.interval_bounds(model, images, images)
    torch.testing.assert_close(found.center, model(images))


def test_differences_along_nothing_are_nothing():
    box = Interval(torch.zeros(2, 0), torch.zeros(2, 0))
    assert torch.diff(box, dim=1).shape == (2, 0)


def test_least_squares_find_the_least():
    """Newton's steps alone go back and forth between two points of some boxes."""
    center = torch.tensor([[-1.45234, 0.444716, -0.613074]], dtype=torch.float64)
    radius = torch.tensor([[0.0668, 0.991528, 0.85885]], dtype=torch.float64)
    found = torch.std(Interval.ball(center, radius), 1).lower
    grid = torch.cartesian_prod(*[torch.linspace(-1, 1, 101, dtype=torch.float64)] * 3)
    least = (center + grid * radius).std(1).min()
    assert 0.99 * least <= float(found) <= least
