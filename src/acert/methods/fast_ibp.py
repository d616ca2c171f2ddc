"""FastIBP (Shi et al., 2021): interval bounds at one radius for all (Eq. 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from acert.methods.base import Method, Step

__all__ = ["FastIBP"]


@final
@dataclass(frozen=True, kw_only=True)
class FastIBP(Method):
    """FastIBP (Eq. 5): every sample trains at the radius cap, which rises to `max_radius`."""

    @property
    def uses_bounds(self) -> bool:
        """True."""
        return True

    def worst_case_logits(self, step: Step) -> Tensor:
        """Worst-case logits at the cap."""
        radius = step.cap.expand(len(step.images))
        return step.worst_case(step.bounds(step.images, radius))
