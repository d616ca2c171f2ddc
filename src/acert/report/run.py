"""One run folder as a value: what it was, what was proven of it, how it was trained.

Histories are thinned, so that a page with hundreds of runs stays light.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from acert import records
from acert.errors import RunError
from acert.optimizers import Adam
from acert.report.certification import Certification, read_certification

__all__ = [
    "METHOD_NAMES",
    "Environment",
    "Run",
    "Track",
    "method_place",
    "printable",
    "read_run",
]

Floats = npt.NDArray[np.float64]

# The last two are there so that a run is not resumed with others; older runs do not tell them.
_NO_SETTINGS = {"schema", "seed", "layers", "validation_sha256"}
# The names in papers, by the class that a config names, in the order of legends.
METHOD_NAMES = {
    "Acert": "ACERT",
    "AcertFast": "ACERT-fast",
    "FastIBP": "FastIBP",
    "CrownIBP": "CROWN-IBP",
    "Sabr": "SABR",
    "CcIBP": "CC-IBP",
    "MtlIBP": "MTL-IBP",
    "ExpIBP": "Exp-IBP",
    "Standard": "Standard",
}
_HISTORY_POINTS = 100
# Sums over seeds, and per cent, of what is not above this are finite too.
_LARGEST = 1e100
# Facts of a row that are no curve.
_NO_CURVE = frozenset({"epoch", "step", "seconds"})


@dataclass(frozen=True, eq=False)
class Track:
    """One figure of the training, such as the loss, at rising epochs; thinned."""

    epoch: npt.NDArray[np.int64]
    value: Floats


@dataclass(frozen=True)
class Environment:
    """Where a run was made; empty or None where its record does not say."""

    hardware: str = ""
    commit: str = ""
    version: str = ""
    seconds: float | None = None


@dataclass(frozen=True, eq=False)
class Run:
    """A run folder; `certification` is None where the run was only trained.

    `settings` holds every field of the config but the seed, flat: two runs with equal settings
    differ by their seeds only. `trained_to` is the max_radius of the training, `max_radius` that of
    the certification, if there is one.
    """

    name: str
    folder: Path
    dataset: str
    method: str
    kappa: float
    seed: int
    epochs: int
    root_steps: int | None
    radius_schedule: str
    max_radius: float
    trained_to: float
    classes: tuple[str, ...]
    settings: Mapping[str, str]
    history: Mapping[str, Track]
    environment: Environment
    certification: Certification | None


def read_run(folder: Path, name: str | None = None) -> Run:
    """The run in a folder; a damaged file raises and is named."""
    path = folder / records.CONFIG
    config = records.read_config(folder)
    experiment = config.get("experiment", config)
    settings = _object(path, experiment, "settings")
    method = _object(path, settings, "method")
    schedule = _object(path, settings, "radius_schedule")
    data = _object(path, config, "data")
    kind = _value(path, method, "class", str)
    classes = _value(path, data, "classes", list)
    certification = None
    if (folder / records.CERTIFICATES).is_file():
        certification = read_certification(folder, classes=len(classes))
    trained_to = float(_value(path, settings, "max_radius", float))
    younger = {}
    if "optimizer" not in settings:  # a run from before there was a choice had Adam
        place = "settings" if experiment is config else "experiment.settings"
        younger = _flat({"class": "Adam", **vars(Adam())}, name=f"{place}.optimizer")
    return Run(
        name=printable(name or folder.name),
        folder=folder,
        dataset=printable(str(experiment.get("dataset") or data.get("name") or "arrays")),
        method=METHOD_NAMES.get(kind, printable(kind)),
        kappa=float(_value(path, method, "kappa", float)),
        seed=_value(path, settings, "seed", int),
        epochs=_value(path, settings, "epochs", int),
        root_steps=_root_steps(path, method.get("solver")),
        radius_schedule=printable(_value(path, schedule, "class", str)),
        max_radius=trained_to if certification is None else certification.max_radius,
        trained_to=trained_to,
        classes=tuple(printable(str(item)) for item in classes),
        settings=_flat(config, drop=_NO_SETTINGS) | younger,
        history=_history(folder),
        environment=_environment(folder),
        certification=certification,
    )


def method_place(method: str) -> tuple[int, str]:
    """Where a method stands in legends: ours first, others by name."""
    known = list(METHOD_NAMES.values())
    return (known.index(method) if method in known else len(known), method)


def printable(text: str) -> str:
    """The text with what a terminal or a file cannot show, such as escape codes, replaced."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


# -- config and environment ---------------------------------------------------------------


def _object(path: Path, parent: object, key: str) -> Mapping[str, Any]:
    value = parent.get(key) if isinstance(parent, Mapping) else None
    if not isinstance(value, Mapping):
        raise RunError(f"{path} is damaged: it has no object {key!r}")
    return value


def _value(path: Path, parent: Mapping[str, Any], key: str, kind: type) -> Any:
    value = parent.get(key)
    # bool is an int to Python.
    usable = isinstance(value, kind) and not isinstance(value, bool)
    if not (_is_number(value) if kind is float else usable):
        raise RunError(f"{path} is damaged: {key!r} must be of type {kind.__name__}; got {value!r}")
    return value


def _is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is one that can be drawn: NaN is a float to JSON, and a bool an int to Python."""
    # Compared: whether an integer of a thousand digits is finite cannot be asked.
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST
    )


def _root_steps(path: Path, solver: object) -> int | None:
    if not isinstance(solver, Mapping) or solver.get("max_steps") is None:
        return None
    return int(_value(path, solver, "max_steps", int))


def _flat(value: object, drop: set[str] | None = None, name: str = "") -> dict[str, str]:
    """Every leaf of nested objects as text, by its dotted name."""
    if not isinstance(value, Mapping):
        return {name: json.dumps(_plain(value))}
    found: dict[str, str] = {}
    for key, item in value.items():
        if drop is None or key not in drop:
            found |= _flat(item, drop, f"{name}.{key}" if name else str(key))
    return found


def _plain(value: Any) -> Any:
    """The value with whole numbers as such: kappa 0 and 0.0 are one setting."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _environment(folder: Path) -> Environment:
    if not (folder / records.ENVIRONMENT).is_file():
        return Environment()
    facts = records.read_environment(folder)
    gpu, cpu, cores = facts.get("gpu"), facts.get("cpu"), facts.get("cores")
    hardware = gpu or (f"{cpu}, {cores} cores" if cpu and cores else cpu or "")
    seconds = facts.get("seconds")
    return Environment(
        hardware=printable(str(hardware)),
        commit=printable(str(facts.get("commit") or "")),
        version=printable(str(facts.get("acert") or "")),
        seconds=float(seconds) if _is_number(seconds) else None,
    )


def _history(folder: Path) -> dict[str, Track]:
    """A track per figure of `metrics.jsonl`, each with at most 100 points, the last one kept."""
    points: dict[str, list[tuple[int, float]]] = {}
    for number, row in enumerate(records.read_metrics(folder), start=1):
        epoch = row.get("epoch")
        if not isinstance(epoch, int) or not 0 <= epoch < 2**62:
            raise RunError(f"{folder / records.METRICS} is damaged in line {number}: no epoch")
        for name, value in row.items():
            if name not in _NO_CURVE and _is_number(value):
                points.setdefault(printable(name), []).append((epoch, float(value)))
    tracks = {}
    for name, found in points.items():
        kept = [found[i] for i in _thinned(len(found))]
        epochs, values = zip(*kept, strict=True)
        tracks[name] = Track(np.asarray(epochs, dtype=np.int64), np.asarray(values, dtype=float))
    return tracks


def _thinned(count: int) -> list[int]:
    if count <= _HISTORY_POINTS:
        return list(range(count))
    return [int(i) for i in np.linspace(0, count - 1, _HISTORY_POINTS).round()]
