"""Files from strangers: bombs, lies, links out of the folder and text that drives a terminal."""

import io
import json
import shutil
import zipfile

import numpy as np
import pytest

from acert import cli, data, records
from acert.errors import DataError, InvalidInput, RunError
from acert.untrusted import parsed_json, read_npz, read_text, shown, size_limit
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


def test_a_safetensors_header_that_lies_is_refused(run):
    content = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + content[8:])
    with pytest.raises(RunError, match=r"model\.safetensors is missing or damaged"):
        load_model(run)


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
    monkeypatch.setenv("ACERT_MAX_BYTES", str(256 * 100))
    (tmp_path / "long.json").write_text("1" * 101)
    with pytest.raises(ValueError, match="more than 100 bytes; set ACERT_MAX_BYTES=25856"):
        read_text(tmp_path / "long.json")
    monkeypatch.setenv("ACERT_MAX_BYTES", "25856")
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
