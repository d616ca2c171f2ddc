"""Sweeps: what is planned, skipped, resumed, left out, reported; in this process and in workers."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import acert
from acert import cli, data, metrics, records
from acert.cli import sweep as verb
from acert.errors import DataError, InvalidInput, RunError
from acert.experiments.budget import Pace, duration, measured, spoken
from acert.experiments.choice import chosen_experiment
from acert.experiments.recipes import recipe, with_epochs
from acert.experiments.sweeps import board as boards
from acert.experiments.sweeps.board import BoardBar, BoardLines, Outcome
from acert.experiments.sweeps.engine import Engine, LocalEngine, cause
from acert.experiments.sweeps.plan import make_plan
from acert.experiments.sweeps.sweep import Sweep, failure_file
from acert.experiments.sweeps.worker import Report, Task, perform, serve
from acert.schedules import FullRadius

SOURCE = Path(acert.__file__).parents[1]
# One channel wide and one epoch long.
TINY = ["--epochs", "1", "--set", "network.width=1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACERT_DATA_DIR", raising=False)


class Here(Engine):
    """Carries tasks out in this process, one at a time, when their reports are asked for."""

    def __init__(self, *, jobs=1, reuse=True):
        self.tasks, self.reports, self.stopped, self.seen = [], [], False, []

    @property
    def free(self):
        return 1 - len(self.tasks)

    def submit(self, task):
        self.tasks.append(task)
        self.seen.append(task)

    def report(self):
        if not self.reports:
            self.reports.append(perform(self.tasks[0], self.reports.append))
        found = self.reports.pop(0)
        if found.final:
            self.tasks.pop()
        return found

    def stop(self):
        self.stopped = True

    def close(self):
        self.tasks.clear()


@pytest.fixture
def call(capsys, monkeypatch):
    """Runs a command with the engine above; returns status, standard output and error."""
    monkeypatch.setattr(verb, "LocalEngine", Here)

    def run(*words):
        status = cli.main(["sweep", *(str(word) for word in words)])
        return status, *capsys.readouterr()

    return run


def names(**lists):
    return [run.name for run in make_plan(**lists).runs]


def refused(result):
    status, _, err = result
    assert status == 2
    assert err.count("\n") == 1
    return err


# -- the plan ------------------------------------------------------------------------------


def test_every_combination_in_the_order_of_seeds():
    found = names(methods=["acert", "fastibp"], kappas=[0.0, 0.25], seeds=[0, 1])
    assert found == [
        "acert-k0-s0", "acert-k0.25-s0", "fastibp-k0-s0", "fastibp-k0.25-s0",
        "acert-k0-s1", "acert-k0.25-s1", "fastibp-k0-s1", "fastibp-k0.25-s1",
    ]  # fmt: skip


def test_a_planned_run_is_what_train_would_train():
    plan = make_plan(
        datasets=["mnist"], methods=["acert"], kappas=[0.5], seeds=[3], steps=[5], epochs=10,
        batch_size=32, max_radii=[0.2], changes=["clip_norm=1"], train_on_all=True,
    )  # fmt: skip
    (run,) = plan.runs
    assert run.experiment == with_epochs(
        recipe(
            "mnist", "acert", kappa=0.5, seed=3, max_steps=5, batch_size=32, max_radius=0.2,
            clip_norm=1.0, train_on_all=True,
        ),
        10,
    )  # fmt: skip
    assert run.name == "acert-k0.5-s3"
    assert plan.notes == ()


def test_names_tell_what_varies():
    assert names(datasets=["digits", "mnist"]) == ["digits-acert-k0-s0", "mnist-acert-k0-s0"]
    assert names(steps=[2, 5]) == ["acert-steps2-k0-s0", "acert-steps5-k0-s0"]
    assert names(steps=[5]) == ["acert-k0-s0"]
    assert names(schedules=["smooth", "none"]) == ["acert-smooth-k0-s0", "acert-none-k0-s0"]
    assert names(max_radii=[8 / 255, 0.1]) == ["acert-r0.03137-k0-s0", "acert-r0.1-k0-s0"]


def test_schedule_none_is_the_full_radius_from_the_start():
    smooth, none = make_plan(schedules=["smooth", "none"], epochs=10).runs
    assert none.experiment.settings.radius_schedule == FullRadius()
    assert smooth.experiment == chosen_experiment(epochs=10, domain=(0.0, 1.0), seed=0)
    with pytest.raises(InvalidInput, match="`schedule` must be one of smooth, none; got 'rough'"):
        chosen_experiment(schedule="rough")


def test_what_a_method_does_not_know_is_planned_once():
    plan = make_plan(
        methods=["acert", "fastibp", "standard"], kappas=[0, 0.5], steps=[2, 5],
        schedules=["smooth", "none"],
    )  # fmt: skip
    found = [run.name for run in plan.runs]
    assert len(found) == 8 + 4 + 1
    assert "fastibp-none-k0.5-s0" in found
    assert found[-1] == "standard-k1-s0"
    assert plan.notes == (
        "standard training has no kappa: it is planned once, as kappa 1",
        "standard training has no radius schedule: it is planned without",
        "root steps are of acert only: fastibp, standard planned without",
        "24 combinations are 13 different runs",
    )


def test_duplicates_are_dropped():
    assert names(methods=["acert", "acert"], kappas=[0, 0.0], seeds=[1, 1]) == ["acert-k0-s1"]
    # A field that is set takes the lists' place.
    assert names(seeds=[0, 1], changes=["seed=7"]) == ["acert-k0-s7"]


def test_runs_are_named_by_what_is_trained():
    (run,) = make_plan(changes=["method=FastIBP", "radius_schedule=FullRadius"]).runs
    assert (run.name, run.method, run.schedule) == ("fastibp-k0-s0", "fastibp", "none")
    assert run.group["schedule"] == "none"
    (run,) = make_plan(changes=["dataset=mnist", "max_radius=0.2"]).runs
    assert (run.experiment.dataset, run.certify_to) == ("mnist", 0.2)
    with pytest.raises(InvalidInput, match=r"share the folder sabr-k0-s0: .* what a list names"):
        make_plan(methods=["acert", "standard"], changes=["method=Sabr"])


def test_all_runs_on_a_data_set_are_certified_equally_far():
    plan = make_plan(datasets=["mnist", "digits"], methods=["sabr", "acert"])
    radii = {run.name: (run.experiment.settings.max_radius, run.certify_to) for run in plan.runs}
    assert radii["mnist-sabr-k0-s0"] == (0.3, 0.4)
    assert radii["mnist-acert-k0-s0"] == (0.4, 0.4)
    assert radii["digits-acert-k0-s0"] == (0.3, 0.3)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"methods": ["acret"]}, r"`method` must be .*; got 'acret'; did you mean 'acert'\?"),
        ({"datasets": ["dig"]}, r"`dataset` must be .*; got 'dig'"),
        ({"schedules": ["smoth"]}, r"`schedule` must be .*; did you mean 'smooth'\?"),
        ({"methods": []}, "`methods` must name at least one value; got none"),
        ({"seeds": []}, "`seeds` must name at least one value; got none"),
        ({"kappas": [0, 1.5], "methods": ["standard"]}, r"`kappa` must be in \[0, 1\]; got 1\.5"),
        ({"seeds": [-1]}, r"`seed` must be in \[0, 9999999\]; got -1"),
        ({"steps": [0]}, "max_steps"),
        ({"kappas": [0.1234567, 0.1234568]}, "two runs .* share the folder acert-k0.123457-s0"),
    ],
)
def test_plans_that_are_refused(lists, message):
    with pytest.raises(InvalidInput, match=message):
        make_plan(**lists)


def test_a_recorded_plan_keeps_its_folders_and_grows(tmp_path):
    first = make_plan(kappas=[0.0], max_radii=[0.4])
    first.record(tmp_path)
    assert records.read_sweep(tmp_path)["schema"] == 1
    second = make_plan(kappas=[0.0], max_radii=[0.2, 0.4]).placed(tmp_path)
    assert [run.name for run in second.runs] == ["acert-r0.2-k0-s0", "acert-k0-s0"]
    second.record(tmp_path)
    # Fewer runs leave the others in the plan, and are certified as far as before.
    third = make_plan(kappas=[0.0], max_radii=[0.2]).placed(tmp_path)
    assert [(run.name, run.certify_to) for run in third.runs] == [("acert-r0.2-k0-s0", 0.4)]
    third.record(tmp_path)
    recorded = records.read_sweep(tmp_path)["runs"]
    assert [entry["name"] for entry in recorded] == ["acert-k0-s0", "acert-r0.2-k0-s0"]


@pytest.mark.parametrize("text", ["{", '{"schema": 1}', '{"schema": 1, "runs": [{"name": 3}]}'])
def test_a_damaged_plan_is_told_and_made_anew(tmp_path, text):
    (tmp_path / records.SWEEP).write_text(text)
    plan = make_plan().placed(tmp_path)
    assert f"{records.SWEEP} is damaged" in plan.notes[0]
    plan.record(tmp_path)
    names = [entry.get("name") for entry in records.read_sweep(tmp_path)["runs"]]
    assert names[-1] == "acert-k0-s0"


@pytest.mark.parametrize("name", ["../elsewhere", "..", ".", "", "/elsewhere", "a/b", "link"])
def test_a_recorded_name_cannot_lead_out_of_the_folder(tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / "link").symlink_to(tmp_path)
    plan = make_plan()
    plan.record(out)
    text = (out / records.SWEEP).read_text()
    (out / records.SWEEP).write_text(text.replace('"acert-k0-s0"', f'"{name}"'))
    assert plan.placed(out).runs[0].name == "acert-k0-s0"


def test_a_run_of_a_sweep_cannot_be_a_link_elsewhere(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "acert-k0-s0").symlink_to(tmp_path)
    with pytest.raises(RunError, match="acert-k0-s0 leads out of its folder"):
        make_plan().placed(out)


# -- time ----------------------------------------------------------------------------------


def test_durations():
    assert [duration(text) for text in ("90s", "25m", "2h", "0.5m")] == [90, 1500, 7200, 30]
    assert [spoken(seconds) for seconds in (0, 0.24, 3, 119, 150, 9000)] == [
        "0.1 s", "0.2 s", "3 s", "119 s", "2 min", "2.5 h",
    ]  # fmt: skip
    for text in ("25", "m", "0s", "-5m", "25 minutes", ""):
        with pytest.raises(InvalidInput, match="such as 90s, 25m or 2h; got"):
            duration(text)


def record(folder, *, seconds, epochs=2, device="cpu", finished=True, **facts):
    """A run folder with nothing in it but what it took."""
    folder.mkdir(parents=True)
    rows = [{"epoch": epoch, "seconds": seconds} for epoch in range(1, epochs + 1)]
    records.write_metrics(folder, rows)
    whole = {"device": device, "seconds": 2 * seconds * epochs}
    records.write_environment(folder, whole | facts)
    if finished:
        (folder / records.WEIGHTS).touch()


def test_pace_is_that_of_runs_like_it(tmp_path):
    one = recipe("digits", "acert", kappa=0.5, seed=4, epochs=10)
    record(tmp_path / "one", seconds=3.0, certification_seconds=7.0)
    record(tmp_path / "begun", seconds=4.0, finished=False)
    record(tmp_path / "other", seconds=9.0, device="cuda")
    assert measured(tmp_path / "one") == ("cpu", 6.0, 7.0)
    assert measured(tmp_path / "begun") == ("cpu", 4.0, 0.0)
    assert measured(tmp_path / "nothing") is None
    pace = Pace("cpu")
    assert pace.seconds(one, tmp_path / "new") is None
    for name in ("one", "begun", "other", "nothing"):
        pace.learn(one, tmp_path / name)
    like = recipe("digits", "acert", kappa=0.0, seed=1, epochs=10)
    assert pace.seconds(like, tmp_path / "new") == 5.0 * 10 + 7.0
    assert pace.seconds(like, tmp_path / "begun") == 5.0 * 8 + 7.0
    assert pace.seconds(like, tmp_path / "one") == 7.0
    (tmp_path / "begun" / records.METRICS).write_text("{")
    assert pace.seconds(like, tmp_path / "begun") == 5.0 * 10 + 7.0
    for other in ("fastibp", "acert-fast"):
        assert pace.seconds(recipe("digits", other), tmp_path / "new") is None
    assert pace.seconds(recipe("digits", "acert", max_steps=5), tmp_path / "new") is None


# -- sweeps in this process ----------------------------------------------------------------


def test_runs_of_several_data_sets_have_a_report_each(call, tmp_path):
    images, labels = np.zeros((40, 1, 8, 8), np.uint8), np.arange(40) % 10
    np.savez("own.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    words = ["--datasets", "digits,npz", "--data-dir", "own.npz", "--max-radius", "0.1"]
    _, out, _ = call(*words, "--batch-size", "16", *TINY, "--out", "two sets")
    assert out.splitlines()[-2:] == [
        "for figures and a page: acert report 'two sets' --dataset digits --out report/digits",
        "for figures and a page: acert report 'two sets' --dataset npz --out report/npz",
    ]


def test_finished_runs_on_other_files_of_the_users_are_refused(call):
    labels = np.arange(40) % 10
    for name, shade in (("one.npz", 0), ("two.npz", 9)):
        images = np.full((40, 1, 8, 8), shade, np.uint8)
        np.savez(name, x_train=images, y_train=labels, x_test=images, y_test=labels)
    words = ["--dataset", "npz", "--max-radius", "0.1", "--batch-size", "16", *TINY, "--out", "o"]
    _, first, _ = call(*words, "--seeds", "0,1", "--data-dir", "one.npz")
    status, out, err = call(*words, "--seeds", "0,1", "--data-dir", "one.npz")
    assert (status, out) == (0, first)
    assert "2 of 2 runs are finished already" in err
    told = refused(call(*words, "--data-dir", "two.npz"))
    assert "o/acert-k0-s0 cannot be resumed with another config: `data.sha256` is" in told
    with np.load("one.npz") as one:
        np.savez("three.npz", **{**one, "x_test": one["x_test"] + 1})
    told = refused(call(*words, "--data-dir", "three.npz"))
    assert "o/acert-k0-s0 was certified on other test images: remove its certificates" in told
    Path("o", "acert-k0-s0", records.CERTIFICATES).unlink()
    assert call(*words, "--data-dir", "three.npz")[0] == 0


def test_sweep_skip_and_grow(call):
    words = ["--methods", "acert,fastibp", "--seeds", "0,1", *TINY, "--out", "out"]
    status, out, err = call(*words)
    assert status == 0
    lines = err.splitlines()
    assert [line.split()[0] for line in lines] == [
        "acert-k0-s0", "fastibp-k0-s0", "acert-k0-s1", "fastibp-k0-s1",
    ]  # fmt: skip
    assert all(re.search(r"  Acc \d+\.\d\d  ACR .* ART .* [\d.]+ s$", line) for line in lines)
    header, acert_row, fastibp_row, hint = out.splitlines()
    assert header.split() == ["method", "kappa", "n", "Acc", "ACR", "ART"]
    found = [records.read_certificates(Path("out", f"acert-k0-s{seed}")) for seed in (0, 1)]
    right = [metrics.accuracy(one["status"] != acert.Status.MISCLASSIFIED) for one in found]
    accuracy = metrics.spread(right)
    assert acert_row.startswith(
        f"acert    0      2  {100 * accuracy.mean:.2f} +- {100 * accuracy.std:.2f}"
    )
    assert fastibp_row.split()[0] == "fastibp"
    assert hint == "for figures and a page: acert report out --out report/"
    environment = records.read_environment(Path("out/acert-k0-s0"))
    assert environment["command"] == " ".join(["acert", "sweep", *words])

    files = [path for path in Path("out").rglob("*") if path.is_file()]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    status, again, err = call(*words, "--schedules", "smooth", "--datasets", "digits")
    assert (status, again) == (0, out)
    assert err == "4 of 4 runs are finished already\n"
    status, _, err = call(*words, "--kappas", "0,0.5", "--seed", "0", "--method", "acert")
    assert [line.split()[0] for line in err.splitlines()] == ["1", "acert-k0.5-s0"]
    for path, (changed, content) in before.items():
        if path.name != records.SWEEP:
            assert (path.stat().st_mtime_ns, path.read_bytes()) == (changed, content)
    status, out, _ = call(*words, "--plan")
    assert out.count("finished\n") == 4 + 1
    assert out.splitlines()[-1] == "4 runs in out, 4 of them finished"
    assert len(records.read_sweep(Path("out"))["runs"]) == 5


def test_plan_is_printed_and_nothing_done(call):
    status, out, err = call("--methods", "acert,standard", "--kappas", "0,0.5", *TINY,
        "--out", "out", "--plan")  # fmt: skip
    assert status == 0
    assert out.splitlines() == [
        "acert-k0-s0     new, 1 epoch",
        "acert-k0.5-s0   new, 1 epoch",
        "standard-k1-s0  new, 1 epoch",
        "3 runs in out, 0 of them finished",
    ]
    assert err.splitlines() == [
        "standard training has no kappa: it is planned once, as kappa 1",
        "4 combinations are 3 different runs",
    ]
    assert not Path("out").exists()


def test_rows_of_several_data_sets_steps_and_schedules(call):
    status, out, _ = call("--method", "acert,standard", "--steps", "2,3", "--schedules",
        "smooth,none", *TINY, "--out", "out")  # fmt: skip
    rows = [line.split() for line in out.splitlines()[:-1]]
    assert rows[0] == ["method", "kappa", "steps", "schedule", "n", "Acc", "ACR", "ART"]
    assert rows[1][:5] == ["acert", "0", "2", "smooth", "1"]
    assert rows[-1][:5] == ["standard", "1", "-", "-", "1"]
    assert "+-" not in out
    assert status == 0


def test_standing_in_words(call):
    assert call(*TINY, "--out", "out")[0] == 0
    (Path("out/acert-k0-s0") / records.CERTIFICATES).unlink()
    begun = Path("out/acert-k0-s1")
    task = Sweep(make_plan(seeds=[1], epochs=2, changes=["network.width=1"]), Path("out"))
    outcome = perform(task._task(task.plan.runs[0], 0.0), lambda report: None)
    assert outcome.kind == "late"
    damaged = Path("out/acert-k0-s2")
    damaged.mkdir()
    (damaged / records.CONFIG).write_text("{")
    words = ["--seeds", "1,2", "--epochs", "2", *TINY[2:], "--out", "out"]
    status, out, _ = call(*words, "--plan")
    assert status == 0
    lines = out.splitlines()
    assert re.fullmatch(r"acert-k0-s1  begun, 1 of 2 epochs, about [\d.]+ s", lines[0])
    assert lines[1].startswith("acert-k0-s2  damaged: out/acert-k0-s2/config.json is damaged")
    assert lines[2] == "2 runs in out, 0 of them finished"
    kept = (begun / records.METRICS).read_bytes()
    (begun / records.METRICS).write_text("{")
    assert call(*words, "--plan")[1].startswith("acert-k0-s1  begun, 0 of 2 epochs")
    (begun / records.METRICS).write_bytes(kept)
    assert call(*TINY, "--out", "out", "--plan")[1].startswith("acert-k0-s0  to be certified")
    # The damaged one is told, the other goes on.
    status, out, err = call(*words)
    assert status == 1
    assert "failed: acert-k0-s2: out/acert-k0-s2/config.json is damaged" in err
    assert "finished already" not in err
    assert len(records.read_metrics(begun)) == 2


def test_another_config_in_a_folder_is_refused_by_name(call):
    assert call(*TINY, "--out", "out")[0] == 0
    message = refused(call(*TINY, "--epochs", "2", "--out", "out"))
    assert "out/acert-k0-s0 cannot be resumed with another config" in message
    assert "epochs` is 1 there and 2 here" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "acert,fastipb"], "did you mean 'fastibp'?"),
        (["--methods", ""], "values between commas are needed; got ''"),
        (["--kappas", "0,,1"], "values between commas are needed; got '0,,1'"),
        (["--kappas", "0,x"], "a number is needed, such as 0.1 or 8/255; got 'x'"),
        (["--kappas", "0,1.5"], "`kappa` must be in [0, 1]; got 1.5"),
        (["--seeds", "0,1.5"], "whole numbers between commas are needed; got '0,1.5'"),
        (["--jobs", "0"], "`--jobs` must be at least 1; got 0"),
        (["--budget", "25"], "a time is needed, such as 90s, 25m or 2h; got '25'"),
        (["--model", "nowhere:net"], "nowhere cannot be imported"),
        (["--set", "kapa=1"], "did you mean 'kappa'?"),
        (
            ["--methods", "sabr,fastibp", "--set", "box_share=0.5"],
            "'box_share' is no field of the recipe of fastibp, only of sabr",
        ),
        (["--kapas", "0"], "did you mean '--kappas'?"),
    ],
)
def test_refused_flags(call, words, message):
    assert message in refused(call(*TINY, "--out", "out", *words))
    assert not Path("out").exists()


def test_missing_data_and_folders_are_told_before_anything_is_started(call, monkeypatch):
    assert "--out" in refused(call(*TINY))
    assert "nothing" in refused(
        call(*TINY, "--dataset", "npz", "--data-dir", "nothing", "--out", "out")
    )
    Path("file").touch()
    assert "file" in refused(call(*TINY, "--out", "file"))

    def missing(name, *, data_dir, train_on_all):
        raise DataError(f"{name} is not in {data_dir}")

    monkeypatch.setattr(data, "load", missing)
    assert "digits is not in there" in refused(call(*TINY, "--data-dir", "there", "--out", "out"))
    assert not Path("out").exists()


def test_no_run_goes_on_from_the_weights_of_another(call):
    Path("shared.py").write_text(
        textwrap.dedent("""
        from acert import models

        module = models.mlp(64, [4], 10)

        def same(shape, classes):
            return module
        """)
    )
    words = ["--seeds", "0,1", "--epochs", "1", "--jobs", "1", "--device", "cpu", "--out", "out"]
    message = refused(call("--model", "shared:module", *words))
    assert "must be a function that makes a new module for each run" in message
    status, out, err = call("--model", "shared:same", *words)
    assert status == 1
    assert "failed: acert-k0-s1: `model` must make a new module at each call" in err
    assert out.splitlines()[1].split()[2] == "1"


def test_a_failed_run_is_told_and_the_others_finish(call):
    Path("brittle.py").write_text(
        textwrap.dedent("""
        import torch
        from acert import models

        def net(shape, classes):
            if torch.initial_seed() == 1:
                raise ValueError("no luck")
            return models.mlp(64, [4], classes)
        """)
    )
    words = ["--seeds", "0,1,2", "--model", "brittle:net", "--epochs", "1", "--device", "cpu",
        "--out", "out"]  # fmt: skip
    status, out, err = call(*words)
    assert status == 1
    failure = failure_file(Path("out"), "acert-k0-s1")
    last = err.splitlines()[-1]
    assert last.startswith("failed: acert-k0-s1: `model` must be a function")
    assert "it raised ValueError: no luck" in last
    assert last.endswith(f"(more in {failure})")
    assert "Traceback" in failure.read_text()
    assert out.splitlines()[1].split()[2] == "2"
    # Once the reason is gone the run is made like any other.
    text = Path("brittle.py").read_text()
    # Of another length: in the same second Python would take the old one from its cache.
    Path("brittle.py").write_text(text.replace("== 1", "== 99"))
    del sys.modules["brittle"]
    status, out, _ = call(*words)
    assert status == 0
    assert out.splitlines()[1].split()[2] == "3"
    assert not failure.exists()


def test_a_full_disk_leaves_no_promise_of_more(call, monkeypatch):
    def full(path):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("acert.experiments.sweeps.sweep.fresh", full)
    status, _, err = call("--model", "mlp", *TINY[:2], "--device", "cpu", "--out", "out",
        "--set", "learning_rate=Constant(constant_rate=1e30)")  # fmt: skip
    assert status == 1
    assert "failed: acert-k0-s0: " in err
    assert "more in" not in err


def test_nan_is_a_failure_of_one_run(call):
    words = ["--methods", "fastibp,standard", *TINY, "--out", "out"]
    # The recipes differ in nothing else that could be set for one of them alone.
    rate = ["--set", "learning_rate=Constant(constant_rate=1e30)"]
    status, out, err = call(*words, *rate)
    assert status == 1
    assert err.count("failed: ") == 2 + 2
    assert "last good checkpoint" in err
    assert out == ""


# -- budgets -------------------------------------------------------------------------------


def test_budget_starts_what_fits_by_runs_found(call):
    words = ["--methods", "acert,fastibp", *TINY, "--out", "out"]
    assert call(*words)[0] == 0
    slow = Path("out/acert-k0-s0")
    records.write_environment(slow, records.read_environment(slow) | {"seconds": 1e4})
    words += ["--seeds", "0,1", "--budget", "10m"]
    assert "about 2.8 h" in call(*words, "--plan")[1]
    status, _, err = call(*words)
    assert status == 0
    assert "acert-k0-s1  left out: it needs about 2.8 h more" in err
    assert "left out, for want of time: acert-k0-s1" in err
    assert not Path("out/acert-k0-s1").exists()
    assert Path("out/fastibp-k0-s1", records.CERTIFICATES).is_file()
    # Now nothing is left that fits.
    message = refused((*call(*words)[:2], call(*words)[2].splitlines()[-1] + "\n"))
    assert message == (
        "acert: `budget` must do for one run at least; got 10 min; "
        "the shortest, acert-k0-s1, needs about 2.8 h\n"
    )


def test_budget_measures_the_first_of_a_kind(call):
    words = ["--seeds", "0,1", "--epochs", "100000", *TINY[2:], "--budget", "60s", "--out", "out"]
    status, _, err = call(*words)
    assert status == 2
    first, second, last = err.splitlines()
    assert first.startswith("acert-k0-s0  left out: it needs about ")
    assert second.startswith("acert-k0-s1  left out: it needs about ")
    assert "the shortest, acert-k0-s0, needs about" in last
    assert len(records.read_metrics(Path("out/acert-k0-s0"))) == 1
    # By then its time was known.
    assert not Path("out/acert-k0-s1").exists()


def test_a_run_that_was_stopped_within_its_first_epoch_says_so(tmp_path):
    class Late(Here):
        def report(self):
            self.tasks.pop()
            return Report(name="acert-k0-s0", kind="late")

    sweep = Sweep(make_plan(epochs=1, changes=["network.width=1"]), tmp_path)
    shown = []
    board = BoardLines()
    board.note = shown.append
    with pytest.raises(InvalidInput, match=r"must do for one run at least; got 60 s$"):
        sweep.run(Late(), board, budget=60)
    assert shown == ["acert-k0-s0  left out: not one epoch was done in time"]


def test_budget_that_is_over_before_it_began(tmp_path):
    sweep = Sweep(make_plan(epochs=1, changes=["network.width=1"]), tmp_path)
    with pytest.raises(InvalidInput, match=r"`budget` must do for one run at least; got 0.1 s$"):
        sweep.run(Here(), BoardLines(), budget=1e-9)


# -- stopping ------------------------------------------------------------------------------


class Interrupted(Here):
    """Is stopped by a signal while the second run is under way."""

    number = signal.SIGINT

    def report(self):
        if len(self.seen) == 2:
            os.kill(os.getpid(), self.number)
            time.sleep(5)
        return super().report()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_and_says_how_to_go_on(call, monkeypatch, number):
    engines = []

    def engine(**options):
        engines.append(Interrupted())
        engines[0].number = number
        return engines[0]

    monkeypatch.setattr(verb, "LocalEngine", engine)
    before = signal.getsignal(signal.SIGTERM)
    words = ["--seeds", "0,1,2", *TINY, "--out", "out"]
    status, out, err = call(*words)
    assert (status, out) == (130, "")
    assert engines[0].stopped
    assert err.endswith(
        "acert: stopped with 1 of 3 runs finished, and what was under way saved. "
        f"To go on: acert sweep {' '.join(words)}\n"
    )
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_ctrl_c_does_not_wait_and_still_says_how_to_go_on(call, monkeypatch):
    class Impatient(Interrupted):
        def stop(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(verb, "LocalEngine", lambda **options: Impatient())
    words = ["--seeds", "0,1,2", *TINY, "--out", "out"]
    status, _, err = call(*words)
    assert status == 130
    assert "Ctrl-C again ends them at once" in err
    assert err.endswith(
        "acert: stopped with 1 of 3 runs finished, and what was under way as it was last saved. "
        f"To go on: acert sweep {' '.join(words)}\n"
    )


def test_a_sweep_runs_in_another_thread_too(tmp_path):
    sweep = Sweep(make_plan(epochs=1, changes=["network.width=1"]), tmp_path)
    found = []
    worker = threading.Thread(target=lambda: found.extend(sweep.run(Here(), BoardLines())))
    worker.start()
    worker.join()
    assert [outcome.kind for outcome in found] == ["done"]
    assert "the same call" in sweep._stopped(found)


def test_certificates_that_vanish_are_a_failure(tmp_path):
    class Forgetful(Here):
        def report(self):
            found = super().report()
            if found.final:
                (tmp_path / found.name / records.CERTIFICATES).unlink()
            return found

    sweep = Sweep(make_plan(epochs=1, changes=["network.width=1"]), tmp_path)
    (outcome,) = sweep.run(Forgetful(), BoardLines())
    assert (outcome.kind, outcome.reason) == ("failed", "its certificates are not there")


# -- what is shown -------------------------------------------------------------------------


def test_bar_shows_the_whole_sweep():
    from rich.console import Console

    text = io.StringIO()
    shown = BoardBar(Console(file=text, force_terminal=True, width=100))
    one, two, three = make_plan(kappas=[0, 0.25, 0.5], epochs=10).runs
    shown.start([one, two, three])
    shown.under_way(one, 0.5)
    assert shown.bar.tasks[0].completed == 5
    shown.under_way(two, 0.1)
    assert shown.bar.tasks[0].fields["names"] == "acert-k0-s0, acert-k0.25-s0"
    figures = acert.evaluation.Evaluation(accuracy=0.5, acr=0.25, art=0.4)
    shown.over(Outcome(run=one, kind="done", figures=figures, seconds=3))
    shown.over(Outcome(run=two, kind="failed", reason="[red]why"))
    assert (shown.bar.tasks[0].completed, shown.bar.tasks[0].total) == (10, 20)
    assert shown.bar.tasks[0].fields["ended"] == "2/3"
    shown.close()
    assert "acert-k0-s0  Acc 50.00  ACR 25.00  ART 40.00  3 s" in text.getvalue()
    assert "acert-k0.25-s0  failed: [red]why" in text.getvalue()


def test_no_bar_where_nothing_is_to_be_made(call, monkeypatch):
    assert call(*TINY, "--out", "out")[0] == 0

    class Counted(BoardLines):  # type: ignore[misc]
        def start(self, todo):
            raise AssertionError

    monkeypatch.setattr(verb, "board", Counted)
    status, _, err = call(*TINY, "--out", "out")
    assert (status, err) == (0, "1 of 1 runs are finished already\n")


def test_bar_on_a_terminal_lines_elsewhere_and_without_rich(monkeypatch):
    assert isinstance(boards.board(), BoardLines)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert isinstance(boards.board(), BoardBar)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert isinstance(boards.board(), BoardLines)


# -- workers -------------------------------------------------------------------------------


def task(folder, *, seed=0, epochs=1, **options):
    experiment = recipe("digits", "fastibp", epochs=epochs, width=1, seed=seed)
    name = Path(folder).name
    return Task(
        name=name, experiment=experiment, folder=str(folder), certify_to=0.3, **options
    )  # fmt: skip


def test_a_task_and_a_report_as_lines(tmp_path):
    given = task(tmp_path / "one", command=("acert", "sweep"), seconds=3.0, threads=None)
    assert Task.from_line(given.to_line()) == given
    report = Report(name="one", kind="failed", reason="why", details="two\nlines")
    assert Report(**json.loads(report.to_line())) == report
    assert report.to_line().count("\n") == 1


def test_perform_reports_progress_failure_and_stop(tmp_path, monkeypatch):
    reports = []
    monkeypatch.setattr("acert.experiments.sweeps.worker._EVERY", 0.0)
    given = task(tmp_path / "one", threads=None)
    assert perform(given, reports.append).kind == "done"
    shares = [report.share for report in reports]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    failed = perform(task(tmp_path / "two", device="nowhere"), reports.append)
    assert failed.kind == "failed"
    assert failed.reason.startswith("`device` must be available here")

    def broken(*words, **options):
        raise MemoryError("all of it\nis taken")

    def stopped(*words, **options):
        raise KeyboardInterrupt("stopped after step 3")

    monkeypatch.setattr("acert.experiments.sweeps.worker.complete_run", broken)
    failed = perform(given, reports.append)
    assert (failed.kind, failed.reason) == ("failed", "MemoryError: all of it is taken")
    assert "Traceback" in failed.details
    monkeypatch.setattr("acert.experiments.sweeps.worker.complete_run", stopped)
    assert perform(given, reports.append).reason == "stopped after step 3"


def test_serve_answers_every_task_and_leaves_with_its_source(tmp_path):
    source, answers, left = io.StringIO(), io.StringIO(), []
    for number in (0, 1):
        source.write(task(tmp_path / f"run{number}", seed=number).to_line())
    source.seek(0)
    serve(source, answers, leave=left.append)
    reports = [Report(**json.loads(line)) for line in answers.getvalue().splitlines()]
    assert [report.name for report in reports if report.final] == ["run0", "run1"]
    assert left == [0]


def test_serve_leaves_after_a_task_that_was_stopped(tmp_path, monkeypatch):
    def stopped(*words, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("acert.experiments.sweeps.worker.complete_run", stopped)
    reading, writing = os.pipe()
    left = []
    with os.fdopen(reading) as source, os.fdopen(writing, "w") as tasks:
        tasks.write(task(tmp_path / "one").to_line())
        tasks.flush()
        answers = io.StringIO()
        serve(source, answers, leave=left.append)
        assert left == [0]
        assert json.loads(answers.getvalue())["kind"] == "stopped"
        tasks.close()
        waited(lambda: len(left) == 2)  # its other thread has come to the end too


def drained(engine, count=1):
    """The last reports of so many tasks."""
    found = []
    while len(found) < count:
        report = engine.report()
        found += [report] if report.final else []
    return found


def test_local_engine_reuses_replaces_and_stops_workers(tmp_path):
    Path("deadly.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with LocalEngine(jobs=1) as engine:
        assert engine.free == 1
        engine.submit(task(tmp_path / "one"))
        assert engine.free == 0
        assert drained(engine)[0].kind == "done"
        # The same process takes the next one, and is no more after a failure.
        (worker,) = engine.idle
        deadly = recipe("digits", "fastibp", epochs=1, name="deadly:net")
        engine.submit(
            Task(name="two", experiment=deadly, folder=str(tmp_path / "two"), certify_to=0.3)
        )
        assert engine.busy["two"] is worker
        (failed,) = drained(engine)
        assert failed.kind == "failed"
        assert failed.reason == "its process was ended by SIGKILL, perhaps for want of memory"
        assert engine.idle == []
        # As if it had died between two tasks: another takes its place.
        engine.idle = [worker]
        worker.close = lambda: None
        engine.submit(task(tmp_path / "long", epochs=100_000))
        process = engine.busy["long"].process
        assert process is not worker.process
        while engine.report().share == 0.0:
            pass
        engine.stop()
        assert process.poll() is not None
        # Everything is saved, even in the middle of an epoch.
        assert records.read_state(tmp_path / "long").facts["step"] > 0
    assert engine.free == 1
    assert records.read_environment(tmp_path / "one")["threads"] == 1


def test_workers_are_not_reused_where_that_is_not_wanted():
    closed = []
    engine = LocalEngine(jobs=1, reuse=False)
    engine.busy["one"] = SimpleNamespace(close=lambda: closed.append("one"))
    engine.reports.put(Report(name="one", kind="done"))
    assert engine.report().kind == "done"
    assert (closed, engine.idle, engine.free) == (["one"], [], 1)


def test_causes_of_death():
    assert cause(1) == "its process ended with exit status 1"
    assert cause(-signal.SIGSEGV) == "its process was ended by SIGSEGV"


def test_jobs_and_threads(call, monkeypatch):
    seen = []

    class Told(Here):
        def __init__(self, *, jobs, reuse):
            super().__init__()
            seen.append((jobs, reuse))

        def submit(self, task):
            seen.append((task.threads, task.device))
            super().submit(task)

    monkeypatch.setattr(verb, "LocalEngine", Told)
    monkeypatch.setattr(verb.os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    call(*TINY, "--out", "one")
    # One thread, so that the test's own number stays what it was.
    call(*TINY, "--jobs", "8", "--out", "two")
    assert seen == [(4, True), (1, "cpu"), (8, True), (1, "cpu")]
    monkeypatch.delattr(verb.os, "sched_getaffinity")
    assert verb._cores() == os.cpu_count()


# -- killed --------------------------------------------------------------------------------


def children(process):
    return [
        int(word)
        for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()
    ]  # fmt: skip


def content(folder):
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


def waited(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks for children in /proc")
def test_a_killed_sweep_leaves_no_worker_repeats_nothing_and_loses_nothing(
    tmp_path, capsys, monkeypatch
):
    # One core for the sweep, and so one run at a time with one thread.
    core = min(os.sched_getaffinity(0))
    words = ["sweep", "--methods", "fastibp,acert", "--epochs", "8", *TINY[2:]]
    code = f"import os, sys; os.sched_setaffinity(0, {{{core}}}); from acert.cli import main; "
    sweep = subprocess.Popen(
        [sys.executable, "-c", f"{code}main(sys.argv[1:])", *words, "--out", "killed"],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    first, second = (tmp_path / "killed" / f"{name}-k0-s0" for name in ("fastibp", "acert"))
    waited(lambda: len(records.read_metrics(second)) >= 2)
    (worker,) = children(sweep.pid)
    sweep.send_signal(signal.SIGKILL)
    sweep.wait()
    waited(lambda: not alive(worker), 10.0)
    assert not records.is_finished(second)
    before = content(first)
    assert records.CERTIFICATES in before

    monkeypatch.setattr(verb.os, "sched_getaffinity", lambda process: {core})
    assert cli.main([*words, "--out", "killed"]) == 0
    assert "1 of 2 runs are finished already" in capsys.readouterr().err
    assert content(first) == before
    plan = make_plan(methods=["fastibp", "acert"], epochs=8, changes=["network.width=1"])
    Sweep(plan, tmp_path / "whole").run(Here(), BoardLines())
    for folder in (first, second):
        for file in (records.WEIGHTS, records.CERTIFICATES, records.EXAMPLES):
            whole = tmp_path / "whole" / folder.name / file
            assert (folder / file).read_bytes() == whole.read_bytes()
        rows = records.read_metrics(folder)
        assert [row["epoch"] for row in rows] == list(range(1, 9))


def test_a_plan_of_a_newer_acert_is_not_replaced(tmp_path):
    text = '{"schema": 99, "runs": []}'
    (tmp_path / records.SWEEP).write_text(text)
    with pytest.raises(records.NewerSchema, match=r"sweep\.json has schema 99.*newer acert"):
        make_plan().placed(tmp_path)
    assert (tmp_path / records.SWEEP).read_text() == text
