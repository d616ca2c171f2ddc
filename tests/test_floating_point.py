"""Certificates hold in floating point: against 128-bit balls, and for float32 networks attacked."""

import copy

import pytest
import torch
import torch.nn.functional as F
from benchmarks import rounding as benchmark
from tests import ball
from torch import nn

import acert
from acert import data
from acert.bounds.proven import proven_margin
from acert.bounds.rounding import ROUNDINGS
from acert.models import Residual, cnn7, mlp, small_cnn, small_resnet

ARITHMETICS = ("real", "float32")
MAX_RADIUS = 0.1
SAMPLES = 40


# -- the networks -------------------------------------------------------------------------

SMALL = {
    "linear": lambda: mlp(64, [], 10),
    "mlp": lambda: mlp(64, [32, 32], 10),
    "tanh": lambda: mlp(64, [32, 32], 10, activation=nn.Tanh),
    "small_cnn": lambda: small_cnn((1, 8, 8), width=4),
    "small_resnet": lambda: small_resnet((1, 8, 8), width=4),
}


@pytest.fixture(scope="module")
def digits():
    split = data.load("digits", train_on_all=True).train
    return split.images, split.labels


@pytest.fixture(scope="module")
def small_models(digits):
    """Each small model, trained for a few steps, with the samples it is certified on."""
    images, labels = digits
    models = {}
    for name, build in SMALL.items():
        torch.manual_seed(0)
        model = acert.models.ibp_init_(build()).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for batch in torch.randperm(len(images)).repeat(2).split(128):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        models[name] = model.eval(), images[:SAMPLES], labels[:SAMPLES]
    return models


def cancelling_weights():
    """Weights of +-1e8 in pairs that differ in their last digit."""
    model = mlp(20, [20], 2)
    with torch.no_grad():
        first, last = model[1], model[3]
        first.weight.copy_(1e8 * torch.randn(20, 20))
        first.weight[1::2] = first.weight[::2]
        first.bias.copy_(1e7 * torch.randn(20))
        first.bias[1::2] = first.bias[::2] + 1.0
        last.weight.copy_(torch.tensor([1.0, -1.0]).repeat(2, 10))
        last.weight[1].neg_()
        last.bias.zero_()
    return model, torch.rand(12, 20)


def many_summands():
    """10,000 summands whose sum is nearly nothing."""
    model = mlp(10_000, [], 2)
    images = torch.rand(6, 10_000)
    with torch.no_grad():
        weight = torch.randn(2, 10_000, dtype=torch.float64)
        # Each image is moved so that it lies close to the border.
        difference = weight[0] - weight[1]
        step = (images.double() @ difference - 1e-3) / difference.square().sum()
        images = (images - step.unsqueeze(1) * difference).float().clamp(0, 1)
        model[1].weight.copy_(weight)
        model[1].bias.zero_()
    return model, images


def huge_biases():
    """Biases of 1e12 that the next layer takes away again."""
    model = mlp(10, [20, 10], 3)
    with torch.no_grad():
        model[1].bias.fill_(1e12)
        model[3].weight[:, 1::2] = -model[3].weight[:, ::2]
    return model, torch.rand(12, 10)


def cancelling_batch_norm():
    """A mean of 1e6 that the layer before has added, and hardly any variance."""
    model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3))
    with torch.no_grad():
        model[0].bias.copy_(1e6 + torch.rand(10))
        model[1].running_mean.copy_(model[0].bias)
        model[1].running_var.fill_(1e-8)
        model[1].bias.copy_(torch.randn(10))
    return model, torch.rand(12, 10)


def gelu_tail():
    """GELU around -5.8, where its value is 1e-8 of its argument, magnified again."""
    model = mlp(10, [10], 3, activation=nn.GELU)
    with torch.no_grad():
        model[1].bias.fill_(-5.8)
        model[3].weight.mul_(1e8)
        model[3].bias.zero_()
    return model, torch.rand(12, 10)


def deep_chain():
    """Thirty layers, one behind the other."""
    model = mlp(8, [8] * 30, 3)
    with torch.no_grad():
        for layer in model[1::2]:
            nn.init.orthogonal_(layer.weight)
    return model, torch.rand(12, 8)


BUILT = {
    build.__name__: build
    for build in (
        cancelling_weights, many_summands, huge_biases, cancelling_batch_norm, gelu_tail, deep_chain
    )
}  # fmt: skip


def built(name):
    torch.manual_seed(1)
    model, images = BUILT[name]()
    return model.eval(), images


# -- the oracle's verdict -----------------------------------------------------------------


def refuted(model, images, labels, value, *, elide):
    """How many radii above 0 the oracle does not confirm."""
    held = value > 0
    if not held.any():
        return 0
    exact = ball.margins(model, images[held], labels[held], value[held], elide=elide)
    return sum(not margin < 0 for margin in exact)


@pytest.mark.parametrize("elide", [True, False])
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", SMALL)
def test_every_certificate_of_the_small_models_holds(small_models, name, arithmetic, elide):
    model, images, labels = small_models[name]
    result = acert.certified_radius(
        model, images, labels, max_radius=MAX_RADIUS, arithmetic=arithmetic, elide=elide
    )
    assert (result.value > 0).sum() > SAMPLES // 2
    assert refuted(model, images, labels, result.value, elide=elide) == 0


@pytest.mark.parametrize("elide", [True, False])
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", BUILT)
def test_every_certificate_of_networks_built_to_cancel_holds(name, arithmetic, elide):
    model, images = built(name)
    # Searched to the last digit, so that nothing but the correction keeps it safe.
    result = acert.certified_radius(
        model, images, max_radius=MAX_RADIUS, arithmetic=arithmetic, elide=elide, solver=TO_THE_END
    )
    if arithmetic == "real":
        assert (result.value > 0).any()
    assert refuted(model, images, result.prediction, result.value, elide=elide) == 0


TO_THE_END = acert.Bisection(xtol=1e-300, rtol=0.0, max_steps=1100)


def test_without_the_correction_certificates_are_wrong():
    wrong = {}
    for name in BUILT:
        model, images = built(name)
        result = acert.certified_radius(
            model, images, max_radius=MAX_RADIUS, arithmetic="nearest", solver=TO_THE_END
        )
        wrong[name] = refuted(model, images, result.prediction, result.value, elide=True)
    # Not by a last digit only: half of all these certificates are wrong.
    assert sum(wrong.values()) > 20, wrong
    assert all(wrong.values()), wrong


@pytest.mark.slow
def test_certificates_of_a_full_width_cnn7_hold():
    model = acert.models.ibp_init_(cnn7((1, 28, 28))).train()
    images = torch.rand(16, 1, 28, 28)
    for layer in model:
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            layer.momentum = 0.95
    acert.clean_pass(model, images)
    with torch.no_grad():
        model[-1].bias[3] += 1.0  # a margin that float32 can prove, 25,088 summands and all
    results = [
        acert.certified_radius(model.eval(), images[:2], max_radius=0.1, arithmetic=arithmetic)
        for arithmetic in ARITHMETICS
    ]
    values, labels = (torch.cat(column) for column in list(zip(*results, strict=True))[::3])
    assert (values > 0).all()
    assert refuted(model, images[:2].repeat(2, 1, 1, 1), labels, values, elide=True) == 0


# -- how close to the root, and at what price ---------------------------------------------


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", SMALL)
def test_values_lie_within_a_percent_of_the_proven_margins_root(small_models, name, arithmetic):
    model, images, labels = small_models[name]
    result = acert.certified_radius(
        model, images, labels, max_radius=MAX_RADIUS, arithmetic=arithmetic
    )

    def proven(radius):
        with torch.no_grad():
            return proven_margin(
                model, images.double(), labels, radius, rounding=ROUNDINGS[arithmetic]
            )

    zero = torch.zeros(len(images), dtype=torch.float64)
    bisection = acert.Bisection(xtol=1e-14, rtol=1e-9, max_steps=60)
    root = bisection.solve(proven, zero, zero + MAX_RADIUS).upper
    assert (result.value <= root).all()
    assert (result.value >= 0.99 * root)[result.status != acert.Status.MISCLASSIFIED].all()
    assert (proven(result.value) < 0)[result.value > 0].all()


def test_rounding_safety_costs_little_of_a_trained_networks_acr(digits):
    images, labels = digits
    costs = benchmark.costs(benchmark.trained(epochs=3), images[:200], labels[:200])
    plain = costs["nearest"].acr
    assert plain > 10
    assert costs["real"].acr == pytest.approx(plain, rel=1e-6)
    assert 0.99 * plain < costs["float32"].acr < plain


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_float32_certificates_are_refused_for_models_of_another_dtype(dtype):
    message = rf"needs a float32 model; got 1.weight of {dtype}"
    with pytest.raises(acert.InvalidInput, match=message):
        acert.certified_radius(
            mlp(4, [], 2).to(dtype), torch.rand(1, 4), max_radius=0.1, arithmetic="float32"
        )


# -- float32 networks, attacked -----------------------------------------------------------


def reordered(model, order):
    """The same network with its hidden units shuffled, reading input features in `order`."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        _shuffle(model, order, torch.arange(model[-1].out_features))
    return model


def _shuffle(layers, order, final):
    """Reads features or channels in `order`, writes the last layer's in order `final`."""
    weighted = [layer for layer in layers if isinstance(layer, (nn.Linear, nn.Conv2d))]
    for layer in layers:
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            # Behind a Flatten every channel stands for several features.
            size = layer.weight.shape[1] // len(order)
            order = (order.unsqueeze(1) * size + torch.arange(size)).flatten()
            wanted = final if layer is weighted[-1] else torch.randperm(len(layer.weight))
            layer.weight.copy_(layer.weight[wanted][:, order])
            if layer.bias is not None:
                layer.bias.copy_(layer.bias[wanted])
            order = wanted
        elif isinstance(layer, nn.BatchNorm2d):
            for values in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                values.copy_(values[order])
        elif isinstance(layer, Residual):
            straight = isinstance(layer.shortcut, nn.Identity)
            channels = layer.branch[-1].num_features
            wanted = order if straight else torch.randperm(channels)
            _shuffle(layer.branch, order, wanted)
            if not straight:
                _shuffle(layer.shortcut, order, wanted)
            order = wanted


def predictions(model, points):
    """(evaluations, points): what float32 predicts in shuffled networks, batches and threads."""
    found = []
    with torch.no_grad():
        found += [model(points), torch.cat([model(part) for part in points.split(3)])]
        for _ in range(4):
            order = torch.randperm(points[0].numel()) if points.ndim == 2 else torch.arange(1)
            moved = points[:, order] if points.ndim == 2 else points
            found.append(reordered(model, order)(moved))
        torch.set_num_threads(2)
        try:
            found.append(model(points))
        finally:
            torch.set_num_threads(1)
    return torch.stack(found).argmax(2)


def float32_box(images, radius):
    """The smallest and largest float32 numbers that lie in each exact box, inside [0, 1]."""
    radius = radius.reshape(-1, *[1] * (images.ndim - 1))
    ends = []
    for sign in (-1.0, 1.0):
        exact = images.double() + sign * radius
        exact = torch.nextafter(exact, images.double())  # its own rounding
        end = exact.float()
        inward = torch.nextafter(end, images)
        ends.append(torch.where(sign * (end.double() - exact) > 0, inward, end).clamp(0, 1))
    return ends


def attacked(model, images, labels, radius, *, steps=20, corners=4):
    """Float32 points of each box: the image, corners against the margin, random ones, PGD's."""
    lower, upper = float32_box(images, radius)

    def ascent(points):
        points = points.detach().requires_grad_()
        logits = model(points)
        others = logits.masked_fill(F.one_hot(labels, logits.shape[1]).bool(), -torch.inf)
        margin = others.amax(1) - logits.gather(1, labels.unsqueeze(1)).squeeze(1)
        return torch.autograd.grad(margin.sum(), points)[0].sign()

    points = [images, torch.where(ascent(images) > 0, upper, lower)]
    points += [torch.where(torch.rand_like(images) > 0.5, upper, lower) for _ in range(corners)]
    moving = images
    for _ in range(steps):
        moving = moving + (upper - lower) / 8 * ascent(moving)
        moving = torch.minimum(torch.maximum(moving, lower), upper)
    return [*points, moving.detach(), torch.where(ascent(moving) > 0, upper, lower)]


def flips(model, images, labels, radius):
    """How many samples some attacked point and some evaluation changes the prediction of."""
    changed = torch.zeros(len(images), dtype=torch.bool)
    for points in attacked(model, images, labels, radius):
        changed |= (predictions(model, points) != labels).any(0)
    return changed.sum().item()


@pytest.mark.parametrize("name", SMALL)
def test_no_attack_inside_a_float32_certificate_changes_the_prediction(small_models, name):
    model, images, _ = small_models[name]
    if isinstance(model[0], nn.Flatten):
        images = images.flatten(1)
    result = acert.certified_radius(
        model, images, max_radius=MAX_RADIUS, arithmetic="float32", solver=TO_THE_END
    )
    held = result.value > 0
    assert held.sum() > SAMPLES // 2
    assert flips(model, images[held], result.prediction[held], result.value[held]) == 0


def near_the_border(margins):
    """A linear classifier with large weights, and images whose exact margins are `margins`."""
    model = mlp(64, [], 2)
    images = 0.25 + 0.5 * torch.rand(len(margins), 64, dtype=torch.float64)
    with torch.no_grad():
        model[1].weight.mul_(1e4)
        weight, bias = model[1].weight.double(), model[1].bias.double()
        difference, offset = weight[1] - weight[0], bias[1] - bias[0]
        step = (images @ difference + offset + margins) / difference.square().sum()
        return model, (images - step.unsqueeze(1) * difference).float()


def test_inside_a_real_certificate_float32_may_predict_otherwise():
    model, images = near_the_border(torch.full((50,), 1e-4, dtype=torch.float64))
    labels = torch.zeros(50, dtype=torch.int64)
    real, single = (
        acert.certified_radius(
            model, images, labels, max_radius=MAX_RADIUS, arithmetic=arithmetic
        ).value
        for arithmetic in ARITHMETICS
    )
    held = real > 0
    assert held.sum() > 20
    assert flips(model, images[held], labels[held], real[held]) > 0
    assert (single == 0).all()


def test_the_attack_finds_what_lies_just_outside(small_models):
    # Bounds of a linear classifier are exact, so there is something to find.
    model, images, _ = small_models["linear"]
    images = images.flatten(1)
    result = acert.certified_radius(model, images, max_radius=MAX_RADIUS)
    inside = (result.value > 0) & (result.status == acert.Status.ROOT)
    outside = 1.001 * result.value[inside]
    found = flips(model, images[inside], result.prediction[inside], outside)
    assert found > 0.5 * inside.sum()


def test_float32_certificates_near_the_border_hold():
    # Margins from what float32 cannot tell apart up to what it can.
    model, images = near_the_border(torch.logspace(-3, 2, 100, dtype=torch.float64))
    labels = torch.zeros(100, dtype=torch.int64)
    result = acert.certified_radius(
        model, images, labels, max_radius=MAX_RADIUS, arithmetic="float32", solver=TO_THE_END
    )
    held = result.value > 0
    assert 10 < held.sum() < 90
    assert flips(model, images[held], labels[held], result.value[held]) == 0


def test_reordered_networks_are_the_same_networks(small_models):
    for name, (model, images, _) in small_models.items():
        order = torch.arange(1)
        if isinstance(model[0], nn.Flatten):
            images, order = images.flatten(1), torch.randperm(64)
        points = images[:4].double()
        with torch.no_grad():
            moved = reordered(model, order).double()(points[:, order])
            expected = copy.deepcopy(model).double()(points)
        torch.testing.assert_close(moved, expected, msg=name)
