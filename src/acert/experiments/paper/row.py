"""A row of a table of the paper as a value: what is published, and the run that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from acert.experiments.experiment import Experiment
from acert.experiments.override import number, override
from acert.experiments.recipes import in_range, recipe, with_epochs

__all__ = ["ROOT_STEPS", "Published", "Row", "Training"]

# The field of the number of root steps.
ROOT_STEPS = "settings.method.solver.max_steps"
# Changes that `acert train` has a flag of its own for.
_FLAGS = {"settings.max_radius": "--max-radius", ROOT_STEPS: "--steps"}


@dataclass(frozen=True, kw_only=True)
class Published:
    """What the paper prints of a row, in per cent; None where it prints nothing.

    `spread` belongs to accuracy, ACR and ART, over `n` runs. `certified` is the certified
    accuracy at the row's `at`, `change` the difference in ART to Table 1. `mean_art` is the mean
    of seven seeds (Table 5) where the row itself shows the best run.
    """

    accuracy: float | None = None
    acr: float | None = None
    art: float | None = None
    mean_art: float | None = None
    spread: tuple[float, float, float] | None = None
    n: int = 1
    certified: float | None = None
    change: float | None = None
    step_seconds: float | None = None
    hours: float | None = None


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run without its seed: a recipe, changes to it, and the radius to certify to.

    `changes` are (name, value) as `--set` takes them. `epochs` is the number of epochs where it
    is not the recipe's; the schedules stay as they are.
    """

    name: str
    dataset: str
    method: str
    certify_to: str
    kappa: float = 0.0
    changes: tuple[tuple[str, str], ...] = ()
    epochs: int | None = None

    @property
    def max_radius(self) -> float:
        """The largest radius that certification looks for (eps_max)."""
        return number(self.certify_to)

    @property
    def recipe_epochs(self) -> int:
        """How many epochs the recipe has."""
        return recipe(self.dataset, self.method, kappa=self.kappa).settings.epochs

    def experiment(self, seed: int = 0, *, epochs: int | None = None) -> Experiment:
        """The experiment of one seed, on the whole training set.

        With `epochs` the recipe is shrunk to that many, its schedules in proportion; a run that
        is shorter than the recipe keeps its share.
        """
        experiment = recipe(self.dataset, self.method, kappa=self.kappa)
        if epochs is not None and epochs != experiment.settings.epochs:
            experiment = with_epochs(experiment, epochs)
        for name, value in self._all_changes(epochs):
            experiment = override(experiment, name, value)
        experiment = override(in_range(experiment), "settings.seed", seed)
        return replace(experiment, train_on_all=True)

    def train_words(self, *, seed: int, epochs: int | None = None) -> list[str]:
        """The command that trains exactly `experiment(seed, epochs=epochs)`, without its places."""
        words = ["acert", "train", "--dataset", self.dataset, "--method", self.method]
        words += ["--kappa", f"{self.kappa:g}"]
        words += [] if epochs is None else ["--epochs", str(epochs)]
        for name, value in self._all_changes(epochs):
            words += [_FLAGS[name], value] if name in _FLAGS else ["--set", f"{name}={value}"]
        return [*words, "--seed", str(seed), "--train-on-all"]

    def folder_name(self, *, seed: int, epochs: int | None = None) -> str:
        """The name of the run's folder and of its record."""
        return f"{self.name}{'' if epochs is None else f'-e{epochs}'}-s{seed}"

    def _all_changes(self, epochs: int | None) -> Sequence[tuple[str, str]]:
        if self.epochs is None:
            return self.changes
        share = self.epochs / self.recipe_epochs
        own = self.epochs if epochs is None else max(1, round(epochs * share))
        return [*self.changes, ("settings.epochs", str(own))]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a table, or one point or curve of a figure.

    `part` is its table or figure, `worth` its place in the order of worth (1 first). `at` is the
    radius of a certified accuracy. `differs` says how our run differs from the paper's. A row
    that `shrinks` counts as done by a run of fewer epochs in proportion.
    """

    id: str
    part: str
    worth: int
    label: str
    training: Training
    published: Published
    seeds: tuple[int, ...] = (0,)
    at: str | None = None
    differs: str = ""
    shrinks: bool = False

    @property
    def dataset(self) -> str:
        """The name of the data set."""
        return self.training.dataset

    @property
    def kappa(self) -> float:
        """Share of standard loss."""
        return self.training.kappa
