"""Runs that differ by their seeds only, as one: means and spreads over the seeds.

A series is what a line joins: groups that differ by kappa only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from acert import metrics
from acert.metrics import RadiusDistribution, Spread
from acert.report.appearance import Look, looks
from acert.report.certification import Certification
from acert.report.run import Run, method_place

__all__ = ["Band", "Group", "Series", "group_runs", "series_of", "smallest_kappa"]

Floats = npt.NDArray[np.float64]

_KAPPA = "method.kappa"
_SHARE = "method.bound_share"
_MANY = 2  # settings that are told in full
_SHORT = {"solver.max_steps": "root steps", "radius_schedule": "schedule"}
# Method, words of the variant, numbers of the variant.
_Order = tuple[tuple[int, str], list[str], list[float]]
_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)")
# As JSON writes it; text is in quotes there, and whole numbers are told in full.
_FRACTION = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")


@dataclass(frozen=True, eq=False)
class Band:
    """Mean, lowest and highest value over seeds at each x."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of equal settings, by seed; `variant` names what sets them apart from their method.

    `look` is shared by all groups of the method and variant, in every figure. Figures such as
    `acr` are those of the certified runs and need at least one; `n` counts them.
    """

    method: str
    kappa: float
    variant: str
    look: Look
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        """Such as "ACERT, root steps 10, \N{GREEK SMALL LETTER KAPPA} 0.25"."""
        kappa = f"\N{GREEK SMALL LETTER KAPPA} {self.kappa:g}"
        return ", ".join(part for part in (self.method, self.variant, kappa) if part)

    @cached_property
    def certified(self) -> tuple[Certification, ...]:
        """The certifications there are, in the order of seeds."""
        return tuple(run.certification for run in self.runs if run.certification is not None)

    @property
    def n(self) -> int:
        """How many of the runs are certified."""
        return len(self.certified)

    @cached_property
    def accuracy(self) -> Spread:
        """Accuracy over seeds."""
        return metrics.spread([one.accuracy for one in self.certified])

    @cached_property
    def acr(self) -> Spread:
        """ACR over seeds (Eq. 12)."""
        return metrics.spread([one.acr for one in self.certified])

    @cached_property
    def art(self) -> Spread:
        """ART over seeds (Eq. 13): the mean of each run's ART, as in Table 5."""
        return metrics.spread([one.art for one in self.certified])

    @cached_property
    def curve(self) -> Band:
        """Certified accuracy by radius (Figure 3)."""
        return _band(self.certified[0].curve.radius, [one.curve.accuracy for one in self.certified])

    @cached_property
    def class_radius(self) -> Band:
        """Mean certified radius by class; NaN where the test set has no such class."""
        rows = [one.class_radius for one in self.certified]
        return _band(np.arange(rows[0].size, dtype=np.float64), rows)

    @cached_property
    def distribution(self) -> RadiusDistribution:
        """Shares of radii, the mean over seeds."""
        parts = [one.distribution for one in self.certified]
        return RadiusDistribution(
            edges=parts[0].edges,
            share=np.mean([part.share for part in parts], axis=0),
            at_zero=float(np.mean([part.at_zero for part in parts])),
            at_max=float(np.mean([part.at_max for part in parts])),
        )

    @cached_property
    def gap(self) -> tuple[Band, Band] | None:
        """Certified accuracy and accuracy under attack by radius; None where nothing was attacked.

        Both are of the samples that were attacked.
        """
        attacks = [one.attack for one in self.certified if one.attack is not None]
        if not attacks:
            return None
        x = attacks[0].curve.radius
        lower = _band(x, [attack.certified.accuracy for attack in attacks])
        return lower, _band(x, [attack.curve.accuracy for attack in attacks])

    @cached_property
    def attacked_acr(self) -> Spread | None:
        """ACR of the attack's upper bounds over seeds; None where nothing was attacked."""
        found = [one.attack.acr for one in self.certified if one.attack is not None]
        return metrics.spread(found) if found else None

    @property
    def judged(self) -> bool:
        """Whether every attack inside a certified radius is known to contradict it."""
        return all(one.attack.judged for one in self.certified if one.attack is not None)

    @property
    def attacks_inside(self) -> int:
        """How many attacks succeeded within a certified radius, in all runs together."""
        return sum(one.attack.inside for one in self.certified if one.attack is not None)

    @property
    def attacked_images(self) -> int:
        """How many images were attacked, in all runs together."""
        return sum(one.attack.samples for one in self.certified if one.attack is not None)

    def track(self, name: str) -> Band | None:
        """One figure of the training at the epochs that all seeds have; None where there are none.

        Runs without the figure are left out.
        """
        tracks = [run.history[name] for run in self.runs if name in run.history]
        if not tracks:
            return None
        values = [dict(zip(t.epoch.tolist(), t.value.tolist(), strict=True)) for t in tracks]
        shared = sorted(set.intersection(*(set(one) for one in values)))
        if not shared:
            return None
        rows = [np.asarray([one[epoch] for epoch in shared]) for one in values]
        return _band(np.asarray(shared, dtype=np.float64), rows)


@dataclass(frozen=True, eq=False)
class Series:
    """Groups of rising kappa that are otherwise alike, at least one."""

    method: str
    variant: str
    groups: tuple[Group, ...]

    @property
    def label(self) -> str:
        """Such as "ACERT, root steps 10"."""
        return ", ".join(part for part in (self.method, self.variant) if part)

    @property
    def look(self) -> Look:
        """How all of its groups are drawn."""
        return self.groups[0].look


def group_runs(runs: Sequence[Run]) -> tuple[Group, ...]:
    """Runs of equal settings together, ordered by method, variant and kappa."""
    alike: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        alike.setdefault(tuple(sorted(run.settings.items())), []).append(run)
    leading = [members[0] for members in alike.values()]
    series = [
        (one.method, _variant(one, [other for other in leading if other.method == one.method]))
        for one in leading
    ]
    drawn = looks(sorted(set(series), key=lambda pair: _order(*pair)))
    groups = [
        Group(
            method=method,
            kappa=members[0].kappa,
            variant=variant,
            look=drawn[method, variant],
            runs=tuple(sorted(members, key=lambda run: run.seed)),
        )
        for (method, variant), members in zip(series, alike.values(), strict=True)
    ]
    return tuple(sorted(groups, key=_place))


def series_of(groups: Sequence[Group]) -> tuple[Series, ...]:
    """The groups by method and variant, each series by rising kappa."""
    found: dict[tuple[str, str], list[Group]] = {}
    for group in sorted(groups, key=_place):
        found.setdefault((group.method, group.variant), []).append(group)
    return tuple(Series(*key, groups=tuple(members)) for key, members in found.items())


def smallest_kappa(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The group of the smallest kappa of each series: what the paper's Figure 3 shows."""
    return tuple(series.groups[0] for series in series_of(groups))


def _place(group: Group) -> tuple[_Order, float]:
    return _order(group.method, group.variant), group.kappa


def _order(method: str, variant: str) -> _Order:
    """By method, then by variant with its numbers as numbers: 10 root steps after 2."""
    parts = _NUMBER.split(variant)
    return method_place(method), parts[::2], [float(part) for part in parts[1::2]]


def _variant(run: Run, siblings: Sequence[Run]) -> str:
    """The settings in which a run differs from others of its method, kappa apart.

    Of many such settings those that most of the others share go without saying. The share of bounds
    in a loss is always said: without it nobody knows which loss that is.
    """
    names = list(dict.fromkeys(name for one in siblings for name in one.settings))
    differing = [
        name
        for name in names
        if not name.endswith(_KAPPA) and len({one.settings.get(name) for one in siblings}) > 1
    ]
    classes = [name for name in differing if name.endswith(".class")]
    plain = [name for name in differing if not name.startswith("data.")]

    def beneath(name: str) -> list[str]:
        return [one for one in classes if name != one and name.startswith(one[: -len("class")])]

    many = sum(not beneath(name) for name in plain) > _MANY
    words = [
        f"{_short(name)} {_told(value, {value})}"
        for name, value in run.settings.items()
        if name.endswith(_SHARE) and name not in differing
    ]
    for name in differing:
        held = [one.settings.get(name) for one in siblings]
        usual = None not in held and 2 * held.count(run.settings.get(name)) > len(held)
        if many and usual and not name.endswith(_SHARE):
            continue
        # Where a class differs its fields do too, and what the data are follows from other fields:
        # such a field says something among runs that are alike in those.
        said = plain if name.startswith("data.") else beneath(name)
        alike = [one for one in siblings if _agree(one, run, said)]
        if name in run.settings and len({one.settings.get(name) for one in alike}) > 1:
            values = {one.settings[name] for one in siblings if name in one.settings}
            words.append(f"{_short(name)} {_told(run.settings[name], values)}")
    return ", ".join(words)


def _agree(one: Run, other: Run, names: Sequence[str]) -> bool:
    return all(one.settings.get(name) == other.settings.get(name) for name in names)


def _short(name: str) -> str:
    plain = name.removesuffix(".class")
    for ending, word in _SHORT.items():
        if plain.endswith(ending):
            return word
    field = plain.split("settings.")[-1].removeprefix("experiment.").removeprefix("method.")
    return field.replace("_", " ").replace("optimizer.", "")


def _told(value: str, values: set[str]) -> str:
    """A setting as text; its numbers with six digits where those tell all `values` apart."""
    rounded = {one: _rounded(one) for one in values}
    told = rounded[value] if len(set(rounded.values())) == len(values) else value
    return "none" if told == "null" else told.strip('"')


def _rounded(value: str) -> str:
    return f"{float(value):.6g}" if _FRACTION.fullmatch(value) else value


def _band(x: Floats, rows: Sequence[Floats]) -> Band:
    table = np.asarray(rows, dtype=np.float64)
    return Band(x=x, mean=table.mean(axis=0), low=table.min(axis=0), high=table.max(axis=0))
