"""Balls that are computed late, and overwritten: the same numbers as computed at once."""

import math

import pytest
import torch
from torch import nn

from acert.bounds import Interval, propagate
from acert.bounds.bound_pass import BoundPass
from acert.bounds.margin import box, ends_around
from acert.bounds.pending import Chain, Points

SHAPE = (4, 2, 5, 5)


class Forward(nn.Module):
    """A convolution, a scale that is trained, two constants, and what a test makes of them."""

    def __init__(self, forward):
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 3)
        self.scale = nn.Parameter(torch.tensor([0.5, -2.0]).view(2, 1, 1))
        self.register_buffer("mean", torch.tensor([0.3, 0.6]).view(2, 1, 1))
        self.register_buffer("std", torch.tensor([-0.2, 4.0]).view(2, 1, 1))
        self.compute = forward

    def forward(self, x):
        return self.compute(self, x)


def without_gradient(model, x):
    y = model.convolution(x)
    with torch.no_grad():
        return y.relu()


def used_beside(model, x):
    y = model.convolution(x)
    return y.relu() + y


def overwritten(model, x):
    y = x - model.mean
    z = y / model.std
    y *= 3
    return z + y


def constants_overwritten(model, x):
    scratch = torch.full((1, 1), 2.0, dtype=torch.float64)
    x = x * scratch
    scratch.fill_(0.5)
    x = x / scratch
    scratch.fill_(0.1)
    x = x + scratch
    scratch.fill_(7)
    return model.convolution(x).relu()


FORWARDS = {
    "constants overwritten": constants_overwritten,
    "normalised": lambda model, x: model.convolution((x - model.mean) / model.std).relu(),
    "used twice": lambda model, x: ((x - model.mean) / model.std).relu() + 2 * x,
    "numbers": lambda model, x: (3 - x * -2) / 4 + 1,
    "other order": lambda model, x: model.mean - model.std * x,
    "trained scale": lambda model, x: x * model.scale + model.scale,
    "more samples": lambda model, x: x[:1] * torch.arange(3.0).view(3, 1, 1, 1) - 1,
    "more axes": lambda model, x: x + torch.ones(2, 1, 1, 1, 1),
    "not computed": lambda model, x: x - model.mean,
    "overwritten": overwritten,
    "ReLU of a convolution": lambda model, x: model.convolution(x).relu(),
    "ReLU used beside": used_beside,
    "ReLU in place": lambda model, x: torch.relu_(model.convolution(x)) * 2,
    "ReLU of a sum": lambda model, x: (model.convolution(x) + 0.1).relu(),
    "ReLU without gradient": without_gradient,
    "two ReLUs": lambda model, x: model.convolution(x).relu().relu(),
}


def results(model, images, radius, *, late, graded, domain=(0.0, 1.0)):
    """Ends and gradients, with the box computed at once or late."""
    bound_pass = BoundPass(fold=late)
    start = box(images, radius, domain)
    if late:
        points = Points(images, ends_around(images, domain))
        # Another pass has been there before, with constants that are not these.
        points.moved(((torch.mul, torch.tensor(3.0)), (torch.add, torch.tensor(0.5))))
        start = Interval.of(Chain(points, radius))
    with torch.set_grad_enabled(graded):
        lower, upper = propagate(model, start.within(bound_pass)).ends()
    model.zero_grad()
    if lower.requires_grad:
        (lower.sin() + 2 * upper.cos()).sum().backward()
    return lower.detach(), upper.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("graded", [True, False], ids=["with gradient", "without"])
@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS.keys())
def test_a_ball_computed_late_is_the_same_ball(forward, graded):
    torch.manual_seed(0)
    model = Forward(forward).double()
    images = torch.rand(SHAPE, dtype=torch.float64)
    radius = torch.tensor([0.0, 0.05, 0.3, 1.0], dtype=torch.float64)
    before = [tensor.clone() for tensor in (images, *model.buffers(), *model.parameters())]
    plain = results(model, images, radius, late=False, graded=graded)
    late = results(model, images, radius, late=True, graded=graded)
    torch.testing.assert_close(late, plain, atol=1e-12, rtol=1e-11)
    after = [images, *model.buffers(), *model.parameters()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize("write", [lambda w: w.mul_(-2), lambda w: w.data.mul_(-2)])
@pytest.mark.parametrize("normalised", [True, False], ids=["batch norm", "alone"])
def test_a_weight_overwritten_later_is_taken_as_it_was(normalised, write):
    torch.manual_seed(0)
    first, norm = torch.randn(3, 2, 3, 3).double(), nn.BatchNorm2d(3).double().eval()

    def forward(model, x):
        weight = first.clone()
        y = nn.functional.conv2d(x, weight)
        write(weight)
        return norm(y) if normalised else y.relu()

    images, radius = torch.rand(SHAPE).double(), torch.full((4,), 0.1).double()
    plain, late = (
        results(Forward(forward), images, radius, late=late, graded=False) for late in (False, True)
    )
    torch.testing.assert_close(late, plain)


def test_a_convolution_that_was_compiled_by_itself_is_no_other():
    torch.manual_seed(0)
    convolution, norm = nn.Conv2d(2, 3, 3).double(), nn.BatchNorm2d(3).double().eval()
    compiled = torch.compile(convolution, backend="eager")
    images, radius = torch.rand(SHAPE, dtype=torch.float64), torch.full((4,), 0.1).double()
    plain, late = (
        results(Forward(lambda _, x, layer=layer: norm(layer(x))), images, radius,
                late=late, graded=False)
        for layer, late in ((convolution, False), (compiled, True))
    )  # fmt: skip
    torch.testing.assert_close(late, plain)


def test_a_factor_of_0_takes_an_infinite_domain_with_it():
    model = Forward(lambda _, x: x * torch.tensor([0.0, -2.0]).view(2, 1, 1) - 3)
    images, radius = torch.rand(SHAPE), torch.full((4,), 0.1)
    domain = (-math.inf, torch.tensor([math.inf, 1.0]).view(2, 1, 1))
    plain, late = (
        results(model, images, radius, late=late, graded=False, domain=domain)
        for late in (False, True)
    )
    torch.testing.assert_close(late, plain)
    assert late[0][:, 0].unique().tolist() == [-3.0]


def test_a_chain_is_computed_once_it_is_asked_for(monkeypatch):
    calls = []
    ball = Chain.ball
    monkeypatch.setattr(Chain, "ball", lambda chain: [calls.append(None), ball(chain)][1])
    points = Points(torch.zeros(SHAPE), None)
    interval = Interval.of(Chain(points, torch.ones(len(points.images))))
    output = (interval - 1) / torch.tensor(-2.0)
    assert output.shape == SHAPE
    assert output.ndim == 4
    assert output.dtype == torch.float32
    assert not calls
    assert output.lower.unique().item() == 0.0
    assert output.upper.unique().item() == 1.0
    assert len(calls) == 1


def test_passes_that_start_alike_move_their_points_once():
    points = Points(torch.rand(SHAPE), (torch.tensor(0.0), torch.tensor(1.0)))
    first, again, other = (
        points.moved(((torch.add, torch.tensor([shift])), (torch.div, torch.tensor(0.5))))[0]
        for shift in (0.25, 0.25, 0.75)
    )
    assert again is first
    torch.testing.assert_close(other, (points.images + 0.75) / 0.5)


def test_relu_of_a_ball_by_hand():
    center, radius = torch.tensor([[3.0, 1.0, -3.0, 0.0]]), torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    ball = Interval.ball(center, radius).within(BoundPass(fold=True))
    for graded in (True, False):
        with torch.set_grad_enabled(graded):
            output = torch.relu(ball)
        assert output.center.tolist() == [[3.0, 1.5, 0.0, 0.0]]
        assert output.radius.tolist() == [[1.0, 1.5, 0.0, 0.0]]
    assert center.tolist() == [[3.0, 1.0, -3.0, 0.0]]
