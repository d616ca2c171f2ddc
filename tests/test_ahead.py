"""The later step of a run, compiled ahead: what is started, when, and that it ends with the run."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import acert
from acert import records
from acert.experiments import ahead
from acert.experiments import run as runs
from acert.experiments.ahead import Ahead, compile_later_step
from acert.experiments.experiment import Experiment, Network, read_experiment, to_config
from acert.experiments.progress import Silent
from acert.losses import Phase
from acert.methods import Acert
from acert.processes import ALONE, Processes
from acert.schedules import SmoothRadius
from acert.settings import Settings

SETTINGS = Settings(
    method=Acert(), max_radius=0.1, epochs=5, batch_size=8,
    radius_schedule=SmoothRadius(start_epoch=2, length=2),
)  # fmt: skip

HAS_ROOM = ahead._has_room


@pytest.fixture
def folder(tmp_path):
    """A run folder as it is before its first step."""
    records.create(tmp_path / "run")
    experiment = Experiment(
        dataset="digits", network=Network(name="small_cnn", width=2), settings=SETTINGS
    )
    facts = {"name": "digits", "input_shape": [1, 8, 8], "classes": list("0123"), "mean": [0.5],
             "std": [0.25], "domain": [0.0, 1.0]}  # fmt: skip
    config = {"experiment": to_config(experiment), "data": facts}
    records.write_config(tmp_path / "run", config)
    return tmp_path / "run"


@pytest.fixture
def trainer(folder, monkeypatch):
    """A trainer that has compiled its first step, on a device with room, so far as it can tell."""
    found = compile_later_step(folder, torch.device("cpu"))
    found.step, found.captured = 0, {(Phase(regularize=True), 8, 8): None}
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
    assert not trainer.phase(trainer.step - 1).regularize
    assert trainer.phase(trainer.step - 2).regularize
    assert trainer.settings == SETTINGS
    assert trainer.model(torch.rand(2, 1, 8, 8)).shape == (2, 4)


def test_the_process_takes_that_step_and_ends(folder, trainer):
    watch = Ahead(folder)
    watch.start(trainer)
    watch.step(1)
    assert watch.process.wait(60) == 0
    watch.close()


def test_modules_come_from_the_same_places(folder, trainer, tmp_path, monkeypatch):
    """Not from the folder that the run was started in, as with `python -m`."""
    (tmp_path / "torch.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    watch = Ahead(folder)
    watch.start(trainer)
    watch.step(1)
    assert watch.process.wait(60) == 0
    watch.close()


def test_it_ends_when_the_run_is_gone(folder, trainer):
    """A killed run closes its end of the pipe, as here."""
    watch = Ahead(folder)
    watch.start(trainer)
    watch.step(1)
    watch.process.stdin.close()
    watch.process.stdin = None
    assert watch.process.wait(60) == 1


def test_it_is_started_once_and_ends_with_the_run(folder, trainer, started):
    watch = Ahead(folder)
    watch.start(trainer)
    for step in (1, 2, 3):
        watch.step(step)
    assert len(started) == 1
    process = watch.process
    watch.epoch({})
    assert process.poll() is None
    watch.close()
    assert process.poll() is not None


def test_it_ends_when_the_run_needs_the_step_itself(folder, trainer, started):
    watch = Ahead(folder)
    watch.start(trainer)
    watch.step(1)
    process = watch.process
    trainer.step = 3 * trainer.steps_per_epoch
    watch.epoch({})
    assert process.poll() is not None


@pytest.mark.parametrize("error", [OSError("no more processes"), RuntimeError("of the driver")])
def test_a_process_that_cannot_be_started_leaves_the_run_alone(folder, trainer, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(*((subprocess, "Popen") if type(error) is OSError else
                          (ahead, "_has_room")), fail)  # fmt: skip
    watch = Ahead(folder)
    watch.start(trainer)
    watch.step(1)
    watch.close()
    assert watch.process is None


@pytest.mark.parametrize("case", ["never", "always", "past", "eager", "tail", "full"])
def test_it_is_not_started_where_nothing_would_be_gained(
    folder, trainer, started, monkeypatch, case
):
    """No regularisers, or to the end, or behind; nothing compiled (yet); a full device."""
    if case == "never":
        trainer.settings = replace(SETTINGS, regularization=0.0)
    elif case == "always":
        schedule = SmoothRadius(start_epoch=2, length=4)
        trainer.settings = replace(SETTINGS, radius_schedule=schedule)
    elif case == "past":
        trainer.step = 3 * trainer.steps_per_epoch
    elif case == "eager":
        trainer.captured = None
    elif case == "tail":
        trainer.captured = {(Phase(regularize=True), 5, 5): None}
    else:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40, 100))
        monkeypatch.setattr(ahead, "_has_room", HAS_ROOM)
    watch = Ahead(folder)
    watch.start(trainer)
    watch.step(trainer.step + 1)
    watch.close()
    assert started == []


def test_half_a_device_is_room(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    assert HAS_ROOM(torch.device("cuda"))


def test_runs_that_are_compiled_have_one(folder, monkeypatch, tmp_path):
    assert runs._compiles(torch.device("cuda"), ALONE)
    assert not runs._compiles(torch.device("cpu"), ALONE)
    assert not runs._compiles(torch.device("cuda"), Processes(count=2, joined=True))
    told = []

    def made(place):
        told.append(place)
        return Silent()

    monkeypatch.setattr(runs, "_compiles", lambda device, processes: True)
    monkeypatch.setattr(runs, "Ahead", made)
    small = replace(read_experiment(folder), settings=replace(SETTINGS, epochs=1))
    runs.train_run(small, out=tmp_path / "one", progress=False)
    own = acert.models.small_cnn((1, 8, 8), 10, width=2)
    runs.train_run(small, out=tmp_path / "two", progress=False, model=own)
    assert told == [tmp_path / "one"]
