"""The rules, one short function an operation; importing this package fills the table."""

from acert.bounds.rules import (
    affine,
    arithmetic,
    attention,
    elementwise,
    lengths,
    maxima,
    normalization,
    products,
    recurrent,
    resampling,
    shape,
)

__all__ = [
    "affine", "arithmetic", "attention", "elementwise", "lengths", "maxima", "normalization",
    "products", "recurrent", "resampling", "shape",
]  # fmt: skip
