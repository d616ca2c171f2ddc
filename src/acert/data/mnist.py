"""MNIST from its four idx files under `MNIST/raw`, gzipped or not."""

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from acert.data.dataset import Dataset, Split
from acert.data.files import check_digest, check_size, fetched, reading
from acert.errors import DataError

__all__ = ["read_test", "read_train"]

_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
# An idx file starts with two zero bytes, the type (8: uint8) and the number of dimensions.
_UINT8 = 8
# What gzip may add to a file that it cannot shrink.
_SLACK = 1_000_000


@dataclass(frozen=True)
class _IdxFile:
    """One official file: its shape, the md5 of its gzip and the sha256 of what is inside."""

    name: str
    shape: tuple[int, ...]
    md5: str
    sha256: str


_TRAIN_IMAGES = _IdxFile(
    "train-images-idx3-ubyte",
    (60_000, 28, 28),
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
)
_TRAIN_LABELS = _IdxFile(
    "train-labels-idx1-ubyte",
    (60_000,),
    "d53e105ee54ea40749a09fcbcd1e9432",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
)
_TEST_IMAGES = _IdxFile(
    "t10k-images-idx3-ubyte",
    (10_000, 28, 28),
    "9fb629c4189551a2d022fa330f9573f3",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
)
_TEST_LABELS = _IdxFile(
    "t10k-labels-idx1-ubyte",
    (10_000,),
    "ec29112dd5afa0611ce80d1b7f02629c",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)


def read_train(root: Path) -> Dataset:
    """The 60,000 training images, uint8 of shape (1, 28, 28); not normalised, not augmented."""
    return Dataset(
        name="mnist",
        train=_split(root, _TRAIN_IMAGES, _TRAIN_LABELS),
        classes=tuple(str(i) for i in range(10)),
    )


def read_test(root: Path) -> Split:
    """The 10,000 test images."""
    return _split(root, _TEST_IMAGES, _TEST_LABELS)


def _split(root: Path, images: _IdxFile, labels: _IdxFile) -> Split:
    return Split(
        torch.from_numpy(_read(root, images)[:, None]),
        torch.from_numpy(_read(root, labels).astype(np.int64)),
    )


def _read(root: Path, file: _IdxFile) -> npt.NDArray[np.uint8]:
    folder = root / "MNIST" / "raw"
    plain, packed = folder / file.name, folder / f"{file.name}.gz"
    header = bytes([0, 0, _UINT8, len(file.shape)])
    header += b"".join(size.to_bytes(4, "big") for size in file.shape)
    expected = len(header) + int(np.prod(file.shape))
    found = plain
    if packed.is_file() or not plain.is_file():
        found = fetched(packed, url=f"{_URL}{file.name}.gz", md5=file.md5)
    with reading(found):
        # gzip looks for the end of a name in the header, however far that is.
        if found.stat().st_size > expected + _SLACK:
            raise DataError(f"{found} is damaged: {found.stat().st_size} bytes are too many")
    with reading(found), gzip.open(found) if found == packed else found.open("rb") as stream:
        start = stream.read(len(header))
        # Before the rest is read: a header that lies about its size takes no memory.
        if start != header:
            raise DataError(f"{found} is damaged: its header is not that of {file.name}")
        # One byte more than there should be, so that a longer file is seen as such.
        content = start + stream.read(expected - len(header) + 1)
    check_size(found, len(content), expected)
    check_digest(found, content, algorithm="sha256", expected=file.sha256)
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(file.shape).copy()
