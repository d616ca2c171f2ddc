"""Figures of a split: quick ones agree with proven ones, and columns mean what they say."""

import zlib

import numpy as np
import pytest
import torch
from torch import nn

from acert import metrics, records
from acert.bounds.margin import certified_margin
from acert.data import Split, to_float
from acert.errors import InvalidInput
from acert.evaluation import Certificates, certify, evaluate, examples
from acert.radius import Status, certified_radius

MAX_RADIUS = 0.03


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3)
    )


@pytest.fixture(scope="module")
def split(model):
    """Samples of which some are wrong, some certified to the largest radius, some between."""
    generator = torch.Generator().manual_seed(2)
    images = (torch.rand((60, 1, 4, 4), generator=generator) * 255).to(torch.uint8)
    model.eval()
    with torch.no_grad():
        logits = model(to_float(images))
        # Centred, so that every class is predicted.
        model[4].bias -= logits.mean(0)
        labels = model(to_float(images)).argmax(1)
    model.train()
    labels[::5] = (labels[::5] + 1) % 3
    return Split(images, labels)


@pytest.fixture(scope="module")
def certificates(model, split):
    return certify(model, split, max_radius=MAX_RADIUS, batch_size=25)


def test_the_samples_are_of_every_kind(certificates):
    assert set(certificates.status) == {
        Status.MISCLASSIFIED, Status.CERTIFIED_TO_MAX, Status.ROOT
    }  # fmt: skip


# -- evaluate -----------------------------------------------------------------------------


@pytest.mark.parametrize("elide", [True, False])
def test_quick_figures_agree_with_proven_ones(model, split, elide):
    quick = evaluate(model, split, max_radius=MAX_RADIUS, elide=elide, batch_size=25)
    proven = certify(model, split, max_radius=MAX_RADIUS, elide=elide)
    assert quick.accuracy == proven.accuracy == 0.8
    assert quick.acr == pytest.approx(proven.acr, rel=2e-4)
    assert quick.art == pytest.approx(proven.art, rel=2e-4)
    assert quick.art == metrics.art(quick.accuracy, quick.acr)


def test_plain_margins_certify_less(model, split):
    elided, plain = (
        evaluate(model, split, max_radius=MAX_RADIUS, elide=elide) for elide in (True, False)
    )
    assert plain.acr < elided.acr


def test_figures_do_not_depend_on_the_batch(model, split):
    one = evaluate(model, split, max_radius=MAX_RADIUS, batch_size=7)
    other = evaluate(model, split, max_radius=MAX_RADIUS)
    assert one.acr == pytest.approx(other.acr, rel=2e-4)


def test_a_domain_that_ends_earlier_certifies_more(model, split):
    images = to_float(split.images)
    tight = Split(images, split.labels)
    wide = evaluate(model, tight, max_radius=MAX_RADIUS, domain=(-1.0, 2.0))
    clamped = evaluate(model, tight, max_radius=MAX_RADIUS)
    assert clamped.acr > wide.acr


@pytest.mark.parametrize("call", [evaluate, certify])
def test_the_model_is_left_as_it_was_found(model, split, call):
    model.train()
    model[2].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    call(model, split, max_radius=MAX_RADIUS)
    assert [module.training for module in model] == [True, True, False, True, True]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    model.train()


@pytest.mark.parametrize("call", [evaluate, certify])
def test_a_failure_leaves_the_mode_too(split, call):
    broken = nn.Sequential(nn.Flatten(), nn.Linear(3, 3))
    with pytest.raises((RuntimeError, InvalidInput)):
        call(broken, split, max_radius=MAX_RADIUS)
    assert broken.training


def test_a_model_of_other_inputs_is_told_so(split):
    other = nn.Sequential(nn.Flatten(), nn.Linear(3, 3))
    with pytest.raises(InvalidInput, match=r"`model` must take the inputs, of shape .*mat1 and"):
        certify(other, split, max_radius=MAX_RADIUS)


def test_a_mistake_in_a_rule_is_told_as_it_is(split):
    """The model takes its inputs: what goes wrong is not its fault."""

    class Odd(nn.Module):
        def forward(self, x):
            if not isinstance(x, torch.Tensor):
                raise RuntimeError("only with an interval")
            return x.flatten(1)

    with pytest.raises(RuntimeError, match="only with an interval"):
        certify(Odd(), split, max_radius=MAX_RADIUS)


@pytest.mark.parametrize("call", [evaluate, certify])
def test_progress_hears_how_many_samples_are_done(model, split, call):
    heard: list[int] = []
    call(model, split, max_radius=MAX_RADIUS, batch_size=25, progress=heard.append)
    assert heard == [25, 50, 60]


# -- certify ------------------------------------------------------------------------------


def test_columns_are_those_of_the_certified_radius(model, split, certificates):
    model.eval()
    images = to_float(split.images)
    result = certified_radius(model, images, split.labels, max_radius=MAX_RADIUS)
    np.testing.assert_array_equal(certificates.index, np.arange(60))
    np.testing.assert_array_equal(certificates.label, split.labels)
    np.testing.assert_array_equal(certificates.prediction, result.prediction)
    np.testing.assert_array_equal(certificates.status, result.status)
    np.testing.assert_allclose(certificates.radius, result.value, rtol=2e-5)
    with torch.no_grad():
        at_zero = certified_margin(model, images, split.labels, 0.0)
    np.testing.assert_allclose(certificates.margin, at_zero, rtol=1e-3, atol=1e-5)
    assert np.isnan(certificates.attack_radius).all()
    assert len(certificates) == 60
    model.train()


def test_a_sample_is_right_exactly_where_its_margin_is_negative(certificates):
    np.testing.assert_array_equal(certificates.correct, certificates.margin < 0)
    np.testing.assert_array_equal(
        certificates.correct, certificates.prediction == certificates.label
    )


def test_radii_are_below_the_proven_ones_and_survive_the_file(model, split, certificates, tmp_path):
    model.eval()
    exact = certified_radius(
        model, to_float(split.images), split.labels, max_radius=MAX_RADIUS, batch_size=25
    )
    model.train()
    reached = certificates.status == Status.CERTIFIED_TO_MAX
    assert (certificates.radius[reached] == MAX_RADIUS).all()
    inside = certificates.status == Status.ROOT
    assert (certificates.radius[inside] <= exact.value.numpy()[inside]).all()
    assert (certificates.radius[inside] == certificates.radius[inside].astype(np.float32)).all()
    records.write_certificates(tmp_path, certificates.columns)
    again = Certificates(**records.read_certificates(tmp_path))
    for name, value in certificates.columns.items():
        np.testing.assert_array_equal(getattr(again, name), value)
    assert (again.accuracy, again.acr, again.art) == (
        certificates.accuracy, certificates.acr, certificates.art
    )  # fmt: skip


def test_a_checksum_tells_test_images_apart(model, split, certificates):
    assert certificates.images == zlib.crc32(split.images.numpy().tobytes())
    other = Split(split.images.flip(0), split.labels)
    assert certify(model, other, max_radius=MAX_RADIUS).images != certificates.images


def test_figures_by_hand():
    by_hand = Certificates(
        index=np.arange(4),
        label=np.zeros(4, dtype=np.int64),
        prediction=np.array([0, 0, 0, 1]),
        radius=np.array([0.4, 0.2, 0.0, 0.0]),
        status=np.array([1, 2, 3, 0], dtype=np.uint8),
        margin=np.array([-1, -1, -1, 1], dtype=np.float32),
        attack_radius=np.full(4, np.nan, dtype=np.float32),
        max_radius=0.4,
        arithmetic="real",
        bounds="ibp",
    )
    assert by_hand.accuracy == 0.75
    assert by_hand.acr == pytest.approx(0.6 / 4 / 0.4)
    assert by_hand.art == pytest.approx((0.75 * 0.375) ** 0.5)
    shares = {at: by_hand.certified_accuracy(at) for at in (0.0, 0.1, 0.2, 0.3, 0.4)}
    assert shares == {0.0: 0.75, 0.1: 0.5, 0.2: 0.5, 0.3: 0.25, 0.4: 0.25}
    with pytest.raises(InvalidInput, match=r"`at` must be in \[0, 0\.4\].*got 0\.5"):
        by_hand.certified_accuracy(0.5)


@pytest.mark.parametrize("arithmetic", ["real", "float32", "nearest"])
def test_the_arithmetic_is_named_and_costs_little(model, split, certificates, arithmetic):
    found = certify(model, split, max_radius=MAX_RADIUS, arithmetic=arithmetic)
    assert (found.arithmetic, found.bounds) == (arithmetic, "ibp")
    assert found.acr == pytest.approx(certificates.acr, rel=1e-3)


def test_tighter_bounds_certify_no_less(model, split, certificates):
    found = certify(model, split, max_radius=MAX_RADIUS, bounds="crown-ibp")
    assert found.bounds == "crown-ibp"
    assert (found.radius >= certificates.radius * (1 - 1e-4)).all()


# -- examples -----------------------------------------------------------------------------


def test_examples_are_the_most_and_the_least_certified(split, certificates):
    chosen = examples(certificates, split, count=16)
    radius, margin = certificates.radius, certificates.margin
    most, least = chosen["most_index"], chosen["least_index"]
    assert len(most) == len(least) == 16
    assert radius[most].min() >= np.delete(radius, most).max()
    assert radius[least].max() <= np.delete(radius, least).min()
    # Twelve are wrong; the one by the widest margin comes first.
    assert margin[least[0]] == margin.max()
    assert (np.diff(margin[least[:12]]) <= 0).all()
    assert margin[most[0]] == margin[radius == MAX_RADIUS].min()
    np.testing.assert_array_equal(chosen["most_images"], split.images[most])
    np.testing.assert_array_equal(chosen["least_images"], split.images[least])


def test_float_examples_are_scaled_from_their_domain(certificates):
    images = torch.linspace(-1, 1, 60).reshape(60, 1)
    columns = certificates.columns | {"domain": (-1.0, 1.0)}
    chosen = examples(Certificates(**columns), Split(images, torch.zeros(60).long()), count=60)
    assert chosen["most_images"].dtype == np.uint8
    by_index = chosen["most_images"][np.argsort(chosen["most_index"]), 0]
    assert (by_index[0], by_index[-1]) == (0, 255)
    np.testing.assert_array_equal(by_index, np.rint(np.linspace(0, 255, 60)))


def test_a_small_split_has_fewer_examples(split, certificates):
    assert len(examples(certificates, split, count=100)["least_index"]) == 60


@pytest.mark.parametrize("figures", [certify, evaluate])
@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_holds_a_sample(model, split, figures, size):
    with pytest.raises(
        InvalidInput, match=f"`batch_size` must be an integer of at least 1 or None; got {size}"
    ):
        figures(model, split, max_radius=MAX_RADIUS, batch_size=size)
