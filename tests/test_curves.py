"""Steps, curves, powers, mixtures and log-probabilities at the points that hurt."""

import math

import flint
import pytest
import torch
import torch.nn.functional as F
from flint import arb

import acert
from acert.bounds import Interval
from acert.bounds.bound_pass import BoundPass
from acert.bounds.rounding import FLOAT32, REAL

GENERATOR = torch.Generator().manual_seed(0)


def bounds_of(function, lower, upper=None, rounding=None):
    """Bounds of a function of one row of boxes, in float64."""
    upper = lower if upper is None else upper
    ends = (torch.as_tensor(end, dtype=torch.float64).reshape(1, -1) for end in (lower, upper))
    return function(Interval(*ends).within(BoundPass(rounding)))


def contains(bounds, values):
    values = values.double()
    return bool(((bounds.lower <= values) & (values <= bounds.upper)).all())


# -- by hand ------------------------------------------------------------------------------

BY_HAND = [
    (torch.sign, -0.5, 2.0, -1.0, 1.0),
    (torch.sign, 0.0, 2.0, 0.0, 1.0),
    (torch.floor, -0.5, 1.5, -1.0, 1.0),
    (torch.ceil, -0.5, 1.5, 0.0, 2.0),
    (torch.trunc, -1.5, 1.5, -1.0, 1.0),
    (torch.round, 0.5, 1.5, 0.0, 2.0),
    (torch.frac, 0.25, 0.75, 0.25, 0.75),
    (torch.frac, 0.75, 1.25, 0.0, 1.0),
    (torch.frac, -0.25, 1.25, -0.25, 1.0),
    (torch.frac, -1.25, 0.25, -1.0, 0.25),
    (lambda x: F.threshold(x, 1.0, -3.0), 0.0, 2.0, -3.0, 2.0),
    (lambda x: F.threshold(x, 1.0, 5.0), 0.0, 2.0, 1.0, 5.0),
    (lambda x: F.threshold(x, 1.0, 5.0), 1.5, 2.0, 1.5, 2.0),
    (lambda x: F.threshold(x, 1.0, 5.0), 0.5, 0.9, 5.0, 5.0),
    (F.hardshrink, -0.25, 2.0, 0.0, 2.0),
    (F.hardshrink, -2.0, 0.25, -2.0, 0.0),
    (F.softshrink, -1.0, 2.0, -0.5, 1.5),
    (torch.sin, 0.0, math.pi, 0.0, 1.0),
    (torch.sin, 4.0, 5.0, -1.0, math.sin(4.0)),
    (torch.cos, -0.5, 1.0, math.cos(1.0), 1.0),
    (torch.cos, 3.0, 10.0, -1.0, 1.0),
    (torch.cos, 0.5, 2.5, math.cos(2.5), math.cos(0.5)),
    (lambda x: x**1.5, 0.0, 4.0, 0.0, 8.0),
    (lambda x: x**-1.5, 0.25, 4.0, 0.125, 8.0),
    (lambda x: x**-2, -4.0, -2.0, 1 / 16, 1 / 4),
    (lambda x: x**-3, -4.0, -2.0, -1 / 8, -1 / 64),
    (lambda x: 2**x, -1.0, 3.0, 0.5, 8.0),
    (lambda x: 0.5**x, -1.0, 3.0, 0.125, 2.0),
    (lambda x: torch.lerp(x, torch.tensor(4.0), 0.25), 0.0, 4.0, 1.0, 4.0),
    (lambda x: torch.lerp(x, torch.tensor(4.0), 3.0), 0.0, 4.0, 4.0, 12.0),
    (lambda x: torch.logsumexp(x.expand(1, 2), 1), 0.0, 1.0, math.log(2), 1 + math.log(2)),
]


@pytest.mark.parametrize("rounding", [None, REAL, FLOAT32], ids=["plain", "real", "float32"])
def test_by_hand(rounding):
    for function, lower, upper, least, most in BY_HAND:
        found = bounds_of(function, lower, upper, rounding)
        assert found.lower.item() == pytest.approx(least, rel=1e-4, abs=1e-4)
        assert found.upper.item() == pytest.approx(most, rel=1e-4, abs=1e-4)


def test_glu_takes_each_half_by_itself():
    lower, upper = torch.tensor([-1.0, 2.0, -1.0, 0.0]), torch.tensor([3.0, 3.0, 1.0, 0.0])
    found = bounds_of(F.glu, lower, upper)
    high = torch.sigmoid(torch.tensor(1.0).double()).item()
    torch.testing.assert_close(found.lower[0].tolist(), [-high, 1.0])
    torch.testing.assert_close(found.upper[0].tolist(), [3 * high, 1.5])


def test_log_probabilities_are_reached_at_corners():
    lower, upper = torch.tensor([0.0, -1.0, 2.0]), torch.tensor([1.0, 3.0, 2.5])
    found = bounds_of(lambda x: x.log_softmax(1), lower, upper)
    for i in range(3):
        for end, own, rest in ((found.lower, lower, upper), (found.upper, upper, lower)):
            corner = rest.double().clone()
            corner[i] = own[i]
            torch.testing.assert_close(end[0, i], corner.log_softmax(0)[i])


def test_log_probabilities_do_not_underflow():
    found = bounds_of(lambda x: x.log_softmax(1), [0.0, -5000.0], [1.0, -4000.0], FLOAT32)
    assert found.lower[0, 1] == pytest.approx(-5001, abs=0.5)
    assert found.upper[0, 1] == pytest.approx(-4000, abs=0.5)
    assert -1e-3 < found.lower[0, 0] <= 0 <= found.upper[0, 0] < 1e-3


# -- exact arithmetic -----------------------------------------------------------------------

ANY = [10.0**e for e in (-320, -300, -100, -20, -9, -3, -1, 0, 1, 2)] + [0.0, 0.3, 0.7, 1.1, 2.9]
SIGNED = [*ANY, *(-x for x in ANY)]
POSITIVE = [x for x in ANY if x > 1e-300] + [
    1 + s * 2.0**-k for k in (2, 10, 30, 52) for s in (1, -1)
]
HUGE = [s * 10.0**e for e in (5, 8, 13, 16, 22, 100, 300) for s in (1, -1)]
TURNS = [
    value
    for k in (1, 2, 3, 4, 7, 1000, 10**6, 10**9, 10**12, 245850922)
    for middle in [k * math.pi / 2]
    for value in (middle, math.nextafter(middle, 0), math.nextafter(middle, math.inf), -middle)
]
NEAR_MINUS_ONE = [-1 + 2.0**-k for k in (1, 3, 10, 30, 52, 53)]
EXACT = {
    "sin": (torch.sin, lambda x: x.sin(), SIGNED + HUGE + TURNS),
    "cos": (torch.cos, lambda x: x.cos(), SIGNED + HUGE + TURNS),
    "atan": (torch.atan, lambda x: x.atan(), SIGNED + HUGE),
    "sinh": (torch.sinh, lambda x: x.sinh(), [*SIGNED, 600.0, -600.0]),
    "asinh": (torch.asinh, lambda x: x.asinh(), SIGNED + HUGE),
    "exp2": (torch.exp2, lambda x: arb(2) ** x, [*SIGNED, 1000.0, -1000.0, -1074.0, -5000.0]),
    "expm1": (torch.expm1, lambda x: x.expm1(), [*SIGNED, 700.0, -700.0]),
    "log2": (torch.log2, lambda x: x.log() / arb(2).log(), POSITIVE),
    "log10": (torch.log10, lambda x: x.log() / arb(10).log(), POSITIVE),
    "log1p": (torch.log1p, lambda x: x.log1p(), ANY + NEAR_MINUS_ONE),
    "logit": (torch.logit, lambda x: (x / (1 - x)).log(), [x for x in POSITIVE if x < 1]),
    "tanhshrink": (F.tanhshrink, lambda x: x - x.tanh(), SIGNED),
    "power 0.3": (lambda x: x**0.3, lambda x: x ** arb(0.3), [*POSITIVE, 1e-308, 5e-324]),
    "power 7.7": (lambda x: x**7.7, lambda x: x ** arb(7.7), POSITIVE),
    "power -0.7": (lambda x: x**-0.7, lambda x: x ** arb(-0.7), POSITIVE),
    "power -3": (lambda x: x**-3, lambda x: 1 / (x * x * x), [x for x in POSITIVE if x > 1e-90]),
    "1.7 **": (lambda x: 1.7**x, lambda x: arb(1.7) ** x, [*SIGNED, 500.0, -1000.0]),
    "0.2 **": (lambda x: 0.2**x, lambda x: arb(0.2) ** x, [*SIGNED, -300.0, 1000.0]),
    "near 1 **": (lambda x: (1 + 2.0**-40) ** x, lambda x: arb(1 + 2.0**-40) ** x, [*SIGNED, 1e5]),
}


@pytest.mark.parametrize("name", EXACT)
def test_real_bounds_hold_the_exact_value(name):
    function, exactly, points = EXACT[name]
    found = bounds_of(function, points, rounding=REAL)
    assert bool(found.lower.isfinite().all())
    assert bool(found.upper.isfinite().all())
    with flint.ctx.workprec(1500):  # to reduce 1e300 by turns
        for x, lower, upper in zip(points, found.lower[0], found.upper[0], strict=True):
            assert arb(lower.item()) <= exactly(arb(x)) <= arb(upper.item()), x


@pytest.mark.parametrize(("function", "exactly"), [EXACT["sin"][:2], EXACT["cos"][:2]])
def test_waves_hold_their_tops_wherever_an_end_lies(function, exactly):
    """Ends an ulp from where a wave turns, and boxes from less than an ulp to turns wide."""
    starts = torch.tensor(TURNS + HUGE, dtype=torch.float64)
    widths = torch.tensor([0.0, 1e-12, 1e-5, 0.3, 2.0, 4.0, 6.3, 100.0], dtype=torch.float64)
    for width in widths:
        found = bounds_of(function, starts, starts + width, REAL)
        with flint.ctx.workprec(1500):
            for i, start in enumerate((starts).tolist()):
                for share in (0.0, 0.25, 0.5, 1.0):
                    x = arb(start) + (arb((starts + width)[i].item()) - arb(start)) * arb(share)
                    low, high = (arb(end[0, i].item()) for end in found.ends())
                    assert low <= exactly(x) <= high
                    # The top or bottom next to it, if that lies in the box.
                    turn = (x / arb.pi()).floor()
                    for half in (0, 1, 2):
                        top = (turn + arb(half) / 2) * arb.pi()
                        if arb(start) < top < arb((starts + width)[i].item()):
                            assert low <= exactly(top) <= high


# -- float32 --------------------------------------------------------------------------------


def of_any_size(count, smallest, largest, *, signed):
    sizes = torch.empty(count).uniform_(math.log(smallest), math.log(largest), generator=GENERATOR)
    signs = torch.randint(2, (count,), generator=GENERATOR) * 2 - 1
    return sizes.exp() * (signs if signed else 1)


COUNT = 100_000
WIDE, SIZES = (
    of_any_size(COUNT, 1e-45, 80, signed=True),
    of_any_size(COUNT, 1.2e-38, 1e38, signed=False),
)
ARGUMENTS = of_any_size(COUNT, 1e-30, 1e30, signed=True)
NEAR_ONE = 1 + of_any_size(COUNT, 1e-7, 0.4, signed=True)
BELOW_ONE = torch.rand(COUNT, generator=GENERATOR).clamp(1e-7, 1 - 1e-7)
# name: the function, other ways to compute it, and where
SINGLE = {
    "sin": (torch.sin, [], [WIDE, ARGUMENTS]),
    "cos": (torch.cos, [], [WIDE, ARGUMENTS]),
    "atan": (torch.atan, [], [WIDE, ARGUMENTS]),
    "sinh": (torch.sinh, [lambda x: (x.exp() - (-x).exp()) / 2], [WIDE]),
    "asinh": (
        torch.asinh,
        [lambda x: x.sign() * (x.abs() + (x * x + 1).sqrt()).log()], [WIDE],
    ),
    "exp2": (torch.exp2, [lambda x: (x * math.log(2)).exp()], [WIDE]),
    "expm1": (torch.expm1, [lambda x: x.exp() - 1], [WIDE]),
    "log2": (torch.log2, [lambda x: x.log() / math.log(2)], [SIZES, NEAR_ONE]),
    "log10": (torch.log10, [lambda x: x.log() / math.log(10)], [SIZES, NEAR_ONE]),
    "log1p": (torch.log1p, [lambda x: (1 + x).log()], [SIZES, NEAR_ONE - 1, BELOW_ONE - 1]),
    "logit": (torch.logit, [lambda x: x.log() - (-x).log1p()], [BELOW_ONE, NEAR_ONE * 0.7]),
    "tanhshrink": (F.tanhshrink, [], [WIDE, ARGUMENTS]),
    "softshrink": (lambda x: F.softshrink(x, 0.3), [], [WIDE]),
    "rrelu": (F.rrelu, [], [WIDE]),
    "power 0.3": (lambda x: x**0.3, [lambda x: (0.3 * x.log()).exp()], [SIZES, NEAR_ONE]),
    "power -1.1": (
        lambda x: x**-1.1, [lambda x: (-1.1 * x.log()).exp()],
        [SIZES.clamp(1e-30, 1e30), NEAR_ONE],
    ),
    "power -3": (
        lambda x: x**-3, [lambda x: (1 / x) ** 3, lambda x: torch.pow(x, torch.tensor(-3.0))],
        [SIZES.clamp(1e-12, 1e12), -NEAR_ONE],
    ),
    "1.7 **": (lambda x: 1.7**x, [lambda x: (x * math.log(1.7)).exp()], [WIDE]),
    "0.3 **": (lambda x: 0.3**x, [lambda x: (x * math.log(0.3)).exp()], [WIDE.clamp(min=-70)]),
    "near 1 **": (lambda x: 1.0000002**x, [], [WIDE, 1e4 * NEAR_ONE]),
    "lerp": (
        lambda x: torch.lerp(x, torch.tensor(0.7, dtype=x.dtype), 0.3),
        [lambda x: x + 0.3 * (0.7 - x), lambda x: (1 - 0.3) * x + 0.3 * 0.7], [WIDE, ARGUMENTS],
    ),
    "lerp beyond": (
        lambda x: torch.lerp(torch.tensor(1e3, dtype=x.dtype), x, -2.7),
        [lambda x: 1e3 - 2.7 * (x - 1e3)], [WIDE, ARGUMENTS],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SINGLE)
def test_float32_bounds_hold_what_kernels_compute(name):
    function, others, inputs = SINGLE[name]
    for values in inputs:
        found = bounds_of(function, values, rounding=FLOAT32)
        for kernel in (function, *others):
            assert contains(found, kernel(values))
        assert contains(found, function(values.double()))
        assert float(found.radius.isfinite().double().mean()) == 1


GROUPS = {
    "logsumexp": (lambda x: torch.logsumexp(x, 1), []),
    "log_softmax": (
        lambda x: x.log_softmax(1),
        [
            lambda x: x - x.logsumexp(1, keepdim=True),
            lambda x: (x - x.amax(1, True)) - (x - x.amax(1, True)).exp().sum(1, True).log(),
        ],
    ),
    "softmin": (lambda x: F.softmin(x, 1), []),
    "glu": (lambda x: F.glu(x, 1), [lambda x: x[:, :4] / (1 + (-x[:, 4:]).exp())]),
    "local response": (
        lambda x: F.local_response_norm(x[:, :, None], 3, 0.3, 0.6, 1.5),
        [lambda x: x[:, :, None] * (1.5 + 0.1 * _squares(x)[:, :, None]) ** -0.6],
    ),
}


def _squares(x):
    """Sums of three neighbours' squares."""
    return F.pad(x * x, (1, 1)).unfold(1, 3, 1).sum(2)


@pytest.mark.parametrize("name", GROUPS)
def test_float32_bounds_of_groups_hold_what_kernels_compute(name):
    function, others = GROUPS[name]
    for size in (1e-3, 1.0, 30.0, 3000.0):
        values = size * torch.randn(5000, 8, generator=GENERATOR)
        exact = values.double()
        found = function(Interval(exact, exact).within(BoundPass(FLOAT32)))
        assert bool(found.radius.isfinite().all())
        for kernel in (function, *others):
            assert contains(found, kernel(values))
        real = function(Interval(exact, exact).within(BoundPass(REAL)))
        assert bool(((real.lower >= found.lower) & (real.upper <= found.upper)).all())
        assert contains(real, function(exact))


@pytest.mark.parametrize("number", [0.1, -0.1, 0.7, 1 / 3, 0.0, 1e-40, -1e-40])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, number: F.threshold(x, number, -2.0),
        lambda x, number: F.threshold(x, number, 1.1),
        lambda x, number: F.hardshrink(x, abs(number)),
        lambda x, number: F.hardshrink(x, number),
    ],
    ids=["threshold below", "threshold above", "hardshrink", "hardshrink by any"],
)
def test_a_threshold_is_where_float32_has_it(function, number):
    """A point next to it is on either side, in float64 on the other one than in float32."""
    rounded = torch.tensor(number, dtype=torch.float32)
    ulp = torch.nextafter(rounded, torch.tensor(math.inf)) - rounded
    values = torch.cat([s * (rounded + ulp * torch.arange(-2, 3)) for s in (1, -1)])
    found = bounds_of(lambda x: function(x, number), values, rounding=FLOAT32)
    assert contains(found, function(values, number))
    assert contains(found, function(values.double(), number))
    if torch.set_flush_denormal(True):
        try:
            flushed = function(values, number)
        finally:
            torch.set_flush_denormal(False)
        # What is handed on may be flushed by whoever takes it.
        tiny = FLOAT32.tiny * (flushed.abs() < FLOAT32.tiny)
        assert bool(((found.lower - tiny <= flushed) & (flushed <= found.upper + tiny)).all())


@pytest.mark.parametrize("function", [torch.sign, torch.floor, torch.ceil])
def test_a_subnormal_number_may_count_as_0(function):
    values = torch.tensor([1e-40, -1e-40])
    found = bounds_of(function, values, rounding=FLOAT32)
    assert contains(found, function(values))
    assert contains(found, torch.zeros(2))
    # Its root is far from 0.
    power = bounds_of(lambda x: x**0.3, 1e-40, rounding=FLOAT32)
    assert power.lower <= 0 < 1e-12 < power.upper


# -- what is unknown ------------------------------------------------------------------------


def power_of_two(x):
    return 2**x


EXPONENTIALS = [torch.sinh, torch.exp2, torch.expm1, power_of_two]
EVERY = [
    torch.sign, torch.floor, torch.ceil, torch.trunc, torch.round, torch.frac,
    lambda x: F.threshold(x, 0.1, 0.0), lambda x: F.threshold(x, 0.1, 3.0), F.hardshrink,
    F.softshrink, F.tanhshrink, F.rrelu, torch.sin, torch.cos, torch.atan, torch.sinh,
    torch.asinh, torch.exp2, torch.expm1, torch.log2, torch.log10, torch.log1p, torch.logit,
    lambda x: torch.logit(x, 0.1), lambda x: x**0.3, lambda x: x**-1.3, lambda x: x**-2,
    power_of_two, lambda x: 1.0**x, F.glu, lambda x: torch.lerp(x, torch.tensor(1.0), 0.0),
    torch.nan_to_num, lambda x: torch.nan_to_num(x, 0.0, 1.0, -1.0),
    lambda x: torch.logsumexp(x, 1), lambda x: x.log_softmax(1), lambda x: F.softmin(x, 1),
    lambda x: F.local_response_norm(x[:, :, None], 2),
]  # fmt: skip


@pytest.mark.parametrize("rounding", [None, REAL, FLOAT32], ids=["plain", "real", "float32"])
def test_what_is_unknown_stays_so(rounding):
    for number, function in enumerate(EVERY):
        found = bounds_of(function, [math.nan, math.nan], rounding=rounding)
        assert not found.lower.isfinite().any(), number
        assert not found.upper.isfinite().any(), number
        assert rounding is None or found.radius.isnan().all(), number
        # Of an end alone, too.
        for ends in ((0.4, math.nan), (math.nan, 0.6)):
            found = bounds_of(function, *([end] * 2 for end in ends), rounding=rounding)
            assert not found.radius.isfinite().any(), number


@pytest.mark.parametrize("rounding", [REAL, FLOAT32], ids=["real", "float32"])
def test_what_may_overflow_stays_unknown(rounding):
    """Infinite ends are none of a network's numbers: `nan_to_num` makes no number of them."""
    beyond = 3 * rounding.largest if rounding is FLOAT32 else math.inf
    for function in (torch.sin, torch.cos, lambda x: x**0.3 * 1e30, torch.sinh, torch.expm1,
                     torch.exp2, lambda x: torch.lerp(x, torch.tensor(1.0), 0.5), F.glu,
                     lambda x: x.log_softmax(1), lambda x: F.softmin(x, 1)):  # fmt: skip
        found = bounds_of(function, [0.5, 0.5], [beyond, beyond], rounding)
        assert bool(found.radius.isnan().all())
    found = bounds_of(torch.nan_to_num, [0.0, -math.inf], [math.inf, 0.0], rounding)
    assert bool(found.lower.isnan().all() & found.upper.isnan().all())


@pytest.mark.parametrize(
    ("function", "reach"),
    [
        (torch.sinh, 88.9), (torch.expm1, 88.9), (torch.exp2, 127.9), (lambda x: 10.0**x, 38.5),
        (lambda x: x**5.5, 1.1e7), (lambda x: x**-5.5, 0.9e-7), (lambda x: 0.1**x, -38.5),
    ],
)  # fmt: skip
def test_near_overflow_nothing_is_proven_for_float32(function, reach):
    assert bool(bounds_of(function, reach, rounding=FLOAT32).radius.isnan().all())
    assert bool(bounds_of(function, reach, rounding=REAL).radius.isfinite().all())


@pytest.mark.parametrize("rounding", [None, REAL, FLOAT32], ids=["plain", "real", "float32"])
@pytest.mark.parametrize(
    ("function", "lower", "upper"),
    [
        (torch.log1p, -1.0, 1.0), (torch.log1p, -2.0, -1.5), (torch.log2, 0.0, 1.0),
        (torch.log10, -1.0, 1.0), (torch.logit, 0.0, 0.5), (torch.logit, 0.5, 1.0),
        (lambda x: torch.logit(x, 0.0), -1.0, 0.5), (lambda x: x**0.3, -0.1, 1.0),
        (lambda x: x**-0.3, 0.0, 1.0), (lambda x: x**1.5, -2.0, -1.0),
        (lambda x: torch.tensor(-2.0) ** x, 0.0, 1.0), (lambda x: torch.tensor(0.0) ** x, 0.5, 1.0),
    ],
)  # fmt: skip
def test_outside_of_its_domain_nothing_is_known(function, lower, upper, rounding):
    found = bounds_of(function, lower, upper, rounding)
    assert bool(found.lower.isnan().all() & found.upper.isnan().all())


def test_a_power_of_a_base_that_float32_rounds_is_unknown_where_that_matters():
    """1 + 1e-9 is 1 in float32, and its power to 1e9 is e."""
    found = bounds_of(lambda x: (1 + 1e-9) ** x, [1.0, 1e9], rounding=FLOAT32)
    assert found.radius.isnan().tolist() == [[False, True]]


def test_a_network_cannot_hold_a_replacement_beyond_its_numbers():
    def function(x):
        return F.threshold(x, 0.5, 1e39)

    assert bounds_of(function, [0.0, 0.7], rounding=FLOAT32).radius.isnan().tolist() == [
        [True, False]
    ]


@pytest.mark.parametrize("rounding", [None, REAL, FLOAT32], ids=["plain", "real", "float32"])
def test_gradients_are_finite_where_bounds_are(rounding):
    """Other elements, where nothing is known, leave them alone."""
    lower = torch.tensor([[0.0, -3.0, 0.2, 1e-30, -0.1, -1e25, 0.5, 0.1]]).double()
    upper = torch.tensor([[0.0, 3.0, 0.7, 2e-30, 0.9, 1e25, 0.5, 700.0]]).double()
    for number, function in enumerate(EVERY):
        if rounding is None and function in EXPONENTIALS:  # which are infinite beyond float64
            continue
        ends = lower.clone().requires_grad_(), upper.clone().requires_grad_()
        found = function(Interval(*ends).within(BoundPass(rounding)))
        total = sum(torch.where(end.isfinite(), end, 0.0).sum() for end in found.ends())
        if total.requires_grad:
            for gradient in torch.autograd.grad(total, ends, allow_unused=True):
                assert gradient is None or bool(gradient.isfinite().all()), number


def test_certificates_hold_behind_them():
    """A network of all of it has a radius that no point inside it breaks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.GLU(), torch.nn.Tanhshrink(), torch.nn.Linear(4, 4),
        torch.nn.Hardshrink(0.05), torch.nn.Linear(4, 3), torch.nn.LogSoftmax(1),
    )  # fmt: skip
    image = torch.rand(3, 4)
    for arithmetic in ("real", "float32"):
        found = acert.certified_radius(
            model, image, max_radius=0.5, arithmetic=arithmetic, elide=False
        )
        assert bool((found.value > 0).all())
        points = image + (2 * torch.rand(500, 3, 4) - 1) * found.value.reshape(3, 1).float() * 0.999
        predicted = model(points.flatten(0, 1)).argmax(1).reshape(500, 3)
        assert bool((predicted == model(image).argmax(1)).all())
