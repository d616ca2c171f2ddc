"""Backward rules: every case of the catalogue is bounded or refused, and every line holds."""

import copy
import re
from fractions import Fraction

import flint
import pytest
import torch
import torch.nn.functional as F
from flint import arb
from tests import rule_cases
from torch import nn

import acert
from acert.bounds import BatchStatistics, Interval, propagate
from acert.bounds.backward import BACKWARD
from acert.bounds.crown import crown_differences
from acert.bounds.interval import BoundPass
from acert.bounds.linear_bound import LinearBound, Step
from acert.bounds.rounding import FLOAT32, REAL
from acert.bounds.table import RULES

flint.ctx.prec = 128
LABELS = torch.tensor([0, 1, 2, 0])


class WithHead(nn.Module):
    """A classifier of three classes around the model of a case."""

    def __init__(self, model, shape):
        super().__init__()
        self.model = model
        count = model(torch.zeros(4, *shape)).numel() // 4
        self.head = nn.Linear(count, 3).requires_grad_(False)

    def forward(self, x):
        x = self.model(x)
        return self.head(x.reshape(len(x), -1).to(self.head.weight.dtype))


def crown(model, subject, rounding=None, *, dtype=torch.float64, parameters=torch.float64):
    """CROWN's bounds of a subject's boxes."""
    statistics = subject.statistics and tuple(
        BatchStatistics(*(value.to(dtype) for value in pair)) for pair in subject.statistics
    )
    box = Interval(subject.lower.to(dtype), subject.upper.to(dtype))
    bound_pass = BoundPass(rounding, statistics, record=True)
    return crown_differences(
        propagate(copy.deepcopy(model).to(parameters), box.within(bound_pass)), LABELS
    )


# What has bounds but no way back; the rest of the catalogue must have one.
REFUSED = re.compile(
    r"LeakyReLU\((2\.5|-0)|x \* x|clamp\(.*c\b|x\[:, :?[01]\] \* x|x\[:, [01]\]\.mul|"
    r"mul\(x\[:, [01]\].*, x|"
    r"x\[:, torch\.tensor\(\[True|Avg.*(ceil_mode|count_include_pad)|"
    r"AdaptiveAvgPool\dd\([^1]|adaptive_avg|"
    r"(Layer|Group|Instance)Norm|(layer|group|instance)_norm|[Ss]oftmax|scaled_dot|Attending|einsum|"
    r"pow|x \*\* |\bmm\(|bmm\(|addmm|"
    r"torch\.matmul\([cf]|other=x|c @ x|\bc\.matmul\(x|matmul\(x, [de]|x @ d|"
    r"matmul\(-?x\[|x\[.* @ |\]\.matmul|"
    r"RMSNorm|rms_norm|normalize|(torch|x)\.norm|linalg|"
    r"sqrt|\*\* 0\.5|\blog_?\(|reciprocal|[12c] / \(?x|x\[:, 0\] / |div\(x\[|addcmul|"
    r"adaptive_max|AdaptiveMax|\b[xc]\.(max|min)|torch\.(max|min)(imum)?\(|amax|amin|where|masked_fill|"
    r"Recurring|Unrolled|rnn_|repeat|tile|tri[lu]\(|[Ff]old\(|Upsample|interpolate|"
    r"\bsign|sgn|floor|ceil_?\(|trunc|fix|round|frac|\.threshold|Threshold\(|[a-z]shrink|RReLU|rrelu|"
    r"nan_to_num|sin_?\(|cos_?\(|a(rc)?tan|sinh|exp2|expm1|log(2|10|1p|it)|\*\* x|\) \*\* |ipow|"
    r"GLU|glu|lerp|LocalResp|local_resp|logsumexp|[Ss]oftmin|"
    r"\bm?sort\(|topk|kthvalue|median|diag|gather|take_along|cumsum|diff\(|var\b|std\b|_mean\(|"
    r" [<>]=? (0|c|x|-1)|\.[gl][te]\(|greater|less|LPPool|lp_pool|cosine|airwise"
)
INDEPENDENT = [case for case in rule_cases.CASES if not case.couples]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", INDEPENDENT, ids=str)
def test_every_case_is_bounded_or_refused(case):
    subject = rule_cases.subject(case)
    model = WithHead(subject.model, case.shape)
    reference = WithHead(subject.reference, case.shape)
    reference.head = model.head
    if REFUSED.search(case.expression):
        with pytest.raises(acert.UnsupportedOperation, match="CROWN"):
            crown(model, subject)
        return
    count = 60
    points = rule_cases.sampled(subject.lower, subject.upper, count)
    for rounding, dtype, slack in ((None, "float64", 1e-9), (REAL, "float64", 1e-12),
                                   (FLOAT32, "float32", 0.0)):  # fmt: skip
        dtype = getattr(torch, dtype)
        bound = crown(model, subject, rounding, parameters=dtype)
        assert bound.isfinite().all()
        evaluated = copy.deepcopy(reference).to(dtype)
        with torch.no_grad():
            logits = rule_cases.evaluate(evaluated, points.to(dtype), couples=False).double()
        differences = logits - logits.gather(2, LABELS.expand(count, 4).unsqueeze(2))
        size = 1 + logits.abs().amax()
        assert (differences <= bound + slack * size).all()


COUPLED = [case for case in rule_cases.CASES if case.couples]


@pytest.mark.parametrize("case", COUPLED, ids=str)
def test_models_that_mix_samples_are_refused(case):
    subject = rule_cases.subject(case)
    box = Interval(subject.lower, subject.upper).within(BoundPass(record=True))

    def bounded():
        output = subject.model(box)
        rows = output.reshape(len(output) if output.ndim > 1 else 1, -1)
        crown_differences(rows, torch.zeros(len(rows), dtype=torch.int64))

    with pytest.raises(acert.UnsupportedOperation, match="CROWN"):
        bounded()


# -- what a float32 network rounds in one operation -----------------------------------------

WEIGHT = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(1))
ROUNDED = {
    "leaky relu": lambda x: F.leaky_relu(x, 0.3),
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.7),
    "clamp": lambda x: x.clamp(min=0.1),
    "pad": lambda x: F.pad(x, (1, 1), value=0.1),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "transposed convolution": lambda x: F.conv_transpose1d(
        x.unflatten(1, (2, 3)), WEIGHT.to(x.dtype), stride=2
    ).flatten(1),
    "broadcast sum": lambda x: x[:, :1] + x,
    "average": lambda x: F.avg_pool1d(x.unflatten(1, (2, 3)), 3).flatten(1),
}


@pytest.mark.parametrize(("rounding", "holds"), [(FLOAT32, True), (REAL, False)])
@pytest.mark.parametrize("name", ROUNDED)
def test_what_float32_computes_in_one_operation(name, rounding, holds):
    """Nothing but this operation's own rounding is between the point and the bound."""
    function, points = ROUNDED[name], torch.randn(60, 6)
    box = Interval(points.double(), points.double()).within(BoundPass(rounding, record=True))
    output, logits = function(box), function(points).double()
    held = []
    for label in range(logits.shape[1]):
        bound = crown_differences(output, torch.full((60,), label))
        held.append(bool((logits - logits[:, [label]] <= bound).all()))
        assert (bound - (logits - logits[:, [label]])).max() < 1e-4
    assert all(held) == holds


# -- coefficients that are added up, in exact arithmetic ----------------------------------


REPEATED = {
    "expand": lambda x: x[:, :1].expand(-1, 40),
    "list": lambda x: x[:, [2, 0] * 20],
    "replicate": lambda x: F.pad(x.unsqueeze(1), (18, 19), mode="replicate").squeeze(1),
    "sum": lambda x: x[:, :1] + torch.zeros(40),
    "product": lambda x: torch.ones(40) * x[:, 1:2],
    "maximum": lambda x: F.max_pool1d(x.unsqueeze(1), 3, 1, 1).squeeze(1),
}


@pytest.mark.parametrize("name", REPEATED)
def test_sums_of_coefficients_are_paid_for(name):
    """The error of A times what it is multiplied by, in fractions, is in the constant."""
    function = REPEATED[name]
    point = torch.tensor([[3.0, 2.0, 1.0]]) if name != "maximum" else torch.arange(40.0).view(1, 40)
    wrong = 0
    for seed in range(20):
        torch.manual_seed(seed)
        box = Interval(point.double(), point.double()).within(BoundPass(REAL, record=True))
        output = function(box)
        count = output.shape[1]
        A = -torch.rand(1, 1, count).double() * 10.0 ** torch.randint(-6, 6, (1, 1, count))
        bound = LinearBound(output, A)
        while True:
            interval, sent = bound.latest()
            if interval.source is None:
                break
            rule = BACKWARD[interval.source.rule]
            step = Step(bound, interval.source, sent)
            rule(step, *interval.source.arguments, **interval.source.keywords)
        sums = {value: Fraction(0) for value in point.flatten().tolist()}
        for a, value in zip(A.flatten().tolist(), function(point).flatten().tolist(), strict=True):
            sums[value] += Fraction(a)
        needed = sum(
            abs(Fraction(found) - sums[value]) * Fraction(value)
            for found, value in zip(sent.flatten().tolist(), point.flatten().tolist(), strict=True)
        )
        wrong += needed > 0
        assert needed <= sum(Fraction(error.item()) for error in bound._errors)
    assert wrong > 5


# -- lines, in exact arithmetic ---------------------------------------------------------


class Spy:
    """Stands for a bound of one element with A = 1 or -1, and keeps the line it gets."""

    def __init__(self, rounding):
        self.rounding = rounding
        self.offset = None

    def send(self, interval, A):
        self.slope = A

    def shift(self, A, constant):
        added = [
            Fraction(a) * Fraction(c)
            for a, c in zip(A.flatten().tolist(), constant.flatten().tolist(), strict=True)
        ]
        old = self.offset or [Fraction(0)] * len(added)
        self.offset = [a + b for a, b in zip(old, added, strict=True)]

    def allow(self, *args, **kwargs):
        pass


def kinked(slope):
    return lambda x: x if x >= 0 else Fraction(slope) * x


def cut(least, most):
    return lambda x: min(max(x, Fraction(least)), Fraction(most))


# The rule's function, its arguments, the function in fractions, and where it has kinks.
LINES = {
    "relu": (F.relu, (), kinked(0), [0]),
    "leaky relu": (F.leaky_relu, (), kinked(0.01), [0]),
    "leaky relu 0.3": (F.leaky_relu, (0.3,), kinked(0.3), [0]),
    "leaky relu 0": (F.leaky_relu, (0,), kinked(0), [0]),
    "leaky relu 1": (F.leaky_relu, (1.0,), kinked(1), [0]),
    "hardtanh": (F.hardtanh, (-0.3, 0.1), cut(-0.3, 0.1), [-0.3, 0.1]),
    "hardtanh away from 0": (F.hardtanh, (0.2, 0.7), cut(0.2, 0.7), [0.2, 0.7]),
    "hardtanh of one value": (F.hardtanh, (0.3, 0.3), cut(0.3, 0.3), [0.3]),
    "relu6": (F.relu6, (), cut(0, 6), [0, 6]),
    "clamp": (torch.clamp, (-0.1, 0.7), cut(-0.1, 0.7), [-0.1, 0.7]),
    "clamp min": (torch.clamp_min, (-0.1,), cut(-0.1, 1e9), [-0.1]),
    "clamp max": (torch.clamp_max, (0.7,), cut(-1e9, 0.7), [0.7]),
}


def boxes(count):
    """Boxes of all sizes, some a single point, some that end at 0, some of a few ulps."""
    generator = torch.Generator().manual_seed(5)
    center = torch.randn(count, 1, generator=generator).double() * 2
    width = 10.0 ** (torch.rand(count, 1, generator=generator).double() * 20 - 18)
    width[::7] = 0
    lower, upper = center - width, center + width
    lower[::5], upper[1::5] = torch.minimum(lower[::5] * 0, upper[::5]), upper[1::5].clamp(min=0)
    return torch.minimum(lower, upper), upper


def held(name, rounding, count=400):
    """Whether each of the lines above and below holds at both ends and at all kinks."""
    function, arguments, exact, kinks = LINES[name]
    lower, upper = boxes(count)
    found = []
    for sign in (1, -1):
        spy = Spy(rounding)
        step = Step(spy, None, torch.full((count, 1, 1), float(sign), dtype=torch.float64))
        BACKWARD[RULES[function].rule](step, Interval(lower, upper), *arguments)
        slopes = [Fraction(slope) for slope in spy.slope.flatten().tolist()]
        for left, right, slope, offset in zip(
            lower.flatten().tolist(), upper.flatten().tolist(), slopes, spy.offset, strict=True
        ):
            inside = [Fraction(kink) for kink in kinks if left < kink < right]
            points = [Fraction(left), *inside, Fraction(right)]
            found.append(all(sign * exact(x) <= slope * x + offset for x in points))
    return found


@pytest.mark.parametrize("name", LINES)
def test_safe_lines_hold_in_exact_arithmetic(name):
    assert all(held(name, REAL))


@pytest.mark.parametrize("name", ["relu", "leaky relu 0.3", "hardtanh", "clamp"])
def test_plain_lines_do_not(name):
    assert not all(held(name, None))


def logistic(x):
    return 1 / (1 + (-x).exp())


# In balls, with the point above 0 where the slope is the given one, if there is one.
SMOOTH = {
    "tanh": (
        torch.tanh,
        lambda x: x.tanh(),
        1.0,
        lambda s: ((1 + (1 - s).sqrt()) / s.sqrt()).log(),
    ),
    "sigmoid": (
        torch.sigmoid,
        logistic,
        0.25,
        lambda s: ((1 + (1 - 4 * s).sqrt()) ** 2 / (4 * s)).log(),
    ),
}


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 30.0])
@pytest.mark.parametrize("name", SMOOTH)
def test_safe_lines_of_smooth_functions_hold_everywhere(name, scale):
    """At both ends and wherever the function has the line's slope, in balls of 128 bits."""
    function, exact, steepest, where = SMOOTH[name]
    lower, upper = (end * scale for end in boxes(300))
    loosest = 0.0
    for sign in (1, -1):
        spy = Spy(REAL)
        step = Step(spy, None, torch.full((300, 1, 1), float(sign), dtype=torch.float64))
        BACKWARD[RULES[function].rule](step, Interval(lower, upper))
        slopes = spy.slope.flatten().tolist()
        for left, right, slope, offset in zip(
            lower.flatten().tolist(), upper.flatten().tolist(), slopes, spy.offset, strict=True
        ):
            points = [arb(left), arb(right)]
            # sign * f has the slope, so f has sign * slope.
            if 0 < sign * slope < steepest:
                found = where(arb(sign * slope))
                points += [x for x in (found, -found) if not (x < left or x > right)]
            line = [arb(slope) * x + arb(offset.numerator) / offset.denominator for x in points]
            gaps = [y - sign * exact(x) for x, y in zip(points, line, strict=True)]
            assert all(gap >= 0 for gap in gaps)
            loosest = max(loosest, float(min(gap.mid() for gap in gaps)))
    assert loosest < 1e-10 * (1 + scale)  # every line touches


@pytest.mark.parametrize("name", SMOOTH)
def test_plain_lines_of_smooth_functions_are_the_lowest(name):
    """No tangent or chord that holds is lower in the middle of the box."""
    function = SMOOTH[name][0]
    generator = torch.Generator().manual_seed(3)
    lower = torch.randn(200, 1, generator=generator).double() * 3
    upper = lower + 4 * torch.rand(200, 1, generator=generator).double() + 0.1
    spy = Spy(None)
    step = Step(spy, None, torch.ones(200, 1, 1, dtype=torch.float64))
    BACKWARD[RULES[function].rule](step, Interval(lower, upper))
    middle = (lower + upper) / 2
    offset = torch.tensor([float(number) for number in spy.offset]).double().unsqueeze(1)
    found = spy.slope.squeeze(1) * middle + offset
    x = lower + torch.linspace(0, 1, 801).double() * (upper - lower)
    y = function(x)
    # For any slope, the lowest line that holds.
    slopes = torch.linspace(0, 1, 401).double()
    lifts = torch.stack([(y - slope * x).amax(1) for slope in slopes], 1)
    best = (slopes * middle + lifts).amin(1, keepdim=True)
    assert (found <= best + 1e-5).all()  # the grid misses that much of a maximum
    assert (found >= best - 2e-2).all()


def by_hand(function, lower, upper):
    """Upper bounds of f(x) and of -f(x) for a box of one number."""
    box = Interval(torch.tensor([[lower]]), torch.tensor([[upper]])).within(BoundPass(record=True))
    output = F.linear(function(box), torch.tensor([[0.0], [1.0]]))
    return [crown_differences(output, torch.tensor([k]))[0, 1 - k].item() for k in (0, 1)]


def test_by_hand():
    # On [-1, 3] the chord of slope (3 + 0.5) / 4 meets both ends; x lies below.
    assert by_hand(lambda x: F.leaky_relu(x, 0.5), -1.0, 3.0) == [3.0, 1.0]
    # On [-3, 1] the nearer piece is x / 2.
    assert by_hand(lambda x: F.leaky_relu(x, 0.5), -3.0, 1.0) == [1.0, 1.5]
    # x cut to [-1, 1] on [-2, 1.5]: above, the line from (-2, -1) over (1, 1) has slope 2/3 and
    # ends at 4/3; below, the one from (1.5, 1) over (-1, -1) has slope 0.8 and ends at -1.8.
    above, below = by_hand(F.hardtanh, -2.0, 1.5)
    assert (above, below) == (pytest.approx(4 / 3), pytest.approx(1.8))
    # Where most of the box is cut off, the constant is nearer.
    assert by_hand(F.hardtanh, -0.5, 5.0) == [1.0, pytest.approx(0.5)]
    assert by_hand(F.relu6, -5.0, 2.0) == [2.0, 0.0]


def test_maxima_against_a_loop():
    """max(x) - x_0 and x_0 - max(x), the lines of every window written down by hand."""
    torch.manual_seed(2)
    center, radius = torch.randn(300, 4).double(), torch.rand(300, 4).double().pow(3)
    lower, upper = center - radius, center + radius
    box = Interval(lower, upper).within(BoundPass(record=True))
    most = F.max_pool1d(box.unsqueeze(1), 4).squeeze(1)
    output = torch.cat([box[:, :1], most], 1)
    found = [crown_differences(output, torch.full((300,), k))[:, 1 - k] for k in (0, 1)]
    kinds = set()
    for row, (low, high) in enumerate(zip(lower.tolist(), upper.tolist(), strict=True)):
        best = max(range(4), key=low.__getitem__)
        certain = all(low[best] >= high[i] for i in range(4) if i != best)
        kinds.add((certain, best == 0))
        above = high[best] - low[0] if certain else max(high) - low[0]
        below = high[0] - low[best]
        if best == 0:  # then x_0 - x_0
            above, below = (0.0 if certain else above), 0.0
        assert found[0][row].item() == pytest.approx(above, abs=1e-12)
        assert found[1][row].item() == pytest.approx(below, abs=1e-12)
    assert len(kinds) == 4


@pytest.mark.parametrize("rounding", [None, REAL, FLOAT32], ids=["plain", "real", "float32"])
@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3, 1, 1),
        nn.MaxPool2d(2, (1, 2), dilation=2),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    ],
    ids=str,
)
def test_maxima_of_overlapping_windows_against_corners(pool, rounding):
    """Every window's lines beside those of a pass over all corners of small boxes."""
    torch.manual_seed(3)
    center = torch.randn(1, 1, 3, 3).double()
    radius = torch.rand_like(center).pow(2)
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 9).reshape(-1, 1, 3, 3)
    points = center + corners * radius
    features = pool(points).flatten(1)
    for _ in range(10):
        weight = torch.randn(2, features.shape[1] + 9).double()
        box = Interval(center - radius, center + radius).within(BoundPass(rounding, record=True))
        output = F.linear(torch.cat([pool(box).flatten(1), box.flatten(1)], 1), weight)
        logits = torch.cat([features, points.flatten(1)], 1) @ weight.T
        for k in (0, 1):
            bound = crown_differences(output, torch.tensor([k]))[0, 1 - k]
            assert (logits[:, 1 - k] - logits[:, k]).max() <= bound + 1e-12
