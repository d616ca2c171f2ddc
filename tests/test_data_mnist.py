import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from acert import data
from acert.data import mnist
from acert.errors import DataError

TRAIN, TEST = 40, 20


def idx(array: np.ndarray) -> bytes:
    """The official format: magic number, sizes, then bytes."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.tobytes()


@pytest.fixture
def raw(tmp_path: Path, monkeypatch) -> Path:
    """A small MNIST in the official layout, and the readers told of its sizes and digests."""
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part, count in (("TRAIN", TRAIN), ("TEST", TEST)):
        arrays = {
            "IMAGES": random.integers(0, 256, (count, 28, 28), dtype=np.uint8),
            "LABELS": (np.arange(count) % 10).astype(np.uint8),
        }
        for kind, array in arrays.items():
            official = getattr(mnist, f"_{part}_{kind}")
            content = idx(array)
            small = mnist._IdxFile(
                official.name, array.shape, official.md5, hashlib.sha256(content).hexdigest()
            )
            monkeypatch.setattr(mnist, f"_{part}_{kind}", small)
            (folder / f"{official.name}.gz").write_bytes(gzip.compress(content))
    source = data._Source(mnist.read_train, mnist.read_test, validation=10)
    monkeypatch.setitem(data._SOURCES, "mnist", source)
    return folder


def unpacked(path: Path) -> Path:
    plain = path.with_suffix("")
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    path.unlink()
    return plain


def test_reads_what_was_written(raw: Path, tmp_path: Path) -> None:
    found, test = data.load("mnist", data_dir=tmp_path), data.load_test("mnist", data_dir=tmp_path)
    assert found.validation is not None
    assert (len(found.train), len(found.validation), len(test)) == (30, 10, 20)
    assert torch.bincount(found.validation.labels).tolist() == [1] * 10
    assert found.train.images.dtype is torch.uint8
    assert (found.input_shape, found.mean, found.std) == ((1, 28, 28), (0.0,), (1.0,))
    assert found.augmentation is None
    random = np.random.default_rng(0)
    written = random.integers(0, 256, (TRAIN, 28, 28), dtype=np.uint8)
    whole = data.load("mnist", data_dir=tmp_path, train_on_all=True).train
    assert torch.equal(whole.images, torch.from_numpy(written)[:, None])
    assert whole.labels.tolist() == [i % 10 for i in range(TRAIN)]
    # Of 40 images, each class has 4; the last 10 in index order are one of each.
    assert torch.equal(found.validation.images, whole.images[30:])


def test_reads_unpacked_files_too(raw: Path, tmp_path: Path) -> None:
    packed = data.load("mnist", data_dir=tmp_path)
    for path in sorted(raw.iterdir()):
        unpacked(path)
    plain = data.load("mnist", data_dir=tmp_path)
    assert torch.equal(packed.train.images, plain.train.images)
    assert torch.equal(packed.train.labels, plain.train.labels)


def test_the_test_files_are_not_needed_for_training(raw: Path, tmp_path: Path) -> None:
    for path in raw.glob("t10k*"):
        path.unlink()
    data.load("mnist", data_dir=tmp_path)


def test_a_missing_file_is_named_with_its_place(raw: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pooch", None)
    path = raw / "train-labels-idx1-ubyte.gz"
    path.unlink()
    with pytest.raises(
        DataError, match=r"train-labels-idx1-ubyte.gz is missing: put it at"
    ) as error:
        data.load("mnist", data_dir=tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("damage", ["cut", "flip", "text", "empty"])
def test_damaged_gzip_files_are_named(raw: Path, tmp_path: Path, damage: str) -> None:
    path = raw / "train-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    cut = content[: len(content) // 2]
    damaged = {"cut": bytes(cut), "flip": bytes(content), "text": b"<html>", "empty": b""}
    path.write_bytes(damaged[damage])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz .*damaged"):
        data.load("mnist", data_dir=tmp_path)


def test_damaged_plain_files_are_named(raw: Path, tmp_path: Path) -> None:
    path = unpacked(raw / "t10k-labels-idx1-ubyte.gz")
    content = path.read_bytes()
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    for damaged, message in (
        (content[:-1], "27 bytes, the official file has 28"),
        (content + b"?", "29 bytes, the official file has 28"),
        (flipped, "its sha256 is"),
        (b"\0\0\x08\x01" + b"\xff" * 24, "its header is not that of t10k-labels"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"t10k-labels-idx1-ubyte is damaged: {message}"):
            data.load_test("mnist", data_dir=tmp_path)


def test_a_header_that_declares_too_much_takes_no_memory(raw: Path, tmp_path: Path) -> None:
    path = raw / "train-images-idx3-ubyte.gz"
    header = bytes([0, 0, 8, 3]) + np.array([2**31, 2**31, 2**31], ">u4").tobytes()
    path.write_bytes(gzip.compress(header + bytes(50_000_000), compresslevel=1))
    with pytest.raises(DataError, match=r"its header is not that of"):
        data.load("mnist", data_dir=tmp_path)


def test_a_file_far_longer_than_the_official_one_is_not_unpacked(raw: Path, tmp_path: Path) -> None:
    """A name in gzip's header without an end would be looked for byte by byte."""
    path = raw / "train-images-idx3-ubyte.gz"
    path.write_bytes(b"\x1f\x8b\x08\x08" + bytes(6) + 2_000_000 * b"a")
    with pytest.raises(DataError, match=r"ubyte\.gz is damaged: 2000010 bytes are too many"):
        data.load("mnist", data_dir=tmp_path)
