"""An engine on a Ray cluster: every run is a task with its CPUs and GPUs; lost ones go on."""

from __future__ import annotations

import math
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch

import acert
from acert import records
from acert.errors import InvalidInput, RunError
from acert.experiments.sweeps import carrier
from acert.experiments.sweeps.cluster import answers, imported_ray, joined, room
from acert.experiments.sweeps.engine import Engine, cause
from acert.experiments.sweeps.worker import Report, Task
from acert.version import __version__

__all__ = ["RayEngine"]

# How often a run may be lost without having come farther before it counts as failed: it may be
# what kills its nodes.
_LOSSES = 3
# Seconds after which it is told that nothing has begun.
_SILENCE = 10.0
# Seconds between two looks at the head, and for how long it may be away; Ray gives up after 60.
_LOOK, _AWAY = 5.0, 30.0
# Seconds in which files of another machine appear here; network disks keep old listings so long.
_APPEARANCE = 90.0
# What the sweep's environment means on every node.
_VARIABLES = ("ACERT_DATA_DIR", "ACERT_MAX_BYTES")


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _in_parts(gpus: float) -> bool:
    """Whether Ray can give a run so many GPUs: a part of one, or whole ones."""
    return 0 <= gpus < math.inf and (gpus <= 1 or gpus == int(gpus))


@dataclass
class _Flight:
    """A run under way: its stream of messages, and what is known of it."""

    task: Task
    began: float
    stream: Any = None
    lease: Path | None = None
    node: str = ""
    host: str = ""
    share: float = 0.0
    farthest: float = 0.0
    losses: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


@final
class RayEngine(Engine):
    """Runs on a Ray cluster, each with `cpus` and `gpus`, as many as there is room for.

    `address` is `auto` or HOST:PORT; a process that is in a cluster already stays in it. `gpus`
    None is one where the cluster has any. `jobs` limits the runs at a time. `tell` is told what
    the user should know. A run whose node is lost starts again, from its last state where other
    nodes see its folder.
    """

    def __init__(
        self,
        *,
        address: str = "auto",
        cpus: int = 1,
        gpus: float | None = 0.0,
        jobs: int | None = None,
        tell: Callable[[str], None] = _print,
    ) -> None:
        for name, value, fits, constraint in (
            ("cpus", cpus, cpus >= 1, "at least 1"),
            ("gpus", gpus, gpus is None or _in_parts(gpus), "in [0, 1] or whole"),
            ("jobs", jobs, jobs is None or jobs >= 1, "at least 1"),
        ):
            if not fits:
                raise InvalidInput(f"`{name}` must be {constraint}; got {value}")
        self.ray = imported_ray()
        self.mine = joined(address)
        self.head: str = self.ray.get_runtime_context().gcs_address
        if gpus is None:
            gpus = 1.0 if self.ray.cluster_resources().get("GPU", 0.0) else 0.0
        self.cpus, self.gpus, self.jobs, self.tell = cpus, gpus, jobs, tell
        # One for all runs, so that a worker keeps what it has in memory.
        self.carry = self.ray.remote(carrier.carry_on_ray)
        self.flights: dict[str, _Flight] = {}
        self.reports: deque[Report] = deque()
        self.known: list[dict[str, Any]] = []
        # Reasons of nodes that cannot carry out any run of this sweep.
        self.unfit: dict[str, str] = {}
        # Hosts that do not see the folder of the sweep.
        self.unshared: set[str] = set()
        self.told = ""
        self.heard = self.looked = self.answered = time.monotonic()
        self.counted, self.seen = -1.0, 0
        package = str(Path(acert.__file__).parent)
        self.versions = {
            "acert": __version__,
            "torch": torch.__version__.partition("+")[0],
            "code": carrier.code_digest(package),
        }

    @property
    def free(self) -> int:
        """Runs that there is room for; one may always wait for room."""
        now = time.monotonic()
        # Asked for at every report, and the head need not be.
        if now - self.counted > 1.0:
            self.counted, self.seen = now, room(self._nodes(), cpus=self.cpus, gpus=self.gpus)
        limit = self.seen if self.jobs is None else min(self.seen, self.jobs)
        return max(1, limit) - len(self.flights)

    def submit(self, task: Task) -> None:
        """Hands the task to the cluster, with paths that mean the same in every folder."""
        place = None if task.data_dir is None else str(Path(task.data_dir).absolute())
        task = replace(task, folder=str(Path(task.folder).absolute()), data_dir=place)
        self.flights[task.name] = flight = _Flight(task=task, began=time.monotonic())
        # A sweep that was killed may have left some, and its runs may not know yet.
        for old in Path(task.folder).parent.glob(f".{task.name}.*.lease"):
            old.unlink(missing_ok=True)
        self._start(flight)

    def report(self) -> Report:
        """The next report; a run that was lost is started again, and tells so."""
        while not self.reports:
            streams = {flight.stream: flight for flight in self.flights.values()}
            ready, _ = self.ray.wait([*streams], num_returns=1, timeout=1.0)
            for stream in ready:
                self._hear(streams[stream])
            if ready:
                self.heard = time.monotonic()
            else:
                self._tell_waiting()
            self._check_head()
        return self.reports.popleft()

    def stop(self) -> None:
        """Cancels every run: it saves its state after the step under way."""
        for flight in self.flights.values():
            self.ray.cancel(flight.stream, force=False)
        for flight in self.flights.values():
            self._drain(flight)

    def close(self) -> None:
        """Ends what still works; its processes end with it."""
        for flight in self.flights.values():
            self._end(flight)
            if not self.mine:
                self.ray.cancel(flight.stream, force=True)
        self.flights = {}
        if self.mine:
            self.mine = False
            self.ray.shutdown()

    # -- one run -------------------------------------------------------------------------

    def _start(self, flight: _Flight) -> None:
        task, now = flight.task, time.monotonic()
        if task.seconds is not None:
            left = task.seconds - (now - flight.began)
            task = replace(task, seconds=left)
        place = Path(task.folder).parent
        place.mkdir(parents=True, exist_ok=True)
        flight.lease = place / f".{task.name}.{secrets.token_hex(8)}.lease"
        flight.lease.touch()
        flight.node, flight.host, flight.share = "", "", 0.0
        flight.files, flight.sizes = {}, {}
        options: dict[str, Any] = {}
        if self.unfit:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(self.unfit)})"}
        # As it is, not by name: a node may have another acert, or none.
        self.ray.cloudpickle.register_pickle_by_value(carrier)
        try:
            carry = self.carry.options(
                name=f"acert {task.name}", num_returns="streaming", max_retries=0,
                num_cpus=self.cpus, num_gpus=self.gpus, scheduling_strategy="SPREAD", **options,
            )  # fmt: skip
            flight.stream = carry.remote(
                task.fields(), lease=str(flight.lease), path=sys.path, folder=str(Path.cwd()),
                environment=_environment(), versions=self.versions,
            )  # fmt: skip
        finally:
            self.ray.cloudpickle.unregister_pickle_by_value(carrier)

    def _hear(self, flight: _Flight) -> None:
        """Takes the next message of a run."""
        errors = self.ray.exceptions
        try:
            what, value = self.ray.get(next(flight.stream))
        except StopIteration:
            self._lose(flight, "its node gave it up")
        except errors.RayTaskError as error:
            reason = " ".join(f"{type(error.cause).__name__}: {error.cause}".split())
            self._finish(flight, self._failed(flight, f"on {flight.host}: {reason}", str(error)))
        except errors.RayError as error:
            self._lose(flight, " ".join(str(error).split()) or type(error).__name__)
        else:
            self._take(flight, what, value)

    def _take(self, flight: _Flight, what: str, value: Any) -> None:
        match what:
            case "node":
                flight.node, flight.host, shared = value
                if not shared:
                    self._tell_unshared(flight)
            case "unfit":
                self._leave_out(flight, value)
            case "file":
                name, flight.files[name] = value
            case "files":
                flight.sizes = value
            case "ended":
                status, words = value
                reason = cause(status)
                self._finish(flight, self._failed(flight, reason, f"{reason}\n{words}"))
            case _:
                report = Report(**value)
                if report.error == "DataError":
                    # The sweep has seen these data itself.
                    self._leave_out(flight, report.reason, report)
                elif report.final:
                    self._finish(flight, report)
                else:
                    flight.share = report.share
                    self.reports.append(report)

    def _failed(self, flight: _Flight, reason: str, details: str = "") -> Report:
        return Report(name=flight.task.name, kind="failed", reason=reason, details=details)

    def _lose(self, flight: _Flight, why: str) -> None:
        """Starts a lost run again, unless it is lost again and again at the same place."""
        self._end(flight)
        farther = flight.share > flight.farthest
        flight.losses = 1 if farther else flight.losses + 1
        flight.farthest = max(flight.share, flight.farthest)
        host = flight.host or "a node"
        if flight.losses >= _LOSSES:
            reason = (
                f"it was lost {_LOSSES} times without coming farther, the last time with {host}"
            )
            self._finish(flight, self._failed(flight, reason, f"{reason}\n{why}"))
            return
        begun = (Path(flight.task.folder) / records.STATE).is_file()
        again = "from its last state" if begun else "from the start"
        self.tell(f"{flight.task.name} was lost with {host}: it starts again, {again}")
        self._start(flight)

    def _leave_out(self, flight: _Flight, reason: str, report: Report | None = None) -> None:
        """Gives no more runs to the node of this one; another takes it, if there is one."""
        if flight.node not in self.unfit:
            self.unfit[flight.node] = reason
            self.tell(f"{flight.host} takes no runs of this sweep: {reason}")
        self._end(flight)
        if room(self._nodes(), cpus=self.cpus, gpus=self.gpus) > 0:
            self._start(flight)
        else:
            found = report or self._failed(flight, f"no node can carry it out: {reason}")
            self._finish(flight, found)

    def _finish(self, flight: _Flight, report: Report) -> None:
        """The run is over, and its files are here."""
        self._end(flight)
        del self.flights[report.name]
        folder = Path(flight.task.folder)
        try:
            if flight.files:
                _write(folder, flight.files)
            elif report.kind == "done":
                _wait_for(folder, flight.sizes)
        except OSError as error:
            report = self._failed(flight, f"its files cannot be written here: {error}")
        self.reports.append(report)

    def _end(self, flight: _Flight) -> None:
        """Takes the lease back: whoever still works on the run stops."""
        if flight.lease is not None:
            with suppress(OSError):
                flight.lease.unlink(missing_ok=True)

    def _drain(self, flight: _Flight) -> None:
        """Waits until a cancelled run has saved its state."""
        with suppress(StopIteration, self.ray.exceptions.RayError):
            while True:
                ready, _ = self.ray.wait([flight.stream], timeout=1.0)
                if ready:
                    self.ray.get(next(flight.stream))

    # -- the cluster ---------------------------------------------------------------------

    def _nodes(self) -> list[dict[str, Any]]:
        """The nodes that are alive and fit for this sweep."""
        # Where the head is away Ray would wait for it, deaf to everything.
        if answers(self.head):
            self.known = self.ray.nodes()
        return [node for node in self.known if node["Alive"] and node["NodeID"] not in self.unfit]

    def _check_head(self) -> None:
        """Gives up once the head is gone for good: Ray would end this process without a word."""
        now = time.monotonic()
        if now - self.looked < _LOOK:
            return
        self.looked = now
        if answers(self.head):
            self.answered = now
        elif now - self.answered > _AWAY:
            raise RunError(
                f"the head of the Ray cluster at {self.head} has gone: start the cluster again, "
                "and the same command goes on"
            )

    def _tell_waiting(self) -> None:
        """Says what is waited for, once, where nothing is under way."""
        if any(flight.node for flight in self.flights.values()):
            return
        need = _spoken(self.cpus, self.gpus)
        nodes = self._nodes()
        if room(nodes, cpus=self.cpus, gpus=self.gpus) == 0:
            there = [node["Resources"] for node in nodes]
            have = "; ".join(_spoken(one.get("CPU", 0), one.get("GPU", 0)) for one in there)
            text = f"waiting for a node with {need} a run; there are nodes with {have or 'nothing'}"
        elif time.monotonic() - self.heard > _SILENCE:
            left = self.ray.available_resources() if answers(self.head) else {}
            free = _spoken(left.get("CPU", 0), left.get("GPU", 0))
            text = f"waiting for {need} a run; free in the cluster: {free}"
        else:
            return
        if text != self.told:
            self.told = text
            self.tell(text)

    def _tell_unshared(self, flight: _Flight) -> None:
        if flight.host not in self.unshared:
            self.unshared.add(flight.host)
            self.tell(
                f"{flight.host} does not see {Path(flight.task.folder).parent}: its runs come here "
                "when they are done, and start from nothing if they are stopped or lost"
            )


def _environment() -> dict[str, str]:
    """Variables that mean the same on every node."""
    found = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    if found.get("ACERT_DATA_DIR"):
        found["ACERT_DATA_DIR"] = str(Path(found["ACERT_DATA_DIR"]).absolute())
    return found


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes the files of a run; the weights last, since they say that it is finished."""
    folder.mkdir(parents=True, exist_ok=True)
    order = {records.CONFIG: 0, records.WEIGHTS: 2}
    for name in sorted(files, key=lambda name: (order.get(name, 1), name)):
        # A node is trusted, but a name that leads elsewhere helps nobody.
        draft = folder / f".{Path(name).name}.tmp"
        draft.write_bytes(files[name])
        draft.replace(folder / Path(name).name)


def _wait_for(folder: Path, sizes: Mapping[str, int]) -> None:
    """Waits until files that another machine has written are seen here too."""
    deadline = time.monotonic() + _APPEARANCE
    while not _sees(folder, sizes) and time.monotonic() < deadline:
        time.sleep(0.2)


def _sees(folder: Path, sizes: Mapping[str, int]) -> bool:
    # Asking for the listing is what makes a network disk look again.
    there = {file.name: file.stat().st_size for file in folder.iterdir()} if folder.is_dir() else {}
    return all(there.get(name) == size for name, size in sizes.items())


def _spoken(cpus: float, gpus: float) -> str:
    words = f"{cpus:g} CPU" if cpus == 1 else f"{cpus:g} CPUs"
    if gpus:
        words += f" and {gpus:g} GPU" if gpus == 1 else f" and {gpus:g} GPUs"
    return words
