"""Standard training: the clean loss alone (Eq. 10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from acert.errors import InvalidInput
from acert.methods.base import Method, Step

__all__ = ["Standard"]


@final
@dataclass(frozen=True, kw_only=True)
class Standard(Method):
    """Standard training (Eq. 10): the clean loss, no bounds at all; kappa is 1 by definition."""

    kappa: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kappa != 1:
            raise InvalidInput(f"`kappa` must be 1 for standard training; got {self.kappa}")

    @property
    def uses_bounds(self) -> bool:
        """False."""
        return False

    def worst_case_logits(self, step: Step) -> Tensor:
        """The clean logits."""
        return step.logits
