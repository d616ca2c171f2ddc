"""One run as a task: a plain value that any process can carry out, and the process that does.

A worker reads tasks from its standard input, a line of JSON each, and answers with reports in the
same form. It ends when its input does, whatever it is doing: no worker outlives its sweep.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO, final

import torch

from acert.errors import AcertError
from acert.experiments.choice import own_factory
from acert.experiments.complete import complete_run
from acert.experiments.experiment import Experiment, from_config, to_config
from acert.experiments.progress import Progress
from acert.records import Row
from acert.training import Trainer

__all__ = ["Report", "Task", "main", "perform"]

# Seconds between two reports of a run under way.
_EVERY = 0.5


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run to be trained and certified, or gone on with; everything in it can be pickled.

    `seconds` is the time there is for it, None for any; `threads` None leaves torch its own.
    """

    name: str
    experiment: Experiment
    folder: str
    certify_to: float
    data_dir: str | None = None
    device: str = "cpu"
    threads: int | None = 1
    arithmetic: str = "real"
    bounds: str = "ibp"
    command: tuple[str, ...] = ()
    seconds: float | None = None

    def fields(self) -> dict[str, Any]:
        """The task as JSON can hold it."""
        return vars(self) | {"experiment": to_config(self.experiment)}

    def to_line(self) -> str:
        """The task as a line of JSON."""
        return json.dumps(self.fields()) + "\n"

    @staticmethod
    def from_line(line: str) -> Task:
        """The task that `to_line` wrote."""
        fields: dict[str, Any] = json.loads(line)
        fields["experiment"] = from_config(fields["experiment"])
        return Task(**fields | {"command": tuple(fields["command"])})


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a worker says of a task: under way, or done, late, stopped or failed.

    `share` is the part of the training that is done; `reason` is one line on a failure, and
    `details` is all that is known of it, `error` the name of its class where it is one of acert's.
    Late is a task that will not be done in its time.
    """

    name: str
    kind: str
    share: float = 0.0
    reason: str = ""
    details: str = ""
    error: str = ""

    @property
    def final(self) -> bool:
        """Whether nothing more will come from this task."""
        return self.kind != "under way"

    def to_line(self) -> str:
        """The report as a line of JSON."""
        return json.dumps(vars(self)) + "\n"


Tell = Callable[[Report], None]


def perform(task: Task, tell: Tell) -> Report:
    """Carries out a task in this process; the last report comes back, the others go to `tell`."""

    def last(kind: str, reason: str = "", details: str = "", error: str = "") -> Report:
        return Report(name=task.name, kind=kind, reason=reason, details=details, error=error)

    if task.threads is not None:
        # Fewer where the user asked for that, by OMP_NUM_THREADS for one.
        torch.set_num_threads(min(task.threads, torch.get_num_threads()))
    deadline = None if task.seconds is None else time.monotonic() + task.seconds
    try:
        network = task.experiment.network.name
        found = complete_run(
            task.experiment, out=task.folder, data_dir=task.data_dir, device=task.device,
            model=own_factory(network) if ":" in network else None, certify_to=task.certify_to,
            arithmetic=task.arithmetic, bounds=task.bounds, progress=_Teller(task.name, tell),
            command=task.command or None, deadline=deadline,
        )  # fmt: skip
    except KeyboardInterrupt as stop:
        return last("stopped", str(stop))
    except AcertError as error:
        text, kind = " ".join(str(error).split()), type(error).__name__
        return last("failed", text, traceback.format_exc(), kind)
    # Everything: one failed run, out of memory perhaps, must not end the others.
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return last("failed", text, traceback.format_exc())
    return last("late" if found is None else "done")


@final
class _Teller(Progress):
    """Reports how far the training is, now and then."""

    def __init__(self, name: str, tell: Tell) -> None:
        self.name, self.tell = name, tell

    def start(self, trainer: Trainer) -> None:
        """Reports where a run goes on from."""
        self.total = trainer.total_steps
        self._report(trainer.step)

    def step(self, step: int) -> None:
        """Reports at most twice a second."""
        if time.monotonic() - self.told >= _EVERY:
            self._report(step)

    def epoch(self, row: Row) -> None:
        """Reports nothing: the last step has been counted."""

    def close(self) -> None:
        """Reports nothing."""

    def _report(self, step: int) -> None:
        self.told = time.monotonic()
        self.tell(Report(name=self.name, kind="under way", share=step / self.total))


def serve(source: TextIO, answers: TextIO, leave: Callable[[int], object] = os._exit) -> None:
    """Carries out the tasks that come from `source`, one after the other.

    `leave` is called at the end of `source`, even in the middle of a task, and after a signal
    has stopped a task.
    """
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def listen() -> None:
        for line in source:
            lines.put(line)
        # Without ceremony: somebody else may go on with this run at any moment now.
        leave(0)
        lines.put(None)

    def tell(report: Report) -> None:
        answers.write(report.to_line())
        answers.flush()

    threading.Thread(target=listen, name="acert-tasks", daemon=True).start()
    while (line := lines.get()) is not None:
        last = perform(Task.from_line(line), tell)
        tell(last)
        if last.kind == "stopped":
            leave(0)
            return


def main() -> None:
    """The worker process; what a user's model prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, answers)
