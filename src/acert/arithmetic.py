"""In which arithmetic radii are proven, and in which they are guessed before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from acert.bounds.rounding import OWN_UNIT, ROUNDINGS, Rounding
from acert.errors import InvalidInput
from acert.precision import float32_products

__all__ = [
    "ARITHMETICS", "QUICK_ERROR", "check_float64", "ieee_arithmetic", "quick_arithmetic",
]  # fmt: skip

ARITHMETICS: dict[str, Rounding | None] = {**ROUNDINGS, "nearest": None}

# Relative error of a radius found in TF32. In float32 more digits could be had, at a higher price
# than that of the secant which comes next.
QUICK_ERROR = 1e-3

_SHARE = 2**15  # elements that PyTorch gives to one thread before it asks the next


def check_float64() -> None:
    """Refuses to prove anything where float64 itself was changed, in any of PyTorch's threads.

    Float32 weights below 1e-38 would become 0 on their way to float64, and directed rounding errs
    twice as much as our bounds allow for.
    """
    # Enough numbers for a share in every thread. Each keeps the modes of the one that started it.
    many = _SHARE * (torch.get_num_threads() - 1) + 1
    least = torch.full((many,), 2.0**-149, dtype=torch.float32, device="cpu")
    if not bool(least.double().all()):
        raise InvalidInput(
            "`torch.set_flush_denormal` must be False for a proof, and must have been when "
            "PyTorch's threads were started; got True"
        )
    half, one = OWN_UNIT / 2, torch.ones(many, dtype=torch.float64, device="cpu")
    if not bool((one + half == 1).all()) or not bool((one - half / 2 == 1).all()):
        raise InvalidInput("float64 must be rounded to nearest for a proof; got directed rounding")


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
