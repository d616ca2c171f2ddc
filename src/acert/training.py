"""The training loop: every method of the paper, one screen of code.

What a step draws at random depends on the seed and the step alone, so a run that was stopped
anywhere goes on as if it had not been.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from acert.data import Augmentation, Draws, Split, augment, to_float
from acert.errors import InvalidInput, RunError
from acert.losses import TERMS, Objective, Scalars
from acert.methods import Attack, Method
from acert.schedules import LearningRate, OneCycle, RadiusSchedule, SmoothRadius, epoch_of

__all__ = ["Batch", "Settings", "Trainer"]

_ADAM_BETAS = (0.9, 0.999)
_PRECISIONS = ("float32", "tf32")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides a training run besides the model and the data."""

    method: Method
    max_radius: float
    epochs: int
    batch_size: int = 128
    learning_rate: LearningRate = field(default_factory=OneCycle)
    radius_schedule: RadiusSchedule = field(default_factory=SmoothRadius)
    regularization: float = 0.5
    l1: float = 0.0
    clip_norm: float = 10.0
    seed: int = 0
    precision: str = "float32"
    elide: bool = True
    domain: tuple[float, float] = (0.0, 1.0)
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        faults = [
            f"`{name}` must be {constraint}; got {value}"
            for name, constraint, value, fits in (
                ("max_radius", "above 0", self.max_radius, 0 < self.max_radius < math.inf),
                ("epochs", "at least 1", self.epochs, self.epochs >= 1),
                ("batch_size", "at least 2", self.batch_size, self.batch_size >= 2),
                ("regularization", "at least 0", self.regularization, self.regularization >= 0),
                ("l1", "at least 0", self.l1, self.l1 >= 0),
                ("clip_norm", "above 0", self.clip_norm, self.clip_norm > 0),
                ("precision", "float32 or tf32", self.precision, self.precision in _PRECISIONS),
            )
            if not fits
        ]
        low, high = self.domain
        if not self.max_radius <= high - low:
            faults.append(
                f"`max_radius` must be at most the width of the domain, {high - low:g}; "
                f"got {self.max_radius}"
            )
        if faults:
            raise InvalidInput("; ".join(faults))


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch as positions in the training set, with its random draws."""

    index: Tensor
    draws: Draws | None
    noise: Tensor | None


class Trainer:
    """A model on its way: `run_epoch` trains one epoch from wherever the last call stopped.

    `step` counts the batches done; together with the model's and the optimiser's tensors it is
    the whole state.
    """

    def __init__(self, model: nn.Module, train: Split, settings: Settings) -> None:
        if len(train) < settings.batch_size:
            raise InvalidInput(
                f"`batch_size` must be at most the {len(train)} training samples; "
                f"got {settings.batch_size}"
            )
        self.model = model
        self.train = train
        self.settings = settings
        self.device = train.images.device
        self.objective = Objective(
            method=settings.method,
            l1=settings.l1,
            domain=settings.domain,
            elide=settings.elide,
        )
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        rate = torch.zeros((), device=self.device) if on_cuda else 0.0
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(
            self.parameters, lr=rate, betas=_ADAM_BETAS, fused=on_cuda, capturable=on_cuda
        )
        self.step = 0
        # On CUDA the compiled loss and the captured steps; None where a model does not compile.
        self.loss: Callable[..., Tensor] = self.objective
        self.captured: dict[bool, Any] | None = {}

    # -- schedules and batches: functions of the step -----------------------------------

    @property
    def steps_per_epoch(self) -> int:
        """Batches an epoch; the last one may be smaller, but never a single sample."""
        whole, rest = divmod(len(self.train), self.settings.batch_size)
        return whole + (rest > 1)

    @property
    def total_steps(self) -> int:
        """Batches in the whole run."""
        return self.steps_per_epoch * self.settings.epochs

    @property
    def epoch(self) -> int:
        """Epoch of the next step, from 1."""
        return epoch_of(self.step, steps_per_epoch=self.steps_per_epoch)

    def regularizes(self, step: int) -> bool:
        """Whether the regularisers are on: until the radius schedule has run its course."""
        settings = self.settings
        return (
            settings.method.uses_bounds
            and settings.regularization > 0
            and epoch_of(step, steps_per_epoch=self.steps_per_epoch)
            <= settings.radius_schedule.last_epoch
        )

    def scalars(self, step: int) -> Tensor:
        """Learning rate, radius cap and loss weights of one step, in the order of `Scalars`."""
        settings = self.settings
        rate = settings.learning_rate.rate(
            step, steps_per_epoch=self.steps_per_epoch, epochs=settings.epochs
        )
        cap = settings.radius_schedule.cap(
            step, max_radius=settings.max_radius, steps_per_epoch=self.steps_per_epoch
        )
        progress = cap / settings.max_radius
        kappa = settings.method.kappa if cap > 0 else 1.0
        weight = settings.regularization * (1 - progress)
        return torch.tensor([rate, cap, progress, kappa, 1 - kappa, weight])

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on, drawn from (seed, epoch) alone."""
        count, size = len(self.train), self.settings.batch_size
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
        order = torch.randperm(count, generator=generator).to(self.device)
        draws = None
        if self.settings.augmentation is not None:
            drawn = self.settings.augmentation.draw(count, generator=generator)
            draws = Draws(drawn.offsets.to(self.device), drawn.flips.to(self.device))
        for number in range(start, self.steps_per_epoch):
            chosen = slice(number * size, (number + 1) * size)
            index = order[chosen]
            noise = None
            if isinstance(self.settings.method, Attack):
                seed = (self.settings.seed * 1_000_003 + epoch) * 1_000_003 + number
                generator = torch.Generator(self.device).manual_seed(seed)
                shape = (len(index), *self.train.images.shape[1:])
                noise = torch.rand(shape, generator=generator, device=self.device) * 2 - 1
            part = None if draws is None else Draws(draws.offsets[chosen], draws.flips[chosen])
            yield Batch(index, part, noise)

    # -- one step -----------------------------------------------------------------------

    def images(self, batch: Batch) -> Tensor:
        """The images of a batch, augmented, as the model takes them."""
        images = self.train.images[batch.index]
        if batch.draws is not None:
            assert self.settings.augmentation is not None
            images = augment(images, batch.draws, padding=self.settings.augmentation.padding)
        return to_float(images)

    def update(
        self, batch: Batch, scalars: Tensor, *, regularize: bool, compiled: bool = True
    ) -> Tensor:
        """One optimiser step; returns the terms of `TERMS`. No host synchronisation on CUDA."""
        images, labels = self.images(batch), self.train.labels[batch.index]
        anchors = images
        method = self.settings.method
        if isinstance(method, Attack):
            assert batch.noise is not None
            cap = scalars[Scalars.CAP]
            anchors = method.anchors(
                self.model, images, labels, cap, batch.noise, self.settings.domain
            )
        loss = self.loss if compiled else self.objective
        terms = loss(self.model, images, labels, anchors, scalars, regularize=regularize)
        self.optimizer.zero_grad(set_to_none=True)
        terms[0].backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip_norm)
        rate = self.optimizer.param_groups[0]["lr"]
        if isinstance(rate, Tensor):
            rate.copy_(scalars[Scalars.RATE])
        else:
            self.optimizer.param_groups[0]["lr"] = float(scalars[Scalars.RATE])
        self.optimizer.step()
        return terms.detach()

    def run_epoch(self, on_step: Callable[[int], None] | None = None) -> dict[str, float]:
        """Trains to the end of the current epoch; returns the means of the terms.

        `on_step` is called with the number of steps done. NaN or infinity in a loss stops the
        run at the end of the epoch at the latest, with the step and the term named.
        """
        epoch, start = self.epoch, self.step % self.steps_per_epoch
        self.model.train()
        began, samples = time.perf_counter(), 0
        sums = torch.zeros(len(TERMS), dtype=torch.float64, device=self.device)
        # Row 0: the first step whose term was not finite, or infinity; row 1 and on, the terms.
        failed = torch.full((len(TERMS),), math.inf, dtype=torch.float64, device=self.device)
        with self.arithmetic():
            for batch in self.batches(epoch, start):
                terms = self._step(batch).double()
                sums += terms * len(batch.index)
                here = torch.where(terms.isfinite(), math.inf, float(self.step))
                failed = torch.minimum(failed, here)
                samples += len(batch.index)
                self.step += 1
                if on_step is not None:
                    on_step(self.step)
        if bool(failed.isfinite().any()):
            first = int(failed.min())
            term = TERMS[max(int(failed.argmin()), 1) if failed[1:].min() <= first else 0]
            raise RunError(f"the {term} term was not finite at step {first} (epoch {epoch})")
        means = (sums / samples).tolist()
        return dict(zip(TERMS, means, strict=True)) | {
            "epoch": float(epoch), "seconds": time.perf_counter() - began,
        }  # fmt: skip

    def _step(self, batch: Batch) -> Tensor:
        scalars = self.scalars(self.step)
        regularize = self.regularizes(self.step)
        if self.device.type == "cuda":
            from acert import cuda

            return cuda.update(self, batch, scalars, regularize=regularize)
        return self.update(batch, scalars, regularize=regularize)

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """TF32 on CUDA where the settings say so; the caller's choice comes back afterwards."""
        backends: Any = torch.backends
        matmul, conv = backends.cuda.matmul, backends.cudnn.conv
        before = matmul.fp32_precision, conv.fp32_precision
        wanted = "tf32" if self.settings.precision == "tf32" else "ieee"
        try:
            matmul.fp32_precision, conv.fp32_precision = wanted, wanted
            yield
        finally:
            matmul.fp32_precision, conv.fp32_precision = before
