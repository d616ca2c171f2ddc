"""Certified margins and worst-case logits (Eqs. 2, 3, 4, 6) and the laws of Theorem A.2."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import acert
from acert import models
from acert.bounds import Interval
from acert.bounds.bound_pass import BoundPass
from acert.bounds.margin import upper_differences

ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "elu": nn.ELU,
    "hardtanh": nn.Hardtanh,
}

# Seeds rather than weights: hypothesis would shrink weights to zeros, which show nothing.
seeds = st.integers(0, 10_000)
radii = st.floats(0.0, 0.5)
nets = st.builds(
    lambda seed, hidden, activation: random_net(seed, hidden, ACTIVATIONS[activation]),
    seeds,
    st.lists(st.integers(1, 12), max_size=3),
    st.sampled_from(sorted(ACTIVATIONS)),
)


def random_net(seed, hidden, activation=nn.ReLU):
    """A float64 network with 4 inputs and 3 classes, three images and their labels."""
    generator = torch.Generator().manual_seed(seed)
    model = models.mlp(4, hidden, 3, activation=activation).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    images = torch.rand(3, 4, dtype=torch.float64, generator=generator)
    labels = torch.randint(3, (3,), generator=generator)
    return model, images, labels


def linear(weight, bias, dtype=torch.float64):
    layer = nn.Linear(len(weight[0]), len(weight)).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        layer.bias.copy_(torch.tensor(bias))
    return layer


# -- by hand ----------------------------------------------------------------------------


def test_worst_case_logits_of_a_linear_model_by_hand():
    # z = (x0, x1, x0 - x1) + 1 on [0.4, 0.6] x [0.15, 0.35]
    model = linear([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]], [1.0, 1.0, 1.0])
    images, labels = torch.tensor([[0.5, 0.25]], dtype=torch.float64), torch.tensor([0])
    plain = acert.worst_case_logits(model, images, labels, 0.1, elide=False)
    elided = acert.worst_case_logits(model, images, labels, 0.1)
    torch.testing.assert_close(plain, torch.tensor([[1.4, 1.35, 1.45]]).double(), rtol=1e-7, atol=0)
    # z1 - z0 = x1 - x0 <= -0.05 and z2 - z0 = -x1 <= -0.15
    torch.testing.assert_close(
        elided, torch.tensor([[0.0, -0.05, -0.15]]).double(), rtol=1e-7, atol=0
    )


def test_eliding_certifies_what_the_plain_margin_cannot():
    model = linear([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]], [1.0, 1.0, 1.0])
    images, labels = torch.tensor([[0.5, 0.25]], dtype=torch.float64), torch.tensor([0])
    plain = acert.certified_margin(model, images, labels, 0.1, elide=False)
    elided = acert.certified_margin(model, images, labels, 0.1)
    assert plain.item() == pytest.approx(0.05)
    assert elided.item() == pytest.approx(-0.05)


def test_margin_of_a_hidden_layer_by_hand():
    # x0 + x1 - 0.5 in [0, 1] and x0 - x1 in [-0.5, 0.5], so h in [0, 1] x [0, 0.5]
    model = nn.Sequential(
        linear([[1.0, 1.0], [1.0, -1.0]], [-0.5, 0.0]),
        nn.ReLU(),
        linear([[1.0, 1.0], [1.0, -1.0]], [1.0, 0.0]),  # z0 in [1, 2.5], z1 in [-0.5, 1]
    )
    images, labels = torch.full((1, 2), 0.5, dtype=torch.float64), torch.tensor([0])
    plain = acert.worst_case_logits(model, images, labels, 0.25, elide=False)
    elided = acert.worst_case_logits(model, images, labels, 0.25)
    assert plain.tolist() == [[1.0, 1.0]]
    assert elided.tolist() == [[0.0, -1.0]]  # z1 - z0 = -2 h1 - 1
    assert acert.certified_margin(model, images, labels, 0.25, elide=False).tolist() == [0.0]
    assert acert.certified_margin(model, images, labels, 0.25).tolist() == [-1.0]


@pytest.mark.parametrize("classes", [2, 16, 17])
def test_differences_of_a_training_step_are_those_of_any_pass(classes):
    """Few classes take all pairs at once there: the same in value and in gradient."""
    torch.manual_seed(0)
    layer = nn.Linear(5, classes).double()
    center, radius = torch.randn(7, 5).double(), torch.rand(7, 5).double().requires_grad_()
    labels, results = torch.arange(7) % classes, []
    for fold in (False, True):
        output = layer(Interval.ball(center, radius).within(BoundPass(fold=fold)))
        differences = upper_differences(output, labels)
        gradients = torch.autograd.grad(differences.sin().sum(), [radius, *layer.parameters()])
        results.append((differences, gradients))
    torch.testing.assert_close(*results, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("elide", [True, False])
def test_margin_at_radius_zero_is_that_of_the_logits(elide):
    model, images, labels = random_net(0, [8, 8])
    logits = model(images)
    expected = [
        max(row[i] - row[y] for i in range(3) if i != y)
        for row, y in zip(logits.tolist(), labels.tolist(), strict=True)
    ]
    found = acert.certified_margin(model, images, labels, 0.0, elide=elide)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


# -- against brute force ----------------------------------------------------------------


@given(seeds, st.floats(0.0, 1.5))
def test_elided_margin_of_a_linear_model_is_the_maximum_over_the_corners(seed, radius):
    model, images, labels = random_net(seed, [])
    found = acert.certified_margin(model, images, labels, radius)
    ends = torch.stack([(images - radius).clamp(0, 1), (images + radius).clamp(0, 1)])
    for sample, label in enumerate(labels.tolist()):
        corners = torch.stack(
            [ends[list(choice), sample, range(4)] for choice in itertools.product([0, 1], repeat=4)]
        )
        logits = model(corners)
        others = [i for i in range(3) if i != label]
        largest = (logits[:, others] - logits[:, [label]]).max().item()
        assert found[sample].item() == pytest.approx(largest, rel=1e-12, abs=1e-12)


@given(nets, radii)
def test_no_point_of_the_box_exceeds_the_margin(net, radius):
    model, images, labels = net
    points = images + radius * (2 * torch.rand(50, 3, 4, dtype=torch.float64) - 1)
    logits = model(points.clamp(0, 1).flatten(0, 1)).reshape(50, 3, 3)
    own = F.one_hot(labels, 3).bool()
    margins = logits.masked_fill(own, -torch.inf).amax(2) - logits[:, own]
    for elide in (True, False):
        bound = acert.certified_margin(model, images, labels, radius, elide=elide)
        assert bool((margins <= bound + 1e-12 * (1 + bound.abs())).all())


@given(nets, radii)
def test_elided_is_never_looser_than_plain(net, radius):
    model, images, labels = net
    plain = acert.worst_case_logits(model, images, labels, radius, elide=False)
    plain_differences = plain - plain.gather(1, labels.unsqueeze(1))
    elided = acert.worst_case_logits(model, images, labels, radius)
    slack = 1e-12 * (1 + plain.abs().amax())
    others = F.one_hot(labels, 3) == 0
    assert bool((elided[others] <= plain_differences[others] + slack).all())
    assert bool((elided[~others] == 0).all())


# -- which heads can be elided ----------------------------------------------------------


class FunctionalHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.weight = nn.Parameter(torch.randn(3, 6))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return F.linear(self.features(x), self.weight, self.bias)


class KeywordHead(FunctionalHead):
    def forward(self, x):
        return F.linear(input=self.features(x), weight=self.weight, bias=self.bias)


class MatrixHead(FunctionalHead):
    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.bias.zero_()

    def forward(self, x):
        return self.features(x) @ self.weight.t()


class OverwritingHead(FunctionalHead):
    """Reuses the memory of the features once the logits are there."""

    def forward(self, x):
        features = self.features(x)
        logits = F.linear(features, self.weight, self.bias)
        features.mul_(0.0)
        return logits


class ResidualHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def features(self, x):
        return x + torch.tanh(self.first(x))

    def forward(self, x):
        return self.last(self.features(x))


def features_and_head(model):
    """What comes before the last linear layer, and that layer's weight and bias."""
    if isinstance(model, nn.Sequential):
        flat = [part for part in model.modules() if not isinstance(part, nn.Sequential)]
        # `modules` names a reused layer once; its second use is the head.
        last = max(i for i, part in enumerate(flat) if isinstance(part, nn.Linear))
        return nn.Sequential(*flat[:last]), flat[last].weight, flat[last].bias
    if isinstance(model, ResidualHead):
        return _Features(model), model.last.weight, model.last.bias
    return model.features, model.weight, model.bias


class _Features(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model.features(x)


HEADS = {
    "nested sequential": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(4, 6), nn.ReLU()),
        nn.Sequential(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Sequential(nn.Linear(5, 3))),
    ),
    "identity and dropout behind": lambda: nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3), nn.Identity(), nn.Dropout(0.5)
    ).eval(),
    "functional": FunctionalHead,
    "functional by keyword": KeywordHead,
    "matrix product": MatrixHead,
    "custom forward": ResidualHead,
    "input overwritten": OverwritingHead,
}


@pytest.mark.parametrize("name", HEADS)
def test_linear_heads_are_elided(name):
    model = HEADS[name]().double()
    images, labels = torch.rand(5, 4).double(), torch.tensor([0, 1, 2, 0, 1])
    features, weight, bias = features_and_head(model)
    bounds = acert.interval_bounds(features, (images - 0.1).clamp(0, 1), (images + 0.1).clamp(0, 1))
    difference = weight - weight[labels].unsqueeze(1)
    expected = (
        (difference.clamp(min=0) @ bounds.upper.unsqueeze(2)).squeeze(2)
        + (difference.clamp(max=0) @ bounds.lower.unsqueeze(2)).squeeze(2)
        + (bias - bias[labels].unsqueeze(1))
    )
    found = acert.worst_case_logits(model, images, labels, 0.1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_reused_layer_is_elided_in_its_last_use():
    layer = nn.Linear(3, 3).double()
    model = nn.Sequential(layer, nn.ReLU(), layer)
    unrolled = nn.Sequential(layer, nn.ReLU(), copy.deepcopy(layer))
    images, labels = torch.rand(4, 3).double(), torch.tensor([0, 1, 2, 0])
    found, expected = (
        acert.certified_margin(each, images, labels, 0.1) for each in (model, unrolled)
    )
    assert torch.equal(found, expected)
    plain = acert.certified_margin(model, images, labels, 0.1, elide=False)
    assert bool((found < plain).any())


class Wiped(nn.Module):
    """Its weight is a copy, and overwritten after use."""

    def __init__(self, *, counted):
        super().__init__()
        self.counted = counted

    def forward(self, x):
        weight, bias = torch.eye(2), torch.tensor([0.1, 0.0])
        logits = nn.functional.linear(x, weight, bias)
        (weight if self.counted else weight.data).zero_()
        return logits


def test_a_last_layer_with_an_overwritten_weight_is_refused():
    images, labels = torch.full((1, 2), 0.5), torch.tensor([0])
    with pytest.raises(acert.UnsupportedOperation, match=r"overwritten in place.*weight\.clone"):
        acert.certified_margin(Wiped(counted=True), images, labels, 0.1)
    plain = acert.certified_margin(Wiped(counted=True), images, labels, 0.1, elide=False)
    assert plain.item() == pytest.approx(0.1)


@pytest.mark.parametrize("bounds", ["ibp", "crown-ibp"])
def test_no_weight_overwritten_unseen_gets_into_a_proof(bounds):
    # Autograd does not count writes through `.data`.
    images, words = torch.full((1, 2), 0.5), {"max_radius": 0.4, "bounds": bounds}
    found = acert.certified_radius(Wiped(counted=False), images, **words)
    assert found.value.item() == pytest.approx(0.05, rel=1e-4)
    with torch.inference_mode():
        found = acert.certified_radius(Wiped(counted=True), images, **words)
    assert found.value.item() == pytest.approx(0.05, rel=1e-4)


def test_a_last_layer_that_was_compiled_by_itself_is_elided():
    layer = nn.Linear(4, 3).double()
    images, labels = torch.rand(2, 4).double(), torch.tensor([0, 1])
    compiled = nn.Sequential(nn.ReLU(), torch.compile(layer, backend="eager"))
    found = acert.certified_margin(compiled, images, labels, 0.1)
    expected = acert.certified_margin(nn.Sequential(nn.ReLU(), layer), images, labels, 0.1)
    torch.testing.assert_close(found, expected)


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x):
        return self.net(x) / 2.0


class Flattened(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x):
        return self.net(x).flatten(1)


@pytest.mark.parametrize(
    ("build", "operation"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()), "relu"),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True)), "relu"),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), "batch_norm"),
        (Temperature, "div"),
        (Flattened, "flatten"),
        (nn.Identity, "its input"),
    ],
)
def test_other_heads_are_refused_by_the_name_of_their_last_operation(build, operation):
    model = build().eval()
    images, labels = torch.rand(2, 4), torch.tensor([0, 1])
    message = rf"last operation is a linear layer; the last one was \S*{operation}.*`elide=False`"
    with pytest.raises(acert.UnsupportedOperation, match=message):
        acert.certified_margin(model, images, labels, 0.1)
    plain = acert.certified_margin(model, images, labels, 0.1, elide=False)
    assert bool(plain.isfinite().all())


# -- the box ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("domain", "radius", "expected"),
    [
        (None, 0.5, [0.45, 0.75]),  # 0.95 - 0.5 and 0.25 + 0.5
        (None, 1.0, [-0.05, 1.25]),
        ((0.0, 1.0), 1.0, [0.0, 1.0]),
        ((0, 1), 1.0, [0.0, 1.0]),
        ((0.2, 0.95), 1.0, [0.2, 0.95]),
        ((torch.tensor([0.6, 0.0]), torch.tensor([1.0, 0.3])), 0.5, [0.6, 0.3]),
        ((torch.tensor([0.6, 0.0]), 1.0), 0.5, [0.6, 0.75]),
        ((torch.tensor(0.2), torch.tensor([1.0])), 1.0, [0.2, 1.0]),
    ],
)
def test_domain_clamps_the_box(domain, radius, expected):
    model = linear([[1.0, 0.0], [0.0, 1.0]], [-2.0, -2.0])
    images, labels = torch.tensor([[0.95, 0.25]], dtype=torch.float64), torch.tensor([0])
    logits = acert.worst_case_logits(model, images, labels, radius, elide=False, domain=domain)
    assert (logits[0] + 2).tolist() == pytest.approx(expected, rel=1e-6)


def test_a_domain_a_channel_broadcasts_over_pixels():
    model = models.small_cnn((2, 4, 4), 3, width=2).double()
    images, labels = torch.rand(2, 2, 4, 4).double(), torch.tensor([0, 1])
    low, high = torch.zeros(2, 1, 1), torch.tensor([1.0, 2.0]).reshape(2, 1, 1)
    found = acert.certified_margin(model, images, labels, 3.0, domain=(low, high))
    full = acert.certified_margin(
        model, images, labels, 3.0, domain=(low.expand(2, 4, 4), high.expand(2, 4, 4))
    )
    assert torch.equal(found, full)
    assert not torch.allclose(found, acert.certified_margin(model, images, labels, 3.0))


@pytest.mark.parametrize("elide", [True, False])
def test_radii_a_sample_equal_one_call_each(elide):
    model, images, labels = random_net(3, [9, 7])
    radius = torch.tensor([0.0, 0.07, 0.4], dtype=torch.float64)
    together = acert.worst_case_logits(model, images, labels, radius, elide=elide)
    for i in range(3):
        alone = acert.worst_case_logits(
            model, images[i : i + 1], labels[i : i + 1], radius[i].item(), elide=elide
        )
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-12, atol=1e-14)


def test_a_number_is_one_radius_for_all():
    model, images, labels = random_net(3, [9, 7])
    for number in (0.125, 1):
        found = acert.certified_margin(model, images, labels, number)
        same = torch.full((3,), float(number), dtype=torch.float64)
        assert torch.equal(found, acert.certified_margin(model, images, labels, same))


# -- laws (Thm. A.2, Remarks 3.3 and A.4) -----------------------------------------------


@given(nets, radii, radii)
def test_bounds_are_nested_in_the_radius(net, first, second):
    model, images, _ = net
    small, large = sorted((first, second))
    inner, outer = (acert.interval_bounds(model, images - r, images + r) for r in (small, large))
    slack = 1e-12 * (1 + outer.upper.abs() + outer.lower.abs())
    assert bool((outer.lower <= inner.lower + slack).all())
    assert bool((inner.upper <= outer.upper + slack).all())
    assert bool((inner.lower <= inner.upper + slack).all())


def steepness(model):
    """How fast any bound can move with the radius: the product of the layers' infinity norms."""
    norms = [
        layer.weight.detach().abs().sum(1).max().item()
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]
    return torch.tensor(norms).prod().item()


@given(nets, radii, st.floats(0.0, 0.01), st.booleans(), st.booleans())
def test_margin_is_non_decreasing_and_continuous_in_the_radius(net, radius, step, elide, clamped):
    model, images, labels = net
    domain = (0.0, 1.0) if clamped else None
    before, after = (
        acert.certified_margin(model, images, labels, r, elide=elide, domain=domain)
        for r in (radius, radius + step)
    )
    slack = 1e-12 * (1 + before.abs())
    assert bool((after >= before - slack).all())
    # No activation here is steeper than 1; the upper end of one logit moves, and the lower of one.
    assert bool((after - before <= 2 * steepness(model) * step * (1 + 1e-6) + slack).all())


def strictly_increasing(model, images, labels, grid):
    # Unclamped, as in the theorem: a box that fills the domain grows no further.
    margins = torch.stack(
        [acert.certified_margin(model, images, labels, r, domain=None) for r in grid]
    )
    return bool((margins.diff(dim=0) > 0).all())


@pytest.mark.parametrize("width", [4, 64])
def test_margin_of_cnn7_at_initialisation_increases_strictly(width):
    # 64 is the paper's width; one image of it is enough work.
    model = models.cnn7((1, 28, 28), width=width).eval()
    if width == 4:
        model = models.ibp_init_(model)
    images = torch.rand(1 if width == 64 else 4, 1, 28, 28)
    with torch.no_grad():
        labels = model(images).argmax(1)
        grid = [i / 8 * 0.4 for i in range(9)]
        assert strictly_increasing(model.double(), images.double(), labels, grid)


@settings(max_examples=20)
@given(seeds, st.lists(st.integers(1, 12), min_size=1, max_size=2))
def test_margin_of_a_tanh_net_increases_strictly(seed, hidden):
    model, images, labels = random_net(seed, hidden, nn.Tanh)
    # On larger boxes tanh saturates to 1.0 in float64, where it is flat.
    grid = [i / 16 * 0.2 for i in range(17)]
    assert strictly_increasing(model, images, labels, grid)


def test_a_dead_relu_shows_why_the_law_is_not_strict_in_general():
    model = nn.Sequential(linear([[1.0]], [-0.8]), nn.ReLU(), linear([[0.0], [1.0]], [0.1, 0.0]))
    images, labels = torch.tensor([[0.5]], dtype=torch.float64), torch.tensor([0])
    assert not strictly_increasing(model, images, labels, [0.0, 0.1, 0.2])


# -- training, types, ranks, gradients --------------------------------------------------


@pytest.mark.parametrize("elide", [True, False])
def test_training_statistics_give_the_training_logits_at_radius_zero(elide):
    model = models.cnn7((1, 8, 8), 4, width=2).double().train()
    images, labels = torch.rand(6, 1, 8, 8).double(), torch.tensor([0, 1, 2, 3, 0, 1])
    logits, statistics = acert.clean_pass(model, images)
    moved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    worst = acert.worst_case_logits(model, images, labels, 0.0, elide=elide, statistics=statistics)
    shift = logits.gather(1, labels.unsqueeze(1)) if elide else 0.0
    torch.testing.assert_close(worst, logits - shift, rtol=1e-9, atol=1e-12)
    # The gradient goes through the statistics: it is that of the clean pass.
    parameters = list(model.parameters())
    expected = torch.autograd.grad(F.cross_entropy(logits, labels), parameters, retain_graph=True)
    found = torch.autograd.grad(F.cross_entropy(worst, labels), parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-11)
    assert all(torch.equal(buffer, moved[name]) for name, buffer in model.named_buffers())
    assert model.training


def test_training_statistics_hold_the_bounds_at_other_radii():
    model = models.cnn7((1, 8, 8), 4, width=2).double().train()
    images, labels = torch.rand(6, 1, 8, 8).double(), torch.tensor([0, 1, 2, 3, 0, 1])
    _, statistics = acert.clean_pass(model, images)
    frozen = copy.deepcopy(model).eval()
    norms = [m for m in frozen.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm, (mean, variance) in zip(norms, statistics, strict=True):
        norm.running_mean.copy_(mean.detach())
        norm.running_var.copy_(variance.detach())
    found = acert.certified_margin(model, images, labels, 0.03, statistics=statistics)
    expected = acert.certified_margin(frozen, images, labels, 0.03)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("elide", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float16, 2e-2), (torch.bfloat16, 2e-1), (torch.float32, 1e-5), (torch.float64, 1e-12)],
)
def test_margins_come_in_the_dtype_of_the_images(dtype, tolerance, elide):
    model = models.small_cnn((1, 6, 6), 3, width=2).to(dtype)
    images, labels = torch.rand(4, 1, 6, 6).to(dtype), torch.tensor([0, 1, 2, 0])
    found = acert.certified_margin(model, images, labels, 0.125, elide=elide)
    exact = acert.certified_margin(
        copy.deepcopy(model).double(), images.double(), labels, 0.125, elide=elide
    )
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


def test_the_images_dtype_is_the_one_computed_in():
    model, _, labels = random_net(5, [6])
    images = torch.rand(3, 4, dtype=torch.float64)
    found = acert.certified_margin(copy.deepcopy(model).float(), images, labels, 0.1)
    rounded = copy.deepcopy(model).float().double()  # the same weights, held in float64
    assert torch.equal(found, acert.certified_margin(rounded, images, labels, 0.1))


@pytest.mark.parametrize(
    ("shape", "first"),
    [
        ((5,), lambda: nn.Linear(5, 4)),
        ((2, 5), lambda: nn.Conv1d(2, 3, 2)),
        ((2, 4, 5), lambda: nn.Conv2d(2, 3, 2)),
        ((2, 3, 4, 3), lambda: nn.Conv3d(2, 3, 2)),
    ],
)
def test_any_rank_of_input(shape, first):
    features = nn.Sequential(first(), nn.ReLU(), nn.Flatten())
    images, labels = torch.rand(3, *shape), torch.tensor([0, 1, 1])
    width = features(images).shape[1]
    model = nn.Sequential(features, nn.Linear(width, 2)).double()
    images = images.double()
    margins = acert.certified_margin(model, images, labels, torch.tensor([0.0, 0.1, 0.2]).double())
    points = (images + 0.2 * (2 * torch.rand(100, *images.shape) - 1)).clamp(0, 1)[:, 2]
    logits = model(points)
    assert margins.shape == (3,)
    assert bool((logits[:, 0] - logits[:, 1] <= margins[2] + 1e-12).all())
    clean = model(images)
    assert margins[0].item() == pytest.approx((clean[0, 1] - clean[0, 0]).item())


@pytest.mark.parametrize("bounds", ["ibp", "crown-ibp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_radius_0_pixels_at_the_ends_have_the_gradient_of_the_network(dtype, bounds):
    model = nn.Linear(4, 2).to(dtype)
    images = torch.tensor([[0.0, 1.0, 0.25, 0.75]], dtype=dtype, requires_grad=True)
    acert.certified_margin(model, images, torch.tensor([0]), 0.0, bounds=bounds).backward()
    torch.testing.assert_close(images.grad[0], (model.weight[1] - model.weight[0]).detach())


@pytest.mark.parametrize("elide", [True, False])
def test_gradients_against_finite_differences(elide):
    model, images, labels = random_net(11, [5], nn.Tanh)
    radius = torch.tensor([0.03, 0.1, 0.2], dtype=torch.float64, requires_grad=True)
    images.requires_grad_()

    def worst_case(*_):  # gradcheck moves the tensors in place, so the model sees it
        return acert.worst_case_logits(model, images, labels, radius, elide=elide)

    assert torch.autograd.gradcheck(worst_case, (images, radius, *model.parameters()))
