"""Standard training: the clean loss alone (Eq. 10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from acert.methods.base import Method, Step

__all__ = ["Standard"]


@final
@dataclass(frozen=True, kw_only=True)
class Standard(Method):
    """No bounds at all; kappa is 1 by definition."""

    kappa: float = 1.0

    @property
    def uses_bounds(self) -> bool:
        """False."""
        return False

    def worst_case_logits(self, step: Step) -> Tensor:
        """The clean logits."""
        return step.logits
