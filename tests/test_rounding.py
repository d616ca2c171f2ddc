"""Every rule's rounding-safe bounds hold: in exact arithmetic (balls) and for float32 networks."""

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from flint import arb
from tests import ball
from tests.rule_cases import Apply
from torch import nn

import acert
from acert.bounds import Interval, propagate
from acert.bounds.bound_pass import BoundPass
from acert.bounds.margin import box
from acert.bounds.rounding import FLOAT32, REAL
from acert.bounds.table import RULES


def gelu(x):
    return x * (-x / arb(2).sqrt()).erfc() / 2


def gelu_tanh(x):
    return x / 2 * (1 + ((2 / arb.pi()).sqrt() * (x + arb(0.044715) * x**3)).tanh())


def softplus(x):
    # PyTorch is the identity from its threshold on.
    return x if x > 20 else x.exp().log1p()


# name: the operation, and what it is in exact arithmetic
ELEMENTWISE = {
    "relu": (F.relu, lambda x: x.max(0)),
    "relu6": (F.relu6, lambda x: x.max(0).min(6)),
    "hardtanh": (lambda x: F.hardtanh(x, -0.1, 0.3), lambda x: x.max(arb(-0.1)).min(arb(0.3))),
    "clamp": (lambda x: torch.clamp(x, max=0.7), lambda x: x.min(arb(0.7))),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.01), lambda x: x if x > 0 else x * arb(0.01)),
    "prelu": (
        lambda x: torch.prelu(x, torch.tensor([-0.37])),
        lambda x: x if x > 0 else x * arb(torch.tensor(-0.37).item()),
    ),
    # From 89 on, float32's exponential is infinite.
    "exp": (lambda x: torch.exp(x * 0.5), lambda x: (x / 2).exp()),
    "power 2": (lambda x: x**2, lambda x: x * x),
    "power 3": (lambda x: x**3, lambda x: x**3),
    "power 7": (lambda x: x.pow(7), lambda x: x**7),
    "elu": (lambda x: F.elu(x, 1.7), lambda x: x if x > 0 else x.expm1() * arb(1.7)),
    "sigmoid": (torch.sigmoid, lambda x: 1 / (1 + (-x).exp())),
    "tanh": (torch.tanh, lambda x: x.tanh()),
    "softplus": (F.softplus, softplus),
    "gelu": (F.gelu, gelu),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), gelu_tanh),
    "silu": (F.silu, lambda x: x / (1 + (-x).exp())),
    "add": (lambda x: x + 0.1, lambda x: x + arb(0.1)),
    "subtract": (lambda x: 0.1 - x, lambda x: arb(0.1) - x),
    "alpha": (
        lambda x: torch.add(x, torch.tensor(0.37, dtype=torch.float32), alpha=0.618),
        lambda x: x + arb(torch.tensor(0.37).item()) * arb(0.618),
    ),
    "multiply": (lambda x: x * 0.1, lambda x: x * arb(0.1)),
    "divide": (lambda x: x / 0.3, lambda x: x / arb(0.3)),
    "square": (lambda x: x * x, lambda x: x * x),
    "negate": (lambda x: -x, lambda x: -x),
}


def spread_values(dtype):
    """Values of all sizes, and the places where activations cancel or switch."""
    sizes = torch.logspace(-12, 2, 200, dtype=torch.float64)
    near = torch.tensor([-5.8, -0.7517915, -1.2784645, 0.1, 0.3, 6.0, 20.0], dtype=torch.float64)
    near = (near.unsqueeze(1) + torch.linspace(-1e-3, 1e-3, 20, dtype=torch.float64)).flatten()
    return torch.cat((sizes, -sizes, near)).to(dtype).unsqueeze(1)


def safe_bounds(function, values, rounding):
    """Rounding-safe bounds of a function of one point."""
    exact = values.double()
    return function(Interval(exact, exact).within(BoundPass(rounding)))


def contains(bounds, values):
    return bool(((bounds.lower <= values.double()) & (values.double() <= bounds.upper)).all())


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_bounds_hold_the_exact_value(name):
    function, exactly = ELEMENTWISE[name]
    values = spread_values(torch.float64)
    bounds = safe_bounds(function, values, REAL)
    exact = [exactly(x) for x in ball.array(values).ravel()]
    for value, lower, upper in zip(exact, bounds.lower, bounds.upper, strict=True):
        assert arb(lower.item()) <= value <= arb(upper.item())


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_bounds_hold_what_float32_computes(name):
    function, _ = ELEMENTWISE[name]
    values = spread_values(torch.float32)
    bounds = safe_bounds(function, values, FLOAT32)
    assert contains(bounds, function(values))
    # One value at a time takes the scalar path of PyTorch's kernels.
    assert contains(bounds, torch.stack([function(value) for value in values]))


def test_a_padding_constant_is_rounded_by_a_float32_network():
    def function(x):
        return F.pad(x, (1, 0), value=0.1)

    values = spread_values(torch.float32)
    assert contains(safe_bounds(function, values, FLOAT32), function(values))


@pytest.mark.parametrize("rounding", [REAL, FLOAT32], ids=lambda rounding: rounding.name)
@pytest.mark.parametrize("threshold", [-5.0, -1000.0, 20.0])
def test_softplus_drops_where_its_threshold_is_passed(rounding, threshold):
    end = threshold + 2e-6
    lower, upper = torch.tensor([[threshold - 0.5]]).double(), torch.tensor([[end]]).double()
    bounds = F.softplus(Interval(lower, upper).within(BoundPass(rounding)), threshold=threshold)
    behind = torch.tensor([[threshold + 1e-6]]).double()
    assert contains(bounds, F.softplus(behind, threshold=threshold))


@pytest.mark.parametrize("number", [2**24 + 1, 0.1, 1e-42])
def test_a_constant_that_is_joined_is_rounded_by_the_network(number):
    """A whole number at once, and one of float64 where it is cast with the rest."""

    def function(x):
        column = torch.full((len(x), 1), number, dtype=None if number > 1 else torch.float64)
        return torch.cat([x, column], 1).float()

    values = spread_values(torch.float32)
    assert contains(safe_bounds(function, values, FLOAT32), function(values))


@pytest.mark.parametrize("rounding", [REAL, FLOAT32], ids=["real", "float32"])
@pytest.mark.parametrize("number", [1e39, torch.finfo(torch.float64).max, math.inf])
def test_a_constant_that_the_network_cannot_hold_is_large_or_infinite(number, rounding):
    """`torch.finfo(x.dtype).max` is float32's largest number in the network, float64's here."""
    column = torch.tensor([[number, -number]], dtype=torch.float64)
    bounds = safe_bounds(lambda x: torch.cat([x, column], 1).float(), torch.ones(1, 1), rounding)
    single = torch.finfo(torch.float32)
    assert bounds.lower[0, 1] < single.max
    assert bounds.upper[0, 2] > single.min
    assert (bounds.upper[0, 1], bounds.lower[0, 2]) == (math.inf, -math.inf)


@pytest.mark.parametrize("alpha", [1.0, 0.3, -5.0])
def test_elu_may_subtract_one_from_an_exponential(alpha):
    """As onnxruntime does in float32: off by half an ulp of 1, however small the result is."""
    values = -torch.logspace(-12, 1, 1000).reshape(-1, 1)
    computed = alpha * (values.exp() - 1)
    assert contains(safe_bounds(lambda x: F.elu(x, alpha), values, FLOAT32), computed)


# -- sums of products ---------------------------------------------------------------------


def batch_norm_net():
    """Batch norm whose mean and bias cancel, behind wide sums."""
    norm = nn.BatchNorm2d(4)
    with torch.no_grad():
        norm.running_mean.copy_(1e4 * torch.randn(4))
        norm.running_var.copy_(torch.rand(4) * 1e-3)
        norm.weight.copy_(torch.randn(4))
        norm.bias.copy_(norm.running_mean * norm.weight / (norm.running_var + norm.eps).sqrt())
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), norm, nn.Flatten(), nn.Linear(144, 5))


SUMS = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 5)),
    "wide linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 5000), nn.Linear(5000, 5)),
    "convolution": lambda: nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.Flatten()),
    "average": lambda: nn.Sequential(nn.AvgPool2d(3), nn.Flatten()),
    "mean": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "batch norm": batch_norm_net,
    "residual": lambda: acert.models.small_resnet((2, 6, 6), 5, width=4),
    "normalize": lambda: nn.Sequential(acert.models.Normalize([0.1, 0.7], 0.3), nn.Flatten()),
}


@pytest.mark.parametrize("name", SUMS)
def test_bounds_of_sums_hold_exactly_and_in_float32(name):
    model = SUMS[name]().eval()
    images = torch.rand(16, 2, 6, 6)
    zero = torch.zeros(16, dtype=torch.float64)
    with torch.no_grad():
        real = propagate(model, box(images.double(), zero, None, rounding=REAL))
        single = propagate(model, box(images.double(), zero, None, rounding=FLOAT32))
        computed = [model(images), *(model(image[None]) for image in images)]
    assert ball.inside(ball.outputs(model, images), real.lower, real.upper, 0 * real.upper)
    assert contains(single, computed[0])
    assert contains(single, torch.cat(computed[1:]))


def test_without_the_correction_sums_are_not_enclosed():
    # The test above bites: plain float64 bounds of a point are a point, and it is off.
    model = SUMS["batch norm"]().eval()
    images = torch.rand(4, 2, 6, 6).double()
    plain = acert.interval_bounds(model, images, images)
    assert not ball.inside(ball.outputs(model, images), plain.lower, plain.upper, 0 * plain.upper)


def any_scale():
    """A power of ten that is mostly moderate and sometimes anything float32 holds."""
    widest = [3, 3, 12, 38][torch.randint(4, ()).item()]
    return 10.0 ** (widest * (2 * torch.rand(()).item() - 1))


def random_network(inputs):
    """Up to four layers with parameters of any scale."""
    layers, size = [], inputs
    for _ in range(torch.randint(1, 5, ()).item()):
        kind = torch.randint(8, ()).item()
        if kind < 2:
            layer, size = nn.Linear(size, 6), 6
            layer.weight.mul_(any_scale())
            layer.bias.mul_(any_scale())
        elif kind < 4:
            layer = nn.BatchNorm1d(size, eps=[1e-5, 1e-12, 1e-30][torch.randint(3, ()).item()])
            layer.running_mean.normal_().mul_(any_scale())
            layer.running_var.uniform_().mul_(any_scale() * torch.randint(2, ()).item())
            layer.weight.normal_().mul_(any_scale())
            layer.bias.normal_().mul_(any_scale())
        else:
            layer = (nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.GELU())[kind - 4]
        layers.append(layer)
    return nn.Sequential(*layers).eval()


@torch.no_grad()
def test_networks_of_any_scale_are_enclosed():
    enclosed = {REAL: 0, FLOAT32: 0}
    radius = torch.tensor([0.0, 1e-6, 0.1], dtype=torch.float64)
    for _ in range(300):
        model, images = random_network(8), torch.rand(3, 8)
        exact, computed = ball.outputs(model, images), model(images)
        for rounding, count in enclosed.items():
            bounds = propagate(model, box(images.double(), radius, None, rounding=rounding))
            known = bounds.lower.isfinite() & bounds.upper.isfinite()
            enclosed[rounding] = count + known.sum().item()
            if rounding is FLOAT32:
                outside = (computed < bounds.lower) | ~(computed <= bounds.upper)
                assert not (outside & known).any(), model
                continue
            for value, lower, upper in zip(
                exact[known.numpy()], bounds.lower[known], bounds.upper[known], strict=True
            ):
                # Balls that overlap an end (0, behind a ReLU) are no contradiction.
                assert not value < arb(lower.item()), model
                assert not value > arb(upper.item()), model
    assert enclosed[REAL] > enclosed[FLOAT32] > 5_000


# -- the box ------------------------------------------------------------------------------


@pytest.mark.parametrize("radius", [1e-5, 2 / 255, 1e-17])
def test_the_box_holds_the_exact_one(radius):
    images = torch.rand(1, 500)
    exact = torch.tensor([radius], dtype=torch.float64)
    safe = box(images.double(), exact, None, rounding=REAL)
    for x, lower, upper in zip(images[0], safe.lower[0], safe.upper[0], strict=True):
        assert Fraction(lower.item()) <= Fraction(x.item()) - Fraction(radius)
        assert Fraction(upper.item()) >= Fraction(x.item()) + Fraction(radius)


def test_the_plain_box_does_not():
    images = torch.rand(1, 500)
    plain = box(images, torch.tensor([1e-5]), None)
    short = [
        Fraction(upper.item()) < Fraction(x.item()) + Fraction(1e-5)
        for x, upper in zip(images[0], plain.upper[0], strict=True)
    ]
    assert any(short)


def test_an_image_at_the_end_of_a_rounded_domain_stays_in_its_box():
    # 0.1 and 0.7 as float32 lie above and below what they are as float64.
    images = torch.tensor([[0.1], [0.7]])
    assert images[0].item() > 0.1
    assert images[1].item() < 0.7
    for image, domain in zip(images, [(0.0, 0.1), (0.7, 1.0)], strict=True):
        exact = image[None].double()
        safe = box(exact, torch.zeros(1, dtype=torch.float64), domain, rounding=REAL)
        assert safe.lower <= exact <= safe.upper
        assert safe.radius >= 0


# -- overflow and underflow ---------------------------------------------------------------


def linear(weight, bias=None):
    weight = torch.tensor(weight)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(torch.tensor(bias))
    return layer


def scaling_norm(*, weight, variance, mean=0.0):
    norm = nn.BatchNorm1d(1)
    with torch.no_grad():
        norm.weight.fill_(weight)
        norm.running_var.fill_(variance)
        norm.running_mean.fill_(mean)
    return norm


DRIFTING = 3.4028234e38 * (1 - 1e-4) / 10_000
HEAD = linear([[0.1], [0.0]], [2.0, 0.0])
OVERFLOWING = {
    "exp": nn.Sequential(linear([[100.0 / 64] * 64]), Apply(torch.exp), Apply(torch.sigmoid), HEAD),
    "power": nn.Sequential(
        linear([[1e13 / 64] * 64]), Apply(lambda x: x**3), Apply(torch.sigmoid), HEAD
    ),
    # infinity less infinity is NaN, which no clamp takes away
    "hardtanh": nn.Sequential(linear([[3e38, -3e38] * 32]), nn.Hardtanh(), HEAD),
    "relu6": nn.Sequential(linear([[3e38, -3e38] * 32]), nn.ReLU6(), HEAD),
    "sigmoid": nn.Sequential(linear([[3e38, -3e38] * 32]), nn.Sigmoid(), HEAD),
    "softplus": nn.Sequential(linear([[100.0 / 64] * 64]), nn.Softplus(threshold=200.0), HEAD),
    "batch norm": nn.Sequential(
        linear([[1e-20] * 64]), scaling_norm(weight=3e38, variance=0.0), linear([[1e-30], [0.0]])
    ),
    # the product with the weight first, as CUDA forms it, is 1e41
    "batch norm, other order": nn.Sequential(
        linear([[1e9] * 64]), scaling_norm(weight=1e31, variance=1e20), linear([[1e-30], [0.0]])
    ),
    # one after the other, 10,000 equal summands round up beyond the largest number
    "drift": nn.Sequential(linear([[DRIFTING] * 10_000]), linear([[1e-37], [0.0]])),
}  # fmt: skip


@pytest.mark.parametrize("name", OVERFLOWING)
def test_nothing_is_proven_where_a_float32_network_may_overflow(name):
    model = OVERFLOWING[name].eval()
    images = torch.ones(1, model[0].in_features)
    result = acert.certified_radius(
        model, images, torch.tensor([0]), max_radius=1e-3, arithmetic="float32"
    )
    assert result.value == 0
    assert result.status == acert.Status.UNCONVERGED
    # In exact arithmetic nothing overflows.
    assert acert.certified_radius(model, images, torch.tensor([0]), max_radius=1e-3).value > 0


def test_these_networks_do_overflow():
    for name in ("hardtanh", "softplus", "batch norm"):
        assert not OVERFLOWING[name].eval()(torch.ones(1, 64)).isfinite().all()
    total = torch.zeros(())
    for _ in range(10_000):
        total = total + torch.tensor(DRIFTING)
    assert total == math.inf


@pytest.mark.parametrize("scale", [1e-30, 1e-42, 1e30])
def test_extreme_weights_are_right_or_not_proven(scale):
    # Products of two such weights leave the range of float32 on one side or the other.
    model = nn.Sequential(
        linear([[scale, 0.0], [0.0, scale]]), nn.ReLU(), linear([[scale, 0.0], [0.0, scale]])
    )
    image = torch.tensor([[0.75, 0.25]])
    single = acert.certified_radius(
        model, image, torch.tensor([0]), max_radius=1.0, arithmetic="float32"
    )
    assert single.value == 0
    assert single.status == acert.Status.UNCONVERGED
    real = acert.certified_radius(model, image, torch.tensor([0]), max_radius=1.0)
    assert real.value == pytest.approx(0.25, rel=1e-4)


def test_flushed_subnormal_weights_are_paid_for():
    # 1e-40 counts as 0 where subnormal numbers are flushed; the bias then decides otherwise.
    model = nn.Sequential(linear([[1e-40, 0.0]]), linear([[0.0], [1e38]], [0.005, 0.0]))
    image = torch.tensor([[1.0, 0.0]])
    result = acert.certified_radius(
        model, image, torch.tensor([1]), max_radius=0.1, arithmetic="float32"
    )
    assert result.value == 0
    if torch.set_flush_denormal(True):
        try:
            assert model(image).argmax() == 0
        finally:
            torch.set_flush_denormal(False)


def test_the_error_of_underflow_is_not_lost_to_float32():
    assert REAL.underflow(3, 1.0, 1.0) > 0


# -- registered rules ---------------------------------------------------------------------


def test_a_registered_rule_may_be_off_by_its_ulps():
    def shifted(x):
        """The identity, ten ulps too high."""
        for _ in range(10):
            x = torch.nextafter(x, torch.full_like(x, math.inf))
        return x

    acert.register_rule(shifted, lambda x: x.map(lambda value: value), ulps=10)
    try:
        values = torch.rand(100, 1) + 1
        exact = Interval(values.double(), values.double()).within(BoundPass(FLOAT32))
        bounds = Interval.__torch_function__(shifted, (), (exact,))
        assert contains(bounds, shifted(values))
    finally:
        del RULES[shifted]


def test_a_registered_rule_meets_magnitudes_anywhere_in_the_sample():
    # A running sum rounds at its largest partial sum, not at the element it arrives at.
    def running(x):
        return x.cumsum(1)

    def rule(x):
        return Interval.ball(x.center.cumsum(1), x.radius.cumsum(1))

    acert.register_rule(running, rule, ulps=8)
    try:
        values = torch.tensor([[1.0, 1e8, -1e8, 0.0]])
        exact = Interval(values.double(), values.double()).within(BoundPass(FLOAT32))
        bounds = Interval.__torch_function__(running, (), (exact,))
        assert contains(bounds, torch.tensor([[1.0, 1e8, 0.0, 0.0]]))
    finally:
        del RULES[running]


# -- elision ------------------------------------------------------------------------------


class Overwriting(nn.Module):
    """Overwrites the input of its last layer once that has been read."""

    def __init__(self):
        super().__init__()
        self.first, self.last = linear([[1.0, 0.0], [0.0, 1.0]]), linear([[1.0, 0.0], [0.0, 1.0]])

    def forward(self, x):
        hidden = self.first(x)
        output = self.last(hidden)
        hidden *= 0.0
        return output


def test_elision_uses_the_input_that_the_last_layer_saw():
    image = torch.tensor([[0.5, 0.25]])
    value = acert.certified_radius(Overwriting(), image, max_radius=0.5).value
    assert value == pytest.approx(0.125, rel=1e-4)


def test_an_infinite_margin_leaves_the_differentiable_value_a_number():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double()
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(1e200)
    image = torch.rand(1, 2, dtype=torch.float64)
    result = acert.certified_radius(model, image, max_radius=0.1, differentiable=True)
    assert result.value == 0
