"""CROWN-IBP (Zhang et al., 2020): from linear relaxation to intervals with the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from acert.bounds.crown import crown_differences
from acert.methods.base import Method, Step

__all__ = ["CrownIBP"]


@final
@dataclass(frozen=True, kw_only=True)
class CrownIBP(Method):
    """CROWN-IBP: every sample trains at the cap, on beta CROWN + (1 - beta) IBP.

    beta falls from 1 to 0 as the cap rises, so that it ends as FastIBP.
    """

    @property
    def uses_bounds(self) -> bool:
        """True."""
        return True

    @property
    def settles(self) -> bool:
        """True: beta is 0 from then on."""
        return True

    def worst_case_logits(self, step: Step) -> Tensor:
        """Mixed upper bounds of z_i - z_y at the cap."""
        cap = step.cap.expand(len(step.images))
        if step.settled:
            return step.differences(step.bounds(step.images, cap))
        output = step.bounds(step.images, cap, record=True)
        beta = 1 - step.progress
        crown = crown_differences(output, step.labels)
        # CROWN bounds differences, so what is mixed with it must be differences as well.
        return beta * crown + (1 - beta) * step.differences(output)
