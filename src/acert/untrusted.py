"""Files from strangers, read as data: nothing runs, and no memory is taken before sizes are judged.

Whatever is wrong with a file is a ValueError here; the caller says whose file it is. Sizes are
limited to `$ACERT_MAX_BYTES`, 4 GiB unless it is set, and those of text to a 1024th of it: the
values of a JSON text take up to sixty times its memory, and a second for a few MiB.
"""

from __future__ import annotations

import io
import json
import os
import stat
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from acert.errors import InvalidInput

__all__ = [
    "check_header",
    "check_size",
    "file_size",
    "fresh",
    "opened_zip",
    "parsed_json",
    "read_member",
    "read_npz",
    "read_text",
    "shown",
    "size_limit",
    "within",
]

_DEFAULT_LIMIT = 4 * 2**30
_TEXT_SHARE = 1024
_DEPTH_LIMIT = 50
# What JSON may hold between its values.
_LAYOUT = str.maketrans("", "", "\t\n\r")
# The most that is read at once of an archive: its table of contents, twice that of TinyImageNet.
_TABLE_LIMIT = 32 * 2**20
# numpy refuses longer headers, but only after it has read them.
_NPY_HEADER_LIMIT = 10_000 + 16
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


def file_size(path: Path) -> int:
    """The bytes of a file, not above the limit; a pipe or a device is refused, unopened."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    check_size(status.st_size)
    return status.st_size


@contextmanager
def fresh(path: Path) -> Iterator[io.BufferedWriter]:
    """A new file to write to; what lay there, such as a link that leads elsewhere, is removed."""
    path.unlink(missing_ok=True)
    with path.open("xb") as stream:
        yield stream


def read_text(path: Path) -> str:
    """The UTF-8 text of a file of at most 4 MiB, a 1024th of the limit."""
    file_size(path)
    limit = size_limit() // _TEXT_SHARE
    with path.open("rb") as stream:
        # One byte more than allowed: the size on disk may be a lie, as in /proc.
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise ValueError(_long(f"it has more than {limit} bytes", path.stat().st_size))
    return content.decode("utf-8")


def check_header(path: Path) -> None:
    """Refuses a safetensors file whose header is longer than the file, or than a text may be."""
    size = file_size(path)
    with path.open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
    if header > size - 8:
        raise ValueError(f"its header declares {header} bytes, the file has {size}")
    if header > size_limit() // _TEXT_SHARE:
        raise ValueError(_long(f"its header declares {header} bytes", header))


def _long(what: str, size: int) -> str:
    return f"{what}; set ACERT_MAX_BYTES={_TEXT_SHARE * size} if you trust it"


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
    # What is plain to see needs no second copy; without a backslash no letter is hidden.
    plain = "\\" not in text and text.translate(_LAYOUT).isprintable()
    return value if plain else _cleaned(value)


def shown(text: str) -> str:
    r"""The text without the characters by which it could move a cursor or hide itself.

    >>> shown("run\x1b[2J\u202e-7")
    'run[2J-7'
    """
    if text.isprintable():
        return text
    return "".join(character for character in text if character.isprintable())


@contextmanager
def opened_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive, once its own size and that of its table of contents are judged."""
    file_size(path)
    with _Pieces(io.FileIO(path)) as stream, zipfile.ZipFile(stream) as archive:
        yield archive


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """The bytes of a member, as many as it declares: what is packed may be a thousand times more.

    The caller has judged what it declares.
    """
    _check_member(archive, member)
    # With a size: without one, zipfile unpacks everything before it looks at what was declared.
    with archive.open(member) as stream:
        content = stream.read(member.file_size)
        if len(content) != member.file_size or stream.read(1):
            raise ValueError("it does not hold as many bytes as it declares")
    return content


def read_npz(path: Path, names: Sequence[str] | None = None) -> dict[str, npt.NDArray[Any]]:
    """Those of the named arrays, or all, that the file holds; nothing pickled is read."""
    with opened_zip(path) as archive:
        members = {
            member.filename.removesuffix(".npy"): member for member in archive.infolist()
        }  # a name that comes twice counts once
        wanted = [name for name in (members if names is None else names) if name in members]
        check_size(sum(members[name].file_size for name in wanted))
        return {name: _array(archive, members[name], name) for name in wanted}


@final
class _Pieces(io.BufferedReader):
    """A file of which nobody reads too much at once, as zipfile does its table of contents."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            size = os.fstat(self.fileno()).st_size - self.tell()
        if size > _TABLE_LIMIT:
            raise ValueError(f"its table of contents declares {size} bytes")
        return super().read(size)


def _check_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Refuses a member that says of itself what cannot be true."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("it is packed in a way that numpy does not use")
    assert archive.fp is not None
    whole = os.fstat(archive.fp.fileno()).st_size
    if member.compress_size > whole or member.file_size > _DEFLATE_LIMIT * (
        member.compress_size + 1
    ):
        raise ValueError("it declares more bytes than it can hold")


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> npt.NDArray[Any]:
    try:
        _check_member(archive, member)
        with archive.open(member) as stream:
            start = io.BytesIO(stream.read(_NPY_HEADER_LIMIT))
        version = npy.read_magic(start)
        if version not in _HEADERS:
            raise ValueError(f"version {version} of the format is not known")
        shape, _, dtype = _HEADERS[version](start)
        if dtype.hasobject:
            raise ValueError("it holds pickled objects, which are not read")
        size = dtype.itemsize * int(np.prod(shape, dtype=object))
        # A type without size would let a header declare any number of items.
        if start.tell() + size != member.file_size or not dtype.itemsize:
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
