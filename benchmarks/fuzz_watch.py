"""One reader under watch: every input in a forked process, judged by what it raises and takes.

A failure is a crash (any exception but `AcertError`, or a signal), a hang, too much memory, or a
file touched outside of the reader's folder, a module imported or a process started.
"""

from __future__ import annotations

import faulthandler
import hashlib
import itertools
import json
import math
import mmap
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acert.errors import AcertError

# The longest input; the tiny files that inputs start from are far below it.
LONGEST = 2**18
# A reader that fails so often has shown it.
_MOST_RESTARTS = 25
_TOO_LARGE = 77
_STACK = re.compile(r'File "(.*)", line (\d+) in')


@dataclass(frozen=True)
class Reader:
    """What is fuzzed: `prepare` fills a folder and returns valid inputs, `read` takes one there.

    `ours` are the readers whose Python code guides the inputs; other libraries are mutated blindly.
    """

    name: str
    prepare: Callable[[Path], Sequence[bytes]]
    read: Callable[[bytes, Path], object]
    ours: bool = True


@dataclass(frozen=True)
class Limits:
    """What one input may take."""

    seconds: float = 5.0
    bytes: int = 2**30


@dataclass
class Result:
    """What all inputs to one reader showed."""

    guided: bool
    inputs: int = 0
    accepted: int = 0
    rejected: int = 0
    corpus: int = 0
    edges: int | None = None
    slowest_s: float = 0.0
    peak_mib: float = 0.0
    before_mib: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)


# How inputs are made: called with the judge of one input, the folder of the corpus, seconds, seed.
Driver = Callable[[Callable[[bytes], None], Path, float, int], None]


def watch(
    reader: Reader,
    work: Path,
    *,
    seconds: float,
    seed: int,
    driver: Driver,
    limits: Limits | None = None,
    progress: Callable[[float, int], None] | None = None,
) -> Result:
    """The result of `seconds` of inputs; a process that dies is replaced by the next.

    `work` gets the reader's own folder, files beside it that nobody may touch, the corpus and
    the inputs that failed.
    """
    limits = limits or Limits()
    shutil.rmtree(work, ignore_errors=True)
    for name in ("inside", "corpus", "failed"):
        (work / name).mkdir(parents=True)
    seeds = reader.prepare(work / "inside")
    for number, content in enumerate(seeds):
        (work / "corpus" / f"seed-{number}").write_bytes(content)
    # Once here, unwatched: libraries import their parts when they are first used. And a reader
    # that refuses the first, valid input would be tried for nothing.
    reader.read(seeds[0], work / "inside")
    bait = _bait(work)
    board = _Board()
    result = Result(guided=driver is not mutated)
    start, end = time.monotonic(), time.monotonic() + seconds
    for restart in range(_MOST_RESTARTS + 1):
        left = end - time.monotonic()
        if restart and left < 0:
            break
        with warnings.catch_warnings():
            # Of threads that may hold locks; those of torch and of a test runner do not here.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _child(reader, work, board, limits, driver, max(left, 0.1), seed + restart)
        status = _waited(
            pid, board, end + 2 * limits.seconds, lambda: progress and progress(
                min(1.0, (time.monotonic() - start) / seconds), board.inputs),
        )  # fmt: skip
        if status == 0:
            break
        cause = _cause(status, (work / "log").read_text("utf-8", "replace"), limits)
        _keep(work, *cause, board.current())
    result.inputs, result.accepted, result.rejected = board.inputs, board.accepted, board.rejected
    result.slowest_s, result.peak_mib = round(board.slowest, 3), round(board.peak / 2**20, 1)
    result.before_mib = round(board.before / 2**20, 1)
    result.corpus = sum(1 for _ in (work / "corpus").iterdir())
    # The last line of libFuzzer that tells it.
    told = re.findall(r"cov: (\d+)", (work / "log").read_text("utf-8", "replace"))
    result.edges = int(told[-1]) if told else None
    if _state(bait) != _BAIT:
        _keep(work, "outside", "a file beside the folder was changed", b"")
    kept = (work / "failures.jsonl").read_text().splitlines() if _any(work) else []
    result.failures = [json.loads(line) for line in kept]
    return result


# -- how inputs are made ------------------------------------------------------------------


def mutated(one: Callable[[bytes], None], corpus: Path, seconds: float, seed: int) -> None:
    """Blind mutations of the seeds, several at once; no coverage is asked for."""
    rng, end = random.Random(seed), time.monotonic() + seconds
    seeds = [path.read_bytes() for path in sorted(corpus.iterdir())]
    for content in seeds:
        one(content)
        if time.monotonic() > end:
            return
    while time.monotonic() < end:
        changed = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 2, 4, 8, 32))):
            _mutate(changed, rng, seeds)
        one(bytes(changed[:LONGEST]))


_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)


def _mutate(content: bytearray, rng: random.Random, seeds: Sequence[bytes]) -> None:
    at = rng.randrange(len(content) + 1)
    kind = rng.randrange(7)
    if kind == 0 and at < len(content):
        content[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        content[at : at + rng.choice((1, 2, 4, 16))] = b""
    elif kind == 2:
        content[at:at] = rng.randbytes(rng.choice((1, 2, 4, 16)))
    elif kind == 3:  # a size or an offset, either way round
        width = rng.choice((1, 2, 4, 8))
        number = rng.choice(_NUMBERS) % 256**width
        content[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
    elif kind == 4:
        length = rng.choice((1, 4, 64, 1024))
        content[at : at + length] = content[at : at + length] * 2
    elif kind == 5:
        other = rng.choice(seeds)
        begin = rng.randrange(len(other) + 1)
        piece = other[begin : begin + rng.choice((4, 64, 1024))]
        content[at : at + rng.choice((0, len(piece)))] = piece
    else:
        del content[at + rng.choice((0, 8, 256)) :]


def guided(one: Callable[[bytes], None], corpus: Path, seconds: float, seed: int) -> None:
    """Inputs of libFuzzer, which keeps those that reach new edges of our Python code."""
    import atheris

    options = [
        f"-max_total_time={math.ceil(seconds)}", f"-seed={seed + 1}", f"-max_len={LONGEST}",
        # Time and memory are judged by us, an input at a time.
        "-len_control=0", "-rss_limit_mb=0", "-malloc_limit_mb=0", "-reload=0",
        f"-artifact_prefix={corpus.parent}/",
    ]  # fmt: skip
    atheris.Setup(["acert", *options, str(corpus)], one, internal_libfuzzer=True)
    atheris.Fuzz()


# -- the process that reads ---------------------------------------------------------------


def _child(
    reader: Reader, work: Path, board: _Board, limits: Limits, driver: Driver,
    seconds: float, seed: int,
) -> None:  # fmt: skip
    """Never returns: the process ends here, with 0 if all inputs could be tried."""
    status = 1
    try:
        log = os.open(work / "log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.disable()  # a test runner's would tell of a planted crash on its terminal
        warnings.simplefilter("ignore")
        # The machine survives whatever is asked for; what is too much is judged below.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * mmap.PAGESIZE + 4 * limits.bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        vars(os)["fsync"] = lambda handle: None  # power cuts are not looked for
        os.environ["ACERT_COMMIT"] = "fuzz"  # or a run would ask git
        board.before = max(board.before, _peak())
        guard = Guard(work / "inside")

        def one(content: bytes) -> None:
            _judge(reader, content, work, board, limits, guard)

        driver(one, work / "corpus", seconds, seed)
        status = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)


def _judge(
    reader: Reader, content: bytes, work: Path, board: _Board, limits: Limits, guard: Guard
) -> None:
    board.begin(content)
    faulthandler.dump_traceback_later(limits.seconds, exit=True, file=2)
    start = time.perf_counter()
    guard.active = True
    try:
        reader.read(content, work / "inside")
        board.accepted += 1
    except AcertError:
        board.rejected += 1
    # Everything: that is what is looked for.
    except BaseException as error:
        guard.active = False
        _keep(work, "crash", _where(error), content)
    finally:
        guard.active = False
        faulthandler.cancel_dump_traceback_later()
    board.slowest = max(board.slowest, time.perf_counter() - start)
    for what in guard.taken():
        _keep(work, "outside", what, content)
    peak = _peak()
    board.peak = max(board.peak, min(peak, 2**62))
    if peak > limits.bytes:
        # The peak of a process never falls, so that this one is of no more use.
        os._exit(_TOO_LARGE)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _where(error: BaseException) -> str:
    """The error and where our code let it through: failures with equal words are one."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}acert{os.sep}" in frame.filename] or frames
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
    return f"{type(error).__name__} in {place}"


# Where the audit events that can be relative to an open folder tell its handle.
_HANDLES = {
    "os.remove": slice(1, 2), "os.rmdir": slice(1, 2), "os.mkdir": slice(2, 3),
    "os.rename": slice(2, 4),
}  # fmt: skip


class Guard:
    """Notes what Python's audit events tell of files, imports and processes."""

    _FILES = frozenset(
        {
            "open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink",
            "os.truncate", "os.chmod", "os.chown", "os.utime", "os.listdir", "os.scandir",
            "shutil.rmtree", "shutil.move", "shutil.copyfile",
        }
    )  # fmt: skip
    _NEVER = frozenset(
        {
            "pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn",
            "os.spawn", "os.fork", "socket.connect", "socket.getaddrinfo", "ctypes.dlopen",
        }
    )  # fmt: skip

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder.resolve())
        # What is imported lazily is read from here, never written to.
        places = [sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev", "/etc/localtime"]
        places += [path for path in sys.path if path]
        places += [str(Path(__file__).resolve().parents[1] / "src")]
        self.readable = tuple(os.path.realpath(place) for place in places)
        self.known = frozenset(name.partition(".")[0] for name in sys.modules)
        self.active = False
        self.found: list[str] = []
        sys.addaudithook(self._hook)

    def taken(self) -> list[str]:
        """What was noted since the last call, each once."""
        found, self.found = self.found, []
        return list(dict.fromkeys(found))

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event in self._FILES:
            # Not again for what is looked up here.
            self.active = False
            try:
                self._file(event, arguments)
            finally:
                self.active = True
        elif event == "import":
            root = str(arguments[0]).partition(".")[0]
            if root not in self.known and root not in sys.stdlib_module_names:
                self.found.append(f"imported {arguments[0]}")
        elif event in self._NEVER:
            self.found.append(f"{event} {str(arguments[:1])[:100]}")

    def _file(self, event: str, arguments: tuple[Any, ...]) -> None:
        pair = event in {"os.rename", "os.link", "shutil.move", "shutil.copyfile"}
        # A link may be named anything; where it leads is judged when it is followed.
        names = arguments[1:2] if event == "os.symlink" else arguments[: 2 if pair else 1]
        reading = event in {"os.listdir", "os.scandir"} or (
            event == "open" and not self._writes(arguments[1], arguments[2])
        )
        handles = arguments[_HANDLES[event]] if event in _HANDLES else ()
        # What is removed or renamed is the link itself, not what it leads to.
        follows = event in {"open", "os.listdir", "os.scandir", "os.truncate", "os.chmod"}
        for name, handle in itertools.zip_longest(names, handles[: len(names)], fillvalue=-1):
            if isinstance(name, int) or name is None:
                continue
            try:
                path = os.fsdecode(name)
                if handle >= 0:  # relative to an open folder
                    path = str(Path(f"/proc/self/fd/{handle}").readlink() / path)
                if follows:
                    place = os.path.realpath(path)
                else:
                    place = str(Path(os.path.realpath(Path(path).parent), Path(path).name))
            except ValueError:  # a name that no file can have
                continue
            inside = place == self.folder or place.startswith(self.folder + os.sep)
            if not inside and not (reading and place.startswith(self.readable)):
                self.found.append(f"{'read' if reading else event} {Path(place).name} outside")

    @staticmethod
    def _writes(mode: object, flags: object) -> bool:
        if isinstance(mode, str):
            return any(letter in mode for letter in "wax+")
        return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


# -- what parent and child share ----------------------------------------------------------


class _Board:
    """Counters and the input under way, in memory that outlives the process that writes it."""

    _FIELDS = ("inputs", "accepted", "rejected", "slowest", "peak", "before", "length")
    _FORM = struct.Struct("<QQQdQQQ")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._FORM.size + LONGEST)

    def begin(self, content: bytes) -> None:
        """Notes an input before it is tried."""
        self._memory[self._FORM.size : self._FORM.size + len(content)] = content
        self.length = len(content)
        self.inputs += 1

    def current(self) -> bytes:
        """The input that was tried last."""
        return bytes(self._memory[self._FORM.size : self._FORM.size + self.length])

    def __getattr__(self, name: str) -> Any:
        if name not in self._FIELDS:
            raise AttributeError(name)
        return self._FORM.unpack_from(self._memory)[self._FIELDS.index(name)]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._FIELDS:
            object.__setattr__(self, name, value)
            return
        values = list(self._FORM.unpack_from(self._memory))
        values[self._FIELDS.index(name)] = value
        self._FORM.pack_into(self._memory, 0, *values)


def _waited(pid: int, board: _Board, end: float, tell: Callable[[], object]) -> int:
    """The exit status, negative for a signal; killed if it is not over by then."""
    last = time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 1
        if time.monotonic() - last > 1:
            tell()
            last = time.monotonic()
        time.sleep(0.05)


def _cause(status: int, log: str, limits: Limits) -> tuple[str, str]:
    if status == _TOO_LARGE:
        return "memory", f"more than {limits.bytes / 2**20:.0f} MiB"
    if "Timeout (" in log:
        # The innermost frames come first.
        frames = _STACK.findall(log[log.rindex("Timeout (") :])
        ours = [frame for frame in frames if f"{os.sep}acert{os.sep}" in frame[0]] or frames
        place = f" in {Path(ours[0][0]).name}:{ours[0][1]}" if ours else ""
        return "hang", f"more than {limits.seconds:g} s{place}"
    if status < 0:
        return "crash", signal.Signals(-status).name
    return "crash", f"exit status {status}: {' '.join(log.split()[-30:])}"


def _keep(work: Path, kind: str, what: str, content: bytes) -> None:
    """Notes a failure, each once, with its input beside it."""
    known = (work / "failures.jsonl").read_text().splitlines() if _any(work) else []
    if any((old["kind"], old["what"]) == (kind, what) for old in map(json.loads, known)):
        return
    name = f"{kind}-{hashlib.sha256(content).hexdigest()[:12]}"
    (work / "failed" / name).write_bytes(content)
    entry = {"kind": kind, "what": what, "input": name, "bytes": len(content)}
    with (work / "failures.jsonl").open("a") as stream:
        stream.write(json.dumps(entry) + "\n")


def _any(work: Path) -> bool:
    return (work / "failures.jsonl").is_file()


_BAIT = {"private.json": b'{"schema": 1}', "private.txt": b"nobody may see this"}


def _bait(work: Path) -> Path:
    folder = work / "outside"
    folder.mkdir()
    for name, content in _BAIT.items():
        (folder / name).write_bytes(content)
    return folder


def _state(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
