"""A file of a run folder: its name, the schema it states, how it is written and read.

It is written beside its place and then renamed, so a crash leaves the old one or the new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy.typing as npt

from acert.errors import RunError
from acert.untrusted import fresh, parsed_json, read_text, within

__all__ = [
    "ATTACKS",
    "CERTIFICATES",
    "CONFIG",
    "ENVIRONMENT",
    "EXAMPLES",
    "LOCAL",
    "METRICS",
    "PREVIOUS_STATE",
    "SCHEMA",
    "STATE",
    "SWEEP",
    "WEIGHTS",
    "Array",
    "Arrays",
    "Damaged",
    "NewerSchema",
    "check_schema",
    "first_line",
    "is_draft",
    "read",
    "read_json",
    "write",
    "write_json",
]

SCHEMA = 1

CONFIG = "config.json"
METRICS = "metrics.jsonl"
ENVIRONMENT = "env.json"
LOCAL = "local.json"
WEIGHTS = "model.safetensors"
STATE = "state.safetensors"
PREVIOUS_STATE = "state.previous.safetensors"
CERTIFICATES = "certificates.npz"
EXAMPLES = "examples.npz"
SWEEP = "sweep.json"
ATTACKS = "attacks.npz"

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]


class NewerSchema(RunError):
    """A file of a newer acert: it is not damaged, so nothing may replace it."""


class Damaged(RunError):
    """A file that cannot be read; a state then has a predecessor."""


def write(path: Path, parts: Iterable[bytes | memoryview], *, keep: Path | None = None) -> None:
    """The whole content or the old file, whatever happens; the old one moves to `keep`."""
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with fresh(draft) as stream:
            stream.writelines(parts)
            stream.flush()
            os.fsync(stream.fileno())
        if keep is not None and path.is_file():
            path.replace(keep)
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise RunError(
            f"{path.name} could not be written to {path.parent}: {error.strerror or error}; "
            "what was there before is untouched"
        ) from error
    # The rename itself is on disk only once the folder is; not every system can do that.
    with suppress(OSError):
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read(path: Path) -> str:
    """The text of a file; refused where it leads out of its folder."""
    try:
        return read_text(within(path, path.parent))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {first_line(error)}") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes an object as JSON; the schema is added."""
    write(path, [(json.dumps({"schema": SCHEMA, **value}, indent=2) + "\n").encode()])


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote, with the schema."""
    try:
        value = parsed_json(read(path))
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} is damaged: it does not hold an object")
    check_schema(path, value.get("schema"))
    return value


def check_schema(path: Path, schema: object) -> None:
    """Refuses a file that names no schema, or one of a newer acert."""
    if not isinstance(schema, int):
        raise Damaged(f"{path} is damaged: it names no schema")
    if schema > SCHEMA:
        raise NewerSchema(
            f"{path} has schema {schema}, this acert knows schemas up to {SCHEMA}: "
            "a newer acert is needed"
        )


def is_draft(path: Path) -> bool:
    """Whether `write` was stopped before this file came to its place."""
    return path.name.startswith(".") and path.suffix == ".tmp"


def first_line(error: BaseException) -> str:
    """What an error says, short enough for the middle of a sentence."""
    return (str(error) or type(error).__name__).splitlines()[0]
