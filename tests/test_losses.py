"""The loss of a training step (Eq. 11) against slow formulas, in value and in gradient."""

import pytest
import torch
from tests import slow_bounds
from torch import nn

from acert import Brent, losses
from acert.bounds import clean_pass
from acert.losses import TERMS, Objective, Scalars
from acert.methods import Acert, AcertFast, CcIBP, CrownIBP, ExpIBP, FastIBP, MtlIBP, Sabr, Standard
from acert.models import Normalize, cnn7, mlp, small_cnn, small_resnet
from acert.precision import PRECISIONS

CAP = 0.15
TIGHT = Brent(xtol=1e-12, rtol=1e-12, max_steps=80)


def network(*, batch_norm=True):
    """Three inputs, two hidden layers, three classes, in float64."""
    layers = [
        Normalize([0.4, 0.5, 0.6], [0.5, 0.25, 0.5]),
        nn.Linear(3, 5),
        *([nn.BatchNorm1d(5)] if batch_norm else []),
        nn.ReLU(),
        nn.Linear(5, 4),
        nn.ReLU(),
        nn.Linear(4, 3),
    ]
    model = nn.Sequential(*layers).double()
    if batch_norm:
        with torch.no_grad():
            # A negative scale turns the ends of a box around.
            model[2].weight.copy_(torch.tensor([1.0, -0.8, 0.5, 1.2, -0.3]))
            model[2].bias.normal_()
    return model


def samples(model, count=8):
    """Images whose labels the model, in training, mostly gets right; the first one is wrong."""
    images = torch.rand(count, 3, dtype=torch.float64)
    with torch.no_grad():
        labels = model(images).argmax(1)
    labels[0] = (labels[0] + 1) % 3
    return images, labels


def scalars(*, cap=CAP, progress=0.5, kappa=0.0, regularization=0.0):
    return torch.tensor([0.0, cap, progress, kappa, 1 - kappa, regularization], dtype=torch.float64)


def terms(method, model, images, labels, *, regularize=False, anchors=None, l1=0.0, elide=True,
          **weights):  # fmt: skip
    objective = Objective(method=method, l1=l1, elide=elide)
    anchors = images if anchors is None else anchors
    numbers = scalars(kappa=weights.pop("kappa", method.kappa), **weights)
    values = objective(model, images, labels, anchors, numbers, regularize=regularize)
    return dict(zip(TERMS, values, strict=True))


def assert_same_gradients(model, one, other):
    """Both losses have the same gradient with respect to every parameter, and it is not 0."""
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(other, parameters)
    given = torch.autograd.grad(one, parameters)
    assert max(gradient.abs().max() for gradient in wanted) > 1e-3
    torch.testing.assert_close(given, wanted, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("batch_norm", [True, False])
def test_standard_is_the_mean_cross_entropy(batch_norm):
    model = network(batch_norm=batch_norm)
    images, labels = samples(model)
    found = terms(Standard(), model, images, labels)
    statistics = slow_bounds.batch_statistics(model, images)
    wanted = slow_bounds.standard_loss(model, images, labels, statistics)
    torch.testing.assert_close(found["loss"], wanted)
    torch.testing.assert_close(found["standard"], wanted)
    assert found["robust"] == 0
    assert found["correct"] == (len(images) - 1) / len(images)
    assert_same_gradients(model, found["loss"], wanted)


@pytest.mark.parametrize("elide", [True, False])
@pytest.mark.parametrize("batch_norm", [True, False])
def test_fastibp_is_the_loss_at_the_cap(batch_norm, elide):
    model = network(batch_norm=batch_norm)
    images, labels = samples(model)
    found = terms(FastIBP(), model, images, labels, elide=elide)
    statistics = slow_bounds.batch_statistics(model, images)
    radii = [CAP] * len(images)
    wanted = slow_bounds.robust_loss(model, images, labels, radii, statistics, elide=elide)
    torch.testing.assert_close(found["loss"], wanted)
    assert_same_gradients(model, found["loss"], wanted)


def test_acert_fast_is_the_cap_where_right_else_0():
    model = network()
    images, labels = samples(model)
    found = terms(AcertFast(), model, images, labels)
    statistics = slow_bounds.batch_statistics(model, images)
    radii = [0.0] + [CAP] * (len(images) - 1)  # only the first sample is wrong
    wanted = slow_bounds.robust_loss(model, images, labels, radii, statistics)
    torch.testing.assert_close(found["loss"], wanted)
    assert_same_gradients(model, found["loss"], wanted)


def test_acert_is_the_loss_at_every_certified_radius():
    model = network()
    images, labels = samples(model, count=12)
    statistics = slow_bounds.batch_statistics(model, images)
    radii = [
        slow_bounds.certified_radius(model, image, label, CAP, statistics)
        for image, label in zip(images, labels.tolist(), strict=True)
    ]
    kinds = {"zero" if r == 0 else "cap" if r == CAP else "root" for r in radii}
    assert kinds == {"zero", "cap", "root"}  # all three cases of Def. 3.1 are here
    found = terms(Acert(solver=TIGHT), model, images, labels)
    # The radii are numbers: no gradient goes through them (Eq. 9).
    wanted = slow_bounds.robust_loss(model, images, labels, radii, statistics)
    torch.testing.assert_close(found["loss"], wanted, atol=1e-8, rtol=0)
    assert_same_gradients(model, found["loss"], wanted)


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_crown_ibp_goes_from_crown_to_intervals(progress):
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    images, labels = samples(model)
    found = terms(CrownIBP(), model, images, labels, progress=progress)
    wanted = torch.zeros((), dtype=torch.float64)
    ways = set()
    for image, label in zip(images, labels.tolist(), strict=True):
        passed = slow_bounds.bounds(model, image, CAP, [])
        crown = slow_bounds.crown_differences(model, passed, passed.first, label)
        interval = slow_bounds.elided_differences(model, passed, label)
        ways.update((c < i).item() for c, i in zip(crown, interval, strict=True))
        mixed = [(1 - progress) * c + progress * i for c, i in zip(crown, interval, strict=True)]
        wanted = wanted + slow_bounds.cross_entropy(mixed) / len(images)
    assert True in ways  # else both ends of the schedule would be one
    torch.testing.assert_close(found["loss"], wanted)
    assert_same_gradients(model, found["loss"], wanted)


def test_crown_ibp_ends_as_fastibp():
    model = network()
    images, labels = samples(model)
    late = terms(CrownIBP(), model, images, labels, progress=1.0)["loss"]
    torch.testing.assert_close(late, terms(FastIBP(), model, images, labels)["loss"])
    early = terms(CrownIBP(), model, images, labels, progress=0.0)["loss"]
    assert not torch.allclose(early, late)


def test_sabr_is_the_loss_on_the_small_box():
    model = network()
    images, labels = samples(model)
    anchors = (images + CAP * (2 * torch.rand_like(images) - 1)).clamp(0, 1)
    share = 0.6
    found = terms(Sabr(box_share=share), model, images, labels, anchors=anchors)
    statistics = slow_bounds.batch_statistics(model, images)  # of the images, not of the anchors
    reach = (1 - share) * CAP
    centers = torch.stack(
        [
            torch.stack([min(max(a, x - reach), x + reach) for x, a in zip(*pair, strict=True)])
            for pair in zip(images, anchors, strict=True)
        ]
    )
    assert not torch.equal(centers, anchors)
    radii = [share * CAP] * len(images)
    wanted = slow_bounds.robust_loss(model, centers, labels, radii, statistics)
    torch.testing.assert_close(found["loss"], wanted)
    assert_same_gradients(model, found["loss"], wanted)


@pytest.mark.parametrize("elide", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("method", [CcIBP, MtlIBP, ExpIBP])
def test_expressive_losses_lie_between_the_attack_and_the_bounds(method, share, elide):
    model = network()
    images, labels = samples(model)
    anchors = (images + CAP * (2 * torch.rand_like(images) - 1)).clamp(0, 1)
    found = terms(method(bound_share=share), model, images, labels, anchors=anchors, elide=elide)
    # The attacked points set the statistics that the bounds take, those of the images do not.
    statistics = slow_bounds.batch_statistics(model, anchors)
    attack, bound, mixed = [], [], []
    for image, point, label in zip(images, anchors, labels.tolist(), strict=True):
        passed = slow_bounds.bounds(model, point, 0.0, statistics)
        attacked = slow_bounds.plain_differences(passed, label)
        passed = slow_bounds.bounds(model, image, CAP, statistics)
        if elide:
            bounds = slow_bounds.elided_differences(model, passed, label)
        else:
            bounds = slow_bounds.plain_differences(passed, label)
        both = zip(bounds, attacked, strict=True)
        attack.append(slow_bounds.cross_entropy(attacked))
        bound.append(slow_bounds.cross_entropy(bounds))
        mixed.append(slow_bounds.cross_entropy([share * b + (1 - share) * a for b, a in both]))
    attack, bound, mixed = (sum(losses) / len(images) for losses in (attack, bound, mixed))
    assert bound > attack
    wanted = {
        CcIBP: mixed,
        MtlIBP: share * bound + (1 - share) * attack,
        ExpIBP: bound**share * attack ** (1 - share),
    }[method]
    torch.testing.assert_close(found["loss"], wanted)
    assert_same_gradients(model, found["loss"], wanted)


def test_a_loss_of_the_attack_that_is_0_leaves_its_gradient_finite():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[400.0, 0.0], [0.0, 0.0]]))
    images, labels = torch.tensor([[0.9, 0.5], [0.8, 0.1]]), torch.tensor([0, 0])
    found = terms(ExpIBP(), model, images, labels)["loss"]
    found.backward()
    assert found < 1e-10
    assert model.weight.grad.isfinite().all()


# -- Eq. 11 -----------------------------------------------------------------------------

METHODS = [FastIBP, CrownIBP, Sabr, CcIBP, MtlIBP, ExpIBP, Acert, AcertFast]


@pytest.mark.parametrize("method", METHODS)
def test_kappa_weighs_standard_and_robust_loss(method):
    model = network()
    images, labels = samples(model)
    found = terms(method(kappa=0.3), model, images, labels)
    robust = terms(method(), model, images, labels)["loss"]
    standard = terms(Standard(), model, images, labels)["loss"]
    torch.testing.assert_close(found["loss"], 0.7 * robust + 0.3 * standard)
    torch.testing.assert_close(found["robust"], robust)
    torch.testing.assert_close(found["standard"], standard)


@pytest.mark.parametrize("method", METHODS)
def test_kappa_1_without_regularisers_is_standard(method):
    model = network()
    images, labels = samples(model)
    found = terms(method(kappa=1.0), model, images, labels)["loss"]
    standard = terms(Standard(), model, images, labels)["loss"]
    assert torch.equal(found, standard)
    for mine, other in zip(
        torch.autograd.grad(found, list(model.parameters())),
        torch.autograd.grad(standard, list(model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)  # summed in another order


def test_fastibp_equals_acert_where_every_radius_is_the_cap():
    model = network()
    images, labels = samples(model)
    with torch.no_grad():
        labels = model(images).argmax(1)
    cap = 1e-4
    adaptive = terms(Acert(), model, images, labels, cap=cap)
    fixed = terms(FastIBP(), model, images, labels, cap=cap)
    assert fixed["robust"] > fixed["standard"]
    assert torch.equal(adaptive["loss"], fixed["loss"])
    for mine, other in zip(
        torch.autograd.grad(adaptive["loss"], list(model.parameters())),
        torch.autograd.grad(fixed["loss"], list(model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)  # summed in another order


# -- what regularises -------------------------------------------------------------------


def test_regularisers_and_l1_are_added_with_their_weights():
    model = network()
    images, labels = samples(model)
    plain = terms(FastIBP(), model, images, labels)["loss"]
    found = terms(
        FastIBP(), model, images, labels, regularize=True, regularization=0.25, l1=1e-2
    )  # fmt: skip
    assert found["regularization"] > 0
    weights = sum(abs(w) for i in (1, 4, 6) for row in model[i].weight for w in row)
    torch.testing.assert_close(
        found["loss"], plain + 0.25 * found["regularization"] + 1e-2 * weights
    )


def test_radii_are_lifted_only_while_regularisers_are_on():
    model = network()
    images, labels = samples(model)
    statistics = slow_bounds.batch_statistics(model, images)
    lifted = slow_bounds.robust_loss(model, images, labels, [1e-6] * 8, statistics)
    points = slow_bounds.robust_loss(model, images, labels, [0.0] * 8, statistics)
    assert lifted - points > 1e-8
    on = terms(AcertFast(), model, images, labels, cap=0.0, regularize=True)["robust"]
    off = terms(AcertFast(), model, images, labels, cap=0.0)["robust"]
    torch.testing.assert_close(on, lifted, atol=1e-12, rtol=0)
    torch.testing.assert_close(off, points, atol=1e-12, rtol=0)


def test_kappa_1_keeps_its_regularisers():
    model = network()
    images, labels = samples(model)
    found = terms(Acert(kappa=1.0), model, images, labels, regularize=True, regularization=0.5)
    torch.testing.assert_close(found["loss"], found["standard"] + 0.5 * found["regularization"])
    assert found["regularization"] > 0


def test_only_the_clean_pass_moves_running_statistics():
    model = cnn7((1, 8, 8), width=2)
    alone = cnn7((1, 8, 8), width=2)
    alone.load_state_dict(model.state_dict())
    images, labels = torch.rand(6, 1, 8, 8), torch.arange(6)
    objective = Objective(method=Acert())
    objective(model, images, labels, images, scalars().float(), regularize=True)
    alone(images)
    for mine, other in zip(model.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)  # summed in another order


# -- compiled ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "regularize"),
    [(Standard(), False), (Acert(), False), *((m(kappa=0.25), True) for m in METHODS)],  # type: ignore[abstract]
)
def test_compiled_step_equals_eager(method, regularize):
    torch.compiler.reset()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*small_cnn((1, 8, 8), 4, width=2)[:1], nn.BatchNorm2d(2), nn.ReLU(),
                              nn.Flatten(), nn.Linear(32, 6), nn.BatchNorm1d(6), nn.ReLU(),
                              nn.Linear(6, 4))  # fmt: skip
        images, labels = torch.rand(8, 1, 8, 8), torch.arange(8) % 4
        # The compiled step takes another order of operations, which float32 would show.
        model, images = model.double(), images.double()
        anchors = torch.rand(8, 1, 8, 8, dtype=torch.float64)
        numbers = scalars(kappa=method.kappa, regularization=0.5)
        step = Objective(method=method, l1=1e-4).__call__
        if compiled:
            step = torch.compile(step, fullgraph=True, backend="aot_eager")
        values = step(model, images, labels, anchors, numbers, regularize=regularize)
        values[0].backward()
        gradients = [p.grad for p in model.parameters()]
        results.append((values.detach(), gradients, list(model.buffers())))
    torch.testing.assert_close(results[0], results[1], atol=1e-12, rtol=1e-10)


# -- what saves an eager step passes over memory ----------------------------------------


@pytest.mark.parametrize("regularize", [False, True])
@pytest.mark.parametrize("build", [cnn7, small_resnet])
@pytest.mark.parametrize("method", METHODS)
def test_shortcuts_of_the_eager_step_change_nothing(method, build, regularize, monkeypatch):
    """Folded batch norm, balls in each other's memory, statistics once: as in the compiled step."""
    results = []
    for plain in (False, True):
        torch.manual_seed(0)
        model = build((1, 8, 8), width=2).double()
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                nn.init.uniform_(layer.weight, -2, 2)  # a negative scale turns boxes around
                nn.init.normal_(layer.bias)
        images, anchors = torch.rand(2, 12, 1, 8, 8, dtype=torch.float64)
        labels = torch.arange(12) % 10
        precision = PRECISIONS["tf32" if plain else "float32"]  # the same thing on a CPU
        objective = Objective(method=method(kappa=0.25), precision=precision)
        numbers = scalars(cap=0.02, kappa=0.25, regularization=0.5)
        with monkeypatch.context() as patch:
            if plain:
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
            values = objective(model, images, labels, anchors, numbers, regularize=regularize)
        values[0].backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append((values.detach(), gradients, list(model.buffers())))
    assert results[0][0][2] > 0
    torch.testing.assert_close(results[0], results[1], atol=1e-11, rtol=1e-10)


@pytest.mark.parametrize("build", [cnn7, small_cnn])
def test_standard_loss_of_weight_0_has_no_gradient_to_compute(build, monkeypatch):
    results, seen = [], []

    def watched(*args, **kwargs):
        logits, statistics = clean_pass(*args, **kwargs)
        logits.register_hook(lambda gradient: seen.append(gradient.abs().max()))
        return logits, statistics

    monkeypatch.setattr(losses, "clean_pass", watched)
    for known in (False, True):
        torch.manual_seed(0)
        model = build((1, 8, 8), width=2).double()
        images, labels = torch.rand(12, 1, 8, 8, dtype=torch.float64), torch.arange(12) % 10
        with monkeypatch.context() as patch:
            if not known:
                patch.setattr(losses, "_is_zero", lambda weight: False)
            values = Objective(method=Acert())(
                model, images, labels, images, scalars(cap=0.02), regularize=False
            )
        values[0].backward()
        results.append((values.detach(), [parameter.grad for parameter in model.parameters()]))
        assert seen == [0.0]  # asked for once, and 0, unless its weight is known
    torch.testing.assert_close(results[0], results[1], atol=1e-14, rtol=1e-12)


def test_scalars_have_names():
    assert [name.upper() for name in Scalars.NAMES] == [
        name for name in vars(Scalars) if name.isupper() and name != "NAMES"
    ]  # fmt: skip


@pytest.mark.parametrize("activation", [torch.nn.Tanh, torch.nn.GELU])
def test_regularisers_have_nothing_to_say_without_relu(activation):
    model = mlp(4, [6], 3, activation=activation)
    images, labels = torch.rand(5, 4), torch.tensor([0, 1, 2, 0, 1])
    scalars = torch.tensor([1e-3, 0.05, 0.5, 0.0, 1.0, 0.25])
    terms = Objective(method=FastIBP())(model, images, labels, images, scalars, regularize=True)
    assert terms[3] == 0
    assert terms[0] == terms[2] > 0
