"""A user's own image files: `train/CLASS/*` and `test/CLASS/*`, all of one size and colour.

Classes are the sorted folder names under `train`; images come class by class, sorted by name.
The first training image sets size and colour for all; one that differs is refused by name.
The EXIF orientation of a JPEG is ignored, as torchvision's `ImageFolder` ignores it.
"""

from pathlib import Path

import numpy as np
import torch

from acert.data.dataset import Dataset, Facts, Split
from acert.data.files import reading, zeros
from acert.data.pictures import Form, decode, form_of
from acert.errors import DataError
from acert.untrusted import check_size, within

__all__ = ["read_facts", "read_test", "read_train"]


def read_train(root: Path) -> Dataset:
    """The images under `train`, uint8, with the folder names as classes."""
    classes = _classes(root)
    form = _first_form(root, classes)
    empty = [name for name in classes if not _images(root / "train" / name)]
    if empty:
        raise DataError(
            f"{root / 'train' / empty[0]} holds no images: fill it, or remove the class"
        )
    return Dataset(
        name="folder",
        train=_split(root / "train", classes, form),
        classes=classes,
    )


def read_test(root: Path) -> Split:
    """The images under `test`, in the size, colour and classes of `train`."""
    classes = _classes(root)
    unknown = sorted(set(_folders(root / "test")) - set(classes))
    if unknown:
        raise DataError(f"{root / 'test' / unknown[0]} is a class that train does not have")
    return _split(root / "test", classes, _first_form(root, classes))


def read_facts(root: Path) -> Facts:
    """The classes, as many as `train` has folders."""
    classes = _classes(root)
    return Facts(num_classes=len(classes), classes=classes)


def _classes(root: Path) -> tuple[str, ...]:
    classes = tuple(_folders(root / "train"))
    if len(classes) < 2:
        raise DataError(f"{root / 'train'} must hold a folder a class, at least two")
    return classes


def _folders(path: Path) -> list[str]:
    if not path.is_dir():
        raise DataError(f"{path.name} is missing: put a folder of images a class under {path}")
    with reading(path):
        return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and _seen(entry))


def _images(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    with reading(path):
        return sorted(entry for entry in path.iterdir() if entry.is_file() and _seen(entry))


def _seen(entry: Path) -> bool:
    """Whether the entry is the user's: file managers leave hidden ones behind."""
    return not entry.name.startswith(".")


def _first_form(root: Path, classes: tuple[str, ...]) -> Form:
    for name in classes:
        for path in _images(root / "train" / name):
            return form_of(_content(path), source=path)
    raise DataError(f"{root / 'train'} holds no images")


def _split(part: Path, classes: tuple[str, ...], form: Form) -> Split:
    listing = [(path, label) for label, name in enumerate(classes) for path in _images(part / name)]
    if not listing:
        raise DataError(f"{part} holds no images")
    images = zeros((len(listing), form.channels, form.height, form.width), source=part)
    for index, (path, _) in enumerate(listing):
        images[index] = decode(_content(path), form=form, source=path)
    labels = np.array([label for _, label in listing], dtype=np.int64)
    return Split(torch.from_numpy(images), torch.from_numpy(labels))


def _content(path: Path) -> bytes:
    # `root/train/CLASS/file`: a link may lead anywhere under the root, but not out of it.
    with reading(path):
        check_size(within(path, path.parents[2]).stat().st_size)
        return path.read_bytes()
