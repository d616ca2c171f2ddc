"""Recipes: the paper's figures, their way to a file and back, and changes by name."""

import json
import math
from dataclasses import replace

import pytest
import torch

from acert import InvalidInput
from acert.data import Augmentation, Dataset, Split
from acert.experiments import recipes
from acert.experiments.choice import chosen_experiment
from acert.experiments.experiment import build_model, from_config, to_config
from acert.experiments.override import field_names, number, override
from acert.experiments.recipes import RECIPES, recipe, with_epochs
from acert.methods import METHODS, Acert, FastIBP, Sabr, Standard
from acert.optimizers import Muon
from acert.rootfind import Bisection, Brent, PowerLaw
from acert.schedules import Constant, FullRadius, OneCycle, SmoothRadius, StepDecay
from acert.training import Trainer

ALL = [*RECIPES, ("npz", "acert"), ("folder", "standard")]
CERTIFIED = [name for name in METHODS if name != "standard"]


# -- the figures of Table 4 and of the methods' authors -----------------------------------

# max_radius, batch size, epochs, first and last epoch of the warm-up, regularisation, L1
TABLE_4 = {
    "mnist": (0.4, 128, 100, (2, 21), 0.5, 0.0),
    "cifar10": (8.8 / 255, 128, 200, (2, 81), 0.5, 0.0),
    "tinyimagenet": (1 / 255, 256, 200, (2, 81), 0.2, 1e-4),
}


def figures(settings):
    schedule = settings.radius_schedule
    return (
        settings.max_radius, settings.batch_size, settings.epochs,
        (schedule.start_epoch, schedule.last_epoch), settings.regularization, settings.l1,
    )  # fmt: skip


@pytest.mark.parametrize("dataset", TABLE_4)
@pytest.mark.parametrize("method", ["acert", "acert-fast"])
def test_acert_has_the_figures_of_table_4(dataset, method):
    settings = recipe(dataset, method).settings
    assert figures(settings) == TABLE_4[dataset]
    assert settings.learning_rate == OneCycle(max_rate=2e-3)
    if method == "acert":
        assert settings.method == Acert(solver=Brent(xtol=1e-6, rtol=1e-4, max_steps=2))


@pytest.mark.parametrize("dataset", TABLE_4)
@pytest.mark.parametrize("method", ["fastibp", "crown-ibp"])
def test_fastibp_and_crown_ibp_decay_in_steps(dataset, method):
    settings = recipe(dataset, method).settings
    wanted = list(TABLE_4[dataset])
    if dataset == "tinyimagenet":
        wanted[3] = (1, 80)
    assert figures(settings) == tuple(wanted)
    decays = (60, 70) if dataset == "mnist" else (120, 140)
    assert settings.learning_rate == StepDecay(initial_rate=5e-4, epochs=decays, factor=0.2)


def test_sabr_has_its_authors_figures():
    mnist, cifar10 = recipes.mnist_sabr().settings, recipes.cifar10_sabr().settings
    assert figures(mnist) == (0.3, 256, 70, (2, 21), 0.5, 1e-6)
    assert figures(cifar10) == (8 / 255, 128, 180, (2, 81), 0.5, 0.0)
    assert mnist.learning_rate == StepDecay(initial_rate=5e-4, epochs=(50, 60), factor=0.2)
    assert cifar10.learning_rate == StepDecay(initial_rate=5e-4, epochs=(140, 160), factor=0.2)
    shares = [recipe(name, "sabr").settings.method.box_share for name in TABLE_4]
    assert shares == [0.6, 0.7, 0.4]
    assert mnist.method == Sabr(box_share=0.6, attack_steps=8)


def test_expressive_losses_have_their_authors_figures():
    wanted = {
        "mnist": ((0.4, 256, 70, (2, 21), 0.5), (50, 60), (0.3, 0.08), (3e-6, 1e-6)),
        "cifar10": ((8 / 255, 128, 260, (2, 81), 0.5), (180, 220), (0.5, 0.5), (0.0, 1e-7)),
        "tinyimagenet": ((1 / 255, 128, 160, (2, 81), 0.2), (120, 140), (0.01, 0.01), (5e-5, 5e-5)),
    }  # fmt: skip
    for dataset, (common, decays, shares, l1) in wanted.items():
        both = [recipe(dataset, method).settings for method in ("cc-ibp", "mtl-ibp")]
        for settings, share, weight in zip(both, shares, l1, strict=True):
            assert figures(settings) == (*common, weight)
            assert settings.learning_rate == StepDecay(epochs=decays)
            assert settings.method.bound_share == share
            assert (settings.method.attack_steps, settings.method.attack_step) == (1, 10.0)
    shares = [recipe(name, "exp-ibp").settings.method.bound_share for name in TABLE_4]
    assert shares == [0.3, 0.5, 0.04]


@pytest.mark.parametrize("dataset", ["digits", "mnist", "cifar10", "tinyimagenet", "npz", "folder"])
def test_standard_is_the_same_run_without_bounds(dataset):
    plain, certified = recipe(dataset, "standard"), recipe(dataset, "acert")
    assert plain.network == replace(certified.network, initialization="default")
    assert certified.network.initialization == "ibp"
    assert plain.settings.regularization == plain.settings.l1 == 0
    for name in (
        "epochs",
        "batch_size",
        "learning_rate",
        "augmentation",
        "max_radius",
        "clip_norm",
    ):
        assert getattr(plain.settings, name) == getattr(certified.settings, name)


@pytest.mark.parametrize("method", METHODS)
def test_what_all_recipes_of_the_paper_share(method):
    for dataset in TABLE_4:
        experiment = recipe(dataset, method)
        assert (experiment.network.name, experiment.network.width) == ("cnn7", 64)
        half = dataset != "mnist" and method not in (
            "crown-ibp", "cc-ibp", "mtl-ibp", "exp-ibp",
        )  # fmt: skip
        assert experiment.settings.precision == ("float16" if half else "tf32")
        assert experiment.settings.clip_norm == 10
        assert experiment.settings.elide
        assert not experiment.train_on_all
    assert recipe("mnist", method).settings.augmentation is None
    assert recipe("cifar10", method).settings.augmentation == Augmentation(padding=2, flip=True)
    wanted = Augmentation(padding=4, flip=True)
    assert recipe("tinyimagenet", method).settings.augmentation == wanted


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({}, "float16"),
        ({"model": "cnn7"}, "float16"),
        ({"model": "small_cnn"}, "tf32"),
        ({"model": "mymodels:net"}, "tf32"),
        ({"model": "small_cnn", "changes": ["precision=float16"]}, "float16"),
        ({"schedule": "none"}, "tf32"),
        ({"changes": ["radius_schedule=FullRadius"]}, "tf32"),
        (
            {"changes": ["settings.precision = float16", "radius_schedule=FullRadius"]},
            "float16",
        ),
        ({"method": "crown-ibp"}, "tf32"),
        ({"changes": ["precision=bfloat16"], "schedule": "none"}, "bfloat16"),
    ],
)
def test_float16_is_for_the_recipes_own_network_and_schedule(changes, precision):
    experiment = chosen_experiment(dataset="cifar10", **changes)
    assert experiment.settings.precision == precision


# -- by name ------------------------------------------------------------------------------


def test_every_recipe_has_its_function():
    assert len(RECIPES) == 4 * len(METHODS)
    for (dataset, method), function in RECIPES.items():
        experiment = function()
        assert experiment == recipe(dataset, method)
        assert experiment.dataset == dataset
        assert isinstance(experiment.settings.method, METHODS[method])
        assert function.__doc__


@pytest.mark.parametrize("method", CERTIFIED)
def test_kappa_is_the_methods(method):
    assert recipe("cifar10", method, kappa=0.25).settings.method.kappa == 0.25
    assert recipe("npz", method, kappa=0.25).settings.method.kappa == 0.25
    assert recipe("cifar10", method).settings.method.kappa == 0


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(InvalidInput, match=r"`dataset` must be one of .*'cifra10'.*mean 'cifar10'"):
        recipe("cifra10", "acert")
    with pytest.raises(InvalidInput, match=r"`method` must be one of .*'fastIBP'; did you mean"):
        recipe("cifar10", "fastIBP")
    with pytest.raises(InvalidInput, match=r"got 'xyzw'$"):
        recipe("cifar10", "xyzw")


def test_kappa_is_checked():
    with pytest.raises(InvalidInput, match=r"`kappa` must be in \[0, 1\]; got 1.5"):
        recipe("digits", "acert", kappa=1.5)
    with pytest.raises(InvalidInput, match=r"`kappa` must be 1 for standard training; got 0.3"):
        recipe("digits", "standard", kappa=0.3)
    assert recipe("digits", "standard", kappa=1.0) == recipe("digits", "standard")


# -- to a file and back, and into training ------------------------------------------------


@pytest.mark.parametrize(("dataset", "method"), ALL)
def test_config_to_file_and_back_is_equal(dataset, method):
    experiment = recipe(dataset, method)
    assert from_config(json.loads(json.dumps(to_config(experiment)))) == experiment


SHAPES = {
    "digits": ((1, 8, 8), 10),
    "mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "tinyimagenet": ((3, 64, 64), 8),
    "npz": ((1, 6, 6), 3),
    "folder": ((3, 6, 6), 3),
}


def losses(experiment):
    """Two epochs of one step each on made-up data: without a radius, and with the largest."""
    shape, classes = SHAPES[experiment.dataset]
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (4, *shape), generator=generator).byte()
    split = Split(images, torch.randint(classes, (4,), generator=generator))
    names = tuple(str(number) for number in range(classes))
    dataset = Dataset(experiment.dataset, split, names, mean=(0.4,), std=(0.3,))
    model = build_model(experiment.network, dataset, seed=experiment.settings.seed)
    trainer = Trainer(model, split, experiment.settings)
    return [trainer.run_epoch() for _ in range(2)]


@pytest.mark.parametrize(("dataset", "method"), ALL)
def test_every_recipe_trains_two_steps(dataset, method):
    small = with_epochs(recipe(dataset, method, batch_size=4, width=1), 2)
    first, second = losses(small)
    assert all(math.isfinite(value) for value in (*first.values(), *second.values()))
    assert (second["robust"] > second["standard"]) is small.settings.method.uses_bounds
    assert [row["loss"] for row in losses(small)] == [first["loss"], second["loss"]]


# -- another number of epochs -------------------------------------------------------------


def test_schedules_scale_with_the_epochs():
    settings = with_epochs(recipes.cifar10_fastibp(), 20).settings
    assert settings.epochs == 20
    assert settings.radius_schedule == SmoothRadius(start_epoch=2, length=8)
    assert settings.learning_rate.epochs == (12, 14)
    longer = with_epochs(recipes.mnist_acert(), 300).settings
    assert longer.radius_schedule.length == 60
    assert longer.learning_rate == OneCycle(max_rate=2e-3)


def test_one_epoch_is_enough():
    settings = with_epochs(recipes.cifar10_sabr(), 1).settings
    assert settings.radius_schedule == SmoothRadius(start_epoch=1, length=1)
    assert settings.learning_rate.epochs == (1,)  # both decays fell on one epoch
    flat = override(recipes.mnist_acert(), "radius_schedule", FullRadius())
    assert with_epochs(flat, 5).settings.radius_schedule == FullRadius()


@pytest.mark.parametrize("epochs", [0, -3])
def test_too_few_epochs_are_refused(epochs):
    with pytest.raises(InvalidInput, match=f"`epochs` must be at least 1; got {epochs}"):
        with_epochs(recipes.mnist_acert(), epochs)


# -- any field by name --------------------------------------------------------------------

BASE = recipes.cifar10_fastibp()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("settings.max_radius", "8/255", 8 / 255),
        ("settings.epochs", "5", 5),
        ("settings.learning_rate.epochs", "3,4", (3, 4)),
        ("settings.learning_rate.epochs", "(3, 4)", (3, 4)),
        ("settings.domain", "0,5", (0.0, 5.0)),
        ("settings.elide", "false", False),
        ("settings.precision", "float32", "float32"),
        ("settings.augmentation", "none", None),
        ("settings.augmentation", "Augmentation(padding=1, flip=False)",
         Augmentation(padding=1, flip=False)),
        ("settings.augmentation.flip", "no", False),
        ("settings.learning_rate", "Constant", Constant()),
        ("settings.learning_rate", "StepDecay(epochs=(6, 7))", StepDecay(epochs=(6, 7))),
        ("settings.radius_schedule", "FullRadius", FullRadius()),
        ("settings.method", "Acert", Acert()),
        ("network.width", "8", 8),
        ("network.width", "none", None),
        ("network.name", "small_cnn", "small_cnn"),
        ("train_on_all", "True", True),
        ("validate_every", "1", 1),
    ],
)  # fmt: skip
def test_values_are_read_as_the_field_asks(name, text, value):
    changed = override(BASE, name, text)
    assert field_names(changed)[name] == value
    assert type(field_names(changed)[name]) is type(value)
    assert override(BASE, name, value) == changed  # a value that is no text is taken as it is


def test_the_end_of_a_name_is_enough_where_it_is_the_only_one():
    assert override(BASE, "kappa", "0.5") == override(BASE, "settings.method.kappa", "0.5")
    assert override(BASE, "method.kappa", 0.5).settings.method == FastIBP(kappa=0.5)
    with pytest.raises(
        InvalidInput, match=r"`epochs` may be settings\.epochs or settings\.learning_rate\.epochs"
    ):
        override(BASE, "epochs", "5")


def test_a_solver_can_be_set():
    changed = override(recipes.digits_acert(), "solver", "Bisection(max_steps=5)")
    assert changed.settings.method.solver == Bisection(xtol=1e-6, rtol=1e-4, max_steps=5)
    changed = override(recipes.digits_acert(), "solver", "PowerLaw")
    assert changed.settings.method.solver == PowerLaw(xtol=1e-6, rtol=1e-4, max_steps=2)
    changed = override(recipes.digits_acert(), "solver.max_steps", "7")
    assert changed.settings.method.solver.max_steps == 7


def test_a_field_that_holds_none_takes_a_value():
    changed = override(recipes.digits_acert(), "augmentation", "Augmentation(padding=1, flip=True)")
    assert changed.settings.augmentation == Augmentation(padding=1, flip=True)
    with pytest.raises(InvalidInput, match=r"written as Augmentation\(padding=..., flip=...\)"):
        override(recipes.digits_acert(), "augmentation", "Augmentation(padding=1)")


def test_another_method_keeps_kappa_but_not_that_of_standard_training():
    chosen = recipe("digits", "acert", kappa=0.25)
    assert override(chosen, "method", "FastIBP").settings.method == FastIBP(kappa=0.25)
    assert override(chosen, "method", "FastIBP(kappa=0.5)").settings.method == FastIBP(kappa=0.5)
    assert override(chosen, "method", "Standard").settings.method == Standard()
    standard = recipe("digits", "standard")
    assert override(standard, "method", "Acert").settings.method == Acert()
    with pytest.raises(InvalidInput, match=r"`kappa` must be 1 for standard training; got 0.3"):
        override(standard, "kappa", "0.3")


@pytest.mark.parametrize("kind", METHODS.values(), ids=lambda kind: kind.__name__)
def test_every_method_is_set_by_the_name_of_its_class(kind):
    changed = override(recipe("digits", "fastibp"), "method", kind.__name__)
    assert type(changed.settings.method) is kind
    with pytest.raises(InvalidInput) as refusal:
        override(changed, "method", "Expressive")  # what three of them have in common
    names = sorted(each.__name__ for each in METHODS.values())
    assert f"must be one of {', '.join(names)}; got 'Expressive'" in str(refusal.value)


def test_fractions_may_stand_in_brackets():
    changed = override(BASE, "learning_rate", "Constant(constant_rate=1/100)")
    assert changed.settings.learning_rate == Constant(constant_rate=0.01)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("clip_nrm", "5", r"'clip_nrm' is no field of the recipe; did you mean 'clip_norm'\?"),
        ("setings.l1", "5", r"'setings.l1' is no field .* did you mean 'settings.l1'\?"),
        ("qqqqqqqq", "5", r"'qqqqqqqq' is no field of the recipe$"),
        ("solver", "Brent", r"'solver' is no field of the recipe of fastibp, only of acert$"),
        ("method.solver.rtol", "0.1", r"'method.solver.rtol' is no .* of fastibp, only of acert$"),
        ("settings.epochs", "many", r"`settings.epochs` must be a whole number; got 'many'"),
        ("settings.epochs", "1.5", r"`settings.epochs` must be a whole number; got '1.5'"),
        ("max_radius", "big", r"`settings.max_radius` must be a number .* got 'big'"),
        ("elide", "perhaps", r"`settings.elide` must be true or false; got 'perhaps'"),
        ("learning_rate", "OneCicle", r"must be one of Constant, .*mean 'OneCycle'"),
        ("learning_rate", "OneCycle(rate=3)", r"must be written as OneCycle\(max_rate=..., "),
        ("learning_rate", "OneCycle(3)", r"must be written as OneCycle\(max_rate"),
        ("learning_rate", "OneCycle(**x)", r"must be written as OneCycle\(max_rate"),
        ("learning_rate", "Constant(constant_rate={[]: 1})", r"plain values .* got constant_rate="),
        ("method", "Acert(solver=PowerLaw)", r"plain .* settings\.method\.solver=PowerLaw$"),
        ("learning_rate", "OneCycle(", r"must be one of Constant, OneCycle, StepDecay"),
        ("learning_rate", "a.b(x=1)", r"must be one of Constant, OneCycle, StepDecay"),
        ("augmentation", "Augmentation(3)", r"written as Augmentation\(padding=..., flip=...\)"),
        ("learning_rate", "OneCycle(max_rate=1,max_rate=2)", r"must be written as OneCycle\("),
        ("regularization", "inf", r"`regularization` must be at least 0 and finite; got inf"),
        ("l1", "inf", r"`l1` must be at least 0 and finite; got inf"),
        ("kappa", "2", r"`kappa` must be in \[0, 1\]; got 2"),
        ("max_radius", "3", r"`max_radius` must be at most the width of the domain"),
    ],
)  # fmt: skip
def test_wrong_names_and_values_are_refused(name, text, message):
    with pytest.raises(InvalidInput, match=message):
        override(BASE, name, text)


def test_changes_of_a_recipe_are_overrides():
    experiment = recipe("mnist", "acert", kappa=0.5, epochs=3, width=4)
    assert experiment.settings.epochs == 3
    assert experiment.network.width == 4
    with pytest.raises(InvalidInput, match="did you mean 'seed'"):
        recipe("mnist", "acert", sed=3)


@pytest.mark.parametrize(("text", "value"), [("0.5", 0.5), ("8/255", 8 / 255), ("1e-3", 1e-3)])
def test_numbers_may_be_fractions(text, value):
    assert number(text) == value


@pytest.mark.parametrize("text", ["", "1/0", "a/2", "1/2/3"])
def test_other_numbers_are_refused(text):
    with pytest.raises(InvalidInput, match=r"a number is needed, such as 0.1 or 8/255; got"):
        number(text)


def test_no_number_of_epochs_is_longer_than_a_config_holds():
    with pytest.raises(InvalidInput, match=r"`epochs` must be below 2\^63 in size; got 10"):
        with_epochs(recipe("digits", "acert"), 10**21)


@pytest.mark.parametrize(
    "momentum", ["momentum", "optimizer.momentum", "settings.optimizer.momentum"]
)
def test_a_field_is_set_behind_its_value_in_any_order(momentum):
    for changes in ([f"{momentum}=0.8", "optimizer=Muon"], ["optimizer=Muon", f"{momentum}=0.8"]):
        assert chosen_experiment(changes=changes).settings.optimizer == Muon(momentum=0.8)
    twice = ["clip_norm=1", "clip_norm=2"]
    assert chosen_experiment(changes=twice).settings.clip_norm == 2
