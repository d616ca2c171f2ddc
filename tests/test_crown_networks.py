"""CROWN-IBP of whole networks with more than ReLU: radii, attacks, gradients, compilation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from tests import ball
from tests.slopes import Weighted, assert_slope
from torch import nn

import acert
from acert import models
from acert.attack import attack_radius
from acert.bounds import propagate
from acert.bounds.crown import crown_differences
from acert.bounds.interval import BoundPass
from acert.bounds.margin import bounding, box
from acert.bounds.rounding import FLOAT32, REAL

CLASSES = 10


def digits(count, *, dtype=torch.float32, start=0):
    data = load_digits()
    images = torch.tensor(data.images[start : start + count] / 16, dtype=dtype).unsqueeze(1)
    return images, torch.tensor(data.target[start : start + count])


def recorded(model, images, radius, *, rounding=None, bounds="crown-ibp"):
    """The output of a bound pass that CROWN can walk back."""
    radius = torch.as_tensor(radius, dtype=images.dtype).expand(len(images))
    start = box(images, radius, (0.0, 1.0), rounding=rounding)
    return propagate(model, start.within(bounding(bounds, rounding=rounding)))


def convolutional(activation):
    return nn.Sequential(
        models.Normalize(0.4, 0.3),
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        activation(),
        nn.Conv2d(4, 6, 3, padding=1),
        activation(),
        nn.Flatten(),
        nn.Linear(96, 16),
        activation(),
        nn.Linear(16, CLASSES),
    )


class Dense(nn.Module):
    """DenseNet's block: every layer sees all that came before."""

    def __init__(self, channels, growth):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels + growth * i) for i in range(2))
        self.layers = nn.ModuleList(
            nn.Conv2d(channels + growth * i, growth, 3, padding=1) for i in range(2)
        )

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.cat((x, layer(F.relu(norm(x)))), 1)
        return x


class Shuffled(nn.Module):
    """Channels split, shuffled and centered, as ShuffleNet and layer norms do."""

    def forward(self, x):
        first, second = x.chunk(2, 1)
        x = torch.stack((first, second - second.mean((2, 3), keepdim=True)), 2).flatten(1, 2)
        return F.pad(x.transpose(2, 3)[:, :, 1:], (0, 0, 1, 0), value=0.3)


NETWORKS = {
    "dense": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        Dense(4, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(40, CLASSES),
    ),
    "shuffled": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1, padding_mode="reflect"),
        nn.ReLU(),
        Shuffled(),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    ),
    "max pool": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, CLASSES),
    ),
    "overlapping max pool": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
        nn.Flatten(2),
        nn.MaxPool1d(2, stride=3, dilation=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    ),
    "up and down": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1),
        nn.ReLU(),
        nn.Unflatten(1, (1, 2)),
        nn.Conv3d(1, 8, (2, 3, 3), stride=2),
        nn.ReLU(),
        nn.AvgPool3d((1, 2, 2), stride=1),
        nn.Flatten(2),
        nn.AvgPool1d(2, stride=1),
        nn.Flatten(),
        nn.Linear(24, CLASSES),
    ),
    "leaky relu": lambda: convolutional(nn.LeakyReLU),
    "steep leaky relu": lambda: convolutional(lambda: nn.LeakyReLU(0.4, inplace=True)),
    "hardtanh": lambda: convolutional(lambda: nn.Hardtanh(-0.4, 0.7)),
    "relu6": lambda: convolutional(nn.ReLU6),
    "tanh": lambda: convolutional(nn.Tanh),
    "sigmoid": lambda: models.mlp(64, [32], CLASSES, activation=nn.Sigmoid),
}


def make(name, dtype=torch.float32):
    torch.manual_seed(1)
    return NETWORKS[name]().to(dtype).eval()


TRAINED: dict[str, nn.Module] = {}


def trained(name):
    """The network after a few steps of plain training on digits."""
    if name not in TRAINED:
        model, (images, labels) = make(name), digits(600)
        optimizer = torch.optim.Adam(model.parameters(), 5e-3)
        for _ in range(60):
            chosen = torch.randint(600, (64,))
            optimizer.zero_grad()
            F.cross_entropy(model.train()(images[chosen]), labels[chosen]).backward()
            optimizer.step()
        TRAINED[name] = model.requires_grad_(False).eval()
    return TRAINED[name]


@pytest.mark.parametrize("name", NETWORKS)
def test_attacks_inside_the_radii_find_nothing(name):
    model, (images, _) = trained(name), digits(6, start=1000)
    found = {}
    for arithmetic in ("float32", "real", "nearest"):
        ibp, crown = (
            acert.certified_radius(
                model, images, max_radius=0.1, bounds=bounds, arithmetic=arithmetic
            )
            for bounds in ("ibp", "crown-ibp")
        )
        assert (crown.value >= ibp.value * (1 - 1e-5)).all()
        found[arithmetic] = crown.value
        if arithmetic == "float32":
            assert (crown.value > 1.2 * ibp.value).sum() > 3  # plain training: CROWN is well ahead
            attack = attack_radius(
                model, images, crown.prediction, max_radius=0.1, steps=15, restarts=2,
                certified=crown.value,
            )  # fmt: skip
            assert (attack.radius > crown.value).all()
            assert (attack.radius < 0.1).any()
    assert (found["float32"] <= found["real"] * (1 + 1e-5)).all()
    assert (found["real"] <= found["nearest"] * (1 + 1e-5)).all()
    assert found["float32"].sum() > 0.97 * found["nearest"].sum()


@pytest.mark.parametrize("bounds", ["crown-ibp", "crown"])
@pytest.mark.parametrize("name", ["leaky relu", "hardtanh", "max pool", "tanh"])
def test_exact_networks_stay_below_the_bounds(name, bounds):
    """A corner of the box evaluated in balls."""
    model, (images, labels) = copy.deepcopy(trained(name)).double(), digits(2, dtype=torch.float64)
    output = recorded(model, images, 0.02, rounding=REAL, bounds=bounds)
    bound = crown_differences(output, labels)
    lower, upper = (images - 0.0199).clamp(min=0), (images + 0.0199).clamp(max=1)
    logits = ball.outputs(model, torch.where(torch.rand_like(lower) < 0.5, lower, upper))
    for row, label in enumerate(labels.tolist()):
        for i in set(range(CLASSES)) - {label}:
            assert logits[row, i] - logits[row, label] <= ball.array(bound[row, i])


@pytest.mark.parametrize(("rounding", "holds"), [(FLOAT32, True), (REAL, False)])
@pytest.mark.parametrize("name", NETWORKS)
def test_what_float32_computes(name, rounding, holds):
    """At radius 0 nothing but rounding is left, and "float32" pays for that of the network."""
    model, (images, labels) = trained(name), digits(20)
    bound = crown_differences(recorded(model, images.double(), 0.0, rounding=rounding), labels)
    logits = model(images).double()
    below = logits - logits.gather(1, labels.unsqueeze(1)) <= bound
    assert below.all() == holds
    if rounding is FLOAT32:
        exact = copy.deepcopy(model).double()(images.double())
        assert (bound - exact + exact.gather(1, labels.unsqueeze(1))).max() < 1e-2


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_against_finite_differences(name):
    model, labels = make(name, torch.float64), torch.tensor([3, 7])
    images = torch.rand(2, 1, 8, 8).double()  # digits are black in places, and maxima tie there

    def loss(images, *values):
        output = recorded(Weighted(model, values), images, 0.03)
        return F.cross_entropy(crown_differences(output, labels), labels)

    values = [images, *(p.detach().clone() for p in model.parameters())]
    assert_slope(loss, values)


@pytest.mark.parametrize("name", [*NETWORKS][::2])  # compiling takes seconds each
def test_compiled_equals_eager(name):
    torch.compiler.reset()
    model, (images, labels) = make(name), digits(2)

    def bounds(images, labels):
        start = box(images, torch.full((2,), 0.03), (0.0, 1.0)).within(BoundPass(record=True))
        return crown_differences(propagate(model, start), labels)

    eager = bounds(images, labels)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(eager.logsumexp(1).sum(), parameters)
    compiled = torch.compile(bounds, fullgraph=True, backend="eager")(images, labels)
    torch.testing.assert_close(compiled, eager)
    found = torch.autograd.grad(compiled.logsumexp(1).sum(), parameters)
    torch.testing.assert_close(found, gradients)


# Networks that auto_LiRPA takes, and whether it has the same lines; else ours are closer.
PEERS = {
    "leaky relu": True, "dense": True, "max pool": True,
    "steep leaky relu": False, "tanh": False, "sigmoid": False,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # its own: it traces with torch.jit
@pytest.mark.parametrize("name", PEERS)
def test_bounds_are_those_of_a_peer(name):
    lirpa = pytest.importorskip("auto_LiRPA")
    model, (images, labels) = make(name), digits(3)  # of max pooling it knows float32 only
    found = crown_differences(recorded(model, images, 0.02), labels)
    around = lirpa.PerturbationLpNorm(
        x_L=(images - 0.02).clamp(min=0), x_U=(images + 0.02).clamp(max=1)
    )
    bounded = lirpa.BoundedModule(model, images, bound_opts={"conv_mode": "matrix"})
    rows = torch.eye(CLASSES) - F.one_hot(labels, CLASSES).unsqueeze(1)
    _, upper = bounded.compute_bounds(
        x=(lirpa.BoundedTensor(images, around),), C=rows, method="CROWN-IBP"
    )
    if PEERS[name]:
        torch.testing.assert_close(found, upper, rtol=1e-5, atol=1e-5)
    else:
        assert found.mean() <= upper.mean() + 1e-5


@pytest.mark.parametrize("name", ["dense", "max pool", "leaky relu"])
def test_crown_ibp_trains_two_epochs(name, monkeypatch):
    called = []

    def counted(output, labels):
        called.append(len(labels))
        return crown_differences(output, labels)

    monkeypatch.setattr("acert.methods.crown_ibp.crown_differences", counted)
    images, labels = digits(600)
    run = acert.train(
        copy.deepcopy(trained(name)).requires_grad_().train(), (images, labels),
        method=acert.CrownIBP(),
        max_radius=0.01, epochs=2, batch_size=10, learning_rate=5e-3, progress=False,
    )  # fmt: skip
    assert len(called) >= 60
    images, labels = digits(100, start=1000)
    before, after = (
        acert.certified_radius(model, images, labels, max_radius=0.01, bounds="crown-ibp").value
        for model in (trained(name), run.model)
    )
    assert after.mean() > before.mean()
    assert after.mean() > 0.004
