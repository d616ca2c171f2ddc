"""CC-IBP, MTL-IBP and Exp-IBP (De Palma et al., 2024): between an attack and interval bounds."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from acert.bounds.checks import Domain
from acert.bounds.margin import box
from acert.errors import InvalidInput
from acert.methods.base import Attack, AttackLoss, Method, Step, attack_loss, climbed

__all__ = ["CcIBP", "ExpIBP", "Expressive", "MtlIBP"]

_SMALLEST = 1e-30


@dataclass(frozen=True, kw_only=True)
class Expressive(Method, Attack, ABC):
    """A loss that goes from that of an attack to that of the bounds with `bound_share` (alpha).

    The bounds are intervals at the cap; as in the code of the authors they take the batch
    statistics of the attacked points, which move the running ones like those of the images. The
    attack starts anywhere in the box and takes `attack_steps` signed steps, each of `attack_step`
    times half the box's width: one of 10 ends in a corner. `attack_reach` is the radius of its box
    in units of the cap.
    """

    bound_share: float = 0.5
    attack_steps: int = 1
    attack_step: float = 10.0
    attack_reach: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.bound_share <= 1:
            raise InvalidInput(f"`bound_share` must be in [0, 1]; got {self.bound_share}")
        if self.attack_steps < 1:
            raise InvalidInput(f"`attack_steps` must be at least 1; got {self.attack_steps}")
        for name in ("attack_step", "attack_reach"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidInput(
                    f"`{name}` must be above 0 and finite; got {getattr(self, name)}"
                )

    @property
    def uses_bounds(self) -> bool:
        """True."""
        return True

    def worst_case_logits(self, step: Step) -> Tensor:
        """Worst-case logits at the cap, with the statistics of the last clean pass."""
        return step.worst_case(step.bounds(step.images, step.cap.expand(len(step.images))))

    @abstractmethod
    def robust_loss(self, step: Step) -> Tensor:
        """The losses of the attack and of the bounds as one."""

    def anchors(
        self, model: nn.Module, images: Tensor, labels: Tensor, cap: Tensor, noise: Tensor,
        domain: Domain, *, loss: AttackLoss = attack_loss, form: str = "float32",
    ) -> Tensor:  # fmt: skip
        """Adversarial points of the attack's box, by PGD with the running batch statistics."""
        around = box(images, (self.attack_reach * cap).expand(len(images)), domain)
        points = (around.center + around.radius * noise).clamp(*around.ends())
        sizes = [self.attack_step * around.radius] * self.attack_steps
        return climbed(model, points, labels, around.ends(), sizes, loss=loss, form=form)


@final
@dataclass(frozen=True, kw_only=True)
class CcIBP(Expressive):
    """CC-IBP: cross entropy of alpha times the bounds of z_i - z_y, the rest from the attack."""

    def worst_case_logits(self, step: Step) -> Tensor:
        """The differences between the logits, those of the attack mixed with their bounds."""
        attacked = step.passed(step.anchors)
        attacked = attacked - attacked.gather(1, step.labels.unsqueeze(1))
        bounds = step.differences(step.bounds(step.images, step.cap.expand(len(step.images))))
        return self.bound_share * bounds + (1 - self.bound_share) * attacked

    def robust_loss(self, step: Step) -> Tensor:
        """The cross entropy of the mixture."""
        return step.loss(self.worst_case_logits(step))


@final
@dataclass(frozen=True, kw_only=True)
class MtlIBP(Expressive):
    """MTL-IBP: alpha times the loss of the bounds plus 1 - alpha times that of the attack."""

    def robust_loss(self, step: Step) -> Tensor:
        """The sum of both."""
        attacked = step.loss(step.passed(step.anchors))
        bounds = step.loss(self.worst_case_logits(step))
        return self.bound_share * bounds + (1 - self.bound_share) * attacked


@final
@dataclass(frozen=True, kw_only=True)
class ExpIBP(Expressive):
    """Exp-IBP: the loss of the bounds to the power of alpha, the attack's to that of 1 - alpha.

    The losses are means over a batch, as in the code of the authors; the paper writes it for one
    sample.
    """

    def robust_loss(self, step: Step) -> Tensor:
        """The product of both."""
        attacked = step.loss(step.passed(step.anchors))
        bounds = step.loss(self.worst_case_logits(step))
        if step.part is not None:
            bounds, attacked = step.part.total(bounds), step.part.total(attacked)
        # A power has no slope at 0, which a loss may come down to in float32.
        bounds, attacked = bounds.clamp(min=_SMALLEST), attacked.clamp(min=_SMALLEST)
        product = bounds**self.bound_share * attacked ** (1 - self.bound_share)
        return product if step.part is None else step.part.once(product)
