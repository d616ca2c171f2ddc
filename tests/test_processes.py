"""Several processes against one: the same losses, gradients, statistics and weights."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.process_worker import all_methods, trained
from tests.test_training import samples, trainer

import acert
from acert.errors import InvalidInput
from acert.methods import METHODS
from acert.processes import ALONE, Processes

SOURCE = Path(acert.__file__).parents[1]
WORKER = Path(__file__).with_name("process_worker.py")


def together(count, folder, *, steps, dtype):
    """What each of `count` processes found."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(WORKER), str(rank), str(count), str(folder),
             str(steps), dtype],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    for process in started:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    return [dict(np.load(folder / f"rank{rank}.npz")) for rank in range(count)]


@pytest.fixture(scope="module")
def alone():
    return all_methods(ALONE, steps=50, dtype=torch.float64)


@pytest.mark.parametrize("count", [2, 3])
def test_many_are_as_one(count, alone, tmp_path):
    """Every method, regularisers and L1 on, in float64, 50 steps with uneven last batches."""
    found = together(count, tmp_path, steps=50, dtype="float64")
    for method in METHODS:
        for one in found:
            for what in ("terms", "gradient", "buffers", "weights"):
                name = f"{method}/{what}"
                assert np.allclose(one[name], alone[name], rtol=1e-8, atol=1e-9), name
        # What every process has at the end is the same to the last bit.
        assert all(
            np.array_equal(one[f"{method}/weights"], found[0][f"{method}/weights"]) for one in found
        )


def test_one_step_in_float32(tmp_path):
    found = together(2, tmp_path, steps=1, dtype="float32")[1]
    for method in METHODS:
        alone = trained(method, ALONE, steps=1, dtype=torch.float32)
        terms, gradient = alone[f"{method}/terms"], alone[f"{method}/gradient"]
        assert np.allclose(found[f"{method}/terms"], terms, rtol=1e-5)
        error = np.linalg.norm(found[f"{method}/gradient"] - gradient)
        assert error <= 1e-5 * np.linalg.norm(gradient)


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
