"""Operations seen backward, one short function each, under the operation's own arguments.

Each says how the coefficients A of an operation's result become coefficients of its arguments.
Affine operations cost the bound nothing but rounding. Importing this package fills the table.
"""

from acert.bounds.backward import affine, arithmetic, curves, pooling, relaxation, s_shaped, shape
from acert.bounds.backward.table import BACKWARD, LOCAL, REACHING, RELAXED, SUMS, backward

__all__ = [
    "BACKWARD",
    "LOCAL",
    "REACHING",
    "RELAXED",
    "SUMS",
    "affine",
    "arithmetic",
    "backward",
    "curves",
    "pooling",
    "relaxation",
    "s_shaped",
    "shape",
]
