"""Files from strangers: bombs, lies, links out of the folder and text that drives a terminal."""

import io
import json
import math
import os
import pickle
import shutil
import sys
import tracemalloc
import zipfile
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from tests.made_records import made_run
from tests.made_runs import make_run

import acert
from acert import cli, data, records
from acert.data import tinyimagenet
from acert.errors import AcertError, DataError, InvalidInput, RunError
from acert.experiments.budget import measured
from acert.experiments.paper.publication import publish, read_record
from acert.experiments.paper.reproduction import jobs, seconds_needed
from acert.experiments.paper.root_steps import RootSteps
from acert.experiments.paper.rows import selected
from acert.experiments.run import resume_run
from acert.experiments.sweeps.plan import make_plan
from acert.report import collect
from acert.untrusted import (
    check_header,
    opened_zip,
    parsed_json,
    read_member,
    read_npz,
    read_text,
    shown,
    size_limit,
)
from acert.zoo import _WEIGHTS, load_model


@pytest.fixture
def run(tmp_path):
    """A copy of the shipped run."""
    return shutil.copytree(_WEIGHTS / "digits-acert", tmp_path / "run")


def change_config(run, change):
    config = json.loads((run / "config.json").read_text())
    change(config)
    (run / "config.json").write_text(json.dumps(config))


def npz_of(path, **arrays):
    np.savez_compressed(path, **arrays)
    return path


@contextmanager
def little_memory(most=4_000_000):
    """Fails if Python asks for more than that meanwhile."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


# -- code ---------------------------------------------------------------------------------


EVIL = "import pathlib; pathlib.Path('hit').touch()\ndef net(shape, classes): pass\n"


@pytest.mark.parametrize(
    "words",
    [
        ["certify", "run"],
        ["train", "--resume", "run"],
        ["export", "run", "--to", "x.onnx"],
        ["report", "run"],
    ],
)
def test_a_config_imports_nothing(run, tmp_path, monkeypatch, capsys, words):
    """The module that it names lies where `--model` would find it."""

    def name_a_factory(config):
        config["experiment"]["network"]["name"] = "acert_evil:net"

    change_config(run, name_a_factory)
    (tmp_path / "acert_evil.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(words) == 2
    if words[0] != "report":
        assert "needs its own model again: --model acert_evil:net" in capsys.readouterr().err
    with pytest.raises(InvalidInput, match=r"`model` must be given .* made with acert_evil:net"):
        load_model(run)
    with pytest.raises(AcertError):
        resume_run(run)
    assert "acert_evil" not in sys.modules
    assert not (tmp_path / "hit").exists()


def test_a_config_builds_classes_of_one_list_only(run):
    for name in ("os.system", "Path", "AcertError", ["Settings"], {"class": "Brent"}, None):
        change_config(run, lambda config, name=name: config["experiment"].update({"class": name}))
        with pytest.raises(RunError, match=r"config\.json.*(unknown class|names no experiment)"):
            load_model(run)


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_nothing_in_an_archive_is_unpickled(run, tmp_path):
    column = np.array([Touch(tmp_path / "hit")], dtype=object)
    np.savez(run / records.CERTIFICATES, radius=column, schema=np.int64(1))
    with pytest.raises(RunError, match="radius cannot be read: it holds pickled objects"):
        records.read_certificates(run)
    assert not (tmp_path / "hit").exists()


# -- sizes --------------------------------------------------------------------------------


def test_a_zip_bomb_takes_no_memory(tmp_path, monkeypatch):
    """Ten thousand times smaller packed than declared, all of it true."""
    path = npz_of(tmp_path / "bomb.npz", x_train=np.zeros(50_000_000, np.uint8))
    assert path.stat().st_size < 100_000
    monkeypatch.setenv("ACERT_MAX_BYTES", "1000000")
    with pytest.raises(ValueError, match="declares 50000128 bytes, more than the 1000000 allowed"):
        read_npz(path)
    with pytest.raises(DataError, match=r"bomb\.npz: .*set ACERT_MAX_BYTES=50000128"):
        data.load("npz", data_dir=path)
    monkeypatch.setenv("ACERT_MAX_BYTES", "50000128")
    assert read_npz(path)["x_train"].size == 50_000_000


def test_many_arrays_count_together(tmp_path, monkeypatch):
    monkeypatch.setenv("ACERT_MAX_BYTES", "5000")
    path = npz_of(tmp_path / "a.npz", **{f"a{i}": np.zeros(1000, np.uint8) for i in range(9)})
    with pytest.raises(ValueError, match="declares 10152 bytes, more than the 5000 allowed"):
        read_npz(path)
    assert len(read_npz(path, ["a1", "missing"])) == 1


@pytest.mark.parametrize("value", ["", "many", "-1", "1e9", "٣"])
def test_a_limit_is_a_number(monkeypatch, value):
    monkeypatch.setenv("ACERT_MAX_BYTES", value)
    with pytest.raises(InvalidInput, match="`ACERT_MAX_BYTES` must be a whole number of bytes"):
        size_limit()


def test_weights_above_the_limit_are_not_opened(run, monkeypatch):
    monkeypatch.setenv("ACERT_MAX_BYTES", "1000")
    with pytest.raises(RunError, match="more than the 1000 allowed"):
        load_model(run)


def test_a_config_cannot_ask_for_more_than_its_weights(run):
    def widen(config):
        config["experiment"]["network"]["width"] = 2_000_000

    change_config(run, widen)
    with pytest.raises(RunError, match=r"model\.safetensors does not fit the model"):
        load_model(run)


def test_nor_can_one_that_goes_on(run):
    def widen(config):
        config["experiment"]["network"]["width"] = 20_000

    change_config(run, widen)
    (run / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"the network of the config is too large: it declares \d+"):
        resume_run(run)


def test_a_safetensors_header_that_lies_is_refused(run):
    content = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + content[8:])
    with pytest.raises(RunError, match=r"model\.safetensors is missing or damaged"):
        load_model(run)


def test_a_long_header_of_tensors_is_not_parsed(run, monkeypatch):
    weights = run / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[:8] = (2000).to_bytes(8, "little")
    weights.write_bytes(content)
    monkeypatch.setenv("ACERT_MAX_BYTES", str(1024 * 1999))
    with pytest.raises(ValueError, match="header declares 2000 bytes; set ACERT_MAX_BYTES=2048000"):
        check_header(weights)
    with pytest.raises(RunError, match=r"model\.safetensors is missing or damaged"):
        load_model(run)


def test_a_safetensors_file_of_the_user_is_judged_too(tmp_path):
    from acert.state_dict import read_state_dict

    (tmp_path / "net.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(RunError, match=r"is no safetensors file .*: its header declares 11529215"):
        read_state_dict(tmp_path / "net.safetensors")


def lying(tmp_path, name, content, **fields):
    """A zip of one member whose entry in the table says something else than is true."""
    path = tmp_path / "lie.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
        for field, value in fields.items():
            setattr(archive.getinfo(name), field, value)  # written when the archive is closed
    return path


def test_a_member_cannot_hold_more_than_it_declares(tmp_path):
    """By itself, zipfile would unpack all of it before it looks."""
    path = lying(tmp_path, "a.txt", bytes(50_000_000), file_size=100)
    damage = pytest.raises((ValueError, zipfile.BadZipFile))
    with little_memory(), opened_zip(path) as archive, damage:
        read_member(archive, archive.getinfo("a.txt"))


def test_nor_less(tmp_path):
    path = lying(tmp_path, "a.txt", b"short", file_size=100)
    with opened_zip(path) as archive, pytest.raises(ValueError, match="as many bytes as it decl"):
        read_member(archive, archive.getinfo("a.txt"))


def test_nor_be_larger_than_its_file(tmp_path):
    path = lying(tmp_path, "x.npy", b"short", file_size=2**31, compress_size=2**31)
    with little_memory(), pytest.raises(ValueError, match="declares more bytes than it can hold"):
        read_npz(path)


def test_a_tiny_imagenet_that_is_a_bomb(tmp_path, monkeypatch):
    monkeypatch.setattr(tinyimagenet, "_CLASSES", 2)
    path = lying(tmp_path, "tiny-imagenet-200/wnids.txt", bytes(50_000_000), file_size=9)
    path.rename(tmp_path / "tiny-imagenet-200.zip")
    with little_memory(), pytest.raises(DataError, match=r"200\.zip cannot be read or is damaged"):
        data.load("tinyimagenet", data_dir=tmp_path)


def test_a_long_table_of_contents_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "many.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(100):
            archive.writestr(f"a{number}.npy", b"")
    monkeypatch.setattr("acert.untrusted._TABLE_LIMIT", 4000)
    with pytest.raises(ValueError, match=r"its table of contents declares \d+ bytes"):
        read_npz(path)


def header(text, version=1):
    """The start of an npy file."""
    content = text.encode() + b"\n"
    size = len(content).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + content


@pytest.mark.parametrize(
    "content",
    [
        # Items without a size, as many as one likes.
        header("{'descr': '|S0', 'fortran_order': False, 'shape': (2000000000,)}"),
        header("{'descr': '|V0', 'fortran_order': False, 'shape': (2000000000,)}"),
        # A header as long as the file.
        header(" " * 40_000_000, version=2),
        # Two lies that make a truth.
        header("{'descr': '|u1', 'fortran_order': False, 'shape': (-1, -8)}") + bytes(8),
        header("(" * 5000),
        header("-" * 9000 + "1"),
    ],
)
def test_headers_of_arrays_that_lie(tmp_path, content):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", content)
    with little_memory(), pytest.raises(ValueError, match="x cannot be read"):
        read_npz(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_radius", np.zeros(3)),
        ("max_radius", "0.1"),
        ("domain", 0.0),
        ("domain", np.zeros(3)),
        ("arithmetic", 3),
        ("violations", np.zeros(2, np.int64)),
        ("elide", "yes"),
    ],
)
def test_certificates_of_another_form_are_named(tmp_path, name, value):
    folder = make_run(tmp_path / "run")
    found = read_npz(folder / records.CERTIFICATES)
    np.savez(folder / records.CERTIFICATES, **(found | {name: np.asarray(value)}))
    with pytest.raises(RunError, match=rf"certificates\.npz is damaged: `{name}` must not be of"):
        records.read_certificates(folder)


@pytest.mark.parametrize("dtype", ["U3", "complex64", [("a", "f4")]])
def test_columns_of_another_type_are_named(tmp_path, dtype):
    folder = make_run(tmp_path / "run")
    found = read_npz(folder / records.CERTIFICATES)
    found["margin"] = np.zeros(len(found["margin"]), dtype)
    np.savez(folder / records.CERTIFICATES, **found)
    with pytest.raises(RunError, match=r"certificates\.npz is damaged: `margin` must not be of"):
        records.read_certificates(folder)
    np.savez(folder / records.CERTIFICATES, **(found | {"schema": np.zeros(2, np.int64)}))
    with pytest.raises(RunError, match=r"certificates\.npz is damaged: it names no schema"):
        records.read_certificates(folder)


@pytest.mark.parametrize("name", ["env.json", "state.safetensors"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    run = make_run(tmp_path / "run")
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    (run / "state.previous.safetensors").touch()
    with pytest.raises(RunError, match=rf"{name}.* not a regular file"):
        records.read_environment(run) if name == "env.json" else records.read_state(run)


# -- numbers ------------------------------------------------------------------------------

HUGE = 10**400  # JSON has whole numbers of any length


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("data", "std"), [0.0], "`std` must be"),
        (("data", "mean"), [HUGE], "`mean` must be"),
        (("data", "mean"), [], "`mean` must be"),
        (("data", "input_shape"), [1, HUGE, 8], "what it says of the data is incomplete"),
        (("data", "input_shape"), [-1, 8, 8], "what it says of the data is incomplete"),
        (("data", "classes"), 5, "what it says of the data is incomplete"),
        (("experiment", "network", "width"), HUGE, "`width` must be"),
        (("experiment", "network", "width"), 10**12, "its network cannot be built"),
        (("experiment", "settings", "epochs"), HUGE, r"`epochs` must be below 2\^63"),
        (("experiment", "settings", "domain"), [0, HUGE], "`domain` must be"),
    ],
)
def test_numbers_of_a_config_that_nothing_can_be_built_with(run, place, value, message):
    def put(config):
        for key in place[:-1]:
            config = config[key]
        config[place[-1]] = value

    change_config(run, put)
    with pytest.raises((RunError, InvalidInput), match=message):
        load_model(run)


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"step": -(10**12)}, "step"),
        ({"step": 10**12}, "step"),
        ({"step": "1"}, "step"),
        ({"rows": HUGE}, "rows"),
        ({"samples": True}, "samples"),
        ({"elapsed": HUGE}, "elapsed"),
        ({"seconds": None}, "seconds"),
        ({"pending": {"epoch": [1]}}, "pending"),
        ({"pending": 5}, "pending"),
    ],
)
def test_facts_of_a_state_that_no_run_can_have(tmp_path, facts, name):
    """A step far below 0 would be trained from for ever."""
    samples = torch.rand(8, 2), torch.tensor([0, 1] * 4)

    def train(resume):
        acert.train(
            acert.models.mlp(2, [3], 2), samples, method=acert.Acert(), max_radius=0.1, epochs=2,
            out=tmp_path / "run", resume=resume, progress=False,
        )  # fmt: skip

    train(resume=False)
    (tmp_path / "run" / "model.safetensors").unlink()
    state = records.read_state(tmp_path / "run")
    records.write_state(tmp_path / "run", state.arrays, state.facts | facts)
    with pytest.raises(RunError, match=rf"is damaged: `{name}` cannot be .* in a run of 2 steps"):
        train(resume=True)


def test_figures_too_large_for_a_float_are_left_out_or_named(tmp_path):
    folder = make_run(tmp_path / "run")
    rows = records.read_metrics(folder)
    records.write_metrics(folder, [row | {"loss": HUGE} for row in rows])
    assert "loss" not in collect([folder]).runs[0].history
    (folder / "metrics.jsonl").write_text('{"epoch": 1, "loss": NaN}')
    with pytest.raises(RunError, match="cannot hold a figure that is not finite"):
        records.write_metrics(tmp_path, records.read_metrics(folder))


def test_an_epoch_that_no_array_holds_is_damage(tmp_path):
    folder = make_run(tmp_path / "run")
    make_run(tmp_path / "good", seed=1)
    (folder / "metrics.jsonl").write_text(f'{{"epoch": {HUGE}, "loss": 1}}')
    (complaint,) = collect([tmp_path]).complaints
    assert complaint.endswith("metrics.jsonl is damaged in line 1: no epoch")


def test_a_radius_of_a_plan_that_no_float_holds_is_damage(tmp_path):
    make_plan().record(tmp_path)
    plan = records.read_sweep(tmp_path)
    plan["runs"][0]["certify_to"] = HUGE
    records.write_sweep(tmp_path, plan)
    assert "sweep.json is damaged" in make_plan().placed(tmp_path).notes[0]


def test_a_command_with_half_a_quote_is_not_published(tmp_path):
    training = selected(["mnist"])[0].training
    run = made_run(tmp_path / "run", training, environment={"command": "acert train 'x"})
    assert records.read_environment(publish(run, tmp_path / "results"))["command"] is None
    run = made_run(tmp_path / "other", training, environment={"seconds": HUGE})
    with pytest.raises(RunError, match=r"env\.json is damaged: `seconds` must be a number"):
        read_record(run)


@pytest.mark.parametrize("seconds", [HUGE, "soon", None, [1]])
def test_a_run_whose_epochs_have_no_times_was_not_measured(tmp_path, seconds):
    job = jobs(selected(["mnist"])[:1], [])[0]
    run = made_run(tmp_path / "run", job.training)
    rows = [row | {"seconds": seconds} for row in records.read_metrics(run)]
    records.write_metrics(run, rows[:2])
    assert seconds_needed(job, [], hardware="a GPU", run=run) is None


def test_root_steps_without_end_are_damage(tmp_path):
    run = made_run(tmp_path / "run", selected(["mnist"])[0].training)
    (run / "root-steps.json").write_text('{"schema": Infinity}')
    with pytest.raises(RunError, match=r"root-steps\.json is damaged: OverflowError"):
        publish(run, tmp_path / "results")


def test_times_that_are_text_measure_nothing(tmp_path):
    run = made_run(
        tmp_path / "run", selected(["mnist"])[0].training,
        environment={"certification_seconds": "soon"},
    )  # fmt: skip
    assert measured(run) is None
    records.write_environment(run, {"device": "cpu", "seconds": math.inf})
    assert measured(run) is None


def test_a_plan_whose_names_are_lists_is_made_anew(tmp_path):
    (tmp_path / records.SWEEP).write_text('{"schema": 1, "runs": [{"name": ["a"]}]}')
    make_plan().record(tmp_path)
    assert [run["name"] for run in records.read_sweep(tmp_path)["runs"]] == ["acert-k0-s0"]


@pytest.mark.parametrize("shape", [None, [1, 0, 8], [1, True, 8], "8"])
def test_an_export_needs_the_shape_of_the_inputs(run, tmp_path, monkeypatch, capsys, shape):
    """A module of the user's own is loaded without what the config says of the data."""
    change_config(run, lambda config: config["data"].update(input_shape=shape))
    (tmp_path / "acert_mine.py").write_text(
        "import acert\nmodel = acert.load_model('digits-acert')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["export", str(run), "--model", "acert_mine:model", "--to", str(tmp_path / "x.onnx")]
    assert cli.main(words) == 2
    assert "config.json is damaged: `input_shape` cannot be" in capsys.readouterr().err


# -- state dicts --------------------------------------------------------------------------


def pt_file(path, value, **kind):
    torch.save(value, path, **kind)
    return path


def packed_pt(path, content, method=zipfile.ZIP_STORED):
    """A .pt file around a pickle of one's own."""
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("net/data.pkl", content)
        archive.writestr("net/version", b"3\n")
    return path


def shadowed_pt(path, name):
    with zipfile.ZipFile(packed_pt(path, b"\x80\x02}."), "a") as archive:
        archive.writestr(name, b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.")


def test_a_state_dict_comes_back(tmp_path):
    from acert.state_dict import read_state_dict

    wanted = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()
    wanted["parameter"] = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    found = read_state_dict(pt_file(tmp_path / "net.pth", wanted))
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_state_dicts_that_are_something_else(tmp_path):
    from acert.state_dict import read_state_dict

    hit = tmp_path / "hit"
    path = tmp_path / "net.pt"
    weights = {"weight": torch.ones(2)}
    cases = [
        (lambda: pt_file(path, {"a": Touch(hit)}), "names .*open, which a state dict"),
        (lambda: packed_pt(path, pickle.dumps({}, protocol=2)[:-1]), "pickle exhausted"),
        (lambda: packed_pt(path, pickle.dumps(Touch(hit), protocol=4)), "STACK_GLOBAL"),
        # PyTorch's own list has this one, and would take the memory.
        (lambda: packed_pt(path, b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R."),
         "names builtins bytearray"),
        (lambda: packed_pt(path, b"\x80\x02}.", zipfile.ZIP_DEFLATED), "are compressed"),
        (lambda: pt_file(path, torch.ones(2)), "it holds a Tensor, not a state dict"),
        (lambda: pt_file(path, {"model": weights}), "under 'model' seems to be one: save that"),
        (lambda: pt_file(path, {"epoch": 3, "model": weights}), "under 'model' seems to be one"),
        (lambda: pt_file(path, {**weights, "epoch": 3}), "only; got int under 'epoch'"),
        (lambda: pt_file(path, weights, _use_new_zipfile_serialization=False), "not a zip file"),
        (lambda: zipfile.ZipFile(path, "w").close(), "it does not hold one data.pkl"),
        # PyTorch's reader would load the second one, which nobody has looked at.
        (lambda: shadowed_pt(path, "net/DATA.PKL"), "two members of the same name"),
        (lambda: shadowed_pt(path, "net/more/Data.pkl"), "does not hold one data.pkl"),
    ]  # fmt: skip
    for make, message in cases:
        path.unlink(missing_ok=True)
        make()
        with pytest.raises(RunError, match=rf"net\.pt is no state dict .*: .*{message}"):
            read_state_dict(path)
    assert not hit.exists()


def test_a_state_dict_above_the_limit_is_not_opened(tmp_path, monkeypatch):
    from acert.state_dict import read_state_dict

    path = pt_file(tmp_path / "net.pt", {"weight": torch.zeros(1000)})
    monkeypatch.setenv("ACERT_MAX_BYTES", "1000")
    with pytest.raises(RunError, match="more than the 1000 allowed"):
        read_state_dict(path)


# -- text ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [51, 100_000])
def test_deep_json_is_refused(run, depth):
    text = "[" * depth + "]" * depth
    with pytest.raises(ValueError, match="nested more than 50 deep"):
        parsed_json(text)
    (run / "config.json").write_text('{"schema": 1, "experiment": ' + text + "}")
    with pytest.raises(RunError, match=r"config\.json is damaged: it is nested more than 50 deep"):
        load_model(run)


def test_long_text_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("ACERT_MAX_BYTES", str(1024 * 100))
    (tmp_path / "long.json").write_text("1" * 101)
    with pytest.raises(ValueError, match="more than 100 bytes; set ACERT_MAX_BYTES=103424"):
        read_text(tmp_path / "long.json")
    monkeypatch.setenv("ACERT_MAX_BYTES", "103424")
    assert len(read_text(tmp_path / "long.json")) == 101


def test_text_of_a_file_cannot_drive_the_terminal(run, capsys):
    def sneak(config):
        config["experiment"]["class"] = "\x1b[2J\x1b]0;owned\x07Evil\u202e"

    change_config(run, sneak)
    assert cli.main(["certify", str(run), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "Evil" in said
    assert "\x1b" not in said
    assert "\x07" not in said
    assert "\u202e" not in said


def test_names_of_files_cannot_drive_it_either(tmp_path, capsys):
    assert cli.main(["certify", str(tmp_path / "a\x1b[2Jb")]) == 2
    assert "\x1b" not in capsys.readouterr().err
    assert shown("Größe 3 µm, 日本") == "Größe 3 µm, 日本"


def test_names_of_records_cannot_drive_it_where_they_are_listed(tmp_path, capsys):
    folder = tmp_path / "results" / "a\x1b[2Jb"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{")
    words = ["reproduce", "--results", str(tmp_path / "results")]
    assert cli.main([*words, "--list", "table1", "mnist"]) == 0
    said = capsys.readouterr().out
    assert "skipped: " in said
    assert "\x1b" not in said


def test_text_of_certificates_cannot_either(tmp_path):
    folder = make_run(tmp_path / "run", arithmetic="re\x1b[2Jal")
    assert records.read_certificates(folder)["arithmetic"] == "re[2Jal"
    assert collect([folder]).certification.arithmetic == "re[2Jal"


# -- paths --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_run_does_not_lead_out_of_its_folder(run, tmp_path, name):
    shutil.move(run / name, tmp_path / name)
    (run / name).symlink_to(tmp_path / name)
    with pytest.raises(RunError, match="it leads out of its folder"):
        load_model(run)


def test_records_do_not_either(run, tmp_path):
    outside = npz_of(tmp_path / "private.npz", x=np.zeros(3))
    (run / records.CERTIFICATES).symlink_to(outside)
    with pytest.raises(RunError, match="it leads out of its folder"):
        records.read_certificates(run)


def test_links_inside_a_folder_are_followed(run):
    shutil.move(run / "config.json", run / "real.json")
    (run / "config.json").symlink_to("real.json")
    load_model(run)


@pytest.fixture
def private(tmp_path):
    """A file of the user's, which nobody may read or change."""
    path = tmp_path / "private.txt"
    path.write_text("mine")
    return path


def test_drafts_do_not_write_through_links(tmp_path, private):
    """A stranger's folder may hold them where ours will be written."""
    run = make_run(tmp_path / "run")
    columns = records.read_certificates(run)
    for name in (".certificates.npz.tmp", ".probe.tmp", ".env.json.tmp"):
        (run / name).symlink_to(private)
    records.make_writable(run)
    records.write_certificates(run, columns)
    records.write_environment(run, {})
    assert private.read_text() == "mine"
    assert not (run / records.CERTIFICATES).is_symlink()


def test_a_published_record_takes_nothing_from_outside(tmp_path, private):
    steps = RootSteps(samples=2, misclassified=0, certified_to_max=0, arrived=(), proven=())
    run = made_run(tmp_path / "run", selected(["mnist"])[0].training, steps=steps)
    assert (publish(run, tmp_path / "results") / "root-steps.json").is_file()
    (run / "root-steps.json").unlink()
    (run / "root-steps.json").symlink_to(private)
    with pytest.raises(RunError, match=r"root-steps\.json is damaged: .*leads out of its folder"):
        publish(run, tmp_path / "results")


def test_tables_of_a_data_set_do_not_lead_out_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tinyimagenet, "_CLASSES", 1)
    monkeypatch.setattr(tinyimagenet, "_TEST_COUNT", 1)
    tree = tmp_path / "tiny-imagenet-200"
    (tree / "val" / "images").mkdir(parents=True)
    (tree / "wnids.txt").write_text("n01000000")
    for name in ("../../../private.JPEG", "link.JPEG"):
        (tree / "val" / "val_annotations.txt").write_text(f"{name}\tn01000000\n")
        (tmp_path / "private.JPEG").write_bytes(b"mine")
        (tree / "val" / "images" / "link.JPEG").unlink(missing_ok=True)
        (tree / "val" / "images" / "link.JPEG").symlink_to(tmp_path / "private.JPEG")
        with pytest.raises(DataError, match="it leads out of its folder"):
            data.load_test("tinyimagenet", data_dir=tmp_path)


def test_a_run_does_not_say_where_to_look_for_data(run, tmp_path, capsys):
    """Its folder was not made here, so that `local.json` may be anybody's."""
    text = json.dumps({"schema": 1, "inode": 1, "data_dir": str(tmp_path)})
    (run / records.LOCAL).write_text(text)
    assert cli.main(["certify", str(run), "--device", "cpu"]) == 2
    assert "was made elsewhere, with its data in" in capsys.readouterr().err


def test_events_are_not_written_outside(run, tmp_path):
    (run / "model.safetensors").unlink()
    (run / "events").symlink_to(tmp_path)
    with pytest.raises(RunError, match="events cannot be written: it leads out of its folder"):
        resume_run(run, tensorboard=True)


# -- archives -----------------------------------------------------------------------------


def member(name, content, *, method=zipfile.ZIP_DEFLATED):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        archive.writestr(name, content)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (member("x.npy", b"\x93NUMPY\x01\x00"), "x cannot be read"),
        (member("x.npy", b"junk", method=zipfile.ZIP_BZIP2), "packed in a way that numpy does not"),
        (member("\x1b[2J.npy", b"junk"), r"^\[2J cannot be read"),
    ],
)
def test_members_that_are_no_arrays(tmp_path, content, message):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_npz(tmp_path / "a.npz")
