"""What a node of a cluster does with a run: a process carries it out, and its reports are told.

Sent to the node as it is, so it needs nothing but Python there: a node without acert, or with
another one, answers in words. The run itself is left to a process of its own, as on one machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

__all__ = ["Message", "carry", "carry_on_ray", "code_digest"]

# What it is about, and the thing itself: "node" its id, its name and whether it sees the lease,
# "report" the fields of one, "unfit" a reason, "file" a name and its content, "files" the sizes of
# all files, "ended" a status and last words.
Message = tuple[str, Any]

# Processes of this worker of Ray that have nothing to do; as on one machine, only those on the CPU
# take another run. They end with the worker.
_idle: list[_Child] = []


def carry_on_ray(fields: Mapping[str, Any], **order: Any) -> Iterator[Message]:
    """What `carry` tells, in a task of Ray."""
    import ray

    yield from carry(fields, node=ray.get_runtime_context().get_node_id(), **order)


def carry(
    fields: Mapping[str, Any],
    *,
    node: str,
    lease: str,
    path: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    versions: Mapping[str, str],
) -> Iterator[Message]:
    """What there is to tell of a run until its last report.

    `fields` are those of the task. `lease` is a file that a node sees where it sees the folder
    of the sweep; without it the run is made in a folder of the node, and its files are told. If
    it vanishes later, somebody else has the run now. `path`, `folder` and `environment` are the
    sweep's places for modules, its current folder and variables; `versions` its acert and torch.
    """
    watched = Path(lease) if os.path.exists(lease) else None  # noqa: PTH110
    place = fields["folder"] if watched else tempfile.mkdtemp(prefix="acert-")
    reuse = fields["device"] == "cpu"
    child = _started(path, folder, environment, reuse=reuse)
    child.lease = watched
    try:
        yield "node", (node, socket.gethostname(), watched is not None)
        child.hello = child.hello or child.line()
        reason = child.misfit(versions)
        if reason is not None:
            yield "unfit", reason
            return
        child.write(json.dumps({**fields, "folder": place}))
        while (line := child.line()) is not None:
            report = json.loads(line)
            child.over = report["kind"] != "under way"
            if child.over:
                yield from _files(Path(place), whole=watched is None)
            # Before the last word, which may be what nobody waits for.
            child.idle = reuse and report["kind"] in ("done", "late")
            yield "report", report
            if child.over:
                return
        if not child.lost:
            child.over = True
            yield "ended", (child.process.wait(), child.last_words())
    finally:
        # A cancelled run comes here too: all is saved first, however often it is asked to end.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        if child.idle:
            child.idle = child.over = False
            _idle.append(child)
        else:
            child.close()
        if watched is None:
            shutil.rmtree(place, ignore_errors=True)
        signal.signal(signal.SIGINT, before)


def code_digest(package: str) -> str:
    """A digest of all Python files below a folder, with their names."""
    found = hashlib.sha256()
    for file in sorted(Path(package).rglob("*.py")):
        found.update(f"{file.relative_to(package).as_posix()}\0".encode())
        found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def _started(
    path: Sequence[str], folder: str, environment: Mapping[str, str], *, reuse: bool
) -> _Child:
    """A process for a run: an idle one that was started alike, or a new one."""
    alike = (tuple(path), folder, dict(environment))
    while reuse and _idle:
        child = _idle.pop()
        if child.alike == alike and child.process.poll() is None:
            return child
        child.close()
    return _Child(*alike)


@final
class _Child:
    """The process of one run; it ends when its standard input does."""

    def __init__(
        self,
        path: Sequence[str],
        folder: str,
        environment: Mapping[str, str],
    ) -> None:
        # What is not on this node is looked for where its own Python looks.
        known = [entry for entry in path if not entry or Path(entry).exists()]
        code = (
            f"import sys; own = sys.path[1:]; sys.path[:] = {known}; "
            "sys.path += [entry for entry in own if entry not in sys.path]; "
            "import json, acert, torch; from acert.experiments.sweeps.worker import main; "
            "about = [acert.__version__, torch.__version__, acert.__file__]; "
            "print(json.dumps(about), flush=True); main()"
        )
        self.alike = (path, folder, environment)
        self.lease: Path | None = None
        self.hello: str | None = None
        # Whether it has said all, whether the run is someone else's now or over, whether another
        # may follow.
        self.ended = self.lost = self.over = self.idle = False
        self.looked = time.monotonic()
        self.words = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.words,
            text=True,
            encoding="utf-8",
            cwd=folder if Path(folder).is_dir() else None,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read, name="acert-reports", daemon=True)
        self.reader.start()

    def write(self, line: str) -> None:
        """Hands it a line; one that has just died is noticed by its silence."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def misfit(self, versions: Mapping[str, str]) -> str | None:
        """How this node's acert and torch differ from the sweep's, in words; None if they agree.

        One that could not even import them says so; one that was killed says nothing of them.
        """
        if self.hello is None:
            if self.lost or self.process.wait() <= 0:
                return None
            return self.last_words().strip().rpartition("\n")[2]
        version, torch, file = json.loads(self.hello)
        # A head without a GPU has another build of the same torch.
        here = {"acert": version, "torch": torch.partition("+")[0]}
        for name, found in here.items():
            if found != versions[name]:
                return f"it has {name} {found}, this sweep {versions[name]}"
        if code_digest(str(Path(file).parent)) != versions["code"]:
            return f"its acert {version} has other code than this sweep's"
        return None

    def line(self) -> str | None:
        """Its next line; None once it has ended, or if the run is no longer this node's."""
        while not self.lost and not self.ended:
            # In short waits, because a cancelled task is told between two of them.
            with suppress(queue.Empty):
                line = self.lines.get(timeout=0.2)
                self.ended = line is None
                return line
            if self.lease is not None and time.monotonic() - self.looked > 1.0:
                self.looked = time.monotonic()
                try:
                    self.lease.stat()
                except FileNotFoundError:
                    self.lost = True
                except OSError:
                    pass  # a disk that is away for a while says nothing
        return None

    def last_words(self) -> str:
        """The end of what it wrote on standard error."""
        size = self.words.seek(0, 2)
        self.words.seek(max(0, size - 4000))
        return self.words.read().decode("utf-8", errors="replace")

    def close(self) -> None:
        """Ends it: what is not over is saved first, unless somebody else has the run."""
        if not self.over and not self.lost:
            self.process.terminate()
            self.process.wait()
        self.process.kill()
        self.process.wait()
        self.reader.join()
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.words.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)


def _files(folder: Path, *, whole: bool) -> Iterator[Message]:
    """The finished files of a run folder: whole, or their sizes."""
    found = []
    if folder.is_dir():
        found = sorted(file for file in folder.iterdir() if not file.name.startswith("."))
    if whole:
        for file in found:
            if file.is_file():
                yield "file", (file.name, file.read_bytes())
    else:
        yield "files", {file.name: file.stat().st_size for file in found if file.is_file()}
