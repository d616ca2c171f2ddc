import functools
import hashlib
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from acert.data.files import check_digest, check_size, data_root, fetched, reading, require, zeros
from acert.errors import DataError, InvalidInput

CONTENT = b"what the official file holds"
MD5 = hashlib.md5(CONTENT).hexdigest()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *values: object) -> None:
        """Nothing: requests are not part of a test's output."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Address of a server on this machine that has one file, `official`."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "official").write_bytes(CONTENT)
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_the_data_folder(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ACERT_DATA_DIR", raising=False)
    assert data_root() == tmp_path / ".cache" / "acert"
    monkeypatch.setenv("ACERT_DATA_DIR", "~/sets")
    assert data_root() == tmp_path / "sets"
    assert data_root("here") == Path("here")


def test_a_file_that_is_there_is_not_fetched(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"anything")
    assert fetched(path, url="http://nowhere.invalid/", md5="0") == path


def test_a_missing_file_is_downloaded_and_checked(server: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    assert fetched(path, url=f"{server}/official", md5=MD5).read_bytes() == CONTENT


def test_a_download_that_is_not_the_official_file_is_refused(server: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(DataError, match=r"file is missing: put it at .* its checksum is wrong"):
        fetched(path, url=f"{server}/official", md5=hashlib.md5(b"other").hexdigest())
    assert not path.exists()


def test_a_download_that_fails_says_where_to_put_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    with socket.socket() as closed:
        # Bound but not listening: whoever connects is refused at once.
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/official"
        with pytest.raises(DataError, match=r"missing: put it at .*/official failed") as caught:
            fetched(path, url=url, md5=MD5)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()  # no folder is left where none was


def test_without_pooch_the_message_says_so(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(
        DataError, match=r"file is missing: put it at .*/file \(.*'acert\[data\]'\)"
    ):
        fetched(tmp_path / "file", url="http://nowhere.invalid/", md5=MD5)


def test_require(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(DataError, match=r"file is missing: put it at .*/file"):
        require(path)
    path.touch()
    require(path)


@pytest.mark.parametrize(
    "error", [PermissionError("not yours"), EOFError(), NotImplementedError("x")]
)
def test_reading_names_the_file(error: Exception) -> None:
    with (
        pytest.raises(DataError, match=r"^a/file cannot be read or is damaged: "),
        reading(Path("a/file")),
    ):
        raise error


def test_reading_leaves_errors_that_are_ours() -> None:
    with pytest.raises(InvalidInput, match=r"^`x` must be 1$"), reading(Path("a/file")):
        raise InvalidInput("`x` must be 1")


def test_sizes_and_digests(tmp_path: Path) -> None:
    check_size("file", 3, 3)
    with pytest.raises(DataError, match=r"file is damaged: 4 bytes, the official file has 3"):
        check_size("file", 4, 3)
    check_digest("file", CONTENT, algorithm="md5", expected=MD5)
    path = tmp_path / "file"
    path.write_bytes(CONTENT + b"!")
    with path.open("rb") as stream, pytest.raises(DataError, match=r"file is damaged: its md5 is"):
        check_digest(path, stream, algorithm="md5", expected=MD5)


def test_zeros_refuses_what_no_memory_holds(monkeypatch) -> None:
    found = zeros((2, 3), source=Path("x"))
    assert found.dtype == np.uint8
    with pytest.raises(DataError, match=r"images .*declares 4294967297 bytes, more than"):
        zeros((2**32 + 1,), source=Path("images"))
    monkeypatch.setenv("ACERT_MAX_BYTES", str(2**90))
    for shape in ((2**50,), (2**40, 2**40)):
        with pytest.raises(DataError, match=r"images does not fit in memory"):
            zeros(shape, source=Path("images"))
