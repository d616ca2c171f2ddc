"""The loss of one training step (Eq. 11): standard, robust, and what regularises the warm-up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acert.bounds import clean_pass
from acert.bounds.checks import Domain
from acert.methods import Method, Step
from acert.precision import FLOAT32, Precision, products_in
from acert.processes import ALONE, Part, Processes
from acert.regularizers import l1_norm, relu_balance, tightness

__all__ = ["TERMS", "Objective", "Phase", "Scalars"]

# What one step reports, in this order.
TERMS = ("loss", "standard", "robust", "regularization", "correct")

# While regularisers are on, no box is a point: ratios of radii need radii.
_LEAST_RADIUS = 1e-6


class Scalars:
    """Positions of the numbers that change from step to step inside one small tensor."""

    NAMES = ("rate", "cap", "progress", "standard", "robust", "regularization", "momentum")
    RATE, CAP, PROGRESS, STANDARD, ROBUST, REGULARIZATION, MOMENTUM = range(7)


class Phase(NamedTuple):
    """What a step does that other steps of its run do not; each phase is compiled on its own."""

    regularize: bool
    settled: bool = False


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is minimised: the method's loss with its regularisers and L1 weight decay."""

    method: Method
    l1: float = 0.0
    domain: Domain = (0.0, 1.0)
    elide: bool = True
    precision: Precision = FLOAT32
    # Whether bound passes compute batch norm and ReLU by one kernel (`acert.bounds.fused`).
    fuse: bool = False
    processes: Processes = ALONE

    def __call__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        anchors: Tensor,
        scalars: Tensor,
        *,
        regularize: bool,
        settled: bool = False,
        share: float = 1.0,
    ) -> Tensor:
        """The terms of one batch, in the order of `TERMS`; the first one carries the gradient.

        The weights of standard and robust loss, kappa and 1 - kappa (Eq. 11), come in
        `scalars`: before the radius schedule starts they are 1 and 0. `settled` says that the
        warm-up is over, to methods that have something to leave out then. With several processes
        the images are `share` of the batch, and the terms of all processes add up to those of
        the whole.
        """
        part = Part(self.processes, share) if self.processes.joined else None
        with products_in(self.precision.clean, images.device):
            logits, statistics = clean_pass(model, images, part=part, quick=self.precision.folds)
        logits = logits.to(images.dtype)
        standard = F.cross_entropy(logits, labels)
        correct = (logits.argmax(1) == labels).to(logits.dtype).mean()
        if part is not None:
            standard, correct = share * standard, share * correct
        robust = regularization = torch.zeros_like(standard)
        loss = scalars[Scalars.STANDARD] * standard
        if self.method.uses_bounds and (self.method.kappa < 1 or regularize):
            step = Step(
                model=model,
                images=images,
                labels=labels,
                logits=logits,
                statistics=statistics,
                cap=scalars[Scalars.CAP],
                progress=scalars[Scalars.PROGRESS],
                least_radius=_LEAST_RADIUS if regularize else 0.0,
                anchors=anchors,
                domain=self.domain,
                elide=self.elide,
                observe=regularize,
                clean_format=self.precision.clean,
                root_format=self.precision.root,
                gradient_format=self.precision.gradient,
                fold=self.precision.folds,
                fuse=self.fuse,
                settled=settled,
                part=part,
            )
            robust = self.method.robust_loss(step)
            if robust.requires_grad and _is_zero(scalars[Scalars.STANDARD]):
                loss = loss.detach()  # a weight of 0, as in most recipes: no gradient to compute
            loss = loss + scalars[Scalars.ROBUST] * robust
            seen = None if step.output is None else step.output.bound_pass
            if regularize and seen is not None and seen.relu_inputs:  # both speak of ReLUs
                regularization = tightness(
                    seen.first_input, seen.relu_inputs, part=part
                ) + relu_balance(seen.relu_inputs, part=part)
                if part is not None:
                    regularization = part.once(regularization)
                loss = loss + scalars[Scalars.REGULARIZATION] * regularization
        if self.l1:
            norm = l1_norm(model)
            loss = loss + self.l1 * (norm if part is None else part.once(norm))
        # Detached: a stack hands every part of it a gradient, if only one of zeros.
        others = (standard, robust, regularization, correct)
        return torch.stack((loss, *(term.detach() for term in others)))


def _is_zero(weight: Tensor) -> bool:
    """Whether a weight is known to be 0; on CUDA a look at it would wait for the device."""
    return weight.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(weight)
