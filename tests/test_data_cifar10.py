import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import pickled

from acert import data
from acert.data import Augmentation, cifar10
from acert.errors import DataError

RECORDS = 20
NAMES = (*cifar10._TRAIN, *cifar10._TEST)


def batches() -> dict[str, np.ndarray]:
    """Made-up records: a label byte, then 3,072 pixel bytes."""
    random = np.random.default_rng(0)
    found = {}
    for name in NAMES:
        pixels = random.integers(0, 256, (RECORDS, 3072), dtype=np.uint8)
        labels = (np.arange(RECORDS) % 10).astype(np.uint8)
        found[name] = np.concatenate([labels[:, None], pixels], axis=1)
    return found


def write_binary(root: Path) -> None:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for name, records in batches().items():
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def write_archive(root: Path, *, skip: str = "", extra: bytes = b"") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, records in batches().items():
            if name == skip:
                continue
            content = records.tobytes() + extra
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    (root / "cifar-10-binary.tar.gz").write_bytes(stream.getvalue())
    return stream.getvalue()


def write_pickled(root: Path) -> dict[str, bytes]:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    contents = {
        name: pickled.batch(records[:, 1:], records[:, 0].tolist())
        for name, records in batches().items()
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return contents


@pytest.fixture
def small(monkeypatch) -> None:
    """The readers, told of the size and the digests of the made-up batches."""
    monkeypatch.setattr(cifar10, "_RECORDS", RECORDS)
    digests = {name: hashlib.sha1(value.tobytes()).hexdigest() for name, value in batches().items()}
    monkeypatch.setattr(cifar10, "_BINARY_SHA1", digests)
    source = data._Source(cifar10.read_train, cifar10.read_test, validation=10)
    monkeypatch.setitem(data._SOURCES, "cifar10", source)


def trust_archive(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(cifar10, "_ARCHIVE_MD5", hashlib.md5(content).hexdigest())


def trust_pickled(monkeypatch, contents: dict[str, bytes]) -> None:
    digests = {name: hashlib.md5(content).hexdigest() for name, content in contents.items()}
    monkeypatch.setattr(cifar10, "_PICKLED_MD5", digests)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("layout", ["binary", "archive", "pickled"])
def test_every_layout_gives_the_same_images(tmp_path: Path, monkeypatch, layout: str) -> None:
    if layout == "binary":
        write_binary(tmp_path)
    elif layout == "archive":
        trust_archive(monkeypatch, write_archive(tmp_path))
    else:
        trust_pickled(monkeypatch, write_pickled(tmp_path))
    whole = data.load("cifar10", data_dir=tmp_path, train_on_all=True)
    records = np.concatenate([batches()[name] for name in cifar10._TRAIN])
    np.testing.assert_array_equal(whole.train.images.flatten(1).numpy(), records[:, 1:])
    assert whole.train.labels.tolist() == records[:, 0].tolist()
    assert whole.train.images.dtype is torch.uint8
    # Pixels are stored plane by plane: red first, rows within it.
    assert whole.train.images[0, 1, 0, 2] == records[0, 1 + 1024 + 2]
    test = data.load_test("cifar10", data_dir=tmp_path)
    np.testing.assert_array_equal(test.images.flatten(1).numpy(), batches()["test_batch"][:, 1:])


@pytest.mark.usefixtures("small")
def test_what_the_data_set_says_of_itself(tmp_path: Path) -> None:
    write_binary(tmp_path)
    found = data.load("cifar10", data_dir=tmp_path)
    assert found.validation is not None
    assert (len(found.train), len(found.validation)) == (90, 10)
    assert torch.bincount(found.validation.labels).tolist() == [1] * 10
    assert (found.input_shape, found.num_classes, found.classes[9]) == ((3, 32, 32), 10, "truck")
    assert found.augmentation == Augmentation(padding=2, flip=True)
    assert found.mean == (0.4914, 0.4822, 0.4465)
    assert found.std == (0.2023, 0.1994, 0.2010)


@pytest.mark.usefixtures("small")
def test_the_test_batch_is_not_needed_for_training(tmp_path: Path) -> None:
    write_binary(tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    data.load("cifar10", data_dir=tmp_path)
    with pytest.raises(
        DataError, match=r"test_batch\.bin is missing: put it at .*/test_batch\.bin"
    ):
        data.load_test("cifar10", data_dir=tmp_path)


@pytest.mark.usefixtures("small")
def test_damaged_binary_files_are_named(tmp_path: Path) -> None:
    write_binary(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    content = path.read_bytes()
    for damaged, message in (
        (content[:-1], "61459 bytes, the official file has 61460"),
        (content[:-1] + bytes([content[-1] ^ 1]), "its sha1 is"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"data_batch_3\.bin is damaged: {message}"):
            data.load("cifar10", data_dir=tmp_path)


@pytest.mark.usefixtures("small")
def test_a_damaged_archive_is_named(tmp_path: Path, monkeypatch) -> None:
    content = write_archive(tmp_path)
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz is damaged: its md5 is"):
        data.load("cifar10", data_dir=tmp_path)
    cut = content[: len(content) // 2]
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(cut)
    trust_archive(monkeypatch, cut)
    with pytest.raises(DataError, match=r"tar\.gz cannot be read or is damaged"):
        data.load("cifar10", data_dir=tmp_path)


@pytest.mark.usefixtures("small")
def test_members_of_the_archive_are_checked(tmp_path: Path, monkeypatch) -> None:
    trust_archive(monkeypatch, write_archive(tmp_path, skip="data_batch_2"))
    with pytest.raises(DataError, match=r"does not hold the file .*data_batch_2\.bin"):
        data.load("cifar10", data_dir=tmp_path)
    trust_archive(monkeypatch, write_archive(tmp_path, extra=b"?"))
    with pytest.raises(DataError, match=r"data_batch_1\.bin is damaged: 61461 bytes"):
        data.load("cifar10", data_dir=tmp_path)


def test_nothing_there_names_the_archive(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pooch", None)
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz is missing: put it at"):
        data.load("cifar10", data_dir=tmp_path)


@pytest.mark.usefixtures("small")
def test_only_the_official_pickles_are_read(tmp_path: Path, monkeypatch) -> None:
    contents = write_pickled(tmp_path)
    with pytest.raises(DataError, match=r"data_batch_1 is damaged: its md5 is"):
        data.load("cifar10", data_dir=tmp_path)
    trust_pickled(monkeypatch, contents)
    monkeypatch.setattr(cifar10, "_PICKLED_LIMIT", 1000)
    with pytest.raises(DataError, match=r"data_batch_1 is damaged: .* bytes are too many"):
        data.load("cifar10", data_dir=tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").unlink()
    with pytest.raises(DataError, match=r"data_batch_1 is missing: put it at .*-py/data_batch_1"):
        data.load("cifar10", data_dir=tmp_path)


PIXELS = np.zeros((RECORDS, 3072), np.uint8)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02cos\nsystem\n.", "it names os.system"),
        (pickled.batch(PIXELS[:, 1:], [0] * RECORDS), "`data` is not 20 images"),
        (pickled.batch(PIXELS, [0] * 5), "`labels` is not 20 labels"),
        (pickled.batch(PIXELS, [10] * RECORDS), "`labels` are not all from 0 to 9"),
    ],
    ids=lambda value: "file" if isinstance(value, bytes) else None,
)
def test_pickles_of_something_else_are_refused(
    tmp_path: Path, monkeypatch, content: bytes, message: str
) -> None:
    contents = write_pickled(tmp_path)
    trust_pickled(monkeypatch, contents | {"test_batch": content})
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(content)
    with pytest.raises(DataError, match=rf"test_batch is not a CIFAR-10 batch: .*{message}"):
        data.load_test("cifar10", data_dir=tmp_path)
