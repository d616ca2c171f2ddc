"""Files from strangers, read as data: nothing runs, and no memory is taken before sizes are judged.

Whatever is wrong with a file is a ValueError here; the caller says whose file it is. Sizes are
limited to `$ACERT_MAX_BYTES`, 4 GiB unless it is set.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from acert.errors import InvalidInput

__all__ = ["check_size", "parsed_json", "read_npz", "read_text", "shown", "size_limit", "within"]

_DEFAULT_LIMIT = 4 * 2**30
_TEXT_LIMIT = 64 * 2**20
_DEPTH_LIMIT = 50
# Deflate cannot shrink further than this, so a larger declared size is a lie.
_DEFLATE_LIMIT = 1032
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def size_limit() -> int:
    """The most bytes that one file may declare: `$ACERT_MAX_BYTES`, or 4 GiB."""
    given = os.environ.get("ACERT_MAX_BYTES")
    if given is None:
        return _DEFAULT_LIMIT
    if not given.isascii() or not given.isdigit():
        raise InvalidInput(f"`ACERT_MAX_BYTES` must be a whole number of bytes; got {given!r}")
    return int(given)


def check_size(size: int) -> None:
    """Refuses a size above the limit, with the name of the variable that raises it."""
    if size > size_limit():
        raise ValueError(
            f"it declares {size} bytes, more than the {size_limit()} allowed; set "
            f"ACERT_MAX_BYTES={size} if you trust it"
        )


def within(path: Path, folder: Path) -> Path:
    """The path itself; refused if a link or `..` leads it out of the folder."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError("it leads out of its folder: links are followed inside it only")
    return path


def read_text(path: Path) -> str:
    """The UTF-8 text of a file of at most 64 MiB."""
    with path.open("rb") as stream:
        # One byte more than allowed: the size on disk may be none, or a lie (a pipe, /proc).
        content = stream.read(_TEXT_LIMIT + 1)
    if len(content) > _TEXT_LIMIT:
        raise ValueError(f"it has more than {_TEXT_LIMIT} bytes")
    return content.decode("utf-8")


def parsed_json(text: str) -> Any:
    r"""The value of a JSON text, nested at most 50 deep; no text in it can drive a terminal.

    >>> parsed_json('{"name": "a\\u001b[2Jb"}')
    {'name': 'a[2Jb'}
    """
    try:
        value = json.loads(text)
    except RecursionError:
        value = None
        deep = True
    else:
        deep = _depth(value) > _DEPTH_LIMIT
    if deep:
        raise ValueError(f"it is nested more than {_DEPTH_LIMIT} deep")
    return _cleaned(value)


def shown(text: str) -> str:
    r"""The text without the characters by which it could move a cursor or hide itself.

    >>> shown("run\x1b[2J\u202e-7")
    'run[2J-7'
    """
    return "".join(character for character in text if character.isprintable())


def read_npz(path: Path, names: Sequence[str] | None = None) -> dict[str, npt.NDArray[Any]]:
    """Those of the named arrays, or all, that the file holds; nothing pickled is read."""
    with zipfile.ZipFile(path) as archive:
        members = {
            member.filename.removesuffix(".npy"): member for member in archive.infolist()
        }  # a name that comes twice counts once
        wanted = [name for name in (members if names is None else names) if name in members]
        check_size(sum(members[name].file_size for name in wanted))
        return {name: _array(archive, members[name], name) for name in wanted}


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> npt.NDArray[Any]:
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{shown(name)} is packed in a way that numpy does not use")
    if member.file_size > _DEFLATE_LIMIT * (member.compress_size + 1):
        raise ValueError(f"{shown(name)} declares more bytes than it can hold")
    try:
        with archive.open(member) as stream:
            version = npy.read_magic(stream)
            if version not in _HEADERS:
                raise ValueError(f"version {version} of the format is not known")
            shape, _, dtype = _HEADERS[version](stream)
            header = stream.tell()
        if dtype.hasobject:
            raise ValueError("it holds pickled objects, which are not read")
        if header + dtype.itemsize * int(np.prod(shape, dtype=object)) != member.file_size:
            raise ValueError(f"its header declares {shape} of {dtype}, which is not what follows")
        with archive.open(member) as stream:
            return npy.read_array(stream, allow_pickle=False)
    # Everything: numpy parses a header as Python text, and what a bad one raises is not fixed.
    except Exception as error:
        raise ValueError(f"{shown(name)} cannot be read: {error}") from error


def _depth(value: Any) -> int:
    """How deep lists and objects are nested; counted without recursion."""
    depth, level = 0, [value]
    while nested := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        level = [
            inner
            for item in nested
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return depth


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    if isinstance(value, dict):
        return {shown(key): _cleaned(item) for key, item in value.items()}
    return value
