"""The paper as data: rows, published numbers, and commands that make exactly the run of a row."""

import math

import pytest

from acert.cli import train
from acert.cli.parser import parsed
from acert.errors import InvalidInput
from acert.experiments.paper import rows as paper
from acert.experiments.paper.row import Published, Training
from acert.experiments.recipes import recipe
from acert.methods import Acert, AcertFast
from acert.rootfind import _LAG
from acert.schedules import FullRadius, SmoothRadius, StepDecay

RUNS = list(dict.fromkeys(row.training for row in paper.ROWS))


# -- the numbers --------------------------------------------------------------------------


def test_rows_stand_in_order_of_worth():
    worths = [row.worth for row in paper.ROWS]
    assert worths == sorted(worths)
    assert {*worths} == {*range(1, 10)}
    first = [row.id.rpartition("/")[2] for row in paper.ROWS if row.worth == 1]
    assert first == [
        "acert-k0", "acert-k0.25", "fastibp-k0", "fastibp-k0-at-8", "fastibp-k0.8", "standard",
        "sabr-k0", "crown-ibp-k0",
    ]  # fmt: skip
    assert [row.id for row in paper.ROWS if row.worth == 8][:2] == [
        "table1/tinyimagenet/acert-k0",
        "table1/tinyimagenet/fastibp-k0",
    ]


def test_ids_and_run_names_are_unique():
    assert len({row.id for row in paper.ROWS}) == len(paper.ROWS)
    assert len({training.name for training in RUNS}) == len(RUNS)
    assert {row.part for row in paper.ROWS} == {*paper.PARTS}


def test_published_art_is_the_geometric_mean_of_the_published_figures():
    """A wrong digit in accuracy, ACR or ART would show here."""
    checked = 0
    for row in paper.ROWS:
        shown = row.published
        if shown.art is not None and row.training.method != "standard":
            assert shown.accuracy is not None
            assert shown.acr is not None
            # Not to the last digit: the paper averages ART over batches of test images.
            assert math.sqrt(shown.accuracy * shown.acr) == pytest.approx(shown.art, abs=0.1), row
            checked += 1
    assert checked == 25


def test_published_changes_are_differences_to_table_1():
    for row in paper.ROWS:
        if row.part == "table2":
            before = paper.find(row.id.replace("table2", "table1")).published.art
            assert before is not None
            assert row.published.art is not None
            assert row.published.art - before == pytest.approx(row.published.change, abs=0.011)


def test_numbers_that_stand_in_several_tables_agree():
    for row in paper.ROWS:
        if row.part == "table5":
            best = paper.find(row.id.replace("table5", "table1")).published
            assert best.mean_art == row.published.art
        if row.part == "table7" and row.kappa == 0:
            main = paper.find(row.id.replace("table7", "table1")).published
            assert row.published.accuracy == main.accuracy


@pytest.mark.parametrize(
    ("name", "art"),
    [
        ("table1/cifar10/acert-k0", 50.96), ("table1/cifar10/acert-k0.25", 51.58),
        ("table1/cifar10/fastibp-k0", 44.91), ("table1/cifar10/fastibp-k0.8", 50.49),
        ("table1/cifar10/standard", 0.14), ("table1/cifar10/sabr-k0", 47.14),
        ("table1/cifar10/crown-ibp-k0", 41.84), ("table1/mnist/acert-k0", 96.69),
        ("table1/mnist/fastibp-k0", 96.13), ("table1/mnist/sabr-k0", 92.83),
        ("table1/mnist/crown-ibp-k0", 96.65), ("table1/mnist/standard", 0.35),
        ("table6/cifar10/acert-fast", 47.92), ("table6/cifar10/acert-steps2", 50.70),
        ("table6/cifar10/acert-tolerance", 50.74), ("table2/cifar10/fastibp-k0", 31.46),
        ("table2/cifar10/acert-k0.25", 45.43), ("table1/tinyimagenet/acert-k0", 26.34),
        ("table1/tinyimagenet/fastibp-k0.85", 24.63),
    ],
)  # fmt: skip
def test_published_art(name, art):
    assert paper.find(name).published.art == art


# -- the runs -----------------------------------------------------------------------------


def test_rows_that_share_a_run_name_it_alike():
    def run(name: str) -> Training:
        return paper.find(name).training

    shared = run("table1/cifar10/acert-k0")
    for name in ("table5", "table7", "figure3"):
        assert run(f"{name}/cifar10/acert-k0") is shared
    assert run("table6/cifar10/acert-steps2") is shared
    assert run("table2/cifar10/acert-k0") is not shared


def test_runs_are_those_of_the_paper():
    settings = {training.name: training.experiment(3).settings for training in RUNS}
    assert all(found.seed == 3 for found in settings.values())
    assert all(training.experiment().train_on_all for training in RUNS)
    other = settings["cifar10-fastibp-k0-at-8"]
    assert (other.max_radius, other.epochs) == (8 / 255, 160)
    assert other.learning_rate == StepDecay(epochs=(120, 140))
    assert other.radius_schedule == SmoothRadius(start_epoch=2, length=80)
    assert settings["cifar10-fastibp-k0.8-unscheduled"].radius_schedule == FullRadius()
    steps = {
        name: found.method.solver.max_steps
        for name, found in settings.items()
        if isinstance(found.method, Acert)
    }
    assert steps["cifar10-acert-k0"] == 2
    assert steps["cifar10-acert-k0-steps10"] == 10
    assert isinstance(settings["cifar10-acert-fast-k0"].method, AcertFast)
    largest = {training.dataset: training.max_radius for training in RUNS}
    assert largest == {"mnist": 0.4, "cifar10": 8.8 / 255, "tinyimagenet": 1 / 255}


def test_tolerance_needs_no_more_steps():
    half_width = 8.8 / 255 / 2
    # xtol alone: near a radius of 0, rtol adds nothing.
    assert _LAG * half_width * 2.0**-paper.TOLERANCE_STEPS < 0.5e-6
    assert _LAG * half_width * 2.0 ** (1 - paper.TOLERANCE_STEPS) > 0.5e-6


@pytest.mark.parametrize("training", RUNS, ids=lambda training: training.name)
@pytest.mark.parametrize("epochs", [None, 10])
def test_the_command_of_a_run_makes_exactly_its_experiment(training, epochs, monkeypatch):
    made = []
    monkeypatch.setattr(train, "train_run", lambda experiment, **_: made.append(experiment))
    _, *words = training.train_words(seed=2, epochs=epochs)
    options = parsed([*words, "--out", "x", "--device", "cpu"])
    options.command = []
    # What follows the training needs a real run.
    with pytest.raises(AttributeError):
        options.verb(options)
    assert made == [training.experiment(2, epochs=epochs)]


def test_fewer_epochs_shrink_the_schedules_in_proportion():
    training = paper.find("table1/tinyimagenet/fastibp-k0").training
    short = training.experiment(epochs=50).settings
    assert short.epochs == 50
    assert isinstance(short.radius_schedule, SmoothRadius)
    assert short.radius_schedule.length == 20
    assert isinstance(short.learning_rate, StepDecay)
    assert short.learning_rate.epochs == (30, 35)
    # A run that is shorter than its recipe keeps its share.
    other = paper.find("table1/cifar10/fastibp-k0-at-8").training
    assert other.experiment(epochs=50).settings.epochs == 40
    assert other.experiment(epochs=200) == other.experiment()
    assert training.folder_name(seed=1, epochs=50) == "tinyimagenet-fastibp-k0-e50-s1"
    assert other.recipe_epochs == recipe("cifar10", "fastibp").settings.epochs


# -- finding rows -------------------------------------------------------------------------


def test_rows_are_found_by_table_data_set_and_beginning():
    assert paper.selected([]) == [*paper.ROWS]
    assert {row.part for row in paper.selected(["table2"])} == {"table2"}
    assert {row.dataset for row in paper.selected(["mnist"])} == {"mnist"}
    assert len(paper.selected(["table1/mnist"])) == 5
    one = paper.selected(["table1/mnist/standard"])
    assert [row.id for row in one] == ["table1/mnist/standard"]
    assert one[0].published == Published(accuracy=99.24, acr=0.001, art=0.35)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(InvalidInput, match=r"no table, figure.*did you mean 'table1'"):
        paper.selected(["mnist", "tabel1"])
    with pytest.raises(InvalidInput, match="did you mean 'table1/mnist/acert-k0'"):
        paper.find("table1/mnist/acert")
