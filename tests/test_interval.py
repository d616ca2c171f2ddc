"""The interval: its two forms, what models ask of a tensor, and memory that views share."""

from fractions import Fraction

import pytest
import torch
from tests.rule_cases import Apply
from torch import nn

import acert
from acert import Interval
from acert.bounds import propagate
from acert.bounds.bound_pass import BoundPass
from acert.bounds.pending import ball_in_place
from acert.bounds.propagation import _Everywhere
from acert.bounds.rounding import FLOAT32, REAL


def box(lower=(0.0, 2.0), upper=(1.0, 4.0)):
    return Interval(torch.tensor([lower]), torch.tensor([upper]))


def bounds_of(function, lower=(-1.0, 2.0), upper=(1.0, 4.0)):
    bounds = propagate(Apply(function), box(lower, upper))
    return bounds.lower.tolist()[0], bounds.upper.tolist()[0]


# -- two forms ------------------------------------------------------------------------------


def test_ends_and_ball_describe_one_box():
    interval = box()
    assert interval.center.tolist() == [[0.5, 3.0]]
    assert interval.radius.tolist() == [[0.5, 1.0]]
    ball = Interval.ball(interval.center, interval.radius)
    assert ball.lower.tolist() == [[0.0, 2.0]]
    assert ball.upper.tolist() == [[1.0, 4.0]]


def test_magnitude_is_the_largest_absolute_value():
    interval = box((-3.0, 1.0), (1.0, 2.0))
    assert interval.magnitude.tolist() == [[3.0, 2.0]]
    assert Interval.ball(*interval.as_ball()).magnitude.tolist() == [[3.0, 2.0]]


@pytest.mark.parametrize("rounding", [REAL, FLOAT32], ids=lambda rounding: rounding.name)
def test_rounding_safe_forms_hold_the_exact_box(rounding):
    """In rational arithmetic: neither conversion loses a point, whatever the magnitudes."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(2, 500, generator=generator, dtype=torch.float64)
    scale = 10.0 ** torch.randint(-300, 300, (2, 500), generator=generator).double()
    center, radius = draw[0] * scale[0], draw[1].abs() * scale[1]
    ball = Interval.ball(center, radius).within(BoundPass(rounding))
    for c, r, low, high in zip(
        center.tolist(), radius.tolist(), ball.lower.tolist(), ball.upper.tolist(), strict=True
    ):
        assert Fraction(low) <= Fraction(c) - Fraction(r)
        assert Fraction(high) >= Fraction(c) + Fraction(r)
    lower = torch.minimum(center, radius)
    upper = torch.maximum(center, radius)
    interval = Interval(lower, upper).within(BoundPass(rounding))
    for low, high, c, r in zip(
        lower.tolist(),
        upper.tolist(),
        interval.center.tolist(),
        interval.radius.tolist(),
        strict=True,
    ):
        assert Fraction(c) - Fraction(r) <= Fraction(low)
        assert Fraction(c) + Fraction(r) >= Fraction(high)


def test_a_ball_in_the_memory_of_its_ends():
    lower, upper = torch.tensor([0.0, -3.0, 2.5]), torch.tensor([1.0, 4.0, 2.5])
    held = {lower.data_ptr(), upper.data_ptr()}
    center, radius = ball_in_place(lower, upper)
    assert center.tolist() == [0.5, 0.5, 2.5]
    assert radius.tolist() == [0.5, 3.5, 0.0]
    assert {center.data_ptr(), radius.data_ptr()} == held


def test_an_interval_is_frozen():
    with pytest.raises(AttributeError, match="an Interval is frozen; `lower` cannot be set"):
        box().lower = torch.zeros(1, 2)
    with pytest.raises(AttributeError, match="an Interval is frozen; `extra` cannot be set"):
        box().extra = 1


@pytest.mark.parametrize(
    "upper", [torch.zeros(2), torch.zeros(1, 2).double()], ids=["shape", "dtype"]
)
def test_ends_that_do_not_fit_are_refused(upper):
    message = r"`lower` and `upper` must have one shape and dtype; got \(1, 2\) torch.float32 and"
    with pytest.raises(acert.InvalidInput, match=message):
        Interval(torch.zeros(1, 2), upper)


# -- what models ask of a tensor ------------------------------------------------------------


def test_it_answers_like_a_tensor():
    interval = box()
    assert interval.shape == torch.Size([1, 2])
    assert interval.size() == torch.Size([1, 2])
    assert interval.size(1) == interval.size(dim=-1) == 2
    assert interval.dim() == interval.ndim == 2
    assert interval.numel() == 2
    assert len(interval) == 1
    assert interval.dtype == torch.float32
    assert interval.device == torch.device("cpu")
    assert repr(interval).startswith("Interval(lower=tensor([[0., 2.]])")
    assert interval in {interval}
    assert interval not in {box()}


def test_iterating_yields_its_rows():
    rows = list(Interval(torch.zeros(3, 2), torch.ones(3, 2)))
    assert [tuple(row.shape) for row in rows] == [(2,)] * 3


def test_unknown_attributes_raise_as_python_expects():
    with pytest.raises(AttributeError, match="an Interval has no `colour`"):
        _ = box().colour
    with pytest.raises(AttributeError, match="an Interval has no `_private`"):
        _ = box()._private
    with pytest.raises(AttributeError, match="an Interval has no `requires_grad`"):
        _ = box().requires_grad


def test_an_operation_knows_its_name():
    assert box().operation == "its input"
    assert torch.relu(box()).operation == "torch.relu"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 4, 3), (2, 1, 2, 2, 3)], ids=str)
def test_any_float_type_and_rank(dtype, shape):
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).to(dtype)
    x = torch.randn(shape).to(dtype)
    bounds = acert.interval_bounds(model, x, x + 0.5)
    assert bounds.dtype == dtype
    assert bounds.shape == (*shape[:-1], 2)
    # A few roundings of 1e-2 (bfloat16's is 4e-3) around numbers below 2.
    value = model(x + 0.25)
    assert bool((bounds.lower <= value + 0.02).all())
    assert bool((value <= bounds.upper + 0.02).all())


def test_radii_differ_between_samples():
    layer = nn.Linear(2, 1, bias=False)
    nn.init.ones_(layer.weight)
    radius = torch.tensor([[0.0], [0.5], [2.0]])
    bounds = acert.interval_bounds(layer, torch.zeros(3, 2) - radius, torch.zeros(3, 2) + radius)
    assert bounds.upper.tolist() == [[0.0], [1.0], [4.0]]


# -- memory ---------------------------------------------------------------------------------

OVERWRITTEN = "one of its inputs was overwritten in place through another view"


def alias(x):
    y = x
    y += 1
    return x + y


def relu_and_input(x):
    out = torch.relu_(x)
    return out + x


def dropout_alias(x):
    y = nn.functional.dropout(x, 0.5, training=False)
    y += 1
    return x


def identity_alias(x):
    y = nn.Identity()(x)
    y *= 2
    return x


def view_used_after(x):
    y = x.view(-1)
    y += 1
    return y.view(1, 2)


def copy_is_apart(x):
    y = x * 1
    y += 5
    return x


@pytest.mark.parametrize(
    "function",
    [alias, relu_and_input, dropout_alias, identity_alias, view_used_after, copy_is_apart],
)
def test_aliases_behave_as_in_pytorch(function):
    """At the corners of the box, which these increasing functions map to the ends."""
    lower, upper = bounds_of(function)
    assert lower == function(torch.tensor([[-1.0, 2.0]])).tolist()[0]
    assert upper == function(torch.tensor([[1.0, 4.0]])).tolist()[0]


def base_after_view(x):
    x[:, :1].add_(1)
    return x + 0


def view_after_base(x):
    y = x.flatten()
    x.relu_()
    return y + 0


def part_after_base(x):
    first, second = x.split(1, dim=1)
    x.mul_(2)
    return first + second


def inplace_module_after_view(x):
    y = x.unsqueeze(0)
    nn.ReLU(inplace=True)(x)
    return torch.cat([y, y])


@pytest.mark.parametrize(
    "function", [base_after_view, view_after_base, part_after_base, inplace_module_after_view]
)
def test_memory_overwritten_through_another_view_is_refused(function):
    with pytest.raises(acert.UnsupportedOperation, match=OVERWRITTEN):
        propagate(Apply(function), box())


def returned_base(x):
    x.view(-1).add_(1)
    return x


def returned_view(x):
    y = x[:, 1:]
    x.mul_(-1)
    return y


@pytest.mark.parametrize("function", [returned_base, returned_view])
def test_an_output_overwritten_through_another_view_is_refused(function):
    message = "the model returned a tensor that was overwritten in place through another view"
    with pytest.raises(acert.UnsupportedOperation, match=message):
        propagate(Apply(function), box())


class Overwriting(nn.Module):
    """Overwrites the input of its last layer once that has been computed."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        hidden = self.first(x)
        logits = self.last(hidden)
        hidden.mul_(0)
        return logits


def test_elision_remembers_the_input_as_it_was():
    model = Overwriting()
    images, labels = torch.rand(5, 3), torch.tensor([0, 1, 2, 0, 1])
    expected = acert.certified_margin(nn.Sequential(model.first, model.last), images, labels, 0.1)
    torch.testing.assert_close(acert.certified_margin(model, images, labels, 0.1), expected)


def test_inplace_operations_leave_the_callers_tensors_alone():
    lower, upper = torch.tensor([[-1.0, 2.0]]), torch.tensor([[1.0, 4.0]])
    acert.interval_bounds(Apply(lambda x: x.mul_(3).relu_()), lower, upper)
    assert lower.tolist() == [[-1.0, 2.0]]
    assert upper.tolist() == [[1.0, 4.0]]


def added_tensor(x, constant):
    y = x
    y += constant
    return x + y


@pytest.mark.xfail(reason="torch.compile turns `y += tensor` into a sum that leaves `x` as it was")
def test_compiled_alias_of_a_tensor_added_in_place():
    torch._dynamo.reset()
    model = Apply(added_tensor, torch.ones(2))

    def ends(lower, upper):
        return propagate(model, Interval(lower, upper)).ends()

    eager = ends(*box().ends())
    compiled = torch.compile(ends, backend="aot_eager", fullgraph=True)(*box().ends())
    torch.testing.assert_close(compiled, eager)


def test_a_compiled_model_is_bounded_as_it_was_written():
    """However it was compiled: whole, and with no more than one graph of one shape allowed."""
    torch._dynamo.reset()
    model = Apply(added_tensor, torch.ones(2))
    eager = propagate(model, box()).ends()
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        compiled(torch.rand(5, 2))
        torch.testing.assert_close(propagate(compiled, box()).ends(), eager, rtol=0, atol=0)
    assert not torch.equal(eager[0], box().lower)


# -- what torch.compile hands over ----------------------------------------------------------


def test_reflected_operators_put_the_interval_first():
    """How torch.compile spells `box - c` and `box / c`."""
    constant = torch.tensor([2.0, -4.0])
    for reflected, direct in (
        (torch.Tensor.__rsub__, torch.sub),
        (torch.Tensor.__rtruediv__, torch.div),
    ):
        found = Interval.__torch_function__(reflected, (), (constant, box()))
        expected = direct(box(), constant)
        assert torch.equal(found.lower, expected.lower)
        assert torch.equal(found.upper, expected.upper)


def test_inplace_is_found_by_place():
    """How torch.compile passes on the arguments of `nn.LeakyReLU` and its like."""
    for inplace in (True, False):
        interval = box((-1.0, 2.0), (1.0, 4.0))
        slope = (interval, 0.5, inplace)
        found = Interval.__torch_function__(nn.functional.leaky_relu, (), slope)
        assert found.lower.tolist() == [[-0.5, 2.0]]
        assert (found is interval) == inplace


def test_intervals_in_a_tuple_are_found():
    """torch.compile looks into lists only; a mode finds what it misses, and leaves the rest."""
    with _Everywhere():
        joined = torch.cat((box(), box()), dim=1)
        plain = torch.cat((torch.zeros(1), torch.ones(1)))
    assert joined.upper.tolist() == [[1.0, 4.0, 1.0, 4.0]]
    assert plain.tolist() == [0.0, 1.0]


# -- overflow -------------------------------------------------------------------------------


def test_an_overflow_proves_nothing_behind_a_clamp():
    """The float32 network returns NaN, though a clamp would bring infinite ends back."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Hardtanh(), nn.Linear(1, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3e38, -3e38]]))
        model[2].bias.copy_(torch.tensor([10.0, -10.0]))
    image = torch.tensor([[1.5, 1.5]])
    assert bool(model(image).isnan().all())
    double = image.double()
    safe = propagate(model, Interval(double - 0.1, double + 0.1).within(BoundPass(FLOAT32)))
    assert not bool(safe.lower.isfinite().any())
