"""Compiles a run's later step while its first epochs train, in a process of its own.

    python -m acert.experiments.ahead RUN DEVICE

On CUDA a run has one step with regularisers and one without, and compiling the second in the
middle of the run would hold it up for half a minute. All that this process leaves behind is in
the compiler's cache on disk, where the run finds it; if it fails, the run compiles for itself.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import final

import torch

from acert import records
from acert.data import Dataset, Split
from acert.experiments.experiment import build_model, read_experiment
from acert.experiments.progress import Progress
from acert.records import Row
from acert.training import Trainer

__all__ = ["Ahead", "compile_later_step"]


@final
class Ahead(Progress):
    """Starts that process after the run's first step, and ends it with the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainer: Trainer | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, trainer: Trainer) -> None:
        """Remembers what is trained, if it will need another step than its first."""
        later = trainer.regularizes(trainer.step) and not trainer.regularizes(
            trainer.total_steps - 1
        )
        self.trainer = trainer if later else None

    def step(self, step: int) -> None:
        """Starts the process once the first step is compiled: that one has the cores before."""
        trainer, self.trainer = self.trainer, None
        if trainer is not None and trainer.captured and _has_room(trainer.device):
            words = [sys.executable, "-m", __name__, str(self.folder), str(trainer.device)]
            nothing = subprocess.DEVNULL
            self.process = subprocess.Popen(words, stdin=nothing, stdout=nothing, stderr=nothing)

    def epoch(self, row: Row) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Ends the process if it is still there."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def _has_room(device: torch.device) -> bool:
    """Whether the device has memory for another such step, and for as much again."""
    free, _ = torch.cuda.mem_get_info(device)
    return free > 2 * torch.cuda.max_memory_reserved(device) + 2**30


def compile_later_step(folder: Path, device: torch.device) -> Trainer:
    """Takes one step as the run in the folder will from its first epoch without regularisers on."""
    experiment, facts = read_experiment(folder), records.read_config(folder)["data"]
    settings = experiment.settings
    # One batch of noise: nothing that is compiled depends on the images or on their number.
    shape = (settings.batch_size, *facts["input_shape"])
    images = torch.randint(256, shape, dtype=torch.uint8)
    train = Split(images, torch.zeros(len(images), dtype=torch.int64))
    dataset = Dataset(
        experiment.dataset, train, tuple(facts["classes"]), domain=settings.domain,
        mean=tuple(facts["mean"]), std=tuple(facts["std"]),
    )  # fmt: skip
    model = build_model(experiment.network, dataset, seed=0).to(device)
    trainer = Trainer(model, train.to(device), settings)
    trainer.step = settings.radius_schedule.last_epoch * trainer.steps_per_epoch
    trainer.run_epoch()
    return trainer


if __name__ == "__main__":
    compile_later_step(Path(sys.argv[1]), torch.device(sys.argv[2]))
