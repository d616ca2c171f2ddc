"""Time: what a user grants, what epochs were measured to take, and what a run will need."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

from acert import records
from acert.errors import InvalidInput, RunError
from acert.experiments.experiment import Experiment, to_config

__all__ = ["Measured", "Pace", "duration", "epochs_left", "measured", "spoken"]

_UNITS = {"s": 1, "m": 60, "h": 3600}


def duration(text: str) -> float:
    """The seconds that a text such as `90s`, `25m` or `1.5h` stands for.

    >>> duration("25m")
    1500.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    seconds = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if seconds <= 0:
        raise InvalidInput(f"a time is needed, such as 90s, 25m or 2h; got {text!r}")
    return seconds


def spoken(seconds: float) -> str:
    """A duration as one says it.

    >>> spoken(7.4), spoken(95), spoken(5400)
    ('7.4 s', '95 s', '90 min')
    """
    if seconds < 120:
        digits = 1 if seconds < 10 else 0
        return f"{max(0.1, round(seconds, digits)):g} s"
    return f"{round(seconds / 60)} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Measured(NamedTuple):
    """What a run took on a device: seconds an epoch, and for its certification (0 if unknown)."""

    device: str
    epoch: float
    certification: float


def measured(folder: Path) -> Measured | None:
    """What the run in a folder took; None before its first epoch, or if a file is damaged."""
    try:
        rows = records.read_metrics(folder)
        facts = records.read_environment(folder)
        # The whole time of a finished run has validation and saving in it too.
        whole = facts["seconds"] if records.is_finished(folder) else None
        spent = sum(row["seconds"] for row in rows) if whole is None else whole
        certification = float(facts.get("certification_seconds", 0.0))
        found = Measured(facts["device"], float(spent / len(rows)), certification)
        return found if math.isfinite(found.epoch + found.certification) else None
    except (RunError, ArithmeticError, KeyError, TypeError, ValueError):
        return None


class Pace:
    """How long runs take, by runs like them: of the same data, network, method and device."""

    def __init__(self, device: str) -> None:
        self.device = device.partition(":")[0]
        self.known: dict[Hashable, list[Measured]] = {}

    def learn(self, experiment: Experiment, folder: Path) -> None:
        """Takes note of what the run in the folder took, if it was on this device."""
        found = measured(folder)
        if found is not None and found.device == self.device:
            self.known.setdefault(_kind(experiment), []).append(found)

    def seconds(self, experiment: Experiment, folder: Path) -> float | None:
        """What is left of a run will take so long; None if no such run was measured yet."""
        known = self.known.get(_kind(experiment))
        if known is None:
            return None
        epochs = sum(found.epoch for found in known) / len(known)
        return epochs * epochs_left(experiment, folder) + max(
            found.certification for found in known
        )


def epochs_left(experiment: Experiment, folder: Path) -> int:
    """Epochs that the run in the folder has still to train; all if it is not begun."""
    try:
        done = len(records.read_metrics(folder))
    except RunError:
        done = 0
    return 0 if records.is_finished(folder) else experiment.settings.epochs - done


def _kind(experiment: Experiment) -> Hashable:
    """All that the time of an epoch depends on."""
    settings = experiment.settings
    method = {name: value for name, value in to_config(settings.method).items() if name != "kappa"}
    return (
        experiment.dataset,
        experiment.train_on_all,
        experiment.network,
        json.dumps(method),
        settings.batch_size,
        settings.augmentation,
        settings.precision,
    )
