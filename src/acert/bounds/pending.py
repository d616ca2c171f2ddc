"""Balls that are not computed yet, as the bound passes of a training step hold them.

What comes next may make them cheaper: a batch norm scales the weights of a convolution, and sums
and products with constants move a box that nobody has seen. On a CPU new memory costs more than the
arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from acert.bounds.bound_pass import BoundPass
from acert.bounds.fused import relu_of_scaled

__all__ = ["Chain", "Convolution", "Pending", "Points", "Scaled", "Stored", "ball_in_place"]


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
    bound_pass: BoundPass

    @classmethod
    def called(
        cls,
        operation: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        center: Tensor,
        radius: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        bound_pass: BoundPass,
    ) -> Convolution:
        """The convolution as it is where the model calls it."""
        bias = None if bias is None else bound_pass.once(torch.clone, bias)
        weight, graded = bound_pass.once(torch.clone, weight), torch.is_grad_enabled()
        return cls(operation, center, radius, weight, bias, graded, bound_pass)

    def ball(self) -> tuple[Tensor, Tensor]:
        """Center and radius of the result, in new memory."""
        with torch.set_grad_enabled(self.graded):
            center = self.operation(self.center, self.weight, self.bias)
            size = self.bound_pass.once(torch.abs, self.weight)
            return center, self.operation(self.radius, size, None)


# A sum, product or quotient with a constant: the function and the constant.
Operation = tuple[Callable[[Tensor, Tensor], Tensor], Tensor]


class Points:
    """Images without gradient and the ends of their domain, if it has some: low and high.

    Most models start with sums and products by constants. The bound passes of a training step all
    start with the same, so what these make of images and ends is kept for the next pass.
    """

    def __init__(self, images: Tensor, domain: tuple[Tensor, Tensor] | None) -> None:
        self.images, self.domain = images, domain
        self._operations: tuple[Operation, ...] = ()
        self._moved = images, domain, images.new_ones(())

    def moved(
        self, operations: tuple[Operation, ...]
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor]:
        """Images and ends behind the operations, and what a radius is multiplied by."""
        if not _same(operations, self._operations):
            points, ends, size = self.images, self.domain, self.images.new_ones(())
            for operation, constant in operations:
                points = operation(points, constant)
                size = size if operation is torch.add else operation(size, constant.abs())
                if ends is not None:
                    one, other = (operation(end, constant) for end in ends)
                    # 0 times an infinite end is no end.
                    low = torch.minimum(one, other).nan_to_num(-math.inf, math.inf, -math.inf)
                    high = torch.maximum(one, other).nan_to_num(math.inf, math.inf, -math.inf)
                    ends = low, high
            self._operations, self._moved = operations, (points, ends, size)
        return self._moved


def _same(some: tuple[Operation, ...], others: tuple[Operation, ...]) -> bool:
    return len(some) == len(others) and all(
        one[0] is other[0] and torch.equal(one[1], other[1])
        for one, other in zip(some, others, strict=True)
    )


class Chain(NamedTuple):
    """A box around points and what was added to it or multiplied by it; nothing has a gradient."""

    points: Points
    radius: Tensor
    operations: tuple[Operation, ...] = ()

    def like(self) -> Tensor:
        """A tensor of the ball's shape, dtype and device."""
        return self.points.images

    def takes(self, constant: Tensor) -> bool:
        """Whether an operation with this constant needs no gradient and keeps the shape."""
        sizes = zip(reversed(constant.shape), reversed(self.like().shape), strict=False)
        fits = constant.ndim <= self.like().ndim and all(own in (1, size) for own, size in sizes)
        return fits and not constant.requires_grad

    def then(self, operation: Callable[[Tensor, Tensor], Tensor], constant: Tensor) -> Chain:
        """The chain with one more; it holds a copy, since the model may overwrite its own."""
        return self._replace(operations=(*self.operations, (operation, constant.clone())))

    def ball(self) -> tuple[Tensor, Tensor]:
        """Center and radius of the result, in new memory."""
        points, ends, size = self.points.moved(self.operations)
        reach = self.radius.reshape(-1, *[1] * (points.ndim - 1)) * size
        lower, upper = points - reach, points + reach
        if ends is not None:
            torch.maximum(lower, ends[0], out=lower)
            torch.minimum(upper, ends[1], out=upper)
        return ball_in_place(lower, upper)


class Stored(NamedTuple):
    """A ball as products leave it, and take it: on CUDA maybe in half precision.

    All else gets it in `dtype`. A bias is still to be added, to the second axis. `graded` is
    whether gradients were on where the model made it, as of a `Convolution`.
    """

    center: Tensor
    radius: Tensor
    dtype: torch.dtype
    graded: bool
    bias: Tensor | None = None

    def like(self) -> Tensor:
        """A tensor of the ball's shape and device."""
        return self.center

    def ball(self) -> tuple[Tensor, Tensor]:
        """Center and radius as anything but a product takes them."""
        with torch.set_grad_enabled(self.graded):
            center, radius = self.center.to(self.dtype), self.radius.to(self.dtype)
            if self.bias is not None:
                center = center + self.bias.view(-1, *[1] * (center.ndim - 2))
            return center, radius

    def map(self, function: Callable[[Tensor], Tensor]) -> Stored | None:
        """With its elements rearranged; None where the bias would no longer know its axis."""
        if self.bias is not None:
            return None
        return self._replace(center=function(self.center), radius=function(self.radius))

    def scaled(self, mean: Tensor, inverse: Tensor, factor: Tensor, shift: Tensor) -> Scaled:
        """`(x - mean) * inverse * factor + shift`, a number a channel each.

        It holds copies, since the model may overwrite its own.
        """
        mean = mean.clone() if self.bias is None else mean - self.bias
        return Scaled(self, mean, inverse, factor.clone(), shift.clone())


class Scaled(NamedTuple):
    """A stored ball behind a batch norm: a ReLU that comes next is computed with it at once.

    `sums` are those of `fused.SUMS`, if somebody observed that ReLU.
    """

    stored: Stored
    mean: Tensor
    inverse: Tensor
    factor: Tensor
    shift: Tensor
    sums: Tensor | None = None

    def like(self) -> Tensor:
        """A tensor of the ball's shape and device."""
        return self.stored.center

    def ball(self) -> tuple[Tensor, Tensor]:
        """Center and radius in front of the ReLU."""
        center, radius = self.stored._replace(bias=None).ball()
        shape = (-1, *[1] * (center.ndim - 2))
        with torch.set_grad_enabled(self.stored.graded):
            scale = (self.inverse * self.factor).view(shape)
            center = (center - self.mean.view(shape)) * scale + self.shift.view(shape)
            return center, radius * scale.abs()

    def relu(self, *, observe: bool) -> tuple[Stored, Scaled]:
        """The ball behind the ReLU, and this one, with its sums if somebody will `observe` it."""
        center, radius = self.stored.center, self.stored.radius
        axes = (0, *range(2, center.ndim), 1)  # channels last, as CUDA likes them best
        back = (0, center.ndim - 1, *range(1, center.ndim - 1))
        shape = [center.shape[axis] for axis in axes]
        # Of a tensor that was cut out of another, not even this is contiguous by itself.
        center, radius = (
            x.permute(axes).reshape(-1, shape[-1]).contiguous() for x in (center, radius)
        )
        center, radius, sums = relu_of_scaled(
            center, radius, self.mean, self.inverse, self.factor, self.shift, observe=observe
        )
        center, radius = (x.view(shape).permute(back) for x in (center, radius))
        return self.stored._replace(center=center, radius=radius, bias=None), self._replace(
            sums=sums
        )


Pending = Convolution | Chain | Stored | Scaled


def ball_in_place(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """(lower + upper) / 2 and (upper - lower) / 2 in the memory of the two, without gradient."""
    center = upper.lerp_(lower, 0.5)
    return center, torch.sub(center, lower, out=lower)
