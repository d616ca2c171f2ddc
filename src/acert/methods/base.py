"""What a training method is: from one batch to its robust loss."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acert.bounds import Interval, Statistics, clean_pass, propagate
from acert.bounds.bound_pass import BoundPass
from acert.bounds.checks import Domain
from acert.bounds.margin import box, ends_around, margin, plain_worst_case, upper_differences
from acert.bounds.pending import Chain, Points
from acert.bounds.propagation import evaluation_logits
from acert.errors import InvalidInput
from acert.fields import check_fields
from acert.precision import products_in
from acert.processes import Part

__all__ = ["Attack", "AttackLoss", "Method", "Step", "attack_loss", "climbed"]


# Keeps small gradients of the attack inside the range of float16; only their signs are used.
_ATTACK_SCALE = 64.0


def attack_loss(model: nn.Module, points: Tensor, labels: Tensor, form: str = "float32") -> Tensor:
    """What an attack climbs: wrong logits (their log-sum-exp) minus the right one, summed.

    In evaluation, weights held fixed. The gradient has the signs of cross entropy's, sample by
    sample, but does not vanish where the prediction is certain.
    """
    with products_in(form, points.device):
        logits = evaluation_logits(model, points, fixed=True)
    logits = logits.to(points.dtype)
    wrong = logits.scatter(1, labels.unsqueeze(1), -math.inf).logsumexp(1)
    right = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    return _ATTACK_SCALE * (wrong - right).sum()


@dataclass(eq=False)
class Step:
    """One batch on its way to a loss: all that a method may look at.

    `cap` and `progress` (cap / max_radius) are 0-d tensors, so that a captured step reads
    them anew; `least_radius` is a number. `anchors` are what `Method.anchors` returned.
    """

    model: nn.Module
    images: Tensor
    labels: Tensor
    logits: Tensor
    statistics: Statistics
    cap: Tensor
    progress: Tensor
    least_radius: float
    anchors: Tensor
    domain: Domain
    elide: bool
    observe: bool
    # Names, because torch.compile takes no other objects as defaults.
    clean_format: str = "float32"
    root_format: str = "float32"
    gradient_format: str = "float32"
    fold: bool = False
    fuse: bool = False
    settled: bool = False  # the cap has reached its largest value for good
    part: Part | None = None  # where the images are one process's part of the batch
    output: Interval | None = None
    # What the passes of an eager step have in common: where they start, and what of weights.
    points: Points | None = None
    kept: dict[Any, Any] | None = None

    def passed(self, points: Tensor) -> Tensor:
        """Logits of one more clean pass, whose batch statistics all later bounds take."""
        with products_in(self.clean_format, points.device):
            logits, self.statistics = clean_pass(
                self.model, points, part=self.part, quick=self.fold
            )
        return logits.to(points.dtype)

    def bounds(self, images: Tensor, radius: Tensor, *, record: bool = False) -> Interval:
        """Output bounds with the last clean pass's statistics; kept for the regularisers."""
        # CROWN walks back through the record in float32.
        form = "float32" if record else self.gradient_format
        observed = BoundPass(
            statistics=self.statistics, record=record, observe=self.observe,
            fold=self.fold and not record, fuse=self.fuse and not record,
        )  # fmt: skip
        start = self._box(images, radius.clamp(min=self.least_radius), observed)
        with products_in(form, images.device):
            self.output = propagate(self.model, start)
        return self.output

    def worst_case(self, output: Interval) -> Tensor:
        """Worst-case logits of the output bounds (Eq. 6), elided if the run asks for that."""
        if self.elide:
            return upper_differences(output, self.labels)
        return plain_worst_case(output, self.labels)

    def differences(self, output: Interval) -> Tensor:
        """Upper bounds of z_i - z_y by intervals, 0 at the label, elided or not."""
        worst_case = self.worst_case(output)
        if self.elide:
            return worst_case
        return worst_case - worst_case.gather(1, self.labels.unsqueeze(1))

    def loss(self, logits: Tensor) -> Tensor:
        """Their mean cross entropy; with several processes, those of all add up to the batch's."""
        loss = F.cross_entropy(logits, self.labels)
        return loss if self.part is None else self.part.share * loss

    def margin(self, radius: Tensor) -> Tensor:
        """The certified margin at each sample's radius (Eq. 3), without gradient."""
        with torch.no_grad():
            if self.fold and self.kept is None and not torch.compiler.is_compiling():
                self.kept = {}
            plain = BoundPass(
                statistics=self.statistics, fold=self.fold, fuse=self.fuse, kept=self.kept
            )
            start = self._box(self.images, radius, plain)
            with products_in(self.root_format, self.images.device):
                output = propagate(self.model, start)
            return margin(self.worst_case(output), self.labels)

    def _box(self, images: Tensor, radius: Tensor, bound_pass: BoundPass) -> Interval:
        graded = images.requires_grad or radius.requires_grad
        # On CUDA, where what is kept would be compared by numbers, a step waits for none.
        shared = bound_pass.fold and not (images.is_cuda or torch.compiler.is_compiling())
        if graded or not shared:
            return box(images, radius, self.domain).within(bound_pass)
        if self.points is None or self.points.images is not images:
            domain = None if self.domain is None else ends_around(images, self.domain)
            self.points = Points(images, domain)
        return Interval.of(Chain(self.points, radius)).within(bound_pass)


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A certified training method; `kappa` is the share of standard loss (Eq. 11)."""

    kappa: float = 0.0

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))
        if not 0 <= self.kappa <= 1:
            raise InvalidInput(f"`kappa` must be in [0, 1]; got {self.kappa}")

    @property
    @abstractmethod
    def uses_bounds(self) -> bool:
        """Whether the method looks at bounds at all."""

    @property
    def settles(self) -> bool:
        """Whether a step is another one, cheaper, once the warm-up is over (`Step.settled`)."""
        return False

    @abstractmethod
    def worst_case_logits(self, step: Step) -> Tensor:
        """Logits whose cross entropy is the method's robust loss, (batch, classes)."""

    def robust_loss(self, step: Step) -> Tensor:
        """L_rob (Eq. 5); with several processes, those of all add up to that of the batch."""
        return step.loss(self.worst_case_logits(step))


AttackLoss = Callable[[nn.Module, Tensor, Tensor, str], Tensor]


class Attack(ABC):
    """A method that looks for points before the bound pass, outside the loss."""

    @abstractmethod
    def anchors(
        self, model: nn.Module, images: Tensor, labels: Tensor, cap: Tensor, noise: Tensor,
        domain: Domain, *, loss: AttackLoss = attack_loss, form: str = "float32",
    ) -> Tensor:  # fmt: skip
        """One point an image; `noise` is uniform in [-1, 1] with the shape of the images.

        `loss` is `attack_loss` or what was compiled from it, `form` the format of its products.
        """


def climbed(
    model: nn.Module, points: Tensor, labels: Tensor, ends: tuple[Tensor, Tensor],
    sizes: Sequence[Tensor], *, loss: AttackLoss = attack_loss, form: str = "float32",
) -> Tensor:  # fmt: skip
    """The points after signed steps of these sizes up the loss, none of which leaves the ends."""
    for size in sizes:
        points = points.detach().requires_grad_()
        with torch.enable_grad():
            height = loss(model, points, labels, form)
        if not height.requires_grad:
            raise InvalidInput(
                "`model` must let gradients through to its input, for the method's attack; they "
                "end in a part of it that is under `torch.no_grad()` or detached"
            )
        (gradient,) = torch.autograd.grad(height, points)
        points = (points.detach() + size * gradient.sign()).clamp(*ends)
    return points.detach()
