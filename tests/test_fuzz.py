"""The fuzzer sees what it looks for: planted crashes, hangs, memory, and what is outside."""

import json
import mmap
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from benchmarks import fuzz
from benchmarks.fuzz_readers import readers
from benchmarks.fuzz_watch import Limits, Reader, mutated, watch

from acert.errors import RunError


def held(field=1):
    """Bytes of this process now; the others begin with those that are not of files (field 2)."""
    return int(Path("/proc/self/statm").read_text().split()[field]) * mmap.PAGESIZE


def watched(tmp_path, read, *, seconds=0.4, limits=None, seeds=(b"seed",), driver=mutated):
    reader = Reader("planted", lambda folder: list(seeds), read)
    limits = limits or Limits(bytes=held() + 2**30)
    return watch(
        reader, tmp_path / "work", seconds=seconds, seed=1, driver=driver, limits=limits
    )  # fmt: skip


def first_200(one, corpus, seconds, seed):
    """The first of the mutated inputs, as many on a busy machine as on an idle one."""
    left = iter(range(200))

    def counted(content):
        next(left)
        one(content)

    with suppress(StopIteration):
        mutated(counted, corpus, seconds, seed)


def first(content):
    """Whether it is the valid input, which must be accepted."""
    return content == b"seed"


def test_a_sound_reader_passes(tmp_path):
    def read(content, folder):
        (folder / "file").write_bytes(content)
        if not first((folder / "file").read_bytes()):
            raise RunError("not the seed")

    found = watched(tmp_path, read, seconds=120, driver=first_200)
    assert found.failures == []
    assert found.inputs == found.accepted + found.rejected == 200
    assert found.rejected > 100
    assert found.accepted > 0
    assert 0 < found.slowest_s < 60
    assert 0 < found.before_mib <= found.peak_mib


def test_a_planted_crash_is_found_once_with_its_input(tmp_path):
    def read(content, folder):
        if len(content) > 8:
            raise KeyError(content)

    (failure,) = watched(tmp_path, read).failures
    assert failure["kind"] == "crash"
    assert failure["what"].startswith("KeyError in test_fuzz.py:")
    kept = (tmp_path / "work" / "failed" / failure["input"]).read_bytes()
    assert len(kept) == failure["bytes"] > 8


def test_a_process_that_dies_is_a_crash_and_is_replaced(tmp_path):
    def read(content, folder):
        if content.startswith(b"see\0"):
            os.abort()

    found = watched(tmp_path, read, seeds=(b"seed", b"see\0"), seconds=3)
    assert [(one["kind"], one["what"]) for one in found.failures] == [("crash", "SIGABRT")]
    assert found.inputs > 4  # more than one process tried


def test_a_planted_hang_is_found(tmp_path):
    def read(content, folder):
        while not first(content):
            time.sleep(0.01)

    (failure,) = watched(tmp_path, read, limits=Limits(seconds=0.3, bytes=held() + 2**30)).failures
    assert failure["kind"] == "hang"
    assert failure["what"].startswith("more than 0.3 s in test_fuzz.py:")


def test_planted_memory_is_found(tmp_path):
    size = held(field=2) + 200 * 2**20

    def read(content, folder):
        if not first(content):
            bytearray(size)  # zeros that are written, unlike those of numpy

    limits = Limits(bytes=held() + 100 * 2**20)
    found = watched(tmp_path, read, limits=limits)
    assert [one["kind"] for one in found.failures] == ["memory"]
    assert found.peak_mib * 2**20 > limits.bytes


OUTSIDE = {
    "write": (lambda folder: (folder.parent / "new").write_text("x"), "open new outside"),
    "through a link": (
        lambda folder: (folder / "link").open("w").close(), "open private.txt outside"
    ),
    "read": (
        lambda folder: (folder / ".." / "outside" / "private.txt").read_text(),
        "read private.txt outside",
    ),
    "remove": (lambda folder: (folder.parent / "none").unlink(True), "os.remove none outside"),
    "import": (lambda folder: __import__("acert_planted"), "imported acert_planted"),
    "process": (lambda folder: subprocess.run(["true"], check=True), "subprocess.Popen ('true',)"),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_outside_is_found(tmp_path, monkeypatch, name):
    act, told = OUTSIDE[name]
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "acert_planted.py").touch()
    monkeypatch.syspath_prepend(str(modules))

    def read(content, folder):
        if not (folder / "link").is_symlink():
            (folder / "link").symlink_to("../outside/private.txt")
        if not first(content):
            act(folder)

    found = watched(tmp_path, read)
    assert ("outside", told) in [(one["kind"], one["what"]) for one in found.failures]


def test_a_change_that_no_event_tells_is_found_afterwards(tmp_path):
    def read(content, folder):
        if not first(content):
            # As a library in C would: this process tells nothing of what another does.
            os.truncate(folder.parent / "outside" / "private.txt", 0)

    found = watched(tmp_path, read)
    assert "a file beside the folder was changed" in [one["what"] for one in found.failures]


def test_a_first_input_that_is_refused_is_told(tmp_path):
    def read(content, folder):
        raise RunError("whatever it is")

    with pytest.raises(RunError, match="whatever it is"):
        watched(tmp_path, read)


def test_mutations_are_those_of_their_seed(tmp_path):
    (tmp_path / "seed-0").write_bytes(bytes(range(64)))
    found = []
    for seed in (1, 1, 2):
        inputs: list[bytes] = []
        mutated(inputs.append, tmp_path, 0.05, seed)
        found.append(inputs[:50])
    assert found[0] == found[1] != found[2]
    assert len(set(found[0])) > 20


def test_every_reader_takes_its_seeds_and_refuses_the_rest(tmp_path):
    """In another process: readers of official files are told of smaller ones."""
    words = [sys.executable, fuzz.__file__, "--blind", "--seconds", "1"]
    places = ["--out", str(tmp_path / "fuzz.json"), "--work", str(tmp_path / "work")]
    done = subprocess.run([*words, *places], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "fuzz.json").read_text())
    assert set(record["readers"]) == {reader.name for reader in readers()}
    assert record["failures"] == 0
    assert all(one["accepted"] for one in record["readers"].values())


def test_the_committed_record_is_of_every_reader_for_ten_minutes():
    path = Path(fuzz.ROOT) / "results" / "fuzz.json"
    record = json.loads(path.read_text())
    assert set(record["readers"]) == {reader.name for reader in readers()}
    assert (record["failures"], record["seconds"]) == (0, 600)
    assert record["limits"] == {"seconds": 5.0, "bytes": 2**30}
    assert record["slowest_s"] < 5
    assert record["peak_mib"] < 1024
    for reader in readers():
        assert record["readers"][reader.name]["guided"] == reader.ours
        assert not reader.ours or record["readers"][reader.name]["edges"] > 0
