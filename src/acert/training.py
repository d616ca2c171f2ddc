"""The training loop: every method of the paper, one screen of code.

What a step draws at random depends on the seed and the step alone, so a run that was stopped
anywhere goes on as if it had not been.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acert.bounds import fused
from acert.bounds.propagation import evaluation_logits
from acert.data import Draws, Split, augment, to_float
from acert.errors import InvalidInput, RunError
from acert.losses import TERMS, Objective, Phase, Scalars
from acert.memory import keep_freed_memory
from acert.methods import Attack
from acert.methods.base import AttackLoss, attack_loss
from acert.precision import FLOAT32, PRECISIONS, float32_products
from acert.processes import ALONE, Processes
from acert.schedules import epoch_of
from acert.settings import Settings

__all__ = ["Batch", "Tally", "Trainer"]

# Prefixes of the optimiser's tensors in a saved state, by what it calls them.
_OWNERS = {"step": "adam", "exp_avg": "adam", "exp_avg_sq": "adam", "momentum": "muon"}


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch as positions in the training set, with its random draws."""

    index: Tensor
    draws: Draws | None
    noise: Tensor | None
    # Samples in the batches of all processes together.
    total: int

    @property
    def share(self) -> float:
        """This process's share of them."""
        return len(self.index) / self.total


class Tally:
    """Sums over the steps of an unfinished epoch; on the device, so that no step waits for them."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(TERMS), dtype=torch.float64, device=device)
        # For each term the first step at which it was not finite, or infinity.
        self.failed = torch.full_like(self.sums, math.inf)
        self.samples = 0
        self.seconds = 0.0

    def add(self, terms: Tensor, samples: int, step: int) -> None:
        """Counts the terms of one step."""
        terms = terms.double()
        self.sums += terms * samples
        self.failed = torch.minimum(
            self.failed, torch.where(terms.isfinite(), math.inf, float(step))
        )
        self.samples += samples

    def check(self, advice: str = "") -> None:
        """Raises if a term was NaN or infinite, with the first such step and its term named."""
        if bool(self.failed.isfinite().any()):
            first = int(self.failed.min())
            failed = zip(TERMS, self.failed.tolist(), strict=True)
            terms = [name for name, step in failed if step == first]
            # The loss is the sum of the others, so it is named only if none of them is to blame.
            term = terms[1] if len(terms) > 1 else terms[0]
            raise RunError(f"the {term} term was not finite at step {first}{advice}")

    def means(self) -> dict[str, float]:
        """The mean of each term over all samples so far."""
        return dict(zip(TERMS, (self.sums / self.samples).tolist(), strict=True))


def channels_last(weight: Tensor) -> Tensor:
    """The kernels of a convolution in the layout that CUDA is fastest in.

    `Tensor.contiguous` leaves kernels of one channel as they are, being in both layouts; cuDNN
    takes them for the other one, and answers with tensors that the compiler did not expect.
    """
    return torch.empty_like(weight, memory_format=torch.channels_last).copy_(weight)


def lay_channels_last(model: nn.Module, images: Tensor) -> None:
    """Puts kernels into the layout that CUDA is fastest in, if the model can do with it.

    One that calls `view` on what a convolution gives wants channels before pixels there.
    """
    kernels = [parameter for parameter in model.parameters() if parameter.ndim == 4]
    before = [kernel.data for kernel in kernels]
    for kernel in kernels:
        kernel.data = channels_last(kernel.data)
    try:
        with torch.no_grad():
            evaluation_logits(model, images)
    except RuntimeError:
        for kernel, data in zip(kernels, before, strict=True):
            kernel.data = data


class Trainer:
    """A model on its way: `run_epoch` trains one epoch from wherever the last call stopped.

    `step` counts the batches done; together with the model's and the optimiser's tensors and
    the tally of the epoch it is the whole state.
    """

    def __init__(
        self,
        model: nn.Module,
        train: Split,
        settings: Settings,
        *,
        processes: Processes = ALONE,
    ) -> None:
        if len(train) < settings.batch_size:
            raise InvalidInput(
                f"`batch_size` must be at most the {len(train)} training samples; "
                f"got {settings.batch_size}"
            )
        self.model = model
        self.train = train
        self.settings = settings
        self.processes = processes
        smallest = min(settings.batch_size, len(train) % settings.batch_size or len(train))
        if 1 < smallest < processes.count:
            raise InvalidInput(
                f"a batch must hold a sample for each of the {processes.count} processes; the "
                f"smallest has {smallest}: choose another `batch_size`, or fewer processes"
            )
        self.device = train.images.device
        on_cuda = self.device.type == "cuda"
        # Lower precision buys nothing on a CPU, so there all is float32.
        self.precision = PRECISIONS[settings.precision] if on_cuda else FLOAT32
        self.objective = Objective(
            method=settings.method,
            l1=settings.l1,
            domain=settings.domain,
            elide=settings.elide,
            precision=self.precision,
            fuse=not self.precision.folds and fused.available(self.device),
            processes=processes,
        )
        if on_cuda:
            lay_channels_last(model, to_float(train.images[:2]))
        else:
            keep_freed_memory()
        rate = torch.zeros((), dtype=torch.float32, device=self.device) if on_cuda else 0.0
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = settings.optimizer.build(self.parameters, rate=rate, capturable=on_cuda)
        for group in self.optimizer.param_groups:
            group["momentum"] = rate.clone() if isinstance(rate, Tensor) else rate
        # Passes everything through unless gradients are in float16.
        self.scaler = torch.amp.GradScaler(
            self.device.type, init_scale=2.0**14, enabled=self.precision.scales_gradients
        )
        self.step = 0
        self.tally = Tally(self.device)
        # On CUDA the compiled losses and the captured steps; None where a model does not compile.
        self.loss: Callable[..., Tensor] = self.objective
        self.attack_loss: AttackLoss = attack_loss
        self.captured: dict[tuple[Phase, int, int], Any] | None = {}
        self.stream: Any = None

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
        """Epoch under way, from 1: that of the next step, or of the last until it is reported."""
        step = self.step - 1 if self.tally.samples else self.step
        return epoch_of(step, steps_per_epoch=self.steps_per_epoch)

    @property
    def _advice(self) -> str:
        """What to try if a term is not finite."""
        narrow = self.precision.scales_gradients
        return ": it may have left the range of float16, try precision=tf32" if narrow else ""

    def phase(self, step: int) -> Phase:
        """Regularisers are on until the radius schedule has run its course; some methods settle."""
        settings = self.settings
        epoch = epoch_of(step, steps_per_epoch=self.steps_per_epoch)
        warm_up = epoch <= settings.radius_schedule.last_epoch
        return Phase(
            regularize=settings.method.uses_bounds and settings.regularization > 0 and warm_up,
            settled=settings.method.settles and not warm_up,
        )

    def scalars(self, step: int) -> Tensor:
        """Learning rate, radius cap and loss weights of one step, in the order of `Scalars`."""
        settings = self.settings
        length = {"steps_per_epoch": self.steps_per_epoch, "epochs": settings.epochs}
        rate = settings.learning_rate.rate(step, **length)
        momentum = settings.optimizer.momentum_at(settings.learning_rate.height(step, **length))
        cap = settings.radius_schedule.cap(
            step, max_radius=settings.max_radius, steps_per_epoch=self.steps_per_epoch
        )
        progress = cap / settings.max_radius
        kappa = settings.method.kappa if cap > 0 else 1.0
        weight = settings.regularization * (1 - progress)
        # Said, because the caller may have chosen another default.
        numbers = [rate, cap, progress, kappa, 1 - kappa, weight, momentum]
        return torch.tensor(numbers, dtype=torch.float32)

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
            # Drawn for the batch as a whole, so that any number of processes sees the same.
            whole = range(count)[number * size : (number + 1) * size]
            own = self.processes.slice_of(len(whole))
            chosen = slice(whole.start + own.start, whole.start + own.stop)
            noise = None
            if isinstance(self.settings.method, Attack):
                seed = (self.settings.seed * 1_000_003 + epoch) * 1_000_003 + number
                generator = torch.Generator(self.device).manual_seed(seed)
                shape = (len(whole), *self.train.images.shape[1:])
                drawn_noise = torch.rand(
                    shape, generator=generator, device=self.device, dtype=torch.float32
                )
                noise = drawn_noise[own] * 2 - 1
            part = None if draws is None else Draws(draws.offsets[chosen], draws.flips[chosen])
            yield Batch(order[chosen], part, noise, len(whole))

    # -- one step -----------------------------------------------------------------------

    def images(self, batch: Batch) -> Tensor:
        """The images of a batch, augmented, as the model takes them."""
        # On a CPU an index in brackets copies bytes one by one.
        images = self.train.images.index_select(0, batch.index)
        if batch.draws is not None:
            assert self.settings.augmentation is not None
            images = augment(images, batch.draws, padding=self.settings.augmentation.padding)
        return to_float(images)

    def update(
        self, batch: Batch, scalars: Tensor, *, phase: Phase, compiled: bool = True
    ) -> Tensor:
        """One optimiser step; returns the terms of `TERMS`. No host synchronisation on CUDA."""
        images, labels = self.images(batch), self.train.labels[batch.index]
        anchors = images
        method = self.settings.method
        if isinstance(method, Attack):
            assert batch.noise is not None
            cap = scalars[Scalars.CAP]
            anchors = method.anchors(
                self.model, images, labels, cap, batch.noise, self.settings.domain,
                loss=self.attack_loss if compiled else attack_loss, form=self.precision.clean,
            )  # fmt: skip
        loss = self.loss if compiled else self.objective
        terms = loss(
            self.model, images, labels, anchors, scalars, share=batch.share, **phase._asdict()
        )
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(terms[0]).backward()  # type: ignore[no-untyped-call]
        self._add_up_gradients()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip_norm)
        for group in self.optimizer.param_groups:
            for key, place in (("lr", Scalars.RATE), ("momentum", Scalars.MOMENTUM)):
                if isinstance(group[key], Tensor):
                    group[key].copy_(scalars[place])
                else:
                    group[key] = float(scalars[place])
        self.scaler.step(self.optimizer)  # not where a scaled gradient has overflowed
        self.scaler.update()
        return self.processes.add_up(terms.detach())

    def _add_up_gradients(self) -> None:
        """Gives every process the gradient of the whole batch, in one message."""
        if not self.processes.joined:
            return
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        flat = self.processes.add_up(torch.cat([gradient.flatten() for gradient in gradients]))
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, total in zip(gradients, torch.split(flat, sizes), strict=True):
            gradient.copy_(total.view_as(gradient))

    def run_epoch(self, on_step: Callable[[int], None] | None = None) -> dict[str, float]:
        """Trains to the end of the current epoch; returns the means of the terms.

        `on_step` is called with the number of steps done; what it raises leaves a state from
        which another call goes on. NaN or infinity in a loss stops the run at the end of the
        epoch at the latest, with the step and the term named.
        """
        epoch = self.epoch
        start = self.step - (epoch - 1) * self.steps_per_epoch
        self.model.train()
        mark = time.perf_counter()
        with self.arithmetic():
            for batch in self.batches(epoch, start):
                self.tally.add(self._step(batch), batch.total, self.step)
                self.step += 1
                mark, before = time.perf_counter(), mark
                self.tally.seconds += mark - before
                if on_step is not None:
                    on_step(self.step)
        self.tally.check(self._advice)
        # The gradient of a finite loss may be NaN, and after the last step no loss would tell.
        named = self.model.named_parameters()
        self._check_numbers({f"model/{name}": p for name, p in named if p.requires_grad})
        means = self.tally.means()  # waits for the device, so the time is right afterwards
        seconds = self.tally.seconds + time.perf_counter() - mark
        self.tally = Tally(self.device)
        return means | {"epoch": float(epoch), "seconds": seconds}

    def _step(self, batch: Batch) -> Tensor:
        scalars, phase = self.scalars(self.step), self.phase(self.step)
        if self.device.type == "cuda":
            from acert import cuda

            return cuda.update(self, batch, scalars, phase=phase)
        return self.update(batch, scalars, phase=phase)

    # -- the state: all that a stopped run needs to go on as if it had not been stopped -----

    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Every tensor of the state by name, and its numbers; refused where NaN has got in."""
        self.tally.check(self._advice)
        tensors = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{_OWNERS[key]}/{key}/{name}"] = value
        self._check_numbers(tensors)
        tensors |= {"tally/sums": self.tally.sums, "tally/failed": self.tally.failed}
        tensors["random/cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random/cuda"] = torch.cuda.get_rng_state(self.device)
        numbers: dict[str, float] = {
            "step": self.step, "samples": self.tally.samples, "seconds": self.tally.seconds,
        }  # fmt: skip
        numbers |= {f"scaler/{name}": value for name, value in self.scaler.state_dict().items()}
        return tensors, numbers

    def _check_numbers(self, tensors: dict[str, Tensor]) -> None:
        """Raises if one of the tensors holds NaN, with the last step named."""
        floats = {name: value for name, value in tensors.items() if value.is_floating_point()}
        bad = [value.isnan().any().to(self.device) for value in floats.values()]
        for name, found in zip(floats, torch.stack(bad).tolist(), strict=True):
            if found:
                raise RunError(f"{name} was not finite after step {self.step - 1}")

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        """Goes back to what `state` returned, on whatever device it was; before the first step."""
        weights = {
            name.removeprefix("model/"): value
            for name, value in tensors.items()
            if name.startswith("model/")
        }
        self.model.load_state_dict(weights)
        step_device = self.device if self.optimizer.defaults["capturable"] else "cpu"
        for name, parameter in self.model.named_parameters():
            for key, owner in _OWNERS.items():
                value = tensors.get(f"{owner}/{key}/{name}")
                if value is not None:
                    self.optimizer.state[parameter][key] = (
                        value.to(step_device)
                        if key == "step"
                        else torch.empty_like(parameter).copy_(value)
                    )
        scaler = {
            name.removeprefix("scaler/"): value
            for name, value in numbers.items()
            if name.startswith("scaler/")
        }
        if scaler:  # none in a state that was saved elsewhere, without float16
            self.scaler.load_state_dict(scaler)
        self.step = int(numbers["step"])
        self.tally.sums.copy_(tensors["tally/sums"])
        self.tally.failed.copy_(tensors["tally/failed"])
        self.tally.samples, self.tally.seconds = int(numbers["samples"]), numbers["seconds"]
        torch.set_rng_state(tensors["random/cpu"])
        if self.device.type == "cuda" and "random/cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random/cuda"], self.device)

    def _stream(self) -> AbstractContextManager[None]:
        if self.device.type != "cuda":
            return nullcontext()
        from acert import cuda

        return cuda.own_stream(self)

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """TF32 on CUDA where the settings say so; the caller's choice comes back afterwards."""
        form = "tf32" if PRECISIONS[self.settings.precision].tf32 else "ieee"
        # Shapes never change, so the fastest convolutions are worth trying out once.
        benchmark = not torch.are_deterministic_algorithms_enabled()
        with float32_products(form, benchmark=benchmark), self._stream():
            yield
