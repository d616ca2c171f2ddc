"""The regularisers of the warm-up against direct formulas, with finite gradients everywhere."""

import math

import pytest
import torch
from tests import slow_bounds
from torch import nn

from acert import Interval
from acert.losses import TERMS, Objective
from acert.methods import FastIBP
from acert.models import Normalize, cnn7, small_resnet
from acert.regularizers import l1_norm, relu_balance, tightness

TAU = 0.5


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def slow_tightness(boxes):
    """relu(tau - r0 / ri) / tau from the boxes of every sample."""
    start = mean((b - a) / 2 for box in boxes for a, b in zip(*box.first, strict=True))
    terms = []
    for i in range(len(boxes[0].relus)):
        here = mean((b - a) / 2 for box in boxes for a, b in zip(*box.relus[i], strict=True))
        terms.append(max(0.0, TAU - start / here) / TAU)
    return mean(terms)


def slow_balance(ends):
    """[relu(tau - rho_m) + relu(tau - rho_v)] / tau from the pairs of ends at each ReLU."""
    terms = []
    for pairs in ends:
        centers = [(low + high) / 2 for low, high in pairs]
        middle = mean(centers)
        on = [c for c, (low, _) in zip(centers, pairs, strict=True) if low > 0]
        off = [c for c, (_, high) in zip(centers, pairs, strict=True) if high < 0]
        sums = [
            (sum(on), -sum(off)),
            (sum((c - middle) ** 2 for c in on), sum((c - middle) ** 2 for c in off)),
        ]
        term = 0.0
        for one, other in sums:
            if one == other == 0:
                continue  # 0 / 0 is skipped
            rho = min(one / other if other else math.inf, other / one if one else math.inf)
            term += max(0.0, TAU - rho) / TAU
        terms.append(term)
    return mean(terms)


def network():
    return nn.Sequential(
        Normalize([0.4, 0.5, 0.6], [0.5, 0.25, 0.5]),
        nn.Linear(3, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    ).double()


@pytest.mark.parametrize("seed", range(3))
def test_both_regularisers_of_a_network_against_the_formula(seed):
    torch.manual_seed(seed)
    model = network()
    images, labels = torch.rand(6, 3, dtype=torch.float64), torch.arange(6) % 3
    cap = 0.12  # some boxes reach beyond [0, 1]: r0 is taken after clamping
    # The losses have no weight: what carries the gradient is the regularisers alone.
    numbers = torch.tensor([0.0, cap, 0.5, 0.0, 0.0, 1.0], dtype=torch.float64)
    values = Objective(method=FastIBP())(model, images, labels, images, numbers, regularize=True)
    found = values[0]
    assert dict(zip(TERMS, values, strict=True))["regularization"] == found

    statistics = slow_bounds.batch_statistics(model, images)
    boxes = [slow_bounds.bounds(model, image, cap, statistics) for image in images]
    ends = [
        [pair for box in boxes for pair in zip(*box.relus[i], strict=True)]
        for i in range(len(boxes[0].relus))
    ]
    wanted = slow_tightness(boxes) + slow_balance(ends)
    assert wanted > 0.01
    torch.testing.assert_close(found, torch.as_tensor(wanted))
    parameters = list(model.parameters())[:-1]  # the last bias has no part in it
    torch.testing.assert_close(
        torch.autograd.grad(found, parameters, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(wanted, parameters, allow_unused=True, materialize_grads=True),
        atol=1e-10,
        rtol=1e-7,
    )


@pytest.mark.parametrize(
    ("model", "relus"), [(cnn7((1, 8, 8), width=1), 6), (small_resnet((1, 8, 8), width=1), 7)]
)
def test_every_relu_is_seen_once(model, relus, monkeypatch):
    seen = []

    def counted(first, relu_inputs, *, part):
        seen.append(len(relu_inputs))
        return first.radius.mean()

    monkeypatch.setattr("acert.losses.tightness", counted)
    images, numbers = torch.rand(4, 1, 8, 8), torch.tensor([0.0, 0.1, 0.5, 0.0, 1.0, 1.0])
    Objective(method=FastIBP())(model, images, torch.arange(4), images, numbers, regularize=True)
    assert seen == [relus]


# -- by hand ----------------------------------------------------------------------------


def ball(center, radius):
    return Interval.ball(torch.tensor(center), torch.tensor(radius))


def test_tightness_by_hand():
    first = ball([0.0, 0.0], [0.1, 0.3])
    # r0 = 0.2 against 0.4 (ratio 0.5: no price), 0.8 (0.25: half) and 2 (0.1: 0.8).
    boxes = [ball([0.0], [0.4]), ball([1.0], [0.8]), ball([0.0, 0.0], [1.0, 3.0])]
    assert tightness(first, boxes).item() == pytest.approx((0.0 + 0.5 + 0.8) / 3)


def test_balance_by_hand():
    # Active 1 and 3, inactive -1: means 4 against 1, so rho_m = 1/4; the unstable one is left
    # out. The mean center is 1, so the variances are 0 + 4 against 4: rho_v = 1.
    box = ball([1.0, 3.0, -1.0, 1.0], [0.5, 0.5, 0.5, 2.0])
    assert relu_balance([box]).item() == pytest.approx((0.5 - 0.25) / 0.5)


@pytest.mark.parametrize(
    ("center", "radius", "wanted"),
    [
        ([0.5, -0.5], [1.0, 1.0], 0.0),  # all unstable: 0 / 0 twice, nothing to balance
        ([1.0, 2.0], [0.5, 0.5], 2.0),  # nothing inactive: rho is 0 twice
        ([-1.0, -2.0], [0.5, 0.5], 2.0),  # nothing active
        ([2.0, 2.0], [0.5, 0.5], 1.0),  # no variance at all: only the means count
        ([0.0, 0.0], [0.0, 0.0], 0.0),  # dead: not even a radius
    ],
)
def test_nothing_to_compare_has_finite_gradients(center, radius, wanted):
    center = torch.tensor(center, requires_grad=True)
    radius = torch.tensor(radius, requires_grad=True)
    box = Interval.ball(center * 1.0, radius * 1.0)
    first = Interval.ball(center * 0.0, radius * 0.0 + 0.1)
    value = relu_balance([box])
    assert value.item() == pytest.approx(wanted)
    total = value + tightness(first, [box])
    total.backward()
    assert torch.isfinite(total)
    assert center.grad.isfinite().all()
    assert radius.grad.isfinite().all()


def test_boxes_that_are_points_are_tight():
    point = ball([1.0, -1.0], [0.0, 0.0])
    assert torch.isfinite(tightness(point, [point]))
    assert tightness(ball([0.0], [0.1]), [point]).item() == 0.0


def test_l1_is_the_sum_of_absolute_weights():
    model = nn.Sequential(nn.Conv2d(1, 1, (1, 2)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1.0, -2.0]).view(1, 1, 1, 2))
        model[3].weight.copy_(torch.tensor([[3.0, -4.0], [0.0, 0.5]]))
        model[1].weight.fill_(100.0)  # batch norm and biases are not weights
        model[3].bias.fill_(100.0)
    value = l1_norm(model)
    assert value.item() == 10.5
    value.backward()
    assert model[0].weight.grad.flatten().tolist() == [1.0, -1.0]
    assert model[3].bias.grad is None


def test_a_model_without_matrices_has_no_l1_norm():
    assert l1_norm(nn.BatchNorm1d(3)).item() == 0


def test_gradients_keep_the_layout_of_channels_last_convolutions():
    seen = []
    conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
    images = torch.rand(2, 3, 5, 5).to(memory_format=torch.channels_last)
    center, radius = conv(images), conv(images).abs()
    for tensor in (center, radius):
        tensor.register_hook(seen.append)
    first, box = Interval.ball(images, 1e-3 * images), Interval.ball(center, radius)
    bounds = box.upper.relu() + box.lower.relu()
    loss = bounds.square().sum() + tightness(first, [box]) + relu_balance([box])
    loss.backward()
    assert len(seen) == 2
    assert all(found.is_contiguous(memory_format=torch.channels_last) for found in seen)
    assert not any(found.is_contiguous() for found in seen)
