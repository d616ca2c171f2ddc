"""Normalisation as a model's first layer, so that radii stay in pixel units."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from acert.errors import InvalidInput

__all__ = ["Normalize"]


@final
class Normalize(nn.Module):
    """`(images - mean) / std` for each channel of (B, C, ...), or for each feature of (B, F).

    `mean` and `std` are numbers, or hold one entry a channel. They are buffers: they move and are
    saved with the model, and no optimiser touches them.

    >>> Normalize(mean=0.5, std=0.25)(torch.tensor([[0.0, 0.5, 1.0]]))
    tensor([[-2.,  0.,  2.]])
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, mean: float | Sequence[float] | Tensor, std: float | Sequence[float] | Tensor
    ) -> None:
        super().__init__()
        self.register_buffer("mean", _per_channel("mean", mean))
        self.register_buffer("std", _per_channel("std", std))
        if not self.std.is_meta and not bool((self.std > 0).all()):
            raise InvalidInput(f"`std` must be > 0; got {self.std.tolist()}")
        sizes = {self.mean.numel(), self.std.numel()} - {1}
        if len(sizes) > 1:
            raise InvalidInput(
                "`mean` and `std` must have the same number of channels; "
                f"got {self.mean.numel()} and {self.std.numel()}"
            )

    @property
    def channels(self) -> int:
        """Number of channels that `mean` and `std` tell apart; 1 fits any input."""
        return max(self.mean.numel(), self.std.numel())

    def forward(self, images: Tensor) -> Tensor:
        """Normalised `images`, in their shape."""
        # Without this check, one channel would broadcast to three in silence.
        if self.channels not in (1, images.shape[1]):
            raise InvalidInput(
                f"`images` must have {self.channels} channels in dimension 1; "
                f"got shape {tuple(images.shape)}"
            )
        trailing = [1] * (images.dim() - 2)
        return (images - self.mean.view(-1, *trailing)) / self.std.view(-1, *trailing)

    def extra_repr(self) -> str:
        """Mean and standard deviation, to be read in `print(model)`."""
        return f"mean={self.mean.tolist()}, std={self.std.tolist()}"


def _per_channel(name: str, values: float | Sequence[float] | Tensor) -> Tensor:
    """`values` as a new tensor (C,) of the default dtype, the one that new layers have too."""
    try:
        tensor = torch.as_tensor(values).detach().to(torch.get_default_dtype(), copy=True)
    # torch has no one error for what is no number.
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"`{name}` must be a number or hold one entry a channel; got a "
            f"{type(values).__name__} ({error})"
        ) from error
    if tensor.dim() > 1 or tensor.numel() == 0:
        raise InvalidInput(
            f"`{name}` must be a number or hold one entry a channel; got shape "
            f"{tuple(tensor.shape)}"
        )
    # On the meta device there are shapes alone.
    if not tensor.is_meta and not bool(tensor.isfinite().all()):
        raise InvalidInput(f"`{name}` must be finite; got {tensor.tolist()}")
    return tensor.reshape(-1)
