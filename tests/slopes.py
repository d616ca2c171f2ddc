"""Gradients against finite differences along a random direction."""

import torch
from torch import nn
from torch.func import functional_call


class Weighted(nn.Module):
    """The model with other values in place of its parameters, in their order."""

    def __init__(self, model, values):
        super().__init__()
        names = [name for name, _ in model.named_parameters()]
        # In a tuple: as a module of this one it would have its parameters' names changed.
        self.called = (model, dict(zip(names, values, strict=True)))

    def forward(self, x):
        model, weights = self.called
        return functional_call(model, weights, (x,))


def assert_slope(loss, values):
    """Compares the gradient of `loss(*values)` with its differences, along one direction."""
    directions = [torch.randn_like(value) for value in values]
    tracked = [value.requires_grad_() for value in values]
    gradients = torch.autograd.grad(loss(*tracked), tracked)
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    with torch.no_grad():
        ahead, behind = (
            loss(*(v + step * d for v, d in zip(values, directions, strict=True)))
            for step in (1e-7, -1e-7)
        )
    torch.testing.assert_close(slope, (ahead - behind) / 2e-7, rtol=1e-4, atol=1e-6)
