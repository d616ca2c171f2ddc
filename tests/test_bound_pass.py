"""What passes have in common: results for weights, kept for as long as these are the same."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import acert
from acert.bounds import propagate
from acert.bounds.interval import BoundPass, Interval
from acert.bounds.margin import box
from acert.bounds.proven import proven_margin
from acert.bounds.rounding import REAL
from acert.radius import certified_batches

IMAGES = torch.rand(6, 2, 5, 5, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4)
    ).eval()


WRITES = {
    "in place": lambda weight: weight.mul_(1.5),
    "through .data": lambda weight: weight.data.mul_(1.5),
    "other memory": lambda weight: setattr(weight, "data", weight.data * 1.5),
}


@pytest.mark.parametrize("arithmetic", ["real", "float32", "nearest"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_radius_misses_no_write_to_a_weight(write, arithmetic):
    """Batches are certified one after the other, and the model may change in between."""
    model = network()
    labels = model(IMAGES).argmax(1)
    asked = {
        "max_radius": 0.1, "elide": True, "domain": (0.0, 1.0), "bounds": "ibp",
        "arithmetic": arithmetic, "batch_size": 3,
    }  # fmt: skip
    found = []
    for part, at_zero in certified_batches(model, IMAGES, labels, **asked):
        fresh = copy.deepcopy(model)
        here = slice(3 * len(found), 3 * len(found) + 3)
        expected = acert.certified_radius(
            fresh, IMAGES[here], labels[here], max_radius=0.1, arithmetic=arithmetic
        )
        torch.testing.assert_close(part.value, expected.value, rtol=2e-5, atol=1e-10)
        assert torch.equal(part.prediction, expected.prediction)
        found.append(at_zero)
        with torch.no_grad():
            for parameter in model.parameters():
                write(parameter)
    assert not torch.allclose(found[0], found[1])


def test_what_is_proven_with_kept_weights_is_what_is_proven_without():
    model, radius = network().double(), torch.linspace(0, 0.05, 6, dtype=torch.float64)
    labels, kept = model(IMAGES.double()).argmax(1), {}
    for factor in (1.0, 1.0, 2.0):
        with torch.no_grad():
            model[0].weight.data.mul_(factor)
            margins = [
                proven_margin(model, IMAGES.double(), labels, radius, rounding=REAL, kept=each)
                for each in (None, kept)
            ]
        assert torch.equal(*margins)


@pytest.mark.parametrize("rounding", [None, REAL], ids=["plain", "safe"])
def test_weights_made_anew_by_every_call_take_no_more_memory(rounding):
    model = network()
    weight_norm(model[4])
    model.double()
    held = []
    kept: dict = {}
    with torch.no_grad():
        for _ in range(3):
            start = box(IMAGES.double(), torch.full((6,), 0.01).double(), None, rounding=rounding)
            fold = rounding is None
            propagate(model, start.within(BoundPass(rounding, fold=fold, kept=kept)))
            held.append(len(kept))
    assert held[0] > 0
    assert held == held[:1] * 3


def test_a_pass_of_points_gives_what_the_model_computes():
    model = network()
    exact = IMAGES.double()
    with torch.no_grad():
        points = propagate(model, Interval(exact, exact).within(BoundPass(points=True)))
        assert torch.equal(points.center, propagate(model, Interval(exact, exact)).center)
        torch.testing.assert_close(points.center, copy.deepcopy(model).double()(exact))


def test_a_layer_that_is_called_several_times_has_its_weights_kept_once():
    layer = nn.Linear(4, 4).double()
    kept: dict = {}
    exact = torch.rand(3, 4, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(2):
            start = box(exact, torch.zeros(3).double(), None, rounding=REAL)
            propagate(nn.Sequential(layer, layer, layer), start.within(BoundPass(REAL, kept=kept)))
            assert len(kept) == 3
            assert len({id(each) for each in kept.values()}) == 1


def test_a_layer_that_changes_between_its_calls_is_taken_as_it_is_each_time():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            before = self.layer.weight.data.clone()
            x = self.layer(x)
            self.layer.weight.data.mul_(2)
            x = self.layer(x)
            self.layer.weight.data.copy_(before)
            return x

    torch.manual_seed(0)
    model, exact = Growing().double(), torch.rand(3, 4, dtype=torch.float64)
    kept: dict = {}
    with torch.no_grad():
        for _ in range(3):
            start = box(exact, torch.full((3,), 0.01).double(), None, rounding=REAL)
            found = propagate(model, start.within(BoundPass(REAL, kept=kept)))
            lower, upper = found.ends()
            answer = model(exact)
            assert bool(((lower <= answer) & (answer <= upper)).all())
