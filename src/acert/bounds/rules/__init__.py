"""The rules, one short function an operation; importing this package fills the table."""

from acert.bounds.rules import (
    affine,
    arithmetic,
    attention,
    curves,
    elementwise,
    lengths,
    log_probabilities,
    masks,
    maxima,
    normalization,
    order,
    powers,
    products,
    recurrent,
    resampling,
    shape,
    steps,
    sums,
)

__all__ = [
    "affine", "arithmetic", "attention", "curves", "elementwise", "lengths", "log_probabilities",
    "masks", "maxima", "normalization", "order", "powers", "products", "recurrent", "resampling",
    "shape", "steps", "sums",
]  # fmt: skip
