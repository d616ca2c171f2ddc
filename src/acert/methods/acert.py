"""ACERT: interval bounds at each sample's own certified radius (Eq. 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from acert.bounds.margin import margin
from acert.methods.base import Method, Step
from acert.rootfind import Brent, Solver

__all__ = ["Acert"]


@final
@dataclass(frozen=True, kw_only=True)
class Acert(Method):
    """ACERT (Eq. 9): each sample trains at its own certified radius, up to the radius cap.

    That is the root of the certified margin, as far as the steps of `solver` find it. The root's
    estimate is used, not the bracket's certified end: after two steps that end is still a fifth
    short of the root, and training there gives smaller radii.

    >>> Acert(kappa=0.25, solver=Brent(max_steps=4)).solver.max_steps
    4
    """

    solver: Solver = Brent(xtol=1e-6, rtol=1e-4, max_steps=2)  # noqa: RUF009  a frozen value

    @property
    def uses_bounds(self) -> bool:
        """True."""
        return True

    def worst_case_logits(self, step: Step) -> Tensor:
        """Worst-case logits at each sample's radius."""
        return step.worst_case(step.bounds(step.images, self.radius(step)))

    def radius(self, step: Step) -> Tensor:
        """E_cert(x) (Def. 3.1) with the step's cap as its largest value, detached."""
        at_zero = margin(step.logits.detach(), step.labels)  # free: the box is the image itself
        zero = torch.zeros_like(at_zero)
        root = self.solver.solve(
            step.margin, zero, step.cap.expand_as(zero), f_lower=at_zero, fixed_steps=True
        )
        return root.estimate
