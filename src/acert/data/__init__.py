"""Data sets as tensors: `load` for training and validation, `load_test` for the test set.

Two calls, so that the test set is opened only by who asks for it. Images keep their stored type
(uint8, or float32 inside the domain) and lie in memory as a whole; `to_float` and `augment` work
on batches of them, on the device.

>>> digits = load("digits")
>>> len(digits.train), len(digits.validation), digits.input_shape, digits.num_classes
(1150, 288, (1, 8, 8), 10)
"""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from os import PathLike
from pathlib import Path

from acert.data import cifar10, digits, folder, mnist, npz, tinyimagenet
from acert.data.augmentation import Augmentation, Draws, augment
from acert.data.dataset import Dataset, Facts, Split, from_arrays, hold_out, to_float
from acert.data.files import data_root
from acert.errors import InvalidInput

__all__ = [
    "NAMES",
    "OWN",
    "Augmentation",
    "Dataset",
    "Draws",
    "Facts",
    "Split",
    "augment",
    "facts",
    "from_arrays",
    "hold_out",
    "load",
    "load_test",
    "to_float",
]


_TEN = Facts(num_classes=10)


@dataclass(frozen=True)
class _Source:
    """How one data set is read, and how many training images are held out by default.

    `facts` is what is known of it, or how that is read from the user's own files.
    """

    read_train: Callable[[Path], Dataset]
    read_test: Callable[[Path], Split]
    validation: int | None = None
    facts: Facts | Callable[[Path], Facts] = _TEN


_SOURCES = {
    "digits": _Source(digits.read_train, digits.read_test),
    "mnist": _Source(mnist.read_train, mnist.read_test, validation=5000),
    "cifar10": _Source(cifar10.read_train, cifar10.read_test, validation=5000),
    "tinyimagenet": _Source(
        tinyimagenet.read_train, tinyimagenet.read_test, validation=5000, facts=Facts(200)
    ),
    "npz": _Source(npz.read_train, npz.read_test, facts=npz.read_facts),
    "folder": _Source(folder.read_train, folder.read_test, facts=folder.read_facts),
}
NAMES = tuple(_SOURCES)
# Those whose files are the user's, and may be others tomorrow.
OWN = tuple(name for name, source in _SOURCES.items() if not isinstance(source.facts, Facts))


def load(
    name: str, *, data_dir: str | PathLike[str] | None = None, train_on_all: bool = False
) -> Dataset:
    """Training and validation images of a data set; its test set stays closed.

    Held out for validation are 5,000 images of mnist, cifar10 and tinyimagenet and 20 % of the
    others: of every class in proportion, the last ones in index order. With `train_on_all`
    nothing is held out, and `validation` is None.

    Files are looked for under `data_dir`, else `$ACERT_DATA_DIR`, else the user's cache folder.
    For `npz` that is the file itself or a folder with `data.npz`, for `folder` the one that
    holds `train/`.
    """
    source = _source(name)
    whole = source.read_train(data_root(data_dir))
    return whole if train_on_all else hold_out(whole, source.validation)


def load_test(name: str, *, data_dir: str | PathLike[str] | None = None) -> Split:
    """Test images of a data set, in the order of its files."""
    return _source(name).read_test(data_root(data_dir))


def facts(name: str, *, data_dir: str | PathLike[str] | None = None) -> Facts:
    """Number of classes and domain of a data set; neither its training nor its test images.

    >>> facts("cifar10")
    Facts(num_classes=10, domain=(0.0, 1.0), classes=None)
    """
    found = _source(name).facts
    return found if isinstance(found, Facts) else found(data_root(data_dir))


def _source(name: str) -> _Source:
    if name not in _SOURCES:
        near = get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidInput(f"`dataset` must be one of {', '.join(NAMES)}; got {name!r}{hint}")
    return _SOURCES[name]
