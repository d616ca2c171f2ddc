"""The rules, one short function an operation; importing this package fills the table."""

from acert.bounds.rules import (
    affine,
    arithmetic,
    attention,
    elementwise,
    lengths,
    masks,
    maxima,
    normalization,
    order,
    products,
    resampling,
    shape,
    sums,
)

__all__ = [
    "affine", "arithmetic", "attention", "elementwise", "lengths", "masks", "maxima",
    "normalization", "order", "products", "resampling", "shape", "sums",
]  # fmt: skip
