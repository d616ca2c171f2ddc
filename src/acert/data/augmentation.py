"""Random crop and flip of a batch, on its device: gathers only, no host synchronisation.

What is random comes in as tensors, so that the gather itself is a pure function and can lie
inside a compiled or captured step.
"""

from dataclasses import dataclass

import torch

from acert.errors import InvalidInput

__all__ = ["Augmentation", "Draws", "augment"]


@dataclass(frozen=True, eq=False)
class Draws:
    """The random part: crop offsets (B, 2), row then column, and flips (B,)."""

    offsets: torch.Tensor
    flips: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """A crop of the image's own size after padding its edges, and a horizontal flip or not."""

    padding: int
    flip: bool

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise InvalidInput(f"`padding` must be >= 0; got {self.padding}")

    def draw(self, count: int, *, generator: torch.Generator) -> Draws:
        """Draws for a batch of `count`, on the generator's device: every crop equally likely."""
        device = generator.device
        sides = 2 * self.padding + 1
        offsets = torch.randint(sides, (count, 2), generator=generator, device=device)
        flips = torch.randint(2, (count,), generator=generator, device=device)
        # Drawn even where it is not used: the crops of a seed do not depend on `flip`.
        return Draws(offsets, flips.bool() if self.flip else torch.zeros_like(flips).bool())


def augment(images: torch.Tensor, draws: Draws, *, padding: int) -> torch.Tensor:
    """Images (B, C, H, W) cropped at the drawn offsets and flipped where drawn; any dtype.

    Offsets run from 0 to 2 * padding, and `padding` leaves the image in place. Beyond the edge
    the edge's own pixels are repeated.
    """
    if images.dim() != 4:
        raise InvalidInput(f"`images` must have shape (B, C, H, W); got {tuple(images.shape)}")
    count, channels, height, width = images.shape
    device = images.device
    row = torch.arange(height, device=device)
    column = torch.arange(width, device=device).expand(count, width)
    column = torch.where(draws.flips[:, None], width - 1 - column, column)
    # A clamped index is the edge padding: no padded copy is made.
    rows = (row + draws.offsets[:, :1] - padding).clamp(0, height - 1)
    columns = (column + draws.offsets[:, 1:] - padding).clamp(0, width - 1)
    return images[
        torch.arange(count, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[:, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
