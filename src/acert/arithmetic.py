"""In which arithmetic radii are proven, and in which they are guessed before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from acert.bounds.rounding import ROUNDINGS, Rounding
from acert.precision import float32_products

__all__ = ["ARITHMETICS", "QUICK_ERROR", "ieee_arithmetic", "quick_arithmetic"]

ARITHMETICS: dict[str, Rounding | None] = {**ROUNDINGS, "nearest": None}

# Relative error of a radius found in TF32. In float32 more digits could be had, at a higher price
# than that of the secant which comes next.
QUICK_ERROR = 1e-3


@contextmanager
def ieee_arithmetic(device: torch.device) -> Iterator[None]:
    """Plain sums of products: no autocast, no TF32, no convolution algorithm but im2col.

    cuDNN's own algorithms (Winograd, FFT) break the error bound, so it is off. The caller's
    settings come back afterwards.
    """
    with float32_products("ieee", cudnn=False), torch.autocast(device.type, enabled=False):
        yield


def quick_arithmetic(form: str) -> AbstractContextManager[None]:
    """CuDNN on again inside `ieee_arithmetic`, in TF32 or not: for what is proven afterwards."""
    return float32_products(form, cudnn=True)
