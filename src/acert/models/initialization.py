"""IBP initialisation: weights small enough that intervals neither explode nor vanish with depth."""

import math
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from acert.errors import InvalidInput
from acert.models.residual import Residual
from acert.models.validation import checked_module

__all__ = ["ibp_init_"]

Affine = (
    nn.Linear
    | nn.Conv1d
    | nn.Conv2d
    | nn.Conv3d
    | nn.ConvTranspose1d
    | nn.ConvTranspose2d
    | nn.ConvTranspose3d
)
_Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d

Model = TypeVar("Model", bound=nn.Module)


def ibp_init_(
    model: Model,
    *,
    after_add: Iterable[nn.Module] = (),
    generator: torch.Generator | None = None,
) -> Model:
    """`model` itself, its linear and convolution weights drawn anew for interval bounds.

    Each weight ~ N(0, (sqrt(2 pi) / fan_in)^2). At that scale a layer doubles the mean radius of
    its intervals, and the ReLU behind it halves it again. The last linear layer, biases and batch
    norm keep what they have.

    Behind a residual sum intervals are twice as wide, so the weights that read the sum are halved:
    those behind a `Residual` in a sequence, found here, and the layers in `after_add`, for models
    that add in a `forward` of their own.
    """
    checked_module("model", model)
    affine = [module for module in model.modules() if isinstance(module, Affine)]
    linear = [module for module in affine if isinstance(module, nn.Linear)]
    halved = {*after_add}
    strangers = [layer for layer in halved if layer not in set(affine)]
    if strangers:
        raise InvalidInput(
            f"`after_add` must hold linear or convolution layers of `model`; got {strangers[0]}"
        )
    halved.update(_readers_of_sums(model))
    drawn = [layer for layer in affine if layer not in linear[-1:]]
    for layer in drawn:
        if is_lazy(layer.weight):
            raise InvalidInput(
                f"`model` must be initialised; got a weight without a shape in {layer}: call it "
                "on an input first"
            )
        if parametrize.is_parametrized(layer, "weight"):
            raise InvalidInput(
                f"`model` must have plain weights; got a parametrised one in {layer}. "
                "Initialise first, then parametrise"
            )
    with torch.no_grad():
        for layer in drawn:
            deviation = math.sqrt(2 * math.pi) / _fan_in(layer)
            layer.weight.normal_(0.0, deviation, generator=generator)
            if layer in halved:
                layer.weight.mul_(0.5)
    return model


def _fan_in(layer: Affine) -> int:
    """Number of inputs that each output sums up."""
    if isinstance(layer, _Transposed):
        # Transposed weights hold the input channels of all groups in dimension 0.
        return layer.weight[:, 0].numel() // layer.groups
    return layer.weight[0].numel()


def _readers_of_sums(model: nn.Module) -> Iterator[nn.Module]:
    """The layers whose input is a residual sum, read directly or through layers without weights."""
    found: list[nn.Module] = []

    def follow(module: nn.Module, input_is_sum: bool) -> bool:
        """Whether the output is still a sum that no weight has read."""
        if isinstance(module, Affine):
            if input_is_sum:
                found.append(module)
            return False
        if isinstance(module, Residual):
            follow(module.branch, input_is_sum)
            follow(module.shortcut, input_is_sum)
            return True
        if isinstance(module, nn.Sequential):
            for child in module:
                input_is_sum = follow(child, input_is_sum)
            return input_is_sum
        # A module with its own forward: its inside is unknown, so no sum is carried across it.
        children = list(module.children())
        for child in children:
            follow(child, False)
        return input_is_sum and not children

    follow(model, False)
    yield from found
