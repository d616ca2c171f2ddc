"""Which float32 numbers lie in a box, exactly: nothing here is off by a rounding.

A certificate speaks of all points up to its radius, so whether a point lies inside must not
depend on how a difference of two float32 numbers was rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acert.bounds.checks import Domain, domain_ends

__all__ = ["distance", "float32_below", "float32_box"]


def distance(points: Tensor, images: Tensor) -> Tensor:
    """|x' - x| of float32 numbers in float64, element by element: exact, or rounded up."""
    point, image = points.double(), images.double()
    difference = point - image
    # What the subtraction lost, exactly (Knuth's two-sum).
    back = difference - point
    lost = (point - (difference - back)) - (image + back)
    size = difference.abs()
    further = torch.nextafter(size, torch.full_like(size, torch.inf))
    return torch.where(lost * difference.sign() > 0, further, size)


def float32_box(images: Tensor, radius: Tensor, domain: Domain) -> tuple[Tensor, Tensor]:
    """The least and largest float32 numbers that lie in the exact box and in the domain."""
    radius = radius.reshape(-1, *[1] * (images.ndim - 1))
    ends = []
    for sign in (-1.0, 1.0):
        end = (images.double() + sign * radius).float()
        outside = distance(end, images) > radius
        ends.append(torch.where(outside, torch.nextafter(end, images), end))
    lower, upper = ends
    if domain is not None:
        low, high = domain_ends(domain, images.double())
        # An image belongs to its own box, even beyond an end that float32 cannot hold.
        lower = torch.maximum(lower, torch.minimum(-float32_below(-low), images))
        upper = torch.minimum(upper, torch.maximum(float32_below(high), images))
    return lower, upper


def float32_below(values: Tensor) -> Tensor:
    """The largest float32 numbers that are not above the float64 values."""
    nearest = values.float()
    below = torch.nextafter(nearest, torch.full_like(nearest, -torch.inf))
    return torch.where(nearest.double() > values, below, nearest)
