"""The later step of a run, compiled ahead: what is started, when, and that it ends with the run."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from acert import records
from acert.experiments import ahead
from acert.experiments.ahead import Ahead, compile_later_step
from acert.experiments.experiment import Experiment, Network, to_config
from acert.methods import Acert
from acert.schedules import SmoothRadius
from acert.settings import Settings

SETTINGS = Settings(
    method=Acert(), max_radius=0.1, epochs=5, batch_size=8,
    radius_schedule=SmoothRadius(start_epoch=2, length=2),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A run folder as it is before its first step."""
    records.create(tmp_path / "run")
    experiment = Experiment(
        dataset="digits", network=Network(name="small_cnn", width=2), settings=SETTINGS
    )
    facts = {"input_shape": [1, 8, 8], "classes": list("0123"), "mean": [0.5], "std": [0.25]}
    config = {"experiment": to_config(experiment), "data": facts}
    records.write_config(tmp_path / "run", config)
    return tmp_path / "run"


@pytest.fixture
def trainer(folder, monkeypatch):
    """A trainer that has compiled its first step, on a device with room, so far as it can tell."""
    found = compile_later_step(folder, torch.device("cpu"))
    found.step, found.captured = 0, {(True, 8, 8): None}
    monkeypatch.setattr(ahead, "_has_room", lambda device: True)
    return found


@pytest.fixture
def started(monkeypatch):
    """The commands that were started, each of them a process that sleeps."""
    commands, start = [], subprocess.Popen

    def begin(words, **rest):
        commands.append(words)
        return start([sys.executable, "-c", "import time; time.sleep(60)"], **rest)

    monkeypatch.setattr(subprocess, "Popen", begin)
    return commands


def test_the_step_is_the_first_without_regularisers(folder):
    trainer = compile_later_step(folder, torch.device("cpu"))
    assert not trainer.regularizes(trainer.step - 1)
    assert trainer.regularizes(trainer.step - 2)
    assert trainer.settings == SETTINGS
    assert trainer.model(torch.rand(2, 1, 8, 8)).shape == (2, 4)


def test_the_command_that_a_run_starts_works(folder, trainer, started, monkeypatch):
    watch = Ahead(folder)
    watch.start(trainer)
    watch.step(1)
    watch.close()
    (words,) = started
    monkeypatch.undo()
    assert words[-2:] == [str(folder), "cpu"]
    assert subprocess.run(words, timeout=60, check=False).returncode == 0


def test_it_is_started_once_and_ends_with_the_run(folder, trainer, started):
    watch = Ahead(folder)
    watch.start(trainer)
    for step in (1, 2, 3):
        watch.step(step)
    assert len(started) == 1
    assert watch.process.poll() is None
    watch.close()
    assert watch.process.poll() is not None


@pytest.mark.parametrize("case", ["never", "always", "past", "eager", "full"])
def test_it_is_not_started_where_nothing_would_be_gained(
    folder, trainer, started, monkeypatch, case
):
    """No regularisers, or to the end, or behind; a step that does not compile; a full device."""
    if case == "never":
        trainer.settings = replace(SETTINGS, regularization=0.0)
    elif case == "always":
        schedule = SmoothRadius(start_epoch=2, length=4)
        trainer.settings = replace(SETTINGS, radius_schedule=schedule)
    elif case == "past":
        trainer.step = 3 * trainer.steps_per_epoch
    elif case == "eager":
        trainer.captured = None
    else:
        monkeypatch.setattr(ahead, "_has_room", lambda device: False)
    watch = Ahead(folder)
    watch.start(trainer)
    watch.step(trainer.step + 1)
    watch.close()
    assert started == []
