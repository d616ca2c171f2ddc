"""A certification that is stopped goes on from where it was, if it is still the same one."""

import numpy as np
import pytest
import torch
from torch import nn

from acert import records, unfinished
from acert.cli import main
from acert.data import Split
from acert.errors import RunError
from acert.evaluation import certify
from acert.experiments.run import record_certification

BATCH = 8


class Net(nn.Module):
    """Two layers; `slope` is what no state dict tells."""

    def __init__(self, slope=0.0):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.slope = slope

    def forward(self, x):
        return self.last(nn.functional.leaky_relu(self.first(x), self.slope))


@pytest.fixture(autouse=True)
def at_every_batch(monkeypatch):
    monkeypatch.setattr(unfinished, "_EVERY", 0.0)


def made(slope=0.0):
    torch.manual_seed(3)
    model = Net(slope)
    images = torch.rand(30, 6)
    labels = model(images).argmax(1)
    labels[::7] += 1
    return model, Split(images=images, labels=labels % 3)


def proven(model, split, folder, *, stop_after=None, max_radius=0.2, **rest):
    """The certificates, None if they were stopped, and how many samples were done before."""
    done = []

    def progress(count):
        done.append(count)
        if stop_after is not None and count >= stop_after:
            raise KeyboardInterrupt

    try:
        found = certify(
            model, split, max_radius=max_radius, batch_size=BATCH, folder=folder,
            progress=progress, **rest,
        )  # fmt: skip
    except KeyboardInterrupt:
        found = None
    before = done[0] - min(BATCH, len(split) - (done[0] - BATCH)) if done else len(split)
    return found, before


def same(one, other):
    return all(
        np.array_equal(value, other.columns[name], equal_nan=isinstance(value, np.ndarray))
        if isinstance(value, np.ndarray)
        else value == other.columns[name]
        for name, value in one.columns.items()
    )


@pytest.mark.parametrize("stop_after", [8, 16, 30])
def test_it_goes_on_and_ends_as_if_it_had_not_been_stopped(tmp_path, stop_after):
    model, split = made()
    whole, before = proven(model, split, None)
    assert before == 0
    assert proven(model, split, tmp_path, stop_after=stop_after) == (None, 0)
    assert records.is_unfinished(tmp_path)
    found, before = proven(model, split, tmp_path)
    assert before == stop_after
    assert same(found, whole)
    record_certification(tmp_path, found, Split(images=split.images, labels=split.labels))
    assert not records.is_unfinished(tmp_path)


def changed_weight(model, split):
    with torch.no_grad():
        model.last.bias[0] += 1e-7
    return model, split, {}


def changed_image(model, split):
    images = split.images.clone()
    images[-1, -1] += 1e-6
    return model, Split(images=images, labels=split.labels), {}


def changed_label(model, split):
    return model, Split(images=split.images, labels=split.labels.roll(1)), {}


def changed_code(model, split):
    model.slope = 0.1
    return model, split, {}


def changed_question(model, split):
    return model, split, {"max_radius": 0.21}


def changed_meaning(model, split):
    return model, split, {"arithmetic": "float32"}


@pytest.mark.parametrize(
    "change",
    [changed_weight, changed_image, changed_label, changed_code, changed_question, changed_meaning],
)
def test_another_certification_starts_anew(tmp_path, change):
    model, split = made()
    proven(model, split, tmp_path, stop_after=16)
    model, split, rest = change(model, split)
    found, before = proven(model, split, tmp_path, **rest)
    assert before == 0
    assert same(found, proven(model, split, None, **rest)[0])


@pytest.mark.parametrize("damage", [lambda content: content[:100], lambda content: b"", "column"])
def test_a_damaged_file_is_as_none(tmp_path, damage):
    model, split = made()
    proven(model, split, tmp_path, stop_after=16)
    path = records.unfinished_file(tmp_path)
    if damage == "column":
        columns = dict(np.load(path))
        columns["status"] = columns["status"][:-1]
        np.savez(path, **columns)
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RunError, match="damaged"):
        records.read_unfinished(path)
    found, before = proven(model, split, tmp_path)
    assert before == 0
    assert same(found, proven(model, split, None)[0])


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path):
    model, split = made()
    found, _ = proven(model, split, tmp_path / "no" / "such" / "folder")
    assert same(found, proven(model, split, None)[0])


def test_a_short_one_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(unfinished, "_EVERY", 60.0)
    model, split = made()
    proven(model, split, tmp_path, stop_after=16)
    assert not records.is_unfinished(tmp_path)


def test_the_command_goes_on(tmp_path, monkeypatch, capsys):
    calls = []
    plain = unfinished.Unfinished.keep

    def stop(self, parts):
        plain(self, parts)
        calls.append(len(parts))
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(unfinished.Unfinished, "keep", stop)
    words = ["certify", "digits-acert", "--out", str(tmp_path), "--batch-size", "64"]
    assert main(words) == 130
    assert "the same command goes on from there" in capsys.readouterr().err
    assert main(words) == 0
    # Of 359 samples 128 were kept, in one part; the others are four batches.
    assert calls == [1, 2, 2, 3, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        records.CERTIFICATES, records.EXAMPLES,
    ]  # fmt: skip
