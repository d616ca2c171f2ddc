import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import pickled

from acert.data.plain_pickle import loads
from acert.errors import DataError

IMAGES = np.arange(60, dtype=np.uint8).reshape(4, 15)
BATCH = pickled.batch(IMAGES, [3, 0, 9, 1])


def test_reads_a_batch() -> None:
    found = loads(BATCH)
    assert sorted(found) == [b"batch_label", b"data", b"filenames", b"labels"]
    np.testing.assert_array_equal(found[b"data"], IMAGES)
    assert found[b"labels"] == [3, 0, 9, 1]
    assert found[b"filenames"] == [b"picture_%d.png" % i for i in range(4)]
    assert found[b"batch_label"] == b"training batch 1 of 5"


def test_agrees_with_the_standard_library() -> None:
    with warnings.catch_warnings():
        # The old name `numpy.core` in the file is deprecated, which is what the file holds.
        warnings.simplefilter("ignore", DeprecationWarning)
        expected = pickle.loads(BATCH, encoding="bytes")
    found = loads(BATCH)
    np.testing.assert_array_equal(found.pop(b"data"), expected.pop(b"data"))
    assert found == expected


def test_fortran_order_large_strings_and_other_opcodes() -> None:
    large = np.asfortranarray(np.arange(600, dtype=np.uint16).astype(np.uint8).reshape(20, 30))
    content = (
        pickled.START
        + b"}r\x01\x00\x00\x00"
        + pickled.string(b"a")
        + pickled.array(large)
        + b"s"
        + b"("
        + pickled.string(b"b")
        + pickled.integer(70_000)
        + b"q\x03"
        + pickled.string(b"c")
        + b"h\x03"
        + pickled.string(b"d")
        + b"j\x03\x00\x00\x00"
        + b"u."
    )
    found = loads(content)
    np.testing.assert_array_equal(found[b"a"], large)
    assert (found[b"b"], found[b"c"], found[b"d"]) == (70_000, 70_000, 70_000)


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_is_executed(tmp_path: Path) -> None:
    path = tmp_path / "made by the pickle"
    content = pickle.dumps({"data": Harmful(path)}, protocol=2)
    with pytest.raises(DataError, match=r"cannot be read"):
        loads(content)
    assert not path.exists()
    # The same file does its harm where it is trusted, so the check above could have failed.
    pickle.loads(content)
    assert path.exists()


@pytest.mark.parametrize(
    "name",
    [b"os\nsystem", b"builtins\neval", b"numpy\nload", b"numpy.core.multiarray\nfromfile"],
)
def test_every_other_name_is_refused(name: bytes) -> None:
    content = pickled.START + b"}" + pickled.string(b"k") + b"c" + name + b"\n" + b")Rs."
    with pytest.raises(DataError, match=rf"it names {name.decode().replace(chr(10), '.')}"):
        loads(content)


def entry(value: bytes) -> bytes:
    return pickled.START + b"}" + pickled.string(b"k") + value + b"s."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut off"),
        (b"\x80\x04.", "does not start as protocol 2 does"),
        (BATCH[:-1], "cut off"),
        (BATCH + b"!", "bytes follow its end"),
        (pickled.START + b"].", "does not hold a dictionary"),
        (pickled.START + b".", "not enough values"),
        (entry(b"I1\n"), r"opcode b'I' is not one"),
        (entry(b"P1\n"), r"opcode b'P' is not one"),
        (entry(b"T\xff\xff\xff\x7f"), "cut off"),
        (entry(b"T\xff\xff\xff\xff"), "cut off"),
        (entry(b"("), "a value is missing"),
        (entry(b"N"), "not a string, a number or a list of them"),
        (entry(b"]](K\x01ee"), "list index out of range|items come without"),
        (entry(pickled.items([pickled.items([])])), "not a string, a number or a list of them"),
        (entry(b"cnumpy\ndtype\n"), "not a string, a number or a list of them"),
        (entry(b"cnumpy\ndtype\n)R"), "calls something other than a uint8 array"),
        (entry(b"cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R"), "calls something other"),
        (entry(b"cnumpy\nndarray\nK\x05\x85\x85R"), "calls something other"),
        (entry(b"K\x01Nb"), "sets the state of something other"),
        (entry(b"h\x05"), "5"),
        (entry(b"c\xff\n\n"), "ascii"),
        (entry(b"cnumpy"), "not found"),
        (pickled.START + b"}K\x01K\x02s.", "a key of its dictionary is not a string"),
        (pickled.START + b"}(K\x01u.", "zip"),
        (pickled.START + b"K\x01(K\x02e.", "items come without a list"),
        (pickled.START + b"K\x01", "cut off"),
    ],
    ids=lambda value: "file" if isinstance(value, bytes) else None,
)
def test_what_is_not_plain_data_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=rf"the pickled data cannot be read: .*({message})"):
        loads(content)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (b"(J\xff\xff\xff\x7fJ\xff\xff\xff\x7ft", "comes with 60 bytes"),
        (b"(J\xff\xff\xff\xffK\x3ct", "not made of sizes"),
        (b"(\x88K\x3ct", "not made of sizes"),
        (b"K\x3c", "not made of sizes"),
        (b"(" + 2000 * b"K\xff" + b"t", "not made of sizes"),
    ],
)
def test_a_shape_that_does_not_fit_its_bytes_takes_no_memory(shape: bytes, message: str) -> None:
    honest = b"(K\x04K\x0ft"
    assert BATCH.count(honest) == 1
    with pytest.raises(DataError, match=message):
        loads(BATCH.replace(honest, shape))


def test_the_state_of_an_array_is_checked() -> None:
    for honest, other in ((b"Rq\x06(K\x01", b"Rq\x06(K\x02"), (b"tb\x89U", b"tb\x89K\x01U")):
        content = BATCH.replace(honest, other)
        assert content != BATCH
        with pytest.raises(DataError, match=r"not that of uint8 numbers|too many values"):
            loads(content)


@given(st.integers(0, len(BATCH) - 1), st.binary(min_size=0, max_size=3))
def test_a_damaged_file_is_refused_or_still_plain(position: int, patch: bytes) -> None:
    content = BATCH[:position] + patch + BATCH[position + 1 :]
    try:
        found = loads(content)
    except DataError:
        return
    for value in found.values():
        assert isinstance(value, bytes | int | list | np.ndarray)
