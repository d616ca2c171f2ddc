"""One experiment from its config to its certificates: trained, resumed, certified, or only read."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import final

import torch
from torch import nn

from acert import data, records
from acert.arithmetic import ARITHMETICS
from acert.bounds.margin import check_bounds
from acert.errors import InvalidInput, RunError
from acert.evaluation import Certificates, certify
from acert.experiments.execution import Stop
from acert.experiments.experiment import Experiment, to_config
from acert.experiments.preparation import Factory, refuse_other
from acert.experiments.progress import Progress, display
from acert.experiments.run import record_certification, train_run
from acert.records import Row
from acert.training import Trainer

__all__ = ["complete_run", "found_certificates"]

# Seconds that a run may be late with its first full epoch, which tells how long all of them take.
_GRACE = 5.0
# Epochs after the warm-up take 0.8 to 0.9 of one in it on a GPU: their steps regularise nothing.
_LATER = 0.85


def complete_run(
    experiment: Experiment,
    *,
    out: str | PathLike[str],
    data_dir: str | PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    model: nn.Module | Factory | None = None,
    certify_to: float | None = None,
    arithmetic: str = "real",
    bounds: str = "ibp",
    progress: Progress | bool = True,
    command: Sequence[str] | None = None,
    deadline: float | None = None,
) -> Certificates | None:
    """The test set's certificates of an experiment, trained into `out` or gone on with there.

    `certify_to` is the largest radius looked for, the run's max_radius unless given. A run that
    is finished and certified as asked is not touched; one that holds another config is refused.
    `deadline` is a value of `time.monotonic()`: once a full epoch has been measured (on CUDA the
    second, since the first contains compilation), a run that will not be trained by then stops
    as Ctrl-C does, with its state saved, and None comes back. Before that it stops a few seconds
    after the deadline, even within an epoch. Epochs after the warm-up are taken to be somewhat
    shorter until one of them has been measured. CROWN-IBP's are much cheaper, and count only
    from then on.
    """
    folder, settings = Path(out), experiment.settings
    max_radius = settings.max_radius if certify_to is None else certify_to
    # Before the training, not after it.
    check_bounds(bounds)
    for name, value, fits, constraint in (
        ("certify_to", max_radius, 0 < max_radius < math.inf, "above 0"),
        ("arithmetic", arithmetic, arithmetic in ARITHMETICS, f"one of {sorted(ARITHMETICS)}"),
    ):
        if not fits:
            raise InvalidInput(f"`{name}` must be {constraint}; got {value!r}")
    found = found_certificates(
        experiment, folder, max_radius=max_radius, arithmetic=arithmetic, bounds=bounds
    )
    if found is not None:
        return found
    shown = display(progress, every=experiment.validate_every)
    watch = None if deadline is None else Watch(shown, deadline)
    try:
        run = train_run(
            experiment, out=folder, data_dir=data_dir, device=device, model=model,
            resume=(folder / records.CONFIG).is_file(), progress=watch or shown, command=command,
        )  # fmt: skip
    except KeyboardInterrupt:
        if watch is not None and watch.expired:
            return None
        raise
    # Not before: the test set is opened once the training is over.
    place = data_dir or records.place_of_data(folder)
    split = data.load_test(experiment.dataset, data_dir=place)
    where = next(run.model.parameters()).device
    began, whole = time.monotonic(), not records.is_unfinished(folder)
    certificates = certify(
        run.model, split.to(where), max_radius=max_radius, arithmetic=arithmetic, bounds=bounds,
        domain=settings.domain, elide=settings.elide, folder=folder,
    )  # fmt: skip
    if whole:  # else it is the time of a part
        seconds = round(time.monotonic() - began, 1)
        facts = records.read_environment(folder) | {"certification_seconds": seconds}
        records.write_environment(folder, facts)
    record_certification(folder, certificates, split)
    return certificates


def found_certificates(
    experiment: Experiment, folder: Path, *, max_radius: float, arithmetic: str, bounds: str
) -> Certificates | None:
    """The certificates of a finished run; None if they must be made, or mean something else.

    A folder that holds another config is refused; a damaged file is made anew.
    """
    if not (folder / records.CONFIG).is_file():
        return None
    refuse_other(folder, "experiment", to_config(experiment))
    if not records.is_finished(folder):
        return None
    try:
        # What is written last is read first.
        records.read_examples(folder)
        found = Certificates(**records.read_certificates(folder))
    except RunError:
        return None
    same = (found.arithmetic, found.bounds) == (arithmetic, bounds)
    return found if same and found.max_radius == max_radius else None


@final
class Watch(Progress):
    """Passes everything on, and stops a run that will not be done before the deadline."""

    def __init__(self, shown: Progress, deadline: float) -> None:
        self.shown = shown
        self.deadline = deadline
        self.expired = False
        # Of the warm-up, and of the epochs after it, whose step is another one.
        self.measured: dict[bool, list[float]] = {False: [], True: []}

    def start(self, trainer: Trainer) -> None:
        """Notes where the run stands, and when."""
        settings = trainer.settings
        self.epochs, self.per_epoch = settings.epochs, trainer.steps_per_epoch
        self.warm_up = self.epochs
        if trainer.phase(0) != trainer.phase(trainer.total_steps - 1):
            self.warm_up = settings.radius_schedule.last_epoch
        self.later = 0.0 if settings.method.settles else _LATER
        self.step_before, self.mark = trainer.step, time.monotonic()
        # The first epoch of either kind on CUDA contains compilation.
        compiled = int(trainer.device.type == "cuda")
        self.unmeasured = {False: compiled, True: compiled}
        self.shown.start(trainer)

    def step(self, step: int) -> None:
        """Stops the run if the deadline is over before anything could be measured."""
        self.shown.step(step)
        later = step > self.warm_up * self.per_epoch
        if not self._seconds(later) and time.monotonic() > self.deadline + _GRACE:
            self.expired = True
            raise Stop

    def epoch(self, row: Row) -> None:
        """Stops the run if the epochs so far say that the others will take too long."""
        self.shown.epoch(row)
        now, done = time.monotonic(), row["epoch"]
        later = done > self.warm_up
        # A resumed run may have begun in the middle of an epoch.
        full = row["step"] - self.step_before == self.per_epoch
        if full and self.unmeasured[later]:
            self.unmeasured[later] -= 1
        elif full:
            self.measured[later].append(now - self.mark)
        self.step_before, self.mark = row["step"], now
        epochs_left = {
            False: max(0, self.warm_up - done),
            True: self.epochs - max(done, self.warm_up),
        }
        left = sum(count * self._seconds(kind) for kind, count in epochs_left.items())
        self.expired = left > 0 and now + left > self.deadline
        if self.expired:
            raise Stop

    def _seconds(self, later: bool) -> float:
        """About how long an epoch takes, in the warm-up or later; 0 while nothing tells."""
        known, share = self.measured[later], 1.0
        if later and not known:
            known, share = self.measured[False], self.later
        return share * sum(known) / max(1, len(known))

    def note(self, text: str) -> None:
        """Passes it on."""
        self.shown.note(text)

    def close(self) -> None:
        """Passes it on."""
        self.shown.close()
