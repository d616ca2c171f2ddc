"""The text files of a run folder: config, environment, metrics, what is local, a sweep's plan."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from acert.errors import RunError
from acert.records.files import (
    CONFIG,
    ENVIRONMENT,
    LOCAL,
    METRICS,
    SWEEP,
    read,
    read_json,
    write,
    write_json,
)
from acert.untrusted import parsed_json

__all__ = [
    "Row",
    "first_difference",
    "place_of_data",
    "read_config",
    "read_environment",
    "read_local",
    "read_metrics",
    "read_sweep",
    "write_config",
    "write_environment",
    "write_local",
    "write_metrics",
    "write_sweep",
]

Row = dict[str, Any]


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes `config.json`; the schema is added."""
    write_json(folder / CONFIG, config)


def read_config(folder: Path) -> dict[str, Any]:
    """What `write_config` wrote, with the schema."""
    if not (folder / CONFIG).is_file():
        raise RunError(f"{folder} is no run folder: it has no {CONFIG}")
    return read_json(folder / CONFIG)


def first_difference(there: Any, here: Any, name: str = "") -> str | None:
    """The first field in which two JSON values differ, with both its values; None if equal."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in [*there, *(key for key in here if key not in there)]:
            inner = f"{name}.{key}" if name else str(key)
            found = first_difference(there.get(key, "nothing"), here.get(key, "nothing"), inner)
            if found is not None:
                return found
        return None
    # Compared as text, so that a tuple equals the list that it became in the file.
    old, new = json.dumps(there), json.dumps(here)
    return None if old == new else f"`{name}` is {old} there and {new} here"


def write_environment(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes `env.json`; the schema is added."""
    write_json(folder / ENVIRONMENT, facts)


def read_environment(folder: Path) -> dict[str, Any]:
    """What `write_environment` wrote, with the schema."""
    return read_json(folder / ENVIRONMENT)


def write_metrics(folder: Path, rows: Iterable[Row]) -> None:
    """Writes all rows of `metrics.jsonl` anew: a row is never half there."""
    try:
        lines = [json.dumps(row, allow_nan=False) + "\n" for row in rows]
    except ValueError as error:
        raise RunError(f"{METRICS} cannot hold a figure that is not finite: {error}") from error
    write(folder / METRICS, ["".join(lines).encode()])


def read_metrics(folder: Path) -> list[Row]:
    """The rows of `metrics.jsonl`, none if there is no such file yet."""
    path = folder / METRICS
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(read(path).splitlines(), start=1):
        try:
            rows.append(dict(parsed_json(line)))
        except (TypeError, ValueError) as error:
            raise RunError(f"{path} is damaged in line {number}: {error}") from error
    return rows


def write_local(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes `local.json`, what holds on this machine only; schema and inode are added."""
    write_json(folder / LOCAL, {"inode": folder.stat().st_ino, **facts})


def read_local(folder: Path) -> dict[str, Any]:
    """What `write_local` wrote; empty where there is no such file, as in a published run."""
    return read_json(folder / LOCAL) if (folder / LOCAL).is_file() else {}


def place_of_data(folder: Path) -> str | None:
    """Where the data of a run lay, from `local.json`; None if it does not say.

    Refused for a folder that was not made here: a stranger's file could name any place. The
    folder's inode tells, which stays when the folder is renamed and is hard to foresee.
    """
    facts = read_local(folder)
    place = facts.get("data_dir")
    if place is None:
        return None
    if not isinstance(place, str):
        raise RunError(f"{folder / LOCAL} is damaged: `data_dir` must be a path; got {place!r}")
    if facts.get("inode") != folder.stat().st_ino:
        raise RunError(
            f"the run in {folder} was made elsewhere, with its data in {place}: say where they "
            "are here (--data-dir, or `data_dir` in Python)"
        )
    return place


def write_sweep(folder: Path, plan: Mapping[str, Any]) -> None:
    """Writes `sweep.json`, the plan of a folder of runs; the schema is added."""
    write_json(folder / SWEEP, plan)


def read_sweep(folder: Path) -> dict[str, Any]:
    """What `write_sweep` wrote; a plan of no runs where there is no such file."""
    return read_json(folder / SWEEP) if (folder / SWEEP).is_file() else {"runs": []}
