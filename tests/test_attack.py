"""Attacks: as close as they can be, never closer than the truth, and fatal to wrong bounds."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from acert import cli, data, records
from acert.attack import attack_radius, check_certificates
from acert.attack import check as check_module
from acert.attack.exact_box import distance, float32_below, float32_box
from acert.attack.picture import draw_gap
from acert.bounds.interval import Interval
from acert.bounds.table import RULES
from acert.cli import certify as certify_verb
from acert.data import Split, to_float
from acert.errors import InvalidInput
from acert.evaluation import Certificates, certify
from acert.experiments.run import record_certification
from acert.radius import Status
from acert.zoo import load_model

MAX_RADIUS = 0.3
# Enough where what is tested does not depend on the attack's strength.
WEAK = {"steps": 5, "restarts": 1}


@pytest.fixture(scope="module")
def digits():
    """The shipped model and the first 64 images of its test set."""
    split = data.load_test("digits")
    return load_model("digits-acert"), Split(split.images[:64], split.labels[:64])


@pytest.fixture(scope="module")
def certificates(digits):
    return certify(*digits, max_radius=MAX_RADIUS)


def linear_classifier(classes):
    """A linear classifier and images that it is right about."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Linear(12, classes)
    with torch.no_grad():
        model.weight.copy_(torch.randn(classes, 12, generator=generator))
        model.bias.copy_(0.1 * torch.randn(classes, generator=generator))
    images = torch.rand(40, 12, generator=generator)
    return model, images, model(images).argmax(1)


@pytest.fixture(scope="module")
def linear():
    return linear_classifier(4)


def exact_radius(model, image, label, domain):
    """The smallest radius at which a linear classifier's prediction changes, in float64."""
    weight, bias = model.weight.detach().double(), model.bias.detach().double()
    image = image.double()
    radii = []
    for other in set(range(len(weight))) - {int(label)}:
        slope = weight[other] - weight[label]
        gap = -(slope @ image + bias[other] - bias[label])
        # How far each coordinate may go the way that helps the other class.
        low, high = (-torch.inf, torch.inf) if domain is None else domain
        room = torch.where(slope > 0, high - image, image - low)
        least, most = 0.0, 10.0
        for _ in range(80):
            middle = (least + most) / 2
            reached = (slope.abs() * room.clamp(max=middle)).sum() >= gap
            least, most = (least, middle) if reached else (middle, most)
        radii.append(most)
    return min(radii)


# -- the radius ---------------------------------------------------------------------------


@pytest.mark.parametrize(("classes", "largest"), [(2, 0.15), (4, 0.4)])
@pytest.mark.parametrize("domain", [None, (0.0, 1.0)])
def test_a_linear_classifier_is_broken_where_it_can_be(domain, classes, largest):
    model, images, labels = linear_classifier(classes)
    truth = torch.tensor(
        [exact_radius(model, *sample, domain) for sample in zip(images, labels, strict=True)],
        dtype=torch.float64,
    )
    found = attack_radius(model, images, labels, max_radius=largest, domain=domain)
    reachable = truth < largest
    assert 20 < reachable.sum() < 40
    np.testing.assert_array_equal(found.radius.isfinite(), reachable)
    radius = found.radius[reachable]
    # Below only by what float32 cannot tell apart.
    assert (radius > truth[reachable] * (1 - 1e-5)).all()
    assert (radius <= truth[reachable] + largest / 256 * 1.001).all()
    assert (found.margin[reachable] >= 0).all()
    assert (found.margin[~reachable] < 0).all()
    assert torch.equal(found.points[~reachable], images[~reachable])


@pytest.mark.parametrize("domain", [(0.0, 1.0), (torch.zeros(12), torch.ones(12))])
def test_points_are_what_the_result_says(linear, domain):
    model, images, labels = linear
    found = attack_radius(model, images, labels, max_radius=0.4, domain=domain)
    broken = found.radius.isfinite()
    assert ((found.points >= 0) & (found.points <= 1)).all()
    apart = (found.points[broken].double() - images[broken].double()).abs().amax(1)
    assert torch.equal(apart, found.radius[broken])
    own = F.one_hot(labels, 4).bool()
    logits = model(found.points)
    others = logits.masked_fill(own, -torch.inf).amax(1)
    assert torch.equal(others >= logits[own], broken)
    torch.testing.assert_close(found.margin, others - logits[own])


def test_the_domain_protects(linear):
    model, images, labels = linear
    inside = attack_radius(model, images, labels, max_radius=0.4).radius
    outside = attack_radius(model, images, labels, max_radius=0.4, domain=None).radius
    assert (inside >= outside - 0.4 / 256 * 1.001).all()
    assert (inside > outside + 0.4 / 256).sum() > 5


def test_images_that_are_wrong_or_tied_have_radius_zero():
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    images = torch.tensor([[0.2, 0.6], [0.5, 0.5], [0.6, 0.2]])
    found = attack_radius(model, images, torch.zeros(3).long(), max_radius=0.3)
    assert found.radius[:2].tolist() == [0.0, 0.0]
    assert 0.2 * (1 - 1e-6) < found.radius[2] <= 0.2 + 0.3 / 256
    assert torch.equal(found.points[:2], images[:2])
    assert found.margin[1] == 0


def test_the_certified_radius_is_tried_and_bisection_starts_at_zero_all_the_same(linear):
    model, images, labels = linear
    plain = attack_radius(model, images, labels, max_radius=0.4)
    claimed = torch.full((40,), 0.4, dtype=torch.float64)
    claimed[:10] = 0.3
    claimed[10:20] = 0.0
    found = attack_radius(model, images, labels, max_radius=0.4, certified=claimed)
    torch.testing.assert_close(found.radius, plain.radius, rtol=0, atol=0.4 / 128)
    proof = found.at_certified
    held = claimed[proof.sample]
    assert (proof.distance <= held).all()
    assert (proof.distance > held - 1e-6).all()  # at the very radius, not below it
    assert (proof.margin >= 0).all()
    expected = (plain.radius < claimed - 0.4 / 256).nonzero().squeeze(1)
    assert set(expected.tolist()) <= set(proof.sample.tolist())
    assert len(expected) > 10
    assert plain.at_certified.sample.tolist() == []


def test_stored_radii_reach_the_nodes_of_the_bisection(linear):
    """A success at max_radius is one at max_radius when it is read from a file, too."""
    model, images, labels = linear
    largest = 0.1  # above the nearest float32 number below it
    found = attack_radius(model, images, labels, max_radius=largest).radius.numpy()
    stored = records.rounded_up(found)
    finite = np.isfinite(found)
    assert (stored.astype(np.float64) >= found)[finite].all()
    assert (stored[finite].astype(np.float64) <= largest).all()


def test_more_starts_find_more(digits):
    model, split = digits
    images, labels = to_float(split.images), split.labels
    few = attack_radius(model, images, labels, max_radius=MAX_RADIUS, restarts=1)
    many = attack_radius(model, images, labels, max_radius=MAX_RADIUS, restarts=6)
    mean = [found.radius.clamp(max=MAX_RADIUS).mean() for found in (few, many)]
    assert mean[1] < mean[0]


def test_an_output_that_is_no_number_is_no_right_prediction():
    class Breaks(nn.Module):
        def forward(self, x):
            return torch.stack((x[:, 0] * 0 + 1, -(0.6 - x[:, 0]).sqrt()), 1)

    found = attack_radius(Breaks(), torch.tensor([[0.5], [0.1]]), torch.tensor([0, 0]),
                          max_radius=0.3, domain=None)  # fmt: skip
    assert 0.1 < found.radius[0] < 0.1 + 0.3 / 256 + 1e-6
    assert found.points.isfinite().all()
    assert found.margin[0] == torch.inf
    assert found.radius[1] == torch.inf


# -- what is left alone -------------------------------------------------------------------


class Counts(nn.Module):
    """Counts its calls in a buffer, drops out in training, and keeps one weight frozen."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout())
        self.outer = nn.Linear(8, 3).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.outer(self.inner(x))


@pytest.fixture
def counting():
    torch.manual_seed(1)
    model = Counts()
    images = torch.rand(20, 4)
    with torch.no_grad():
        model.outer.bias -= model.eval()(images).mean(0)  # so that every class is predicted
        labels = model(images).argmax(1)
    model.train()
    model.inner[1].eval()
    return model, images, labels


def test_everything_is_left_as_it_was_found(counting):
    model, images, labels = counting
    images.requires_grad_()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pictures = images.detach().clone()
    backends = torch.backends
    kept = (backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision)
    state = torch.get_rng_state()
    with torch.no_grad():  # gradients are its own affair
        found = attack_radius(model, images, labels, max_radius=0.5)
    assert found.radius.isfinite().any()
    assert not found.points.requires_grad
    assert torch.equal(images, pictures)
    assert images.grad is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.inner] == [True, False, True, True]
    assert [parameter.requires_grad for parameter in model.parameters()] == [True] * 4 + [False] * 2
    assert all(parameter.grad is None for parameter in model.parameters())
    assert kept == (backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_same_seed_gives_the_same_points(counting):
    model, images, labels = counting
    one, same, other = (
        # One step, since long ways from anywhere end in the same corner.
        attack_radius(model, images, labels, max_radius=0.5, seed=seed, steps=1)
        for seed in (1, 1, 2)
    )
    assert torch.equal(one.points, same.points)
    assert torch.equal(one.radius, same.radius)
    assert not torch.equal(one.points, other.points)


def test_batches_change_little(linear):
    model, images, labels = linear
    one, other = (
        attack_radius(model, images, labels, max_radius=0.4, batch_size=size) for size in (16, None)
    )
    torch.testing.assert_close(one.radius, other.radius, rtol=0, atol=0.4 / 128)


def test_progress_rises_to_the_number_of_samples(linear):
    model, images, labels = linear
    heard: list[int] = []
    attack_radius(model, images, labels, max_radius=0.4, progress=heard.append, **WEAK)
    assert heard == list(range(4, 44, 4))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "`steps` must be an integer of at least 1; got 0"),
        ({"steps": 2.5}, "`steps` must be an integer of at least 1; got 2.5"),
        ({"restarts": 0}, "`restarts` must be an integer of at least 1; got 0"),
        ({"max_radius": 0.0}, "`max_radius` must be a finite number above 0; got 0.0"),
        ({"max_radius": -1.0}, "`max_radius` must be a finite number above 0; got -1.0"),
        ({"batch_size": 0}, "`batch_size` must be an integer of at least 1 or None; got 0"),
        ({"certified": torch.full((40,), -1.0)}, "`radius` must be finite and at least 0; got -1"),
        ({"labels": torch.full((40,), 4)}, r"`labels` must be in \[0, 3\]; got values in \[4, 4\]"),
        ({"images": torch.full((40, 12), 1.5)}, "`images` must lie in the domain"),
        ({"images": torch.rand(40, 12).double()}, "needs float32; got `images` of torch.float64"),
        ({"model": nn.Linear(12, 4).bfloat16()}, "needs float32; got `weight` of torch.bfloat16"),
    ],
)
def test_refusals(linear, changes, words):
    model, images, labels = linear
    asked = {"model": model, "images": images, "labels": labels, "max_radius": 0.4} | changes
    with pytest.raises(InvalidInput, match=words):
        attack_radius(**asked)


@pytest.mark.parametrize("forward", [lambda x: x.detach(), torch.no_grad()(lambda x: x * 1)])
def test_a_model_without_slopes_is_refused_by_name(forward):
    class Flat(nn.Linear):
        def forward(self, x):
            return super().forward(forward(x))

    model, images = Flat(4, 3), torch.rand(8, 4)
    with pytest.raises(InvalidInput, match="`model` must let gradients through to its input"):
        attack_radius(model, images, model(images).argmax(1), max_radius=0.1)


def test_inference_mode_is_refused(linear):
    with torch.inference_mode(), pytest.raises(InvalidInput, match="inference_mode"):
        attack_radius(*linear, max_radius=0.4)


# -- exact boxes --------------------------------------------------------------------------

PIXELS = st.floats(-2, 2, width=32)


@settings(max_examples=300)
@given(PIXELS, PIXELS)
def test_distances_are_exact_or_rounded_up(point, image):
    found = distance(torch.tensor([point]), torch.tensor([image])).item()
    exact = abs(Fraction(point) - Fraction(image))
    assert Fraction(found) >= exact
    assert found == 0 or Fraction(np.nextafter(found, 0.0)) < exact


@settings(max_examples=300)
@given(PIXELS, st.floats(0, 1), st.sampled_from([None, (-0.1, 0.1), (0.3, 0.7)]))
def test_boxes_hold_all_float32_numbers_of_the_exact_box_and_no_other(image, radius, domain):
    image = torch.tensor([[image]])
    lower, upper = float32_box(image, torch.tensor([radius], dtype=torch.float64), domain)
    centre, reach = Fraction(image.item()), Fraction(radius)
    low, high = domain or (-9.0, 9.0)
    least = min(max(centre - reach, Fraction(low)), centre)
    most = max(min(centre + reach, Fraction(high)), centre)
    ends = (lower.item(), upper.item())
    assert least <= Fraction(ends[0]) <= Fraction(ends[1]) <= most
    beyond = [
        float(np.nextafter(np.float32(end), np.float32(way)))
        for end, way in zip(ends, (-np.inf, np.inf), strict=True)
    ]
    assert Fraction(beyond[0]) < least
    assert Fraction(beyond[1]) > most


@settings(max_examples=100)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5))
def test_rounding_to_float32_is_safe_either_way(values):
    exact = np.array(values)
    below, above = float32_below(torch.tensor(exact)).numpy(), records.rounded_up(exact)
    assert (below.astype(np.float64) <= exact).all()
    assert (above.astype(np.float64) >= exact).all()
    assert (np.nextafter(below, np.float32(np.inf)).astype(np.float64) > exact).all()
    assert (np.nextafter(above, np.float32(-np.inf)).astype(np.float64) < exact).all()


def test_infinity_stays_infinity():
    assert records.rounded_up(np.array([np.inf]))[0] == np.inf


# -- against certificates -----------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", ["real", "float32"])
def test_no_attack_inside_a_certificate_of_the_shipped_model(digits, certificates, arithmetic):
    proven = certificates
    if arithmetic == "float32":
        proven = certify(*digits, max_radius=MAX_RADIUS, arithmetic=arithmetic)
    found = check_certificates(*digits, proven)
    assert found.promised
    assert (found.violations, found.rounding_only) == ((), 0)
    attack = found.certificates.attack_radius
    assert attack.dtype == np.float32
    right = proven.correct
    assert (attack[right] > proven.radius[right]).all()
    assert (attack[~right] == 0).all()
    assert (~right).sum() > 0
    # Not vacuous: many are broken, most of them close to what is certified.
    broken = right & np.isfinite(attack)
    assert broken.sum() > 15
    assert np.median(attack[broken] - proven.radius[broken]) < 0.1 * MAX_RADIUS
    assert found.certificates.attacked_acr > proven.acr
    for at in np.linspace(0, MAX_RADIUS, 13):
        assert found.certificates.attacked_accuracy(at) >= proven.certified_accuracy(at)


@pytest.fixture
def unsound(monkeypatch):
    """ReLU's rule with the right center and half the radius: nothing but an attack can tell."""
    entry = RULES[F.relu]

    def halved(input, *rest, **named):
        bounds = entry.rule(input, *rest, **named)
        return Interval.ball(bounds.center, bounds.radius / 2)

    monkeypatch.setitem(RULES, F.relu, replace(entry, rule=halved))


@pytest.mark.parametrize("arithmetic", ["real", "float32", "nearest"])
def test_a_planted_unsound_rule_is_caught(digits, certificates, unsound, arithmetic):
    wrong = certify(*digits, max_radius=MAX_RADIUS, arithmetic=arithmetic)
    assert wrong.acr > certificates.acr + 0.05  # certification itself does not notice
    found = check_certificates(*digits, wrong)
    assert found.promised == (arithmetic != "nearest")
    assert len(found.violations) > 10
    assert found.rounding_only == 0
    radius = found.certificates.attack_radius
    named = [violation.index for violation in found.violations]
    assert named == sorted(set(named))
    assert set(named) == set(np.flatnonzero((radius <= wrong.radius) & (wrong.radius > 0)))
    one = found.violations[0]
    assert one.radius == wrong.radius[one.index]
    assert 0 < one.distance <= one.radius
    assert one.margin > 0
    assert str(one) == (
        f"image {one.index} is certified up to {one.radius!r}, but an attack at distance "
        f"{one.distance!r} changes its prediction (margin {one.margin:.3g})"
    )
    # The evidence is kept, before any other point.
    kept = found.attacks
    assert kept["index"][kept["violation"]].tolist() == named
    point = torch.from_numpy(kept["images"][0])
    model, split = digits
    image = to_float(split.images[one.index])
    assert (point.double() - image.double()).abs().max().item() == one.distance
    assert model(point.unsqueeze(0)).argmax().item() != split.labels[one.index]


def certificates_by_hand(labels, *, radius, arithmetic, max_radius=MAX_RADIUS):
    """Certificates that claim this radius of samples that all are right."""
    count = len(labels)
    return Certificates(
        index=np.arange(count),
        label=labels.numpy(),
        prediction=labels.numpy(),
        radius=np.full(count, radius) if np.isscalar(radius) else radius,
        status=np.full(count, Status.ROOT, dtype=np.uint8),
        margin=np.full(count, -1, dtype=np.float32),
        attack_radius=np.full(count, np.nan, dtype=np.float32),
        max_radius=max_radius,
        arithmetic=arithmetic,
        bounds="ibp",
    )


def test_what_only_rounding_does_is_counted_apart():
    torch.manual_seed(0)
    model = nn.Linear(64, 2)
    images = 0.25 + 0.5 * torch.rand(60, 64, dtype=torch.float64)
    labels = torch.zeros(60, dtype=torch.int64)
    with torch.no_grad():
        # Margins of -1e-4 among logits of 1e4: float32 cannot tell.
        model.weight.mul_(1e4)
        weight, bias = model.weight.double(), model.bias.double()
        slope = weight[1] - weight[0]
        step = (images @ slope + bias[1] - bias[0] + 1e-4) / slope.square().sum()
        images = (images - step.unsqueeze(1) * slope).float()
    split = Split(images, labels)
    real = certify(model, split, max_radius=0.1)
    held = (real.radius > 0).sum()
    assert held > 20
    found = check_certificates(model, split, real)
    assert found.violations == ()
    assert 0 < found.rounding_only <= held
    # The same radii under the other promise are wrong.
    claimed = replace(real, arithmetic="float32")
    wrong = check_certificates(model, split, claimed)
    assert (len(wrong.violations), wrong.rounding_only) == (found.rounding_only, 0)


def test_a_rule_with_a_wrong_center_cannot_acquit(monkeypatch):
    """Bounds that say nothing of the network must not turn its attacks into rounding."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(torch.eye(2))
            layer.bias.zero_()
    split = Split(torch.tensor([[0.5, 0.25]]), torch.tensor([0]))
    claimed = certificates_by_hand(split.labels, radius=0.2, arithmetic="real")

    def elsewhere(input, *rest, **named):
        return Interval.ball(torch.ones_like(input.center) * torch.tensor([9.0, 0.0]).double(),
                             torch.zeros_like(input.center))  # fmt: skip

    monkeypatch.setitem(RULES, F.relu, replace(RULES[F.relu], rule=elsewhere))
    found = check_certificates(model, split, claimed)
    assert [violation.index for violation in found.violations] == [0]
    assert found.rounding_only == 0


def test_blocks_keep_positions(digits, certificates, unsound, monkeypatch):
    model, split = digits
    wrong = certify(*digits, max_radius=MAX_RADIUS, arithmetic="float32")
    whole = check_certificates(*digits, wrong, **WEAK)
    monkeypatch.setattr(check_module, "_BLOCK", 20)
    monkeypatch.setattr(check_module, "_STORED", 5)
    heard: list[int] = []
    found = check_certificates(model, split, wrong, progress=heard.append, **WEAK)
    assert heard == sorted(heard)
    assert heard[-1] == 64
    # Other starts, so not all of them are found twice.
    named, before = ({one.index for one in each.violations} for each in (found, whole))
    assert len(named & before) > 10
    zero = found.certificates.attack_radius == 0
    np.testing.assert_array_equal(zero, ~wrong.correct)
    assert found.attacks["index"].tolist() == [v.index for v in found.violations][:5]
    for index, point in zip(found.attacks["index"], found.attacks["images"], strict=True):
        apart = np.abs(point - to_float(split.images[index]).numpy()).max()
        assert apart <= wrong.radius[index] * (1 + 1e-6)


def test_other_samples_are_refused(digits, certificates):
    model, split = digits
    short = Split(split.images[:9], split.labels[:9])
    with pytest.raises(InvalidInput, match="must be of the same 9 samples; got 64"):
        check_certificates(model, short, certificates)


# -- figures and files --------------------------------------------------------------------


@pytest.fixture
def by_hand():
    labels = torch.zeros(5).long()
    radius = np.array([0.4, 0.1, 0.0, 0.0, 0.2])
    claimed = certificates_by_hand(labels, radius=radius, arithmetic="real", max_radius=0.4)
    return replace(
        claimed,
        status=np.array([1, 2, 3, 0, 2], dtype=np.uint8),
        attack_radius=np.array([np.inf, 0.25, 0.125, 0, 0.125], dtype=np.float32),
    )


def test_attacked_figures_by_hand(by_hand):
    assert by_hand.attacked
    shares = {at: by_hand.attacked_accuracy(at) for at in (0.0, 0.125, 0.2, 0.25, 0.4)}
    assert shares == {0.0: 0.8, 0.125: 0.4, 0.2: 0.4, 0.25: 0.2, 0.4: 0.2}
    assert by_hand.attacked_acr == pytest.approx((0.4 + 0.25 + 0.125 + 0.125) / 5 / 0.4)
    with pytest.raises(InvalidInput, match=r"`at` must be in \[0, 0\.4\].*got 0\.5"):
        by_hand.attacked_accuracy(0.5)


def test_figures_need_an_attack(certificates):
    assert not certificates.attacked
    with pytest.raises(InvalidInput, match="`attack_radius` must hold every sample's"):
        certificates.attacked_accuracy(0.1)


def test_files_hold_radii_and_points(digits, certificates, tmp_path):
    model, split = digits
    found = check_certificates(model, split, certificates, **WEAK)
    record_certification(tmp_path, found.certificates, split, attacks=found.attacks)
    again = Certificates(**records.read_certificates(tmp_path))
    np.testing.assert_array_equal(again.attack_radius, found.certificates.attack_radius)
    kept = records.read_attacks(tmp_path)
    assert kept["images"].dtype == np.float32
    radius = found.certificates.attack_radius
    assert kept["index"].tolist() == np.flatnonzero(np.isfinite(radius) & (radius > 0)).tolist()
    np.testing.assert_array_equal(kept["radius"], radius[kept["index"]])
    assert (kept["margin"] >= 0).all()
    assert not kept["violation"].any()
    # Certificates of another day say nothing of these points.
    record_certification(tmp_path, certificates, split)
    assert not (tmp_path / records.ATTACKS).exists()


def test_the_picture_shows_every_kind_of_sample(by_hand, tmp_path):
    draw_gap(by_hand, tmp_path / "gap.png")
    with (tmp_path / "gap.png").open("rb") as stream:
        assert stream.read(8) == b"\x89PNG\r\n\x1a\n"


# -- the command --------------------------------------------------------------------------

EFFORT = ["--attack-steps", "4", "--attack-restarts", "1", "--device", "cpu"]


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = data.load_test("digits")
    small = Split(small.images[:64], small.labels[:64])
    monkeypatch.setattr(data, "load_test", lambda *rest, **named: small)

    def run(*words):
        status = cli.main(["certify", "digits-acert", "--out", "out", *words])
        return status, *capsys.readouterr()

    return run


def test_the_command_prints_both_bounds(call, tmp_path):
    status, out, err = call("--attack", *EFFORT, "--radii", "0.15,0.3")
    assert (status, err) == (0, "")
    found = Certificates(**records.read_certificates(tmp_path / "out"))
    lines = out.splitlines()
    certified, attacked = found.certified_accuracy(0.15), found.attacked_accuracy(0.15)
    assert lines[2] == (
        f"certified at 0.15: {100 * certified:.2f} %  not broken: {100 * attacked:.2f} %"
    )
    lower, upper = 100 * found.acr, 100 * found.attacked_acr
    assert lines[4] == (
        f"average radius over max_radius: certified {lower:.2f} %, attacked {upper:.2f} %, "
        f"mean gap {upper - lower:.2f} %"
    )
    assert lines[5] == "attacks inside a certified radius: 0"
    assert lines[6] == ("wrote certificates.npz, examples.npz, attacks.npz, attack-gap.png to out")
    assert (tmp_path / "out" / "attack-gap.png").is_file()
    assert len(records.read_attacks(tmp_path / "out")["index"]) > 5

    status, out, _ = call("--device", "cpu")
    assert status == 0
    assert "broken" not in out
    assert out.endswith("wrote certificates.npz and examples.npz to out\n")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"certificates.npz", "examples.npz"}


def test_the_command_reports_a_bug_and_keeps_the_records(call, tmp_path, unsound, monkeypatch):
    monkeypatch.setattr(certify_verb, "_SHOWN", 3)
    status, out, err = call("--attack", *EFFORT)
    assert status == 1
    found = records.read_attacks(tmp_path / "out")
    count = int(found["violation"].sum())
    lines = err.splitlines()
    assert len(lines) == 4
    first = found["index"][0]
    assert lines[0].startswith(f"BUG: image {first} is certified up to 0.")
    assert lines[3] == f"BUG: and {count - 3} more images"
    assert f"attacks inside a certified radius: {count}. A bound is wrong" in out
    assert np.isfinite(records.read_certificates(tmp_path / "out")["attack_radius"]).any()


def test_nearest_radii_promise_nothing(call, unsound):
    status, out, err = call("--attack", *EFFORT, "--arithmetic", "nearest")
    assert status == 0
    assert err.startswith("note: image ")
    assert '"nearest" radii promise nothing' in out


def test_rounding_is_told(call, monkeypatch):
    def check(model, split, certificates, **named):
        found = check_certificates(model, split, certificates, **named)
        return replace(found, rounding_only=2)

    monkeypatch.setattr(certify_verb, "check_certificates", check)
    status, out, _ = call("--attack", *EFFORT)
    assert status == 0
    assert "by float32 rounding only: 2; --arithmetic float32 covers them" in out


def test_without_matplotlib_there_is_no_picture(call, monkeypatch, tmp_path):
    def draw(*rest):
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr(certify_verb, "draw_gap", draw)
    status, out, err = call("--attack", *EFFORT)
    assert status == 0
    assert err == "no picture of the gap: it needs the package matplotlib\n"
    assert "examples.npz, attacks.npz to out" in out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--attack-steps", "3"], "`--attack-steps` must come with `--attack`"),
        (["--attack", "--attack-restarts", "0"], "`--attack-restarts` must be above 0; got 0"),
    ],
)
def test_the_command_refuses(call, words, reason):
    status, _, err = call(*words)
    assert (status, err) == (2, f"acert: {reason}\n")
