"""Balls that are not computed yet, as the bound passes of a training step hold them.

What comes next may make them cheaper: a batch norm scales the weights of a convolution, and sums
and products go into the memory of a box that nobody has seen. On a CPU new memory costs more than
the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Chain", "Convolution", "Pending", "ball_in_place"]


class Convolution(NamedTuple):
    """A convolution of a ball: a batch norm behind it scales its weights.

    `graded` is whether gradients were on where the model called it: they may not be where its
    numbers are asked for. Weight and bias are copies, since the model may overwrite its own.
    """

    operation: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    center: Tensor
    radius: Tensor
    weight: Tensor
    bias: Tensor | None
    graded: bool

    @classmethod
    def called(
        cls,
        operation: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        center: Tensor,
        radius: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Convolution:
        """The convolution as it is where the model calls it."""
        bias = None if bias is None else bias.clone()
        return cls(operation, center, radius, weight.clone(), bias, torch.is_grad_enabled())

    def scaled(self, factor: Tensor, bias: Tensor) -> Convolution:
        """The same with scaled weights and another bias."""
        return self._replace(weight=self.weight * factor, bias=bias)

    def ball(self) -> tuple[Tensor, Tensor]:
        """Center and radius of the result, in new memory."""
        with torch.set_grad_enabled(self.graded):
            center = self.operation(self.center, self.weight, self.bias)
            return center, self.operation(self.radius, self.weight.abs(), None)


class Chain(NamedTuple):
    """A ball without gradient and what was added to it or multiplied by it, all in its memory.

    Each step overwrites center and radius and keeps the shape of `like`, which has that of the
    ball, its dtype and its device.
    """

    start: Callable[[], tuple[Tensor, Tensor]]
    like: Tensor
    steps: tuple[Callable[[Tensor, Tensor], object], ...] = ()

    def takes(self, constant: Tensor) -> bool:
        """Whether a step with this constant needs no gradient and no other memory."""
        sizes = zip(reversed(constant.shape), reversed(self.like.shape), strict=False)
        fits = constant.ndim <= self.like.ndim and all(own in (1, size) for own, size in sizes)
        return fits and not constant.requires_grad

    def then(self, step: Callable[[Tensor, Tensor], object]) -> Chain:
        """The chain with one more step; it holds copies, since the model may overwrite its own."""
        return self._replace(steps=(*self.steps, step))

    def ball(self) -> tuple[Tensor, Tensor]:
        """Center and radius of the result, in new memory."""
        center, radius = self.start()
        for step in self.steps:
            step(center, radius)
        return center, radius


Pending = Convolution | Chain


def ball_in_place(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """(lower + upper) / 2 and (upper - lower) / 2 in the memory of the two, without gradient."""
    center = upper.lerp_(lower, 0.5)
    return center, torch.sub(center, lower, out=lower)
