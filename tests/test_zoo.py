"""Models by name or run folder, and in the hands of other people's attacks."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import acert
from acert import InvalidInput, RunError, data, models, zoo
from acert.evaluation import certify
from acert.experiments.recipes import recipe
from acert.experiments.run import train, train_run
from acert.methods import FastIBP
from acert.zoo import load_model

NAME = "digits-acert"


@pytest.fixture(scope="module")
def test_set():
    return data.load_test("digits")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of one epoch."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    experiment = recipe("digits", "acert", epochs=1, width=1)
    return train_run(experiment, out=folder, progress=False)


# -- the shipped model --------------------------------------------------------------------


def test_the_shipped_model_is_small_and_good(test_set):
    model = load_model(NAME)
    assert not any(module.training for module in model.modules())
    assert isinstance(model[0], models.Normalize)
    assert model(test_set.images[:3]).shape == (3, 10)
    folder = zoo.run_folder(NAME)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 300_000
    experiment = zoo.run_experiment(NAME)
    assert experiment == recipe("digits", "acert", kappa=experiment.settings.method.kappa)
    found = certify(model, test_set, max_radius=experiment.settings.max_radius)
    assert found.accuracy > 0.85
    assert found.acr > 0.6


def test_the_shipped_folder_holds_nothing_of_the_machine_it_was_made_on():
    folder = zoo.run_folder(NAME)
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "env.json", "metrics.jsonl", "model.safetensors"}
    command = json.loads((folder / "env.json").read_text())["command"]
    assert command.startswith("acert train")


@pytest.mark.filterwarnings("ignore")  # of foolbox's own making
def test_foolbox_takes_it(test_set):
    foolbox = pytest.importorskip("foolbox")
    model = load_model(NAME)
    images, labels = test_set.images[:100], test_set.labels[:100]
    attacked = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    radius = acert.certified_radius(model, images, labels, max_radius=0.3).value
    right = (model(images).argmax(1) == labels).float().mean().item()
    assert foolbox.accuracy(attacked, images, labels) == pytest.approx(right)
    weak, strong = 0.1, 0.5
    _, points, success = foolbox.attacks.LinfPGD(steps=20)(
        attacked, images, labels, epsilons=[weak, strong]
    )
    assert not success[0][radius >= weak].any()  # what is certified holds
    assert success[1].float().mean() > 0.5  # and the attack is one
    assert (points[0] - images).abs().max() <= weak + 1e-6


@pytest.mark.filterwarnings("ignore")  # of torchattacks' own making
def test_torchattacks_takes_it(test_set):
    torchattacks = pytest.importorskip("torchattacks", exc_type=ImportError)
    model = load_model(NAME)
    images, labels = test_set.images[:100], test_set.labels[:100]
    radius = acert.certified_radius(model, images, labels, max_radius=0.3).value
    wrong = {}
    for size in (0.1, 0.5):
        attack = torchattacks.PGD(model, eps=size, alpha=size / 4, steps=10)
        points = attack(images, labels)
        assert (points - images).abs().max() <= size + 1e-6
        wrong[size] = model(points).argmax(1) != labels
    assert not wrong[0.1][radius >= 0.1].any()
    assert wrong[0.5].float().mean() > 0.5


# -- run folders --------------------------------------------------------------------------


def test_a_run_is_loaded_as_it_was_trained(run, test_set):
    model = load_model(run.folder)
    assert not model.training
    images = test_set.images[:20]
    assert torch.equal(model(images), run.model(images))
    assert torch.equal(load_model(str(run.folder))(images), run.model(images))


def test_loading_draws_no_random_numbers(run):
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    load_model(run.folder)
    assert torch.equal(torch.rand(3), wanted)


def factory(shape, classes):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(shape[1] * shape[2], 8), nn.ReLU(), nn.Linear(8, classes)
    )


@pytest.fixture
def own_run(tmp_path):
    """A run on a model of one's own, by the name of its factory."""
    experiment = recipe("digits", "fastibp", epochs=1, **{"network.name": "tests.test_zoo:factory"})
    return train_run(experiment, out=tmp_path / "own", model=factory, progress=False)


def test_a_model_of_ones_own_is_asked_for(own_run, test_set):
    with pytest.raises(InvalidInput, match=r"`model` must be given for .*tests\.test_zoo:factory"):
        load_model(own_run.folder)
    images = test_set.images[:5]
    wanted = own_run.model(images)
    assert torch.equal(load_model(own_run.folder, model=factory)(images), wanted)
    module = factory((1, 8, 8), 10)
    assert load_model(own_run.folder, model=module) is module
    assert torch.equal(module(images), wanted)


def test_a_run_on_arrays_needs_its_model(tmp_path):
    images, labels = torch.rand(16, 4), torch.arange(16) % 2
    model = models.mlp(4, [4], 2)
    train(
        model, (images, labels), method=FastIBP(), max_radius=0.1, epochs=1,
        out=tmp_path / "run", progress=False,
    )  # fmt: skip
    with pytest.raises(InvalidInput, match=r"`model` must be given for .* a Sequential"):
        load_model(tmp_path / "run")
    again = load_model(tmp_path / "run", model=models.mlp(4, [4], 2))
    assert torch.equal(again(images), model(images))
    with pytest.raises(RunError, match="arrays in memory: it names no data set"):
        zoo.run_experiment(tmp_path / "run")


# -- refusals -----------------------------------------------------------------------------


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(RunError, match=r"no run folder digits_acert.*mean 'digits-acert'"):
        load_model("digits_acert")
    with pytest.raises(RunError, match=r"no shipped model of that name \(digits-acert\)$"):
        load_model("runs/none")


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"is no run folder: it has no config\.json"):
        load_model(tmp_path)


def test_a_module_without_shapes_is_refused(own_run):
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(10))
    with pytest.raises(InvalidInput, match=r"`model` must be initialised; got `1\.bias` without"):
        load_model(own_run.folder, model=lazy)


def test_weights_that_do_not_fit_are_refused(own_run, tmp_path):
    def wide(shape, classes):
        return factory(shape, classes + 1)

    with pytest.raises(RunError, match=r"does not fit the model: 3\.bias has \(10,\), not \(11,\)"):
        load_model(own_run.folder, model=wide)
    with pytest.raises(RunError, match=r"does not fit the model: it has no 4\.bias"):
        load_model(
            own_run.folder, model=lambda s, c: nn.Sequential(*factory(s, c), nn.Linear(c, c))
        )
    with pytest.raises(RunError, match=r"does not fit the model, which has no 1\.bias"):
        load_model(own_run.folder, model=lambda s, c: nn.Flatten())
    parallel = {f"module.{name}": t for name, t in nn.Linear(2, 2).state_dict().items()}
    with pytest.raises(RunError, match=r"it has no bias, but module\.bias: take 'module\.' away"):
        zoo.load_weights(nn.Linear(2, 2), parallel, source=tmp_path)
    model = nn.Linear(2, 2)
    zeros = {"weight": np.zeros((2, 2), np.float32), "bias": np.zeros(2, np.float32)}
    zoo.load_weights(model, zeros, source=tmp_path)
    assert not model.weight.any()


def test_weights_of_a_network_without_the_models_ties_are_refused(tmp_path):
    """PyTorch fills a shared tensor twice, and the second numbers stay without a word."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    tied = copy.deepcopy(model).state_dict() | {"0.bias": torch.tensor([math.nan, 0.0])}
    zoo.load_weights(model, tied, source=tmp_path)
    message = r"does not fit the model, which shares the memory of 0\.weight with another"
    with pytest.raises(RunError, match=message):
        zoo.load_weights(model, tied | {"1.weight": torch.ones(2, 2)}, source=tmp_path)


def test_weights_that_would_be_rounded_are_refused(tmp_path):
    model = nn.Linear(2, 2)
    third = {"weight": torch.full((2, 2), 1 / 3, dtype=torch.float64), "bias": torch.zeros(2)}
    message = r"weight holds numbers of torch\.float64 that torch\.float32 would round"
    with pytest.raises(RunError, match=message):
        zoo.load_weights(model, third, source=tmp_path)
    for dtype in (torch.float64, torch.bfloat16, torch.int32):  # what float32 holds is taken
        ones = {"weight": torch.ones(2, 2, dtype=dtype), "bias": torch.zeros(2, dtype=dtype)}
        zoo.load_weights(model, ones, source=tmp_path)
        assert torch.equal(model.weight, torch.ones(2, 2))


def test_a_damaged_config_is_named(tmp_path, run):
    (tmp_path / "config.json").write_text('{"schema": 1}')
    with pytest.raises(RunError, match=r"config\.json is damaged: it names no experiment"):
        load_model(tmp_path)
    config = json.loads((run.folder / "config.json").read_text())
    del config["data"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match=r"config\.json is damaged: .* incomplete .*data"):
        load_model(tmp_path)


def test_a_factory_that_fails_is_told_in_one_line(run):
    with pytest.raises(InvalidInput, match=r"\(1, 8, 8\) and 10, it raised TypeError"):
        load_model(run.folder, model=nn.ReLU)
