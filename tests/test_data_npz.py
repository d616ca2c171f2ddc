import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from acert import data
from acert.data.npz import read_arrays
from acert.errors import DataError

X = np.random.default_rng(0).integers(0, 256, (40, 1, 4, 4), dtype=np.uint8)
Y = np.arange(40) % 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine.npz"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_reads_images(path: Path, save) -> None:
    save(path, x_train=X, y_train=Y, x_test=X[:8], y_test=Y[:8].astype(np.uint8))
    found, test = data.load("npz", data_dir=path), data.load_test("npz", data_dir=path)
    assert found.validation is not None
    assert (len(found.train), len(found.validation), len(test)) == (32, 8, 8)
    assert torch.bincount(found.validation.labels).tolist() == [2] * 4
    assert (found.name, found.num_classes, found.input_shape) == ("npz", 4, (1, 4, 4))
    assert found.train.images.dtype is torch.uint8
    assert torch.equal(test.images, torch.from_numpy(X[:8]))
    assert torch.equal(test.labels, torch.from_numpy(Y[:8]))


def test_reads_what_is_not_images_in_its_own_domain(path: Path) -> None:
    x = np.linspace(-3, 3, 120, dtype=">f8").reshape(40, 3)
    np.savez(path, x_train=x, y_train=Y, x_test=x, y_test=Y, domain=[-3, 3])
    found = data.load("npz", data_dir=path, train_on_all=True)
    assert (found.domain, found.input_shape) == ((-3.0, 3.0), (3,))
    np.testing.assert_allclose(found.train.images.numpy(), x, rtol=1e-6)
    assert torch.equal(data.load_test("npz", data_dir=path).images, found.train.images)


def test_a_folder_may_hold_data_npz(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x_train=X, y_train=Y)
    assert len(data.load("npz", data_dir=tmp_path, train_on_all=True).train) == 40


def test_test_arrays_alone_are_enough_for_testing(path: Path) -> None:
    np.savez(path, x_test=X, y_test=Y)
    assert len(data.load_test("npz", data_dir=path)) == 40
    # How many classes there are is not said by test labels, and never guessed from them.
    assert data.facts("npz", data_dir=path) == data.Facts(None, (0.0, 1.0))
    np.savez(path, x_test=X / 255, y_test=Y, domain=[-1, 2])
    assert data.facts("npz", data_dir=path) == data.Facts(None, (-1.0, 2.0))
    np.savez(path, y_train=[0, 5], domain=[-1, 2])
    assert data.facts("npz", data_dir=path) == data.Facts(6, (-1.0, 2.0))
    np.savez(path, domain=[1, 2, 3])
    with pytest.raises(DataError, match=r"mine\.npz: `domain` must be two numbers"):
        data.facts("npz", data_dir=path)


def test_missing_files_and_arrays_are_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.npz is missing: put it at .*/data\.npz"):
        data.load("npz", data_dir=tmp_path)
    with pytest.raises(DataError, match=r"data\.npz is missing: put it at .*/nowhere/data\.npz"):
        data.load("npz", data_dir=tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"mine\.npz is missing"):
        data.load("npz", data_dir=path)
    np.savez(path, x_train=X)
    with pytest.raises(DataError, match=r"mine\.npz does not hold y_train"):
        data.load("npz", data_dir=path)
    with pytest.raises(DataError, match=r"mine\.npz does not hold x_test and y_test"):
        data.load_test("npz", data_dir=path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x_train": X / 200}, r"x_train and y_train: .*inside the domain \[0, 1\]"),
        ({"y_train": Y[1:]}, "x_train and y_train: `labels` must be 40 integers"),
        ({"domain": [0, 1, 2]}, "`domain` must be two numbers; got int64 of shape"),
        ({"domain": np.array(["a", "b"])}, "`domain` must be two numbers; got <U1"),
        ({"x_train": np.array(["a", "b"])}, "`images` must be uint8 or float; got <U1"),
        ({"x_train": np.array([None] * 40)}, "pickled objects, which are not read"),
    ],
)
def test_bad_training_arrays_are_named(path: Path, arrays: dict, message: str) -> None:
    np.savez(path, **({"x_train": X, "y_train": Y} | arrays))
    with pytest.raises(DataError, match=rf"mine\.npz: .*{message}"):
        data.load("npz", data_dir=path)


def test_bad_test_arrays_are_named(path: Path) -> None:
    np.savez(path, x_test=X, y_test=Y[:3])
    with pytest.raises(DataError, match=r"mine\.npz: x_test and y_test: `labels` must be 40"):
        data.load_test("npz", data_dir=path)
    np.savez(path, x_train=X, y_train=Y, x_test=X, y_test=Y + 1)
    with pytest.raises(DataError, match=r"y_test has the label 4, y_train none above 3"):
        data.load_test("npz", data_dir=path)


def header(shape: tuple[int, ...], descr: str = "|u1", version: bytes = b"\x01\x00") -> bytes:
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text


def pack(path: Path, content: bytes, method: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("x_train.npy", content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header((2**40,)) + bytes(9), r"its header declares \(1099511627776,\) of uint8"),
        (header((2**62, 2**62)) + bytes(9), "its header declares"),
        (header((9,)) + bytes(10), "its header declares"),
        (header((9,), version=b"\x03\x00") + bytes(9), r"version \(3, 0\) of the format"),
        (header((9,), descr="|O") + bytes(9), "pickled objects, which are not read"),
        (b"\x93NUMPY\x01\x00\x05\x00{'a':", "EOF"),
        (b"\x93NUMPY\x01\x00\x0a\x00 1\n  2\n 3\n", "header"),
        (b"\x93NUMPY\x01\x00\x0f\x00{'a':1, b'b':2}", "not supported"),
        (b"text", "EOF"),
    ],
    ids=lambda value: "file" if isinstance(value, bytes) else None,
)
def test_headers_are_checked_before_memory_is_taken(
    path: Path, content: bytes, message: str
) -> None:
    pack(path, content)
    with pytest.raises(DataError, match=rf"mine\.npz: x_train cannot be read: .*({message})"):
        read_arrays(path, ("x_train",))


def test_declared_sizes_and_methods_of_the_zip_are_checked(path: Path) -> None:
    pack(path, header((9,)) + bytes(9), zipfile.ZIP_BZIP2)
    with pytest.raises(DataError, match=r"x_train .*packed in a way that numpy does not use"):
        read_arrays(path, ("x_train",))
    pack(path, header((9,)) + bytes(9))
    content = bytearray(path.read_bytes())
    # The size in the central directory, which zipfile believes.
    start = content.index(b"PK\x01\x02") + 24
    content[start : start + 4] = (2**31).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x_train .*declares more bytes than it can"):
        read_arrays(path, ("x_train",))


def test_encrypted_arrays_are_named(path: Path) -> None:
    pack(path, header((9,)) + bytes(9))
    content = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        content[content.index(signature) + offset] |= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x_train cannot be read: .*encrypted"):
        read_arrays(path, ("x_train",))


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04" + bytes(100)])
def test_files_that_are_no_npz_are_named(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"mine\.npz cannot be read or is damaged"):
        data.load("npz", data_dir=path)


def small_file() -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, x_train=X[:3], y_train=Y[:3])
    return stream.getvalue()


SMALL = small_file()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(SMALL) - 1), st.binary(min_size=0, max_size=3))
def test_a_damaged_file_is_refused_or_read(path: Path, position: int, patch: bytes) -> None:
    path.write_bytes(SMALL[:position] + patch + SMALL[position + 1 :])
    try:
        found = read_arrays(path, ("x_train", "y_train"))
    except DataError:
        return
    # Checksums in the zip cover the arrays, so whatever is read at all is what was written.
    for name, expected in (("x_train", X[:3]), ("y_train", Y[:3])):
        if name in found:
            np.testing.assert_array_equal(found[name], expected)
