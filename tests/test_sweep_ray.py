"""Sweeps on Ray: a real cluster of two nodes on this machine, and every way a node can fail."""

import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

import acert
from acert import cli, records
from acert.cli import sweep as verb
from acert.errors import InvalidInput, RunError
from acert.experiments.recipes import recipe
from acert.experiments.sweeps import carrier, cluster, ray_engine
from acert.experiments.sweeps.board import BoardLines
from acert.experiments.sweeps.engine import LocalEngine
from acert.experiments.sweeps.plan import make_plan
from acert.experiments.sweeps.ray_engine import RayEngine
from acert.experiments.sweeps.sweep import Sweep
from acert.experiments.sweeps.worker import Report, Task, perform

TINY = ["--epochs", "1", "--set", "network.width=1"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACERT_DATA_DIR", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def waited(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


# -- a real cluster ------------------------------------------------------------------------


@pytest.fixture
def head(monkeypatch):
    """A cluster of one node with one CPU, and a function that adds another."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")
    # Short, because sockets lie in it; and on the disk, because shared memory may be small.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    size = {"object_store_memory": 80 * 2**20, "plasma_directory": folder}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster

        found = Cluster()
        try:
            found.add_node(num_cpus=1, include_dashboard=False, **size)
            yield found, lambda: found.add_node(num_cpus=1, **size)
        finally:
            found.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


class Watched(BoardLines):  # type: ignore[misc]
    """Keeps what it is told, and calls `hook` while runs are under way."""

    def __init__(self, hook):
        self.hook, self.notes = hook, []

    def under_way(self, run, share):
        self.hook(self)

    def note(self, text):
        self.notes.append(text)


def same(one, other):
    """Whether two runs have the same weights, certificates and metrics, times apart."""
    for file in (records.CONFIG, records.WEIGHTS, records.CERTIFICATES, records.EXAMPLES):
        assert (one / file).read_bytes() == (other / file).read_bytes(), (one, file)
    mine, theirs = (
        [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
        for rows in (records.read_metrics(one), records.read_metrics(other))
    )
    assert mine == theirs
    assert mine
    return True


def below(ancestor):
    """All processes that a process has started, and theirs."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            stat = (folder / "stat").read_text()
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {ancestor}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {ancestor}


def send(processes, number):
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def freeze(ancestor):
    """Stops all that a process has started; they are still when this returns, new ones too."""
    stopped = set()
    while moving := {process for process in below(ancestor) if not is_stopped(process)}:
        send(moving, signal.SIGSTOP)
        stopped |= moving
        time.sleep(0.01)  # a write that is under way ends first
    return stopped


def is_stopped(process):
    with suppress(OSError):
        stat = Path(f"/proc/{process}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] in "TtZX"
    return True  # it has ended


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_cluster_gives_what_one_machine_does_even_if_it_loses_a_node(head, tmp_path):
    found, add_node = head
    plan = make_plan(
        methods=["acert", "fastibp"], kappas=[0, 0.5], seeds=[0, 1], epochs=5,
        changes=["network.width=1"],
    )  # fmt: skip
    Sweep(plan, tmp_path / "local").run(LocalEngine(jobs=2), BoardLines())

    lost, used = [], set()

    def remove(board):
        used.update(flight.node for flight in engine.flights.values())
        done = len([note for note in board.notes if "Acc" in note])
        for name, flight in engine.flights.items():
            if done >= 3 and flight.node == second.node_id and not lost:
                # Nothing moves while we look whether it is in the middle of its run.
                frozen = freeze(second.all_processes["raylet"][0].process.pid)
                folder = Path("ray", name)
                # Some may be too quick to be caught after an epoch.
                begun = len(records.read_metrics(folder)) >= (1 if done < 5 else 0)
                if begun and not records.is_finished(folder):
                    lost.append(name)
                    found.remove_node(second, allow_graceful=False)
                # What outlives its node would go on, and be done before anyone misses it.
                send(frozen, signal.SIGKILL if lost else signal.SIGCONT)

    board = Watched(remove)
    # A relative folder means the same on every node.
    engine = RayEngine(address=found.address, tell=board.note)
    # Not before this process has joined: it may not be on the node that is taken away.
    second = add_node()
    found.wait_for_nodes(60)
    outcomes = Sweep(plan, Path("ray")).run(engine, board)
    assert [outcome.kind for outcome in outcomes] == ["done"] * 8
    assert len(used - {""}) == 2
    again = {note.split()[0]: note for note in board.notes if "was lost with" in note}
    # Another one may have been on its way there.
    assert again[lost[0]].endswith("it starts again, from its last state")
    for run in plan.runs:
        assert same(tmp_path / "local" / run.name, tmp_path / "ray" / run.name)
    names = {path.name for path in Path("ray").iterdir()}
    assert names == {records.SWEEP, *(run.name for run in plan.runs)}

    # On the node that is left: Ctrl-C saves what is under way.
    def interrupt(board):
        if any(flight.share > 0 for flight in engine.flights.values()):
            os.kill(os.getpid(), signal.SIGINT)

    engine = RayEngine(address=found.address)
    long = Sweep(make_plan(epochs=100_000, changes=["network.width=1"]), tmp_path / "long")
    with pytest.raises(KeyboardInterrupt, match="what was under way saved"):
        long.run(engine, Watched(interrupt))
    state = records.read_state(tmp_path / "long" / "acert-k0-s0")
    assert state.facts["step"] > 0
    assert not list((tmp_path / "long").glob(".*"))


# -- on a node -----------------------------------------------------------------------------

# Stands for acert on a node: answers each task as its name says.
WORKER = """
import json, os, signal, sys, time
from pathlib import Path

def main():
    for line in sys.stdin:
        task = json.loads(line)
        name, folder = task["name"], Path(task["folder"])
        tell = lambda **report: print(json.dumps({"name": name, **report}), flush=True)
        folder.mkdir(exist_ok=True)
        folder.joinpath("pid").write_text(str(os.getpid()))
        seen = [os.getcwd(), os.environ.get("ACERT_DATA_DIR")]
        folder.joinpath("seen").write_text(json.dumps(seen))
        tell(kind="under way", share=0.5)
        if name == "killed":
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "long":
            save = lambda *words: (folder.joinpath("saved").touch(), os._exit(0))
            signal.signal(signal.SIGTERM, save)
            folder.joinpath("ready").touch()
            time.sleep(60)
        folder.joinpath(".draft.tmp").touch()
        tell(kind="failed" if name == "bad" else "done")
"""


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Carries out a task on a node with an acert of its own; returns the messages."""
    monkeypatch.setattr(carrier, "_idle", [])
    place = tmp_path / "modules"
    package = place / "acert" / "experiments" / "sweeps"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (place / "acert" / "__init__.py").write_text("__version__ = '7'\n")
    (place / "torch.py").write_text("__version__ = '3.1+cu999'\n")
    (package / "worker.py").write_text(WORKER)
    lease = tmp_path / "lease"
    lease.touch()

    def run(name="good", *, device="cpu", **order):
        fields = {"name": name, "folder": str(tmp_path / name), "device": device}
        code = carrier.code_digest(str(place / "acert"))
        given = {
            "node": "n1", "lease": str(lease), "path": [str(place), "/nowhere"],
            "folder": str(tmp_path), "environment": {"ACERT_DATA_DIR": "/data"},
            "versions": {"acert": "7", "torch": "3.1", "code": code},
        }  # fmt: skip
        return carrier.carry(fields, **given | order)

    yield run
    for child in carrier._idle:
        child.close()


def test_a_node_tells_reports_and_sizes_and_keeps_its_process(node, tmp_path):
    messages = list(node())
    assert messages[0] == ("node", ("n1", socket.gethostname(), True))
    assert messages[1] == ("report", {"name": "good", "kind": "under way", "share": 0.5})
    what, sizes = messages[2]
    assert (what, set(sizes)) == ("files", {"pid", "seen"})
    assert sizes["pid"] == len((tmp_path / "good" / "pid").read_text())
    assert messages[3:] == [("report", {"name": "good", "kind": "done"})]
    assert json.loads((tmp_path / "good" / "seen").read_text()) == [str(tmp_path), "/data"]
    # The same process takes the next run, but not one that was started otherwise or failed.
    pids = [(tmp_path / "good" / "pid").read_text()]
    for name, order in (("next", {}), ("other", {"environment": {}}), ("bad", {"environment": {}})):
        assert len(list(node(name, **order))) == 4
        pids.append((tmp_path / name / "pid").read_text())
    assert pids[0] == pids[1] != pids[2] == pids[3]
    assert carrier._idle == []
    list(node())
    (child,) = carrier._idle
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.wait()
    assert list(node("more"))[-1][1]["kind"] == "done"
    # On a GPU none is kept.
    carrier._idle.pop().close()
    list(node(device="cuda"))
    assert carrier._idle == []


def test_a_node_that_does_not_see_the_folder_sends_the_files(node, tmp_path):
    messages = list(node(lease=str(tmp_path / "nothing")))
    assert messages[0][1][2] is False
    files = dict(value for what, value in messages if what == "file")
    assert set(files) == {"pid", "seen"}
    assert not (tmp_path / "good").exists()
    folder = Path(json.loads(files["seen"])[0])
    assert folder == tmp_path
    assert not list(Path(tempfile.gettempdir()).glob("acert-*/pid"))


def test_a_killed_process_is_told_with_its_last_words(node):
    messages = list(node("killed"))
    assert messages[-1] == ("ended", (-signal.SIGKILL, "last words\n"))
    assert carrier._idle == []


def test_a_run_that_is_someone_elses_now_ends_at_once(node, tmp_path):
    messages = []
    for message in node("long"):
        messages.append(message)
        if message[0] == "report":
            waited(lambda: (tmp_path / "long" / "ready").exists())
            (tmp_path / "lease").unlink()
    assert [what for what, _ in messages] == ["node", "report"]
    assert not (tmp_path / "long" / "saved").exists()
    assert not alive(int((tmp_path / "long" / "pid").read_text()))


def test_a_disk_that_is_away_for_a_while_is_not_a_lost_lease(node, tmp_path, monkeypatch):
    asked = []

    def away(path):
        asked.append(path)
        raise OSError(5, "Input/output error") if len(asked) == 1 else FileNotFoundError

    run = node("long")
    assert [next(run)[0], next(run)[0]] == ["node", "report"]
    monkeypatch.setattr(Path, "stat", away)
    assert list(run) == []
    assert len(asked) == 2


def test_a_cancelled_run_is_saved_first(node, tmp_path):
    run = node("long")
    assert [next(run)[0], next(run)[0]] == ["node", "report"]
    waited(lambda: (tmp_path / "long" / "ready").exists())
    before = signal.getsignal(signal.SIGINT)
    run.close()
    assert (tmp_path / "long" / "saved").exists()
    assert signal.getsignal(signal.SIGINT) is before
    assert not alive(int((tmp_path / "long" / "pid").read_text()))


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({"acert": "8"}, "it has acert 7, this sweep 8"),
        ({"torch": "3.2"}, "it has torch 3.1, this sweep 3.2"),
        ({"code": "0"}, "its acert 7 has other code than this sweep's"),
    ],
)
def test_a_node_with_other_versions_is_unfit(node, tmp_path, versions, reason):
    right = {"acert": "7", "torch": "3.1", "code": "1"}
    assert list(node(versions=right | versions))[1:] == [("unfit", reason)]
    assert not (tmp_path / "good").exists()


def test_a_node_without_acert_is_unfit_and_a_killed_start_is_not(node, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('no torch here')\n")
    path = [str(tmp_path / "broken"), str(tmp_path / "modules")]
    assert list(node(path=path))[1:] == [("unfit", "ImportError: no torch here")]
    # Of another length: Python takes a file of the same second and length for the same.
    (tmp_path / "broken" / "torch.py").write_text("import os\n\n\nos.kill(os.getpid(), 9)\n")
    assert list(node(path=path))[1:] == [("ended", (-9, ""))]


def test_in_a_task_of_ray_the_node_is_named(node, monkeypatch):
    context = SimpleNamespace(get_node_id=lambda: "abc")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    monkeypatch.setattr(carrier, "carry", lambda fields, **order: iter([(fields, order)]))
    assert list(carrier.carry_on_ray(1, lease="x")) == [(1, {"node": "abc", "lease": "x"})]


# -- the engine ----------------------------------------------------------------------------


class RayError(Exception):
    pass


class RayTaskError(RayError):
    cause = OSError("no space left")


class FakeRay:
    """As much of Ray as the engine uses; every task tells what the next script says."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
    cloudpickle = SimpleNamespace(
        register_pickle_by_value=lambda module: None,
        unregister_pickle_by_value=lambda module: None,
    )

    def __init__(self):
        self.scripts, self.orders, self.cancelled, self.down = [], [], [], 0
        self.there = [node_of("n1"), node_of("n2")]
        self.silent = 0

    def remote(self, function):
        assert function is carrier.carry_on_ray

        def options(**options):
            def submit(fields, **order):
                self.orders.append((fields, order, options))
                return iter(self.scripts.pop(0))

            return SimpleNamespace(remote=submit)

        return SimpleNamespace(options=options)

    def wait(self, streams, timeout, num_returns=1):
        if self.silent:
            self.silent -= 1
            return [], streams
        return streams[:1], streams[1:]

    def get(self, message):
        if isinstance(message, Exception):
            raise message
        return message

    def nodes(self):
        return self.there

    def cluster_resources(self):
        return {"CPU": 2.0, "GPU": 1.0}

    def available_resources(self):
        return {"CPU": 0.0}

    def cancel(self, stream, *, force):
        self.cancelled.append(force)

    def shutdown(self):
        self.down += 1

    def get_runtime_context(self):
        return SimpleNamespace(gcs_address="head:6379")


def node_of(name, *, alive=True, **resources):
    return {"NodeID": name, "Alive": alive, "Resources": resources or {"CPU": 1.0}}


@pytest.fixture
def ray(monkeypatch):
    found = FakeRay()
    monkeypatch.setattr(ray_engine, "imported_ray", lambda: found)
    monkeypatch.setattr(ray_engine, "joined", lambda address: address == "auto")
    monkeypatch.setattr(ray_engine, "answers", lambda address: True)
    return found


def task(name="one", **options):
    experiment = recipe("digits", "fastibp", epochs=1, width=1)
    return Task(
        name=name, experiment=experiment, folder=f"out/{name}", certify_to=0.3, **options
    )  # fmt: skip


def on(node, *messages, shared=True):
    return [("node", (node, f"host-{node}", shared)), *messages]


def told(kind="done", **fields):
    return "report", {"name": "one", "kind": kind, **fields}


def made(ray, *scripts, **options):
    """An engine that has begun one task, and what it tells."""
    ray.scripts = list(scripts)
    notes = []
    engine = RayEngine(tell=notes.append, **options)
    engine.submit(task(data_dir="data", seconds=50.0))
    return engine, notes


def test_a_task_goes_to_the_cluster_with_what_it_needs(ray, tmp_path, monkeypatch):
    monkeypatch.setenv("ACERT_DATA_DIR", "elsewhere")
    Path("out").mkdir()
    old = Path("out/.one.0123.lease")
    old.touch()
    engine, _ = made(ray, on("n1", told("under way", share=0.5), ("files", {}), told()), gpus=0.5)
    (fields, order, options), lease = ray.orders[0], engine.flights["one"].lease
    assert fields["folder"] == str(tmp_path / "out" / "one")
    assert fields["data_dir"] == str(tmp_path / "data")
    assert 0 < fields["seconds"] <= 50
    assert Task.from_line(json.dumps(fields)).name == "one"
    assert order["folder"] == str(tmp_path)
    assert order["environment"] == {"ACERT_DATA_DIR": str(tmp_path / "elsewhere")}
    assert order["versions"]["acert"] == acert.__version__
    assert order["versions"]["code"] == carrier.code_digest(str(Path(acert.__file__).parent))
    assert (options["num_cpus"], options["num_gpus"], options["max_retries"]) == (1, 0.5, 0)
    assert "label_selector" not in options
    assert Path(order["lease"]) == lease
    assert lease.exists()
    assert not old.exists()
    assert [engine.report().share, engine.report().kind] == [0.5, "done"]
    assert not lease.exists()
    engine.close()
    engine.close()
    assert (ray.down, ray.cancelled) == (1, [])


def test_room_on_a_cluster(ray):
    nodes = [node_of("a", CPU=4.0, GPU=2.0), node_of("b", CPU=3.0), node_of("c", GPU=1.0)]
    counts = [
        cluster.room(nodes, cpus=cpus, gpus=gpus)
        for cpus, gpus in ((1, 0), (2, 0), (1, 1), (1, 0.5), (1, 0.3), (1, 2), (5, 0))
    ]
    assert counts == [7, 3, 2, 4, 4, 1, 0]
    engine, _ = made(ray, on("n1"))
    assert engine.free == 2 - 1
    ray.there = [node_of("n1", CPU=9.0), node_of("n2", CPU=9.0, alive=False)]
    assert engine.free == 2 - 1  # asked once a second
    engine.counted = -10.0
    assert engine.free == 9 - 1
    engine.jobs = 3
    assert engine.free == 3 - 1
    # One may wait for room.
    ray.there, engine.counted = [], -10.0
    assert engine.free == 1 - 1
    engine.flights = {}
    assert engine.free == 1


def test_gpus_are_those_of_the_cluster_where_nothing_is_said(ray, monkeypatch):
    assert RayEngine(gpus=None).gpus == 1.0
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    assert RayEngine(gpus=None).gpus == 0.0
    for given, message in (
        ({"cpus": 0}, "`cpus` must be at least 1; got 0"),
        ({"gpus": 1.5}, r"`gpus` must be in \[0, 1\] or whole; got 1.5"),
        ({"gpus": float("nan")}, "`gpus` must be"),
        ({"jobs": 0}, "`jobs` must be at least 1; got 0"),
    ):
        with pytest.raises(InvalidInput, match=message):
            RayEngine(**given)


def test_a_lost_run_starts_again_and_has_failed_if_it_comes_no_farther(ray, tmp_path):
    dead = RayError("the node\n is dead")
    engine, notes = made(
        ray,
        on("n1", told("under way", share=0.2), dead),
        on("n2", told("under way", share=0.6), dead),
        [dead],
        on("n1", told("under way", share=0.6)),
    )
    first = engine.flights["one"].lease
    shares = [engine.report().share, engine.report().share]
    assert not first.exists()
    (tmp_path / "out" / "one").mkdir()
    (tmp_path / "out" / "one" / records.STATE).touch()
    shares.append(engine.report().share)
    assert shares == [0.2, 0.6, 0.6]
    assert notes == [
        "one was lost with host-n1: it starts again, from the start",
        "one was lost with host-n2: it starts again, from its last state",
        "one was lost with a node: it starts again, from its last state",
    ]
    # The stream's end without a last report is a loss too, the third at this place.
    found = engine.report()
    assert (found.kind, found.final) == ("failed", True)
    assert found.reason == (
        "it was lost 3 times without coming farther, the last time with host-n1"
    )
    assert "its node gave it up" in found.details
    assert engine.flights == {}
    assert not list(Path("out").glob(".*"))


def test_what_a_budget_leaves_shrinks_with_every_start(ray):
    engine, _ = made(ray, [RayError()], on("n1", told()))
    engine.flights["one"].began -= 20
    assert engine.report().kind == "done"
    assert ray.orders[1][0]["seconds"] <= 30


def test_an_error_of_the_task_itself_is_a_failure(ray):
    engine, _ = made(ray, on("n1", RayTaskError("all of it")))
    found = engine.report()
    assert (found.kind, found.reason) == ("failed", "on host-n1: OSError: no space left")
    assert found.details == "all of it"


def test_a_killed_process_is_a_failure_as_on_one_machine(ray):
    engine, _ = made(ray, on("n1", ("ended", (-9, "words"))))
    found = engine.report()
    assert found.reason == "its process was ended by SIGKILL, perhaps for want of memory"
    assert found.details.endswith("words")


def test_an_unfit_node_takes_no_more_runs(ray):
    engine, notes = made(
        ray,
        on("n1", ("unfit", "it has torch 3")),
        on("n2", told("failed", reason="digits is not there", error="DataError")),
    )
    found = engine.report()
    assert ray.orders[1][2]["label_selector"] == {"ray.io/node-id": "!in(n1)"}
    assert notes == [
        "host-n1 takes no runs of this sweep: it has torch 3",
        "host-n2 takes no runs of this sweep: digits is not there",
    ]
    assert (found.kind, found.reason) == ("failed", "digits is not there")
    # Now none is left; a task that was on its way to one is told why.
    ray.scripts = [on("n2", ("unfit", "it has torch 3"))]
    engine.submit(task())
    assert engine.report().reason == "no node can carry it out: it has torch 3"
    assert len(notes) == 2


def test_files_of_a_node_that_does_not_share_the_folder_are_written_here(ray, tmp_path):
    files = {records.WEIGHTS: b"w", records.CONFIG: b"c", "../../evil": b"e"}
    engine, notes = made(
        ray, on("n1", *(("file", pair) for pair in files.items()), told(), shared=False)
    )
    assert engine.report().kind == "done"
    folder = tmp_path / "out" / "one"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        records.WEIGHTS: b"w", records.CONFIG: b"c", "evil": b"e",
    }  # fmt: skip
    assert notes == [
        f"host-n1 does not see {tmp_path / 'out'}: its runs come here when they are done, and "
        "start from nothing if they are stopped or lost"
    ]
    ray.scripts = [on("n1", ("file", (records.CONFIG, b"")), told(), shared=False)]
    shutil.rmtree(folder)
    folder.touch()
    engine.submit(task())
    assert engine.report().reason.startswith("its files cannot be written here: ")
    assert len(notes) == 1


def test_files_of_another_machine_are_waited_for(ray, tmp_path, monkeypatch):
    engine, _ = made(ray, on("n1", ("files", {"a": 2}), told()))
    folder = tmp_path / "out" / "one"

    def appear():
        time.sleep(0.3)
        folder.mkdir()
        (folder / "a").write_bytes(b"1")
        time.sleep(0.3)
        (folder / "a").write_bytes(b"12")

    late = threading.Thread(target=appear)
    late.start()
    assert engine.report().kind == "done"
    assert (folder / "a").read_bytes() == b"12"
    late.join()
    # Not for ever: the sweep says that they are not there.
    monkeypatch.setattr(ray_engine, "_APPEARANCE", 0.1)
    ray.scripts = [on("n1", ("files", {"b": 1}), told())]
    engine.submit(task())
    assert engine.report().kind == "done"


def test_what_is_waited_for_is_said_once(ray, monkeypatch):
    engine, notes = made(ray, on("n1", told()), gpus=2, cpus=3)
    ray.silent = 3
    engine.report()
    assert notes == [
        "waiting for a node with 3 CPUs and 2 GPUs a run; there are nodes with 1 CPU; 1 CPU"
    ]
    monkeypatch.setattr(ray_engine, "_SILENCE", -1.0)
    engine, notes = made(ray, on("n1", told("under way", share=0.1), told()))
    ray.silent = 2
    engine.report()
    assert notes == ["waiting for 1 CPU a run; free in the cluster: 0 CPUs"]
    # Something is under way, so nothing is amiss.
    ray.silent = 1
    engine.report()
    monkeypatch.setattr(ray_engine, "_SILENCE", 100.0)
    ray.there = []
    engine, notes = made(ray, on("n1", told()), gpus=1)
    ray.silent = 1
    engine.report()
    assert notes == ["waiting for a node with 1 CPU and 1 GPU a run; there are nodes with nothing"]
    ray.there = [node_of("n1")]
    engine, notes = made(ray, on("n1", told()))
    ray.silent = 1
    engine.report()
    assert notes == []


def test_a_head_that_has_gone_ends_the_sweep_in_words(ray, monkeypatch):
    engine, _ = made(ray, on("n1", *[told("under way", share=0.1)] * 9))
    monkeypatch.setattr(ray_engine, "_LOOK", 0.0)
    assert engine.free == 1
    assert engine.report().share == 0.1
    monkeypatch.setattr(ray_engine, "answers", lambda address: False)
    engine.counted = -10.0
    assert engine.free == 1  # as it was known, without asking
    assert engine.report().share == 0.1
    engine.answered -= 60
    with pytest.raises(RunError, match=r"head of the Ray cluster at head:6379 has gone: start"):
        engine.report()


def test_stopping_waits_for_every_run_and_closing_does_not(ray):
    engine, _ = made(ray, on("n1", told("under way", share=0.1), RayError("cancelled")), on("n2"))
    engine.submit(task("two"))
    ray.silent = 2
    engine.stop()
    assert ray.cancelled == [False, False]
    leases = [flight.lease for flight in engine.flights.values()]
    engine.mine = False
    engine.close()
    # In a cluster that the caller has joined, runs are ended and the caller stays in it.
    assert ray.cancelled == [False, False, True, True]
    assert ray.down == 0
    assert not any(lease.exists() for lease in leases)


def test_what_is_told_goes_to_standard_error(ray, capsys):
    RayEngine().tell("a note")
    assert capsys.readouterr().err == "a note\n"


# -- joining -------------------------------------------------------------------------------


@pytest.fixture
def server():
    """Starts a server that answers with given bytes, and then is silent; returns its address."""
    listeners, threads, over = [], [], threading.Event()

    def start(answer):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve():
            # Whoever has asked may have gone by now, and the test too.
            with suppress(OSError), listener.accept()[0] as connection:
                connection.sendall(answer)
                over.wait()

        threads.append(threading.Thread(target=serve, daemon=True))
        threads[-1].start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    over.set()
    for listener, thread in zip(listeners, threads, strict=True):
        with suppress(OSError), listener:
            listener.shutdown(socket.SHUT_RDWR)  # ends a wait for somebody to ask
        thread.join(10)


def frame(kind, content):
    return len(content).to_bytes(3) + bytes((kind, 0, 0, 0, 0, 0)) + content


def test_who_answers(server, monkeypatch):
    settings = frame(4, b"")
    assert cluster.answers(server(settings + frame(8, b"1234") + frame(1, b"\x88...")))
    for strange in (
        b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20000,
        settings + frame(1, b"\x8d"),
        settings * 30,
        settings + frame(7, b"going away"),
    ):
        assert not cluster.answers(server(strange))
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert cluster.answers(server(b""))


@pytest.fixture
def refused(capsys):
    """Runs a command that is refused; returns its one line."""

    def run(*words):
        assert cli.main(["sweep", *TINY, "--out", "out", *words]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert not Path("out").exists()
        return err

    return run


def test_an_address_that_does_not_answer_is_refused_in_ten_seconds(refused, server, monkeypatch):
    assert cluster.PATIENCE == 10.0
    monkeypatch.setattr(cluster, "PATIENCE", 0.5)
    address = server(b"")
    began = time.monotonic()
    message = refused("--engine", "ray", "--address", address)
    assert time.monotonic() - began < 5
    assert message == (
        f"acert: no Ray cluster answers at {address} within 0 s: start one there with "
        "ray start --head --port=6379 --disable-usage-stats\n"
    )
    # What can be known earlier is told earlier.
    monkeypatch.setattr(cluster, "PATIENCE", 10.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    message = refused("--engine", "ray", "--address", f"127.0.0.1:{port}")
    assert f"no Ray cluster answers at 127.0.0.1:{port} (Connection refused): start" in message
    message = refused("--engine", "ray", "--address", server(b"SSH-2.0-OpenSSH_9.2\r\n"))
    assert "(what answers there is not Ray)" in message
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    assert f":{port} (Connection refused)" in refused("--engine", "ray")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--address", "auto"], "`--address` is for a cluster: add --engine ray"),
        (["--cpus", "2"], "`--cpus` is for a cluster: add --engine ray"),
        (["--gpus", "0"], "`--gpus` is for a cluster: add --engine ray"),
        (["--engine", "rya"], "argument --engine: invalid choice: 'rya'"),
        (["--engine", "ray", "--address", "ray://h:1"], "auto or HOST:PORT; got 'ray://h:1'"),
        (["--engine", "ray", "--address", "h:0"], "auto or HOST:PORT; got 'h:0'"),
        (["--engine", "ray", "--address", ""], "auto or HOST:PORT; got ''"),
        (["--engine", "ray", "--device", "cuda:1"], "must be cpu or cuda on a cluster"),
        (["--engine", "ray", "--device", "cpu", "--gpus", "1"], "`--gpus` must fit `--device` cpu"),
        (["--engine", "ray", "--device", "cuda", "--gpus", "0"], "must fit `--device` cuda; got 0"),
        (["--engine", "ray", "--cpus", "0"], "`cpus` must be at least 1; got 0"),
        (["--engine", "ray", "--kappas", "7"], "`kappa` must be in [0, 1]; got 7"),
    ],
)
def test_refused_flags(refused, words, message):
    assert message in refused(*words)


def test_no_cluster_here_and_ray_not_installed(refused, monkeypatch):
    services = importlib.import_module("ray._private.services")

    def nothing(address):
        raise ConnectionError

    monkeypatch.setattr(services, "canonicalize_bootstrap_address", nothing)
    assert refused("--engine", "ray") == (
        "acert: there is no Ray cluster on this machine: start one with "
        "ray start --head --port=6379 --disable-usage-stats\n"
    )
    monkeypatch.setitem(sys.modules, "ray", None)
    assert refused("--engine", "ray") == (
        "acert: `--engine ray` needs the package ray: pip install 'acert[ray]'\n"
    )


def test_ray_is_imported_by_nobody_else():
    code = "import sys, acert.cli.parser; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_joining_leaves_signals_alone_and_tells_what_ray_says(monkeypatch):
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cluster, "_check_answers", lambda place: None)

    def init(**options):
        assert options == {
            "address": "h:1", "log_to_driver": False, "logging_level": "ERROR",
        }  # fmt: skip
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        warnings.warn("of Ray's own", FutureWarning, stacklevel=1)

    monkeypatch.setattr(ray, "init", init)
    assert cluster.joined("h:1")
    assert signal.getsignal(signal.SIGTERM) is handler
    elsewhere = threading.Thread(target=lambda: found.append(cluster.joined("h:1")))
    found: list[bool] = []
    elsewhere.start()
    elsewhere.join()
    assert found == [True]

    def differs(**options):
        raise RuntimeError("Version mismatch:\n  Ray 2 and 3")

    monkeypatch.setattr(ray, "init", differs)
    with pytest.raises(RunError, match=r"at h:1 cannot be joined: Version mismatch: Ray 2 and 3"):
        cluster.joined("h:1")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert not cluster.joined("h:1")


def test_messages_of_the_user_stay_as_they_were_set(monkeypatch):
    name = "RAY_DEDUP_LOGS_SKIP_REGEX"
    seen = []
    monkeypatch.setattr(cluster.importlib, "import_module", lambda _: seen.append(os.environ[name]))
    monkeypatch.delenv(name, raising=False)
    cluster.imported_ray()
    assert name not in os.environ
    monkeypatch.setenv(name, "mine")
    cluster.imported_ray()
    assert seen == ["(?s).*", "mine"]
    assert os.environ[name] == "mine"


# -- the verb ------------------------------------------------------------------------------


def test_the_verb_takes_devices_and_threads_from_the_cluster(monkeypatch, capsys):
    made = []

    class Told(LocalEngine):  # type: ignore[misc]
        def __init__(self, *, address, cpus, gpus, jobs, tell):
            super().__init__(jobs=1)
            made.append((address, cpus, gpus, jobs))
            self.gpus = 1.0 if gpus is None else gpus

        def submit(self, task):
            made.append((task.device, task.threads))
            self.reports.put(Report(name=task.name, kind="failed", reason="enough"))
            self.busy[task.name] = SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(verb, "RayEngine", Told)

    def call(*words):
        return cli.main(["sweep", *TINY, "--out", "out", "--engine", "ray", *words])

    assert call("--device", "cpu", "--cpus", "3", "--address", "h:1", "--jobs", "2") == 1
    assert call("--device", "cuda") == 1
    assert call() == 1
    assert call("--gpus", "0") == 1
    assert made == [
        ("h:1", 3, 0.0, 2), ("cpu", 3),
        ("auto", 1, 1.0, None), ("cuda", None),
        ("auto", 1, None, None), ("cuda", None),
        ("auto", 1, 0.0, None), ("cpu", 1),
    ]  # fmt: skip
    # A plan needs no cluster.
    assert call("--plan") == 0
    assert len(made) == 8
    assert "new, 1 epoch" in capsys.readouterr().out


def test_reports_name_the_class_of_an_error(tmp_path):
    given = Task(
        name="one", experiment=recipe("npz", "fastibp", epochs=1), folder=str(tmp_path / "one"),
        certify_to=0.3, data_dir=str(tmp_path / "nothing"),
    )  # fmt: skip
    assert perform(given, lambda report: None).error == "DataError"
