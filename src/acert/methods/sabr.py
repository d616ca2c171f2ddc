"""SABR (Mueller et al., 2023): interval bounds on a small box around an adversarial point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from acert.bounds.checks import Domain
from acert.bounds.margin import box
from acert.errors import InvalidInput
from acert.methods.base import Attack, AttackLoss, Method, Step, attack_loss, climbed

__all__ = ["Sabr"]


@final
@dataclass(frozen=True, kw_only=True)
class Sabr(Method, Attack):
    """SABR: trains on a small box around an attacked point, inside the box of the cap.

    The small box has the share `box_share` (lambda) of the cap as its radius. Its center is
    found by PGD from a random start: `attack_steps` signed steps of half the cap, a tenth of that
    after the first four and a hundredth after the first seven.

    The small box lies inside the large one before both are cut to the domain. With `cut_first`, as
    in the code of its authors, the large one is cut before. Where less is left of it than the small
    box is wide, as at an end of the domain with a `box_share` above 0.5, that one covers all of it,
    and at the upper end up to (2 `box_share` - 1) of the cap more.
    """

    box_share: float = 0.7
    attack_steps: int = 8
    cut_first: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.box_share <= 1:
            raise InvalidInput(f"`box_share` must be in (0, 1]; got {self.box_share}")
        if self.attack_steps < 0:
            raise InvalidInput(f"`attack_steps` must be at least 0; got {self.attack_steps}")

    @property
    def uses_bounds(self) -> bool:
        """True."""
        return True

    def worst_case_logits(self, step: Step) -> Tensor:
        """Worst-case logits on the small box, which lies inside the large one."""
        radius, reach = self.box_share * step.cap, (1 - self.box_share) * step.cap
        center = step.images + (step.anchors - step.images).clamp(-reach, reach)
        if self.cut_first:
            lower, upper = box(step.images, step.cap.expand(len(center)), step.domain).ends()
            # In this order: the upper end has the last word where the small box is the wider one.
            center = torch.minimum(torch.maximum(step.anchors, lower + radius), upper - radius)
        return step.worst_case(step.bounds(center, radius.expand(len(center))))

    def anchors(
        self, model: nn.Module, images: Tensor, labels: Tensor, cap: Tensor, noise: Tensor,
        domain: Domain, *, loss: AttackLoss = attack_loss, form: str = "float32",
    ) -> Tensor:  # fmt: skip
        """Adversarial points of the box, by PGD with the running batch statistics."""
        lower, upper = box(images, cap.expand(len(images)), domain).ends()
        points = (images + cap * noise).clamp(lower, upper)
        turns = range(self.attack_steps)
        sizes = [cap * 0.5 * (1.0 if turn < 4 else 0.1 if turn < 7 else 0.01) for turn in turns]
        return climbed(model, points, labels, (lower, upper), sizes, loss=loss, form=form)
