"""A user's own arrays from one npz file: x_train, y_train, optional x_test, y_test, domain.

`x_*` is uint8 or float of shape (N, ...), `y_*` integers from 0. Float values must lie inside
`domain`, two numbers, [0, 1] if the file does not hold it. Nothing pickled is read.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from acert.data.dataset import Dataset, Facts, Split, from_arrays, split_from_arrays
from acert.data.files import reading
from acert.errors import DataError, InvalidInput
from acert.untrusted import read_npz

__all__ = ["read_arrays", "read_facts", "read_test", "read_train"]


def read_train(root: Path) -> Dataset:
    """The arrays x_train and y_train; `root` is the file, or a folder with `data.npz`."""
    path = _path(root)
    found = _required(path, ("x_train", "y_train"), optional=("domain",))
    try:
        return from_arrays(found["x_train"], found["y_train"], domain=_domain(found), name="npz")
    except InvalidInput as error:
        raise DataError(f"{path}: x_train and y_train: {error}") from error


def read_test(root: Path) -> Split:
    """The arrays x_test and y_test, with no label that y_train, if it is there, does not allow."""
    path = _path(root)
    found = _required(path, ("x_test", "y_test"), optional=("y_train", "domain"))
    try:
        split = split_from_arrays(found["x_test"], found["y_test"], domain=_domain(found))
    except InvalidInput as error:
        raise DataError(f"{path}: x_test and y_test: {error}") from error
    known = found.get("y_train", found["y_test"])
    if known.dtype.kind in "iu" and known.size and split.labels.max() > known.max():
        raise DataError(
            f"{path}: y_test has the label {split.labels.max()}, y_train none above {known.max()}"
        )
    return split


def read_facts(root: Path) -> Facts:
    """The domain, and the number of classes where y_train is there to say it."""
    path = _path(root)
    found = read_arrays(path, ("y_train", "domain"))
    labels = found.get("y_train", np.zeros(0))
    known = labels.dtype.kind in "iu" and labels.size > 0
    try:
        return Facts(int(labels.max()) + 1 if known else None, _domain(found))
    except InvalidInput as error:
        raise DataError(f"{path}: {error}") from error


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Those of the named arrays that the file holds; declared sizes are checked first."""
    with reading(path):
        try:
            return read_npz(path, names)
        except ValueError as error:
            raise DataError(f"{path}: {error}") from error


def _path(root: Path) -> Path:
    # What is not there and is not called a file of that kind is taken for a folder.
    named = root.is_file() or (root.suffix == ".npz" and not root.is_dir())
    path = root if named else root / "data.npz"
    if not path.is_file():
        raise DataError(
            f"{path.name} is missing: put it at {path}, or name your npz file as the data folder"
        )
    return path


def _required(
    path: Path, names: Sequence[str], *, optional: Sequence[str]
) -> dict[str, npt.NDArray[Any]]:
    found = read_arrays(path, (*names, *optional))
    absent = [name for name in names if name not in found]
    if absent:
        raise DataError(f"{path} does not hold {' and '.join(absent)}")
    return found


def _domain(found: dict[str, npt.NDArray[Any]]) -> tuple[float, float]:
    domain = found.get("domain", np.array([0.0, 1.0]))
    if domain.shape != (2,) or domain.dtype.kind not in "fiu":
        raise InvalidInput(
            f"`domain` must be two numbers; got {domain.dtype} of shape {domain.shape}"
        )
    return float(domain[0]), float(domain[1])
