"""Number formats of a training step: how far each may be from float32."""

import copy
from functools import cache

import pytest
import torch
from tests.test_training import same, trainer, weights
from torch import nn

import acert
from acert.losses import Objective, Scalars
from acert.methods import METHODS
from acert.precision import FLOAT32, PRECISIONS, Precision, products_in

RATE, CAP, PROGRESS, KAPPA, ROBUST, WEIGHT = 1e-3, 4 / 255, 0.5, 0.2, 0.8, 0.3
# Errors of one network scatter by an order of magnitude, the medians of seven far less.
SEEDS = range(7)


@cache
def trained(seed):
    """A network after some certified training: the gradient of an untrained one is mostly noise."""
    torch.manual_seed(seed)
    model = acert.models.ibp_init_(acert.models.cnn7((3, 8, 8), 10, width=8)).train()
    images, labels = torch.rand(32, 3, 8, 8), torch.randint(0, 10, (32,))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scalars = torch.tensor([RATE, CAP, PROGRESS, KAPPA, ROBUST, WEIGHT])
    warm_up = Objective(method=METHODS["fastibp"]())
    for step in range(40):
        optimizer.zero_grad()
        scalars[Scalars.CAP] = CAP * step / 40
        warm_up(model, images, labels, images, scalars, regularize=True)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    optimizer.zero_grad()
    return model, images, labels, scalars


def terms_and_gradient(method, precision, *, regularize, seed=0):
    model, images, labels, scalars = copy.deepcopy(trained(seed))
    objective = Objective(method=METHODS[method](), precision=precision)
    terms = objective(model, images, labels, images, scalars, regularize=regularize)
    terms[0].backward()
    return terms.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def errors(method, precision, *, regularize):
    """Relative errors of the terms and of the gradient, medians over seeds."""
    found = []
    for seed in SEEDS:
        exact, gradient = terms_and_gradient(method, FLOAT32, regularize=regularize, seed=seed)
        terms, other = terms_and_gradient(method, precision, regularize=regularize, seed=seed)
        assert terms.dtype == other.dtype == torch.float32
        assert terms.isfinite().all()
        off = ((terms - exact).abs() / (1e-3 + exact.abs()))[:4].max()
        found.append((off, (other - gradient).norm() / gradient.norm()))
    return torch.tensor(found).median(0).values.tolist()


@pytest.mark.parametrize("regularize", [False, True])
@pytest.mark.parametrize("method", ["standard", "fastibp", "crown-ibp", "sabr", "acert"])
def test_float16_is_closer_than_bfloat16(method, regularize):
    terms, gradient = errors(method, PRECISIONS["float16"], regularize=regularize)
    rough_terms, rough_gradient = errors(method, PRECISIONS["bfloat16"], regularize=regularize)
    assert 0 < terms < 2e-4
    assert 0 < gradient < 0.02
    assert rough_terms > 1.5 * terms
    assert rough_gradient > 1.5 * gradient


HEADS = {
    "small_cnn": lambda: acert.models.small_cnn((3, 8, 8), 10),
    "a layer without batch norm": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, 10),
    ),
}  # fmt: skip


@pytest.mark.parametrize("elide", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", HEADS)
def test_networks_with_layers_that_no_batch_norm_follows(name, method, elide):
    model = acert.models.ibp_init_(HEADS[name]()).train()
    images, labels = torch.rand(16, 3, 8, 8), torch.randint(0, 10, (16,))
    scalars = torch.tensor([RATE, CAP, PROGRESS, KAPPA, ROBUST, WEIGHT])
    terms = {}
    for precision in ("float32", "float16"):
        objective = Objective(
            method=METHODS[method](), precision=PRECISIONS[precision], elide=elide
        )
        found = objective(model, images, labels, images, scalars, regularize=True)
        found[0].backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        terms[precision] = found.detach()
    torch.testing.assert_close(terms["float16"], terms["float32"], rtol=2e-3, atol=1e-4)


def test_roots_alone_leave_the_other_parts_untouched():
    for method in ("fastibp", "standard"):
        found = [
            terms_and_gradient(method, Precision(root=root), regularize=False)
            for root in ("float16", "bfloat16")
        ]
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


def test_only_products_change_their_format():
    a = torch.rand(4, 4)
    with products_in("float16", a.device):
        assert (a @ a).dtype == torch.float16
        assert (a + a).dtype == torch.float32
    for form in ("float32", "tf32"):
        with products_in(form, a.device):
            assert (a @ a).dtype == torch.float32


def test_policies():
    assert [name for name, value in PRECISIONS.items() if value.scales_gradients] == ["float16"]
    assert [name for name, value in PRECISIONS.items() if not value.tf32] == ["float32"]
    assert [name for name, value in PRECISIONS.items() if value.folds] == ["float32"]


def test_a_cpu_computes_in_float32_whatever_the_policy():
    found = []
    for precision in ("float32", "float16"):
        loop = trainer(precision=precision)
        loop.run_epoch()
        assert not loop.scaler.is_enabled()
        found.append(weights(loop.model))
    assert same(*found)
