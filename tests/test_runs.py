"""Whole runs: what a folder holds, how a run is stopped and resumed, and what is refused."""

import contextlib
import copy
import errno
import io
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.rule_cases import Apply
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import acert
from acert import data, models, records
from acert.errors import InvalidInput, RunError, UnsupportedOperation
from acert.evaluation import certify
from acert.experiments import environment, execution
from acert.experiments import run as runs
from acert.experiments.experiment import Experiment, Network, build_model, from_config, to_config
from acert.experiments.preparation import available_device
from acert.experiments.progress import Bar, Events, Lines, Progress, Silent, display
from acert.experiments.run import (
    record_certification,
    resume_run,
    train,
    train_run,
)
from acert.methods import METHODS, Acert, CrownIBP, FastIBP, Sabr, Standard
from acert.optimizers import Adam, Muon
from acert.report import group_runs, read_runs
from acert.schedules import Constant, FullRadius, OneCycle, SmoothRadius
from acert.settings import Settings

STEPS = 9  # an epoch of the digits


def experiment(*, method=None, validate_every=2, network=None, train_on_all=False, **changes):
    standard = {
        "method": method or Acert(),
        "max_radius": 0.1,
        "epochs": 3,
        "radius_schedule": SmoothRadius(start_epoch=2, length=1),
    }
    return Experiment(
        dataset="digits",
        network=network or Network(name="small_cnn", width=2),
        settings=Settings(**(standard | changes)),
        validate_every=validate_every,
        train_on_all=train_on_all,
    )


def figures(folder):
    """The rows without what the clock says."""
    rows = records.read_metrics(folder)
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


class Watcher(Progress):
    """Silent, but calls back after a step."""

    def __init__(self, on_step=lambda step: None):
        self.on_step = on_step
        self.notes: list[str] = []
        self.rows: list[records.Row] = []
        self.closed = False

    def start(self, trainer):
        self.first = trainer.step

    def step(self, step):
        self.on_step(step)

    def epoch(self, row):
        self.rows.append(row)

    def note(self, text):
        self.notes.append(text)

    def close(self):
        self.closed = True


def at(step, action):
    return Watcher(lambda now: action() if now == step else None)


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run of three epochs that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "reference"
    train_run(experiment(), out=folder, progress=False, command=["acert", "train"])
    return folder


# -- what a run leaves behind -------------------------------------------------------------


def test_a_folder_holds_its_files_and_no_drafts(reference):
    assert sorted(path.name for path in reference.iterdir()) == [
        "config.json", "env.json", "local.json", "metrics.jsonl", "model.safetensors",
        "state.safetensors",
    ]  # fmt: skip


def test_the_config_repeats_the_run(reference):
    config = records.read_config(reference)
    assert config["schema"] == 1
    assert from_config(config["experiment"]) == experiment()
    assert config["data"]["input_shape"] == [1, 8, 8]
    assert (config["data"]["train"], config["data"]["validation"]) == (1150, 288)
    assert len(config["data"]["classes"]) == 10


def test_there_is_a_row_per_epoch_and_validation_where_asked_and_at_the_end(reference):
    rows = records.read_metrics(reference)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert [row["step"] for row in rows] == [STEPS, 2 * STEPS, 3 * STEPS]
    assert ["art" in row for row in rows] == [False, True, True]
    schedule, rate = SmoothRadius(start_epoch=2, length=1), OneCycle()
    for row in rows:
        last = row["step"] - 1
        assert row["learning_rate"] == rate.rate(last, steps_per_epoch=STEPS, epochs=3)
        assert row["radius_cap"] == schedule.cap(last, max_radius=0.1, steps_per_epoch=STEPS)
        assert {"loss", "standard", "robust", "regularization", "train_accuracy"} < row.keys()
        assert row["seconds"] > 0
    assert rows[-1]["art"] == pytest.approx((rows[-1]["accuracy"] * rows[-1]["acr"]) ** 0.5)


def test_the_weights_are_those_of_the_returned_model(tmp_path):
    run = train_run(experiment(epochs=1), out=tmp_path / "run", progress=False)
    assert run.folder == tmp_path / "run"
    assert run.history == records.read_metrics(run.folder)
    assert not run.model.training
    fresh = build_model(experiment().network, data.load("digits"), seed=5)
    found = records.read_weights(run.folder)
    fresh.load_state_dict({name: torch.from_numpy(value) for name, value in found.items()})
    for one, other in zip(fresh.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_environment_names_versions_and_nobody(reference):
    text = (reference / "env.json").read_text()
    facts = json.loads(text)
    assert facts["acert"] == acert.__version__
    assert facts["torch"] == torch.__version__
    assert facts["numpy"] == np.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["command"] == "acert train"
    assert facts["seconds"] > 0
    assert str(Path.home()) not in text
    assert socket.gethostname() not in text
    assert not any(isinstance(value, str) and "/" in value for value in facts.values())


def test_commands_lose_the_folders_of_this_machine():
    words = ["acert", "train", "--data-dir", "/home/jo/data", "--out=~/runs/a", "runs/b", "../c"]
    assert environment.without_paths(words) == [
        "acert", "train", "--data-dir", "data", "--out=a", "runs/b", "c"
    ]  # fmt: skip


def test_what_cannot_be_found_out_is_left_out(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.setattr(Path, "read_text", missing)
    facts = environment.environment(torch.device("cpu"), None)
    assert facts["commit"] is None
    assert facts["command"] is None
    assert isinstance(facts["cpu"], str)


def test_the_commit_is_that_of_the_package(monkeypatch):
    answers = {"ls-files": "__init__.py", "status": "", "rev-parse": "abc123\n"}

    def git(call, **_):
        return types.SimpleNamespace(stdout=answers[call[3]])

    monkeypatch.setattr(subprocess, "run", git)
    assert environment.commit() == "abc123"
    answers["status"] = " M training.py"
    assert environment.commit() == "abc123-modified"
    monkeypatch.setenv("ACERT_COMMIT", "def456")
    assert environment.commit() == "def456"


def test_a_shared_gpu_is_recorded_where_it_is_told(monkeypatch):
    monkeypatch.delenv("ACERT_GPU_SHARED", raising=False)
    assert "gpu_shared" not in environment.environment(torch.device("cpu"), None)
    monkeypatch.setenv("ACERT_GPU_SHARED", "1")
    assert environment.environment(torch.device("cpu"), None)["gpu_shared"] is True


def test_without_validation_nothing_is_evaluated(tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "evaluate", None)
    run = train_run(experiment(train_on_all=True, epochs=2), out=tmp_path / "run", progress=False)
    assert not any("art" in row for row in run.history)
    assert records.read_config(tmp_path / "run")["data"]["train"] == 1438


def test_certification_is_recorded(reference, tmp_path):
    run = resume_run(reference, progress=False)
    test = data.load_test("digits")
    certificates = certify(run.model, test, max_radius=0.1)
    record_certification(tmp_path, certificates, test)
    assert records.read_certificates(tmp_path)["bounds"] == "ibp"
    assert records.read_examples(tmp_path)["most_images"].shape == (16, 1, 8, 8)


# -- determinism --------------------------------------------------------------------------


def test_one_seed_gives_the_same_bytes_and_another_does_not(reference, tmp_path):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    # Saving at every step must not change anything either.
    train_run(experiment(), out=tmp_path / "same", progress=False, save_every=0.0)
    assert weights(tmp_path / "same") == weights(reference)
    assert figures(tmp_path / "same") == figures(reference)
    assert torch.equal(torch.get_rng_state(), before)
    train_run(experiment(seed=1), out=tmp_path / "other", progress=False)
    assert weights(tmp_path / "other") != weights(reference)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_trains_on_digits_without_nan(tmp_path, name, seed):
    chosen = experiment(
        method=METHODS[name](),
        epochs=2,
        seed=seed,
        radius_schedule=SmoothRadius(start_epoch=1, length=1),
        network=Network(name="cnn7", width=1),
    )
    run = train_run(chosen, out=tmp_path / "run", progress=False)
    assert len(run.history) == 2
    assert all(np.isfinite(list(row.values())).all() for row in run.history)
    assert all(bool(tensor.isfinite().all()) for tensor in run.model.state_dict().values())


CHILD = """
import json, pathlib, sys
import torch
from acert.experiments.experiment import from_config
from acert.experiments.run import train_run

torch.set_num_threads(1)
out = pathlib.Path(sys.argv[1])
train_run(
    from_config(json.loads(sys.argv[2])), out=out, resume=(out / "config.json").is_file(),
    save_every=0.0, progress=False,
)
"""


@pytest.mark.slow
def test_killed_at_random_moments_a_run_ends_with_the_same_bytes(tmp_path):
    chosen = experiment(epochs=16, validate_every=5)
    train_run(chosen, out=tmp_path / "whole", progress=False)
    folder = tmp_path / "killed"
    source = str(Path(acert.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    moments = random.Random(4)
    steps, killed = [], 0
    for attempt in range(4):
        watched = folder / ("state.safetensors" if attempt else "config.json")
        before = watched.stat().st_mtime_ns if watched.is_file() else 0
        child = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", CHILD, folder, json.dumps(to_config(chosen))],
            env=environment,
        )
        # A moment counts from the first sign that it is training, wherever that then is.
        while child.poll() is None and (
            not watched.is_file() or watched.stat().st_mtime_ns == before
        ):
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.2))
        child.send_signal(signal.SIGKILL)
        killed += child.wait() == -signal.SIGKILL
        state = records.read_state(folder)
        steps.append(0 if state is None else state.facts["step"])
    assert killed >= 3  # a very fast machine may have finished in the last attempt
    # Each attempt went on from where the last one was killed.
    assert steps == sorted(steps)
    assert steps[-1] > 0
    resume_run(folder, progress=False)
    assert weights(folder) == weights(tmp_path / "whole")
    assert figures(folder) == figures(tmp_path / "whole")


# -- stopping and resuming ----------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [1, STEPS, STEPS + 4])
def test_a_signal_saves_and_says_how_to_go_on(reference, tmp_path, number, step):
    folder = tmp_path / "run"
    before = signal.getsignal(number)
    watcher = at(step, lambda: interrupt(number))
    with pytest.raises(KeyboardInterrupt) as caught:
        train_run(experiment(), out=folder, progress=watcher)
    assert str(caught.value) == (
        f"stopped after step {step} of 27, with everything saved. "
        f"To go on: acert train --resume {folder}"
    )
    assert watcher.closed
    assert signal.getsignal(number) is before
    assert not records.is_finished(folder)
    again = Watcher()
    resume_run(folder, progress=again)
    assert again.first == step
    assert weights(folder) == weights(reference)
    assert figures(folder) == figures(reference)


def test_a_signal_during_validation_stops_it_and_loses_nothing(reference, tmp_path, monkeypatch):
    true_evaluate = execution.evaluate

    def evaluate(*arguments, **keywords):
        interrupt()
        return true_evaluate(*arguments, **keywords)

    monkeypatch.setattr(execution, "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 18 of 27"):
        train_run(experiment(), out=tmp_path / "run", progress=False)
    monkeypatch.undo()
    assert len(figures(tmp_path / "run")) == 1
    resume_run(tmp_path / "run", progress=False)
    assert weights(tmp_path / "run") == weights(reference)
    assert figures(tmp_path / "run") == figures(reference)


def test_a_second_signal_acts_at_once(tmp_path):
    def twice():
        interrupt()
        interrupt()

    with pytest.raises(KeyboardInterrupt) as caught:
        train_run(experiment(), out=tmp_path / "run", progress=at(2, twice))
    assert not str(caught.value)


def test_a_signal_that_is_ignored_stays_so(tmp_path):
    seen = []
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        watcher = at(1, lambda: seen.append(signal.getsignal(signal.SIGTERM)))
        train_run(experiment(epochs=1), out=tmp_path / "run", progress=watcher)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIG_IGN]


def test_a_run_outside_the_main_thread_sets_no_handlers(tmp_path):
    thread = threading.Thread(
        target=lambda: train_run(experiment(epochs=1), out=tmp_path / "run", progress=False)
    )
    thread.start()
    thread.join()
    assert records.is_finished(tmp_path / "run")


def test_a_finished_run_is_loaded_and_not_trained(reference, monkeypatch):
    before = weights(reference)
    monkeypatch.setattr(runs, "Execution", lambda *_: None)
    watcher = Watcher()
    run = resume_run(reference, progress=watcher)
    assert watcher.notes == [f"the run in {reference} is finished already"]
    assert not run.model.training
    assert len(run.history) == 3
    assert weights(reference) == before


def test_rows_that_the_state_does_not_know_are_cut_off(reference, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_run(experiment(), out=folder, progress=at(STEPS + 4, interrupt))
    rows = records.read_metrics(folder)
    records.write_metrics(folder, [*rows, {"epoch": 2, "loss": 7.0}])
    with pytest.raises(KeyboardInterrupt):
        resume_run(folder, progress=at(STEPS + 5, interrupt))
    assert records.read_metrics(folder) == rows
    resume_run(folder, progress=False)
    assert figures(folder) == figures(reference)


def test_lost_rows_are_refused(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_run(experiment(), out=folder, progress=at(STEPS + 4, interrupt))
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match=r"metrics\.jsonl has 0 rows, but the state knows 1"):
        resume_run(folder, progress=False)


@pytest.mark.parametrize("both", [False, True])
def test_a_truncated_state_is_replaced_by_the_one_before(reference, tmp_path, both, capsys):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_run(experiment(), out=folder, progress=at(STEPS + 4, interrupt))
    state = folder / "state.safetensors"
    state.write_bytes(state.read_bytes()[:1000])
    if both:
        (folder / "state.previous.safetensors").write_bytes(b"")
        with pytest.raises(RunError, match="no usable state"):
            resume_run(folder, progress=False)
        return
    resume_run(folder, progress=False)
    said = capsys.readouterr().err
    assert "state.safetensors is missing or damaged" in said
    assert "going on from state.previous.safetensors, step 9" in said
    assert weights(folder) == weights(reference)
    assert figures(folder) == figures(reference)


def test_a_run_whose_state_is_gone_starts_again_and_says_so(reference, tmp_path, capsys):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_run(experiment(), out=folder, progress=at(STEPS + 4, interrupt))
    for name in ("state.safetensors", "state.previous.safetensors"):
        (folder / name).unlink()
    resume_run(folder, progress=False)
    assert "run has no state any more; it starts from nothing again" in capsys.readouterr().err
    assert weights(folder) == weights(reference)


def test_a_run_killed_before_its_first_state_starts_again(reference, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_run(experiment(), out=folder, progress=at(2, interrupt))
    for path in folder.glob("state*"):
        path.unlink()
    resume_run(folder, progress=False)
    assert weights(folder) == weights(reference)


def test_a_state_that_does_not_fit_the_model_is_refused(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_run(experiment(), out=folder, progress=at(2, interrupt))
    wider = build_model(Network(name="small_cnn", width=3), data.load("digits"), seed=0)
    with pytest.raises(RunError, match=r"does not fit the model: .*size mismatch"):
        resume_run(folder, progress=False, model=wider)


def test_a_config_that_was_edited_meanwhile_is_refused(reference, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_run(experiment(clip_norm=math.inf), out=folder, progress=at(2, interrupt))
    config = records.read_config(folder)
    edited = copy.deepcopy(config)
    edited["experiment"]["settings"]["method"]["kappa"] = 0.5
    records.write_config(folder, edited)
    with pytest.raises(RunError, match=r"was changed: .*method.kappa` is 0.0 there and 0.5 here"):
        resume_run(folder, progress=False)
    records.write_config(folder, config)
    resume_run(folder, progress=False)
    assert weights(folder)


# -- when the state is saved --------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_seconds", "save_seconds", "expected"),
    [
        # At the end of every epoch, however short it is or long a save takes.
        (1.0, 0.0, [0, 9, 18, 27]),
        (0.01, 0.05, [0, 9, 18, 27]),
        # Long steps: inside an epoch too, 60 s after the last one at the latest.
        (20.0, 0.0, [0, 3, 6, 9, 12, 15, 18, 21, 24, 27]),
    ],
)
def test_saves_come_every_epoch_and_every_minute(
    tmp_path, monkeypatch, step_seconds, save_seconds, expected
):
    now, saves = [0.0], []
    clock = types.SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(execution, "time", clock)
    true_write = records.write_state

    def write_state(folder, arrays, facts):
        time.sleep(save_seconds)
        saves.append(facts["step"])
        true_write(folder, arrays, facts)

    monkeypatch.setattr(records, "write_state", write_state)

    def tick(step):
        now[0] += step_seconds

    train_run(experiment(validate_every=9), out=tmp_path / "run", progress=Watcher(tick))
    assert sorted(set(saves)) == expected


def test_training_goes_on_while_a_state_is_written(reference, tmp_path, monkeypatch):
    """What is written is the state as it was, though the weights have moved on since."""
    first_step, wrote = threading.Event(), []
    true_write = records.write_state

    def write_state(folder, arrays, facts):
        if facts["step"] == STEPS:
            wrote.append(first_step.wait(timeout=30))
        true_write(folder, arrays, facts)

    monkeypatch.setattr(records, "write_state", write_state)
    folder = tmp_path / "run"
    with pytest.raises(RunError, match="power cut"):
        train_run(
            experiment(), out=folder,
            progress=Watcher(lambda step: _cut(step, first_step)),
        )  # fmt: skip
    assert wrote == [True]
    state = records.read_state(folder)
    assert state is not None
    assert state.facts["step"] == STEPS
    monkeypatch.undo()
    resume_run(folder, progress=False)
    assert weights(folder) == weights(reference)


def _cut(step, first_step):
    if step == STEPS + 3:
        first_step.set()
        raise RunError("power cut")


def test_a_long_validation_is_preceded_by_a_save(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(execution, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    seen = []

    def evaluate(*_, **__):
        for thread in threading.enumerate():
            if thread.name == "acert-writer":
                thread.join()
        state = records.read_state(tmp_path / "run")
        assert state is not None
        seen.append((state.facts["step"], state.facts["pending"]["epoch"]))
        raise RunError("power cut")

    monkeypatch.setattr(execution, "evaluate", evaluate)
    true_means = runs.Trainer.run_epoch

    def run_epoch(self, on_step):
        figures = true_means(self, on_step)
        now[0] += 61
        return figures

    monkeypatch.setattr(runs.Trainer, "run_epoch", run_epoch)
    with pytest.raises(RunError, match="power cut"):
        train_run(experiment(validate_every=1), out=tmp_path / "run", progress=False)
    assert seen == [(STEPS, 1)]


# -- failures -----------------------------------------------------------------------------


class Poisoned(nn.Module):
    """A classifier whose logits are NaN in one training step."""

    def __init__(self, step):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.step, self.calls = step, 0

    def forward(self, images):
        logits = self.layer(images.flatten(1))
        if self.training:
            self.calls += 1
            if self.calls == self.step + 1:
                return logits * float("nan")
        return logits


@pytest.mark.parametrize(("step", "saved"), [(0, 0), (STEPS + 3, STEPS)])
def test_nan_stops_the_run_and_names_step_term_and_checkpoint(tmp_path, step, saved):
    folder = tmp_path / "run"
    expected = (
        rf"the standard term was not finite at step {step}; "
        rf"the last good checkpoint: {folder}/state\.safetensors, step {saved}$"
    )
    chosen = experiment(method=Standard())
    with pytest.raises(RunError, match=expected):
        train_run(chosen, out=folder, progress=False, model=Poisoned(step))
    state = records.read_state(folder)
    assert state is not None
    assert state.complaint is None
    assert state.facts["step"] == saved
    for name, array in state.arrays.items():
        assert name == "tally/failed" or np.isfinite(array.astype(np.float64)).all()
    assert not records.is_finished(folder)
    assert len(records.read_metrics(folder)) == saved // STEPS


def test_nan_is_never_saved_inside_an_epoch_either(tmp_path):
    """Saving after every step: the poisoned step itself must not reach the disk."""
    folder = tmp_path / "run"
    with pytest.raises(RunError, match=r"at step 12; the last good checkpoint: .*, step 12$"):
        train_run(
            experiment(method=Standard()), out=folder, progress=False, model=Poisoned(12),
            save_every=0.0,
        )  # fmt: skip
    state = records.read_state(folder)
    assert state is not None
    assert state.facts["step"] == 12
    assert np.isfinite(state.arrays["model/layer.weight"]).all()


def test_nan_without_a_folder_has_no_checkpoint():
    images, labels = torch.rand(40, 64), torch.arange(40) % 10
    with pytest.raises(RunError, match="at step 1; the last good checkpoint: none, since `out`"):
        train(
            Poisoned(1), (images, labels), method=Standard(), max_radius=0.1, epochs=3,
            progress=False,
        )  # fmt: skip


def test_a_full_disk_is_one_clear_error_and_the_run_can_go_on(reference, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    true_fsync = os.fsync
    full = [False]

    def fsync(handle):
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true_fsync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    watcher = at(STEPS + 2, lambda: full.__setitem__(0, True))
    expected = (
        rf"metrics\.jsonl could not be written to {folder}: No space left on device; what was "
        rf"there before is untouched; the last good checkpoint: .*state\.safetensors, step {STEPS}"
    )
    with pytest.raises(RunError, match=expected):
        train_run(experiment(), out=folder, progress=watcher)
    full[0] = False
    assert len(records.read_metrics(folder)) == 1
    resume_run(folder, progress=False)
    assert weights(folder) == weights(reference)
    assert figures(folder) == figures(reference)


# -- refusals -----------------------------------------------------------------------------


def test_a_folder_that_exists_is_refused_before_anything_is_read(reference, monkeypatch):
    monkeypatch.setattr(runs.data, "load", None)
    with pytest.raises(RunError, match=r"exists already.*acert train --resume"):
        train_run(experiment(), out=reference, progress=False)


def test_a_folder_that_is_no_run_cannot_be_resumed(tmp_path):
    with pytest.raises(RunError, match="is no run folder"):
        resume_run(tmp_path, progress=False)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"method": Acert(kappa=0.25)}, r"`experiment\.settings\.method\.kappa` is 0\.0 there"),
        ({"method": FastIBP()}, r'method\.class` is "Acert" there and "FastIBP" here'),
        ({"epochs": 9}, r"`experiment\.settings\.epochs` is 3 there and 9 here"),
        ({"validate_every": 1}, r"`experiment\.validate_every` is 2 there and 1 here"),
    ],
)
def test_another_config_is_refused_by_its_first_field(reference, changes, field):
    with pytest.raises(RunError, match=f"cannot be resumed with another config: .*{field}"):
        train_run(experiment(**changes), out=reference, resume=True, progress=False)


def test_a_run_that_is_older_than_a_field_had_its_default(reference, tmp_path):
    folder = shutil.copytree(reference, tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    del config["experiment"]["settings"]["optimizer"]
    (folder / "config.json").write_text(json.dumps(config))
    assert train_run(experiment(), out=folder, resume=True, progress=False).history
    with pytest.raises(RunError, match=r'optimizer\.class` is "Adam" there and "Muon" here'):
        train_run(experiment(optimizer=Muon()), out=folder, resume=True, progress=False)


def test_other_data_are_refused_and_the_place_of_the_data_is_remembered(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.random((40, 6), dtype=np.float32),
        "y_train": np.arange(40) % 3,
    }
    np.savez(tmp_path / "mine.npz", **arrays)
    chosen = Experiment(
        dataset="npz",
        network=Network(name="mine:mlp"),
        settings=Settings(method=Acert(), max_radius=0.1, epochs=2, batch_size=8),
    )

    def factory(input_shape, num_classes):
        return models.mlp(input_shape[0], [5], num_classes)

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_run(
            chosen, out=folder, data_dir=tmp_path / "mine.npz", model=factory,
            progress=at(3, interrupt),
        )  # fmt: skip
    with pytest.raises(InvalidInput, match="factory 'mine:mlp' must be given"):
        resume_run(folder, progress=False)
    arrays["x_train"][7, 3] += 1e-3
    np.savez(tmp_path / "other.npz", **arrays)
    with pytest.raises(RunError, match=r"another config: `data\.sha256` is"):
        resume_run(folder, data_dir=tmp_path / "other.npz", model=factory, progress=False)
    run = resume_run(folder, model=factory, progress=False)
    assert len(run.history) == 2
    assert "mine.npz" not in (folder / "config.json").read_text()


def test_factories_are_initialised_as_the_experiment_says(tmp_path):
    def built(initialization):
        network = Network(name="x:y", initialization=initialization)
        chosen = experiment(network=network, epochs=1, learning_rate=Constant(constant_rate=1e-12))
        run = train_run(
            chosen, out=tmp_path / initialization, progress=False,
            model=lambda shape, classes: models.mlp(64, [400], classes),
        )  # fmt: skip
        return run.model[1].weight.std().item()

    assert built("ibp") == pytest.approx((2 * np.pi) ** 0.5 / 64, rel=0.05)
    assert built("default") == pytest.approx(1 / 8 / 3**0.5, rel=0.05)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (models.small_cnn((1, 8, 8), 7), InvalidInput, r"`model` must have 10 outputs.*got 7"),
        (models.small_cnn((1, 8, 8), 12), InvalidInput, r"`model` must have 10 outputs.*got 12"),
        (
            models.small_cnn((3, 8, 8), 10),
            InvalidInput,
            r"must take the inputs of digits, of shape \(1, 8, 8\); it answered: .*channels",
        ),
        (nn.Conv2d(1, 10, 3), InvalidInput, r"logits of shape \(batch, classes\); got \(2, 10"),
        (nn.Flatten(), InvalidInput, "`model` must have parameters to train; got none"),
        (
            nn.Sequential(models.Normalize([0.5] * 3, [1.0] * 3), models.small_cnn((1, 8, 8), 10)),
            InvalidInput,
            "`images` must have 3 channels",
        ),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Apply(torch.sinc)),
            UnsupportedOperation,
            "torch.sinc: it has no bound rule",
        ),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.ReLU()),
            UnsupportedOperation,
            "`elide=True` needs a model whose last operation is a linear layer",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_the_folder_exists(
    tmp_path, model, error, message
):
    with pytest.raises(error, match=message):
        train_run(experiment(), out=tmp_path / "run", progress=False, model=model)
    assert not (tmp_path / "run").exists()


def with_buffer(values, **words):
    model = models.mlp(2, [4], 3)
    model.register_buffer("extra", values, **words)
    return model


class Noted(nn.Linear):
    def get_extra_state(self):
        return "a note"

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (with_buffer(torch.zeros(2, dtype=torch.complex64)), "got `extra` of torch.complex64"),
        (with_buffer(torch.zeros(2, dtype=torch.bfloat16)), "got `extra` of torch.bfloat16"),
        (Noted(2, 3), "got `_extra_state` of str"),
    ],
)
def test_what_no_file_of_a_run_can_hold_is_refused_before_the_folder_exists(
    tmp_path, model, message
):
    words = {"method": Standard(), "max_radius": 0.1, "epochs": 1, "progress": False}
    with pytest.raises(InvalidInput, match=f"`model` must hold real numbers.*{message}.*persisten"):
        train(model, blobs(), out=tmp_path / "run", **words)
    assert not (tmp_path / "run").exists()
    train(model, blobs(), **words)


def test_what_is_not_kept_may_be_complex_and_the_rest_comes_back(tmp_path):
    words = {"method": Standard(), "max_radius": 0.1, "epochs": 1, "progress": False}
    model = with_buffer(torch.ones(2, dtype=torch.complex64), persistent=False)
    model.register_buffer("flag", torch.tensor([True, False]))
    model.register_buffer("small", torch.tensor([1, 2], dtype=torch.uint16))
    train(model, blobs(), out=tmp_path / "run", **words)
    found = records.read_weights(tmp_path / "run")
    assert found["flag"].tolist() == [True, False]
    assert found["small"].tolist() == [1, 2]


class Centred(nn.Module):
    """Subtracts a running mean, which a state dict has or has not."""

    def __init__(self, *, persistent):
        super().__init__()
        self.last = nn.Linear(2, 3)
        self.register_buffer("mean", torch.zeros(2), persistent=persistent)
        # A table that is filled when it is needed: the same in any model.
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x):
        if not len(self.table):
            self.table = torch.ones(2)
        if self.training and isinstance(x, torch.Tensor):
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.last((x - self.mean) * self.table)


def test_what_training_changes_must_be_what_a_run_keeps(tmp_path):
    """Else another network would come back from the folder than the one that was trained."""
    words = {"method": Standard(), "max_radius": 0.1, "epochs": 1, "progress": False}
    model = Centred(persistent=False)
    message = "`model` must keep what training changes .*; got `mean`, a buffer with persistent=F"
    with pytest.raises(InvalidInput, match=message):
        train(model, blobs(), out=tmp_path / "run", **words)
    assert not (tmp_path / "run").exists()
    assert not model.mean.any()
    train(model, blobs(), **words)
    model = Centred(persistent=True)
    train(model, blobs(), out=tmp_path / "run", **words)
    again = acert.load_model(tmp_path / "run", model=Centred(persistent=True))
    assert torch.equal(again(blobs()[0]), model(blobs()[0]))


def test_a_state_that_cannot_be_written_stops_the_run(tmp_path, monkeypatch):
    def write_state(folder, arrays, facts):
        raise InvalidInput("`model/extra` cannot be written")

    monkeypatch.setattr(records, "write_state", write_state)
    watcher = Watcher()
    with pytest.raises(InvalidInput, match="`model/extra` cannot be written"):
        train_run(experiment(), out=tmp_path / "run", progress=watcher)
    assert not watcher.rows


def test_a_factory_must_make_a_module(tmp_path):
    with pytest.raises(InvalidInput, match=r"`model` must make a torch\.nn\.Module; got int"):
        train_run(experiment(), out=tmp_path / "run", model=lambda *_: 3, progress=False)


def test_the_domain_is_that_of_the_data(tmp_path):
    with pytest.raises(InvalidInput, match=r"`domain` must be that of the data, \(0\.0, 1\.0\)"):
        train_run(experiment(domain=(-1.0, 1.0)), out=tmp_path / "run", progress=False)


@pytest.mark.parametrize("device", ["abacus", "cuda:99", "mps:9", "xla", "hpu", ""])
def test_a_device_that_is_not_there_is_refused_in_one_line(tmp_path, device):
    with pytest.raises(InvalidInput, match=f"`device` must be available here; got {device}") as got:
        train_run(experiment(), out=tmp_path / "run", device=device, progress=False)
    assert ". Name one of these, or leave it out: cpu" in str(got.value)
    assert len(str(got.value)) < 220
    assert "\n" not in str(got.value)


def test_the_devices_that_are_there_are_named(monkeypatch):
    found = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **words: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(InvalidInput, match=r"got abacus\. .* out: cpu, cuda:0, cuda:1$"):
        available_device("abacus")


# -- a user's own model and arrays --------------------------------------------------------


def blobs(count=60, dtype=torch.float32):
    """Three classes, each around a corner of the unit square."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 3
    corners = torch.tensor([[0.2, 0.2], [0.8, 0.2], [0.2, 0.8]])
    images = corners[labels] + 0.05 * torch.randn((count, 2), generator=generator)
    images = images.clamp(0, 1)
    return (images * 255).to(dtype) if dtype is torch.uint8 else images, labels


@pytest.mark.parametrize("optimizer", [None, Adam(), Muon()])
def test_own_arrays_are_learnt_and_certified(optimizer):
    torch.manual_seed(0)
    run = train(
        models.mlp(2, [32, 16], 3), blobs(), method=Acert(), max_radius=0.1, epochs=60,
        optimizer=optimizer, learning_rate=0.02, validation=blobs(30), validate_every=20,
        progress=False,
    )  # fmt: skip
    assert run.folder is None
    assert [row["epoch"] for row in run.history if "art" in row] == [20, 40, 60]
    assert run.history[-1]["accuracy"] == 1.0
    assert run.history[-1]["acr"] > 0.7
    assert not run.model.training


@pytest.mark.parametrize("epochs", [1, 2, 10])
@pytest.mark.parametrize("count", [3, 20, 200])
def test_defaults_suit_few_epochs_and_few_samples(epochs, count):
    run = train(
        models.mlp(2, [4], 3), blobs(count, torch.uint8), method=FastIBP(), max_radius=0.1,
        epochs=epochs, progress=False,
    )  # fmt: skip
    assert len(run.history) == epochs
    assert run.history[-1]["radius_cap"] == pytest.approx(0.1)
    assert not any("art" in row for row in run.history)


def test_own_runs_are_deterministic_and_leave_the_callers_random_numbers_alone():
    def trained():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))
        torch.manual_seed(int(torch.randint(1000, ())) + len(seen))
        before = torch.get_rng_state()
        train(model, blobs(), method=Standard(), max_radius=0.1, epochs=2, progress=False)
        assert torch.equal(torch.get_rng_state(), before)
        return model.state_dict()

    seen: list[dict[str, torch.Tensor]] = []
    seen.append(trained())
    seen.append(trained())
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])


def test_own_runs_can_be_recorded_and_resumed(tmp_path):
    def call(folder, **changes):
        torch.manual_seed(0)
        standard = {"method": Acert(), "max_radius": 0.1, "epochs": 4, "progress": False}
        return train(models.mlp(2, [4], 3), blobs(), out=folder, **(standard | changes))

    call(tmp_path / "whole")
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt, match=r"To go on: the same call with resume=True"):
        call(folder, progress=at(5, interrupt))
    with pytest.raises(RunError, match=r"exists already.*go on with it: the same call with resume"):
        call(folder)
    with pytest.raises(RunError, match=r"`settings\.max_radius` is 0\.1 there and 0\.2 here"):
        call(folder, resume=True, max_radius=0.2)
    with pytest.raises(RunError, match=r"acert\.train\(.*, resume=True\) goes on"):
        resume_run(folder)
    run = call(folder, resume=True)
    assert run.folder == folder
    assert weights(folder) == weights(tmp_path / "whole")
    assert figures(folder) == figures(tmp_path / "whole")


def test_own_networks_of_one_class_are_told_apart(reference, tmp_path):
    for seed, width in ((0, 4), (1, 4), (2, 6)):
        train(
            models.mlp(2, [width], 3), blobs(), method=Acert(), max_radius=0.1, epochs=1,
            progress=False, seed=seed, out=tmp_path / str(seed),
        )  # fmt: skip
    config = records.read_config(tmp_path / "0")
    del config["layers"], config["data"]["validation_sha256"]  # as older runs have it
    records.write_config(tmp_path / "0", config)
    groups = group_runs(read_runs([tmp_path])[0])
    assert [[run.name for run in group.runs] for group in groups] == [["0", "1"], ["2"]]
    assert [group.variant for group in groups] == ["parameters 27", "parameters 39"]
    # What a recipe builds is known by its config alone.
    assert "parameters" not in records.read_config(reference)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": len}, r"`model` must be a torch\.nn\.Module; got builtin_function"),
        ({"method": "acert"}, r"`method` must be a method such as acert\.Acert\(\); got 'acert'"),
        ({"resume": True}, "`out` must name a folder"),
        ({"tensorboard": True}, "`out` must name a folder"),
        ({"validate_every": 0}, "`validate_every` must be at least 1; got 0"),
        ({"epochs": 0}, "`epochs` must be at least 1; got 0"),
        ({"max_radius": 2.0}, "`max_radius` must be at most the width of the domain"),
        ({"batch_size": 61}, "`batch_size` must be at most the 60 training samples; got 61"),
        ({"model": nn.DataParallel(nn.Linear(2, 3))}, r"module itself, `model\.module`; got Data"),
        ({"model": models.mlp(2, [4], 2)}, r"`model` must have 3 outputs.*got 2"),
        ({"validation": (torch.rand(4, 2), [0, 1, 2, 3])}, r"labels up to 2; got \(2,\) and 3"),
        ({"validation": (torch.rand(4, 5), [0, 1, 2, 0])}, r"inputs of \(2,\).*got \(5,\)"),
        ({"device": "abacus"}, "`device` must be available here; got abacus"),
        ({"samples": (*blobs(), 3)}, r"`samples` must be a pair of arrays.*got a tuple of 3"),
        ({"samples": TensorDataset(*blobs())}, r"`samples` must be a pair.*got a TensorDataset"),
        ({"samples": DataLoader(TensorDataset(*blobs()))}, r"`samples` must.*got a DataLoader"),
        ({"validation": blobs()[0]}, r"`validation` must be a pair of arrays.*got a Tensor"),
        ({"batch_size": 16.0}, r"`batch_size` must be a whole number; got 16\.0"),
        ({"epochs": 2.5}, r"`epochs` must be a whole number; got 2\.5"),
        ({"epochs": True}, "`epochs` must be a whole number; got True"),
        ({"validate_every": 1.5}, r"`validate_every` must be a whole number; got 1\.5"),
        ({"max_radius": "0.1"}, r"`max_radius` must be a number; got '0\.1'"),
        ({"elide": 1}, "`elide` must be of type bool; got 1"),
        ({"domain": [0.0, 1.0, 2.0]}, r"`domain` must be of type tuple\[float, float\]"),
        ({"domain": 1}, r"`domain` must be of type tuple\[float, float\]"),
        ({"augmentation": data.Augmentation(padding=1, flip=True)}, r"images.*inputs of \(2,\)"),
        ({"seed": None}, "`seed` must be a whole number; got None"),
        ({"learning_rate": "1e-3"}, "`learning_rate` must be a number above 0.*; got '1e-3'"),
        ({"learning_rate": -1}, r"`learning_rate` must be .* such as OneCycle\(\); got -1"),
        ({"radius_schedule": "smooth"}, "`radius_schedule` must be of type Radius.*; got 'smooth'"),
        ({"model": nn.LSTM(2, 3)}, "`model` must return logits alone, one tensor; got tuple"),
        ({"seed": -1}, r"`seed` must be in \[0, 9999999\]; got -1"),
    ],
)
def test_own_runs_refuse_what_does_not_fit(changes, message):
    standard = {"model": models.mlp(2, [4], 3), "method": Acert(), "max_radius": 0.1, "epochs": 1}
    chosen = {"samples": blobs()} | standard | {"progress": False} | changes
    with pytest.raises(InvalidInput, match=message):
        train(chosen.pop("model"), chosen.pop("samples"), **chosen)


def test_numbers_of_numpy_are_as_good_as_any(tmp_path):
    numbers = {"max_radius": np.float32(0.125), "epochs": np.int64(1), "batch_size": np.int32(20)}
    numbers |= {"learning_rate": np.float32(0.0078125), "seed": np.int64(3)}

    def trained(folder, numbers, kappa):
        torch.manual_seed(0)
        method = Acert(kappa=kappa)
        train(models.mlp(2, [4], 3), blobs(), method=method, out=folder, progress=False, **numbers)
        return weights(folder), (folder / "config.json").read_text()

    plain = {name: number.item() for name, number in numbers.items()}
    found = trained(tmp_path / "numpy", numbers, np.float32(0.5))
    assert found == trained(tmp_path / "plain", plain, 0.5)


@pytest.mark.parametrize("method", [Acert(), Sabr(), Standard()], ids=lambda m: type(m).__name__)
def test_what_surrounds_the_call_does_not_change_the_run(method):
    def trained(surroundings):
        torch.manual_seed(0)
        model = models.mlp(2, [8], 3)
        with surroundings:
            train(
                model, list(blobs()), method=method, max_radius=0.1, epochs=2, progress=False,
                domain=[0.0, 1.0], seed=9_999_999,
            )  # fmt: skip
            assert torch.is_grad_enabled() == (not isinstance(surroundings, torch.no_grad))
        return model.state_dict()

    plain = trained(contextlib.nullcontext())
    for surroundings in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        found = trained(surroundings)
        assert all(torch.equal(plain[name], found[name]) for name in plain)
    with pytest.raises(InvalidInput, match="must be outside of torch"):
        trained(torch.inference_mode())


def test_dropout_is_refused_with_bounds_and_only_there(tmp_path):
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    words = {"max_radius": 0.1, "epochs": 1, "progress": False}
    with pytest.raises(UnsupportedOperation, match=r"in training mode.*method=Standard\(\)"):
        train(model, blobs(), method=Acert(), out=tmp_path / "run", **words)
    assert not (tmp_path / "run").exists()
    train(model, blobs(), method=Standard(), out=tmp_path / "run", **words)


def test_validation_of_what_has_no_bounds_is_refused_before_training(tmp_path):
    model = nn.Sequential(nn.Linear(2, 8), Apply(torch.sinc), nn.Linear(8, 3))
    words = {"method": Standard(), "max_radius": 0.1, "epochs": 1, "progress": False}
    words["out"] = tmp_path / "run"
    with pytest.raises(UnsupportedOperation, match=r"validated.*sinc.*leave `validation` ou"):
        train(model, blobs(), validation=blobs(), **words)
    assert not words["out"].exists()
    train(model, blobs(), **words)


def test_what_crown_has_no_rule_for_is_refused_before_training(tmp_path):
    model = nn.Sequential(nn.Linear(2, 4), nn.Softmax(1), nn.Linear(4, 3))
    words = {"method": CrownIBP(), "max_radius": 0.1, "epochs": 2, "progress": False}
    words["out"] = tmp_path / "run"
    with pytest.raises(UnsupportedOperation, match=r"with CROWN-IBP.*softmax.*other methods take"):
        train(model, blobs(), **words)
    assert not words["out"].exists()
    train(model, blobs(), radius_schedule=FullRadius(), **words)


def test_checks_leave_the_running_statistics_alone(monkeypatch):
    class Seen(Exception):
        pass

    def start(self, **_):
        raise Seen

    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr(execution.Execution, "start", start)
    with pytest.raises(Seen):
        train(model, blobs(), method=Acert(), max_radius=0.1, epochs=1, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model] == [True, False, True, True]


def test_other_validation_samples_are_refused(tmp_path):
    images, labels = blobs(30)
    other = images.clone()
    other[7, 1] += 1e-3

    def call(validation, **changes):
        words = {"method": Acert(), "max_radius": 0.1, "epochs": 2, "progress": False}
        model, out = models.mlp(2, [4], 3), tmp_path / "run"
        return train(model, blobs(), validation=validation, out=out, **(words | changes))

    with pytest.raises(KeyboardInterrupt):
        call((images, labels), progress=at(3, interrupt))
    for changed in ((other, labels), (images, labels.flip(0))):
        with pytest.raises(RunError, match=r"another config: `data\.validation_sha256` is"):
            call(changed, resume=True)
    assert call((images, labels), resume=True).history
    config = records.read_config(tmp_path / "run")
    del config["data"]["validation_sha256"]  # as older runs have it
    records.write_config(tmp_path / "run", config)
    assert call((other, labels), resume=True).history


class _Own(nn.Module):
    """Has parameters in a list, and a text of its own that is another one in every object."""

    def __init__(self, **words):
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(2)])
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 4, 3, padding=1, **words), nn.Flatten(),
            nn.ReLU(), nn.Linear(8, 3),
        )  # fmt: skip

    def extra_repr(self):
        return f"{self.scales[0]} {object()}"

    def forward(self, x):
        return self.net(x * self.scales[0])


def test_another_network_of_the_same_shapes_is_refused(tmp_path):
    def call(model, **changes):
        words = {"method": FastIBP(), "max_radius": 0.1, "epochs": 2, "progress": False}
        return train(model, blobs(), out=tmp_path / "run", **(words | changes))

    with pytest.raises(KeyboardInterrupt):
        call(_Own(), progress=at(3, interrupt))
    smooth = _Own()
    smooth.net[3] = nn.GELU()
    with pytest.raises(RunError, match=r"`layers\.net\.3` is \"ReLU\(\)\" there and \"GELU"):
        call(smooth, resume=True)
    with pytest.raises(
        RunError, match=r"`layers\.net\.1` is .* there and .*padding_mode=replicate"
    ):
        call(_Own(padding_mode="replicate"), resume=True)
    other = _Own()
    other.scales[0].data *= 2  # the run's own weights come from its state
    assert call(other, resume=True).history
    config = records.read_config(tmp_path / "run")
    assert config["layers"]["scales"] == "ParameterList()"  # its own text tells the device
    del config["layers"]  # as older runs have it
    records.write_config(tmp_path / "run", config)
    assert call(smooth, resume=True).history


class _Frozen(nn.Sequential):
    """Keeps its batch norm in evaluation; its `train` returns nothing, as many do."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()


def test_a_train_method_that_returns_nothing_is_enough(tmp_path):
    def build(*_):
        return _Frozen(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    words = {"method": Acert(), "max_radius": 0.1, "epochs": 1, "progress": False}
    trained = train(build(), blobs(), out=tmp_path / "run", **words).model
    assert trained[1].num_batches_tracked.item() == 0
    again = train(build(), blobs(), out=tmp_path / "run", resume=True, **words).model
    loaded = acert.load_model(tmp_path / "run", model=build())
    for found in (again, loaded):
        assert torch.equal(found[0].weight, trained[0].weight)
        assert not any(module.training for module in found.modules())


class _Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


@pytest.mark.parametrize("method", [Acert(), Sabr(), Standard()], ids=lambda m: type(m).__name__)
def test_a_model_that_counts_its_calls_counts_the_steps_alone(method):
    model = nn.Sequential(nn.Linear(2, 8), _Counts(), nn.ReLU(), nn.Linear(8, 3))
    samples = blobs()
    run = train(
        model, samples, method=method, max_radius=0.1, epochs=2, validation=samples,
        validate_every=1, progress=False,
    )  # fmt: skip
    assert model[1].calls.item() == run.history[-1]["step"]


def test_a_lazy_model_gets_its_shapes_before_training():
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))
    run = train(model, blobs(), method=Acert(), max_radius=0.1, epochs=2, progress=False)
    assert model[1].num_batches_tracked.item() == run.history[-1]["step"]


class _Asks(nn.Module):
    def forward(self, x):
        return 3 * x if isinstance(x, torch.Tensor) else x


class _Mixes(nn.Module):
    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class _Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn(x.shape) if self.training else x


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (_Asks, "something else of images than of intervals"),
        (_Mixes, "or of one image than of several"),
        (_Noisy, "in training mode: it draws random numbers"),
    ],
)
def test_bounds_of_another_network_are_not_trained(tmp_path, layer, message):
    model = nn.Sequential(nn.Linear(2, 8), layer(), nn.ReLU(), nn.Linear(8, 3))
    words = {"max_radius": 0.1, "epochs": 1, "progress": False}
    with pytest.raises(UnsupportedOperation, match=message):
        train(model, blobs(), method=Acert(), out=tmp_path / "run", **words)
    assert not (tmp_path / "run").exists()
    train(model, blobs(), method=Standard(), **words)


def test_a_single_sample_is_refused_for_its_batch(tmp_path):
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(InvalidInput, match="`batch_size` must be at"):
        train(model, (torch.rand(1, 2), [2]), method=Acert(), max_radius=0.1, epochs=1)


def test_more_outputs_than_labels_are_fine_for_own_arrays():
    run = train(
        models.mlp(2, [4], 5), blobs(), method=Standard(), max_radius=0.1, epochs=1,
        device="cpu", learning_rate=Constant(), progress=False,
    )  # fmt: skip
    assert len(run.history) == 1


# -- what is shown ------------------------------------------------------------------------


def shown(progress, **changes):
    standard = {"method": Standard(), "max_radius": 0.1, "epochs": 4, "validation": blobs(30)}
    train(models.mlp(2, [4], 3), blobs(), progress=progress, validate_every=2,
          **(standard | changes))  # fmt: skip


def test_lines_are_printed_where_there_is_no_terminal(capsys):
    shown(True)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split()[1] for line in lines] == ["2/4", "4/4"]
    assert all(word in lines[0] for word in ("loss", "val Acc", "ACR", "ART", "s left"))
    assert lines[-1].endswith("  0 s left")


def test_lines_without_validation_come_as_often(capsys):
    shown(True, validation=None, epochs=5)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["2/5", "4/5", "5/5"]
    assert "val" not in lines[0]


def test_silence(capsys):
    shown(False)
    assert capsys.readouterr().err == ""
    Silent().note("but notes are printed")
    assert capsys.readouterr().err == "but notes are printed\n"


def test_a_bar_shows_figures_and_notes():
    from rich.console import Console

    text = io.StringIO()
    bar = Bar(Console(file=text, force_terminal=True, width=150))
    shown(bar)
    bar.note("a [note] with brackets")
    said = text.getvalue()
    assert "epoch 4/4" in said
    assert "ART" in said
    assert "100%" not in said  # time left, not a percentage
    assert "a [note] with brackets" in said


def test_a_bar_on_a_terminal_lines_without_rich(monkeypatch):
    monkeypatch.setattr(sys, "stderr", types.SimpleNamespace(isatty=lambda: True, write=len))
    assert isinstance(display(True, every=1), Bar)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert isinstance(display(True, every=1), Lines)


def test_events_hold_the_figures_of_every_row(tmp_path, monkeypatch):
    written = []

    class SummaryWriter:
        def __init__(self, log_dir, purge_step):
            written.append((Path(log_dir).name, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    folder = tmp_path / "run"
    shown(False, out=folder, tensorboard=True)
    assert written[0] == ("events", 1)
    assert written[-1] == "closed"
    for row in records.read_metrics(folder):
        for name in row.keys() - {"step"}:
            assert (name, row[name], row["step"]) in written


def test_events_without_tensorboard_are_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RunError, match="`tensorboard` needs the package tensorboard: install it"):
        Events(tmp_path)
    with pytest.raises(RunError, match="needs the package"):
        shown(False, out=tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists()
