"""Rows against records, running what is missing within a budget, and the command around it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.made_records import made_run

from acert import records
from acert.cli import main
from acert.errors import DataError, InvalidInput, RunError
from acert.experiments.paper import reproduction
from acert.experiments.paper import rows as paper
from acert.experiments.paper.publication import publish, read_record, read_records
from acert.experiments.paper.reproduction import Job, jobs, reproduce, seconds_needed
from acert.experiments.paper.row import Published, Row, Training
from acert.experiments.paper.standing import has_data, standing
from acert.experiments.recipes import recipe
from acert.optimizers import Muon

ROOT = Path(__file__).parent.parent
ACERT = paper.find("table1/cifar10/acert-k0")
FASTIBP = paper.find("table1/cifar10/fastibp-k0")
TINY = paper.find("table1/tinyimagenet/fastibp-k0")


def digits_row(method: str = "acert", *, epochs: int = 2, **changes: object) -> Row:
    training = Training(
        name=f"digits-{method}", dataset="digits", method=method, certify_to="0.3", epochs=epochs
    )
    fields = {
        "id": f"table1/digits/{method}", "part": "table1", "worth": 1, "label": "ACERT",
        "training": training, "published": Published(art=50.0),
    }  # fmt: skip
    return Row(**{**fields, **changes})  # type: ignore[arg-type]


def record_of(row: Row, folder: Path, **details):
    return read_record(made_run(folder, row.training, **details))


# -- what is there ------------------------------------------------------------------------


def test_committed_mnist_records_fill_their_rows():
    found, complaints = read_records(ROOT / "results")
    assert complaints == []
    known = {row.id: standing(row, found, ROOT / "nothing") for row in paper.ROWS}
    for name in ("table1/mnist/acert-k0", "table7/mnist/fastibp-k0", "figure3/mnist/acert-k0"):
        assert known[name].state == "done"
        assert len(known[name].records) == 1
    assert known["table1/mnist/standard"].state in ("needs data", "done")


def test_a_row_is_filled_by_its_own_run_alone(tmp_path):
    record = record_of(ACERT, tmp_path / "a")
    assert standing(ACERT, [record]).state == "done"
    for name in ("table5", "table6", "table7", "figure3"):
        part = next(
            row for row in paper.ROWS if row.part == name and row.training == ACERT.training
        )
        assert standing(part, [record]).records == (record,)
    filled = {row.training for row in paper.ROWS if standing(row, [record]).records}
    assert filled == {ACERT.training}


@pytest.mark.parametrize(
    "meaning",
    [
        {"arithmetic": "float32"}, {"bounds": "crown-ibp"}, {"elide": False},
        {"max_radius": 0.04}, {"max_radius": 0.0345098039216}, {"domain": (0.0, 2.0)},
        {"violations": 1},
    ],
)  # fmt: skip
def test_certificates_of_another_meaning_fill_nothing(tmp_path, meaning):
    record = record_of(ACERT, tmp_path / "a", certificates=meaning)
    assert standing(ACERT, [record]).missing == (0,)


def test_certificates_of_other_than_the_whole_test_set_fill_nothing(tmp_path):
    some = record_of(ACERT, tmp_path / "a", samples=100)
    # The first image again, in place of the last.
    index = np.arange(10_000) % 9_999
    again = record_of(ACERT, tmp_path / "b", certificates={"index": index})
    assert standing(ACERT, [some, again]).missing == (0,)
    assert standing(ACERT, [record_of(ACERT, tmp_path / "c")]).missing == ()


def test_a_row_is_its_own_experiment_however_often_it_is_validated(tmp_path):
    record = record_of(ACERT, tmp_path / "a")
    settings = record.experiment.settings
    watched = replace(record, experiment=replace(record.experiment, validate_every=7))
    assert standing(ACERT, [watched]).records == (watched,)
    for other in (
        replace(record.experiment, train_on_all=False),
        replace(record.experiment, settings=replace(settings, batch_size=64)),
        replace(record.experiment, settings=replace(settings, precision="float32")),
    ):
        assert standing(ACERT, [replace(record, experiment=other)]).records == ()


def test_every_seed_counts_and_missing_ones_are_named(tmp_path):
    found = [record_of(ACERT, tmp_path / str(seed), seed=seed) for seed in (2, 0, 5)]
    seeds = paper.find("table5/cifar10/acert-k0")
    one = standing(seeds, found)
    assert [record.seed for record in one.records] == [0, 2, 5]
    assert one.missing == (1,)
    assert one.state == "needs data" or has_data("cifar10")


def test_fewer_epochs_fill_rows_that_allow_it_and_more_are_preferred(tmp_path):
    short = record_of(TINY, tmp_path / "a", epochs=20)
    longer = record_of(TINY, tmp_path / "b", epochs=40)
    assert standing(TINY, [short]).state == "done"
    assert standing(TINY, [longer, short]).records == (longer,)
    assert standing(TINY, [short, longer]).records == (longer,)
    other = record_of(ACERT, tmp_path / "c", epochs=40)
    assert standing(ACERT, [other]).records == ()


def test_data_are_looked_for_and_not_opened(tmp_path):
    assert not has_data("cifar10", tmp_path)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    assert has_data("cifar10", tmp_path)
    assert has_data("digits", tmp_path / "nothing")
    assert standing(ACERT, [], tmp_path).state == "missing"
    assert standing(TINY, [], tmp_path).state == "needs data"


# -- what is to be done -------------------------------------------------------------------


def test_runs_that_rows_share_are_made_once_in_order():
    wanted = jobs(paper.selected(["cifar10"]), [])
    names = [job.name for job in wanted]
    assert len(names) == len({*names})
    assert names[:3] == ["cifar10-acert-k0-s0", "cifar10-acert-k0.25-s0", "cifar10-fastibp-k0-s0"]
    assert names.index("cifar10-acert-k0-s1") > names.index("cifar10-acert-k0-unscheduled-s0")
    assert len(names) == 24 + 4


def test_what_is_recorded_is_not_made_again(tmp_path):
    found = [record_of(ACERT, tmp_path / "a")]
    names = [job.name for job in jobs(paper.selected(["table5"]), found)]
    assert names == [
        "cifar10-acert-k0-s1", "cifar10-acert-k0-s2",
        *(f"cifar10-acert-k0.25-s{seed}" for seed in (0, 1, 2)),
    ]  # fmt: skip
    assert [job.name for job in jobs([ACERT], found, seeds=[0, 4])] == ["cifar10-acert-k0-s4"]


def test_shortened_runs(tmp_path):
    assert [job.name for job in jobs([ACERT], [], epochs=200)] == ["cifar10-acert-k0-s0"]
    (short,) = jobs([ACERT], [record_of(ACERT, tmp_path / "a")], epochs=5)
    assert short.name == "cifar10-acert-k0-e5-s0"
    assert not short.fills_row
    found = [record_of(TINY, tmp_path / "b", epochs=40)]
    assert jobs([TINY], found) == jobs([TINY], found, epochs=40) == []
    (longer,) = jobs([TINY], found, epochs=60)
    assert longer.fills_row


def test_time_is_judged_by_records_of_the_same_hardware(tmp_path):
    acert = record_of(ACERT, tmp_path / "a", seconds=3.0)
    job = Job(row=FASTIBP, seed=0)
    cost = 1 + 0.15 * 3
    expected = 200 * 3.0 / cost + 30.0 + 40.0
    assert seconds_needed(job, [acert], hardware="a GPU") == pytest.approx(expected)
    assert seconds_needed(job, [acert], hardware="another") is None
    assert seconds_needed(Job(row=TINY, seed=0), [acert], hardware="a GPU") is None
    same = record_of(FASTIBP, tmp_path / "b", seconds=1.0)
    known = seconds_needed(job, [acert, same], hardware="a GPU")
    assert known == pytest.approx(200 * 1.0 + 30.0 + 40.0)
    beside = {"gpu_shared": True}  # its epochs took twice as long
    shared = record_of(FASTIBP, tmp_path / "c", seconds=2.0, environment=beside)
    alone = seconds_needed(job, [shared, acert], hardware="a GPU")
    assert alone == pytest.approx(expected)
    assert seconds_needed(job, [shared], hardware="a GPU") == pytest.approx(400 + 30 + 40)
    short = Job(row=FASTIBP, seed=0, epochs=10)
    assert seconds_needed(short, [same], hardware="a GPU") == pytest.approx(10 + 30 + 40)


def test_costs_are_those_that_were_measured():
    rows = json.loads((ROOT / "results" / "step-cuda.json").read_text())["rows"]
    plain = {row["method"]: row["ms"] for row in rows
             if row["precision"] == "float16" and not row["regularized"]}  # fmt: skip
    for name in ("standard", "fastibp", "acert-fast", "sabr", "acert"):
        cost = plain[name] / plain["fastibp"]
        assert reproduction._cost(recipe("cifar10", name)) == pytest.approx(cost, rel=0.02)
    # Runs without a radius schedule and those of CROWN-IBP are in TF32.
    narrow = {(row["method"], row["regularized"]): row["ms"] for row in rows
              if row["precision"] == "tf32"}  # fmt: skip
    for name in ("fastibp", "acert"):
        cost = narrow[name, False] / plain["fastibp"]
        row = paper.find(f"table2/cifar10/{name}-k0")
        assert reproduction._cost(row.training.experiment()) == pytest.approx(cost, rel=0.02)
    # Its warm-up took 32 ms a step when it was measured last, by a later walk than the record's.
    steps = 81 * 32.0 + 119 * narrow["crown-ibp", False]
    cost = steps / 200 / plain["fastibp"]
    assert reproduction._cost(recipe("cifar10", "crown-ibp")) == pytest.approx(cost, rel=0.02)


def test_of_records_that_cost_the_same_one_with_the_same_optimiser_tells_the_time(tmp_path):
    like = record_of(ACERT, tmp_path / "like", seconds=2.0)
    muon = replace(like.experiment, settings=replace(like.experiment.settings, optimizer=Muon()))
    slower = replace(record_of(ACERT, tmp_path / "muon", seconds=3.0), experiment=muon)
    job = Job(row=ACERT, seed=1)
    alone = seconds_needed(job, [like], hardware="a GPU")
    assert seconds_needed(job, [slower, like], hardware="a GPU") == alone


def test_time_of_a_run_that_is_under_way_is_its_own(tmp_path):
    run = made_run(tmp_path / "a", FASTIBP.training, seconds=4.0)
    job = Job(row=FASTIBP, seed=0)
    assert seconds_needed(job, [], hardware="a GPU", run=run) == 60.0
    records.write_metrics(run, records.read_metrics(run)[:50])
    assert seconds_needed(job, [], hardware="a GPU", run=run) == 150 * 4.0 + 30.0 + 60.0
    records.write_metrics(run, records.read_metrics(run)[:1])
    assert seconds_needed(job, [], hardware="a GPU", run=run) is None


# -- running ------------------------------------------------------------------------------


def test_a_run_is_trained_certified_and_published(tmp_path):
    row, said = digits_row(), []
    wanted = jobs([row], [])
    outcome = reproduce(
        wanted, results=tmp_path / "results", out=tmp_path / "runs", budget=60.0,
        progress=False, say=said.append,
    )  # fmt: skip
    assert outcome.published == [tmp_path / "results" / "digits-acert-s0"]
    assert outcome.left == outcome.failed == []
    record = read_record(outcome.published[0])
    assert record.experiment == row.training.experiment(0)
    assert record.root_steps is not None
    assert record.root_steps.samples == 1438
    assert record.environment["command"].startswith("acert train --dataset digits --method acert")
    assert "--data-dir DATA" in record.environment["command"]
    assert standing(row, [record]).state == "done"
    assert jobs([row], read_records(tmp_path / "results")[0]) == []
    assert "ART" in said[-1]
    assert "published" in said[-1]


def test_a_run_that_finds_no_roots_counts_none(tmp_path):
    row = digits_row("fastibp", epochs=1)
    reproduce(jobs([row], []), results=tmp_path / "results", out=tmp_path / "runs", progress=False)
    assert read_record(tmp_path / "results" / "digits-fastibp-s0").root_steps is None


def test_a_shortened_run_that_fills_no_row_is_not_published(tmp_path):
    row = digits_row("fastibp", epochs=60)
    wanted = jobs([row], [], epochs=1)
    said = []
    outcome = reproduce(
        wanted, results=tmp_path / "results", out=tmp_path / "runs", progress=False,
        say=said.append,
    )  # fmt: skip
    assert outcome.published == []
    assert records.is_finished(tmp_path / "runs" / "digits-fastibp-e1-s0")
    assert not (tmp_path / "results").exists()
    assert said[-1].endswith("fills no row")


@pytest.fixture
def made(monkeypatch):
    """`complete_run` that makes its run at once, or does what was planned for it."""
    calls, plans = [], {}

    def complete(experiment, *, out, certify_to, **given):
        calls.append((out.name, given["deadline"]))
        plan = plans.get(out.name, "done")
        if isinstance(plan, BaseException):
            raise plan
        if plan is None:
            return None
        row = next(row for row in (ACERT, FASTIBP, TINY) if out.name.startswith(row.training.name))
        if not out.exists():
            seed = experiment.settings.seed
            made_run(out, row.training, seed=seed, environment={"gpu": None, "cpu": "this"})
        assert certify_to == row.training.max_radius
        return read_record(out).certificates

    monkeypatch.setattr(reproduction, "complete_run", complete)
    monkeypatch.setattr(reproduction, "_record_root_steps", lambda *_: None)
    monkeypatch.setattr(reproduction, "environment", lambda *_: {"cpu": "this"})
    return calls, plans


def test_what_does_not_fit_the_budget_is_not_started(tmp_path, made, monkeypatch):
    calls, _ = made
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    publish(
        made_run(
            tmp_path / "a", FASTIBP.training, seed=7, seconds=1.0,
            environment={"gpu": None, "cpu": "this"},
        ),
        tmp_path / "results",
    )  # fmt: skip
    # FastIBP takes 270 s, ACERT 200 * 1.39 + 70 = 348 s.
    wanted = jobs([ACERT, FASTIBP], [])
    said = []
    outcome = reproduce(
        wanted, results=tmp_path / "results", out=tmp_path / "runs", budget=300, say=said.append
    )
    assert [name for name, _ in calls] == ["cifar10-fastibp-k0-s0"]
    assert calls[0][1] == 1000 + 300 - 30
    assert outcome.left == ["cifar10-acert-k0-s0"]
    assert "does not fit what is left of the budget (about 6 min)" in said[0]


def test_a_budget_too_small_for_anything_is_refused_with_the_estimate(tmp_path, made):
    calls, _ = made
    run = made_run(
        tmp_path / "a", FASTIBP.training, seed=7, seconds=1.0,
        environment={"gpu": None, "cpu": "this"},
    )  # fmt: skip
    publish(run, tmp_path / "results")
    wanted = jobs([ACERT, FASTIBP], [])
    expected = r"`--budget` must be at least 4 min, .*cifar10-fastibp-k0-s0; got 60 s"
    with pytest.raises(InvalidInput, match=expected):
        reproduce(wanted, results=tmp_path / "results", out=tmp_path / "runs", budget=60)
    assert calls == []
    # Nothing is known of TinyImageNet, so it is begun.
    reproduce(
        [*wanted, Job(row=TINY, seed=0)], results=tmp_path / "results", out=tmp_path / "runs",
        budget=60,
    )  # fmt: skip
    assert [name for name, _ in calls] == ["tinyimagenet-fastibp-k0-s0"]


def test_a_spent_budget_starts_nothing_even_where_no_time_is_known(tmp_path, made, monkeypatch):
    calls, _ = made
    clock = iter([1000.0, 2000.0, 2000.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    said = []
    outcome = reproduce(
        [Job(row=TINY, seed=0)], results=tmp_path / "r", out=tmp_path, budget=60, say=said.append
    )
    assert calls == []
    assert said == ["tinyimagenet-fastibp-k0-s0: does not fit what is left of the budget"]
    assert outcome.left == ["tinyimagenet-fastibp-k0-s0"]


def test_a_run_with_damaged_figures_has_no_known_time(tmp_path):
    (tmp_path / records.METRICS).write_text("{")
    assert seconds_needed(Job(row=ACERT, seed=0), [], hardware="this", run=tmp_path) is None


def test_failures_and_misses_are_told_and_the_next_run_begun(tmp_path, made):
    calls, plans = made
    plans["cifar10-acert-k0-s0"] = RunError("the loss was not finite")
    plans["cifar10-fastibp-k0-s0"] = None
    wanted = [Job(row=ACERT, seed=0), Job(row=FASTIBP, seed=0), Job(row=ACERT, seed=1)]
    outcome = reproduce(wanted, results=tmp_path / "results", out=tmp_path / "runs")
    assert len(calls) == 3
    assert outcome.failed == ["cifar10-acert-k0-s0: the loss was not finite"]
    assert outcome.left == ["cifar10-fastibp-k0-s0"]
    assert [path.name for path in outcome.published] == ["cifar10-acert-k0-s1"]


def test_absent_data_stop_their_data_set_alone(tmp_path, made):
    calls, plans = made
    plans["tinyimagenet-fastibp-k0-s0"] = DataError("tiny is missing")
    wanted = [Job(row=TINY, seed=0), Job(row=TINY, seed=1), Job(row=ACERT, seed=0)]
    outcome = reproduce(wanted, results=tmp_path / "results", out=tmp_path / "runs")
    assert [name for name, _ in calls] == ["tinyimagenet-fastibp-k0-s0", "cifar10-acert-k0-s0"]
    assert len(outcome.published) == 1
    with pytest.raises(DataError, match="tiny is missing"):
        reproduce(wanted[:2], results=tmp_path / "results", out=tmp_path / "runs")


def test_ctrl_c_says_how_to_go_on(tmp_path, made):
    _, plans = made
    plans["cifar10-acert-k0-s0"] = KeyboardInterrupt("stopped after step 3")
    with pytest.raises(KeyboardInterrupt, match=r"stopped after step 3; or give the same"):
        reproduce([Job(row=ACERT, seed=0)], results=tmp_path / "results", out=tmp_path / "runs")


INTERRUPTED = """
import sys
from acert.experiments.paper import reproduction
from acert.experiments.paper import rows as paper
from tests.test_reproduction import digits_row
paper.ROWS = (digits_row(epochs=10),)
from acert.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_goes_on_at_the_next_call(tmp_path, how):
    words = [
        "reproduce", "table1", "--device", "cpu", "--results", str(tmp_path / "results"),
        "--out", str(tmp_path / "runs"),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    call = [sys.executable, "-c", INTERRUPTED, *words]
    process = subprocess.Popen(call, env=environment, stderr=subprocess.PIPE, text=True)
    run = tmp_path / "runs" / "digits-acert-s0"
    limit = time.monotonic() + 300
    while len(records.read_metrics(run) if run.exists() else []) < 2:
        assert time.monotonic() < limit
        time.sleep(0.02)
    process.send_signal(how)
    _, told = process.communicate(timeout=300)
    assert not (tmp_path / "results").exists()
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "give the same `acert reproduce` again" in told
    begun = records.read_metrics(run)
    assert 2 <= len(begun) < 10
    outcome = reproduce(
        [Job(row=digits_row(epochs=10), seed=0)], results=tmp_path / "results",
        out=tmp_path / "runs", progress=False,
    )  # fmt: skip
    rows = read_record(outcome.published[0]).metrics
    assert [row["epoch"] for row in rows] == [*range(1, 11)]
    # Its time tells that it was not trained again.
    assert rows[0]["seconds"] == begun[0]["seconds"]


# -- the command --------------------------------------------------------------------------


def test_list_shows_every_row(capsys, tmp_path):
    assert main(["reproduce", "--list", "mnist", "--results", str(ROOT / "results"),
                 "--data-dir", str(tmp_path)]) == 0  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(paper.selected(["mnist"]))
    assert lines[1].split() == ["table1/mnist/acert-k0", "done", "1/1", "96.69", "96.92"]
    # Without records every row is still to be made.
    (tmp_path / "none").mkdir()
    assert main(["reproduce", "--list", "mnist", "--results", str(tmp_path / "none"),
                 "--data-dir", str(tmp_path)]) == 0  # fmt: skip
    listed = [line for line in capsys.readouterr().out.splitlines() if "/mnist/" in line]
    assert len(listed) == len(paper.selected(["mnist"]))
    assert all("needs data  0/" in line for line in listed)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-v"], "`--verbose` must come with `--list`"),
        (["--render", "table1"], "`--render` writes all rows"),
        (["--render", "--rows", ACERT.id], "`--render` writes all rows"),
    ],
)
def test_flags_that_would_be_passed_over_are_refused(capsys, words, message):
    assert main(["reproduce", *words]) == 2
    assert message in capsys.readouterr().err


def test_list_names_damaged_records_and_prints_commands(capsys, tmp_path):
    run = made_run(tmp_path / "a", ACERT.training)
    folder = publish(run, tmp_path / "results")
    (folder / "certificates.npz").write_bytes(b"PK")
    words = ["reproduce", "--list", "-v", "table5", "--results", str(tmp_path / "results")]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("skipped: ")
    assert sum(" && acert certify runs/" in line for line in lines) == 6


def test_the_printed_command(capsys):
    assert main(["reproduce", "--print", "table1/cifar10/fastibp-k0-at-8", "--data-dir", "my data",
                 "--out", "there"]) == 0  # fmt: skip
    assert capsys.readouterr().out == (
        "acert train --dataset cifar10 --method fastibp --kappa 0 --max-radius 8/255 "
        "--set settings.epochs=160 --seed 0 --train-on-all --data-dir 'my data' "
        "--out there/cifar10-fastibp-k0-at-8-s0 && "
        "acert certify there/cifar10-fastibp-k0-at-8-s0 --max-radius 8.8/255 "
        "--data-dir 'my data'\n"
    )
    assert main(["reproduce", "--print", TINY.id, "--epochs", "40", "--seeds", "3"]) == 0
    assert "--epochs 40 --seed 3" in capsys.readouterr().out
    assert main(["reproduce", "--print", TINY.id, "--epochs", "200"]) == 0
    assert "--epochs" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--list", "tabel1"], "did you mean 'table1'"),
        (["--rows", "table1/mnist/acert"], "did you mean 'table1/mnist/acert-k0'"),
        (["--print", "nothing"], "is no row of the paper"),
        (["--budget", "soon"], "a time is needed, such as 90s"),
        (["--epochs", "0"], "`--epochs` must be at least 1"),
        (["--seeds", "a,b"], "`--seeds` must be whole numbers between commas; got 'a,b'"),
        (["--seeds=-3", "--list"], "`seed` must be in [0, 9999999]; got -3"),
        (["--epochs", "0", "--print", TINY.id], "`--epochs` must be at least 1"),
        (["mnist", "--rows", ACERT.id], f"`--rows` must be of mnist; got {ACERT.id}"),
        (["mnist", "--rows", ACERT.id, "--list"], f"`--rows` must be of mnist; got {ACERT.id}"),
        (["--rows", ACERT.id, "--out", __file__], "nothing can be written to"),
        (["--rows", ACERT.id, "--results", __file__], "nothing can be written to"),
        (["--render", "--out", __file__], "nothing can be written to"),
    ],
)
def test_mistakes_are_one_line(capsys, words, told):
    assert main(["reproduce", "--results", "nowhere", *words, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_running_by_command(capsys, tmp_path, made, monkeypatch):
    _, plans = made
    rows = (ACERT, FASTIBP)
    monkeypatch.setattr(paper, "ROWS", rows)
    plans["cifar10-fastibp-k0-s0"] = RunError("it broke")
    words = ["reproduce", "cifar10", "--device", "cpu", "--results", str(tmp_path / "results"),
             "--out", str(tmp_path / "runs")]  # fmt: skip
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "failed: cifar10-fastibp-k0-s0: it broke" in out
    assert f"wrote {tmp_path / 'runs' / 'reproduction.md'}" in out
    plans["cifar10-fastibp-k0-s0"] = None
    (tmp_path / "results" / "cut").mkdir()
    (tmp_path / "results" / "cut" / "config.json").write_text("{")
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "left for another call: cifar10-fastibp-k0-s0" in out
    assert out.count("skipped: ") == 2
    assert main([*words, "--rows", ACERT.id]) == 0
    assert "nothing is missing" in capsys.readouterr().out


def test_a_budget_in_which_nothing_was_done_is_a_mistake(capsys, tmp_path, made):
    _, plans = made
    plans["tinyimagenet-fastibp-k0-s0"] = None
    words = ["reproduce", "--rows", TINY.id, "--device", "cpu", "--out", str(tmp_path / "runs"),
             "--results", str(tmp_path / "results"), "--budget", "2s"]  # fmt: skip
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error == "acert: `--budget` must do for one run at least; got 2 s\n"


def test_render_by_command(capsys, tmp_path):
    shutil.copytree(ROOT / "results" / "mnist-acert-s0", tmp_path / "results" / "a")
    words = ["reproduce", "--render", "--results", str(tmp_path / "results")]
    assert main([*words, "--out", str(tmp_path / "docs")]) == 0
    assert "reproduction.md and 2 pictures" in capsys.readouterr().out
