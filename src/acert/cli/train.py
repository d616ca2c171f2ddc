"""`acert train`: a network into a run folder."""

from __future__ import annotations

import argparse
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch

from acert import data
from acert.cli.flags import (
    Parser,
    add_place,
    add_verb,
    as_number,
    chosen_device,
    figures,
    own_model,
)
from acert.errors import InvalidInput
from acert.experiments.choice import chosen_experiment
from acert.experiments.experiment import Experiment
from acert.experiments.override import field_names
from acert.experiments.recipes import recipe
from acert.experiments.run import command_words, resume_run, train_run
from acert.methods import METHODS, method_name
from acert.processes import Processes, join, local_device
from acert.schedules import SmoothRadius, StepDecay
from acert.zoo import run_experiment

__all__ = ["add"]

_EXAMPLES = """examples:
  acert train                                   digits with ACERT, under a minute on two cores
  acert train --dataset cifar10 --kappa 0.25 --data-dir ~/data --out runs/c25
  acert train --dataset mnist --method fastibp --epochs 20
  acert train --dataset npz --data-dir mine.npz --model mymodels:net --max-radius 0.05
  acert train --set learning_rate.max_rate=5e-3 --set radius_schedule=FullRadius
  acert train --dataset cifar10 --set precision=tf32   CNN7 trains in float16 on a GPU otherwise
  acert train --dataset cifar10 --show          every field of the recipe, for --set
  acert train --resume runs/c25                 go on where a run was stopped
"""
# Flags that would change the config of a run, by the names that argparse gives them.
_CONFIG_FLAGS = (
    "dataset", "method", "kappa", "max_radius", "steps", "epochs", "batch_size", "seed",
    "out", "train_on_all", "set", "show",
)  # fmt: skip


def add(verbs: Any) -> Parser:
    """The verb's flags."""
    parser = add_verb(
        verbs, "train", _train, summary="train a network", examples=_EXAMPLES,
        description="Train a network into a run folder.",
    )  # fmt: skip
    add = parser.add_argument
    add("--dataset", help=f"{', '.join(data.NAMES)} (default: digits)")
    add("--method", help=f"{', '.join(METHODS)} (default: acert)")
    add("--kappa", type=as_number, help="share of standard loss, from 0 to 1 (default: 0)")
    add("--max-radius", type=as_number, help="largest radius, such as 0.1 or 8/255")
    add("--steps", type=int, help="root steps of acert (default: 2)")
    add("--epochs", type=int, help="other than the recipe's; schedules are scaled with it")
    add("--batch-size", type=int, help="samples a step")
    add("--seed", type=int, help="of initial weights and batches (default: 0)")
    add("--train-on-all", action="store_true", help="hold nothing out for validation")
    add("--set", action="append", metavar="NAME=VALUE", help="any field of the recipe")
    add("--show", action="store_true", help="print the fields of the recipe and stop")
    add("--out", type=Path, help="run folder (default: runs/DATASET-METHOD-kKAPPA-sSEED)")
    add("--resume", type=Path, metavar="RUN", help="go on with a run, by its own config")
    add("--tensorboard", action="store_true", help="write the figures as events too")
    add("--model", help="a name of acert.models, or package.module:factory of your own, "
        "called with (input_shape, num_classes)")  # fmt: skip
    add_place(parser)
    return parser


def _train(options: argparse.Namespace) -> None:
    device = local_device(chosen_device(options.device))
    processes = join(torch.device(device))
    factory = (
        None if options.model is None or ":" not in options.model else own_model(options.model)
    )
    if options.resume is not None:
        experiment = _check_resume(options)
        run = resume_run(
            options.resume, data_dir=options.data_dir, device=device, model=factory,
            tensorboard=options.tensorboard, command=options.command, processes=processes,
        )  # fmt: skip
    else:
        experiment = _experiment(options, processes)
        settings = experiment.settings
        if options.show:
            for name, value in field_names(experiment).items():
                print(f"{name} = {type(value).__name__ if is_dataclass(value) else value}")
            return
        method = method_name(settings.method)  # a change may have named another
        out = options.out or Path(
            "runs",
            f"{experiment.dataset}-{method}-k{settings.method.kappa:g}-s{settings.seed}",
        )
        if processes.first:
            together = f", {processes.count} processes" if processes.joined else ""
            print(
                f"{experiment.dataset}, {method}, kappa {settings.method.kappa:g}, max_radius "
                f"{settings.max_radius:.4g}, {_epochs(settings.epochs)}, seed {settings.seed}, "
                f"{device}{together}",
                flush=True,  # above the progress, where both go into one file
            )
        run = train_run(
            experiment, out=out, data_dir=options.data_dir, device=device, model=factory,
            tensorboard=options.tensorboard, command=options.command, processes=processes,
        )  # fmt: skip
    processes.leave()
    if not processes.first:
        return
    # The history of a finished run comes from its file, which may have lost rows or names.
    last = run.history[-1] if run.history else {}
    shares = [last.get(name) for name in ("accuracy", "acr", "art")]
    found = [share for share in shares if isinstance(share, float)]
    if len(found) == len(shares):
        print(f"validation: {figures(*found)}")
    assert run.folder is not None
    words = command_words(experiment, run.folder)
    print(f"the run is in {run.folder}; for its test set: acert certify {words}")


def _experiment(options: argparse.Namespace, processes: Processes) -> Experiment:
    """The recipe that the flags ask for."""
    dataset, method = options.dataset or "digits", options.method or "acert"
    # --show needs no data.
    facts = None if options.show else data.facts(dataset, data_dir=options.data_dir)
    experiment = chosen_experiment(
        dataset=dataset, method=method, kappa=options.kappa, steps=options.steps,
        epochs=options.epochs, max_radius=options.max_radius, batch_size=options.batch_size,
        seed=options.seed, model=options.model, changes=options.set or (),
        train_on_all=options.train_on_all, domain=None if facts is None else facts.domain,
    )  # fmt: skip
    whole = recipe(dataset, method, kappa=options.kappa).settings.epochs
    scaled = _scaled_schedules(experiment)
    if options.epochs is not None and options.epochs != whole and scaled and processes.first:
        trained = experiment.settings.epochs
        though = "" if trained == options.epochs else f", though `--set` trains {trained}"
        print(f"schedules scaled to {_epochs(options.epochs)}{though}: {scaled}", file=sys.stderr)
    return experiment


def _scaled_schedules(experiment: Experiment) -> str:
    """What a new number of epochs did to the schedules; empty where none counts epochs."""
    settings = experiment.settings
    words = []
    if settings.method.uses_bounds and isinstance(settings.radius_schedule, SmoothRadius):
        words.append(f"the radius rises over {_epochs(settings.radius_schedule.length)}")
    if isinstance(settings.learning_rate, StepDecay):
        after = " and ".join(str(epoch) for epoch in settings.learning_rate.epochs)
        words.append(f"the learning rate falls after epoch {after}")
    return ", ".join(words)


def _epochs(count: int) -> str:
    return f"{count} epoch" if count == 1 else f"{count} epochs"


def _check_resume(options: argparse.Namespace) -> Experiment:
    """The experiment to go on with; refused if a flag would change it, or its model is missing."""
    values = {name: getattr(options, name) for name in _CONFIG_FLAGS}
    # A seed of 0 is given, a flag that is False is not.
    given = [name for name, value in values.items() if not (value is None or value is False)]
    if given:
        flag = given[0].replace("_", "-")
        raise InvalidInput(f"`--{flag}` cannot be changed by `--resume`: a run keeps its config")
    experiment = run_experiment(options.resume)
    network = experiment.network
    if ":" in network.name and options.model is None:
        raise InvalidInput(
            f"the run in {options.resume} needs its own model again: --model {network.name}"
        )
    return experiment
