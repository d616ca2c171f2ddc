"""Exact values of random networks (128-bit balls) lie inside the bounds, up to rounding."""

import pytest
import torch
from tests import ball
from torch import nn

import acert
from acert.models import Normalize, cnn7, mlp, small_cnn, small_resnet

POINTS = 8


def pooling_net():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.GELU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 6, 3, padding=2, dilation=2, bias=False), nn.Sigmoid(),
        nn.AvgPool2d(2, stride=1), nn.Flatten(), nn.Linear(54, 5),
    )  # fmt: skip


NETWORKS = {
    "linear": lambda: mlp(64, [], 5),
    "mlp": lambda: mlp(64, [32, 32], 5, normalize=Normalize(0.3, 0.2)),
    "tanh": lambda: mlp(64, [32, 32], 5, activation=nn.Tanh),
    "small_cnn": lambda: small_cnn((1, 8, 8), 5, width=4),
    "small_resnet": lambda: small_resnet((1, 8, 8), 5, width=4),
    "cnn7": lambda: cnn7((1, 8, 8), 5, width=4),
    "pooling": pooling_net,
}


def random_network(name, seed=0):
    """A network in evaluation, its batch norms with statistics of random images."""
    torch.manual_seed(seed)
    model = NETWORKS[name]()
    for _ in range(20):
        acert.clean_pass(model.train(), torch.rand(64, 1, 8, 8))
    return model.eval()


def random_points(lower, upper):
    """Points of each box, its lower and a random corner among them: (boxes * points, ...)."""
    shape = (len(lower), POINTS, *lower.shape[1:])
    weight = torch.rand(shape, dtype=lower.dtype)
    weight[:, 0], weight[:, 1] = 0.0, weight[:, 1].round()
    low, high = lower.unsqueeze(1).expand(shape), upper.unsqueeze(1).expand(shape)
    points = torch.where(weight == 1, high, low + weight * (high - low))
    return torch.minimum(points, high).flatten(0, 1)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str
)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NETWORKS)
def test_exact_values_lie_inside_the_bounds(name, seed, dtype, tolerance):
    model = random_network(name, seed)
    images = torch.rand(4, 1, 8, 8, dtype=dtype)
    # At the first two radii rounding is all there is, so the tolerance is needed and tested.
    radius = torch.tensor([0.0, 1e-9, 1e-3, 0.1], dtype=dtype).reshape(-1, 1, 1, 1)
    lower, upper = (images - radius).clamp(min=0), (images + radius).clamp(max=1)
    with torch.no_grad():
        bounds = acert.interval_bounds(model.to(dtype), lower, upper)
    points = random_points(lower, upper)
    exact = ball.outputs(model, points).reshape(len(images), POINTS, -1)
    largest = torch.maximum(bounds.lower.abs(), bounds.upper.abs())
    if dtype == torch.float32:
        largest = largest.amax(1, keepdim=True).expand_as(largest)
    slack = tolerance * largest
    for point in range(POINTS):
        assert ball.inside(exact[:, point], bounds.lower, bounds.upper, slack)


def test_bounds_without_that_tolerance_are_not_exact():
    # The test above bites: without the tolerance it would fail.
    model = random_network("mlp").double()
    images = torch.rand(4, 1, 8, 8, dtype=torch.float64)
    bounds = acert.interval_bounds(model, images, images)
    exact = ball.outputs(model, images)
    assert not ball.inside(exact, bounds.lower, bounds.upper, 0 * bounds.upper)


@pytest.mark.parametrize("elide", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_margins_agree_with_the_oracle(name, elide):
    model = random_network(name).double()
    images = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2])
    radius = torch.tensor([0.0, 1e-3, 0.1], dtype=torch.float64)
    found = acert.certified_margin(model, images, labels, radius, elide=elide)
    exact = ball.margins(model, images, labels, radius, elide=elide)
    assert found.tolist() == pytest.approx([float(margin.mid()) for margin in exact], rel=1e-9)
    assert all(margin.rad() < 1e-25 for margin in exact)


def test_the_oracle_by_hand():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -1.0], [1.0, 1.0]]))
        model[0].bias.copy_(torch.tensor([0.0, -1.0]))
        model[2].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        model[2].bias.copy_(torch.tensor([0.5, 0.0]))
    image, label = torch.tensor([[0.5, 0.25]]).double(), torch.tensor([0])
    radius = torch.tensor([0.25]).double()
    # hidden bounds: [-1/4, 3/4] -> [0, 3/4] and [-3/4, 1/4] -> [0, 1/4]
    assert ball.outputs(model, image).tolist() == [[0.75, 0.0]]
    # elided: max of 2 h2 - h1 - 1/2; plain: 1/2 - (0 + 1/2)
    assert ball.margins(model, image, label, radius) == [0.0]
    assert ball.margins(model, image, label, radius, elide=False) == [0.0]
    # outside the domain nothing counts: x2 >= 0 makes the lower bound of h1 no lower
    wide = ball.box(image, torch.tensor([0.5]).double())
    assert wide.lower.tolist() == [[0.0, 0.0]]
    assert wide.upper.tolist() == [[1.0, 0.75]]
