"""The check that bounds speak of the network that answers: the same for tensors and intervals."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from acert.bounds.bound_pass import BoundPass, Kept
from acert.bounds.checks import check_logits, check_unwrapped
from acert.bounds.margin import box
from acert.bounds.propagation import propagate
from acert.bounds.rounding import REAL, Rounding
from acert.bounds.substitution import called_with, copied_buffers, own_buffers
from acert.errors import InvalidInput, UnsupportedOperation

__all__ = ["COMPARED", "check_same_network"]

COMPARED = 4  # samples that are enough to tell


@torch.no_grad()
def check_same_network(
    model: nn.Module, images: Tensor, *, kept: dict[int, Kept] | None = None
) -> None:
    """Refuses a model that is another one for tensors than for intervals, or in another batch.

    What it computes of an image, alone or among others, must lie inside the rounding-safe bounds
    of that image, and bounds of it alone and among others must have numbers in common. A forward
    that asks for the type of its input, draws at random or mixes the samples of a batch fails.
    `kept` is that of rounding-safe passes to come: see `BoundPass`.
    """
    check_unwrapped(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not bool(tensor.isfinite().all()):
            raise InvalidInput(f"`model` must hold finite numbers; got NaN or infinity in `{name}`")
    held = [tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()]
    images = images.to(held[0] if held else images.dtype)
    # The first alone would not tell a model that compares each sample with the first.
    count = len(images)
    chosen = [slice(*part) for part in sorted({(0, 1), (0, count), (count - 1, count)})]
    kind = torch.finfo(images.dtype)
    own = Rounding("its own", kind.eps / 2, kind.tiny, kind.max / 2)
    lower, upper = _ends(model, images, own, kept)
    for some, logits in zip(chosen, _answers(model, images, chosen), strict=True):
        check_logits(logits, None, len(lower[some]))  # `squeeze()` drops the axis of a batch of one
        # Bounds may be NaN, where nothing is known; what has bounds is no NaN itself.
        unknown = lower[some].isnan() | upper[some].isnan()
        inside = (logits >= lower[some]) & (logits <= upper[some])
        if not bool((inside | unknown).all()):
            raise UnsupportedOperation(_ANOTHER + _hint(model))
    # Half precision has no finite bounds of long sums, and those of float32 hide small changes.
    if count > 1:
        lower, upper = _ends(model, images, REAL, kept)
        for some in (chosen[0], chosen[-1]):
            low, high = _ends(model, images[some], REAL, kept)
            if bool(((low > upper[some]) | (high < lower[some])).any()):
                raise UnsupportedOperation(_ANOTHER)


_ANOTHER = (
    "the model computes something else of images than of intervals around them, or of one image "
    "than of several: its forward must not ask for the type of its input, draw at random or mix "
    "the samples of a batch; or a registered rule is wrong"
)


def _hint(model: nn.Module) -> str:
    """What to try where PyTorch itself computes something else without gradients."""
    fused = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
    if not any(isinstance(module, fused) for module in model.modules()):
        return ""
    return (
        "; or PyTorch's fast path of transformers is at work, which has another GELU on CUDA and "
        "makes padding 0: torch.backends.mha.set_fastpath_enabled(False) turns it off"
    )


def _ends(
    model: nn.Module, images: Tensor, rounding: Rounding, kept: dict[int, Kept] | None
) -> tuple[Tensor, Tensor]:
    """Rounding-safe bounds of the logits of the images themselves."""
    zero = torch.zeros(len(images), dtype=torch.float64, device=images.device)
    start = box(images.double(), zero, None, rounding=rounding)
    output = propagate(model, start.within(BoundPass(rounding, kept=kept)))
    check_logits(output, None, len(images))
    return output.ends()


def _answers(model: nn.Module, images: Tensor, chosen: list[slice]) -> list[Tensor]:
    """What the model itself computes of the chosen images, call after call; nothing is changed.

    With its own buffers, not with copies as a bound pass has: what it writes to one of them may be
    read elsewhere, through a view that no copy has.
    """
    buffers, before = own_buffers(model), copied_buffers(model)
    try:
        return [called_with(model, buffers, images[some]) for some in chosen]
    finally:
        for name, buffer in buffers.items():
            if not torch.equal(buffer, before[name]):
                buffer.copy_(before[name])
