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
