"""The rules, one short function an operation; importing this package fills the table."""

from acert.bounds.rules import (
    affine,
    arithmetic,
    attention,
    curves,
    elementwise,
    lengths,
    log_probabilities,
    maxima,
    normalization,
    powers,
    products,
    recurrent,
    resampling,
    shape,
    steps,
)

__all__ = [
    "affine", "arithmetic", "attention", "curves", "elementwise", "lengths", "log_probabilities",
    "maxima", "normalization", "powers", "products", "recurrent", "resampling", "shape", "steps",
]  # fmt: skip
