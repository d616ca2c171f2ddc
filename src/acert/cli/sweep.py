"""`acert sweep`: many runs into one folder, each trained and certified once."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from acert import data
from acert.bounds.margin import BOUNDS
from acert.cli.flags import (
    Parser,
    add_place,
    add_verb,
    as_duration,
    as_list,
    as_number,
    chosen_device,
)
from acert.errors import InvalidInput
from acert.experiments.choice import SCHEDULES, own_factory
from acert.experiments.sweeps.board import Board, Outcome, board
from acert.experiments.sweeps.engine import Engine, LocalEngine
from acert.experiments.sweeps.plan import Plan, PlannedRun, make_plan
from acert.experiments.sweeps.ray_engine import RayEngine
from acert.experiments.sweeps.sweep import Sweep, failure_file
from acert.methods import METHODS
from acert.metrics import Spread, spread
from acert.untrusted import shown

__all__ = ["add"]

_EXAMPLES = """examples:
  acert sweep --dataset digits --methods acert,fastibp --kappas 0,0.25,0.5,0.8 --seeds 0,1,2 \\
      --epochs 10 --out runs/digits
  acert sweep ... --plan                        what would be run, and how far it is
  acert sweep ... --budget 25m                  only what will be done in time
  acert sweep ... --engine ray --address auto   on a Ray cluster; docs/sweeps.md starts one
The same command again goes on: finished runs are skipped, stopped ones resumed.
"""


def add(verbs: Any) -> Parser:
    """The verb's flags."""
    parser = add_verb(
        verbs, "sweep", _sweep, summary="train and certify many runs", examples=_EXAMPLES,
        description="Train and certify every combination of lists of values, between commas.",
    )  # fmt: skip
    add = parser.add_argument
    words, numbers, counts = as_list(str), as_list(as_number), as_list(int)
    # A list of one may be spelt as `acert train` spells it.
    add("--datasets", "--dataset", type=words, help=f"{', '.join(data.NAMES)} (default: digits)")
    add("--methods", "--method", type=words, help=f"{', '.join(METHODS)} (default: acert)")
    add("--kappas", "--kappa", type=numbers, help="shares of standard loss (default: 0)")
    add("--seeds", "--seed", type=counts, help="of initial weights and batches (default: 0)")
    add("--steps", type=counts, help="root steps of acert (default: 2)")
    add("--schedules", "--schedule", type=words,
        help=f"of the radius: {', '.join(SCHEDULES)} (default: smooth)")  # fmt: skip
    add("--max-radii", "--max-radius", type=numbers, help="largest radii, such as 0.1 or 8/255")
    add("--epochs", type=int, help="other than the recipe's; schedules are scaled with it")
    add("--batch-size", type=int, help="samples a step")
    add("--train-on-all", action="store_true", help="hold nothing out for validation")
    add("--set", action="append", metavar="NAME=VALUE", help="any field of the recipes")
    add("--model", help="a name of acert.models, or package.module:factory of your own")
    add("--arithmetic", choices=("real", "float32", "nearest"), default="real",
        help="what is proven (default: real)")  # fmt: skip
    add("--bounds", choices=BOUNDS, default="ibp",
        help="from the cheapest to the tightest (default: ibp)")  # fmt: skip
    add("--out", type=Path, required=True, help="folder of the run folders")
    add("--engine", choices=("local", "ray"), default="local",
        help="where the runs are made: this machine (default), or a Ray cluster")  # fmt: skip
    add("--address", help="of the cluster: auto (default) or HOST:PORT")
    add("--cpus", type=int, help="CPUs of a run on a cluster (default: 1)")
    add("--gpus", type=as_number, help="GPUs of a run on a cluster (default: 1 if it has any)")
    add("--jobs", type=int, help="runs at a time (default: one a core, a GPU; all that fit on Ray)")
    add("--budget", type=as_duration, help="start only what will be done in 90s, 25m or 2h")
    add("--plan", action="store_true", help="print the plan and stop")
    add_place(parser)
    return parser


def _sweep(options: argparse.Namespace) -> int:
    if options.model is not None and ":" in options.model:
        own_factory(options.model)
    if options.jobs is not None and options.jobs < 1:
        raise InvalidInput(f"`--jobs` must be at least 1; got {options.jobs}")
    plan, screen = _plan(options), board()
    place = _cluster(options, screen) if options.engine == "ray" else _machine(options)
    sweep = Sweep(
        plan, options.out, device=place.device, data_dir=options.data_dir, threads=place.threads,
        arithmetic=options.arithmetic, bounds=options.bounds, command=options.command,
    )  # fmt: skip
    for note in sweep.plan.notes:
        print(shown(note), file=sys.stderr)
    if options.plan:
        _show_plan(sweep)
        return 0
    assert place.engine is not None
    outcomes = sweep.run(place.engine, screen, budget=options.budget)
    if any(outcome.figures is not None for outcome in outcomes):
        for line in _table(outcomes):
            print(line)
        for choice in _reports(outcomes):
            runs = shlex.quote(str(options.out))
            print(f"for figures and a page: acert report {runs} {choice}")
    return _tell_rest(sweep, outcomes)


class _Place(NamedTuple):
    """Where runs are made, on which device, on how many threads; a plan needs no engine."""

    device: str
    threads: int | None
    engine: Engine | None


def _machine(options: argparse.Namespace) -> _Place:
    for name in ("address", "cpus", "gpus"):
        if getattr(options, name) is not None:
            raise InvalidInput(f"`--{name}` is for a cluster: add --engine ray")
    device = chosen_device(options.device)
    on_cpu = device.partition(":")[0] == "cpu"
    jobs = options.jobs or (_cores() if on_cpu else 1)
    threads = max(1, _cores() // jobs) if on_cpu else None
    return _Place(device, threads, LocalEngine(jobs=jobs, reuse=on_cpu))


def _cluster(options: argparse.Namespace, screen: Board) -> _Place:
    """The devices are those of the cluster: this machine may have others."""
    device, gpus = options.device, options.gpus
    if device not in (None, "cpu", "cuda"):
        raise InvalidInput(f"`--device` must be cpu or cuda on a cluster; got {device!r}")
    if (device == "cpu" and gpus) or (device == "cuda" and gpus == 0):
        raise InvalidInput(f"`--gpus` must fit `--device` {device}; got {gpus:g}")
    if gpus is None and device is not None:
        gpus = 1.0 if device == "cuda" else 0.0
    cpus = 1 if options.cpus is None else options.cpus
    engine = None
    if not options.plan:
        engine = RayEngine(
            address="auto" if options.address is None else options.address,
            cpus=cpus, gpus=gpus, jobs=options.jobs, tell=screen.note,
        )  # fmt: skip
        gpus = engine.gpus
    if device is None:
        device = "cuda" if gpus else "cpu"
    return _Place(device, cpus if device == "cpu" else None, engine)


def _plan(options: argparse.Namespace) -> Plan:
    given = {
        "datasets": options.datasets, "methods": options.methods, "kappas": options.kappas,
        "seeds": options.seeds, "steps": options.steps, "schedules": options.schedules,
        "max_radii": options.max_radii, "changes": options.set,
    }  # fmt: skip
    lists = {name: values for name, values in given.items() if values is not None}
    return make_plan(
        **lists, epochs=options.epochs, batch_size=options.batch_size, model=options.model,
        train_on_all=options.train_on_all, data_dir=options.data_dir,
    )  # fmt: skip


def _show_plan(sweep: Sweep) -> None:
    runs = sweep.plan.runs
    width = max(len(run.name) for run in runs)
    words = [sweep.standing(run) for run in runs]
    for run, word in zip(runs, words, strict=True):
        print(shown(f"{run.name:{width}}  {word}"))
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    print(f"{count} in {sweep.out}, {words.count('finished')} of them finished")


def _tell_rest(sweep: Sweep, outcomes: Sequence[Outcome]) -> int:
    """Says on stderr what was not made, and why; the exit status."""
    left_out = [outcome for outcome in outcomes if outcome.kind == "left out"]
    failed = [outcome for outcome in outcomes if outcome.kind == "failed"]
    if left_out:
        names = ", ".join(outcome.run.name for outcome in left_out)
        print(f"left out, for want of time: {names}", file=sys.stderr)
    for outcome in failed:
        file = failure_file(sweep.out, outcome.run.name)
        # It is empty if the disk was full.
        more = f" (more in {file})" if file.is_file() and file.stat().st_size else ""
        print(shown(f"failed: {outcome.run.name}: {outcome.reason}{more}"), file=sys.stderr)
    return 1 if failed else 0


def _reports(outcomes: Sequence[Outcome]) -> list[str]:
    """What `acert report` is to be told: a page has one data set."""
    names = {outcome.run.experiment.dataset: None for outcome in outcomes}
    if len(names) == 1:
        return ["--out report/"]
    return [f"--dataset {name} --out report/{name}" for name in names]


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    """Mean and standard deviation over seeds, a line a group, in per cent."""
    groups: dict[tuple[Any, ...], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.figures is not None:
            groups.setdefault(tuple(outcome.run.group.values()), []).append(outcome)
    titles = list(_first(groups).group)
    # Always the method and kappa; besides what the rows differ in.
    kept = [
        column
        for column, title in enumerate(titles)
        if title in ("method", "kappa") or len({group[column] for group in groups} - {None}) > 1
    ]
    rows = [[*(titles[column] for column in kept), "n", "Acc", "ACR", "ART"]]
    for group, members in groups.items():
        figures = [outcome.figures for outcome in members if outcome.figures is not None]
        rows.append(
            [
                *(_cell(group[column]) for column in kept),
                str(len(members)),
                *(
                    _spread(spread([getattr(found, name) for found in figures]))
                    for name in ("accuracy", "acr", "art")
                ),
            ]
        )
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _first(groups: dict[tuple[Any, ...], list[Outcome]]) -> PlannedRun:
    return next(iter(groups.values()))[0].run


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _spread(found: Spread) -> str:
    deviation = "" if found.std is None else f" +- {100 * found.std:.2f}"
    return f"{100 * found.mean:.2f}{deviation}"


def _cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1
