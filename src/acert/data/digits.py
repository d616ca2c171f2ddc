"""The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from acert.data.dataset import Dataset, Split, held_out
from acert.errors import DataError
from acert.extras import needs

__all__ = ["read_test", "read_train"]

# There is no official test set; ours is fixed: of every digit the last fifth in index order.
_TEST_COUNT = 359
# Pixels are counts from 0 to 16, so this division is exact in float32.
_LARGEST_PIXEL = 16


def read_train(root: Path) -> Dataset:
    """The 1,438 digits that are not test digits; `root` is not needed."""
    whole, test = _all_digits()
    return Dataset(name="digits", train=whole.take(~test), classes=tuple(str(i) for i in range(10)))


def read_test(root: Path) -> Split:
    """The last fifth of every digit, 359 in all; `root` is not needed."""
    whole, test = _all_digits()
    return whole.take(test)


def _all_digits() -> tuple[Split, npt.NDArray[np.bool_]]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(f"digits {needs('sklearn')}") from None
    bunch = load_digits()
    images = (bunch.images / _LARGEST_PIXEL).astype(np.float32)[:, None]
    labels = bunch.target.astype(np.int64)
    split = Split(torch.from_numpy(images), torch.from_numpy(labels))
    return split, held_out(labels, _TEST_COUNT)
