"""Calls with other tensors: the model is its own again afterwards, however it shares them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import acert
from acert.attack import attack_radius
from acert.bounds.propagation import evaluation_logits
from acert.bounds.substitution import called_with, fixed_parameters
from acert.methods import Sabr
from acert.methods.base import attack_loss


class Shared(nn.Module):
    """A module with two names, a weight in two modules and a batch norm that is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.again, self.norm_again = self.first, self.norm

    def forward(self, x):
        x = self.norm_again(F.relu(self.norm(self.first(x))))
        return self.again(F.relu(self.second(x)))


def own(model):
    names = ("named_parameters", "named_buffers")
    return [
        (name, id(tensor), tensor.requires_grad)
        for listed in names
        for name, tensor in getattr(model, listed)(remove_duplicate=False)
    ]


IMAGES, LABELS = torch.rand(5, 3), torch.arange(5) % 3


@pytest.mark.parametrize(
    "call",
    [
        lambda model: evaluation_logits(model, IMAGES, fixed=True),
        lambda model: acert.certified_margin(model.eval(), IMAGES, LABELS, 0.1),
        lambda model: acert.certified_radius(model.eval(), IMAGES, max_radius=0.1),
        lambda model: attack_radius(model, IMAGES, LABELS, max_radius=0.1, steps=1, restarts=1),
        lambda model: attack_loss(model, IMAGES, LABELS),
    ],
    ids=["evaluation", "margin", "radius", "attack", "loss"],
)
def test_shared_modules_keep_their_tensors(call):
    model = Shared()
    before = own(model)
    call(model)
    assert own(model) == before


def test_every_use_of_a_shared_tensor_is_replaced():
    model, points = Shared().eval(), IMAGES.clone().requires_grad_()
    output = called_with(model, fixed_parameters(model), points)
    assert torch.equal(output, model(points))
    output.sum().backward()
    assert points.grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_sabr_trains_a_module_with_two_names():
    torch.manual_seed(0)
    model = Shared()
    before = model.first.weight.detach().clone()
    words = {"max_radius": 0.01, "epochs": 2, "progress": False, "batch_size": 5}
    acert.train(model, (IMAGES, LABELS), method=Sabr(), **words)
    assert model.first.weight is model.second.weight
    assert not torch.equal(model.first.weight, before)


class Scaled(nn.Module):
    """Two scales, one after the other, through a buffer that it shares with its part."""

    def __init__(self, part):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.part, self.head = part(self.scale), nn.Linear(3, 3)

    def forward(self, x):
        self.scale.fill_(0.1)
        small = self.part(x)
        self.scale.fill_(3.0)
        return self.head(small - self.part(x))


class Times(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x):
        return x * self.scale


class TimesView(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale[:1]

    def forward(self, x):
        return x * self.scale


def test_a_shared_buffer_is_shared_by_its_copies():
    torch.manual_seed(0)
    model = Scaled(Times)
    found = acert.interval_bounds(model, IMAGES - 0.1, IMAGES + 0.1)
    assert model.scale == 1  # a bound pass writes to copies
    box = acert.Interval(IMAGES - 0.1, IMAGES + 0.1)
    expected = model.head(0.1 * box - 3.0 * box)
    torch.testing.assert_close(found.lower, expected.lower)
    torch.testing.assert_close(found.upper, expected.upper)


def test_a_buffer_that_is_read_through_a_view_is_refused():
    model = Scaled(TimesView)
    with pytest.raises(acert.UnsupportedOperation, match="computes something else of images"):
        acert.certified_radius(model, IMAGES, max_radius=0.1)
    assert model.scale == model.part.scale == 1
