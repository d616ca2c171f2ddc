"""Where the runs of a sweep are carried out: an abstract engine, and one of local processes."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from types import TracebackType
from typing import Self, final

from acert.experiments.sweeps.worker import Report, Task

__all__ = ["Engine", "LocalEngine", "cause"]

# What is kept of the last words of a worker that died.
_LAST_WORDS = 4000


class Engine(ABC):
    """Takes tasks and returns reports, in whatever order they come; closed by `with`."""

    @property
    @abstractmethod
    def free(self) -> int:
        """How many tasks it would start at once."""

    @abstractmethod
    def submit(self, task: Task) -> None:
        """Starts a task; only where `free` is above 0."""

    @abstractmethod
    def report(self) -> Report:
        """Waits for the next report of any task."""

    @abstractmethod
    def stop(self) -> None:
        """Stops all tasks as Ctrl-C does, and waits until their states are saved."""

    @abstractmethod
    def close(self) -> None:
        """Ends what is left, at once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()


@final
class LocalEngine(Engine):
    """Worker processes on this machine, `jobs` at a time.

    With `reuse` a worker goes on to the next task, which saves the second that torch takes to
    import. Not so on CUDA: torch counts how often a function is compiled in a process, and gives
    up after a few. A worker whose task failed is never used again.
    """

    def __init__(self, *, jobs: int, reuse: bool = True) -> None:
        self.jobs = jobs
        self.reuse = reuse
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.idle: list[_Worker] = []
        self.busy: dict[str, _Worker] = {}

    @property
    def free(self) -> int:
        """Jobs that no worker is busy with."""
        return self.jobs - len(self.busy)

    def submit(self, task: Task) -> None:
        """Hands the task to an idle worker, or starts one."""
        worker = self.idle.pop() if self.idle else _Worker(self.reports)
        # An idle one may have died meanwhile.
        while not worker.take(task):
            worker.close()
            worker = self.idle.pop() if self.idle else _Worker(self.reports)
        self.busy[task.name] = worker

    def report(self) -> Report:
        """The next report; a worker that died has failed."""
        found = self.reports.get()
        if found.final:
            worker = self.busy.pop(found.name)
            if self.reuse and found.kind in ("done", "late"):
                self.idle.append(worker)
            else:
                worker.close()
        return found

    def stop(self) -> None:
        """SIGTERM to every worker: it saves its state after the step under way."""
        for worker in self.busy.values():
            worker.process.terminate()
        for worker in self.busy.values():
            worker.process.wait()

    def close(self) -> None:
        """Kills what still works; every file is whole or as it was before."""
        for worker in (*self.idle, *self.busy.values()):
            worker.close()
        self.idle, self.busy = [], {}


@final
class _Worker:
    """A process that carries out one task at a time; its reports go into a queue."""

    def __init__(self, reports: queue.SimpleQueue[Report]) -> None:
        # The same places for modules as here: a user's model must be found there too.
        code = f"import sys; sys.path[:] = {sys.path}; "
        code += "from acert.experiments.sweeps.worker import main; "
        self.words = tempfile.TemporaryFile()  # noqa: SIM115  closed with the worker
        self.process = subprocess.Popen(
            [sys.executable, "-c", code + "main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.words,
            text=True,
            encoding="utf-8",
            # Ctrl-C on a terminal goes to the sweep, which then asks its workers once.
            start_new_session=True,
        )
        self.reports = reports
        self.task: str | None = None
        self.ended = False
        self.lock = threading.Lock()
        self.reader = threading.Thread(target=self._read, name="acert-reports", daemon=True)
        self.reader.start()

    def take(self, task: Task) -> bool:
        """Begins a task, from here on reported to its end; False if the process is dead."""
        assert self.process.stdin is not None
        with self.lock:
            if self.ended:
                return False
            self.task = task.name
        # One that dies this moment is reported by its reader.
        with suppress(BrokenPipeError):
            self.process.stdin.write(task.to_line())
            self.process.stdin.flush()
        return True

    def close(self) -> None:
        """Ends the process, which no longer has a task that counts."""
        self.task = None
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
            report = Report(**json.loads(line))
            if report.final:
                self.task = None
            self.reports.put(report)
        with self.lock:
            self.ended, task = True, self.task
        if task is not None:
            reason, details = cause(self.process.wait()), self._last_words()
            self.reports.put(
                Report(name=task, kind="failed", reason=reason, details=f"{reason}\n{details}")
            )

    def _last_words(self) -> str:
        size = self.words.seek(0, 2)
        self.words.seek(max(0, size - _LAST_WORDS))
        return self.words.read().decode("utf-8", errors="replace")


def cause(status: int) -> str:
    """Why a process ended that should not have."""
    if status >= 0:
        return f"its process ended with exit status {status}"
    name = signal.Signals(-status).name
    hint = ", perhaps for want of memory" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"
