"""All runs below some folders that may stand in one plot, and what had to be left out.

A damaged record is named and skipped. Runs that cannot be compared, because they are of another
data set or were certified to another radius, are refused by name: a plot of both would mislead.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

from acert import records
from acert.errors import AcertError, InvalidInput, RunError
from acert.report.certification import Certification
from acert.report.group import Group, group_runs
from acert.report.run import Run, printable, read_run

__all__ = ["Collection", "check_comparable", "collect", "counted", "read_runs"]

# What radii mean: the word for it, the flag that chooses, where it stands.
_MEANING: tuple[tuple[str, str | None, Callable[[Certification], Any]], ...] = (
    ("max radii", "--max-radius", lambda one: one.max_radius),
    ("numbers of test samples", None, lambda one: one.samples),
    ("test labels", None, lambda one: f"checksum {one.test_set:08x}"),
    ("bounds", "--bounds", lambda one: one.bounds),
    ("arithmetic", "--arithmetic", lambda one: one.arithmetic),
    ("margins", None, lambda one: "elided ones" if one.elide else "plain ones"),
    ("domains", None, lambda one: list(one.domain)),
)
# What an attack inside a certified radius means, where it need not be a wrong bound.
_INSIDE = {
    "real": (
        "by float32 rounding, which proofs in real arithmetic do not cover, or because bounds are "
        "wrong: acert certify RUN --attack tells which"
    ),
    "nearest": "radii of nearest arithmetic promise nothing",
}


@dataclass(frozen=True, eq=False)
class Collection:
    """Comparable runs, at least one of them certified, and complaints about what was skipped."""

    runs: tuple[Run, ...]
    complaints: tuple[str, ...]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """All runs, those of equal settings together."""
        return group_runs(self.runs)

    @cached_property
    def certified_groups(self) -> tuple[Group, ...]:
        """The groups with at least one certified run."""
        return tuple(group for group in self.groups if group.n)

    @property
    def uncertified(self) -> tuple[Run, ...]:
        """Runs that were trained and not certified."""
        return tuple(run for run in self.runs if run.certification is None)

    @property
    def summary(self) -> str:
        """How many runs there are, and how many had to be left out."""
        waiting = len(self.uncertified)
        return (
            f"{self.dataset}: {counted(len(self.runs) - waiting, 'certified run')} in "
            f"{counted(len(self.certified_groups), 'setting')}, {waiting} not certified, "
            f"{len(self.complaints)} skipped"
        )

    @property
    def alarms(self) -> tuple[str, ...]:
        """A sentence on each group in which attacks succeeded inside certified radii."""
        wrong, arithmetic = "the bounds are wrong", self.certification.arithmetic
        unsure = _INSIDE.get(arithmetic, wrong)
        return tuple(
            f"{group.label}: {group.attacks_inside} of {group.attacked_images} attacked images "
            "were broken inside their certified radius; "
            f"{wrong if group.judged and arithmetic != 'nearest' else unsure}"
            for group in self.certified_groups
            if group.attacks_inside
        )

    @property
    def certification(self) -> Certification:
        """The first one: in what it means it speaks for all of them."""
        return self.certified_groups[0].certified[0]

    @property
    def dataset(self) -> str:
        """The data set of all runs."""
        return self.runs[0].dataset

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of its classes."""
        return self.runs[0].classes


def collect(
    folders: Sequence[Path],
    *,
    dataset: str | None = None,
    max_radius: float | None = None,
    bounds: str | None = None,
    arithmetic: str | None = None,
) -> Collection:
    """The runs below the folders that the choices leave; refused where they cannot be compared.

    A choice of None takes everything. A run that is there twice, with equal settings and seed,
    counts once.
    """
    runs, complaints = read_runs(folders)
    below = ", ".join(printable(str(folder)) for folder in folders)
    if not runs:
        problems = f" ({'; '.join(complaints)})" if complaints else ""
        raise RunError(f"no runs found below {below}{problems}")
    choices: list[tuple[str, Any, Callable[[Run], Any]]] = [
        ("dataset", dataset, lambda run: run.dataset),
        ("max_radius", max_radius, lambda run: run.max_radius),
        ("bounds", bounds, lambda run: run.certification and run.certification.bounds),
        ("arithmetic", arithmetic, lambda run: run.certification and run.certification.arithmetic),
    ]
    for name, wanted, read in choices:
        kept = [run for run in runs if wanted is None or _equal(read(run), wanted)]
        if not kept:
            there = sorted({str(read(run)) for run in runs})
            raise InvalidInput(
                f"`{name}` must be that of a run below {below}: {', '.join(there)}; got {wanted}"
            )
        runs = kept
    runs, repeated = _without_repeats(runs)
    if not any(run.certification for run in runs):
        # A run on arrays in memory has no data set that a command could open.
        named = [run for run in runs if run.dataset != "arrays"]
        hint = f": acert certify {quote(str(named[0].folder))}" if named else ""
        raise RunError(f"none of the {len(runs)} runs below {below} is certified{hint}")
    check_comparable(runs)
    return Collection(runs=tuple(runs), complaints=(*complaints, *repeated))


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Every run below the folders, and a line about each that cannot be read.

    A run folder is one that holds `config.json`. A run is named by its path below the folder
    that was given, or by its whole path where that name is taken.
    """
    runs: list[Run] = []
    complaints: list[str] = []
    seen: set[Path] = set()
    taken: set[str] = set()
    for top in folders:
        if not top.is_dir():
            raise InvalidInput(f"`RUNS` must be folders; there is no folder {printable(str(top))}")
        found = {path.parent for path in top.rglob(records.CONFIG)}
        # Certificates of a model that was trained elsewhere; what method they show is not known.
        found |= {path.parent for path in top.rglob(records.CERTIFICATES)}
        complaints += [
            f"skipped: {printable(str(link))} is a link out of the folder; give what it leads to"
            for link in _links_out(top, folders)
        ]
        for folder in sorted(found):
            if folder.resolve() in seen:
                continue
            seen.add(folder.resolve())
            name = folder.relative_to(top).as_posix() if folder != top else folder.resolve().name
            try:
                run = read_run(folder, name if name not in taken else str(folder))
            except RunError as error:
                complaints.append(f"skipped: {printable(str(error))}")
            # Everything: a damaged file fails in any way, and must not cost the other runs.
            except Exception as error:
                kind = "" if isinstance(error, AcertError) else f"{type(error).__name__}: "
                what = printable(f"{folder} is damaged: {kind}{error}")
                complaints.append(f"skipped: {what}")
            else:
                taken.add(run.name)
                runs.append(run)
    return runs, complaints


def _links_out(top: Path, folders: Sequence[Path]) -> list[Path]:
    """Links below a folder that lead to runs outside of all folders: nothing follows them."""
    inside = [folder.resolve() for folder in folders]
    links = [
        Path(place, name)
        for place, names, _ in os.walk(top)
        for name in names
        if Path(place, name).is_symlink()
    ]
    return sorted(
        link
        for link in links
        if not any(link.resolve().is_relative_to(folder) for folder in inside)
        and any((*link.glob(records.CONFIG), *link.glob(f"*/{records.CONFIG}")))
    )


def counted(number: int, word: str) -> str:
    """Such as "1 run" and "2 runs"."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def check_comparable(runs: Sequence[Run]) -> None:
    """Refuses runs that may not stand in one plot, naming two of them and the difference."""
    _same("data sets", "--dataset", [(run.name, run.dataset) for run in runs])
    # Uncertified ones too: the page has one name a class.
    _same("classes", None, [(run.name, ", ".join(run.classes)) for run in runs])
    certified = [(run.name, run.certification) for run in runs if run.certification is not None]
    for what, flag, read in _MEANING:
        _same(what, flag, [(name, read(one)) for name, one in certified])
    told = [(name, f"checksum {one.images:08x}") for name, one in certified if one.images >= 0]
    _same("test images", None, told)


def _same(what: str, flag: str | None, values: Sequence[tuple[str, Any]]) -> None:
    for name, value in values[1:]:
        if not _equal(values[0][1], value):
            advice = f"choose one with {flag}" if flag else "give their folders one by one"
            raise InvalidInput(
                f"runs with different {what} cannot be in one plot: {values[0][0]} has "
                f"{values[0][1]}, {name} has {value}; {advice}"
            )


def _equal(one: object, other: object) -> bool:
    # Radii such as 8.8/255 come through a file, or from a command line with fewer digits.
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-4)
    return one == other


def _without_repeats(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The runs without second copies, certified copies first, and a complaint for each."""
    kept: dict[object, Run] = {}
    complaints = []
    for run in sorted(runs, key=lambda run: run.certification is None):
        key = (run.seed, tuple(sorted(run.settings.items())))
        if key in kept:
            complaints.append(
                f"skipped: {run.name} repeats {kept[key].name}, with equal settings and seed"
            )
        else:
            kept[key] = run
    order = {id(run): place for place, run in enumerate(runs)}
    return sorted(kept.values(), key=lambda run: order[id(run)]), complaints
