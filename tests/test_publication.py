"""Published records: what goes in, how small it is, and that it reads back as it was."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.made_records import made_run

from acert import records
from acert.errors import RunError
from acert.evaluation import Certificates
from acert.experiments.paper import publication
from acert.experiments.paper import rows as paper
from acert.experiments.paper.publication import (
    RECORD_LIMIT,
    STORE_LIMIT,
    folder_size,
    publish,
    read_record,
    read_records,
)
from acert.experiments.paper.root_steps import RootSteps, root_steps
from acert.zoo import load_model

RESULTS = Path(__file__).parent.parent / "results"
TRAINING = paper.find("table1/cifar10/acert-k0").training
STEPS = RootSteps(
    samples=100, misclassified=20, certified_to_max=10, arrived=((2, 50), (3, 20)),
    proven=((3, 70),),
)  # fmt: skip


@pytest.fixture
def run(tmp_path):
    return made_run(tmp_path / "runs" / "a", TRAINING, steps=STEPS)


# -- what is committed --------------------------------------------------------------------


def test_committed_records_are_small_and_sound():
    found, complaints = read_records(RESULTS)
    assert complaints == []
    assert len(found) >= 2
    for record in found:
        assert folder_size(record.folder) <= RECORD_LIMIT, record.folder
        assert not records.is_finished(record.folder), "weights are no part of a record"
        assert not (record.folder / records.LOCAL).exists()
    assert folder_size(RESULTS) <= STORE_LIMIT


# -- publishing ---------------------------------------------------------------------------


def test_a_record_holds_what_the_run_held(run, tmp_path):
    folder = publish(run, tmp_path / "results", name="cifar10-acert-k0-s0")
    assert folder == tmp_path / "results" / "cifar10-acert-k0-s0"
    assert sorted(path.name for path in folder.iterdir()) == [
        "certificates.npz", "config.json", "env.json", "examples.npz", "metrics.jsonl",
        "root-steps.json",
    ]  # fmt: skip
    record = read_record(folder)
    before = Certificates(**records.read_certificates(run))
    for name, value in before.columns.items():
        np.testing.assert_array_equal(record.certificates.columns[name], value)
        assert type(record.certificates.columns[name]) is type(value)
    assert record.experiment == TRAINING.experiment(0)
    assert record.root_steps == STEPS
    assert record.metrics[0]["loss"] == 0.333333
    assert record.metrics[0]["step"] == 391
    assert (record.seed, record.epochs, record.hardware) == (0, 200, "a GPU")
    assert record.epoch_seconds == 2.0
    assert record.step_seconds == pytest.approx(2.0 / 391)


def test_a_record_is_small_and_names_no_place(run, tmp_path):
    folder = publish(run, tmp_path / "results")
    assert folder_size(folder) < RECORD_LIMIT
    with np.load(folder / "certificates.npz", allow_pickle=False) as archive:
        kinds = {name: archive[name].dtype for name in archive.files}
    assert kinds["label"] == kinds["prediction"] == kinds["status"] == np.uint8
    assert kinds["radius"] == kinds["margin"] == kinds["attack_radius"] == np.float32
    assert "index" not in kinds
    # Eight images of 3,072 bytes.
    assert records.read_examples(folder)["most_images"].shape == (4, 3, 32, 32)
    assert records.read_examples(folder)["least_index"].shape == (4,)
    environment = records.read_environment(folder)
    assert environment["command"] == "acert train --data-dir DATA --out x"
    for path in folder.iterdir():
        assert b"private" not in path.read_bytes()
        assert b"my/data" not in path.read_bytes()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("acert train --data-dir=my/data", "acert train --data-dir=DATA"),
        ("acert train --data-dir", "acert train --data-dir"),
        (None, None),
    ],
)
def test_places_are_taken_out_of_the_command(tmp_path, command, expected):
    run = made_run(tmp_path / "a", TRAINING, environment={"command": command})
    folder = publish(run, tmp_path / "results")
    assert records.read_environment(folder)["command"] == expected


def test_labels_above_a_byte_and_chosen_samples_come_back(tmp_path):
    label = np.arange(200) * 3
    index = np.arange(200)[::-1]
    columns = {"label": label, "prediction": label, "index": index}
    run = made_run(tmp_path / "a", TRAINING, samples=200, certificates=columns)
    found = read_record(publish(run, tmp_path / "results")).certificates
    np.testing.assert_array_equal(found.label, label)
    np.testing.assert_array_equal(found.index, index)
    assert found.label.dtype == found.index.dtype == np.int64
    records.write_certificates(run, found.columns | {"label": label - 1, "prediction": label - 1})
    assert records.read_certificates(run)["label"][0] == -1


def test_an_older_record_is_replaced_and_another_one_refused(run, tmp_path):
    results = tmp_path / "results"
    first = publish(run, results)
    records.write_environment(run, records.read_environment(run) | {"seconds": 1.0})
    assert publish(run, results) == first
    assert read_record(first).environment["seconds"] == 1.0
    assert [path.name for path in results.iterdir()] == ["a"]
    other = made_run(tmp_path / "b", TRAINING, seed=1)
    with pytest.raises(RunError, match=r"record of another run: `settings.seed` is 0 there and 1"):
        publish(other, results, name="a")


def test_an_unfinished_run_is_refused(run, tmp_path):
    (run / "model.safetensors").unlink()
    with pytest.raises(RunError, match="is not finished: it cannot be published"):
        publish(run, tmp_path / "results")


@pytest.mark.parametrize("limit", ["RECORD_LIMIT", "STORE_LIMIT"])
def test_too_large_a_record_is_refused_and_leaves_nothing(run, tmp_path, monkeypatch, limit):
    monkeypatch.setattr(publication, limit, 20_000)
    with pytest.raises(RunError, match=r"must be at most 20 kB; got \d+ kB"):
        publish(run, tmp_path / "results")
    assert [*(tmp_path / "results").iterdir()] == []


def test_a_record_without_extras(tmp_path):
    run = made_run(tmp_path / "a", TRAINING, environment={"gpu": None})
    (run / "examples.npz").unlink()
    record = read_record(publish(run, tmp_path / "results"))
    assert record.root_steps is None
    assert record.hardware == "a CPU"


def test_damaged_records_are_named_and_skipped(run, tmp_path):
    results = tmp_path / "results"
    good = publish(run, results)
    shutil.copytree(good, results / "broken")
    (results / "broken" / "root-steps.json").write_text(json.dumps({"samples": 1}))
    shutil.copytree(good, results / "cut")
    (results / "cut" / "certificates.npz").write_bytes(b"PK")
    (results / ".draft.tmp").mkdir()
    (results / ".draft.tmp" / "config.json").write_text("{}")
    found, complaints = read_records(results)
    assert [record.folder for record in found] == [good]
    assert len(complaints) == 2
    assert "root-steps.json is damaged: KeyError" in complaints[0]
    assert "certificates.npz is damaged" in complaints[1]
    assert read_records(tmp_path / "nothing") == ([], [])


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("metrics.jsonl", '"seconds"', '"sekonds"', "metrics.jsonl is damaged: KeyError"),
        ("metrics.jsonl", '"step": ', '"step": 0, "a": ', "metrics.jsonl is damaged: ZeroDivision"),
        ("env.json", '"seconds": ', '"seconds": "a", "was": ', "env.json is damaged: `seconds`"),
        ("root-steps.json", '"schema": 1', '"schema": 2', "root-steps.json has schema 2, this"),
    ],
)  # fmt: skip
def test_records_whose_figures_no_table_could_show_are_named(run, tmp_path, file, old, new, told):
    folder = publish(run, tmp_path / "results")
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    found, complaints = read_records(tmp_path / "results")
    assert found == []
    assert told in complaints[0]


@pytest.mark.parametrize(
    "kept", [slice(0), slice(10), slice(1, None), slice(None, None, -1)], ids=repr
)
def test_figures_of_other_than_all_epochs_are_named(run, tmp_path, kept):
    folder = publish(run, tmp_path / "results")
    records.write_metrics(folder, records.read_metrics(folder)[kept])
    found, complaints = read_records(tmp_path / "results")
    assert found == []
    assert "metrics.jsonl is damaged: it must hold every epoch from 1 to 200 once" in complaints[0]


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("status", 9, "`status` must be from 0 to 3"),
        ("status", 0, "`radius` must be 0 where `status` says misclassified"),
        ("label", 0, "`prediction` must be the label unless `status` says misclassified"),
    ],
)
def test_columns_that_contradict_each_other_are_named(run, tmp_path, column, value, told):
    folder = publish(run, tmp_path / "results")
    columns = records.read_certificates(folder)
    columns[column][5] = value  # a sample that is classified rightly, with label 5
    records.write_certificates(folder, columns)
    found, complaints = read_records(tmp_path / "results")
    assert found == []
    assert f"certificates.npz is damaged: {told}; not so in row 5" in complaints[0]


def test_radii_that_are_none_are_named(run, tmp_path):
    folder = publish(run, tmp_path / "results")
    columns = records.read_certificates(folder)
    records.write_certificates(folder, columns | {"radius": np.full(len(columns["label"]), np.nan)})
    found, complaints = read_records(tmp_path / "results")
    assert found == []
    assert "certificates.npz is damaged: `radius` must be in [0, " in complaints[0]


# -- root steps ---------------------------------------------------------------------------


@pytest.mark.parametrize("elide", [True, False])
def test_root_steps_count_every_sample_once(elide):
    from acert import data

    split = data.load("digits").train
    model = load_model("digits-acert").train()
    found = root_steps(model, split, max_radius=0.3, samples=100, batch_size=40, elide=elide)
    assert model.training
    counted = sum(count for _, count in found.proven)
    assert found.samples == 100
    assert counted == sum(count for _, count in found.arrived)
    assert found.misclassified + found.certified_to_max + counted == 100
    assert counted > 30
    # A point arrives before the bracket closes around it.
    mean = [sum(s * c for s, c in part) / counted for part in (found.arrived, found.proven)]
    assert 2 < mean[0] < mean[1] < 12
    assert RootSteps.from_json(json.loads(json.dumps(vars(found)))) == found


def test_root_steps_without_roots():
    from acert import data

    split = data.load("digits").train
    found = root_steps(load_model("digits-acert"), split, max_radius=1e-7, samples=20)
    assert found.arrived == found.proven == ()
    assert found.misclassified + found.certified_to_max == 20
