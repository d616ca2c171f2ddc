"""The paper's rows against the records there are: done, missing, or without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike

import numpy as np

from acert.data.files import data_root
from acert.experiments.experiment import Experiment, to_config
from acert.experiments.paper.publication import Record
from acert.experiments.paper.row import Row

__all__ = ["Standing", "fits", "has_data", "standing"]

# One of these under the data folder, and a data set is there.
_FILES = {
    "mnist": ("MNIST/raw/train-images-idx3-ubyte", "MNIST/raw/train-images-idx3-ubyte.gz"),
    "cifar10": ("cifar-10-batches-bin", "cifar-10-binary.tar.gz", "cifar-10-batches-py"),
    "tinyimagenet": (
        "tiny-imagenet-200", "tiny-imagenet-200.zip", "tiny-imagenet-200-train.npz",
    ),
}  # fmt: skip
_TEST_IMAGES = {"mnist": 10_000, "cifar10": 10_000, "tinyimagenet": 10_000}


@dataclass(frozen=True, eq=False)
class Standing:
    """One row with the records that fill it, one a seed; `missing` are the seeds that lack one."""

    row: Row
    records: tuple[Record, ...]
    missing: tuple[int, ...]
    has_data: bool

    @property
    def state(self) -> str:
        """`done`, `missing` or `needs data`."""
        if not self.missing:
            return "done"
        return "missing" if self.has_data else "needs data"


def standing(
    row: Row, found: Sequence[Record], data_dir: str | PathLike[str] | None = None
) -> Standing:
    """How one row stands; of two records of a seed the longer run counts, else the first one."""
    best: dict[int, Record] = {}
    for record in found:
        if fits(record, row):
            before = best.get(record.seed)
            if before is None or before.epochs < record.epochs:
                best[record.seed] = record
    missing = tuple(seed for seed in row.seeds if seed not in best)
    ordered = tuple(best[seed] for seed in sorted(best))
    return Standing(row, ordered, missing, has_data(row.dataset, data_dir))


def fits(record: Record, row: Row) -> bool:
    """Whether a record is a run of the row: its experiment with any seed, certified as asked.

    That is the whole test set, each image once, and no attack inside a certified radius.
    """
    proven, training = record.certificates, row.training
    meaning = (proven.arithmetic, proven.bounds, proven.elide, proven.domain)
    if meaning != ("real", "ibp", True, record.experiment.settings.domain):
        return False
    # To the last digit: curves and certified accuracies end there.
    if proven.max_radius != training.max_radius:
        return False
    count = _TEST_IMAGES.get(row.dataset, len(proven))
    if not np.array_equal(proven.index, np.arange(count)) or proven.violations > 0:
        return False
    if _same(record.experiment, training.experiment(record.seed)):
        return True
    return row.shrinks and _same(
        record.experiment, training.experiment(record.seed, epochs=record.epochs)
    )


def has_data(dataset: str, data_dir: str | PathLike[str] | None = None) -> bool:
    """Whether the files of a data set lie under the data folder; they are not opened."""
    root = data_root(data_dir)
    return dataset not in _FILES or any((root / name).exists() for name in _FILES[dataset])


def _same(one: Experiment, other: Experiment) -> bool:
    """Whether two experiments are one: how often a run is validated changes nothing in it."""
    left, right = (to_config(replace(each, validate_every=1)) for each in (one, other))
    return bool(left == right)
