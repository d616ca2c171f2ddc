"""What is shown while a run is under way: a bar, lines, nothing, or TensorBoard events."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from acert.errors import RunError
from acert.extras import needs
from acert.records import Row
from acert.training import Trainer
from acert.untrusted import shown

__all__ = ["Bar", "Events", "Lines", "Progress", "Silent", "display"]


class Progress(ABC):
    """Told how a run goes; what it prints goes to stderr."""

    @abstractmethod
    def start(self, trainer: Trainer) -> None:
        """The run begins, or goes on, from `trainer.step`."""

    @abstractmethod
    def step(self, step: int) -> None:
        """So many steps are done."""

    @abstractmethod
    def epoch(self, row: Row) -> None:
        """An epoch is over; its row is on disk."""

    @abstractmethod
    def close(self) -> None:
        """The run is over, at its end or before."""

    def note(self, text: str) -> None:
        """Something that the user should know."""
        print(shown(text), file=sys.stderr)


@final
class Silent(Progress):
    """Shows notes only."""

    def start(self, trainer: Trainer) -> None:
        """Shows nothing."""

    def step(self, step: int) -> None:
        """Shows nothing."""

    def epoch(self, row: Row) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Shows nothing."""


@final
class Lines(Progress):
    """A line for every epoch that was validated; for all of them where none is, every few."""

    def __init__(self, *, every: int = 1) -> None:
        self.every = every

    def start(self, trainer: Trainer) -> None:
        """Notes the time, to tell how much is left."""
        self.began, self.first = time.monotonic(), trainer.step
        self.epochs, self.total = trainer.settings.epochs, trainer.total_steps

    def step(self, step: int) -> None:
        """Shows nothing."""

    def epoch(self, row: Row) -> None:
        """Prints epoch, figures and the time left."""
        if "art" in row or row["epoch"] % self.every == 0 or row["epoch"] == self.epochs:
            spent, done = time.monotonic() - self.began, row["step"] - self.first
            left = spent / max(done, 1) * (self.total - row["step"])
            print(
                f"epoch {row['epoch']}/{self.epochs}  {_figures(row)}  {left:.0f} s left",
                file=sys.stderr,
            )

    def close(self) -> None:
        """Shows nothing."""


@final
class Bar(Progress):
    """A bar with the last epoch's loss, the last validation and the time left; needs rich."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.bar = RichProgress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console or Console(stderr=True),
        )
        self.validation: Row = {}

    def start(self, trainer: Trainer) -> None:
        """Shows the bar as far as the run is."""
        self.epochs = trainer.settings.epochs
        self.task = self.bar.add_task(
            "", total=trainer.total_steps, completed=trainer.step,
            epoch=f"{min(trainer.epoch, self.epochs)}/{self.epochs}", figures="",
        )  # fmt: skip
        self.bar.start()

    def step(self, step: int) -> None:
        """Moves the bar."""
        self.bar.update(self.task, completed=step)

    def epoch(self, row: Row) -> None:
        """Shows the figures until there are newer ones."""
        if "art" in row:
            self.validation = {name: row[name] for name in ("accuracy", "acr", "art")}
        epoch = f"{min(row['epoch'] + 1, self.epochs)}/{self.epochs}"
        self.bar.update(self.task, epoch=epoch, figures=_figures(self.validation | row))

    def note(self, text: str) -> None:
        """Prints above the bar."""
        self.bar.console.print(shown(text), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the bar as it is."""
        self.bar.stop()


@final
class Events(Progress):
    """The rows as TensorBoard events; needs the package tensorboard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise RunError(f"`tensorboard` {needs('tensorboard')}") from None
        self.open: Callable[[int], Any] = lambda step: SummaryWriter(str(folder), purge_step=step)

    def start(self, trainer: Trainer) -> None:
        """Opens the file; events of steps that a resumed run makes again are hidden."""
        self.writer = self.open(trainer.step + 1)

    def step(self, step: int) -> None:
        """Writes nothing."""

    def epoch(self, row: Row) -> None:
        """Writes every figure of the row at its step."""
        for name, value in row.items():
            if name != "step":
                self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Closes the file."""
        self.writer.close()


def display(chosen: Progress | bool, *, every: int) -> Progress:
    """A bar on a terminal where rich is installed, else lines."""
    if isinstance(chosen, Progress):
        return chosen
    if not chosen:
        return Silent()
    if sys.stderr.isatty():
        try:
            return Bar()
        except ImportError:
            pass
    return Lines(every=every)


def _figures(row: Row) -> str:
    text = f"loss {row['loss']:.4f}"
    if "art" in row:
        shown = (("Acc", "accuracy"), ("ACR", "acr"), ("ART", "art"))
        text += "  val " + " ".join(f"{label} {100 * row[name]:.2f}" for label, name in shown)
    return text
