"""Batch norm and ReLU of a ball as one operator: the numbers and gradients of one by one."""

import copy
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.rule_cases import Apply
from torch import nn
from torch.utils.checkpoint import checkpoint

from acert.bounds import fused, pending, propagate
from acert.bounds.bound_pass import BoundPass
from acert.bounds.margin import box
from acert.bounds.propagation import clean_pass
from acert.bounds.rules import affine
from acert.bounds.rules.affine import convolution_by_matmul
from acert.errors import UnsupportedOperation
from acert.losses import Objective
from acert.methods import METHODS, Acert, FastIBP
from acert.models import Normalize, cnn7, ibp_init_, small_resnet
from acert.precision import PRECISIONS

# -- the operator -----------------------------------------------------------------------


def slow_relu_of_scaled(center, radius, mean, inverse, factor, shift):
    """Both ends through the ReLU one by one, and the sums of the ball that enters it."""
    scale = inverse * factor
    center, radius = (center - mean) * scale + shift, radius * scale.abs()
    lower, upper = center - radius, center + radius
    on, off = center[lower > 0], center[upper < 0]
    counts = (center.new_tensor(float(len(part))) for part in (on, off))
    sums = torch.stack([
        center.sum(), on.sum(), off.sum(), on.square().sum(), off.square().sum(), *counts,
        radius.sum(),
    ])  # fmt: skip
    lower, upper = lower.relu(), upper.relu()
    return (lower + upper) / 2, (upper - lower) / 2, sums


def numbers(rows, channels, dtype=torch.float64):
    """A ball, a batch norm with factors of both signs, and one factor of 0 where there are some."""
    factor = torch.randn(channels, dtype=torch.float64)
    if channels > 2:
        factor[1], factor[2] = 0.0, -factor[2].abs()
    ball = torch.randn(rows, channels), 0.5 * torch.rand(rows, channels)
    channel = torch.randn(channels), torch.rand(channels) + 0.5, factor, torch.randn(channels)
    wide = torch.promote_types(dtype, torch.float32)
    return [*(part.to(dtype) for part in ball), *(part.to(wide) for part in channel)]


SHAPES = [(1, 1), (1, 6), (30, 4), (9, 7), (100, 33)]


@pytest.mark.parametrize("observe", [True, False], ids=["observed", "unobserved"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_operator_is_batch_norm_and_relu_of_both_ends(shape, observe):
    inputs = numbers(*shape)
    weights = [torch.randn(shape).double(), torch.randn(shape).double(), torch.randn(8).double()]
    weights = weights if observe else weights[:2]
    results = []
    for function in (lambda *x: fused.relu_of_scaled(*x, observe=observe), slow_relu_of_scaled):
        leaves = [part.clone().requires_grad_() for part in inputs]
        outputs = function(*leaves)[: len(weights)]
        total = sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True))
        results.append([*outputs, *torch.autograd.grad(total, leaves)])
    torch.testing.assert_close(*results, atol=1e-12, rtol=1e-10)


def test_sums_are_in_the_order_of_their_names():
    ball = torch.tensor([[3.0, 0.5, -2.0, 5.0]]), torch.tensor([[1.0, 1.0, 0.5, 0.25]])
    channel = [torch.full((4,), value) for value in (1.0, 0.5, -2.0, 1.0)]
    # -(x - 1) + 1: -1 +- 1, 1.5 +- 1, 4 +- 0.5, -3 +- 0.25; the first ends at 0.
    center, radius, sums = fused.relu_of_scaled(*ball, *channel, observe=True)
    assert center.tolist() == [[0.0, 1.5, 4.0, 0.0]]
    assert radius.tolist() == [[0.0, 1.0, 0.5, 0.0]]
    assert dict(zip(fused.SUMS, sums.tolist(), strict=True)) == {
        "center": 1.5, "on": 5.5, "off": -3.0, "on_square": 18.25, "off_square": 9.0,
        "on_count": 2.0, "off_count": 1.0, "radius": 2.75,
    }  # fmt: skip


def test_nobody_pays_for_sums_that_nobody_observes():
    *_, sums = fused.relu_of_scaled(*numbers(3, 4))
    assert sums.tolist() == [0.0] * 8


@pytest.mark.parametrize("observe", [True, False])
def test_gradients_are_those_of_finite_differences(observe):
    inputs = numbers(5, 3)
    inputs[4][1] = 0.7  # at a factor of 0 the radius has a kink
    leaves = [part.requires_grad_() for part in inputs]

    def function(*parts):
        return fused.relu_of_scaled(*parts, observe=observe)

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("observe", [True, False])
def test_pytorch_takes_the_operators_for_its_own(dtype, observe):
    inputs = numbers(40, 33, dtype)
    torch.library.opcheck(fused._forward, (*(x.clone().requires_grad_() for x in inputs), observe))
    by = [torch.randn(40, 33).to(dtype), torch.randn(40, 33).to(dtype), inputs[2].new_ones(8)]
    torch.library.opcheck(fused._backward, (*by, *inputs, observe))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_goes_in_and_out_and_sums_are_wide(dtype):
    inputs = numbers(50, 33, dtype)
    leaves = [part.clone().requires_grad_() for part in inputs]
    center, radius, sums = fused.relu_of_scaled(*leaves, observe=True)
    (center.float().sum() + radius.float().sum() + sums.sum()).backward()
    assert (center.dtype, radius.dtype, sums.dtype) == (dtype, dtype, torch.float32)
    assert [leaf.grad.dtype for leaf in leaves] == [dtype] * 2 + [torch.float32] * 4
    exact = [part.double().requires_grad_() for part in inputs]
    expected = slow_relu_of_scaled(*exact)
    sum(part.sum() for part in expected).backward()
    # Rounded once, at the end: the sums are not those of rounded numbers.
    torch.testing.assert_close(sums.double(), expected[2], rtol=1e-5, atol=1e-3)
    slack = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-3}
    torch.testing.assert_close(center.double(), expected[0], **slack)
    torch.testing.assert_close(radius.double(), expected[1], **slack)
    for leaf, other in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad.double(), other.grad, **slack)


def test_sums_of_all_pieces_are_added_up(monkeypatch):
    pieces = torch.arange(16.0).view(2, 8)
    monkeypatch.setattr(fused, "_forward", lambda center, radius, *_: (center, radius, pieces))
    *_, sums = fused.relu_of_scaled(*numbers(3, 4), observe=True)
    assert sums.tolist() == [8.0 + 2 * i for i in range(8)]


def test_no_cpu_has_the_kernels():
    assert not fused.available(torch.device("cpu"))


# -- in place of batch norm and ReLU one by one -----------------------------------------


class Forward(nn.Module):
    """A convolution, a batch norm, and what a test makes of them; then a linear layer."""

    def __init__(self, compute, *, features=3, **options):
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 3, **options)
        self.norm = nn.BatchNorm2d(3)
        self.compute = compute
        self.last = nn.Linear(features, 3)

    def forward(self, x):
        return self.last(self.compute(self, x).flatten(2).mean(2))


def without_gradient(model, x):
    y = model.norm(model.convolution(x))
    with torch.no_grad():
        z = y.relu()
    return z + y


def norm_without_gradient(model, x):
    y = model.convolution(x)
    with torch.no_grad():
        y = model.norm(y)
    return y.relu()


def convolution_without_gradient(model, x):
    with torch.no_grad():
        y = model.convolution(x)
    return model.norm(y).relu()


def looked_at_without_gradient(model, x):
    y = model.convolution(x)
    with torch.no_grad():
        a = 2 * y
    z = model.norm(y)
    with torch.no_grad():
        b = z + 1
    return z.relu() + y + a * 0.5 + b


def in_place(model, x):
    y = model.norm(model.convolution(x))
    z = torch.relu_(y)
    return y + z


def sliced(model, x):
    """ReLUs and convolutions leave memory with gaps behind where they are cut."""
    y = model.norm(model.convolution(x)).relu()
    ones = x.new_ones(4) if isinstance(x, torch.Tensor) else torch.ones(4, dtype=x.dtype)
    ones = ones * torch.tensor([1.0, -2.0, 3.0, 4.0]).to(ones)
    mean, variance = 0.1 * ones[::2], ones[::2].abs()
    y = y[:, :2]
    y = F.batch_norm(y, mean, variance, ones[:2].clone(), 0.1 * ones[1::2]).relu()
    y = y.flatten(1).view(len(x), 2, -1).transpose(1, 2)[:, :4]
    y = F.batch_norm(y, ones * 0.1, ones.abs(), ones, ones).relu()
    y = y[:, :, 0]
    return F.batch_norm(y, ones * 0.1, ones.abs(), ones).relu().unsqueeze(2)[:, :3]


def reshaped(model, x):
    y = model.convolution(x).flatten(2)
    y = F.batch_norm(y, None, None, *model.norm.parameters(), training=True)
    return y.relu().view(len(x), -1, 4, 4)


def behind_relu(model, x):
    y = model.norm(model.convolution(x)).relu()
    # The batch norm behind a ReLU has no product in front of it.
    return F.batch_norm(y, None, None, *model.norm.parameters(), training=True).relu()


def evaluated(model):
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
            norm.eval()
    return model


def block(*layers, features):
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 3))


# A model and how many of its ReLUs are one operator with the batch norm in front of them.
NETWORKS = {
    "cnn7": (lambda: cnn7((2, 6, 6), 3, width=2, normalize=Normalize([0.5] * 2, [0.2] * 2)), 6),
    "residual": (lambda: small_resnet((2, 6, 6), 3, width=2), 4),
    "in place": (lambda: Forward(in_place), 1),
    "no affine weights": (
        lambda: block(
            nn.Conv2d(2, 4, 3, stride=2), nn.BatchNorm2d(4, affine=False), nn.ReLU(), features=16
        ),
        1,
    ),
    "evaluation": (
        lambda: evaluated(Forward(lambda model, x: model.norm(model.convolution(x)).relu())), 1
    ),
    "no batch norm": (lambda: Forward(lambda model, x: model.convolution(x).relu()), 0),
    "no bias or batch norm": (
        lambda: Forward(lambda model, x: model.convolution(x).relu(), bias=False), 0
    ),
    "no ReLU": (lambda: Forward(lambda model, x: model.norm(model.convolution(x))), 0),
    "transposed": (
        lambda: block(
            nn.ConvTranspose2d(2, 3, 2, stride=2), nn.BatchNorm2d(3), nn.ReLU(), features=432
        ),
        1,
    ),
    "groups": (
        lambda: block(
            nn.Conv2d(2, 4, 3, groups=2, padding="same"), nn.BatchNorm2d(4), nn.ReLU(), features=144
        ),
        1,
    ),
    "one axis": (
        lambda: block(
            nn.Flatten(2), nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), features=102
        ),
        0,
    ),
    # As many features as channels: only one of both has the bias.
    "linear of channels": (
        lambda: block(
            nn.Flatten(2), nn.Linear(36, 2), nn.BatchNorm1d(2), nn.ReLU(), features=4
        ),
        0,
    ),
    "linear": (
        lambda: block(nn.Flatten(), nn.Linear(72, 5), nn.BatchNorm1d(5), nn.ReLU(), features=5), 1
    ),
    "products alone": (
        lambda: block(
            nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(18, 5), features=5
        ),
        0,
    ),
    "used twice": (
        lambda: Forward(lambda model, x: (y := model.norm(model.convolution(x))).relu() + y), 1
    ),
    "two ReLUs": (
        lambda: Forward(lambda model, x: model.norm(model.convolution(x)).relu().relu()), 1
    ),
    "two ReLUs of one": (
        lambda: Forward(
            lambda model, x: (y := model.norm(model.convolution(x))).relu() + 2 * torch.relu(y)
        ),
        2,
    ),
    "pools": (
        lambda: block(
            nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.0),
            nn.MaxPool2d(2), nn.Conv2d(3, 4, 2, padding=1, bias=False), nn.BatchNorm2d(4),
            nn.ReLU(), nn.AvgPool2d(2), features=16,
        ),
        2,
    ),
    "behind a ReLU": (lambda: Forward(behind_relu), 2),
    "reshaped": (lambda: Forward(reshaped, bias=False), 1),
    "reshaped with bias": (lambda: Forward(reshaped), 0),
    "sliced": (lambda: Forward(sliced), 4),
    "viewed": (
        lambda: Forward(
            lambda model, x: model.norm(model.convolution(x)).relu().view(len(x), -1, 4)[:, :3]
        ),
        1,
    ),
    "samples viewed one by one": (
        lambda: Forward(
            lambda model, x: torch.stack(
                [y.view(3, -1) for y in model.norm(model.convolution(x)).relu().unbind()]
            )
        ),
        1,
    ),
    "viewed with one axis more": (
        lambda: Forward(
            lambda model, x: model.norm(model.convolution(x)).unsqueeze(2).view(len(x), 3, -1)
        ),
        0,
    ),
    # Once more where gradients are asked for.
    "checkpoint": (
        lambda: evaluated(
            Forward(
                lambda model, x: checkpoint(
                    lambda y: model.norm(model.convolution(y)).relu(), x, use_reentrant=False
                )
            )
        ),
        2,
    ),
    "ReLU without gradient": (lambda: Forward(without_gradient), 0),
    "batch norm without gradient": (lambda: Forward(norm_without_gradient), 0),
    "convolution without gradient": (lambda: Forward(convolution_without_gradient), 0),
    "looked at without gradient": (lambda: Forward(looked_at_without_gradient), 0),
}  # fmt: skip


def made(build, *, classes=3, count=6, dtype=torch.float64):
    """A model with batch norms of both signs, images, and labels that it mostly gets right."""
    torch.manual_seed(0)
    model = build().to(dtype)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)) and module.affine:
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    images = torch.rand(count, 2, 6, 6, dtype=dtype)
    with torch.no_grad():
        labels = copy.deepcopy(model)(images).argmax(1)
    labels[0] = (labels[0] + 1) % classes
    return model, images, labels


def step(objective, model, images, labels, *, regularize, settled=False, call=None):
    """Terms and gradients; the model is left as it was."""
    model = copy.deepcopy(model)
    scalars = torch.tensor([0.0, 0.05, 0.4, 0.25, 0.75, 0.6, 0.9], dtype=images.dtype)
    anchors = (images + 0.03 * torch.sin(50 * images)).clamp(0, 1)
    call = objective if call is None else call
    terms = call(
        model, images, labels, anchors, scalars, regularize=regularize, settled=settled
    )  # fmt: skip
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(terms[0], parameters, allow_unused=True, materialize_grads=True)
    return [terms.detach(), *gradients]


def assert_same(build, monkeypatch, *, calls, method=None, regularize=True, settled=False, **more):
    """One by one and as one operator, which is called so many times."""
    seen = []

    def counted(*inputs, observe):
        # What the kernels ask for.
        assert all(part.is_contiguous() for part in inputs)
        seen.append(observe)
        return fused.relu_of_scaled(*inputs, observe=observe)

    monkeypatch.setattr(pending, "relu_of_scaled", counted)
    model, images, labels = made(build)
    options = {"method": method or FastIBP(), "precision": PRECISIONS["tf32"]} | more
    plain, found = (
        step(Objective(**options, fuse=fuse), model, images, labels,
             regularize=regularize, settled=settled)
        for fuse in (False, True)
    )  # fmt: skip
    assert max(gradient.abs().max() for gradient in plain[1:]) > 1e-3
    torch.testing.assert_close(found, plain, atol=1e-10, rtol=1e-8)
    assert len(seen) == calls
    return seen


@pytest.mark.parametrize("regularize", [True, False], ids=["regularised", "plain"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_the_same_bounds_and_gradients(name, regularize, monkeypatch):
    build, calls = NETWORKS[name]
    seen = assert_same(build, monkeypatch, calls=calls, regularize=regularize)
    assert all(observe == regularize for observe in seen)


# The bound passes of a step, and those of them that nobody observes: root finding's.
@pytest.mark.parametrize("regularize", [True, False], ids=["regularised", "plain"])
@pytest.mark.parametrize(
    ("method", "settled", "passes"),
    [
        ("acert", False, 4), ("fastibp", False, 1), ("acert-fast", False, 1), ("sabr", False, 1),
        ("crown-ibp", False, 0), ("crown-ibp", True, 1),
    ],
)  # fmt: skip
def test_methods_have_the_same_loss_and_gradients(method, settled, passes, regularize, monkeypatch):
    build, relus = NETWORKS["cnn7"]
    seen = assert_same(
        build, monkeypatch, calls=passes * relus, method=METHODS[method](),
        regularize=regularize, settled=settled,
    )  # fmt: skip
    assert sum(seen) == (min(passes, 1) * relus if regularize else 0)


@pytest.mark.parametrize("name", ["cnn7", "residual", "no ReLU"])
def test_plain_margins_are_the_same(name, monkeypatch):
    build, relus = NETWORKS[name]
    assert_same(build, monkeypatch, calls=4 * relus, method=Acert(), elide=False)


def test_folded_convolutions_are_left_to_folding(monkeypatch):
    build, _ = NETWORKS["cnn7"]
    only_linear = 1
    assert_same(build, monkeypatch, calls=only_linear, precision=PRECISIONS["float32"])


def test_nobody_computes_the_ball_in_front_of_a_relu(monkeypatch):
    def refused(_):
        raise AssertionError("the ball in front of a ReLU was computed")

    monkeypatch.setattr(pending.Scaled, "ball", refused)
    build, calls = NETWORKS["cnn7"]
    assert_same(build, monkeypatch, calls=calls)


def test_convolutions_of_few_numbers_are_matrix_products(monkeypatch):
    seen = []

    def product(input, weight, *words, **named):
        seen.append((weight[0].numel(), named["multiple"]))
        return convolution_by_matmul(input, weight, *words, **named)

    monkeypatch.setattr(affine, "convolution_by_matmul", product)
    build, calls = NETWORKS["cnn7"]
    assert_same(build, monkeypatch, calls=calls)
    # Center and radius of three of five; the others have 36.
    assert seen == [(18, 32)] * 6
    seen.clear()
    monkeypatch.setattr(affine, "_PIXELS", 1)  # patches of larger images would fill the memory
    assert_same(build, monkeypatch, calls=calls)
    assert seen == []


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # no tensors at all
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("frozen", ["convolution", "convolution.weight"])
def test_a_checkpoint_that_loses_gradients_is_refused(frozen, fuse):
    def reentrant(model, x):
        y = model.convolution(x)
        y = model.norm(y) if frozen == "convolution" else y
        return checkpoint(lambda y: y.relu(), y, use_reentrant=True)

    model = evaluated(Forward(reentrant))
    model.get_submodule("convolution").requires_grad_(frozen != "convolution")
    model.convolution.weight.requires_grad_(False)
    start = box(torch.rand(2, 2, 6, 6), torch.full((2,), 0.1), None)
    with pytest.raises(UnsupportedOperation, match="checkpoint"):
        propagate(model, start.within(BoundPass(fuse=fuse)))


def test_a_bias_of_another_shape_is_no_number_a_feature():
    weight, bias = torch.randn(4, 3), torch.randn(4, 1)
    images = torch.rand(4, 3)
    start = box(images, torch.zeros(4), None).within(BoundPass(fuse=True))
    with torch.no_grad():
        found = propagate(Apply(lambda x: F.linear(x, weight, bias)), start).center
    torch.testing.assert_close(found, F.linear(images, weight, bias))


def test_a_ball_that_overflowed_is_no_point():
    """In float16 at 65504; the margin would be minus infinity, and the sample certified."""
    channel = [torch.zeros(1), torch.ones(1), torch.ones(1), torch.zeros(1)]
    for center, radius in (
        (math.inf, 1.0),
        (-math.inf, 1.0),
        (1.0, math.inf),
        (math.nan, 1.0),
        (1.0, math.nan),
    ):
        ball = torch.tensor([[center]]), torch.tensor([[radius]])
        assert bool(fused.relu_of_scaled(*ball, *channel)[1].isnan())


def test_no_samples_have_no_sums():
    nothing, channel = torch.zeros(0, 3, requires_grad=True), [torch.ones(3) for _ in range(4)]
    center, radius, sums = fused.relu_of_scaled(nothing, nothing, *channel, observe=True)
    assert center.shape == radius.shape == (0, 3)
    assert sums.tolist() == [0.0] * 8
    sums.sum().backward()


@pytest.mark.parametrize("biased", [True, False])
def test_parameters_overwritten_later_are_taken_as_they_were(biased):
    weight, bias, channel = torch.randn(3, 2, 3, 3), torch.randn(3), torch.rand(4, 3) + 0.1

    def model(x):
        shift, (mean, variance, *factors) = bias.clone(), channel.clone()
        y = F.conv2d(x, weight, shift if biased else None)
        shift.mul_(-3)
        y = F.batch_norm(y, mean, variance, *factors)
        for part in (mean, variance, *factors):
            part.mul_(2)
        return y.relu() + y

    module = Forward(lambda _, x: model(x))
    module.last = nn.Identity()
    images, radius = torch.rand(4, 2, 6, 6), torch.full((4,), 0.1)
    with torch.no_grad():
        plain, found = (
            propagate(module, box(images, radius, None).within(BoundPass(fuse=fuse))).ends()
            for fuse in (False, True)
        )
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-5)


# -- half precision ---------------------------------------------------------------------


@pytest.mark.parametrize("form", ["float16", "bfloat16"])
@pytest.mark.parametrize("elide", [True, False])
def test_half_precision_gives_the_same_loss_to_its_rounding(form, elide):
    model, images, labels = made(
        lambda: ibp_init_(cnn7((2, 6, 6), 3, width=4)), count=16, dtype=torch.float32
    )
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    options = {"method": FastIBP(), "precision": PRECISIONS[form], "elide": elide}
    plain, found = (
        step(Objective(**options, fuse=fuse), model, images, labels, regularize=True)
        for fuse in (False, True)
    )
    slack = {"float16": 2e-3, "bfloat16": 2e-2}[form]
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0], plain[0], rtol=slack, atol=slack)
    assert all(gradient.isfinite().all() for gradient in found[1:])
    for one, other in zip(found[1:], plain[1:], strict=True):
        if other.ndim > 1:
            assert (one - other).norm() < 20 * slack * other.norm()


def test_half_precision_is_kept_between_products_and_nowhere_else():
    model, images, _ = made(NETWORKS["cnn7"][0], dtype=torch.float32)
    seen = []
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        _, statistics = clean_pass(model, images)
        bound_pass = BoundPass(statistics=statistics, fuse=True, observe=True)
        for layer in (model[2], model[4], model[-1]):  # a batch norm, a convolution, the last one
            layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        start = box(images, torch.full((len(images),), 0.01), (0.0, 1.0)).within(bound_pass)
        output = propagate(model, start)
    assert len(seen) == 3
    assert all(interval.dtype == torch.float32 for interval in seen)
    assert all(part.dtype == torch.float16 for interval in seen[1:] for part in interval.operands())
    stored = output.stored
    assert stored.center.dtype == torch.float16
    assert output.dtype == torch.float32
    ends = output.ends()
    assert [end.dtype for end in ends] == [torch.float32] * 2
    # The bias of the last layer is added to the wide numbers.
    assert torch.equal(output.center, stored.center.float() + model[-1].bias)
    assert all(seen.scaled.sums.dtype == torch.float32 for seen in bound_pass.relu_inputs)


def test_a_product_behind_a_product_gets_its_bias():
    model, images, labels = made(NETWORKS["products alone"][0], dtype=torch.float32)
    options = {"method": FastIBP(), "precision": PRECISIONS["float16"]}
    plain, found = (
        step(Objective(**options, fuse=fuse), model, images, labels, regularize=False)
        for fuse in (False, True)
    )
    torch.testing.assert_close(found, plain, rtol=1e-2, atol=2e-3)


def test_products_that_a_model_keeps_wide_are_wide():
    def compute(model, x):
        x = model.norm(model.convolution(x)).relu()
        with torch.autocast("cpu", enabled=False):
            return F.conv2d(x.float(), model.convolution.weight[:, :1].repeat(1, 3, 1, 1))

    model, images, _ = made(lambda: Forward(compute), dtype=torch.float32)
    model.last, products = nn.Identity(), []
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        _, statistics = clean_pass(model, images)
        for fuse in (False, True):
            bound_pass = BoundPass(statistics=statistics, fuse=fuse)
            start = box(images, torch.full((len(images),), 0.01), None).within(bound_pass)
            products.append(compute(model, start))
    plain, found = products
    assert found.stored.center.dtype == torch.float32
    torch.testing.assert_close(found.ends(), plain.ends(), rtol=2e-3, atol=1e-2)


# -- compiled ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "regularize"), [(FastIBP(), True), (Acert(), False)], ids=["fastibp", "acert"]
)
def test_a_compiled_step_is_the_eager_one(method, regularize):
    def build():
        return block(
            nn.Conv2d(2, 3, 3, stride=2), nn.BatchNorm2d(3), nn.ReLU(),
            nn.Flatten(), nn.Linear(12, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), features=5,
        )  # fmt: skip

    torch._dynamo.reset()
    model, images, labels = made(build)
    objective = Objective(method=method, precision=PRECISIONS["tf32"], fuse=True)
    compiled = torch.compile(objective.__call__, fullgraph=True, backend="aot_eager")
    found = step(objective, model, images, labels, regularize=regularize, call=compiled)
    expected = step(objective, model, images, labels, regularize=regularize)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)


# -- convolutions of few numbers --------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {}, {"stride": 2, "padding": 1}, {"stride": (1, 2), "padding": (0, 2)}, {"dilation": 2},
        {"padding": "same", "dilation": 2}, {"padding": "valid"},
        {"stride": 3, "padding": 2, "dilation": (2, 1)},
    ],
)  # fmt: skip
@pytest.mark.parametrize("channels", [1, 3, 8])
@pytest.mark.parametrize("multiple", [1, 32])
def test_a_convolution_is_one_product_whose_sums_are_a_multiple(options, channels, multiple):
    input, weight = torch.rand(2, channels, 9, 8).double(), torch.randn(5, channels, 2, 2).double()
    for bias in (None, torch.randn(5).double()):
        found = convolution_by_matmul(input, weight, bias, **options, multiple=multiple)
        torch.testing.assert_close(found, F.conv2d(input, weight, bias, **options))
    nothing = convolution_by_matmul(input[:0], weight, **options, multiple=multiple)
    assert nothing.shape == F.conv2d(input[:0], weight, **options).shape


def test_the_length_of_sums_is_a_multiple(monkeypatch):
    lengths = []
    product = torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda a, b: [lengths.append(b.shape[0]), product(a, b)][1]
    )
    for channels in (3, 8, 9):
        convolution_by_matmul(torch.rand(1, channels, 4, 4), torch.rand(2, channels, 2, 2),
                              multiple=32)  # fmt: skip
    assert lengths == [32, 32, 64]


# -- kernels ----------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_in_the_interpreter_do_what_pytorch_does():
    script = Path(__file__).with_name("interpreted_kernels.py")
    done = subprocess.run(
        [sys.executable, script], env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["16", "cases"]
