"""What is shown while a sweep is under way: one bar on a terminal, else a line a finished run."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from acert.evaluation import Evaluation
from acert.experiments.budget import spoken
from acert.experiments.sweeps.plan import PlannedRun
from acert.untrusted import shown

__all__ = ["Board", "BoardBar", "BoardLines", "Outcome", "board"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run of a sweep ended: found, done, failed or left out, with its figures or why not."""

    run: PlannedRun
    kind: str
    reason: str = ""
    seconds: float = 0.0
    figures: Evaluation | None = None

    def line(self) -> str:
        """What is said of it in one line."""
        if self.figures is None:
            return f"{self.run.name}  {self.kind}: {self.reason}"
        shown = (("Acc", self.figures.accuracy), ("ACR", self.figures.acr))
        text = "  ".join(f"{name} {100 * value:.2f}" for name, value in shown)
        return f"{self.run.name}  {text}  ART {100 * self.figures.art:.2f}  {spoken(self.seconds)}"


class Board(ABC):
    """Told how a sweep goes; what it prints goes to stderr."""

    @abstractmethod
    def start(self, todo: Sequence[PlannedRun]) -> None:
        """These runs are to be made."""

    @abstractmethod
    def under_way(self, run: PlannedRun, share: float) -> None:
        """So much of a run's training is done."""

    @abstractmethod
    def over(self, outcome: Outcome) -> None:
        """A run has ended."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Something that the user should know."""

    @abstractmethod
    def close(self) -> None:
        """The sweep is over, at its end or before."""


@final
class BoardLines(Board):
    """A line for every run that has ended."""

    def start(self, todo: Sequence[PlannedRun]) -> None:
        """Shows nothing."""

    def under_way(self, run: PlannedRun, share: float) -> None:
        """Shows nothing."""

    def over(self, outcome: Outcome) -> None:
        """Prints the run's name with its figures, or why it has none."""
        self.note(outcome.line())

    def note(self, text: str) -> None:
        """Prints it."""
        print(shown(text), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Shows nothing."""


@final
class BoardBar(Board):
    """One bar for the whole sweep, below the lines of the runs that have ended; needs rich."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.fields[ended]} runs"),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[names]}", markup=False),
            console=console or Console(stderr=True),
        )
        self.epochs: dict[str, int] = {}
        self.shares: dict[str, float] = {}
        self.running: dict[str, None] = {}
        self.task = self.bar.add_task("", ended="", names="")

    def start(self, todo: Sequence[PlannedRun]) -> None:
        """Shows the bar, an epoch of any run being one step of it."""
        self.epochs = {run.name: run.experiment.settings.epochs for run in todo}
        self.runs, self.ended = len(todo), 0
        self._show()
        self.bar.start()

    def under_way(self, run: PlannedRun, share: float) -> None:
        """Moves the bar."""
        self.shares[run.name] = share
        self.running[run.name] = None
        self._show()

    def over(self, outcome: Outcome) -> None:
        """Prints the run's line above the bar."""
        name = outcome.run.name
        self.running.pop(name, None)
        self.ended += 1
        if outcome.kind == "done":
            self.shares[name] = 1.0
        else:  # what is not made no longer counts, so that the time left is right
            del self.epochs[name]
        self.note(outcome.line())
        self._show()

    def note(self, text: str) -> None:
        """Prints above the bar."""
        self.bar.console.print(shown(text), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the bar as it is."""
        self.bar.stop()

    def _show(self) -> None:
        done = sum(count * self.shares.get(name, 0.0) for name, count in self.epochs.items())
        self.bar.update(
            self.task, completed=done, total=sum(self.epochs.values()),
            ended=f"{self.ended}/{self.runs}", names=", ".join(self.running),
        )  # fmt: skip


def board() -> Board:
    """A bar on a terminal where rich is installed, else lines."""
    if sys.stderr.isatty():
        try:
            return BoardBar()
        except ImportError:
            pass
    return BoardLines()
