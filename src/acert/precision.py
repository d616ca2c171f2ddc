"""Number formats of a training step, part by part, under one name.

The formats are those of convolutions and matrix products. Weights, batch statistics, losses, the
optimiser and all that bound passes do between products are float32, but what a batch norm and ReLU
hand on to the next product may be kept in its format; a clean pass in half precision stays in it
between products, as autocast has it. Certificates never use any of this. What each
costs in quality is measured in docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["FLOAT32", "PRECISIONS", "Precision", "float32_products", "products_in"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Formats of the clean pass, of root finding and of the bound pass with its gradient.

    "tf32" and "float16" both keep 10 bits behind the leading one; "float16" needs half the
    memory and time, and a gradient that is scaled into its range. "bfloat16" keeps 7.
    """

    clean: str = "float32"
    root: str = "float32"
    gradient: str = "float32"

    @property
    def tf32(self) -> bool:
        """Whether what is left in float32 may be computed in TF32."""
        return self != FLOAT32

    @property
    def folds(self) -> bool:
        """Whether bound passes fold batch norm into weights.

        Only at full precision: clean pass and bound pass must round the same weights, or the two
        parts of the gradient that nearly cancel do not (docs/performance.md).
        """
        # Strings rather than objects: torch.compile reads this inside the step.
        return self.clean == self.root == self.gradient == "float32"

    @property
    def scales_gradients(self) -> bool:
        """Whether gradients pass through float16, whose smallest numbers are not small enough."""
        return "float16" in (self.clean, self.gradient)


FLOAT32 = Precision()
PRECISIONS = {
    "float32": FLOAT32,
    "tf32": Precision(clean="tf32", root="tf32", gradient="tf32"),
    "tf32-float16-roots": Precision(clean="tf32", root="float16", gradient="tf32"),
    "float16": Precision(clean="float16", root="float16", gradient="float16"),
    "bfloat16": Precision(clean="bfloat16", root="bfloat16", gradient="bfloat16"),
}
_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def products_in(form: str, device: torch.device) -> AbstractContextManager[object]:
    """Computes products in a half-precision format; TF32 is switched for the step as a whole."""
    if form not in _HALVES:
        return nullcontext()
    # The cache would keep a half-precision copy of a weight that the captured step has changed.
    return torch.autocast(device.type, dtype=_HALVES[form], cache_enabled=False)


@contextmanager
def float32_products(
    form: str, *, cudnn: bool | None = None, benchmark: bool | None = None
) -> Iterator[None]:
    """Products of float32 numbers on CUDA in "ieee" or "tf32"; cuDNN as told, None as it is.

    These switches are global: what the caller had comes back afterwards.
    """
    backends: Any = torch.backends
    library, matmul, conv = backends.cudnn, backends.cuda.matmul, backends.cudnn.conv
    before = library.enabled, library.benchmark, matmul.fp32_precision, conv.fp32_precision
    try:
        library.enabled = before[0] if cudnn is None else cudnn
        library.benchmark = before[1] if benchmark is None else benchmark
        matmul.fp32_precision = conv.fp32_precision = form
        yield
    finally:
        library.enabled, library.benchmark, matmul.fp32_precision, conv.fp32_precision = before
