"""Running the rows of the paper that have no record yet, within a budget.

The worthiest missing run comes first. A run that will not fit the budget is not started, judged
by measured epochs of records on the same hardware; one that was stopped goes on at the next call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import torch

from acert import data, records
from acert.errors import AcertError, DataError, InvalidInput, RunError
from acert.evaluation import Certificates
from acert.experiments.budget import spoken
from acert.experiments.complete import complete_run
from acert.experiments.environment import environment
from acert.experiments.execution import to_tensors
from acert.experiments.experiment import Experiment, build_model
from acert.experiments.paper.publication import (
    ROOT_STEPS,
    Record,
    publish,
    read_records,
    write_root_steps,
)
from acert.experiments.paper.root_steps import root_steps
from acert.experiments.paper.row import Row, Training
from acert.experiments.paper.standing import standing
from acert.methods import Acert

__all__ = ["Job", "Outcome", "jobs", "reproduce", "seconds_needed"]

# Time of a step in units of FastIBP's, from results/step-cuda.json; CROWN-IBP's in its warm-up, of
# a later walk than that record has (docs/performance.md: 32 ms in TF32).
_COST = {"Standard": 0.47, "FastIBP": 1.0, "AcertFast": 1.0, "CrownIBP": 7.5, "Sabr": 2.3}
_ROOT_STEP_COST = 0.15
# Of a step in TF32, where the others are in float16.
_TF32_COST = 1.62
# Certification where no record says how long it takes.
_CERTIFICATION = 60.0


# -- what is to be done, and how long it takes ----------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to be made: the first row that asks for it, the seed, and fewer epochs if any."""

    row: Row
    seed: int
    epochs: int | None = None

    @property
    def training(self) -> Training:
        """The run without its seed."""
        return self.row.training

    @property
    def experiment(self) -> Experiment:
        """What is trained."""
        return self.training.experiment(self.seed, epochs=self.epochs)

    @property
    def name(self) -> str:
        """The folder of the run, and of its record."""
        return self.training.folder_name(seed=self.seed, epochs=self.epochs)

    @property
    def fills_row(self) -> bool:
        """Whether the run's record will count; a shortened one does where the row allows it."""
        return self.epochs is None or self.row.shrinks

    def commands(self, runs: str | PathLike[str] = "runs") -> tuple[list[str], list[str]]:
        """`acert train ...` and `acert certify ...`, which make exactly this run."""
        folder = str(Path(runs) / self.name)
        train = self.training.train_words(seed=self.seed, epochs=self.epochs)
        certify = ["acert", "certify", folder, "--max-radius", self.training.certify_to]
        place = ["--data-dir", "DATA"]
        return [*train, *place, "--out", folder], [*certify, *place]


def jobs(
    rows: Sequence[Row],
    found: Sequence[Record],
    *,
    seeds: Sequence[int] | None = None,
    epochs: int | None = None,
) -> list[Job]:
    """The runs that the rows lack, each once, in the order of the rows.

    `seeds` are wanted instead of the rows' own. With `epochs`, a shortened record counts only if
    it is not shorter than that.
    """
    wanted: dict[tuple[Training, int], Job] = {}
    for row in rows:
        short = None if epochs == row.training.recipe_epochs else epochs
        done = {record.seed for record in standing(row, found).records}
        if short is not None and row.shrinks:
            held = standing(row, found).records
            done = {record.seed for record in held if record.epochs >= short}
        elif short is not None:
            done = set()
        for seed in row.seeds if seeds is None else seeds:
            if seed not in done:
                job = Job(row=row, seed=seed, epochs=short)
                wanted.setdefault((row.training, seed), job)
    return list(wanted.values())


def seconds_needed(
    job: Job, found: Sequence[Record], *, hardware: str, run: Path | None = None
) -> float | None:
    """About how long a run will take, certification included; None where nothing was measured.

    From the epochs that the run in the folder `run` has behind it, else from the record of the
    same data set and hardware whose step costs most nearly the same, of those that had the GPU to
    themselves if there are any, and of those with the same optimiser.
    """
    settings = job.experiment.settings
    try:
        rows = records.read_metrics(run) if run is not None else []
        _ = [float(row["seconds"]) for row in rows]
    # Training says so, or writes them anew from its state.
    except (RunError, ArithmeticError, KeyError, TypeError, ValueError):
        rows = []
    similar = [
        record
        for record in found
        if record.experiment.dataset == job.row.dataset and record.hardware == hardware
    ]
    cost = _cost(job.experiment)
    similar.sort(
        key=lambda record: (
            record.shared,
            abs(math.log(_cost(record.experiment) / cost)),
            record.experiment.settings.optimizer != settings.optimizer,
        )
    )
    certification = _CERTIFICATION
    if similar:
        certification = float(similar[0].environment.get("certification_seconds", _CERTIFICATION))
    left = settings.epochs - len(rows)
    if left == 0:
        return certification
    if len(rows) > 1:
        seconds = sorted(float(row["seconds"]) for row in rows[1:])
        return left * seconds[len(seconds) // 2] + _start_up(rows) + certification
    if not similar:
        return None
    per_epoch = similar[0].epoch_seconds * cost / _cost(similar[0].experiment)
    return left * per_epoch + _start_up(similar[0].metrics) + certification


def _start_up(rows: Sequence[records.Row]) -> float:
    """What the first epoch took longer than the second: compilation."""
    return max(0.0, rows[0]["seconds"] - rows[1]["seconds"]) if len(rows) > 1 else 0.0


def _cost(experiment: Experiment) -> float:
    """The mean time of a step, in units of one of FastIBP in float16."""
    settings, method = experiment.settings, experiment.settings.method
    unit = _TF32_COST if settings.precision == "tf32" else 1.0
    if isinstance(method, Acert):
        # One more bound pass, at the cap.
        return unit * (_COST["FastIBP"] + _ROOT_STEP_COST * (method.solver.max_steps + 1))
    cost = _COST[type(method).__name__]
    if method.settles:  # FastIBP's step from the end of the warm-up on
        share = min(1.0, settings.radius_schedule.last_epoch / settings.epochs)
        cost = share * cost + (1 - share) * _COST["FastIBP"]
    return unit * cost


# -- running --------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a call did: records published, runs left for another call, runs that failed."""

    published: list[Path] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def reproduce(
    wanted: Sequence[Job],
    *,
    results: str | PathLike[str],
    out: str | PathLike[str],
    data_dir: str | PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    budget: float | None = None,
    progress: bool = True,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Trains, certifies and publishes the runs in their order, within `budget` seconds.

    A failed run is reported and the next one begun. A budget in which nothing fits is refused.
    """
    end = None if budget is None else time.monotonic() + budget
    # Training must leave time for certification.
    deadline = None if end is None or budget is None else end - min(_CERTIFICATION, budget / 10)
    chosen = torch.device(device)
    facts = environment(chosen, None)
    hardware = str(facts.get("gpu") or facts["cpu"])
    results, out = Path(results), Path(out)
    outcome, absent = Outcome(), dict[str, DataError]()
    _refuse_small_budget(wanted, read_records(results)[0], hardware, out, budget)
    for job in wanted:
        if job.row.dataset in absent:
            continue
        folder = out / job.name
        needed = seconds_needed(job, read_records(results)[0], hardware=hardware, run=folder)
        if end is not None and time.monotonic() + (needed or 0.0) > end:
            about = "" if needed is None else f" (about {spoken(needed)})"
            outcome.left.append(job.name)
            say(f"{job.name}: does not fit what is left of the budget{about}")
            continue
        say(f"{job.name}: {job.row.id}" + ("" if needed is None else f", {spoken(needed)}"))
        try:
            certificates = _complete(
                job, folder, data_dir=data_dir, device=chosen, progress=progress,
                deadline=deadline,
            )  # fmt: skip
            if certificates is None:
                outcome.left.append(job.name)
                say(f"{job.name}: would miss the end of the budget; its state is in {folder}")
                continue
            if job.fills_row:
                outcome.published.append(publish(folder, results, name=job.name))
        except DataError as error:
            absent[job.row.dataset] = error
            say(f"{job.name}: {error}")
        except AcertError as error:
            outcome.failed.append(f"{job.name}: {error}")
            say(f"{job.name}: failed: {error}")
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(
                f"{job.name}: {str(stop) or 'stopped'}; or give the same `acert reproduce` again"
            ) from None
        else:
            say(
                f"{job.name}: Acc {100 * certificates.accuracy:.2f}  ACR "
                f"{100 * certificates.acr:.2f}  ART {100 * certificates.art:.2f}; "
                + (f"published {outcome.published[-1]}" if job.fills_row else "fills no row")
            )
    if absent and not outcome.published:
        raise next(iter(absent.values()))
    return outcome


def _complete(
    job: Job,
    folder: Path,
    *,
    data_dir: str | PathLike[str] | None,
    device: torch.device,
    deadline: float | None,
    progress: bool,
) -> Certificates | None:
    """The certificates of one run, with its root steps counted; None if time did not do."""
    experiment = job.experiment
    train, _ = job.commands(folder.parent)
    found = complete_run(
        experiment, out=folder, data_dir=data_dir, device=device,
        certify_to=job.training.max_radius, command=train, progress=progress, deadline=deadline,
    )  # fmt: skip
    finds_roots = isinstance(experiment.settings.method, Acert)
    if found is not None and finds_roots and not (folder / ROOT_STEPS).is_file():
        _record_root_steps(experiment, folder, data_dir, device)
    return found


def _record_root_steps(
    experiment: Experiment,
    folder: Path,
    data_dir: str | PathLike[str] | None,
    device: torch.device,
) -> None:
    """Counts the root steps of the trained model on training images."""
    settings = experiment.settings
    whole = data.load(experiment.dataset, data_dir=data_dir, train_on_all=True)
    with torch.random.fork_rng(devices=[]):  # the weights are overwritten
        model = build_model(experiment.network, whole, seed=0)
    model.load_state_dict(to_tensors(records.read_weights(folder)))
    found = root_steps(
        model.to(device), whole.train,
        max_radius=settings.max_radius, domain=settings.domain, elide=settings.elide,
    )  # fmt: skip
    write_root_steps(folder, found)


def _refuse_small_budget(
    wanted: Sequence[Job], found: Sequence[Record], hardware: str, out: Path, budget: float | None
) -> None:
    if budget is None or not wanted:
        return
    needed = {
        job.name: seconds_needed(job, found, hardware=hardware, run=out / job.name)
        for job in wanted
    }
    known = {name: seconds for name, seconds in needed.items() if seconds is not None}
    if len(known) == len(needed) and min(known.values()) > budget:
        name = min(known, key=lambda name: known[name])
        raise InvalidInput(
            f"`--budget` must be at least {spoken(known[name])}, about what the shortest missing "
            f"run takes here, {name}; got {spoken(budget)}"
        )
