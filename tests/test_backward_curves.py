"""Lines around curves: they hold in balls of 128 bits, and are about as near as lines can be."""

import flint
import pytest
import torch
import torch.nn.functional as F
from flint import arb
from tests.test_backward import Spy, boxes
from torch import nn

import acert
from acert.attack import attack_radius
from acert.bounds import Interval
from acert.bounds.backward import BACKWARD, curves
from acert.bounds.bound_pass import BoundPass
from acert.bounds.crown import crown_differences
from acert.bounds.linear_bound import Step
from acert.bounds.rounding import FLOAT32, REAL
from acert.bounds.table import RULES

flint.ctx.prec = 128


def steep(slope):
    return lambda x: x if x >= 0 else slope * x


def elu(scale, alpha, length):
    return lambda x: scale * (x if x >= 0 else alpha * ((x / length).exp() - 1))


def softplus(beta, threshold=None):
    """At the threshold PyTorch goes over to the identity."""
    return lambda x: (
        x if threshold is not None and x * beta > threshold else (1 + (x * beta).exp()).log() / beta
    )


def hardsigmoid(x):
    return arb(0) if x <= -3 else arb(1) if x >= 3 else (x + 3) / 6


SELU = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
ROOT = arb(2).sqrt()
GELU_TANH = (2 / arb.pi()).sqrt()
# The function, its other arguments, and the function of a ball.
CURVES = {
    "gelu": (F.gelu, (), lambda x: x / 2 * (1 + (x / ROOT).erf())),
    "gelu tanh": (
        lambda x, *_: F.gelu(x, approximate="tanh"),
        (),
        lambda x: x / 2 * (1 + (GELU_TANH * (x + arb("0.044715") * x**3)).tanh()),
    ),
    "silu": (F.silu, (), lambda x: x / (1 + (-x).exp())),
    "mish": (F.mish, (), lambda x: x * (1 + x.exp()).log().tanh()),
    "softplus": (F.softplus, (), softplus(1)),
    "softplus 3": (F.softplus, (3.0,), softplus(3)),
    "softplus, early": (F.softplus, (2.0, 0.5), softplus(2, 0.5)),
    "softplus, negative": (F.softplus, (1.0, -0.5), softplus(1, -0.5)),
    "logsigmoid": (F.logsigmoid, (), lambda x: -(1 + (-x).exp()).log()),
    "softsign": (F.softsign, (), lambda x: x / (1 + abs(x))),
    "erf": (torch.erf, (), lambda x: x.erf()),
    "square": (torch.square, (), lambda x: x * x),
    "elu": (F.elu, (), elu(1, 1, 1)),
    "elu 0.3": (F.elu, (0.3,), elu(1, arb(0.3), 1)),
    "elu 2": (F.elu, (2.0,), elu(1, 2, 1)),
    "elu -0.5": (F.elu, (-0.5,), elu(1, arb(-0.5), 1)),
    "celu 0.5": (F.celu, (0.5,), elu(1, arb(0.5), arb(0.5))),
    "selu": (F.selu, (), elu(arb(SELU[0]), arb(SELU[1]), 1)),
    "prelu": (torch.prelu, (torch.tensor([0.25]),), steep(0.25)),
    "prelu -2": (torch.prelu, (torch.tensor([-2.0]),), steep(-2)),
    "prelu -0.3": (torch.prelu, (torch.tensor([-0.3]),), steep(float(torch.tensor(-0.3)))),
    "prelu 3": (torch.prelu, (torch.tensor([3.0]),), steep(3)),
    "abs": (torch.abs, (), abs),
    "hardsigmoid": (F.hardsigmoid, (), hardsigmoid),
    "hardswish": (F.hardswish, (), lambda x: x * hardsigmoid(x)),
}
# Of an exponential only boxes that it does not leave float64 on.
SCALES = [1e-9, 1e-3, 1.0, 30.0]
CASES = [(name, scale) for name in CURVES for scale in SCALES] + [
    ("exp", s) for s in (*SCALES[:3], 8.0)
]
CURVES["exp"] = (torch.exp, (), lambda x: x.exp())


def walked(name, step, box):
    """The walk back through the function, as a pass calls it."""
    function, arguments, _ = CURVES[name]
    if name == "gelu tanh":
        return BACKWARD[RULES[F.gelu].rule](step, box, approximate="tanh")
    return BACKWARD[RULES[function].rule](step, box, *arguments)


def lines(name, lower, upper, sign, rounding):
    """Slopes and offsets of the lines above sign * f."""
    spy = Spy(rounding)
    step = Step(spy, None, torch.full((len(lower), 1, 1), float(sign), dtype=torch.float64))
    walked(name, step, Interval(lower, upper))
    return spy.slope.flatten(), spy.offset


def values(name, x):
    function, arguments, _ = CURVES[name]
    if function is F.softplus and len(arguments) < 2:  # its threshold is in float32's digits
        return (
            torch.logaddexp(x * (arguments or (1.0,))[0], torch.zeros(())) / (arguments or [1])[0]
        )
    return function(x, *(a.double() if isinstance(a, torch.Tensor) else a for a in arguments))


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_lines_hold_in_balls(name, scale):
    """At both ends, at kinks, and where float64 sees the smallest gap, and beside that point."""
    lower, upper = (end * scale for end in boxes(60))
    shares = torch.linspace(0, 1, 401, dtype=torch.float64)
    x = (lower + shares * (upper - lower)).clamp(lower, upper)
    known = torch.tensor([-3.0, 0.0, 3.0]).double().expand(len(x), 3).clamp(lower, upper)
    y = values(name, x)
    exact = CURVES[name][2]
    for sign in (1, -1):
        slopes, offsets = lines(name, lower, upper, sign, REAL)
        offset = torch.tensor([float(number) for number in offsets]).double().unsqueeze(1)
        worst = (slopes.unsqueeze(1) * x + offset - sign * y).argmin(1, keepdim=True)
        beside = x.gather(
            1, torch.cat([(worst - 1).clamp(0), worst, (worst + 1).clamp(max=400)], 1)
        )
        between = torch.cat(
            [beside[:, :2].mean(1, keepdim=True), beside[:, 1:].mean(1, keepdim=True)], 1
        )
        points = torch.cat([lower, upper, known, beside, between.clamp(lower, upper)], 1)
        for row, slope, number in zip(points.tolist(), slopes.tolist(), offsets, strict=True):
            shift = arb(number.numerator) / number.denominator
            for point in map(arb, row):
                assert arb(slope) * point + shift >= sign * exact(point), (float(point.mid()), row)


@pytest.mark.parametrize("name", CURVES)
def test_lines_are_nearly_the_lowest(name):
    """No line that holds is lower in the middle of the box by more than a tenth of its height."""
    generator = torch.Generator().manual_seed(3)
    lower = torch.randn(100, 1, generator=generator).double() * 2
    upper = lower + 3 * torch.rand(100, 1, generator=generator).double() + 0.1
    middle = (lower + upper) / 2
    x = lower + torch.linspace(0, 1, 401).double() * (upper - lower)
    y, rise = values(name, x), values(name, x).amax(1) - values(name, x).amin(1)
    candidates = torch.linspace(-4, 4, 801).double()
    if name == "exp":
        candidates = candidates * 12
    for sign in (1, -1):
        slopes, offsets = lines(name, lower, upper, sign, None)
        offset = torch.tensor([float(number) for number in offsets]).double()
        found = slopes * middle.squeeze(1) + offset
        lifts = torch.stack([(sign * y - slope * x).amax(1) for slope in candidates], 1)
        best = (candidates * middle + lifts).amin(1)
        jump = 1.0 if ", " in name else 0.0  # where PyTorch's own threshold makes a step
        assert (found <= best + 0.15 * rise + 0.02 + jump).all()


@pytest.mark.parametrize("name", CURVES)
def test_slopes_and_bends_are_those_of_the_function(name, monkeypatch):
    met = []
    monkeypatch.setattr(curves, "_followed", lambda step, input, curve: met.append(curve))
    x = torch.linspace(-12, 12, 60_001, dtype=torch.float64)
    walked(name, None, Interval(x.unsqueeze(1), x.unsqueeze(1)))
    (curve,) = met
    h = 1e-4
    away = torch.stack([(x - kink).abs() > 2 * h for kink in (0.0, -3.0, 3.0)]).all(0)
    slope = (curve.function(x + h) - curve.function(x - h)) / (2 * h)
    size = 1 + curve.function(x).abs()
    assert ((slope - curve.slope(x)).abs() <= 1e-5 * size)[away].all()
    bend = (curve.slope(x + h) - curve.slope(x - h)).abs() / (2 * h)
    allowed = curve.bend(x - h, x + h) * torch.ones_like(x)
    assert (bend <= allowed + 1e-7 * size)[away].all()
    # Of a wider part it holds for every point between.
    wide = curve.bend(x[:-400], x[400:]) * torch.ones_like(x[400:])
    assert (bend[200:-200] <= wide + 1e-7 * size[200:-200])[away[200:-200]].all()


@pytest.mark.parametrize(
    "layer", [nn.GELU(), nn.SiLU(), nn.Mish(), nn.ELU(), nn.SELU(), nn.Softplus(), nn.PReLU(8),
              nn.Hardswish(), nn.Softsign(), nn.LogSigmoid()], ids=str,
)  # fmt: skip
def test_networks_get_radii_that_no_attack_gets_into(layer):
    """Larger ones than by intervals; and a float32 network is not outside its bounds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 8), layer, nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight.mul_(8)
    images = torch.rand(12, 6)
    radii = {
        bounds: acert.certified_radius(
            model, images, max_radius=0.5, bounds=bounds, arithmetic="float32"
        ).value
        for bounds in ("ibp", "crown")
    }
    assert (radii["crown"] >= radii["ibp"]).all()
    assert radii["crown"].mean() > 1.1 * radii["ibp"].mean()
    labels = model(images).argmax(1)
    found = attack_radius(model, images, labels, max_radius=0.5, certified=radii["crown"])
    assert (found.radius >= radii["crown"]).all()


@pytest.mark.parametrize("name", ["gelu", "elu 2", "prelu -0.3", "exp", "hardswish", "logsigmoid"])
def test_float32_networks_are_enclosed(name):
    """Of single points, so that nothing but the network's own rounding is between."""
    function, arguments, _ = CURVES[name]
    points = torch.randn(400, 5) * 3
    box = Interval(points.double(), points.double())
    for rounding, wanted in ((FLOAT32, True), (REAL, False)):
        output = function(box.within(BoundPass(rounding, record=True)), *arguments)
        logits = function(points, *arguments).double()
        held = [
            bool(
                (logits - logits[:, [label]]
                 <= crown_differences(output, torch.full((400,), label))).all()
            )
            for label in range(5)
        ]  # fmt: skip
        assert all(held) == wanted
