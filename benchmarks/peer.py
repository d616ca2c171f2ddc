"""The same training steps and bound passes written on top of auto_LiRPA, where it is installed.

Every `compute_bounds` gets a fresh `BoundedTensor`, or it would answer from its cache. Margins are
elided, through its specification matrix. A step counts only if it leaves a gradient that is not
zero in every parameter.
"""

from __future__ import annotations

import copy
import importlib
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acert.bounds.margin import margin
from acert.methods import Acert
from acert.training import Batch, Trainer


def available(where: str) -> bool:
    """Whether auto_LiRPA can be imported: "off", "auto", or the folder that holds the package."""
    if where == "off":
        return False
    if where != "auto" and where not in sys.path:
        if not (Path(where) / "auto_LiRPA").is_dir():
            raise SystemExit(f"`--peer` must be auto, off or a folder with auto_LiRPA; got {where}")
        sys.path.insert(0, where)
    try:
        _imported()
    except ImportError as error:
        print(f"no column for auto_LiRPA: {error}", file=sys.stderr)
        return False
    return True


def _imported() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = importlib.import_module("auto_LiRPA")
    logging.getLogger("auto_LiRPA").setLevel(logging.ERROR)
    return library


class PeerBounds:
    """auto_LiRPA's bounds of a copy of a model, in the model's own mode."""

    def __init__(self, model: nn.Module, images: Tensor, classes: int, **options: str) -> None:
        self.library = _imported()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.bounded = self.library.BoundedModule(
                copy.deepcopy(model), images[:2], device=images.device, bound_opts=options
            )
        self.bounded.train(model.training)
        self.rows = torch.eye(classes, device=images.device)

    def upper_differences(
        self, images: Tensor, labels: Tensor, radius: Tensor, *, method: str = "IBP"
    ) -> Tensor:
        """Upper bounds of z_i - z_y for every class i but the label."""
        wide = radius.reshape(-1, *[1] * (images.ndim - 1))
        norm = self.library.PerturbationLpNorm(
            x_L=(images - wide).clamp(min=0), x_U=(images + wide).clamp(max=1)
        )
        classes = len(self.rows)
        others = torch.arange(classes, device=labels.device).expand(len(labels), classes)
        others = others[others != labels.unsqueeze(1)].view(len(labels), classes - 1)
        specification = self.rows[labels].unsqueeze(1) - self.rows[others]
        lower: Tensor
        lower, _ = self.bounded.compute_bounds(
            x=(self.library.BoundedTensor(images, norm),),
            C=specification,
            method=method,
            bound_upper=False,
        )
        return -lower


class PeerStep:
    """FastIBP's step, or ACERT's with as many root steps as the trainer's, without regularisers.

    Clean forward, for ACERT a bound pass at the cap and the root steps without gradient, the bound
    pass with gradient, backward, clipping and Adam; batches are made by the trainer.
    """

    def __init__(self, trainer: Trainer, batch: Batch, cap: float) -> None:
        self.trainer, self.batch, self.cap = trainer, batch, cap
        images = trainer.images(batch)
        classes = trainer.model(images[:2]).shape[1]
        self.bounds = PeerBounds(trainer.model, images, classes)
        self.parameters = list(self.bounds.bounded.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=1e-6, fused=True)
        self()
        without = [
            name
            for name, parameter in self.bounds.bounded.named_parameters()
            if parameter.grad is None or not bool(parameter.grad.any())
        ]
        if without:
            raise RuntimeError(f"auto_LiRPA's step leaves no gradient in {', '.join(without)}")

    def __call__(self) -> Tensor:
        trainer = self.trainer
        images, labels = trainer.images(self.batch), trainer.train.labels[self.batch.index]
        logits = self.bounds.bounded(images)
        method = trainer.settings.method
        radius = torch.full(images.shape[:1], self.cap, device=images.device)
        if isinstance(method, Acert):
            with torch.no_grad():
                radius = method.solver.solve(
                    lambda r: self.bounds.upper_differences(images, labels, r).amax(1),
                    torch.zeros_like(radius),
                    radius,
                    f_lower=margin(logits, labels),
                    fixed_steps=True,
                ).estimate
        differences = self.bounds.upper_differences(images, labels, radius)
        # The margin of the label itself is 0.
        loss = torch.nn.functional.pad(differences, (1, 0)).logsumexp(1).mean()
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters, trainer.settings.clip_norm)
        self.optimizer.step()
        return loss.detach()
