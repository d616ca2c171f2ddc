"""What a data set is: images and labels as tensors, and the split of one into two."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from acert.data.augmentation import Augmentation
from acert.errors import InvalidInput

__all__ = ["Dataset", "Facts", "Split", "from_arrays", "held_out", "hold_out", "to_float"]

_VALIDATION_SHARE = 0.2
_DOMAIN = (0.0, 1.0)
# A number that is no class label, such as a hash, would ask for as many logits.
_MOST_CLASSES = 100_000


# Compared by identity: equality of tensors is not one truth value.
@dataclass(frozen=True, eq=False)
class Split:
    """Samples with their labels: uint8 (meaning value / 255) or float32, and int64."""

    images: torch.Tensor
    labels: torch.Tensor

    def __post_init__(self) -> None:
        if self.images.dtype not in (torch.uint8, torch.float32) or self.images.dim() < 2:
            raise InvalidInput(
                "`images` must be uint8 or float32 of shape (N, ...); "
                f"got {self.images.dtype} of shape {tuple(self.images.shape)}"
            )
        if self.labels.dtype is not torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise InvalidInput(
                f"`labels` must be int64 of shape ({len(self.images)},); "
                f"got {self.labels.dtype} of shape {tuple(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: npt.NDArray[np.bool_]) -> "Split":
        """The chosen samples, in their order."""
        index = torch.from_numpy(np.flatnonzero(chosen))
        return Split(self.images[index], self.labels[index])

    def to(self, device: torch.device | str) -> "Split":
        """The same samples on a device."""
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and validation samples with what a model and a recipe need to know of them.

    `domain` holds the least and the largest value an input can take, after `to_float`; `mean`
    and `std` have one number a channel, or a single one for all.
    """

    name: str
    train: Split
    classes: tuple[str, ...]
    validation: Split | None = None
    domain: tuple[float, float] = _DOMAIN
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    augmentation: Augmentation | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes, whether or not each occurs in every split."""
        return len(self.classes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input: (channels, height, width), or whatever the arrays hold."""
        return tuple(self.train.images.shape[1:])


@dataclass(frozen=True)
class Facts:
    """What is known of a data set without its training images.

    `num_classes` is None where the files do not say it: the labels of a test set alone do not.
    `classes` are their names where labels follow from these, as they do in folders of images.
    """

    num_classes: int | None
    domain: tuple[float, float] = _DOMAIN
    classes: tuple[str, ...] | None = None


def to_float(images: torch.Tensor) -> torch.Tensor:
    """Network inputs from stored ones: uint8 divided by 255, float32 as it is."""
    return images.to(torch.float32).div_(255) if images.dtype is torch.uint8 else images


def hold_out(dataset: Dataset, count: int | None = None) -> Dataset:
    """The data set with `count` training samples moved to validation, 20 % if None.

    Every class gives in proportion, its last samples in index order.
    """
    labels = dataset.train.labels.numpy()
    wanted = round(_VALIDATION_SHARE * len(labels)) if count is None else count
    if not 0 < wanted < len(labels):
        raise InvalidInput(
            f"`train_on_all` must be set for {dataset.name}: {wanted} of {len(labels)} samples "
            "cannot be held out"
        )
    chosen = held_out(labels, wanted)
    if not chosen.any():
        raise InvalidInput(
            f"`train_on_all` must be set for {dataset.name}: every class has one sample only, "
            "and none can be held out"
        )
    train, validation = dataset.train.take(~chosen), dataset.train.take(chosen)
    return replace(dataset, train=train, validation=validation)


def held_out(labels: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.bool_]:
    """Marks of `count` samples, stratified: of every class the last ones in index order.

    Shares that are not whole go up where the remainder is largest, first class first. The last
    sample of a class is never taken, so very small classes can leave fewer than `count`.
    """
    classes, sizes = np.unique(labels, return_counts=True)
    exact = sizes * (count / len(labels))
    taken = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(taken - exact, kind="stable")
    taken[by_remainder[: count - taken.sum()]] += 1
    taken = np.minimum(taken, sizes - 1)
    marks = np.zeros(len(labels), dtype=np.bool_)
    for label, size, number in zip(classes, sizes, taken, strict=True):
        marks[np.flatnonzero(labels == label)[size - number :]] = True
    return marks


def from_arrays(
    images: torch.Tensor | npt.ArrayLike,
    labels: torch.Tensor | npt.ArrayLike,
    *,
    domain: tuple[float, float] = _DOMAIN,
    name: str = "arrays",
) -> Dataset:
    """A user's own arrays as a data set, everything in `train`; images or not.

    `images` has shape (N, ...), channels first: uint8, whose domain is [0, 1], or float inside
    `domain`. `labels` holds integers from 0; the largest sets the number of classes.
    """
    train = split_from_arrays(images, labels, domain=domain)
    count = int(train.labels.max()) + 1
    if count < 2:
        raise InvalidInput("`labels` must hold at least two classes; got only 0")
    return Dataset(
        name=name, train=train, classes=tuple(str(i) for i in range(count)), domain=domain
    )


def split_from_arrays(
    images: torch.Tensor | npt.ArrayLike,
    labels: torch.Tensor | npt.ArrayLike,
    *,
    domain: tuple[float, float] = _DOMAIN,
) -> Split:
    """Arrays as checked tensors; float64 images are rounded to float32."""
    low, high = domain
    # Beyond, images inside the domain would be rounded to infinity.
    largest = torch.finfo(torch.float32).max
    if not -largest <= low < high <= largest:
        raise InvalidInput(
            f"`domain` must be two finite numbers of float32, low < high; got {domain}"
        )
    x, y = _array("images", images), _array("labels", labels)
    if x.dtype.kind != "f" and x.dtype != np.uint8:
        raise InvalidInput(f"`images` must be uint8 or float; got {x.dtype}")
    if x.ndim < 2 or x.size == 0:
        raise InvalidInput(f"`images` must have shape (N, ...), N >= 1; got {x.shape}")
    if x.dtype == np.uint8:
        if domain != _DOMAIN:
            raise InvalidInput(f"`domain` must be (0, 1) for uint8 images; got {domain}")
    # NaN fails both comparisons, so it is refused here too.
    elif not (x.min() >= low and x.max() <= high):
        raise InvalidInput(
            f"`images` must be inside the domain [{low:g}, {high:g}]; "
            f"got values from {x.min():g} to {x.max():g}"
        )
    if y.dtype.kind not in "iu" or y.shape != x.shape[:1]:
        raise InvalidInput(f"`labels` must be {len(x)} integers; got {y.dtype} of shape {y.shape}")
    if not (y.min() >= 0 and y.max() < _MOST_CLASSES):
        raise InvalidInput(
            f"`labels` must be in [0, {_MOST_CLASSES - 1}]; got {y.min()} to {y.max()}"
        )
    return Split(
        torch.from_numpy(np.array(x, dtype=np.uint8 if x.dtype == np.uint8 else np.float32)),
        torch.from_numpy(y.astype(np.int64)),
    )


def _array(name: str, values: torch.Tensor | npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        if isinstance(values, torch.Tensor):
            values = values.detach().cpu()
            # NumPy does not know it, and float32 holds every value.
            return (values.float() if values.dtype is torch.bfloat16 else values).numpy()
        return np.asarray(values)
    # Rows of several lengths, and tensors that are sparse or on no device.
    except (TypeError, ValueError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(
            f"`{name}` must be one array of numbers; got another: {reason}"
        ) from error
