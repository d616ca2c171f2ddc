"""The training methods: their radii, boxes and attacks, and that each of them trains."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import acert
from acert import Bisection, Brent, InvalidInput, PowerLaw, RootStatus, data
from acert.bounds import clean_pass
from acert.experiments.experiment import Experiment, from_config, to_config
from acert.methods import (
    METHODS,
    Acert,
    AcertFast,
    CcIBP,
    CrownIBP,
    ExpIBP,
    FastIBP,
    MtlIBP,
    Sabr,
    Standard,
)
from acert.methods.base import Step, attack_loss
from acert.models import Normalize, cnn7, ibp_init_, mlp
from acert.schedules import SmoothRadius
from acert.settings import Settings
from acert.training import Trainer

DOMAIN = (0.0, 1.0)


def network(seed=0, samples=32):
    """A network of 6 inputs and 4 classes, right about all images but the first."""
    torch.manual_seed(seed)
    model = mlp(6, [10, 8], 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
        images = torch.rand(samples, 6)
        model[-1].bias -= model(images).mean(0)  # else one class wins everywhere
        labels = model(images).argmax(1)
    labels[0] = (labels[0] + 1) % 4
    return model, images, labels


def step_of(model, images, labels, *, cap=0.1, progress=0.5, anchors=None, elide=True,
            settled=False):  # fmt: skip
    logits, statistics = clean_pass(model, images)
    return Step(
        model=model,
        images=images,
        labels=labels,
        logits=logits,
        statistics=statistics,
        cap=torch.tensor(cap),
        progress=torch.tensor(progress),
        least_radius=0.0,
        anchors=images if anchors is None else anchors,
        domain=DOMAIN,
        elide=elide,
        observe=False,
        settled=settled,
    )


def other_memory(weight):
    weight.data = -2 * weight.data


@pytest.mark.parametrize(
    ("write", "later"), [(lambda weight: None, 0), (lambda weight: weight.mul_(-2), 1),
                         (other_memory, 1)],
    ids=["as they were", "written to", "other memory"],
)  # fmt: skip
def test_passes_of_a_step_share_what_they_make_of_weights(write, later, monkeypatch):
    """Their margins are those of passes that share nothing, even if a weight changes between."""
    torch.manual_seed(0)
    model = cnn7((1, 6, 6), 3, width=2, normalize=Normalize(0.4, 0.2)).double()
    images, labels = torch.rand(5, 1, 6, 6, dtype=torch.float64), torch.arange(5) % 3
    plain = step_of(model, images, labels)
    folded = dataclasses.replace(plain, fold=True)
    made, absolute = [], torch.abs
    monkeypatch.setattr(torch, "abs", lambda x: made.append(x) or absolute(x))
    for largest, weights in ((0.1, 7), (0.3, later), (0.02, later)):  # of seven layers
        radius = torch.linspace(0, largest, 5, dtype=torch.float64)
        found = folded.margin(radius)
        assert len(made) == weights
        torch.testing.assert_close(found, plain.margin(radius), atol=1e-12, rtol=1e-11)
        made.clear()
        with torch.no_grad():
            write(model[1].weight)


# -- ACERT ------------------------------------------------------------------------------


def exact_radii(model, images, labels, cap):
    return acert.certified_radius(
        model, images, labels, max_radius=cap, arithmetic="nearest"
    ).value.float()


@pytest.mark.parametrize("solver", [Brent(rtol=1e-6, max_steps=40), Bisection(max_steps=40)])
def test_acert_finds_the_certified_radius(solver):
    model, images, labels = network()
    radius = Acert(solver=solver).radius(step_of(model, images, labels, cap=0.05))
    exact = exact_radii(model, images, labels, 0.05)
    assert radius[0] == 0
    assert (radius == torch.tensor(0.05)).any()
    inside = (exact > 0) & (exact < 0.05)
    assert inside.sum() > 5
    torch.testing.assert_close(radius, exact, atol=1e-6, rtol=1e-4)
    assert not radius.requires_grad


def test_acert_with_batch_norm_uses_the_batch_statistics():
    model = ibp_init_(cnn7((1, 8, 8), 4, width=2))
    images = torch.rand(16, 1, 8, 8)
    with torch.no_grad():
        model[-1].bias -= model(images).mean(0)
        labels = model(images).argmax(1)  # in training: the batch's own statistics
    step = step_of(model, images, labels, cap=0.02)
    radius = Acert(solver=Brent(max_steps=40)).radius(step)
    inside = (radius > 0) & (radius < 0.02)
    assert inside.any()
    below, above = (
        acert.certified_margin(model, images, labels, share * radius, statistics=step.statistics)
        for share in (0.999, 1.001)
    )
    assert (below[inside] < 0).all()
    assert (above[inside] > 0).all()


def test_two_steps_train_at_the_estimate_not_at_the_certified_end():
    model, images, labels = network(samples=256)
    step = step_of(model, images, labels, cap=0.2)
    exact = exact_radii(model, images, labels, 0.2)
    inside = (exact > 0) & (exact < 0.2)
    two = Acert(solver=Brent(max_steps=2))
    estimate = two.radius(step)
    zero = torch.zeros(len(images))
    end = two.solver.solve(step.margin, zero, zero + 0.2).lower
    assert torch.equal(estimate[~inside], exact[~inside])
    error = (estimate - exact).abs()[inside].mean()
    assert error < 0.25 * (end - exact).abs()[inside].mean()
    # The worst-case logits are those at the estimate.
    torch.testing.assert_close(
        two.worst_case_logits(step),
        acert.worst_case_logits(model, images, labels, estimate),
    )


def test_acert_fast_by_hand():
    # z = (x, 1 - x): class 0 is right above 1/2. At radius r, z_1 - z_0 <= 1 - 2x + 2r.
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model.bias.copy_(torch.tensor([0.0, 1.0]))
    images = torch.tensor([[0.75], [0.25], [0.95], [0.5]])  # right, wrong, right, tie
    labels = torch.zeros(4, dtype=torch.int64)
    found = AcertFast().worst_case_logits(step_of(model, images, labels, cap=0.125))
    # The third box ends at 1; the tie is not right.
    wanted = torch.tensor([[0.0, -0.25], [0.0, 0.5], [0.0, -0.65], [0.0, 0.0]])
    torch.testing.assert_close(found, wanted)


# -- CROWN-IBP --------------------------------------------------------------------------


@pytest.mark.parametrize("elide", [True, False])
def test_crown_ibp_is_intervals_alone_once_the_radius_has_settled(elide):
    results = []
    for settled in (False, True):
        model, images, labels = network()
        step = step_of(model, images, labels, progress=1.0, elide=elide, settled=settled)
        logits = CrownIBP().worst_case_logits(step)
        logits.square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append((logits.detach(), gradients))
        assert step.output.bound_pass.record is not settled
    torch.testing.assert_close(results[1], results[0])


class Mean(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


@pytest.mark.parametrize("settled", [False, True])
def test_crown_ibp_without_elision_takes_a_model_that_does_not_end_in_a_linear_layer(settled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 1), Mean())
    images, labels = torch.rand(6, 1, 5, 5), torch.randint(4, (6,))
    step = step_of(model, images, labels, progress=1.0, elide=False, settled=settled)
    plain = acert.worst_case_logits(model, images, labels, 0.1, elide=False)
    wanted = plain - plain.gather(1, labels.unsqueeze(1))
    torch.testing.assert_close(CrownIBP().worst_case_logits(step), wanted)


# -- SABR -------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.4, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_small_box_lies_inside_the_large_one(share, seed, monkeypatch):
    model, images, labels = network(seed)
    cap = torch.tensor(0.1)
    sabr = Sabr(box_share=share)
    noise = 2 * torch.rand_like(images) - 1
    anchors = sabr.anchors(model, images, labels, cap, noise, DOMAIN)
    step = step_of(model, images, labels, anchors=anchors)
    boxes = []

    def seen(centers, radius):
        boxes.append((centers, radius))
        return Step.bounds(step, centers, radius)

    monkeypatch.setattr(step, "bounds", seen)
    sabr.worst_case_logits(step)
    ((centers, radius),) = boxes
    assert torch.allclose(radius, torch.full((len(images),), share * 0.1))
    reach = (centers - images).abs() + radius[:, None]
    assert (reach <= 0.1 + 1e-7).all()
    # It goes as far as it can where the adversarial point lies at an end of the large box.
    if share < 1:
        assert (reach > 0.1 - 1e-6).float().mean() > 0.5
    else:
        assert torch.equal(centers, images)


def test_the_large_box_is_cut_to_the_domain_first_as_its_authors_do(monkeypatch):
    """By hand: a small box of 0.18 around points of a box of 0.3, at 0, inside and at 1."""
    model = nn.Linear(3, 2)
    images = torch.tensor([[0.0, 0.5, 1.0]])
    step = step_of(model, images, torch.tensor([0]), anchors=images, cap=0.3)
    centers = []
    for cut_first in (False, True):
        sabr = Sabr(box_share=0.6, cut_first=cut_first)
        with monkeypatch.context() as patched:
            patched.setattr(
                step, "bounds", lambda at, r: centers.append(at) or Step.bounds(step, at, r)
            )
            sabr.worst_case_logits(step)
    torch.testing.assert_close(centers, [images, torch.tensor([[0.12, 0.5, 0.82]])])


def test_the_attack_stays_in_the_box_and_raises_the_loss():
    model, images, labels = network()
    sabr, cap = Sabr(), torch.tensor(0.1)
    noise = 2 * torch.rand_like(images) - 1
    anchors = sabr.anchors(model, images, labels, cap, noise, DOMAIN)
    assert not anchors.requires_grad
    assert ((anchors - images).abs() <= 0.1 + 1e-6).all()
    assert ((anchors >= 0) & (anchors <= 1)).all()

    def loss(points):
        with torch.no_grad():
            return nn.functional.cross_entropy(model(points), labels, reduction="none")

    assert (loss(anchors) > loss(images)).all()
    started = (images + 0.1 * noise).clamp(0, 1)
    assert (loss(anchors) >= loss(started) - 1e-6).all()
    assert loss(anchors).mean() > loss(started).mean() + 0.05


def test_attack_steps_by_hand():
    # The loss of class 0 always rises with x, so every step goes up by its size.
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-1.0], [1.0]]))
    images, labels, noise = torch.tensor([[0.5]]), torch.tensor([0]), torch.tensor([[-1.0]])
    cap = torch.tensor(0.1)

    def reached(steps):
        points = Sabr(attack_steps=steps).anchors(model, images, labels, cap, noise, DOMAIN)
        return points.item() - 0.5

    assert reached(0) == pytest.approx(-0.1, abs=1e-6)
    assert reached(1) == pytest.approx(-0.05, abs=1e-6)
    assert reached(3) == pytest.approx(0.05, abs=1e-6)
    assert reached(4) == reached(8) == pytest.approx(0.1, abs=1e-6)


def test_later_attack_steps_are_smaller():
    # A gradient that turns its sign each time shows the size of every step.
    signs = iter([-1.0, 1.0] * 4)
    points = []

    def loss(model, at, labels, form):
        points.append(at.item())
        return next(signs) * at.sum()

    images, noise = torch.tensor([[0.5]]), torch.tensor([[0.0]])
    cap = torch.tensor(0.1)
    last = Sabr().anchors(nn.Identity(), images, torch.tensor([0]), cap, noise, DOMAIN, loss=loss)
    sizes = [abs(b - a) for a, b in zip(points, [*points[1:], last.item()], strict=True)]
    assert sizes == pytest.approx([0.05] * 4 + [0.005] * 3 + [0.0005], abs=1e-6)


def attack_gradient(loss, images):
    images = images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(images), images)
    return gradient


@pytest.mark.parametrize("seed", range(3))
def test_the_attack_climbs_cross_entropy(seed):
    model, images, labels = network(seed)
    model, images = model.double(), images.double()
    found = attack_gradient(lambda x: attack_loss(model, x, labels), images)
    wanted = attack_gradient(
        lambda x: nn.functional.cross_entropy(model(x), labels, reduction="sum"), images
    )
    assert (wanted != 0).any()
    assert torch.equal(found.sign(), wanted.sign())


def test_the_attack_sees_a_way_where_the_prediction_is_certain():
    model = nn.Linear(2, 3)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[900.0, 0.0], [0.0, 0.0], [0.0, 0.0]]))
    images, labels = torch.tensor([[1.0, 0.5]]), torch.tensor([0])
    by_entropy = attack_gradient(lambda x: nn.functional.cross_entropy(model(x), labels), images)
    assert torch.equal(by_entropy, torch.zeros(1, 2))
    assert attack_gradient(lambda x: attack_loss(model, x, labels), images)[0, 0] < 0


def test_the_attack_needs_a_gradient():
    class Detached(nn.Module):
        def forward(self, x):
            return x.detach()

    images, labels, cap = torch.rand(2, 3), torch.tensor([0, 1]), torch.tensor(0.1)
    with pytest.raises(InvalidInput, match="let gradients through to its input"):
        Sabr().anchors(Detached(), images, labels, cap, images, DOMAIN)


def test_the_attack_compiles():
    torch.compiler.reset()
    model = nn.Sequential(cnn7((1, 8, 8), 4, width=2), nn.Dropout(), nn.Linear(4, 4))
    for _ in range(3):
        model(torch.rand(16, 1, 8, 8))
    model, images = model.double(), torch.rand(8, 1, 8, 8, dtype=torch.float64)
    labels, cap = torch.arange(8) % 4, torch.tensor(0.1)
    noise = 2 * torch.rand_like(images) - 1
    loss = torch.compile(attack_loss, fullgraph=True, backend="aot_eager")
    eager, compiled = (
        Sabr().anchors(model, images, labels, cap, noise, DOMAIN, loss=each)
        for each in (attack_loss, loss)
    )
    torch.testing.assert_close(compiled, eager)
    assert all(parameter.grad is None for parameter in model.parameters())


class ByKeyword(nn.Module):
    """A batch norm of which every argument but the first is given by name."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("mean", torch.rand(3))
        self.register_buffer("variance", 1 + torch.rand(3))

    def forward(self, x):
        x = F.batch_norm(
            x, running_mean=self.mean, running_var=self.variance, training=self.training
        )
        return self.linear(x)


def test_the_attack_compiles_with_a_batch_norm_by_keyword():
    torch.compiler.reset()
    model, images, labels = ByKeyword(), torch.rand(5, 3), torch.arange(5) % 4
    loss = torch.compile(attack_loss, fullgraph=True, backend="aot_eager")
    expected = attack_loss(model.eval(), images, labels)
    torch.testing.assert_close(loss(model.train(), images, labels), expected)


def test_the_attack_uses_running_statistics_and_leaves_the_model_alone():
    model = cnn7((1, 8, 8), 4, width=2)
    for _ in range(3):
        model(torch.rand(16, 1, 8, 8))
    images, labels = torch.rand(8, 1, 8, 8), torch.arange(8) % 4
    before = {name: value.clone() for name, value in model.state_dict().items()}
    noise, cap = 2 * torch.rand_like(images) - 1, torch.tensor(0.1)
    found = Sabr().anchors(model, images, labels, cap, noise, DOMAIN)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    torch.testing.assert_close(found, Sabr().anchors(model, images, labels, cap, noise, DOMAIN))


# -- CC-IBP, MTL-IBP, Exp-IBP -----------------------------------------------------------

EXPRESSIVE = [CcIBP, MtlIBP, ExpIBP]


@pytest.mark.parametrize("method", EXPRESSIVE)
def test_one_step_of_the_attack_ends_in_a_corner(method):
    # The loss of class 0 always rises with the first number and falls with the second.
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-1.0, 1.0], [1.0, -1.0]]))
    images, labels = torch.tensor([[0.5, 0.5], [0.98, 0.01]]), torch.tensor([0, 0])
    noise, cap = torch.tensor([[-0.2, 0.9], [0.9, -0.9]]), torch.tensor(0.1)
    found = method().anchors(model, images, labels, cap, noise, DOMAIN)
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.4], [1.0, 0.0]]))
    wide = method(attack_reach=2.1).anchors(model, images, labels, cap, noise, DOMAIN)
    torch.testing.assert_close(wide, torch.tensor([[0.71, 0.29], [1.0, 0.0]]))


def test_the_attack_starts_anywhere_in_the_box_and_steps_by_its_width():
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-1.0], [1.0]]))
    # The box of the second image ends at 1, so that it is 0.15 wide.
    images, labels = torch.tensor([[0.5], [0.95]]), torch.tensor([0, 0])
    noise, cap = torch.tensor([[-1.0], [-1.0]]), torch.tensor(0.1)

    def reached(steps):
        method = MtlIBP(attack_steps=steps, attack_step=0.25)
        return method.anchors(model, images, labels, cap, noise, DOMAIN)

    torch.testing.assert_close(reached(1), torch.tensor([[0.425], [0.85 + 0.01875]]))
    torch.testing.assert_close(reached(2), torch.tensor([[0.45], [0.85 + 0.0375]]))
    torch.testing.assert_close(reached(8), torch.tensor([[0.6], [1.0]]))


@pytest.mark.parametrize("method", EXPRESSIVE)
def test_at_a_radius_of_0_they_are_the_standard_loss(method):
    model, images, labels = network()
    step = step_of(model, images, labels, cap=0.0)
    wanted = F.cross_entropy(model(images), labels)
    torch.testing.assert_close(method(bound_share=0.3).robust_loss(step), wanted)


@pytest.mark.parametrize("method", EXPRESSIVE)
def test_settings_of_expressive_losses_are_refused(method):
    for share in (-0.1, 1.5, math.nan):
        with pytest.raises(InvalidInput, match=r"`bound_share` must be in \[0, 1\]; got"):
            method(bound_share=share)
    with pytest.raises(InvalidInput, match="`attack_steps` must be at least 1; got 0"):
        method(attack_steps=0)
    for name in ("attack_step", "attack_reach"):
        for value in (0.0, -1.0, math.nan, math.inf):
            with pytest.raises(InvalidInput, match=f"`{name}` must be above 0 and finite; got"):
                method(**{name: value})


# -- all --------------------------------------------------------------------------------


def test_names_are_complete():
    assert set(METHODS.values()) == {
        Standard, FastIBP, CrownIBP, Sabr, CcIBP, MtlIBP, ExpIBP, Acert, AcertFast
    }  # fmt: skip
    for cls in METHODS.values():
        assert dataclasses.is_dataclass(cls)
        assert cls() == cls()
        assert cls().uses_bounds is (cls is not Standard)
        assert from_config(to_config(cls())) == cls()


def test_standard_has_no_worst_case():
    model, images, labels = network()
    step = step_of(model, images, labels)
    assert Standard().worst_case_logits(step) is step.logits


@pytest.mark.parametrize("method", METHODS.values())
@pytest.mark.parametrize("kappa", [-0.1, 1.5, math.nan, "0.5", None])
def test_kappa_outside_its_range_is_refused(method, kappa):
    words = r"in \[0, 1\]" if isinstance(kappa, float) else "a number"
    with pytest.raises(InvalidInput, match=f"`kappa` must be {words}; got"):
        method(kappa=kappa)


def test_a_solver_is_no_number_of_steps():
    with pytest.raises(InvalidInput, match="`solver` must be of type Solver; got 2"):
        Acert(solver=2)


def test_numbers_of_numpy_are_numbers():
    assert Acert(kappa=np.float32(0.5), solver=Brent(max_steps=np.int64(3))).kappa == 0.5


def test_settings_of_sabr_are_refused():
    for share in (0.0, 1.1, math.nan):
        with pytest.raises(InvalidInput, match=r"`box_share` must be in \(0, 1\]; got"):
            Sabr(box_share=share)
    with pytest.raises(InvalidInput, match=r"`attack_steps` must be at least 0; got -1"):
        Sabr(attack_steps=-1)


@pytest.fixture(scope="module")
def digits():
    return data.load("digits").train


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_on_digits(name, seed, digits):
    torch.manual_seed(seed)
    model = ibp_init_(cnn7((1, 8, 8), width=4))
    settings = Settings(
        method=METHODS[name](), max_radius=0.05, epochs=3, batch_size=64, seed=seed,
        radius_schedule=SmoothRadius(start_epoch=2, length=1),
    )  # fmt: skip
    trainer = Trainer(model, digits, settings)
    records = [trainer.run_epoch() for _ in range(3)]
    assert all(math.isfinite(value) for record in records for value in record.values())
    assert all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
    assert records[-1]["correct"] > 0.5  # three epochs are enough to learn something
    assert records[-1]["standard"] < 0.8 * records[0]["standard"]


def test_an_experiment_can_hold_every_method():
    for cls in METHODS.values():
        settings = Settings(method=cls(), max_radius=0.1, epochs=2)
        experiment = Experiment(dataset="digits", settings=settings)
        assert from_config(to_config(experiment)) == experiment


def test_after_two_steps_a_power_law_is_nearer_to_the_radius_than_brent():
    model = acert.load_model("digits-acert").double()
    split = data.load_test("digits")
    images, labels = data.to_float(split.images[:200]).double(), split.labels[:200]
    at_zero = acert.certified_margin(model, images, labels, 0.0)

    def margin(radius):
        return acert.certified_margin(model, images, labels, radius)

    zero = torch.zeros_like(at_zero)
    root, brent, power = (
        solver.solve(margin, zero, zero + 0.3, f_lower=at_zero)
        for solver in (Brent(), Brent(max_steps=2), PowerLaw(max_steps=2))
    )
    inside = root.status == RootStatus.CONVERGED
    assert inside.sum() > 30
    errors = [(found.estimate - root.estimate)[inside] for found in (brent, power)]
    assert errors[1].abs().mean() < 0.85 * errors[0].abs().mean()
    assert errors[1].mean().abs() < 0.5 * errors[0].mean().abs()
