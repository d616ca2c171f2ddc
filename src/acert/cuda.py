"""CUDA only: the training step compiled, and captured as one graph with its optimiser.

The loss is compiled by `torch.compile`, and so is that of an attack where the method has one; then
forward, backward, clipping and Adam are captured together and replayed on static inputs, so that a
step costs one launch and no host synchronisation. There is one graph for the warm-up and one for
later, and one more each for the smaller last batch of an epoch, captured as it is: one step an
epoch is not worth compiling.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from acert.data import Draws
from acert.methods.base import attack_loss

if TYPE_CHECKING:
    from acert.losses import Phase
    from acert.training import Batch, Trainer

__all__ = ["own_stream", "update", "written_tensors"]

_WARM_UP = 3


class CapturedStep:
    """One captured training step: `replay` copies a batch into place and runs the graph."""

    def __init__(
        self,
        trainer: Trainer,
        batch: Batch,
        scalars: Tensor,
        *,
        phase: Phase,
        compiled: bool,
    ) -> None:
        self.index = batch.index.clone()
        self.draws = batch.draws and Draws(batch.draws.offsets.clone(), batch.draws.flips.clone())
        self.noise = None if batch.noise is None else batch.noise.clone()
        self.scalars = scalars.to(trainer.device)
        static = type(batch)(self.index, self.draws, self.noise, batch.total)

        def run() -> Tensor:
            return trainer.update(static, self.scalars, phase=phase, compiled=compiled)

        with _unmoved(trainer):
            for _ in range(_WARM_UP):
                run()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            trainer.optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                self.terms = run()

    def replay(self, batch: Batch, scalars: Tensor) -> Tensor:
        """The terms of one step; they are overwritten by the next replay."""
        self.index.copy_(batch.index)
        if self.draws is not None and batch.draws is not None:
            self.draws.offsets.copy_(batch.draws.offsets)
            self.draws.flips.copy_(batch.draws.flips)
        if self.noise is not None and batch.noise is not None:
            self.noise.copy_(batch.noise)
        self.scalars.copy_(scalars, non_blocking=True)
        self.graph.replay()
        return self.terms


@contextmanager
def own_stream(trainer: Trainer) -> Iterator[None]:
    """Runs on the trainer's own stream: a graph cannot be captured on the default one.

    Gradient accumulators remember the stream they were made on, so all steps share this one.
    """
    outside = torch.cuda.current_stream(trainer.device)
    if trainer.stream is None:
        trainer.stream = torch.cuda.Stream(trainer.device)  # type: ignore[no-untyped-call]
    trainer.stream.wait_stream(outside)
    try:
        with torch.cuda.stream(trainer.stream):
            yield
    finally:
        outside.wait_stream(trainer.stream)


def update(trainer: Trainer, batch: Batch, scalars: Tensor, *, phase: Phase) -> Tensor:
    """One training step on CUDA, captured unless the model does not let itself be compiled."""
    scalars = scalars.pin_memory()
    kind = (phase, len(batch.index), batch.total)
    if trainer.captured is not None and kind not in trainer.captured:
        step = _captured(trainer, batch, scalars, phase=phase)
        if step is None and batch.total == trainer.settings.batch_size:
            trainer.captured = None  # nothing is won by capturing the rest
        else:
            trainer.captured[kind] = step
    step = None if trainer.captured is None else trainer.captured[kind]
    if step is None:
        on_device = scalars.to(trainer.device, non_blocking=True)
        return trainer.update(batch, on_device, phase=phase, compiled=False)
    terms: Tensor = step.replay(batch, scalars)
    return terms


def _captured(
    trainer: Trainer, batch: Batch, scalars: Tensor, *, phase: Phase
) -> CapturedStep | None:
    """The step for batches of this kind, or None with a message where that cannot be had."""
    usual = batch.total == trainer.settings.batch_size
    began = time.perf_counter()
    try:
        if usual:
            _compile(trainer, phase)
        with _uncollected():
            step = CapturedStep(trainer, batch, scalars, phase=phase, compiled=usual)
    except Exception as error:
        if trainer.scaler.is_enabled():  # it may have stopped between two of its calls
            trainer.scaler._per_optimizer_states.clear()
        what = (
            "the step could not be compiled and runs eagerly, several times slower"
            if usual
            else "the smaller last batch of an epoch could not be captured and runs eagerly"
        )
        print(f"{what}: {(str(error).splitlines() or [type(error).__name__])[0]}", file=sys.stderr)
        return None
    if usual:
        print(f"compiled the step in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return step


def _compile(trainer: Trainer, phase: Phase) -> None:
    # Small kernels that do not wait for each other become one: a step has hundreds of them. But
    # CROWN's large ones would get the block sizes of small ones they are put together with.
    walks = trainer.settings.method.settles and not phase.settled
    options: dict[str, Any] = {"combo_kernels": not walks}

    def compiled(function: Any) -> Any:
        return torch.compile(function, fullgraph=True, dynamic=False, options=options)

    trainer.loss = compiled(trainer.objective.__call__)
    trainer.attack_loss = compiled(attack_loss)  # at its first call, if there is one


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pauses Python's garbage collector, which takes a sixth of the time of a compilation."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _unmoved(trainer: Trainer) -> Iterator[None]:
    """Puts back what the steps inside train, whether they succeed or not."""
    before = {id(tensor): tensor.detach().clone() for tensor in written_tensors(trainer)}
    scaler = trainer.scaler.state_dict()
    try:
        yield
    finally:
        trainer.scaler.load_state_dict(scaler)
        with torch.no_grad():
            for tensor in written_tensors(trainer):
                if id(tensor) in before:
                    tensor.copy_(before[id(tensor)])
                else:  # the optimiser's own, made by the first step: it starts at 0
                    tensor.zero_()


def written_tensors(trainer: Trainer) -> list[Tensor]:
    """Everything that a step writes to."""
    state = [
        value
        for values in trainer.optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    ]
    return [*trainer.model.parameters(), *trainer.model.buffers(), *state]
