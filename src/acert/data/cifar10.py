"""CIFAR-10 from its official binary version, unpacked or not, or from its pickled one.

Looked for in this order: `cifar-10-batches-bin/`, `cifar-10-binary.tar.gz` (which a download
brings), `cifar-10-batches-py/`. A record is a label byte and 3,072 pixel bytes.
"""

import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from acert.data import plain_pickle
from acert.data.augmentation import Augmentation
from acert.data.dataset import Dataset, Split
from acert.data.files import check_digest, check_size, fetched, reading, require
from acert.errors import DataError

__all__ = ["read_test", "read_train"]

_BINARY, _PICKLED = "cifar-10-batches-bin", "cifar-10-batches-py"
_ARCHIVE = "cifar-10-binary.tar.gz"
_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
_TEST = ("test_batch",)
_RECORDS = 10_000
_PIXELS = 3 * 32 * 32
_BINARY_SHA1 = {
    "data_batch_1": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    "test_batch": "67eb016db431130d61cd03c7ad570b013799c88c",
}
_PICKLED_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
# A pickled batch is a little larger than its images; anything far larger is something else.
_PICKLED_LIMIT = 2 * _RECORDS * _PIXELS
_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"

Records = npt.NDArray[np.uint8]


def read_train(root: Path) -> Dataset:
    """The 50,000 training images, uint8 of shape (3, 32, 32), with the usual augmentation."""
    return Dataset(
        name="cifar10",
        train=_split(_batches(root, _TRAIN)),
        classes=tuple(_CLASSES.split()),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        augmentation=Augmentation(padding=2, flip=True),
    )


def read_test(root: Path) -> Split:
    """The 10,000 test images."""
    return _split(_batches(root, _TEST))


def _split(batches: Sequence[Records]) -> Split:
    records = np.concatenate(batches)
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32)
    return Split(torch.from_numpy(images), torch.from_numpy(records[:, 0].astype(np.int64)))


def _batches(root: Path, names: Sequence[str]) -> list[Records]:
    if (root / _BINARY).is_dir():
        return [_binary(root / _BINARY / f"{name}.bin", name) for name in names]
    if not (root / _ARCHIVE).is_file() and (root / _PICKLED).is_dir():
        return [_pickled(root / _PICKLED / name, name) for name in names]
    return _archived(fetched(root / _ARCHIVE, url=_URL, md5=_ARCHIVE_MD5), names)


def _binary(path: Path, name: str) -> Records:
    require(path)
    with reading(path):
        check_size(path, path.stat().st_size, _RECORDS * (1 + _PIXELS))
        return _records(path, path.read_bytes(), name)


def _archived(path: Path, names: Sequence[str]) -> list[Records]:
    # The whole archive first: what tarfile then walks through is known to be the official one.
    with reading(path), path.open("rb") as stream:
        check_digest(path, stream, algorithm="md5", expected=_ARCHIVE_MD5)
    with reading(path), tarfile.open(path, "r:gz") as archive:
        return [_member(archive, path, name) for name in names]


def _member(archive: tarfile.TarFile, path: Path, name: str) -> Records:
    inside = f"{_BINARY}/{name}.bin"
    try:
        member = archive.getmember(inside)
        stream = archive.extractfile(member)
    except KeyError:
        stream = None
    if stream is None:
        raise DataError(f"{path} is damaged: it does not hold the file {inside}")
    check_size(f"{path}: {inside}", member.size, _RECORDS * (1 + _PIXELS))
    return _records(f"{path}: {inside}", stream.read(), name)


def _records(source: Path | str, content: bytes, name: str) -> Records:
    check_digest(source, content, algorithm="sha1", expected=_BINARY_SHA1[name])
    return np.frombuffer(content, np.uint8).reshape(_RECORDS, 1 + _PIXELS)


def _pickled(path: Path, name: str) -> Records:
    require(path)
    with reading(path):
        if path.stat().st_size > _PICKLED_LIMIT:
            raise DataError(f"{path} is damaged: {path.stat().st_size} bytes are too many")
        content = path.read_bytes()
    check_digest(path, content, algorithm="md5", expected=_PICKLED_MD5[name])
    try:
        batch = plain_pickle.loads(content)
    except DataError as error:
        raise DataError(f"{path} is not a CIFAR-10 batch: {error}") from error
    images, labels = batch.get(b"data"), batch.get(b"labels")
    if not isinstance(images, np.ndarray) or images.shape != (_RECORDS, _PIXELS):
        raise DataError(f"{path} is not a CIFAR-10 batch: `data` is not {_RECORDS} images")
    if not isinstance(labels, list) or len(labels) != _RECORDS:
        raise DataError(f"{path} is not a CIFAR-10 batch: `labels` is not {_RECORDS} labels")
    if not all(isinstance(label, int) and 0 <= label < 10 for label in labels):
        raise DataError(f"{path} is not a CIFAR-10 batch: `labels` are not all from 0 to 9")
    return np.concatenate([np.array(labels, dtype=np.uint8)[:, None], images], axis=1)
