"""The plan of a sweep: every combination of lists as a named run, each of them once."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from acert import data, records
from acert.errors import InvalidInput, RunError
from acert.experiments.choice import SCHEDULES, chosen_experiment
from acert.experiments.experiment import Experiment, to_config
from acert.experiments.override import nearest
from acert.experiments.preparation import check_seed
from acert.methods import METHODS, method_name
from acert.schedules import FullRadius

__all__ = ["Plan", "PlannedRun", "make_plan"]


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a sweep; `group` is what it shares with the runs of other seeds."""

    name: str
    method: str
    schedule: str
    experiment: Experiment
    # Radii are looked for up to here: the same for all runs on a data set, so that they compare.
    certify_to: float

    @property
    def group(self) -> dict[str, Any]:
        """Everything that a table may tell runs apart by, except the seed."""
        settings = self.experiment.settings
        return {
            "dataset": self.experiment.dataset,
            "method": self.method,
            "kappa": settings.method.kappa,
            "steps": _steps(self.experiment),
            "schedule": None if self.method == "standard" else self.schedule,
            "max radius": settings.max_radius,
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The runs of a sweep in the order they are made, and what the user should know of them."""

    runs: tuple[PlannedRun, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [run.name for run in self.runs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InvalidInput(
                f"two runs of the plan would share the folder {twice}: values of one list must "
                "differ in their first digits, and `--set` must not change what a list names"
            )

    def placed(self, out: Path) -> Plan:
        """The plan for a folder that may hold a sweep already.

        A run that was planned there before keeps its folder, even if the flags would name it
        otherwise now; and all are certified as far as the farthest of their data set.
        """
        try:
            recorded = records.read_sweep(out)["runs"]
            # A name that leads elsewhere is none.
            names = {
                json.dumps(entry["experiment"]): entry["name"]
                for entry in recorded
                if _is_name(entry["name"], out)
            }
            radii = [
                (entry["experiment"]["dataset"], float(entry["certify_to"])) for entry in recorded
            ]
        except records.NewerSchema:
            raise
        except RunError as error:
            return replace(self, notes=(*self.notes, f"{error}: the plan is recorded anew"))
        except (ArithmeticError, KeyError, TypeError, ValueError):
            note = f"{out / records.SWEEP} is damaged: the plan is recorded anew"
            return replace(self, notes=(*self.notes, note))
        placed = tuple(
            replace(
                run,
                name=names.get(_config(run), run.name),
                certify_to=max(
                    run.certify_to, *(to for name, to in radii if name == run.experiment.dataset), 0
                ),
            )
            for run in self.runs
        )
        for run in placed:
            if not _is_name(run.name, out):
                raise RunError(f"{out / run.name} leads out of its folder: remove that link")
        return replace(self, runs=placed)

    def record(self, out: Path) -> None:
        """Writes `sweep.json`; runs that were planned there before stay in it."""
        mine = {run.name: run for run in self.runs}
        entries = {
            run.name: {
                "name": run.name,
                "method": run.method,
                "schedule": run.schedule,
                "certify_to": run.certify_to,
                "experiment": to_config(run.experiment),
            }
            for run in self.runs
        }
        try:
            before = [dict(entry) for entry in records.read_sweep(out)["runs"]]
            kept = [entry for entry in before if entry.get("name") not in mine]
        except (RunError, KeyError, TypeError, ValueError):
            kept = []
        records.write_sweep(out, {"runs": [*kept, *entries.values()]})


def make_plan(
    *,
    datasets: Sequence[str] = ("digits",),
    methods: Sequence[str] = ("acert",),
    kappas: Sequence[float] = (0.0,),
    seeds: Sequence[int] = (0,),
    steps: Sequence[int] = (),
    schedules: Sequence[str] = ("smooth",),
    max_radii: Sequence[float] = (),
    epochs: int | None = None,
    batch_size: int | None = None,
    train_on_all: bool = False,
    changes: Sequence[str] = (),
    model: str | None = None,
    data_dir: Path | None = None,
) -> Plan:
    """Every combination of the lists, the first seed of all of them before the second.

    What a method does not know is left out for it, and the combinations that then are the same
    run appear once: standard training has neither kappa nor radius schedule, and root steps are
    ACERT's alone. `notes` says so. Empty `steps` and `max_radii` leave the recipe's.

    >>> plan = make_plan(methods=["acert", "standard"], kappas=[0, 0.5])
    >>> [run.name for run in plan.runs]
    ['acert-k0-s0', 'acert-k0.5-s0', 'standard-k1-s0']
    """
    _check(datasets, methods, kappas, seeds, schedules)
    domains = {name: data.facts(name, data_dir=data_dir).domain for name in datasets}
    # As numbers that a config holds: 0 and 0.0 are written differently there.
    kappas, max_radii = [float(kappa) for kappa in kappas], [float(radius) for radius in max_radii]
    lists: tuple[Sequence[Any], ...] = (
        datasets, seeds, methods, kappas, steps or (None,), schedules, max_radii or (None,),
    )  # fmt: skip
    found: dict[Experiment, tuple[str, str]] = {}
    combinations = 0
    for dataset, seed, method, kappa, step, schedule, radius in itertools.product(
        *(tuple(dict.fromkeys(values)) for values in lists)
    ):
        combinations += 1
        standard = method == "standard"
        experiment = chosen_experiment(
            dataset=dataset, method=method, kappa=None if standard else kappa,
            steps=step if method == "acert" else None,
            schedule="smooth" if standard else schedule, epochs=epochs, max_radius=radius,
            batch_size=batch_size, seed=seed, model=model, changes=changes,
            train_on_all=train_on_all, domain=domains[dataset],
        )  # fmt: skip
        # As it is after the changes, which may have named another method or schedule.
        settings = experiment.settings
        full = settings.method.uses_bounds and isinstance(settings.radius_schedule, FullRadius)
        names = method_name(settings.method), "none" if full else "smooth"
        found.setdefault(experiment, names)
    farthest = {
        name: max(one.settings.max_radius for one in found if one.dataset == name)
        for name in {one.dataset for one in found}
    }
    varies = {
        "dataset": len({*datasets}) > 1,
        "steps": len({*steps}) > 1,
        "schedule": len({*schedules}) > 1,
        "max radius": len({*max_radii}) > 1,
    }
    runs = tuple(
        PlannedRun(
            name=_name(experiment, method, schedule, varies),
            method=method,
            schedule=schedule,
            experiment=experiment,
            certify_to=farthest[experiment.dataset],
        )
        for experiment, (method, schedule) in found.items()
    )
    return Plan(runs=runs, notes=_notes(methods, kappas, steps, schedules, combinations, len(runs)))


def _check(
    datasets: Sequence[str],
    methods: Sequence[str],
    kappas: Sequence[float],
    seeds: Sequence[int],
    schedules: Sequence[str],
) -> None:
    """Refuses what no run could be made of, before anything is read."""
    given = {"datasets": datasets, "methods": methods, "kappas": kappas, "seeds": seeds}
    for name, values in (given | {"schedules": schedules}).items():
        if not values:
            raise InvalidInput(f"`{name}` must name at least one value; got none")
    _check_names("dataset", datasets, data.NAMES)
    _check_names("method", methods, tuple(METHODS))
    _check_names("schedule", schedules, SCHEDULES)
    for kappa in kappas:
        if not 0 <= kappa <= 1:
            raise InvalidInput(f"`kappa` must be in [0, 1]; got {kappa}")
    for seed in seeds:
        check_seed(seed)


def _check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise InvalidInput(
                f"`{what}` must be one of {', '.join(known)}; got {name!r}{nearest(name, known)}"
            )


def _name(experiment: Experiment, method: str, schedule: str, varies: dict[str, bool]) -> str:
    """The folder of a run: what varies in the sweep, and always method, kappa and seed."""
    settings, steps = experiment.settings, _steps(experiment)
    parts: list[tuple[bool, Callable[[], str]]] = [
        (varies["dataset"], lambda: experiment.dataset),
        (True, lambda: method),
        (varies["steps"] and steps is not None, lambda: f"steps{steps}"),
        (varies["schedule"] and method != "standard", lambda: schedule),
        (varies["max radius"], lambda: f"r{settings.max_radius:.4g}"),
        (True, lambda: f"k{settings.method.kappa:g}"),
        (True, lambda: f"s{settings.seed}"),
    ]
    return "-".join(part() for wanted, part in parts if wanted)


def _notes(
    methods: Sequence[str],
    kappas: Sequence[float],
    steps: Sequence[int],
    schedules: Sequence[str],
    combinations: int,
    runs: int,
) -> tuple[str, ...]:
    notes = []
    if "standard" in methods and [*kappas] not in ([0.0], [1.0]):
        notes.append("standard training has no kappa: it is planned once, as kappa 1")
    if "standard" in methods and [*schedules] != ["smooth"]:
        notes.append("standard training has no radius schedule: it is planned without")
    others = [method for method in dict.fromkeys(methods) if method != "acert"]
    if steps and others:
        notes.append(f"root steps are of acert only: {', '.join(others)} planned without")
    if runs < combinations:
        notes.append(f"{combinations} combinations are {runs} different runs")
    return tuple(notes)


def _steps(experiment: Experiment) -> int | None:
    solver = to_config(experiment.settings.method).get("solver")
    return None if solver is None else int(solver["max_steps"])


def _is_name(name: str, out: Path) -> bool:
    """Whether it names a folder right in `out`, which no link leads out of."""
    if name in ("", ".", "..") or Path(name).name != name:
        return False
    return (out / name).resolve().parent == out.resolve()


def _config(run: PlannedRun) -> str:
    return json.dumps(to_config(run.experiment))
