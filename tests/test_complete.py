"""Runs from config to certificates: trained once, certified once, stopped by a deadline."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from acert import models, records
from acert.errors import InvalidInput, RunError
from acert.experiments import complete
from acert.experiments.complete import Watch, complete_run
from acert.experiments.execution import Stop
from acert.experiments.progress import Silent
from acert.experiments.recipes import recipe
from acert.methods import Acert, CrownIBP, FastIBP, Standard
from acert.schedules import SmoothRadius
from acert.training import Trainer


def experiment(**changes):
    return recipe("digits", "fastibp", **{"epochs": 2, "width": 1} | changes)


def run(out, **options):
    chosen = options.pop("experiment", None) or experiment()
    return complete_run(chosen, out=out, progress=False, **options)


def content(folder):
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


def test_trains_certifies_and_then_only_reads(tmp_path):
    folder = tmp_path / "run"
    certificates = run(folder, command=["acert", "sweep"])
    assert len(certificates) == 359
    assert (certificates.max_radius, certificates.arithmetic) == (0.3, "real")
    assert len(records.read_metrics(folder)) == 2
    assert records.read_examples(folder)["most_images"].shape == (16, 1, 8, 8)
    assert records.read_environment(folder)["command"] == "acert sweep"
    assert records.read_environment(folder)["certification_seconds"] >= 0

    before = content(folder)
    again = run(folder)
    assert content(folder) == before
    for name, value in certificates.columns.items():
        np.testing.assert_array_equal(again.columns[name], value)


def test_other_certificates_are_made_without_training_again(tmp_path):
    folder = tmp_path / "run"
    run(folder)
    before = content(folder)
    assert run(folder, certify_to=0.4, arithmetic="float32").max_radius == 0.4
    assert records.read_certificates(folder)["arithmetic"] == "float32"
    # Damage is made good.
    (folder / records.CERTIFICATES).write_bytes(b"damaged")
    assert run(folder).max_radius == 0.3
    after = content(folder)
    for name in (records.WEIGHTS, records.STATE, records.METRICS, records.CONFIG):
        assert after[name] == before[name]
    assert after[records.CERTIFICATES][1] == before[records.CERTIFICATES][1]


def test_another_config_is_refused(tmp_path):
    run(tmp_path / "run")
    with pytest.raises(RunError, match=r"seed` is 0 there and 1 here"):
        run(tmp_path / "run", experiment=experiment(seed=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"certify_to": 0.0}, r"`certify_to` must be above 0; got 0\.0"),
        ({"arithmetic": "exact"}, r"`arithmetic` must be one of .*; got 'exact'"),
        ({"bounds": "ipb"}, r"`bounds` must be"),
    ],
)
def test_refuses_before_the_training(tmp_path, options, message):
    with pytest.raises(InvalidInput, match=message):
        run(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_deadline_stops_after_the_first_epoch_and_nothing_is_lost(tmp_path):
    late, whole = tmp_path / "late", tmp_path / "whole"
    assert run(late, deadline=time.monotonic()) is None
    assert len(records.read_metrics(late)) == 1
    assert not records.is_finished(late)
    assert run(late, deadline=time.monotonic() + 600) is not None
    assert run(whole) is not None
    for name in (records.WEIGHTS, records.CERTIFICATES, records.EXAMPLES):
        assert (late / name).read_bytes() == (whole / name).read_bytes()


def test_a_stop_that_is_not_the_deadlines_is_passed_on(tmp_path, monkeypatch):
    def stopped(*words, **options):
        raise KeyboardInterrupt("stopped after step 1")

    monkeypatch.setattr(complete, "train_run", stopped)
    with pytest.raises(KeyboardInterrupt, match="step 1"):
        run(tmp_path, deadline=time.monotonic() + 600)


def test_own_model_and_progress(tmp_path):
    def factory(shape, classes):
        return models.mlp(64, [4], classes)

    chosen = recipe("digits", "fastibp", epochs=1, name="mine:net")
    found = complete_run(chosen, out=tmp_path / "run", model=factory, progress=Silent())
    assert len(found) == 359


# -- the watch -----------------------------------------------------------------------------


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(complete.time, "monotonic", lambda: self.now)


def watch(monkeypatch, *, deadline, device="cpu", step=0, method=None):
    """A run of ten epochs of five steps, with a warm-up of three."""
    clock = Clock(monkeypatch)
    schedule = SmoothRadius(start_epoch=1, length=3)
    settings = SimpleNamespace(
        epochs=10, method=method or Acert(), radius_schedule=schedule, regularization=0.5
    )
    trainer = SimpleNamespace(
        settings=settings, steps_per_epoch=5, total_steps=50, step=step, device=torch.device(device)
    )
    trainer.phase = lambda step: Trainer.phase(trainer, step)
    watched = Watch(Silent(), deadline)
    watched.start(trainer)
    return clock, watched


def test_watch_extrapolates_the_epochs_so_far(monkeypatch, capsys):
    clock, watched = watch(monkeypatch, deadline=115.0)
    clock.now += 1.0
    watched.step(5)
    watched.epoch({"epoch": 1, "step": 5})  # two more, and seven of 0.85 s: until 109
    clock.now += 3.0  # the mean is 2 s now, so that the end is near 118
    with pytest.raises(Stop):
        watched.epoch({"epoch": 2, "step": 10})
    assert watched.expired
    watched.note("heard")
    watched.close()
    assert capsys.readouterr().err == "heard\n"


def test_watch_does_not_wait_for_an_epoch_that_ends_long_after_the_deadline(monkeypatch):
    clock, watched = watch(monkeypatch, deadline=101.0)
    clock.now += 5.0  # late, but an epoch would tell how long all of them take
    watched.step(1)
    assert not watched.expired
    clock.now += 5.0
    with pytest.raises(Stop):
        watched.step(2)
    assert watched.expired


def test_watch_lets_a_measured_run_end_a_little_late(monkeypatch):
    clock, watched = watch(monkeypatch, deadline=111.0)
    clock.now += 1.0
    watched.epoch({"epoch": 1, "step": 5})
    clock.now += 100.0
    watched.step(6)
    assert not watched.expired


def test_watch_does_not_count_a_part_of_an_epoch(monkeypatch):
    clock, watched = watch(monkeypatch, deadline=113.0, step=3)
    clock.now += 10.0
    watched.epoch({"epoch": 1, "step": 5})
    clock.now += 1.0
    with pytest.raises(Stop):
        watched.epoch({"epoch": 2, "step": 10})


def test_watch_does_not_count_compilation(monkeypatch):
    clock, watched = watch(monkeypatch, deadline=140.0, device="cuda")
    clock.now += 30.0
    watched.epoch({"epoch": 1, "step": 5})
    clock.now += 1.0
    watched.epoch({"epoch": 2, "step": 10})
    assert not watched.expired


def test_watch_lets_a_trained_run_be(monkeypatch):
    clock, watched = watch(monkeypatch, deadline=101.0, step=45)
    clock.now += 5.0
    watched.epoch({"epoch": 10, "step": 50})
    assert not watched.expired


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_watch_does_not_stop_crown_ibp_for_epochs_that_will_be_cheaper(monkeypatch, device):
    # A warm-up of 5 s an epoch, then 1 s, and on CUDA 10 s of compilation before each.
    compilation = 10.0 * (device == "cuda")
    deadline = 100.0 + 3 * 5 + 7 * 1 + 2 * compilation
    clock, watched = watch(monkeypatch, deadline=deadline, device=device, method=CrownIBP())
    for epoch in range(1, 11):
        clock.now += (5.0 if epoch <= 3 else 1.0) + compilation * (epoch in (1, 4))
        watched.step(5 * epoch)
        watched.epoch({"epoch": epoch, "step": 5 * epoch})
    assert not watched.expired


@pytest.mark.parametrize("method", [Acert(), FastIBP(), Standard()])
def test_watch_foresees_that_epochs_after_the_warm_up_are_shorter(monkeypatch, method):
    # 1.2 s an epoch, then 1 s, on CUDA 10 s of compilation before each: done a second early.
    warm_up = 1.2 if method.uses_bounds else 1.0
    deadline = 100.0 + 3 * warm_up + 7 * 1 + 2 * 10.0 + 1
    clock, watched = watch(monkeypatch, deadline=deadline, device="cuda", method=method)
    for epoch in range(1, 11):
        again = epoch == 4 and method.uses_bounds
        clock.now += (warm_up if epoch <= 3 else 1.0) + 10.0 * (epoch == 1 or again)
        watched.step(5 * epoch)
        watched.epoch({"epoch": epoch, "step": 5 * epoch})
    assert not watched.expired


def test_watch_stops_early_where_shorter_epochs_will_not_do_either(monkeypatch):
    clock, watched = watch(monkeypatch, deadline=107.5)
    clock.now += 1.0
    with pytest.raises(Stop):  # two more, and seven of 0.85 s
        watched.epoch({"epoch": 1, "step": 5})


def test_watch_stops_crown_ibp_within_its_warm_up_or_by_the_epochs_after_it(monkeypatch):
    clock, watched = watch(monkeypatch, deadline=114.0, method=CrownIBP())
    clock.now += 5.0
    with pytest.raises(Stop):  # the warm-up alone ends at 115
        watched.epoch({"epoch": 1, "step": 5})
    clock, watched = watch(monkeypatch, deadline=120.0, method=CrownIBP(), step=10)
    clock.now += 5.0
    watched.epoch({"epoch": 3, "step": 15})
    clock.now += 3.0
    with pytest.raises(Stop):  # six more of 3 s
        watched.epoch({"epoch": 4, "step": 20})


def test_watch_does_not_wait_for_the_first_epoch_after_the_warm_up(monkeypatch):
    clock, watched = watch(monkeypatch, deadline=116.0, method=CrownIBP(), step=10)
    clock.now += 15.0
    watched.step(15)
    watched.epoch({"epoch": 3, "step": 15})
    clock.now += 10.0
    with pytest.raises(Stop):
        watched.step(16)
    assert watched.expired
