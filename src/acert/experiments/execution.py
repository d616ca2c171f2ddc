"""One run under way: trains, validates, records, saves its state, and stops when asked."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, final

import numpy.typing as npt
import torch
from torch import Tensor

from acert import metrics, records
from acert.data import Split
from acert.errors import LostProcess, RunError
from acert.evaluation import evaluate
from acert.experiments.environment import environment
from acert.experiments.progress import Progress
from acert.processes import is_loss_of_a_process
from acert.records import Row
from acert.training import Trainer
from acert.untrusted import parsed_json

__all__ = [
    "SAVE_EVERY",
    "Execution",
    "Stop",
    "Writer",
    "fitted",
    "stop_on_signal",
    "to_arrays",
    "to_tensors",
]

SAVE_EVERY = 60.0
_AGREE_EVERY = 10  # steps between two questions whether to stop


@final
class Execution:
    """One run under way: trains, validates, records, and saves its state when it is due."""

    def __init__(
        self,
        trainer: Trainer,
        validation: Split | None,
        validate_every: int,
        folder: Path | None,
        save_every: float,
        listeners: list[Progress],
    ) -> None:
        self.trainer = trainer
        self.validation = validation
        self.validate_every = validate_every
        self.folder = folder
        self.save_every = save_every
        self.listeners = listeners
        self.config: dict[str, Any] = {}
        self.rows: list[Row] = []
        self.processes = trainer.processes
        # The row of an epoch that is trained but not validated yet.
        self.pending: Row | None = None
        self.stop_requested = False
        self.seconds_before = 0.0
        self.began = self.saved = time.monotonic()
        self.saved_step: int | None = None
        self.writer = Writer()
        self.staging: dict[str, Tensor] = {}

    @property
    def seconds(self) -> float:
        """Time the run has taken, over all its parts."""
        return self.seconds_before + time.monotonic() - self.began

    def start(self, *, resume: bool, command: Sequence[str] | None) -> None:
        """Goes to the last state, or saves the first one; tells the listeners where it stands."""
        if self.folder is not None:
            self.config = records.read_config(self.folder)
            state = records.read_state(self.folder) if resume else None
            if state is not None:
                self._restore(state)
            elif resume and records.read_metrics(self.folder):
                self._note(f"{self.folder} has no state any more; it starts from nothing again")
            # Rows that the state does not know yet are cut off: they will be made again.
            records.write_metrics(self.folder, self.rows)
            self._write_environment(command)
            if state is None:
                self.save()
        if self.processes.joined:
            self._start_together()
        for listener in self.listeners:
            listener.start(self.trainer)

    def _start_together(self) -> None:
        """Gives every process the state, the rows and the pending row of the first."""
        known = (self.trainer.state()[1], self.rows, self.pending)
        numbers, self.rows, self.pending = self.processes.as_first(known)
        tensors = self.trainer.state()[0] if self.processes.first else {}
        tensors = self.processes.tensors_as_first(tensors, self.trainer.device)
        if not self.processes.first:
            host = {name: value.cpu() for name, value in tensors.items()}
            self.trainer.restore(host, numbers)

    def train(self, go_on: str) -> None:
        """Trains to the end; a failure names the last good state, a stop says how to go on."""
        try:
            self._epochs()
        except RunError as error:
            with suppress(Exception):  # of the two failures the first is told
                self.writer.wait()
            where = "none, since `out` was not given" if self.folder is None else "none"
            if self.saved_step is not None and self.folder is not None:
                where = f"{self.folder / records.STATE}, step {self.saved_step}"
            raise RunError(f"{error}; the last good checkpoint: {where}") from error
        except RuntimeError as error:
            if not (self.processes.joined and is_loss_of_a_process(error)):
                raise
            with suppress(Exception):
                self.writer.wait()
            raise LostProcess(
                f"another process has died, so this one stops, after step {self.trainer.step}; "
                f"the last checkpoint goes on with: {go_on}"
            ) from error
        except Stop:
            if self.folder is not None:
                self.save()
                self.writer.wait()
            step, total = self.trainer.step, self.trainer.total_steps
            raise KeyboardInterrupt(
                f"stopped after step {step} of {total}, with everything saved. To go on: {go_on}"
            ) from None
        finally:
            for listener in self.listeners:
                listener.close()

    def _epochs(self) -> None:
        trainer = self.trainer
        while len(self.rows) < trainer.settings.epochs:
            if self.pending is None:
                self.pending = self._trained_epoch()
            row = self.pending | self._validated(self.pending["epoch"])
            self.rows.append(row)
            self.pending = None
            if self.folder is not None:
                records.write_metrics(self.folder, self.rows)
                self.save()
            for listener in self.listeners:
                listener.epoch(row)
        self.writer.wait()

    def _trained_epoch(self) -> Row:
        """The row of one epoch without validation; rate and cap are those of its last step."""
        trainer = self.trainer
        settings, per_epoch = trainer.settings, trainer.steps_per_epoch
        figures = trainer.run_epoch(self._on_step)
        last = trainer.step - 1
        return {
            "epoch": int(figures.pop("epoch")),
            "step": trainer.step,
            "loss": figures["loss"],
            "standard": figures["standard"],
            "robust": figures["robust"],
            "regularization": figures["regularization"],
            "train_accuracy": figures["correct"],
            "learning_rate": settings.learning_rate.rate(
                last, steps_per_epoch=per_epoch, epochs=settings.epochs
            ),
            "radius_cap": settings.radius_schedule.cap(
                last, max_radius=settings.max_radius, steps_per_epoch=per_epoch
            ),
            "seconds": round(figures["seconds"], 3),
        }

    def _validated(self, epoch: int) -> Row:
        """Accuracy, ACR and ART of the validation samples, on epochs that ask for them."""
        settings = self.trainer.settings
        if self.validation is None or (epoch % self.validate_every and epoch < settings.epochs):
            return {}
        if self.folder is not None and self._since_save() >= self.save_every:
            self.save()
        own = self.processes.slice_of(len(self.validation))
        part = Split(self.validation.images[own], self.validation.labels[own])
        sums = torch.zeros(2, dtype=torch.float64, device=self.trainer.device)
        if len(part):
            with self.trainer.arithmetic():
                found = evaluate(
                    self.trainer.model, part, max_radius=settings.max_radius,
                    domain=settings.domain, elide=settings.elide,
                    # Several processes stop between two steps only, where all of them are alike.
                    progress=None if self.processes.joined else lambda _: self._stop_if_asked(),
                )  # fmt: skip
            if not self.processes.joined:
                return dict(vars(found))
            sums += torch.tensor([found.accuracy, found.acr], dtype=sums.dtype).to(sums) * len(part)
        accuracy, acr = (self.processes.add_up(sums) / len(self.validation)).tolist()
        return {"accuracy": accuracy, "acr": acr, "art": metrics.art(accuracy, acr)}

    def _on_step(self, step: int) -> None:
        for listener in self.listeners:
            listener.step(step)
        self._stop_if_asked()
        if self.folder is not None and self._since_save() >= self.save_every:
            self.save()

    def _stop_if_asked(self) -> None:
        # Without a folder nothing could be saved, and no handler is in place.
        asked = self.stop_requested
        if self.processes.joined:
            if self.trainer.step % _AGREE_EVERY:
                return
            # A signal reaches them at different steps.
            votes = torch.tensor(float(asked), device=self.trainer.device)
            asked = bool(self.processes.add_up(votes) > 0)
        if asked:
            raise Stop

    def _since_save(self) -> float:
        return time.monotonic() - self.saved

    def save(self) -> None:
        """Copies the state, which is written while training goes on; refused if it holds NaN."""
        folder = self.folder
        assert folder is not None
        tensors, numbers = self.trainer.state()
        facts = numbers | {
            "rows": len(self.rows),
            "elapsed": self.seconds,
            "pending": self.pending,
            # As text: facts of a state have no infinity, which a config may.
            "config": json.dumps(self.config),
        }
        # Before the copy: never more than one of them in memory.
        self.writer.wait()
        copies = self._copies(tensors)
        step = self.trainer.step

        def write() -> None:
            records.write_state(folder, to_arrays(copies), facts)
            self.saved_step = step

        self.saved = time.monotonic()
        self.writer.start(write)

    def _copies(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors on the host, in memory that the next save uses again.

        Page-locked where they come from a device: a large model's copy then takes milliseconds.
        """
        for name, value in tensors.items():
            if name not in self.staging:
                self.staging[name] = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            self.staging[name].copy_(value.detach(), non_blocking=True)
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.device)
        return {name: self.staging[name] for name in tensors}

    def _restore(self, state: records.State) -> None:
        assert self.folder is not None
        tensors, facts = to_tensors(state.arrays), state.facts
        self._check(facts)
        self._refuse_changed(facts.get("config"))
        fitted(self.folder, lambda: self.trainer.restore(tensors, facts))
        rows = records.read_metrics(self.folder)
        if len(rows) < facts["rows"]:
            raise RunError(
                f"{self.folder / records.METRICS} has {len(rows)} rows, "
                f"but the state knows {facts['rows']}"
            )
        self.rows = rows[: facts["rows"]]
        self.pending, self.seconds_before = facts["pending"], facts["elapsed"]
        self.saved_step = self.trainer.step
        if state.complaint is not None:
            self._note(state.complaint)

    def _note(self, text: str) -> None:
        for listener in self.listeners:
            listener.note(text)

    def _check(self, facts: dict[str, Any]) -> None:
        """Refuses plain facts of a state that no run of this length can have."""
        epochs, steps = self.trainer.settings.epochs, self.trainer.total_steps
        pending = facts.get("pending", "missing")
        epoch = pending.get("epoch") if isinstance(pending, dict) else None
        for name, fits in (
            ("step", _is_count(facts.get("step"), steps)),
            ("samples", _is_count(facts.get("samples"), 2**62)),
            ("rows", _is_count(facts.get("rows"), epochs)),
            ("elapsed", _is_time(facts.get("elapsed"))),
            ("seconds", _is_time(facts.get("seconds"))),
            ("pending", pending is None or _is_count(epoch, epochs)),
        ):
            if not fits:
                raise RunError(
                    f"the state in {self.folder} is damaged: `{name}` cannot be "
                    f"{facts.get(name, 'missing')!r} in a run of {steps} steps"
                )

    def _refuse_changed(self, kept: object) -> None:
        """Refuses a config that was edited since the state was saved; older states do not tell."""
        if not isinstance(kept, str):
            return
        try:
            there = parsed_json(kept)
        except ValueError:  # damaged, so another one in any case
            there = kept
        found = records.first_difference(there, self.config)
        if found is not None:
            raise RunError(f"the config of the run in {self.folder} was changed: {found}")

    def finish(self, *, command: Sequence[str] | None) -> None:
        """Writes the weights, last of all, and what the run cost."""
        assert self.folder is not None
        self._write_environment(command)
        records.drop_previous_state(self.folder)
        records.write_weights(self.folder, to_arrays(self.trainer.model.state_dict()))

    def _write_environment(self, command: Sequence[str] | None) -> None:
        assert self.folder is not None
        facts = environment(self.trainer.device, command)
        records.write_environment(self.folder, facts | {"seconds": round(self.seconds, 1)})


@final
class Writer:
    """Writes in the background, one thing at a time: training does not wait for a disk."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Begins to write, once what was begun before is done."""
        self.wait()

        def run() -> None:
            try:
                write()
            # Everything: a thread has nobody else to tell.
            except Exception as error:
                self.error = error

        # Not a daemon: Python itself waits for it before it ends.
        self.thread = threading.Thread(target=run, name="acert-writer")
        self.thread.start()

    def wait(self) -> None:
        """Waits until all is written; raises what went wrong with it."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error


class Stop(Exception):
    """Raised between two steps after a signal, or by a listener; ends a run as Ctrl-C does."""


@contextmanager
def stop_on_signal(execution: Execution) -> Iterator[None]:
    """Ctrl-C and SIGTERM stop the run after its step, a second one at once.

    An exception in the middle of a step would leave weights of two different steps.
    """
    before: dict[int, Any] = {}

    def give_back() -> None:
        while before:
            number, handler = before.popitem()
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        execution.stop_requested = True
        give_back()

    # Without a folder there is nothing to save; only the main thread may set handlers; a
    # signal that is ignored (nohup) stays so.
    answers = execution.folder is not None or execution.processes.joined
    if answers and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, ask)
    try:
        yield
    finally:
        give_back()


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_time(value: object) -> bool:
    # Compared, not asked whether it is finite: a whole number of JSON may be too large for that.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e15


def fitted(folder: Path, load: Callable[[], object]) -> None:
    """Runs `load`, and says which folder holds a state that does not fit the model."""
    try:
        load()
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RunError(f"the state in {folder} does not fit the model: {reason}") from error


def to_arrays(tensors: dict[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
    """Tensors as arrays on the host."""
    return {name: value.detach().cpu().contiguous().numpy() for name, value in tensors.items()}


def to_tensors(arrays: dict[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    """Arrays as tensors that share their memory."""
    return {name: torch.from_numpy(value) for name, value in arrays.items()}
