"""The tensor files of a run folder: the weights, and the last two states to resume from."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np

from acert.errors import InvalidInput, RunError
from acert.extras import needs
from acert.records.files import (
    CONFIG,
    PREVIOUS_STATE,
    SCHEMA,
    STATE,
    WEIGHTS,
    Array,
    Arrays,
    Damaged,
    check_schema,
    first_line,
    write,
)
from acert.untrusted import check_header, parsed_json, within

__all__ = [
    "State",
    "drop_previous_state",
    "read_state",
    "read_weights",
    "write_state",
    "write_weights",
]

# One key only: safetensors writes several in an order that differs from process to process.
_FACTS = "acert"


class State(NamedTuple):
    """Arrays and plain facts of a resumable state; `complaint` if the newest was unusable."""

    arrays: dict[str, Array]
    facts: dict[str, Any]
    complaint: str | None


def write_weights(folder: Path, arrays: Arrays) -> None:
    """Writes `model.safetensors`: equal weights give equal bytes."""
    write(folder / WEIGHTS, _tensors(arrays, {}))


def read_weights(folder: Path) -> dict[str, Array]:
    """The arrays of `model.safetensors` by name."""
    path = folder / WEIGHTS
    if not path.is_file():
        unfinished = (folder / CONFIG).is_file()
        hint = (
            f": the run is not finished; acert train --resume {quote(str(folder))}"
            if unfinished
            else ""
        )
        raise RunError(f"{folder} has no {WEIGHTS}{hint}")
    return _read_tensors(path)[0]


def write_state(folder: Path, arrays: Arrays, facts: Mapping[str, Any]) -> None:
    """Writes `state.safetensors`; the one before is kept as `state.previous.safetensors`."""
    write(folder / STATE, _tensors(arrays, facts), keep=folder / PREVIOUS_STATE)


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
    except Damaged as error:
        damage = str(error)
    try:
        arrays, facts = _read_tensors(previous)
    except Damaged as error:
        raise RunError(f"{folder} has no usable state: {damage}; {error}") from error
    newest.unlink(missing_ok=True)
    return State(
        arrays, facts, f"{damage}; going on from {PREVIOUS_STATE}, step {facts.get('step')}"
    )


def drop_previous_state(folder: Path) -> None:
    """Removes the state before the last one: a finished run needs no second chance."""
    (folder / PREVIOUS_STATE).unlink(missing_ok=True)


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
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise RunError(f"reading {path} {needs('safetensors')}") from None
    try:
        check_header(within(path, path.parent))
        with safe_open(path, framework="np") as file:
            facts = dict(parsed_json((file.metadata() or {})[_FACTS]))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no dict
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{path} is missing or damaged ({first_line(error)})") from error
    check_schema(path, facts.get("schema"))
    if facts.get("crc32") != _checksum(arrays):
        raise Damaged(f"{path} is damaged (its checksum is wrong)")
    return arrays, facts


def _checksum(arrays: Arrays) -> int:
    """CRC-32 of all arrays in order of their names; damage is looked for, not forgery."""
    value = 0
    for name in sorted(arrays):
        content = arrays[name].reshape(-1).view(np.uint8).data
        value = zlib.crc32(content, zlib.crc32(name.encode(), value))
    return value
