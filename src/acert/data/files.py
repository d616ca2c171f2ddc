"""Where data files lie, how missing ones are fetched, and how damaged ones are told."""

import hashlib
import math
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from acert import untrusted
from acert.errors import AcertError, DataError
from acert.extras import needs

__all__ = ["check_digest", "check_size", "data_root", "fetched", "reading", "require", "zeros"]

# Besides their own errors, zipfile and gzip let these of their parts through.
_SIGNS_OF_DAMAGE = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)


def data_root(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Folder that holds the data: `data_dir`, else `$ACERT_DATA_DIR`, else `~/.cache/acert`."""
    chosen = data_dir or os.environ.get("ACERT_DATA_DIR") or "~/.cache/acert"
    return Path(chosen).expanduser()


def fetched(path: Path, *, url: str, md5: str) -> Path:
    """The path itself, after a checked download if there is no such file yet."""
    if path.is_file():
        return path
    missing = f"{path.name} is missing: put it at {path}"
    try:
        import pooch
    except ImportError:
        raise DataError(f"{missing} (a download {needs('pooch')})") from None
    new = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    try:
        pooch.retrieve(url, known_hash=f"md5:{md5}", fname=path.name, path=path.parent)
    # Errors of the network are OSErrors there; a wrong checksum is a ValueError.
    except (OSError, ValueError) as error:
        with suppress(OSError):  # no folder is left behind where none was
            for folder in new:
                folder.rmdir()
        reason = "its checksum is wrong" if isinstance(error, ValueError) else type(error).__name__
        raise DataError(f"{missing} (downloading {url} failed: {reason})") from error
    return path


def require(path: Path) -> None:
    """Nothing, if there is such a file."""
    if not path.is_file():
        raise DataError(f"{path.name} is missing: put it at {path}")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A context in which whatever shows that the file is damaged names the file."""
    try:
        yield
    except AcertError:
        raise
    except _SIGNS_OF_DAMAGE as error:
        detail = str(error) or type(error).__name__
        raise DataError(f"{path} cannot be read or is damaged: {detail}") from error


def check_size(path: Path | str, found: int, expected: int) -> None:
    """Nothing, if the size is right; called before memory is taken for the content."""
    if found != expected:
        raise DataError(f"{path} is damaged: {found} bytes, the official file has {expected}")


def check_digest(
    path: Path | str, content: bytes | BufferedReader, *, algorithm: str, expected: str
) -> None:
    """Nothing, if the content, or what the open file holds, is the official one."""
    stream = BytesIO(content) if isinstance(content, bytes) else content
    # Only damage is looked for here, so an old algorithm is good enough, and allowed everywhere.
    digest = hashlib.file_digest(stream, lambda: hashlib.new(algorithm, usedforsecurity=False))
    if (found := digest.hexdigest()) != expected:
        raise DataError(
            f"{path} is damaged: its {algorithm} is {found}, the official one {expected}"
        )


def zeros(shape: tuple[int, ...], *, source: Path) -> npt.NDArray[np.uint8]:
    """A uint8 array for the images of `source`; more than is allowed, or fits, is refused."""
    with reading(source):
        untrusted.check_size(math.prod(shape))
    try:
        return np.zeros(shape, dtype=np.uint8)
    # numpy answers with a ValueError where the size does not even fit an index.
    except (MemoryError, ValueError):
        raise DataError(f"{source} does not fit in memory: its images are {shape}") from None
