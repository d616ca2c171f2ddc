"""The run folder: which files it holds, how they are written, and how they are read back.

| file | content |
| --- | --- |
| `config.json` | schema and everything needed to repeat the run |
| `metrics.jsonl` | a row per epoch |
| `env.json` | commit, versions, hardware, seconds |
| `local.json` | where the data lay on this machine; no part of a published record |
| `model.safetensors` | the weights, once the run is finished |
| `state.safetensors`, `state.previous.safetensors` | the last two states to resume from |
| `certificates.npz`, `examples.npz` | written by certification |
| `attacks.npz` | points of the first successful attacks; no part of a published record |

The folder above may hold `sweep.json`, the plan of a sweep.

A file is written beside its place and then renamed, so a crash leaves the old one or the new one.
Everything is read as data: JSON, safetensors and plain arrays, nothing pickled.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from acert.errors import InvalidInput, RunError
from acert.untrusted import (
    check_header,
    fresh,
    parsed_json,
    read_npz,
    read_text,
    shown,
    within,
)

__all__ = [
    "SCHEMA",
    "NewerSchema",
    "Row",
    "State",
    "check_free",
    "create",
    "drop_previous_state",
    "first_difference",
    "is_finished",
    "make_writable",
    "place_of_data",
    "read_attacks",
    "read_certificates",
    "read_config",
    "read_environment",
    "read_examples",
    "read_local",
    "read_metrics",
    "read_state",
    "read_sweep",
    "read_weights",
    "rounded_down",
    "rounded_up",
    "write_attacks",
    "write_certificates",
    "write_config",
    "write_environment",
    "write_examples",
    "write_local",
    "write_metrics",
    "write_state",
    "write_sweep",
    "write_weights",
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
Row = dict[str, Any]

# One key only: safetensors writes several in an order that differs from process to process.
_FACTS = "acert"
# `Status.CERTIFIED_TO_MAX`: the radius is `max_radius` itself.
_TO_MAX = 1
_COLUMNS: dict[str, type[np.generic]] = {
    "index": np.int64,
    "label": np.int64,
    "prediction": np.int64,
    "radius": np.float32,
    "status": np.uint8,
    "margin": np.float32,
    "attack_radius": np.float32,
}
# What holds for all samples, with the kinds of numpy types that may say so.
_VALUES = {
    "max_radius": "fiu",
    "arithmetic": "U",
    "bounds": "U",
    "elide": "b",
    "violations": "iu",
}


class State(NamedTuple):
    """Arrays and plain facts of a resumable state; `complaint` if the newest was unusable."""

    arrays: dict[str, Array]
    facts: dict[str, Any]
    complaint: str | None


# -- the folder and its text files --------------------------------------------------------


def check_free(folder: Path) -> None:
    """Refuses a folder that already holds anything."""
    # Drafts of a run that was killed before its first file count as nothing.
    if folder.is_file() or (
        folder.is_dir() and not all(_is_draft(path) for path in folder.iterdir())
    ):
        raise RunError(
            f"the run folder {folder} exists already: choose another, or go on with it: "
            f"acert train --resume {folder}"
        )


def create(folder: Path) -> None:
    """Makes the folder of a new run, with the folders above it."""
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"the run folder {folder} cannot be made: {error.strerror or error}"
        ) from error


def make_writable(folder: Path) -> None:
    """Makes the folder if there is none, and finds out whether a file can be written there."""
    probe = folder / ".probe.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with fresh(probe):
            pass
        probe.unlink()
    except OSError as error:
        raise RunError(f"nothing can be written to {folder}: {error.strerror or error}") from error


def is_finished(folder: Path) -> bool:
    """Whether the run came to its end: the weights are written last."""
    return (folder / WEIGHTS).is_file()


def write_local(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes `local.json`, what holds on this machine only; schema and inode are added."""
    _write_json(folder / LOCAL, {"inode": folder.stat().st_ino, **facts})


def read_local(folder: Path) -> dict[str, Any]:
    """What `write_local` wrote; empty where there is no such file, as in a published run."""
    return _read_json(folder / LOCAL) if (folder / LOCAL).is_file() else {}


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


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes `config.json`; the schema is added."""
    _write_json(folder / CONFIG, config)


def read_config(folder: Path) -> dict[str, Any]:
    """What `write_config` wrote, with the schema."""
    if not (folder / CONFIG).is_file():
        raise RunError(f"{folder} is no run folder: it has no {CONFIG}")
    return _read_json(folder / CONFIG)


def write_environment(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes `env.json`; the schema is added."""
    _write_json(folder / ENVIRONMENT, facts)


def read_environment(folder: Path) -> dict[str, Any]:
    """What `write_environment` wrote, with the schema."""
    return _read_json(folder / ENVIRONMENT)


def write_sweep(folder: Path, plan: Mapping[str, Any]) -> None:
    """Writes `sweep.json`, the plan of a folder of runs; the schema is added."""
    _write_json(folder / SWEEP, plan)


def read_sweep(folder: Path) -> dict[str, Any]:
    """What `write_sweep` wrote; a plan of no runs where there is no such file."""
    return _read_json(folder / SWEEP) if (folder / SWEEP).is_file() else {"runs": []}


def write_metrics(folder: Path, rows: Iterable[Row]) -> None:
    """Writes all rows of `metrics.jsonl` anew: a row is never half there."""
    try:
        lines = [json.dumps(row, allow_nan=False) + "\n" for row in rows]
    except ValueError as error:
        raise RunError(f"{METRICS} cannot hold a figure that is not finite: {error}") from error
    _write(folder / METRICS, ["".join(lines).encode()])


def read_metrics(folder: Path) -> list[Row]:
    """The rows of `metrics.jsonl`, none if there is no such file yet."""
    path = folder / METRICS
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        try:
            rows.append(dict(parsed_json(line)))
        except (TypeError, ValueError) as error:
            raise RunError(f"{path} is damaged in line {number}: {error}") from error
    return rows


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


# -- weights and state --------------------------------------------------------------------


def write_weights(folder: Path, arrays: Arrays) -> None:
    """Writes `model.safetensors`: equal weights give equal bytes."""
    _write(folder / WEIGHTS, _tensors(arrays, {}))


def read_weights(folder: Path) -> dict[str, Array]:
    """The arrays of `model.safetensors` by name."""
    path = folder / WEIGHTS
    if not path.is_file():
        unfinished = (folder / CONFIG).is_file()
        hint = f": the run is not finished; acert train --resume {folder}" if unfinished else ""
        raise RunError(f"{folder} has no {WEIGHTS}{hint}")
    return _read_tensors(path)[0]


def write_state(folder: Path, arrays: Arrays, facts: Mapping[str, Any]) -> None:
    """Writes `state.safetensors`; the one before is kept as `state.previous.safetensors`."""
    _write(folder / STATE, _tensors(arrays, facts), keep=folder / PREVIOUS_STATE)


def read_state(folder: Path) -> State | None:
    """The newest usable state; None if none was ever written.

    A missing or damaged `state.safetensors` is replaced by the one before, and `complaint` says
    so. The damaged file is removed, so that it does not become the previous one.
    """
    newest, previous = folder / STATE, folder / PREVIOUS_STATE
    if not newest.is_file() and not previous.is_file():
        return None
    try:
        return State(*_read_tensors(newest), None)
    except _Damaged as error:
        damage = str(error)
    try:
        arrays, facts = _read_tensors(previous)
    except _Damaged as error:
        raise RunError(f"{folder} has no usable state: {damage}; {error}") from error
    newest.unlink(missing_ok=True)
    return State(
        arrays, facts, f"{damage}; going on from {PREVIOUS_STATE}, step {facts.get('step')}"
    )


def drop_previous_state(folder: Path) -> None:
    """Removes the state before the last one: a finished run needs no second chance."""
    (folder / PREVIOUS_STATE).unlink(missing_ok=True)


class NewerSchema(RunError):
    """A file of a newer acert: it is not damaged, so nothing may replace it."""


class _Damaged(RunError):
    """A file that cannot be read; a state then has a predecessor."""


def _tensors(arrays: Arrays, facts: Mapping[str, Any]) -> list[bytes | memoryview]:
    """A safetensors file in parts: its header, then every array where it lies.

    `safetensors.numpy.save` copies it all twice and lets no other thread run meanwhile: 0.2 s for a
    state of CNN7, in which a GPU runs dry.
    """
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    for name, array in dense.items():
        if array.dtype.kind not in "fiub" or not array.dtype.isnative:
            raise InvalidInput(f"`{name}` must hold numbers of this machine; got {array.dtype}")
    text = json.dumps({"schema": SCHEMA, **facts, "crc32": _checksum(dense)}, allow_nan=False)
    header: dict[str, Any] = {"__metadata__": {_FACTS: text}}
    parts: list[bytes | memoryview] = []
    end = 0
    # The largest numbers first, so that each lies at a multiple of its size.
    for name in sorted(dense, key=lambda name: (-dense[name].itemsize, name)):
        array = dense[name]
        begin, end = end, end + array.nbytes
        kind = "BOOL" if array.dtype == bool else f"{array.dtype.kind.upper()}{8 * array.itemsize}"
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": (begin, end)}
        parts.append(array.reshape(-1).view(np.uint8).data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return [len(head).to_bytes(8, "little"), head, *parts]


def _read_tensors(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        check_header(within(path, path.parent))
        with safe_open(path, framework="np") as file:
            facts = dict(parsed_json((file.metadata() or {})[_FACTS]))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no dict
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _Damaged(f"{path} is missing or damaged ({_first_line(error)})") from error
    _check_schema(path, facts.get("schema"))
    if facts.get("crc32") != _checksum(arrays):
        raise _Damaged(f"{path} is damaged (its checksum is wrong)")
    return arrays, facts


def _checksum(arrays: Arrays) -> int:
    """CRC-32 of all arrays in order of their names; damage is looked for, not forgery."""
    value = 0
    for name in sorted(arrays):
        content = arrays[name].reshape(-1).view(np.uint8).data
        value = zlib.crc32(content, zlib.crc32(name.encode(), value))
    return value


# -- certificates -------------------------------------------------------------------------


def write_certificates(folder: Path, columns: Mapping[str, Any]) -> None:
    """Writes `certificates.npz`: a row per sample, and what the radii mean.

    `columns` has index, label, prediction, radius, status, margin (at radius 0) and
    attack_radius (NaN where none was looked for, infinity where no attack succeeded, otherwise
    rounded up to float32), one entry a sample each, and besides the values max_radius,
    arithmetic, bounds, elide, domain and violations. Radii are stored as float32, rounded
    towards 0, so that they stay proven.
    """
    stored = {name: np.asarray(value) for name, value in columns.items()}
    stored |= {name: stored[name].astype(dtype) for name, dtype in _COLUMNS.items()}
    stored["radius"] = rounded_down(np.asarray(columns["radius"], dtype=np.float64))
    for name in ("label", "prediction"):
        stored[name] = _narrow(stored[name])
    # Left out where it is the position itself, as in a whole test set.
    if np.array_equal(stored["index"], np.arange(len(stored["radius"]))):
        del stored["index"]
    _write_arrays(folder / CERTIFICATES, stored)


def read_certificates(folder: Path) -> dict[str, Any]:
    """The fields of `Certificates`; radii as float64, max_radius where proven so far."""
    path = folder / CERTIFICATES
    found: dict[str, Any] = _read_arrays(path)
    if "radius" in found:
        found.setdefault("index", np.arange(len(found["radius"])))
    found.setdefault("violations", np.array(-1))  # older files do not tell
    absent = sorted({*_COLUMNS, *_VALUES, "domain"} - set(found))
    if absent:
        raise RunError(f"{path} is damaged: it does not hold {', '.join(absent)}")
    lengths = {found[name].shape for name in _COLUMNS}
    if len(lengths) > 1 or len(next(iter(lengths))) != 1:
        raise RunError(f"{path} is damaged: its columns have the shapes {sorted(lengths)}")
    for name, kinds, shape in _wanted(next(iter(lengths))):
        kind = found[name].dtype.kind
        if kind not in kinds or found[name].shape != shape:
            raise RunError(
                f"{path} is damaged: `{name}` must not be of type {found[name].dtype} and "
                f"shape {found[name].shape}"
            )
    # Narrow as they are stored, a difference of two labels would wrap around.
    found |= {name: found[name].astype(np.int64) for name in ("index", "label", "prediction")}
    radius = found["radius"].astype(np.float64)
    found["radius"] = np.where(found["status"] == _TO_MAX, float(found["max_radius"]), radius)
    found["domain"] = tuple(found["domain"].tolist())
    found |= {name: found[name].item() for name in _VALUES}
    return found | {name: shown(found[name]) for name in ("arithmetic", "bounds")}


def _wanted(column: tuple[int, ...]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Every array of the certificates with its kinds and its shape."""
    for name, dtype in _COLUMNS.items():
        yield name, "f" if issubclass(dtype, np.floating) else "iu", column
    for name, kinds in _VALUES.items():
        yield name, kinds, ()
    yield "domain", "fiu", (2,)


def _narrow(column: Array) -> Array:
    """Whole numbers in the smallest unsigned type that holds them; as they are if negative."""
    if column.size == 0 or column.min() < 0:
        return column
    return column.astype(np.min_scalar_type(column.max()))


def rounded_down(radius: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """The largest float32 numbers that are not above the radii, which are at least 0."""
    nearest = radius.astype(np.float32)
    return np.where(nearest > radius, np.nextafter(nearest, np.float32(0)), nearest)


def rounded_up(radius: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """The smallest float32 numbers that are not below the radii, infinity among them."""
    nearest = radius.astype(np.float32)
    return np.where(nearest < radius, np.nextafter(nearest, np.float32(np.inf)), nearest)


def write_examples(folder: Path, columns: Arrays) -> None:
    """Writes `examples.npz`: images as uint8, and their positions in the test set."""
    _write_arrays(folder / EXAMPLES, columns)


def read_examples(folder: Path) -> dict[str, Array]:
    """What `write_examples` was given."""
    return _read_arrays(folder / EXAMPLES)


def write_attacks(folder: Path, columns: Arrays) -> None:
    """Writes `attacks.npz`: points as float32, whose they are, how far and by which margin."""
    _write_arrays(folder / ATTACKS, columns)


def read_attacks(folder: Path) -> dict[str, Array]:
    """What `write_attacks` was given."""
    return _read_arrays(folder / ATTACKS)


def _write_arrays(path: Path, arrays: Arrays) -> None:
    content = BytesIO()
    np.savez_compressed(content, schema=np.int64(SCHEMA), **arrays)  # type: ignore[arg-type]
    _write(path, [content.getvalue()])


def _read_arrays(path: Path) -> dict[str, Array]:
    if not path.is_file():
        raise RunError(f"{path} is missing: acert certify {path.parent}")
    try:
        found = read_npz(within(path, path.parent))
    # Everything: zipfile and zlib each raise their own.
    except Exception as error:
        raise RunError(f"{path} is damaged: {_first_line(error)}") from error
    schema = found.pop("schema", np.array(None))
    _check_schema(path, schema.item() if schema.ndim == 0 else None)
    return found


# -- files --------------------------------------------------------------------------------


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    _write(path, [(json.dumps({"schema": SCHEMA, **value}, indent=2) + "\n").encode()])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = parsed_json(_read(path))
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} is damaged: it does not hold an object")
    _check_schema(path, value.get("schema"))
    return value


def _check_schema(path: Path, schema: object) -> None:
    if not isinstance(schema, int):
        raise _Damaged(f"{path} is damaged: it names no schema")
    if schema > SCHEMA:
        raise NewerSchema(
            f"{path} has schema {schema}, this acert knows schemas up to {SCHEMA}: "
            "a newer acert is needed"
        )


def _read(path: Path) -> str:
    try:
        return read_text(within(path, path.parent))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {_first_line(error)}") from error


def _write(path: Path, parts: Iterable[bytes | memoryview], *, keep: Path | None = None) -> None:
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


def _is_draft(path: Path) -> bool:
    return path.name.startswith(".") and path.suffix == ".tmp"


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
