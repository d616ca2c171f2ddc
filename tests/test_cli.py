"""The command line: what is printed, written and refused, as its users meet it."""

import io
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import acert
from acert import cli, data, metrics, records, zoo
from acert.cli import certify as certify_verb
from acert.cli import train as train_verb
from acert.cli.flags import counter
from acert.cli.parser import parsed, verbs
from acert.experiments.experiment import from_config
from acert.experiments.recipes import recipe, with_epochs

SOURCE = Path(acert.__file__).parents[1]
# One channel wide and two epochs long: seconds, not minutes.
QUICK = ["--epochs", "2", "--set", "network.width=1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACERT_DATA_DIR", raising=False)


@pytest.fixture
def call(capsys):
    """Runs a command; returns status, standard output and standard error."""

    def run(*words):
        status = cli.main([str(word) for word in words])
        return status, *capsys.readouterr()

    return run


def refused(result):
    """The one line of a refusal."""
    status, _, err = result
    assert status == 2
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


# -- train, then certify ------------------------------------------------------------------


def test_torchrun_is_refused_where_processes_would_not_share_the_work(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["sweep", "--out", "runs/x"]) == 2
    assert "torchrun is for train and certify" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [("--set", "radius_schedule=FullRadius"), ("--method", "standard")]
)
def test_nothing_is_said_of_schedules_that_no_epoch_changes(call, flags):
    assert call("train", "--show", "--epochs", "3")[2].startswith("schedules scaled to 3 epochs")
    status, _, err = call("train", "--show", "--epochs", "3", *flags)
    assert (status, err) == (0, "")


def test_epochs_that_are_set_besides_are_told_beside_the_schedules(call):
    status, out, err = call("train", "--show", "--epochs", "3", "--set", "epochs=2")
    assert status == 0
    assert "settings.epochs = 2" in out
    assert err.startswith("schedules scaled to 3 epochs, though `--set` trains 2: the radius")


def test_train_and_certify(call):
    status, out, err = call("train", *QUICK)
    folder = Path("runs/digits-acert-k0-s0")
    assert status == 0
    assert "digits, acert, kappa 0, max_radius" in out
    assert f"acert certify {folder}" in out
    assert "schedules scaled to 2 epochs: the radius rises over 1 epoch" in err
    assert "epoch 2/2" in err
    config = from_config(records.read_config(folder)["experiment"])
    assert config == with_epochs(recipe("digits", "acert", width=1), 2)
    assert records.read_environment(folder)["command"] == f"acert train {' '.join(QUICK)}"

    status, out, err = call("certify", folder, "--radii", "0.01,8/255", "--device", "cpu")
    assert (status, err) == (0, "")
    found = records.read_certificates(folder)
    correct = found["status"] != acert.Status.MISCLASSIFIED
    accuracy = metrics.accuracy(correct)
    acr = metrics.acr(found["radius"], max_radius=config.settings.max_radius)
    lines = out.splitlines()
    assert lines[0] == (
        f"359 test images of digits, max_radius {config.settings.max_radius:g}, ibp bounds, "
        "proven in real arithmetic"
    )
    assert lines[1] == (
        f"Acc {100 * accuracy:.2f}  ACR {100 * acr:.2f}  ART {100 * metrics.art(accuracy, acr):.2f}"
    )
    at = metrics.certified_accuracy(found["radius"], correct, at=8 / 255)
    assert lines[3] == f"certified at 0.03137: {100 * at:.2f} %"
    assert (found["arithmetic"], found["bounds"]) == ("real", "ibp")
    assert len(records.read_examples(folder)["most_images"]) == 16


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A finished run of the command line."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    words = ["train", *QUICK, "--method", "fastibp", "--kappa", "0.5", "--seed", "3"]
    assert cli.main([*words, "--out", str(folder)]) == 0
    return folder


def test_every_flag_reaches_the_experiment(call, monkeypatch):
    seen = {}

    def train_run(experiment, **options):
        seen.update(options, experiment=experiment)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_verb, "train_run", train_run)
    status, _, err = call(
        "train", "--dataset", "cifar10", "--method", "acert", "--kappa", "0.25", "--max-radius",
        "2/255", "--steps", "5", "--batch-size", "64", "--seed", "7", "--device", "cpu",
        "--data-dir", "here", "--out", "there", "--train-on-all", "--tensorboard",
        "--set", "clip_norm=1", "--set", "validate_every=3",
    )  # fmt: skip
    assert status == 130
    assert err == "\nacert: stopped\n"
    experiment = seen["experiment"]
    assert experiment == recipe(
        "cifar10", "acert", kappa=0.25, max_radius=2 / 255, batch_size=64, seed=7, clip_norm=1.0,
        validate_every=3, train_on_all=True, max_steps=5,
    )  # fmt: skip
    assert (seen["out"], seen["data_dir"]) == (Path("there"), Path("here"))
    assert (seen["device"], seen["tensorboard"], seen["model"]) == ("cpu", True, None)
    assert seen["command"][:3] == ["acert", "train", "--dataset"]


def test_names_of_run_folders(call, monkeypatch):
    seen = []

    def train_run(experiment, *, out, **options):
        seen.append(str(out))
        raise KeyboardInterrupt

    monkeypatch.setattr(train_verb, "train_run", train_run)
    call("train", "--method", "acert-fast", "--kappa", "0.25", "--seed", "2")
    call("train", "--dataset", "mnist", "--method", "standard")
    _, out, _ = call("train", "--set", "method=FastIBP")
    assert out.startswith("digits, fastibp, kappa 0")
    assert seen == [
        str(Path("runs/digits-acert-fast-k0.25-s2")),
        str(Path("runs/mnist-standard-k1-s0")),
        str(Path("runs/digits-fastibp-k0-s0")),
    ]


def test_show_prints_what_set_takes(call):
    status, out, _ = call("train", "--dataset", "cifar10", "--method", "fastibp", "--show")
    assert status == 0
    assert "settings.epochs = 200" in out
    assert "settings.learning_rate = StepDecay" in out
    assert "settings.learning_rate.epochs = (120, 140)" in out
    status, out, err = call(
        "train", "--dataset", "cifar10", "--method", "fastibp", "--epochs", "20", "--show"
    )
    assert "settings.learning_rate.epochs = (12, 14)" in out
    assert "the learning rate falls after epoch 12 and 14" in err
    assert not Path("runs").exists()


def test_a_finished_run_is_not_resumed(call, run_folder):
    status, out, err = call("train", "--resume", run_folder, "--device", "cpu")
    assert status == 0
    assert "finished already" in err
    assert "validation: Acc" in out


@pytest.mark.parametrize("rows", ["", '{"epoch": 1, "art": 0.5, "acr": 0.5}\n'])
def test_a_finished_run_that_lost_its_figures_is_still_finished(call, run_folder, rows):
    shutil.copytree(run_folder, "copy")
    Path("copy", records.METRICS).write_text(rows)
    status, out, err = call("train", "--resume", "copy", "--device", "cpu")
    assert status == 0
    assert "finished already" in err
    assert out == "the run is in copy; for its test set: acert certify copy\n"


def test_train_on_all_evaluates_nothing(call):
    status, out, _ = call("train", *QUICK, "--train-on-all", "--out", "all")
    assert status == 0
    assert "validation" not in out
    assert records.read_config(Path("all"))["data"]["validation"] == 0


@pytest.mark.parametrize("method", ["standard", "fastibp"])
def test_tighter_bounds_are_named_where_intervals_prove_little(call, method, monkeypatch):
    whole = data.load_test("digits")
    few = type(whole)(whole.images[:50], whole.labels[:50])
    monkeypatch.setattr(data, "load_test", lambda *_, **__: few)
    assert call("train", "--method", method, *QUICK, "--out", "run")[0] == 0
    for bounds, told in (("ibp", method == "standard"), ("crown", False)):
        monkeypatch.setattr(certify_verb, "_LITTLE", 2.0)  # whatever is proven is
        status, _, err = call("certify", "run", "--bounds", bounds, "--device", "cpu")
        assert status == 0
        assert ("--bounds crown" in err) == told


@pytest.mark.parametrize("bounds", ["ibp", "crown-ibp", "crown"])
@pytest.mark.parametrize("arithmetic", ["real", "float32", "nearest"])
def test_bounds_and_arithmetic_are_named(call, run_folder, bounds, arithmetic, monkeypatch):
    few = 20
    whole = data.load_test("digits")
    monkeypatch.setattr(
        data, "load_test", lambda *_, **__: type(whole)(whole.images[:few], whole.labels[:few])
    )
    words = ["--bounds", bounds, "--arithmetic", arithmetic, "--out", "here", "--batch-size", 7]
    status, out, _ = call("certify", run_folder, "--device", "cpu", *words, "--max-radius", "0.1")
    assert status == 0
    wanted = {
        "real": "proven in real arithmetic",
        "float32": "proven for float32 hardware",
        "nearest": "rounding is not covered",
    }
    first = f"20 test images of digits, max_radius 0.1, {bounds} bounds, {wanted[arithmetic]}"
    assert out.splitlines()[0] == first
    assert [line.split(":")[0] for line in out.splitlines()[2:6]] == [
        "certified at 0.025", "certified at 0.05", "certified at 0.075", "certified at 0.1",
    ]  # fmt: skip
    found = records.read_certificates(Path("here"))
    assert (found["arithmetic"], found["bounds"]) == (arithmetic, bounds)


def test_the_shipped_model_is_certified_into_a_folder_of_yours(call, tmp_path):
    status, _, _ = call("certify", "digits-acert", "--device", "cpu", "--arithmetic", "nearest")
    assert status == 0
    assert records.read_certificates(tmp_path / "runs" / "digits-acert")
    assert not (zoo.run_folder("digits-acert") / records.CERTIFICATES).exists()


def test_certificates_do_not_go_into_the_folder_of_another_run(call, run_folder):
    shutil.copytree(run_folder, "other")
    own = ["--model", "acert.models:cnn7", "--weights", run_folder / records.WEIGHTS]
    own += ["--dataset", "digits", "--max-radius", "0.1"]
    for words in ([run_folder], ["digits-acert"], own):
        message = refused(call("certify", *words, "--out", "other", "--device", "cpu"))
        assert message == "acert: `--out` must not be the folder of another run; got other\n"
    assert not (Path("other") / records.CERTIFICATES).exists()


def test_classes_of_the_test_set_are_those_of_the_run(call):
    def images(root: str, *classes: str) -> None:
        for folder in (Path(root, part, name) for part in ("train", "test") for name in classes):
            folder.mkdir(parents=True)
            for number in range(5):
                Image.new("L", (4, 4), number).save(folder / f"{number}.png")

    images("here", "cat", "dog", "frog")
    images("there", "dog", "frog")  # whose labels 0 and 1 are cat and dog to the run
    words = ["--dataset", "folder", "--data-dir", "here", "--model", "mlp", "--epochs", "1"]
    assert call("train", *words, "--batch-size", "4", "--out", "run", "--device", "cpu")[0] == 0
    bench = ["export", "run", "--plain", "--vnnlib", "bench", "--radius", "0.01"]
    for words in (["certify", "run", "--device", "cpu"], bench):
        message = refused(call(*words, "--data-dir", "there"))
        assert "classes of the run, ['cat', 'dog', 'frog']; got ['dog', 'frog']" in message
    assert call("certify", "run", "--device", "cpu")[0] == 0


def test_progress_is_shown_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(time, "monotonic", iter(range(0, 100, 20)).__next__)
    show = counter(10)
    for done in (2, 4, 10):
        show(done)
    clear = "\r\x1b[K"
    assert capsys.readouterr().err == (
        f"{clear}2/10 certified{clear}4/10 certified, 60 s left{clear}10/10 certified\n"
    )


def test_progress_elsewhere_is_a_line_a_minute(capsys, monkeypatch):
    monkeypatch.setattr(time, "monotonic", iter([0, 40, 80, 100, 170]).__next__)
    show = counter(10, "attacked")
    for done in (2, 4, 5, 7):
        show(done)
    assert capsys.readouterr().err == ("4/10 attacked, 2 min left\n7/10 attacked, 78 s left\n")


def test_warnings_are_one_line(call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("soft.py").write_text(
        "from torch import nn\n"
        "net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softmax(1))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["--dataset", "digits", "--model", "soft:net", "--epochs", "1", "--device", "cpu"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        status, _, err = call("train", *words, "--set", "elide=False", "--out", "run")
    assert status == 0
    said = [line for line in err.splitlines() if "look like probabilities" in line]
    assert len(said) == 1
    assert said[0].startswith("acert: the model's outputs look like probabilities")


# -- a model and data of one's own --------------------------------------------------------

MODELS = """
import torch
from torch import nn

def net(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], 8), nn.ReLU(), nn.Linear(8, classes))

def lazy(shape, classes):
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(classes))

def bent(shape, classes):
    return nn.Sequential(net(shape, classes), nn.Tanh())

def conv(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, classes))

ready = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))

fixed = net((4,), 2)

def nothing(shape, classes):
    return None
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module with factories and an npz file of vectors, in the current folder."""
    (tmp_path / "my_models.py").write_text(MODELS)
    (tmp_path / "broken_models.py").write_text("import torch\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_models", "broken_models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    generator = np.random.default_rng(0)
    x = generator.random((60, 4), dtype=np.float32)
    y = (x[:, 0] > 0.5).astype(np.int64)
    np.savez(tmp_path / "mine.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    np.savez(tmp_path / "test_only.npz", x_test=x[40:], y_test=y[40:])


OWN = ["--dataset", "npz", "--data-dir", "mine.npz", "--model", "my_models:net"]


@pytest.mark.usefixtures("own")
def test_layers_that_get_their_shapes_from_an_input(call):
    words = ["train", *OWN[:-1], "my_models:lazy", "--epochs", "1", "--device", "cpu"]
    status, _, _ = call(*words, "--batch-size", "8", "--out", "run")
    assert status == 0
    status, out, _ = call("certify", "run", "--model", "my_models:lazy", "--device", "cpu")
    assert status == 0
    assert "20 test images of npz" in out


@pytest.mark.usefixtures("own")
def test_a_model_that_does_not_end_in_a_linear_layer(call):
    own = [*OWN[:-1], "my_models:bent"]
    words = ["train", *own, "--epochs", "1", "--batch-size", "8", "--device", "cpu"]
    assert "`--set elide=False` to `acert train`" in refused_after_notes(call(*words))
    assert call(*words, "--set", "elide=False", "--out", "run")[0] == 0
    status, out, _ = call("certify", "run", "--model", "my_models:bent", "--device", "cpu")
    assert status == 0
    words = ["certify", *own, "--weights", "run/model.safetensors", "--max-radius", "0.05"]
    status, again, _ = call(*words, "--no-elide", "--out", "other")
    assert status == 0
    assert again.splitlines()[:2] == out.splitlines()[:2]
    assert "`--no-elide` with `--weights`" in refused(call(*words, "--out", "third"))


@pytest.mark.usefixtures("own")
def test_own_model_and_data(call):
    words = ["train", *OWN, "--epochs", "2", "--batch-size", "8", "--device", "cpu", "--out"]
    status, out, _ = call(*words, "run")
    assert status == 0
    assert out.endswith("for its test set: acert certify run --model my_models:net\n")
    message = refused_after_notes(call(*words, "run"))
    assert "go on with it: acert train --resume run --model my_models:net" in message
    assert from_config(records.read_config(Path("run"))["experiment"]).network.name == (
        "my_models:net"
    )
    need = refused(call("certify", "run"))
    assert "the run in run needs its own model again: --model my_models:net" in need
    need = refused(call("train", "--resume", "run"))
    assert "the run in run needs its own model again: --model my_models:net" in need
    # The folder of the data is remembered.
    status, out, _ = call("certify", "run", "--model", "my_models:net", "--device", "cpu")
    assert status == 0
    assert "20 test images of npz" in out
    status, _, err = call("train", "--resume", "run", "--model", "my_models:net")
    assert status == 0
    assert "finished already" in err
    # The same weights as if they came from elsewhere.
    words = [
        "certify", "--model", "my_models:net", "--weights", "run/model.safetensors",
        "--dataset", "npz", "--max-radius", "0.05", "--out", "other", "--data-dir",
    ]  # fmt: skip
    status, again, _ = call(*words, "mine.npz")
    assert status == 0
    assert again.splitlines()[1] == out.splitlines()[1]
    # Without y_train nothing says how many classes there are; a module needs no telling.
    assert "must name a module, not a factory" in refused(call(*words, "test_only.npz"))
    words[2] = "my_models:fixed"
    status, again, _ = call(*words, "test_only.npz")
    assert status == 0
    assert again.splitlines()[1] == out.splitlines()[1]


@pytest.mark.usefixtures("own")
def test_own_weights(call):
    import my_models  # type: ignore[import-not-found]

    save_file(my_models.ready.state_dict(), "net.safetensors")
    rest = ["--dataset", "digits", "--max-radius", "0.1", "--out", "o", "--device", "cpu"]
    outs = []
    for name in ("conv", "ready"):
        status, out, _ = call(
            "certify", "--model", f"my_models:{name}", "--weights", "net.safetensors", *rest
        )
        assert status == 0
        outs.append(out)
    torch.save(my_models.ready.state_dict(), "net.pt")
    words = ["--model", "my_models:ready", "--weights", "net.pt"]
    outs.append(call("certify", *words, *rest)[1])
    assert outs[0] == outs[1] == outs[2]
    assert records.read_certificates(Path("o"))["max_radius"] == 0.1
    weights = {name: value[:1] for name, value in my_models.ready.state_dict().items()}
    save_file({name: value.clone() for name, value in weights.items()}, "short.safetensors")
    Path("junk.safetensors").write_bytes(b"junk")
    Path("junk.pt").write_bytes(b"junk")
    for file, message in (
        ("short.safetensors", "short.safetensors does not fit the model: 1.bias has (1,)"),
        ("junk.safetensors", "junk.safetensors is no safetensors file"),
        ("none.safetensors", "the weights none.safetensors are missing"),
        ("junk.pt", "junk.pt is no state dict that can be read"),
    ):
        words = ["--model", "my_models:ready", "--weights", file]
        assert message in refused(call("certify", *words, *rest))
    words = ["--model", "my_models:nothing", "--weights", "net.safetensors"]
    assert "model` must make a torch.nn.Module; got NoneType" in refused(
        call("certify", *words, *rest)
    )


# -- refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["trian"],
            "the verb must be one of train, certify, export, sweep, report, reproduce; got 'trian'",
        ),
        (["train", "--kapa", "0.1"], "unknown argument '--kapa'; did you mean '--kappa'?"),
        (["train", "--max-radus=1"], "'--max-radus'; did you mean '--max-radius'?"),
        (["train", "digits"], "unknown argument 'digits'"),
        (["--verion"], "unknown argument"),
        (["train", "--dataset", "cifra10"], "did you mean 'cifar10'?"),
        (["train", "--method", "fastbip"], "did you mean 'fastibp'?"),
        (["train", "--set", "clip_nom=3"], "'clip_nom' is no field of the recipe; did you mean"),
        (["train", "--set", "clip_norm"], "`--set` must be given as name=value; got 'clip_norm'"),
        (["train", "--kappa", "1.5"], "`kappa` must be in [0, 1]; got 1.5"),
        (["train", "--kappa", "x"], "argument --kappa: a number is needed, such as 0.1"),
        (["train", "--kappa"], "argument --kappa: expected one argument (see acert train --help)"),
        (["train", "--epochs", "0"], "`epochs` must be at least 1; got 0"),
        (["train", "--max-radius", "2"], "`max_radius` must be at most the width of the domain"),
        (["train", "--max-radius", "0"], "`max_radius` must be above 0; got 0"),
        (["train", "--set", "domain=1,0"], "`domain` must be (low, high) with low < high; got"),
        (["train", "--device", "meta"], "`device` must hold numbers; got meta"),
        (["train", "--method", "fastibp", "--steps", "3"], "`--steps` must come with the method"),
        (["train", "--model", "nonet"], "`model` must be one of"),
        (["train", "--model", "no_such:net"], "no_such cannot be imported: ModuleNotFoundError"),
        (["train", "--model", "json:dmps"], "json has no 'dmps'; did you mean 'dumps'?"),
        (["train", "--device", "quantum"], "`device` must be available here; got quantum"),
        (["train", "--dataset", "mnist", "--data-dir", "empty"], "missing"),
        (["train", "--resume", "nowhere"], "there is no run folder nowhere"),
        (["certify"], "give a run folder, or a model of your own, which needs --model, --weights"),
        (["certify", "nowhere"], "there is no run folder nowhere"),
        (["certify", "digits-acrt"], "did you mean 'digits-acert'?"),
        (["certify", "digits-acert", "--bounds", "crwn"], "invalid choice: 'crwn'"),
        (["certify", "digits-acert", "--weights", "w"], "`--weights` must be left out where a run"),
        (["certify", "digits-acert", "--max-radius", "0"], "`max_radius` must be"),
        (["certify", "digits-acert", "--max-radius", "3", "--device", "cpu"],
         "`--max-radius` must be at most the width of the domain, 1; got 3"),
        (["certify", "digits-acert", "--radii", "1,x"], "argument --radii: a number is needed"),
        (["certify", "digits-acert", "--radii", "0.1,9"], "`--radii` must be in [0, 0.3], where"),
        (["certify", "digits-acert", "--radii=-0.1"], "`--radii` must be in [0, 0.3], where"),
        (["certify", "digits-acert", "--batch-size", "0"], "`batch_size` must be above 0; got 0"),
        (["certify", "digits-acert", "--batch-size=-1"], "`batch_size` must be above 0; got -1"),
        (["certify", "digits-acert", "--device", "foo"], "`device` must be available here"),
        (["certify", "digits-acert", "--model", "os:getcwd"], "it raised TypeError"),
        (["train", "--model", "os:getcwd"], "it raised TypeError"),
        (["train", "--model", "os:sep"], "`model` must be a torch.nn.Module, or a function of"),
        (["train", "--model", "torch.nn:ReLU"], "`model` must be a function of (input_shape, num"),
        (["train", "--seed", "99999999999999999999"], "`seed` must be below 2^63 in size; got 9"),
        (["train", "--seed", "99999999"], "`seed` must be in [0, 9999999]; got 99999999"),
        (["train", "--seed=-1"], "`seed` must be in [0, 9999999]; got -1"),
        (["train", "--set", "domain=1"], "`settings.domain` must be 2 values; got '1'"),
        (["train", "--set", "domain=0,1,2"], "`settings.domain` must be 2 values; got '0,1,2'"),
        (["train", "--set", "learning_rate=OneCycle(max_rate='a')"], "`max_rate` must be a number"),
        (["train", "--set", "learning_rate=StepDecay(epochs=3)"], "`epochs` must be of type tuple"),
        (["train", "--dataset", "npz", "--data-dir", "no"], "data.npz is missing: put it at no/"),
        (["certify", "digits-acert", "--model", "net"], "`--model` must be given as package"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_status_2(call, words, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)  # no download
    assert message in refused(call(*words))
    assert not list(Path().glob("runs/*/*"))  # nothing was begun


@pytest.mark.usefixtures("own")
def test_a_module_that_fails_is_named(call):
    words = ["certify", "digits-acert", "--model", "broken_models:net"]
    assert "broken_models cannot be imported: ZeroDivisionError" in refused(call(*words))


def test_a_run_folder_that_exists_is_refused(call, run_folder):
    words = ["train", *QUICK[2:], "--out", run_folder]
    status, _, err = call(*words)
    assert status == 2
    assert f"acert train --resume {run_folder}" in err


@pytest.mark.parametrize(
    "words",
    [["--kappa", "0"], ["--seed", "0"], ["--set", "l1=0"], ["--train-on-all"], ["--out", "x"]],
)
def test_a_resumed_run_keeps_its_config(call, run_folder, words):
    err = refused(call("train", "--resume", run_folder, *words))
    assert f"`{words[0]}` cannot be changed by `--resume`: a run keeps its config" in err


def test_a_missing_package_is_named(call, monkeypatch):
    def train_run(*_, **__):
        raise ModuleNotFoundError("No module named 'safetensors'", name="safetensors")

    monkeypatch.setattr(train_verb, "train_run", train_run)
    status, _, err = call("train")
    assert status == 2
    assert err == "acert: this needs the package safetensors: pip install 'acert[train]'\n"


def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}"}
    done = subprocess.run(
        [sys.executable, "-m", "acert", "train"],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 130
    assert done.stderr == "\nacert: stopped\n"


# -- help ---------------------------------------------------------------------------------


def help_of(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        cli.main([*words])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_has_examples_that_parse(capsys):
    assert "certify" in help_of(capsys)
    for verb in ("train", "certify", "export"):
        text = help_of(capsys, verb, "--help")
        lines = text.partition("examples:")[2].replace("\\\n", "").splitlines()
        commands = [line.strip().partition("   ")[0].split() for line in lines if line.strip()]
        assert len(commands) >= 5
        for words in commands:
            assert words[:2] == ["acert", verb]
            parsed(words[1:])


def test_every_flag_is_explained():
    for verb in verbs()[1].values():
        for action in verb._actions:
            assert action.help, action.option_strings


def test_version(capsys):
    assert help_of(capsys, "--version").strip() == f"acert {acert.__version__}"


# -- as a process -------------------------------------------------------------------------


def environment():
    return os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


def test_torch_numpy_and_safetensors_are_enough(tmp_path):
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 256, (40, 1, 6, 6), dtype=np.uint8), np.arange(40) % 2
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x[:10], y_test=y[:10])
    program = textwrap.dedent("""
        import sys
        for name in ("rich", "sklearn", "matplotlib", "PIL", "pooch", "scipy", "tensorboard"):
            sys.modules[name] = None  # importing it fails
        from acert.cli import main
        own = ["--data-dir", "data.npz", "--device", "cpu"]
        width = ["--set", "network.width=1", "--batch-size", "8"]
        train = ["train", "--dataset", "npz", "--epochs", "1", "--out", "run"]
        sys.exit(main([*train, *own, *width]) or main(["certify", "run", *own]))
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment(), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "10 test images of npz" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent as on POSIX")
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    words = [sys.executable, "-m", "acert", "train", "--epochs", "3000", "--out", "run"]
    words += ["--set", "network.width=1", "--set", "validate_every=1000", "--device", "cpu"]
    process = subprocess.Popen(
        words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while len(records.read_metrics(tmp_path / "run")) < 1:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.rstrip().endswith("To go on: acert train --resume run")
    state = records.read_state(tmp_path / "run")
    assert state is not None
    assert state.facts["step"] > 0


# -- a user's own files -------------------------------------------------------------------


@pytest.fixture
def shifted(own):
    """Vectors in [-1, 1], for training and testing, and for testing alone."""
    generator = np.random.default_rng(1)
    x = generator.uniform(-1, 1, (60, 4)).astype(np.float32)
    x[40:, 0] = generator.choice([-0.98, 0.98], 20)  # radii end at the border of the domain
    y = (x[:, 0] > 0).astype(np.int64)
    parts = {"x_test": x[40:], "y_test": y[40:], "domain": [-1.0, 1.0]}
    np.savez("shifted.npz", x_train=x[:40], y_train=y[:40], **parts)
    np.savez("shifted_test.npz", **parts)


@pytest.mark.usefixtures("shifted")
def test_the_domain_of_the_data_is_kept_without_a_training_set(call):
    import my_models

    save_file(my_models.fixed.state_dict(), "net.safetensors")
    found = []
    for file in ("shifted.npz", "shifted_test.npz"):
        status, _, _ = call(
            "certify", "--model", "my_models:fixed", "--weights", "net.safetensors",
            "--dataset", "npz", "--data-dir", file, "--max-radius", "0.5", "--out", file[:-4],
            "--device", "cpu",
        )  # fmt: skip
        assert status == 0
        found.append(records.read_certificates(Path(file[:-4])))
    assert [columns["domain"] for columns in found] == [(-1.0, 1.0)] * 2
    assert (found[0]["radius"] == found[1]["radius"]).all()


@pytest.mark.usefixtures("shifted")
def test_vectors_in_their_own_domain_are_trained_by_name(call):
    words = ["train", "--dataset", "npz", "--data-dir", "shifted.npz", "--epochs", "1",
             "--batch-size", "8", "--out", "run", "--device", "cpu"]  # fmt: skip
    message = refused_after_notes(call(*words))
    assert "`model` cnn7 needs images" in message
    assert "shape (4,): take --model mlp" in message
    status, out, err = call(*words, "--model", "mlp", "--max-radius", "1.5")
    assert status == 0
    assert ", 1 epoch, seed 0" in out
    assert "scaled to 1 epoch: " in err
    config = from_config(records.read_config(Path("run"))["experiment"])
    assert config.settings.domain == (-1.0, 1.0)
    assert call("certify", "run", "--device", "cpu")[0] == 0
    # Another file in its place, in another domain, is not what the run was made for.
    message = refused(call("certify", "run", "--data-dir", "mine.npz"))
    assert "the test set must have the domain of the run, (-1.0, 1.0); got (0.0, 1.0)" in message
    message = refused_after_notes(call(*words, "--set", "domain=0,1", "--out", "other"))
    assert "`domain` must be that of the data, (-1.0, 1.0); got (0.0, 1.0)" in message


def refused_after_notes(result):
    """The last line of a refusal, after what is said of the schedules."""
    status, _, err = result
    assert status == 2
    assert "Traceback" not in err
    return err.splitlines()[-1]


@pytest.mark.usefixtures("own")
def test_weights_in_bfloat16_are_read(call):
    import my_models

    weights = {name: value.bfloat16() for name, value in my_models.ready.state_dict().items()}
    save_file(weights, "net.safetensors")
    status, out, _ = call(
        "certify", "--model", "my_models:conv", "--weights", "net.safetensors",
        "--dataset", "digits", "--max-radius", "0.1", "--out", "o", "--device", "cpu",
    )  # fmt: skip
    assert status == 0
    assert "359 test images" in out


def test_where_nothing_can_be_written_nothing_is_certified(call, run_folder, monkeypatch):
    monkeypatch.setattr(
        certify_verb, "certify", lambda *_, **__: pytest.fail("certified for nothing")
    )
    Path("file").touch()
    message = refused(call("certify", run_folder, "--out", "file/here", "--device", "cpu"))
    assert "nothing can be written to file/here: Not a directory" in message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config.json is damaged: it names no experiment"),
        ({"experiment": 3}, "config.json is damaged: it names no experiment"),
        ({"experiment": {"class": "Experiment"}}, "config.json: the config lacks fields of Exper"),
        ({"experiment": {"class": "Ghost"}}, "config.json: the config names an unknown class"),
        ({"settings": {}}, "acert.train(..., out='damaged', resume=True) goes on with it"),
    ],
)
def test_a_damaged_config_is_named(call, config, message):
    Path("damaged").mkdir()
    records.write_config(Path("damaged"), config)
    assert message in refused(call("certify", "damaged"))
    assert message in refused(call("train", "--resume", "damaged"))


def test_a_config_with_a_wrong_value_is_named(call, run_folder):
    config = records.read_config(run_folder)
    Path("damaged").mkdir()
    config["experiment"]["settings"]["max_radius"] = "x"
    records.write_config(Path("damaged"), config)
    message = refused(call("certify", "damaged"))
    assert "damaged/config.json: `max_radius` must be a number; got 'x'" in message
    config["experiment"]["settings"]["max_radius"] = 0.1
    del config["data"]["input_shape"]
    records.write_config(Path("damaged"), config)
    message = refused(call("certify", "damaged"))
    assert "damaged/config.json is damaged: what it says of the data is incomplete" in message


def test_a_reader_that_leaves_early_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "acert", "train", "--show"], stdout=write, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(SOURCE)}, check=False,
    )  # fmt: skip
    os.close(write)
    assert done.stderr == b""
    assert done.returncode == 141


def test_a_progress_that_nobody_reads_is_no_error(tmp_path):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "acert", "train", "--epochs", "1", "--out", tmp_path / "run"],
        stdout=write, stderr=write, env=os.environ | {"PYTHONPATH": str(SOURCE)}, check=False,
    )  # fmt: skip
    os.close(write)
    assert done.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_output_to_a_full_disk_is_one_line_and_status_2(monkeypatch, capsys):
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["train", "--show"]) == 2
    assert capsys.readouterr().err == "acert: No space left on device\n"


def test_too_little_memory_is_one_line_and_status_2(call, monkeypatch):
    # More bytes than any machine has addresses for.
    words = ("train", "--set", "network.width=100000000", "--out", "run")
    message = refused(call(*words))
    assert "not enough memory: a smaller --batch-size or network needs less (" in message
    assert not Path("run").exists()

    def fails(*_, **__):
        raise RuntimeError("another mistake")

    monkeypatch.setattr(train_verb, "train_run", fails)
    with pytest.raises(RuntimeError, match="another mistake"):
        cli.main(list(words))


def test_a_command_without_any_output_runs(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(["train", "--show"]) == 0
    assert sys.stdout is not None
    assert sys.stderr is not None
    sys.stdout.close()
    sys.stderr.close()


def test_letters_that_the_terminal_lacks_are_spelt_out(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(["train", "--show", "--set", "network.name=n\u00e9:net"]) == 0
    assert rb"network.name = n\xe9:net" in written.getvalue()
