"""The experiment that a user chose: a recipe with the changes of the command line's flags."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any

from torch import nn

from acert.errors import InvalidInput
from acert.experiments.experiment import Experiment, Network
from acert.experiments.override import field_names, nearest, override
from acert.experiments.recipes import in_range, recipe, with_epochs
from acert.methods import Acert
from acert.schedules import FullRadius

__all__ = ["SCHEDULES", "chosen_experiment", "own_factory", "own_model"]

# Of the radius cap (Table 2): the recipe's warm-up, or the full radius from the first step on.
SCHEDULES = ("smooth", "none")


def chosen_experiment(
    *,
    dataset: str = "digits",
    method: str = "acert",
    kappa: float | None = None,
    steps: int | None = None,
    schedule: str = "smooth",
    epochs: int | None = None,
    max_radius: float | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    model: str | None = None,
    changes: Sequence[str] = (),
    train_on_all: bool = False,
    domain: tuple[float, float] | None = None,
) -> Experiment:
    """The recipe of a method on a data set, with what is given changed, `changes` last.

    Schedules are scaled with `epochs`. `model` is a name of `acert.models` or a user's
    `package.module:factory`. `changes` are written as for `--set`, name=value. Unless they name a
    precision, it is one whose range is enough (`recipes.in_range`).

    >>> chosen_experiment(dataset="mnist", epochs=10, steps=5).settings.method.solver.max_steps
    5
    """
    experiment = recipe(dataset, method, kappa=kappa)
    if domain is not None:
        experiment = override(experiment, "settings.domain", domain)
    if steps is not None:
        if not isinstance(experiment.settings.method, Acert):
            raise InvalidInput(f"`--steps` must come with the method acert; got {method}")
        experiment = override(experiment, "settings.method.solver.max_steps", steps)
    if epochs is not None and epochs != experiment.settings.epochs:
        experiment = with_epochs(experiment, epochs)
    if schedule not in SCHEDULES:
        raise InvalidInput(f"`schedule` must be one of {', '.join(SCHEDULES)}; got {schedule!r}")
    if schedule == "none":
        experiment = override(experiment, "settings.radius_schedule", FullRadius())
    given = {"max_radius": max_radius, "batch_size": batch_size, "seed": seed}
    for name, value in given.items():
        if value is not None:
            experiment = override(experiment, f"settings.{name}", value)
    if model is not None:
        network = Network(name=model, initialization=experiment.network.initialization)
        experiment = replace(experiment, network=network)
    read = []
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise InvalidInput(f"`--set` must be given as name=value; got {change!r}")
        read.append((name.strip(), text.strip()))
    for name, text in _values_first(experiment, read):
        experiment = override(experiment, name, text)
    if not {"precision", "settings.precision"} & {name for name, _ in read}:
        experiment = in_range(experiment)
    return replace(experiment, train_on_all=True) if train_on_all else experiment


def _values_first(experiment: Experiment, changes: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Changes of what has fields of its own before those of fields, which they might take back."""
    known = field_names(experiment)

    def place(change: tuple[str, str]) -> int:
        own = [path for path in known if f".{path}".endswith(f".{change[0]}")]
        depths = [path.count(".") for path in own if is_dataclass(known[path])]
        return min(depths, default=99)

    return sorted(changes, key=place)


def own_factory(name: str) -> Any:
    """What `package.module:factory` names; refused if it is a module.

    That would be trained in place: every run of a process would go on from the one before.
    """
    found = own_model(name)
    if isinstance(found, nn.Module):
        raise InvalidInput(
            f"`--model` {name} must be a function that makes a new module for each run of a sweep; "
            "got a module"
        )
    return found


def own_model(name: str) -> Any:
    """What `package.module:factory` names; modules are looked for in the current folder too."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise InvalidInput(f"`--model` must be given as package.module:factory; got {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    # Everything: a user's module may fail in any way while it is imported.
    except Exception as error:
        raise InvalidInput(
            f"`--model` {name}: {module} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if attribute not in vars(found):
        raise InvalidInput(
            f"`--model` {name}: {module} has no {attribute!r}{nearest(attribute, vars(found))}"
        )
    return vars(found)[attribute]
