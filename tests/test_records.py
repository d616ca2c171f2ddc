"""The run folder: round trips, atomic writes, and refusals that name the file."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import acert
from acert import records
from acert.errors import InvalidInput, RunError
from acert.radius import Status
from acert.records import certification, tensors

ARRAYS = {
    "model/weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "model/count": np.array(7, dtype=np.int64),
    "empty": np.zeros((0, 3), dtype=np.float32),
    "mask": np.array([True, False]),
}


def certificates(**changes):
    count = 4
    columns = {
        "index": np.arange(count),
        "label": np.array([1, 2, 3, 4]),
        "prediction": np.array([1, 2, 3, 0]),
        "radius": np.array([0.1, 0.01, 1 / 3 / 10, 0.0]),
        "status": np.array([1, 2, 2, 0], dtype=np.uint8),
        "margin": np.array([-3.0, -1.0, -0.5, 0.25], dtype=np.float32),
        "attack_radius": np.full(count, np.nan, dtype=np.float32),
        "max_radius": 0.1,
        "arithmetic": "real",
        "bounds": "crown-ibp",
        "elide": False,
        "domain": (-1.0, 1.0),
    }
    return columns | changes


def equal(found, arrays):
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)


def cut(path, keep=0.5):
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])


# -- the folder ---------------------------------------------------------------------------


def test_no_torch_is_needed_to_read_a_run_folder():
    source = Path(acert.__file__).parent
    # Without the package's own __init__, which imports torch: as a report might load it.
    program = (
        "import sys, types; package = types.ModuleType('acert');"
        f"package.__path__ = [{str(source)!r}]; sys.modules['acert'] = package;"
        "import acert.records; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_create_makes_the_folders_above(tmp_path):
    records.create(tmp_path / "runs" / "one")
    assert (tmp_path / "runs" / "one").is_dir()


def test_create_takes_an_empty_folder_and_one_with_drafts_only(tmp_path):
    (tmp_path / ".config.json.tmp").write_text("{")
    records.create(tmp_path)


def test_create_refuses_a_folder_that_holds_something(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"exists already: choose another$"):
        records.create(tmp_path)


def test_only_a_run_can_be_gone_on_with(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"exists already: choose another$"):
        records.check_free(tmp_path, go_on="this way")
    records.write_config(tmp_path, {})
    with pytest.raises(RunError, match=r"choose another, or go on with it: this way$"):
        records.check_free(tmp_path, go_on="this way")


def test_what_reading_weights_needs_is_named_with_its_command(tmp_path, monkeypatch):
    records.write_weights(tmp_path, {"weight": np.zeros(2, np.float32)})
    monkeypatch.setitem(sys.modules, "safetensors", None)  # importing it fails
    with pytest.raises(RunError, match=r"needs the package safetensors: pip install 'acert\[train"):
        records.read_weights(tmp_path)


def test_create_refuses_a_file(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(RunError, match="exists already"):
        records.create(tmp_path / "run")


def test_create_says_why_a_folder_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match="cannot be made: Not a directory"):
        records.create(tmp_path / "file" / "run")


# -- text files ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (records.write_config, records.read_config),
        (records.write_environment, records.read_environment),
    ],
)
def test_json_comes_back_with_the_schema(tmp_path, write, read):
    write(tmp_path, {"one": [1, 2.5, None], "two": {"three": "four"}})
    assert read(tmp_path) == {"schema": 1, "one": [1, 2.5, None], "two": {"three": "four"}}


def test_local_facts_may_be_missing(tmp_path):
    assert records.read_local(tmp_path) == {}
    assert records.place_of_data(tmp_path) is None


def test_the_place_of_the_data_is_believed_where_the_run_was_made(tmp_path):
    run, moved, copied = tmp_path / "run", tmp_path / "moved", tmp_path / "copied"
    run.mkdir()
    records.write_local(run, {"data_dir": "/data"})
    assert records.place_of_data(run) == "/data"
    run.rename(moved)
    assert records.place_of_data(moved) == "/data"
    shutil.copytree(moved, copied)
    with pytest.raises(RunError, match=r"copied was made elsewhere, with its data in /data: say"):
        records.place_of_data(copied)
    records.write_local(copied, {"data_dir": None})
    assert records.place_of_data(copied) is None
    records.write_local(copied, {"data_dir": 5})
    with pytest.raises(RunError, match=r"local\.json is damaged: `data_dir` must be a path; got 5"):
        records.place_of_data(copied)


def test_a_newer_schema_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"schema": 2}')
    with pytest.raises(RunError, match=r"config\.json has schema 2.*up to 1.*newer acert"):
        records.read_config(tmp_path)


def test_a_folder_without_config_is_no_run_folder(tmp_path):
    with pytest.raises(RunError, match=r"is no run folder: it has no config\.json"):
        records.read_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"schema": 1', "is damaged"),
        (b"[1]", "does not hold an object"),
        (b"{}", "names no schema"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_damaged_config_is_named(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(RunError, match=rf"config\.json.*{message}|config\.json {message}"):
        records.read_config(tmp_path)


def test_metrics_come_back_row_by_row_and_exactly(tmp_path):
    rows = [{"epoch": 1, "loss": 0.1 + 0.2}, {"epoch": 2, "loss": 1e-300, "art": 1 / 3}]
    assert records.read_metrics(tmp_path) == []
    records.write_metrics(tmp_path, rows)
    assert records.read_metrics(tmp_path) == rows
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    records.write_metrics(tmp_path, rows[:1])
    assert records.read_metrics(tmp_path) == rows[:1]


def test_metrics_never_hold_nan(tmp_path):
    with pytest.raises(RunError, match=r"metrics\.jsonl cannot hold a figure that is not finite"):
        records.write_metrics(tmp_path, [{"loss": float("nan")}])


def test_a_damaged_row_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\n{"epoch"\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged in line 2"):
        records.read_metrics(tmp_path)


@pytest.mark.parametrize(
    ("there", "here", "expected"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 1}}, None),
        ({"a": [1, 2]}, {"a": (1, 2)}, None),
        ({"a": {"b": 1, "c": 0.0}}, {"a": {"b": 1, "c": 0.25}}, "`a.c` is 0.0 there and 0.25 here"),
        ({"a": 1, "b": 2}, {"a": 2, "b": 3}, "`a` is 1 there and 2 here"),
        ({"a": 1}, {}, '`a` is 1 there and "nothing" here'),
        ({}, {"a": 1}, '`a` is "nothing" there and 1 here'),
        ({"a": {"b": 1}}, {"a": 3}, '`a` is {"b": 1} there and 3 here'),
    ],
)
def test_first_difference(there, here, expected):
    assert records.first_difference(there, here) == expected


# -- weights and state --------------------------------------------------------------------


def test_weights_come_back(tmp_path):
    assert not records.is_finished(tmp_path)
    records.write_weights(tmp_path, ARRAYS)
    assert records.is_finished(tmp_path)
    equal(records.read_weights(tmp_path), ARRAYS)


def test_strided_weights_are_stored_in_their_own_order(tmp_path):
    strided = {"weight": np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1)}
    records.write_weights(tmp_path, strided)
    equal(records.read_weights(tmp_path), strided)


def test_equal_weights_give_equal_bytes_in_another_process(tmp_path):
    records.write_weights(tmp_path, ARRAYS)
    program = (
        "import sys; from pathlib import Path; from acert import records;"
        "folder = Path(sys.argv[1]); records.write_weights(folder / 'copy', "
        "dict(reversed(records.read_weights(folder).items())))"
    )
    (tmp_path / "copy").mkdir()
    source = str(Path(acert.__file__).parent.parent)
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        check=True,
        env=os.environ | {"PYTHONPATH": source, "PYTHONHASHSEED": "7"},
    )
    copy = tmp_path / "copy" / "model.safetensors"
    assert copy.read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_missing_weights_say_what_to_do(tmp_path):
    with pytest.raises(RunError, match=r"has no model\.safetensors$"):
        records.read_weights(tmp_path)
    records.write_config(tmp_path, {})
    with pytest.raises(RunError, match=r"not finished; acert train --resume"):
        records.read_weights(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damaged_weights_are_named(tmp_path, damage):
    records.write_weights(tmp_path, ARRAYS)
    path = tmp_path / "model.safetensors"
    if damage == "cut":
        cut(path)
    else:
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    with pytest.raises(RunError, match=r"model\.safetensors is .*damaged"):
        records.read_weights(tmp_path)


def test_tensor_files_are_those_of_safetensors_and_copy_nothing(tmp_path):
    """Every type that a state can hold, also without axes or elements, and out of order."""
    kinds = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
    arrays = {f"a/{kind}": np.arange(6).astype(kind).reshape(2, 3) for kind in kinds}
    arrays |= {"z": np.float32(3.5), "none": np.zeros((0, 4), np.float32), "wide": np.eye(2).T}
    records.write_weights(tmp_path, arrays)
    path = tmp_path / "model.safetensors"
    found = load_file(path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == np.asarray(array).dtype
        assert np.array_equal(found[name], array)
    parts = [np.frombuffer(part, np.uint8) for part in tensors._tensors(arrays, {})[2:]]
    assert any(np.shares_memory(part, arrays["a/int64"]) for part in parts)


@pytest.mark.parametrize("kind", [">f4", "<U2", "complex64", object])
def test_arrays_that_such_a_file_cannot_hold_are_refused(tmp_path, kind):
    with pytest.raises(InvalidInput, match="`odd` must hold numbers of this machine; got"):
        records.write_weights(tmp_path, {"odd": np.zeros(2, kind)})
    assert [*tmp_path.iterdir()] == []


def test_there_is_no_state_before_the_first(tmp_path):
    assert records.read_state(tmp_path) is None


def test_state_keeps_the_one_before(tmp_path):
    records.write_state(tmp_path, ARRAYS, {"step": 1})
    records.write_state(tmp_path, ARRAYS, {"step": 2, "rows": 1, "pending": {"loss": 0.5}})
    state = records.read_state(tmp_path)
    assert state is not None
    equal(state.arrays, ARRAYS)
    assert (state.facts["step"], state.facts["rows"], state.complaint) == (2, 1, None)
    assert state.facts["pending"] == {"loss": 0.5}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "state.previous.safetensors",
        "state.safetensors",
    ]
    records.drop_previous_state(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


@pytest.mark.parametrize("damage", ["cut", "cut to nothing", "flip", "missing", "not ours"])
def test_a_damaged_state_falls_back_to_the_previous_one_and_says_so(tmp_path, damage):
    records.write_state(tmp_path, ARRAYS, {"step": 1})
    records.write_state(tmp_path, ARRAYS, {"step": 2})
    path = tmp_path / "state.safetensors"
    if damage == "cut":
        cut(path)
    elif damage == "cut to nothing":
        cut(path, 0)
    elif damage == "flip":
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    elif damage == "missing":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content.replace(b'"acert"', b'"other"'))
    state = records.read_state(tmp_path)
    assert state is not None
    equal(state.arrays, ARRAYS)
    assert state.facts["step"] == 1
    assert state.complaint is not None
    assert "state.safetensors is" in state.complaint
    assert "going on from state.previous.safetensors, step 1" in state.complaint
    # What is written next must not push the good state out in favour of the damaged one.
    records.write_state(tmp_path, ARRAYS, {"step": 3})
    cut(path)
    again = records.read_state(tmp_path)
    assert again is not None
    assert again.facts["step"] == 1


def test_two_damaged_states_are_refused(tmp_path):
    records.write_state(tmp_path, ARRAYS, {"step": 1})
    records.write_state(tmp_path, ARRAYS, {"step": 2})
    cut(tmp_path / "state.safetensors")
    cut(tmp_path / "state.previous.safetensors")
    with pytest.raises(RunError, match=r"no usable state.*state\.saf.*state\.previous\.saf"):
        records.read_state(tmp_path)


def test_a_state_of_a_newer_schema_is_refused_not_replaced(tmp_path, monkeypatch):
    records.write_state(tmp_path, ARRAYS, {"step": 1})
    monkeypatch.setattr(tensors, "SCHEMA", 2)
    records.write_state(tmp_path, ARRAYS, {"step": 2})
    monkeypatch.setattr(tensors, "SCHEMA", 1)
    with pytest.raises(RunError, match=r"state\.safetensors has schema 2"):
        records.read_state(tmp_path)
    assert (tmp_path / "state.safetensors").is_file()


# -- certificates -------------------------------------------------------------------------


def test_certificates_come_back(tmp_path):
    columns = certificates()
    records.write_certificates(tmp_path, columns)
    found = records.read_certificates(tmp_path)
    assert found.keys() == {*columns, "violations", "images"}
    assert found["images"] == -1
    assert found["violations"] == -1  # no attack was made, or an older acert wrote the file
    records.write_certificates(tmp_path, columns | {"violations": 3})
    assert records.read_certificates(tmp_path)["violations"] == 3
    for name in ("index", "label", "prediction", "status", "margin", "attack_radius"):
        np.testing.assert_array_equal(found[name], columns[name])
    for name in ("max_radius", "arithmetic", "bounds", "elide", "domain"):
        assert found[name] == columns[name]
        assert type(found[name]) is type(columns[name])


def test_stored_radii_are_never_above_the_proven_ones(tmp_path):
    rng = np.random.default_rng(0)
    radius = np.concatenate([rng.random(1000), 10.0 ** rng.uniform(-60, 0, 1000), [0.0]])
    count = len(radius)
    columns = certificates(radius=radius, status=np.full(count, 2), max_radius=1.0)
    for name in ("index", "label", "prediction", "margin", "attack_radius"):
        columns[name] = np.zeros(count)
    records.write_certificates(tmp_path, columns)
    found = records.read_certificates(tmp_path)["radius"]
    assert found.dtype == np.float64
    assert (found <= radius).all()
    ordinary = radius > 1e-30
    assert (found >= radius * (1 - 2.0**-23))[ordinary].all()
    with np.load(tmp_path / "certificates.npz", allow_pickle=False) as archive:
        assert archive["radius"].dtype == np.float32


def test_a_radius_that_reached_the_largest_comes_back_as_that(tmp_path):
    assert Status.CERTIFIED_TO_MAX == certification._TO_MAX
    records.write_certificates(tmp_path, certificates())
    radius = records.read_certificates(tmp_path)["radius"]
    assert radius[0] == 0.1  # which float32 cannot hold
    assert radius[1] < 0.01


def test_missing_certificates_say_what_to_do(tmp_path):
    with pytest.raises(RunError, match=r"certificates\.npz is missing: acert certify"):
        records.read_certificates(tmp_path)


def test_damaged_certificates_are_named(tmp_path):
    records.write_certificates(tmp_path, certificates())
    cut(tmp_path / "certificates.npz")
    with pytest.raises(RunError, match=r"certificates\.npz is damaged"):
        records.read_certificates(tmp_path)


def test_nothing_pickled_is_read(tmp_path):
    np.savez(tmp_path / "certificates.npz", schema=1, index=np.array([{}], dtype=object))
    with pytest.raises(RunError, match=r"certificates\.npz is damaged.*pickled objects"):
        records.read_certificates(tmp_path)


def test_incomplete_certificates_are_refused(tmp_path):
    certification._write_arrays(tmp_path / "certificates.npz", {"index": np.arange(3)})
    with pytest.raises(RunError, match="does not hold arithmetic, attack_radius, bounds"):
        records.read_certificates(tmp_path)
    records.write_certificates(tmp_path, certificates(label=np.arange(3)))
    with pytest.raises(RunError, match=r"columns have the shapes \[\(3,\), \(4,\)\]"):
        records.read_certificates(tmp_path)


def test_examples_come_back(tmp_path):
    arrays = {
        "most_images": np.arange(12, dtype=np.uint8).reshape(3, 4),
        "most_index": np.arange(3),
    }
    records.write_examples(tmp_path, arrays)
    equal(records.read_examples(tmp_path), arrays)
    np.savez(tmp_path / "examples.npz", **arrays)
    with pytest.raises(RunError, match="names no schema"):
        records.read_examples(tmp_path)


# -- writes are atomic --------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_is_named(tmp_path, monkeypatch, call):
    records.write_config(tmp_path, {"value": "old"})
    before = (tmp_path / "config.json").read_bytes()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "write":
        monkeypatch.setattr(Path, "open", full)
    elif call == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(Path, "replace", full)
    expected = rf"config\.json could not be written to {tmp_path}: No space left on device"
    with pytest.raises(RunError, match=expected):
        records.write_config(tmp_path, {"value": "new"})
    monkeypatch.undo()
    assert (tmp_path / "config.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_reader_never_sees_half_a_file(tmp_path, monkeypatch):
    """Whatever is in place while the new content is being written is the old content."""
    records.write_config(tmp_path, {"value": "old"})
    seen = []
    true_fsync = os.fsync

    def look(handle):
        seen.append(json.loads((tmp_path / "config.json").read_text())["value"])
        true_fsync(handle)

    monkeypatch.setattr(os, "fsync", look)
    records.write_config(tmp_path, {"value": "new"})
    # Once for the file, before its rename, and once for the folder, after it.
    assert seen == ["old", "new"]


@pytest.mark.parametrize("line", ["5", "[1]", "null", '"text"'])
def test_a_row_that_is_no_object_is_damage(tmp_path, line):
    (tmp_path / records.METRICS).write_text(line + "\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged in line 1"):
        records.read_metrics(tmp_path)


def test_several_processes_try_a_folder_at_once(tmp_path):
    """A name in common would be removed by one while another looks for it."""
    stop = threading.Barrier(4)
    failures = []

    def tries() -> None:
        stop.wait()
        for _ in range(200):
            try:
                records.make_writable(tmp_path / "run")
            except RunError as error:
                failures.append(error)

    threads = [threading.Thread(target=tries) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not any((tmp_path / "run").iterdir())
