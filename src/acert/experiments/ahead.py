"""Compiles a run's later step while its first epochs train, in a process of its own.

On CUDA a run has one step for its warm-up and one for later, and compiling the second in the
middle of the run would hold it up for half a minute. All that the process leaves behind is in
the compiler's cache on disk, where the run finds it; if it fails, the run compiles for itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import final

import torch

from acert import records
from acert.experiments.experiment import build_model, read_experiment
from acert.experiments.preparation import dataset_like
from acert.experiments.progress import Progress
from acert.records import Row
from acert.training import Trainer

__all__ = ["Ahead", "compile_later_step", "main"]


@final
class Ahead(Progress):
    """Starts that process after the run's first step, and ends it when it is of no more use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.trainer: Trainer | None = None
        self.wanted = False
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, trainer: Trainer) -> None:
        """Remembers what is trained, if it will need another step than its first."""
        self.trainer = trainer
        self.wanted = not _in_last_phase(trainer)

    def step(self, step: int) -> None:
        """Starts the process once the first step is compiled: that one has the cores before."""
        trainer = self.trainer
        if not self.wanted or trainer is None or not _is_compiled(trainer):
            return
        self.wanted = False
        # Nothing is lost without it but time.
        with suppress(OSError, RuntimeError):
            if _has_room(trainer.device):
                self._begin(trainer.device)

    def _begin(self, device: torch.device) -> None:
        # The same places for modules as here.
        code = f"import sys; sys.path[:] = {sys.path}; from {__name__} import main; "
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{code}main({str(self.folder)!r}, {str(device)!r})"],
            stdin=subprocess.PIPE,  # closed when this process ends, however it ends
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run
        )

    def epoch(self, row: Row) -> None:
        """Ends the process if the run is about to compile the later step itself."""
        if self.trainer is not None and _in_last_phase(self.trainer):
            self.close()

    def close(self) -> None:
        """Ends the process if it is still there."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def _in_last_phase(trainer: Trainer) -> bool:
    return trainer.phase(trainer.step) == trainer.phase(trainer.total_steps - 1)


def _is_compiled(trainer: Trainer) -> bool:
    """Whether the step of whole batches is; that of an epoch's last, smaller one is quickly had."""
    whole = trainer.settings.batch_size
    return any(total == whole for _, _, total in trainer.captured or {})


def _has_room(device: torch.device) -> bool:
    """Whether more than half of the device's memory is free: validation will want some, too."""
    free, total = torch.cuda.mem_get_info(device)
    return free > total / 2


def main(folder: str, device: str) -> None:
    """The process: ends with its work, or with the run that has started it."""
    threading.Thread(target=_leave_with_the_run, daemon=True).start()
    compile_later_step(Path(folder), torch.device(device))


def _leave_with_the_run() -> None:
    os.read(0, 1)  # nothing is ever sent: it returns when the run is gone
    os._exit(1)


def compile_later_step(folder: Path, device: torch.device) -> Trainer:
    """Takes one step as the run in the folder will from the end of its warm-up on."""
    experiment, facts = read_experiment(folder), records.read_config(folder)["data"]
    settings = experiment.settings
    # One batch: nothing that is compiled depends on the images or on their number.
    dataset = dataset_like(facts, settings.batch_size)
    model = build_model(experiment.network, dataset, seed=0).to(device)
    trainer = Trainer(model, dataset.train.to(device), settings)
    trainer.step = settings.radius_schedule.last_epoch * trainer.steps_per_epoch
    trainer.run_epoch()
    return trainer
