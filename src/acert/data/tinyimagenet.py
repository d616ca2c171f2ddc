"""TinyImageNet from its tree of JPEG files or the official zip, decoded once into a cache.

The test images of the official set have no labels, so its `val` folder is the test set, as in
the literature. Classes are the WordNet numbers in sorted order; training images come class by
class, in the order of their numbers.
"""

import functools
import os
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from acert.data.augmentation import Augmentation
from acert.data.dataset import Dataset, Split
from acert.data.files import fetched, reading, require, zeros
from acert.data.npz import read_arrays
from acert.data.pictures import Form, decode
from acert.errors import DataError
from acert.untrusted import opened_zip, read_member, shown, within

__all__ = ["read_test", "read_train"]

_TREE = "tiny-imagenet-200"
_URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
_ZIP_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
_CLASSES = 200
_TRAIN_PER_CLASS = 500
_TEST_COUNT = 10_000
_FORM = Form(channels=3, height=64, width=64)
# No file of the set is near this size; a larger one is not read.
_FILE_LIMIT = 1_000_000


def read_train(root: Path) -> Dataset:
    """The 100,000 training images, uint8 of shape (3, 64, 64), with the usual augmentation."""
    split, classes = _cached(root, "train")
    return Dataset(
        name="tinyimagenet",
        train=split,
        classes=classes,
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2302, 0.2265, 0.2262),
        augmentation=Augmentation(padding=4, flip=True),
    )


def read_test(root: Path) -> Split:
    """The 10,000 images of the `val` folder, in the order of its table of annotations."""
    return _cached(root, "val")[0]


def _cached(root: Path, part: str) -> tuple[Split, tuple[str, ...]]:
    """Images, labels and classes from the cache; decoded and cached if there is none."""
    cache = root / f"{_TREE}-{part}.npz"
    count = _CLASSES * _TRAIN_PER_CLASS if part == "train" else _TEST_COUNT
    if cache.is_file():
        try:
            return _checked(cache, count, read_arrays(cache, ("images", "labels", "classes")))
        except DataError as error:
            warnings.warn(f"{error}; decoding the images again", stacklevel=4)
    with _opened(root) as read:
        arrays = _decoded(read, part, count, source=root / _TREE)
    _store(cache, arrays)
    return _checked(cache, count, arrays)


@contextmanager
def _opened(root: Path) -> Iterator[Callable[[str], bytes]]:
    """A function from a file's name inside the tree to its content."""
    tree, packed = root / _TREE, root / f"{_TREE}.zip"
    if tree.is_dir():
        # A check looks at every part of a path: one a folder, and not one a file, saves a third
        # of the time that the whole set takes.
        inside = functools.cache(lambda folder: within(folder, tree))
        yield lambda name: _from_folder(tree, name, inside)
        return
    fetched(packed, url=_URL, md5=_ZIP_MD5)
    with reading(packed), opened_zip(packed) as archive:
        yield lambda name: _from_zip(archive, packed, name)


def _from_folder(tree: Path, name: str, inside: Callable[[Path], Path]) -> bytes:
    path = tree / name
    with reading(path):
        # Names come from tables in the tree, which may be anybody's.
        inside(path.parent)
        if path.is_symlink():
            within(path, tree)
        require(path)
        _check_limit(str(path), path.stat().st_size)
        return path.read_bytes()


def _from_zip(archive: zipfile.ZipFile, path: Path, name: str) -> bytes:
    try:
        member = archive.getinfo(f"{_TREE}/{name}")
    except KeyError:
        raise DataError(f"{path} is damaged: it does not hold {name}") from None
    _check_limit(f"{path}: {name}", member.file_size)
    return read_member(archive, member)


def _check_limit(name: str, size: int) -> None:
    if size > _FILE_LIMIT:
        raise DataError(f"{name} is damaged: {size} bytes are too many")


def _decoded(
    read: Callable[[str], bytes], part: str, count: int, *, source: Path
) -> dict[str, npt.NDArray[Any]]:
    classes = sorted(read("wnids.txt").decode("ascii", "replace").split())
    listing = _train_listing(classes) if part == "train" else _test_listing(read, classes)
    if len(classes) != _CLASSES or len(listing) != count:
        raise DataError(
            f"{source} is damaged: {len(classes)} classes and {len(listing)} images, "
            f"the official set has {_CLASSES} and {count}"
        )
    images = zeros((count, _FORM.channels, _FORM.height, _FORM.width), source=source)
    for index, (name, _) in enumerate(listing):
        # Some two in a hundred are stored in grey.
        images[index] = decode(
            read(name), form=_FORM, source=source / name, formats=("JPEG",), grey_as_colour=True
        )
    labels = np.array([label for _, label in listing], dtype=np.int64)
    return {"images": images, "labels": labels, "classes": np.array(classes, dtype="U9")}


def _train_listing(classes: Iterable[str]) -> list[tuple[str, int]]:
    return [
        (f"train/{wnid}/images/{wnid}_{number}.JPEG", label)
        for label, wnid in enumerate(classes)
        for number in range(_TRAIN_PER_CLASS)
    ]


def _test_listing(read: Callable[[str], bytes], classes: list[str]) -> list[tuple[str, int]]:
    table = "val/val_annotations.txt"
    labels = {wnid: label for label, wnid in enumerate(classes)}
    listing = []
    for line in read(table).decode("ascii", "replace").splitlines():
        # Name, class, and a bounding box that nobody needs here.
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if wnid not in labels:
            raise DataError(f"{table} of {_TREE} is damaged: no class is called {wnid!r}")
        listing.append((f"val/images/{name}", labels[wnid]))
    return listing


def _store(cache: Path, arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Write the cache whole or not at all; where that is impossible, say so and go on."""
    partial = cache.with_suffix(f".{os.getpid()}.partial")
    try:
        with partial.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)
        partial.replace(cache)
    except OSError as error:
        warnings.warn(f"the decoded images are not kept: {error}", stacklevel=4)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _checked(
    cache: Path, count: int, arrays: dict[str, npt.NDArray[Any]]
) -> tuple[Split, tuple[str, ...]]:
    shape = (count, _FORM.channels, _FORM.height, _FORM.width)
    expected = {
        "images": (shape, np.dtype(np.uint8)),
        "labels": ((count,), np.dtype(np.int64)),
        "classes": ((_CLASSES,), np.dtype("U9")),
    }
    if {name: (array.shape, array.dtype) for name, array in arrays.items()} != expected:
        raise DataError(f"{cache} does not hold the {count} images of {_TREE}")
    labels = arrays["labels"]
    if labels.min() < 0 or labels.max() >= _CLASSES:
        raise DataError(f"{cache} has labels that are none of the {_CLASSES} classes")
    split = Split(torch.from_numpy(arrays["images"]), torch.from_numpy(labels))
    return split, tuple(shown(str(wnid)) for wnid in arrays["classes"])
