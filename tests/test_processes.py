"""Several processes against one: the same losses, gradients, statistics and weights."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.process_worker import alone
from tests.test_runs import Watcher
from tests.test_training import samples, trainer

import acert
from acert import data, records
from acert.data import Split
from acert.errors import InvalidInput, LostProcess
from acert.evaluation import certify
from acert.experiments.override import override
from acert.experiments.recipes import recipe, with_epochs
from acert.experiments.run import resume_run, train_run
from acert.methods import METHODS
from acert.processes import Processes, join, local_device, speaks_for_all
from acert.zoo import load_model

SOURCE = Path(acert.__file__).parents[1]
WORKER = Path(__file__).with_name("process_worker.py")


def together(count, folder, *, steps, dtype="float64", methods=tuple(METHODS)):
    """What each of `count` processes found, by method."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    words = [str(folder), ",".join(methods), str(steps), dtype]
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(WORKER), str(rank), str(count), *words],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    for process in started:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    return {
        method: [dict(np.load(folder / f"{method}-{rank}.npz")) for rank in range(count)]
        for method in methods
    }


@pytest.mark.parametrize("count", [2, 3])
def test_many_are_as_one(count, tmp_path):
    """Every method, regularisers and L1 on, in float64, 26 steps with uneven last batches."""
    for method, found in together(count, tmp_path, steps=26).items():
        expected = alone(method, 26, torch.float64)
        for one in found:
            for what, value in expected.items():
                assert np.allclose(one[what], value, rtol=1e-8, atol=1e-9), (method, what)
            # What every process has at the end is the same to the last bit.
            assert np.array_equal(one["weights"], found[0]["weights"])


def test_another_number_of_processes_goes_on(tmp_path):
    """In float64 and in the middle of an epoch: 13 steps of two, then 13 of three."""
    methods = ("acert", "sabr")
    first = together(2, tmp_path, steps=13, methods=methods)
    rest = together(3, tmp_path, steps=13, methods=methods)
    for method in methods:
        expected = alone(method, 26, torch.float64)
        terms = np.concatenate([first[method][0]["terms"], rest[method][0]["terms"]])
        assert np.allclose(terms, expected["terms"], rtol=1e-6, atol=1e-9)
        assert np.allclose(rest[method][2]["weights"], expected["weights"], rtol=1e-6, atol=1e-9)


def test_one_step_in_float32(tmp_path):
    for method, found in together(2, tmp_path, steps=1, dtype="float32").items():
        expected = alone(method, 1, torch.float32)
        assert np.allclose(found[1]["terms"], expected["terms"], rtol=1e-5)
        error = np.linalg.norm(found[1]["gradient"] - expected["gradient"])
        assert error <= 1e-5 * np.linalg.norm(expected["gradient"])


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [7, 12, 128])
def test_parts_cover_the_batch_evenly(count, size):
    parts = [range(size)[Processes(rank=rank, count=count).slice_of(size)] for rank in range(count)]
    assert [index for part in parts for index in part] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_any_number_of_processes_sees_the_same_batches():
    whole = [batch.index for batch in trainer().batches(1)]
    for count in (2, 3):
        parts = [
            list(trainer(processes=Processes(rank=rank, count=count)).batches(1))
            for rank in range(count)
        ]
        for number, index in enumerate(whole):
            seen = torch.cat([part[number].index for part in parts])
            assert torch.equal(seen, index)
            assert sum(part[number].share for part in parts) == pytest.approx(1)


def test_fewer_samples_than_processes_are_refused():
    with pytest.raises(InvalidInput, match="for each of the 9 processes; the smallest has 8"):
        trainer(train=samples(24), processes=Processes(count=9))
    with pytest.raises(InvalidInput, match="for each of the 7 processes; the smallest has 6"):
        trainer(train=samples(22), processes=Processes(count=7))


# -- one process that talks to itself: the same code, in this process ---------------------


@pytest.fixture
def joined(tmp_path):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    yield Processes(joined=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def quick():
    return override(with_epochs(recipe("digits", "acert"), 2), "network.width", 1)


def test_a_run_of_one_that_is_joined_is_the_plain_run(joined, tmp_path):
    plain = train_run(quick(), out=tmp_path / "plain", progress=False)
    run = train_run(quick(), out=tmp_path / "joined", progress=False, processes=joined)
    for one, other in zip(run.history, plain.history, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"seconds"}:
            assert one[name] == pytest.approx(other[name], rel=1e-4), name
    # A share of 288 validation samples, not one rounded to float32.
    right = 288 * run.history[-1]["accuracy"]
    assert right == pytest.approx(round(right), abs=1e-9)
    again = resume_run(tmp_path / "joined", progress=False, processes=joined)
    assert again.history == run.history
    split = data.load_test("digits")
    split = Split(split.images[:20], split.labels[:20])
    parts = [
        certify(run.model, split, max_radius=0.3, processes=processes)
        for processes in (joined, Processes())
    ]
    assert np.array_equal(parts[0].radius, parts[1].radius)
    joined.leave()


def test_a_stop_is_agreed_on_and_the_command_is_torchruns(joined, tmp_path):
    def stop(step):
        if step == 13:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt, match=r"after step 20 .*torchrun --nproc-per-node=1"):
        train_run(quick(), out=tmp_path / "run", progress=Watcher(stop), processes=joined)
    run = resume_run(tmp_path / "run", progress=False, processes=joined)
    plain = train_run(quick(), out=tmp_path / "plain", progress=False)
    assert run.history[-1]["loss"] == pytest.approx(plain.history[-1]["loss"], rel=1e-4)


def test_a_lost_process_is_told_with_the_command_that_goes_on(joined, tmp_path):
    def lose(step):
        if step == 5:
            raise RuntimeError("[gloo/pair.cc] Connection closed by peer")

    with pytest.raises(LostProcess, match=r"another process has died.*after step 5; .*--resume"):
        train_run(quick(), out=tmp_path / "run", progress=Watcher(lose), processes=joined)
    with pytest.raises(RuntimeError, match="of another kind"):
        train_run(
            quick(), out=tmp_path / "other", processes=joined,
            progress=Watcher(lambda _: (_ for _ in ()).throw(RuntimeError("of another kind"))),
        )  # fmt: skip


def test_what_the_others_hold_is_not_looked_at(joined):
    tensors = {"a": torch.arange(3), "b": torch.rand(2, 2)}
    found = joined.tensors_as_first(tensors, torch.device("cpu"))
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert joined.gathered({"x": 1}) == [{"x": 1}]


def test_without_torchrun_we_are_alone(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert join(torch.device("cpu")) == Processes()
    assert local_device("cuda") == "cuda"
    assert speaks_for_all()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device("cuda") == "cuda:3"
    assert local_device("cpu") == "cpu"


def test_more_processes_than_samples_are_refused():
    split = Split(torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(InvalidInput, match="the 3 processes need a sample each; got 2"):
        certify(load_model("digits-acert"), split, max_radius=0.1, processes=Processes(count=3))


# -- torchrun -----------------------------------------------------------------------------


def torchrun(count, *words):
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", "-m", "acert",
         *map(str, words)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def rank_of(process, rank):
    """The process of that rank among the children of torchrun."""
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError("no such process")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others_and_the_run_goes_on(tmp_path, victim):
    folder = tmp_path / "run"
    words = ["--set", "network.width=1", "--device", "cpu"]
    process = torchrun(2, "train", "--epochs", "15", *words, "--out", folder)
    while not (folder / "metrics.jsonl").is_file() or len(records.read_metrics(folder)) < 2:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    os.kill(rank_of(process, victim), signal.SIGKILL)
    said, _ = process.communicate(timeout=300)
    lines = [line for line in said.splitlines() if line.startswith("acert:")]
    assert len(lines) == 1, said
    assert f"torchrun --nproc-per-node=2 -m acert train --resume {folder}" in lines[0]
    if victim == 1:
        said, _ = torchrun(3, "train", "--resume", folder, "--device", "cpu").communicate()
        assert records.is_finished(folder), said
        assert said.count("the run is in") == 1
        assert [row["epoch"] for row in records.read_metrics(folder)] == list(range(1, 16))
        said, _ = torchrun(2, "certify", folder, "--device", "cpu").communicate()
        assert said.count("wrote certificates.npz") == 1
