"""Rules: sound in every variant, reached, nested, compiled as eager, and refused where none is."""

import copy
import itertools
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.rule_cases import (
    CASES,
    Apply,
    Case,
    evaluate,
    probe,
    scale,
    subject,
)
from torch import nn

import acert
from acert.bounds import Interval, propagate
from acert.bounds.bound_pass import BoundPass
from acert.bounds.proven import proven_margin
from acert.bounds.refusals import operation_name
from acert.bounds.rounding import FLOAT32, REAL
from acert.bounds.rules import affine as affine_rules
from acert.bounds.rules.affine import convolution_by_matmul
from acert.bounds.table import RULES


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=str)


def assert_sound_and_tight(case: Case) -> None:
    probed = subject(case)
    result = probe(probed, points=2_000, attacks=200)
    assert (result.sampled, result.attacked) == (2_000, 200)
    assert result.float64 >= -1e-12
    assert result.float32 >= -1e-5
    # Rounding-safe bounds take no tolerance.
    assert result.safe_real >= 0
    assert result.safe_float32 >= 0
    assert result.missed <= case.gap + 1e-9


def assert_safety_costs_little(case: Case) -> None:
    probed = subject(case)
    plain = probed.bounds(torch.float64)
    for rounding, share in ((REAL, 1e-12), (FLOAT32, 1e-4)):
        safe = probed.bounds(torch.float64, rounding)
        wider = torch.maximum(safe.upper - plain.upper, plain.lower - safe.lower)
        assert float(wider.max()) <= share * scale(safe, probed)


def test_the_catalogue_has_no_doubles():
    assert len({str(case) for case in CASES}) == len(CASES)


def test_the_catalogue_names_every_spelling_of_every_rule():
    """PyTorch hands none of the others to `__torch_function__`, or they are refused."""
    met = set()
    original = Interval.__torch_function__.__func__

    def noted(cls, func, types, args=(), kwargs=None):
        met.add(func)
        return original(cls, func, types, args, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Interval, "__torch_function__", classmethod(noted))
        for case in CASES:
            subject(case).bounds(torch.float32)
    unmet = {operation_name(function) for function in set(RULES) - met}
    # Not in the catalogue: no attack gets through `detach`, `float` rounds a float64 model, and
    # nested tensors are always refused.
    others = re.compile(
        r"torch\.Tensor\.__\w+__|\w+|.*_with_indices|torch\.Tensor\.(detach|float)|.*\._nested\w+"
    )
    assert {name for name in unmet if not others.fullmatch(name)} == set()


@by_name(CASES)
def test_no_point_leaves_the_bounds_and_they_are_reached(case):
    assert_sound_and_tight(case)


@by_name(CASES)
def test_rounding_safety_costs_little(case):
    assert_safety_costs_little(case)


@by_name(CASES)
def test_bounds_are_nested_in_the_radius(case):
    probed = subject(case)
    center, radius = (probed.upper + probed.lower) / 2, (probed.upper - probed.lower) / 2
    bounds = [
        probed._replace(lower=center - share * radius, upper=center + share * radius).bounds(
            torch.float64
        )
        for share in (0.0, 0.25, 0.6, 1.0)
    ]
    tolerance = 1e-12 * max(1.0, float(bounds[-1].magnitude.max()))
    for inner, outer in itertools.pairwise(bounds):
        assert bool((outer.lower <= inner.lower + tolerance).all())
        assert bool((outer.upper >= inner.upper - tolerance).all())
    if case.gap < 1:  # at radius 0 nothing is left to be wide about
        double = copy.deepcopy(probed.reference).double()
        value = evaluate(double, center.double().unsqueeze(0), couples=case.couples)[0]
        # To 1e-6: without `eps`, RMSNorm is bounded for float32's and float64's.
        torch.testing.assert_close(bounds[0].lower, value, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(bounds[0].upper, value, rtol=1e-6, atol=1e-8)


# -- compiled -------------------------------------------------------------------------------

# Dynamo puts these into the graph itself instead of asking the interval, and swaps `x @ w`.
NOT_HANDED_ON = re.compile(
    r"(torch|F)\.\w+_\(|F\.(sigmoid|tanh)\(|[Hh]ard(sigmoid|swish)| @ |c\.matmul\(x|~| [&|] \(c"
)


if torch.__version__ < "2.11":  # nor does it trace what PyTorch's Python does with these
    NOT_HANDED_ON = re.compile(
        NOT_HANDED_ON.pattern
        + r"|[Pp]ad(\(|\dd)|RMSNorm|rms_norm|[Tt]hreshold\([-\w]|LPPool3|lp_pool3|"
        r"LocalResponse|local_response"
    )


def one_of_each(cases):
    """Cases that differ in what is called, but for what overwrites and for `torch.special`.

    Recurrent layers are compiled in tests of their own.
    """
    kinds = {}
    for case in cases:
        words = re.findall(r"[\w.]+(?=\()|[-+*/@]", case.expression)
        called = [word.replace("torch.special.", "torch.").rstrip("_") for word in words]
        if not NOT_HANDED_ON.search(case.expression) and "Recurring" not in words:
            kinds.setdefault((*called, case.training), case)
    return list(kinds.values())


def compare_compiled(cases):
    """One graph of all cases, which takes less than a graph for each."""
    torch._dynamo.reset()
    everything = [subject(case) for case in cases]

    def ends(arguments):
        found = []
        for probed, (lower, upper, statistics) in zip(everything, arguments, strict=True):
            bound_pass = BoundPass(statistics=statistics)
            box = Interval(lower, upper).within(bound_pass)
            found.append(propagate(probed.model, box).ends())
        return found

    arguments = [(probed.lower, probed.upper, probed.statistics) for probed in everything]
    # Dynamo leaves recurrent layers out of graphs unless it is told otherwise.
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(ends, backend="aot_eager", fullgraph=True)(arguments)
        eager = ends(arguments)
    torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-6)


KINDS = one_of_each(CASES)


@pytest.mark.parametrize(
    "cases",
    [KINDS[start : start + 12] for start in range(0, len(KINDS), 12)],
    ids=lambda cases: str(cases[0]),
)
def test_compiled_equals_eager(cases):
    try:
        compare_compiled(cases)
    except Exception:  # which of them it is
        for case in cases:
            compare_compiled([case])
        raise


@pytest.mark.parametrize("expression", ["x @ c", "c @ x", "c.matmul(x)"])
def test_compiled_products_that_dynamo_swaps_are_refused(expression):
    """It hands on `x @ c` as `c @ x`, which square matrices would not show."""
    torch._dynamo.reset()
    model = Case(expression, (2, 2), constants={"c": (2, 2)}).build()

    def upper(lower):
        return propagate(model, Interval(lower, lower + 1)).upper

    with pytest.raises(Exception, match=r"torch.compile swaps them: torch.matmul\(a, b\)"):
        torch.compile(upper, backend="aot_eager", fullgraph=True)(torch.zeros(3, 2, 2))


def test_a_weight_changed_in_place_is_seen_by_the_compiled_pass():
    torch._dynamo.reset()
    layer = nn.Linear(2, 2)
    lower, upper = torch.zeros(1, 2), torch.ones(1, 2)

    def ends(lower, upper):
        return propagate(layer, Interval(lower, upper)).ends()

    compiled = torch.compile(ends, backend="aot_eager", fullgraph=True)
    compiled(lower, upper)
    with torch.no_grad():
        layer.weight.fill_(3.0)
        layer.bias.zero_()
    assert compiled(lower, upper)[1].tolist() == [[6.0, 6.0]]


# -- gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "shape"),
    [
        ("nn.Linear(6, 4)", (6,)),
        ("nn.Conv2d(2, 3, 2, stride=2, padding=1)", (2, 3, 4)),
        ("nn.ConvTranspose2d(2, 2, 2, stride=2)", (2, 2, 2)),
        ("nn.BatchNorm1d(3)", (3, 2)),
        ("weight_norm(nn.Linear(4, 3))", (4,)),
        ("nn.GELU()", (5,)),
        ("nn.SiLU()", (5,)),
        ("nn.ELU(-0.7)", (5,)),
        ("nn.Softplus(threshold=0.5)", (5,)),
        ("nn.AvgPool2d(2, divisor_override=-2)", (1, 4, 4)),
        ("nn.LayerNorm(4)", (3, 4)),
        ("nn.GroupNorm(2, 4)", (4, 3)),
        ("torch.matmul(x[:, 0], x[:, 1].mT)", (2, 3, 3)),
        ("torch.matmul(x[:, 0].exp(), x[:, 1])", (2, 3, 3)),
        ("x.softmax(1)", (4, 2)),
        ("F.scaled_dot_product_attention(x, x, x)", (3, 4)),
        ("nn.PReLU(3)", (3, 2)),
        ("nn.PReLU(3, init=-0.7)", (3, 2)),
        ("x.exp()", (5,)),
        ("x ** 4", (5,)),
        ("x[:, 0] * x[:, 1]", (2, 3)),
        ("x.mean((1, 2)) / 3", (2, 3)),
        ("Nested()", (2, 4, 4)),
        ("Recurring('nn.RNN(3, 2)')", (3, 3)),
        ("Recurring('nn.LSTM(3, 3, 2, bidirectional=True, proj_size=2)')", (3, 3)),
        ("Recurring('nn.GRU(3, 2, 2, bidirectional=True)')", (3, 3)),
        ("Unrolled('nn.LSTMCell(3, 2)', 2)", (3, 3)),
        ("torch.sin(3 * x)", (5,)),
        ("torch.log1p(x.abs())", (5,)),
        ("(x.abs() + 1) ** -0.3", (5,)),
        ("0.3 ** x", (5,)),
        ("F.threshold(x, 0.1, 3.0)", (5,)),
        ("nn.Hardshrink()", (5,)),
        ("nn.GLU()", (6,)),
        ("torch.lerp(x[:, 0], x[:, 1], 0.3)", (2, 3)),
        ("nn.LocalResponseNorm(2)", (3, 2)),
        ("torch.logsumexp(x, 1)", (4, 2)),
        ("x.log_softmax(1)", (4, 2)),
    ],
)
def test_gradients_match_finite_differences(expression, shape):
    probed = subject(Case(expression, shape, r=0.3))
    model = copy.deepcopy(probed.model).double().requires_grad_()
    lower, upper = (end[2:3].double().requires_grad_() for end in (probed.lower, probed.upper))
    parameters = list(model.parameters())

    def ends(lower, upper, *_parameters):  # the model holds the very tensors that are moved
        return propagate(model, Interval(lower, upper)).ends()

    assert torch.autograd.gradcheck(ends, (lower, upper, *parameters), fast_mode=True)


# -- by hand --------------------------------------------------------------------------------


def bounds_of(function, lower, upper):
    lower, upper = torch.tensor(lower), torch.tensor(upper)
    bounds = acert.interval_bounds(
        function if isinstance(function, nn.Module) else Apply(function), lower, upper
    )
    return bounds.lower.tolist(), bounds.upper.tolist()


def test_linear_by_hand():
    layer = nn.Linear(3, 1)
    nn.init.ones_(layer.weight)
    nn.init.constant_(layer.bias, 2.0)
    assert bounds_of(layer, [[0.0, 1.0, 2.0]], [[2.0, 3.0, 4.0]]) == ([[5.0]], [[11.0]])


def test_negative_weights_swap_the_ends():
    layer = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -2.0]]))
    assert bounds_of(layer, [[0.0, 0.0]], [[1.0, 1.0]]) == ([[-2.0]], [[1.0]])


def test_convolution_by_hand():
    layer = nn.Conv1d(1, 1, 2, padding=1)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    lower, upper = bounds_of(layer, [[[1.0, 2.0]]], [[[2.0, 4.0]]])
    assert lower == [[[1.0, 3.0, 2.0]]]
    assert upper == [[[2.0, 6.0, 4.0]]]


def test_batch_norm_by_hand():
    layer = nn.BatchNorm1d(1, eps=0.0).eval()
    layer.running_mean.fill_(1.0)
    layer.running_var.fill_(4.0)
    with torch.no_grad():
        layer.weight.fill_(-6.0)
        layer.bias.fill_(0.5)
    # (x - 1) / 2 * -6 + 0.5 at both ends
    assert bounds_of(layer, [[1.0]], [[3.0]]) == ([[-5.5]], [[0.5]])


@pytest.mark.parametrize(
    ("function", "lower", "upper", "expected"),
    [
        (torch.relu, -1.0, 2.0, (0.0, 2.0)),
        (lambda x: F.leaky_relu(x, 0.5), -1.0, 2.0, (-0.5, 2.0)),
        (lambda x: F.leaky_relu(x, -0.5), -1.0, 0.25, (0.0, 0.5)),
        (F.relu6, -1.0, 9.0, (0.0, 6.0)),
        (lambda x: x.clamp(max=0.5), -1.0, 2.0, (-1.0, 0.5)),
        (lambda x: 3 - 2 * x, 0.0, 1.0, (1.0, 3.0)),
        (lambda x: x / -2, 0.0, 1.0, (-0.5, 0.0)),
        (lambda x: -x, 0.0, 1.0, (-1.0, 0.0)),
        (lambda x: x - x, 0.0, 1.0, (-1.0, 1.0)),
        (lambda x: x * x, -1.0, 2.0, (0.0, 4.0)),
        (lambda x: x * x, -3.0, -1.0, (1.0, 9.0)),
        (lambda x: x * x.clone(), -1.0, 2.0, (-2.0, 4.0)),
        (lambda x: (x + 1) * (x - 3), 0.0, 1.0, (-6.0, -2.0)),
    ],
)
def test_operations_by_hand(function, lower, upper, expected):
    assert bounds_of(function, [[lower]], [[upper]]) == ([[expected[0]]], [[expected[1]]])


def test_relu_of_a_ball_is_relu_of_its_ends():
    """In value and in gradient: surely active, surely inactive, neither, and points."""
    center = torch.tensor([2.0, -2.0, 0.3, -0.3, 1.0, -1.0], dtype=torch.float64)
    radius = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    leaves = center.requires_grad_(), radius.requires_grad_()
    found = torch.relu(Interval.ball(*leaves))
    wanted = torch.relu(Interval(center - radius, center + radius))
    results = [(*box.as_ball(), *box.ends()) for box in (found, wanted)]
    torch.testing.assert_close(*results)
    weights = torch.rand(4, 6, dtype=torch.float64)
    losses = [(weights * torch.stack(result)).sum() for result in results]
    gradients = [torch.autograd.grad(loss, leaves) for loss in losses]
    torch.testing.assert_close(*gradients)


def test_the_dips_are_covered():
    """To 1e-7 of the true minima, which lie inside the box."""
    for function, lowest in (
        (F.gelu, -0.1699712),
        (lambda x: F.gelu(x, approximate="tanh"), -0.1700408),
        (F.silu, -0.2784645),
    ):
        ((lower,),), ((upper,),) = bounds_of(function, [[-3.0]], [[0.0]])
        assert lower == pytest.approx(lowest, abs=1e-6)
        assert upper == pytest.approx(0.0, abs=1e-6)


def test_softplus_falls_at_its_threshold():
    """log(1 + e^0) just before 0, and 0 just after it."""
    ((lower,),), ((upper,),) = bounds_of(nn.Softplus(threshold=0.0), [[-1.0]], [[1.0]])
    assert lower <= 0.0
    assert upper >= math.log(2.0)


def test_a_quotient_without_bounds_has_gradients_behind_what_saturates():
    lower = torch.tensor([[-0.5, 0.5]], requires_grad=True)
    found = torch.tanh(1 / Interval(lower, lower + 1) + 1)
    assert found.upper[0, 0] == 1
    (gradient,) = torch.autograd.grad((found.upper - found.lower).sum(), lower)
    assert bool(gradient.isfinite().all())


INFINITE = torch.tensor([0.5, -math.inf, math.inf])


@pytest.mark.parametrize("rounding", [None, REAL, FLOAT32], ids=["plain", "real", "float32"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + INFINITE, lambda x: INFINITE + x, lambda x: x - INFINITE,
        lambda x: INFINITE - x, lambda x: torch.sub(INFINITE, x),
        lambda x: torch.rsub(x, INFINITE), lambda x: torch.add(INFINITE, x, alpha=-2.5),
        lambda x: torch.sub(x, INFINITE, alpha=3), lambda x: (x * 1).add_(INFINITE),
    ],
    ids=["x + c", "c + x", "x - c", "c - x", "sub", "rsub", "alpha", "x - 3c", "in place"],
)  # fmt: skip
def test_sums_with_infinities_keep_the_sign_of_both(function, rounding):
    lower, upper = (
        torch.tensor([[0.1, 0.2, 0.3]]).double(),
        torch.tensor([[0.4, 0.6, 0.8]]).double(),
    )
    found = function(Interval(lower, upper).within(BoundPass(rounding)))
    values = torch.stack([function(end) for end in (lower, upper)])
    finite = values.isfinite().all(0)
    torch.testing.assert_close(found.lower[finite], values.amin(0)[finite], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.upper[finite], values.amax(0)[finite], rtol=1e-5, atol=1e-6)
    if rounding is not None:
        torch.testing.assert_close(
            (found.lower, found.upper), (values.amin(0), values.amax(0)), rtol=1e-5, atol=1e-6
        )


def test_a_number_that_float32_has_not_gives_no_quotient():
    box = Interval(*[torch.full((1, 1), 1.2e30, dtype=torch.float64)] * 2)
    assert bool((1e39 / box.within(BoundPass(FLOAT32))).upper.isnan())
    assert bool((1e39 / box.within(BoundPass(REAL))).upper.isfinite())


@pytest.mark.parametrize("arithmetic", ["nearest", "real", "float32"])
def test_rms_norm_without_eps_holds_behind_a_cast(arithmetic):
    """PyTorch takes the eps of what it gets, float64's there, and not that of the weight."""
    norm, head = nn.RMSNorm(2), nn.Linear(2, 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
        head.bias.copy_(torch.tensor([0.7, 0.0]))

    def function(x):  # tiny from 0.11 on, 0 before
        tiny = torch.relu(x - 0.11) * torch.tensor([1e-3, 0.0])
        return head(F.rms_norm(tiny.double(), (2,), norm.weight.double()).float())

    model, image = Apply(function), torch.tensor([[0.1, 0.1]])
    found = acert.certified_radius(model, image, max_radius=0.2, arithmetic=arithmetic)
    assert float(found.value) <= 0.0101
    assert model(image + 0.1).argmax(1) != model(image).argmax(1)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_picks_are_those_of_float32_or_refused(mode):
    """All sizes up to 12, and some where PyTorch's kernels of two types take other elements."""
    sizes = [*itertools.product(range(1, 13), repeat=2), (2, 82), (2, 214), (2, 55), (2, 61)]
    refused = 0
    for old, new in sizes:
        places = torch.arange(float(old)).reshape(1, 1, old)
        box = Interval(places.double(), places.double())
        try:
            found = F.interpolate(box, new, mode=mode).lower
        except acert.UnsupportedOperation:
            refused += 1
            continue
        assert torch.equal(found.float(), F.interpolate(places, new, mode=mode))
    assert 0 < refused <= 4
    with pytest.raises(acert.UnsupportedOperation, match="picks other elements"):
        F.interpolate(Interval(places, places), scale_factor=1.1, mode=mode)  # copied by some


# -- refusals -------------------------------------------------------------------------------

ADD = ". acert.register_rule(function, rule, ulps=...) adds a rule: see docs/adding-a-layer.md"
NO_RULE = "it has no bound rule"
EXPONENT = "`exponent` must be a finite number"
ANSWERS = "its answers depend on the model's input: choose by `torch.where`"
ONLY_FIRST = "only its first argument may depend on the model's input"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("torch.sinc(x)", f"torch.sinc: {NO_RULE}"),
        ("F.prelu(torch.ones(3, 3), x[0, 0, :1])", f"torch.nn.functional.prelu: {ONLY_FIRST}"),
        ("x.sinc()", f"torch.Tensor.sinc: {NO_RULE}"),
        ("torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False)",
         f"torch.batch_norm: {NO_RULE}"),
        ("x if x.sum() > 0 else -x", f"torch.Tensor.gt: {ANSWERS}"),
        ("x if x[0, 0, 0] else -x", f"a data-dependent `if`, `while` or `bool()`: {NO_RULE}"),
        ("x == 1", f"torch.Tensor.eq: {NO_RULE}"),
        ("x[x <= 1]", "torch.Tensor.__getitem__: of its arguments only the first may be a "
         "comparison's answer"),
        ("x.topk(2, sorted=False).values",
         "torch.topk: `sorted` must be True: without it the order is not certain"),
        ("x + x.argmax(1, True)", "torch.argmax: its indices are not certain"),
        ("x[:, x.argsort()[0]]", "torch.argsort: its indices are not certain"),
        ("x.sort().indices.float()", "torch.sort: its indices are not certain"),
        ("x.gather(2, x.topk(2).indices)", "torch.topk: its indices are not certain"),
        ("nn.LPPool1d(3, 2)",
         "torch.nn.functional.lp_pool1d: `norm_type` must be 1 or 2; got 3.0"),
        ("F.cosine_similarity(x, x)", "torch.nn.functional.cosine_similarity: one of its "
         "arguments must not depend on the model's input"),
        ("x.diff(2)", "torch.diff: `n` must be 1; got 2"),
        ("x.cumsum(1, dtype=torch.float16)",
         "torch.cumsum: `dtype` must be that of its input; got torch.float16"),
        ("x[:, :1].var(1)", "torch.var: it must have more than 1 elements a result; got 1"),
        ("x.unfold(2, 3, 1).mul_(2)",
         "torch.Tensor.mul_: it overwrites an expanded tensor, whose elements share memory"),
        ("1.0 * float(x[0, 0, 0])", f"torch.Tensor.item: {NO_RULE}"),
        ("torch.tensor(x)", f"len() of a number, or torch.tensor() of one: {NO_RULE}"),
        ("x * int(x[0, 0, 0])", f"torch.Tensor.item: {NO_RULE}"),
        ("x ** float('inf')", f"torch.pow: {EXPONENT}; got inf"),
        ("torch.pow(x, torch.tensor(2))", f"torch.pow: {EXPONENT}; got tensor(2)"),
        ("x ** x", "torch.pow: its base or its exponent must not depend on the model's input"),
        ("(-2) ** x", "torch.pow: the base must be above 0; got -2"),
        ("torch.pow(0.0, x)", "torch.pow: the base must be above 0; got 0.0"),
        ("torch.round(x, decimals=1)", "torch.round: `decimals` must be 0; got 1"),
        ("F.softshrink(x, -0.1)",
         "torch.nn.functional.softshrink: `lambd` must be 0 or above; got -0.1"),
        ("F.rrelu(x, training=True)",
         "torch.nn.functional.rrelu: it is random in training; switch the model to evaluation "
         "(`eval()`)"),
        ("F.feature_alpha_dropout(x, training=True)",
         "torch.nn.functional.feature_alpha_dropout: it is random in training; switch the model "
         "to evaluation (`eval()`)"),
        ("torch.logit(x, 0.7)", "torch.logit: `eps` must be None, or from 0 to 0.5; got 0.7"),
        ("F.glu(x, 1)", "torch.nn.functional.glu: it halves the axis 1, which has 3 elements"),
        ("torch.lerp(x, x, x)", "torch.lerp: `weight` must not depend on the model's input"),
        ("torch.lerp(torch.ones(4), torch.ones(4), x)",
         "torch.lerp: `weight` must not depend on the model's input"),
        ("torch.logsumexp(x, ())", "torch.logsumexp: `dim` must name an axis; got ()"),
        ("F.log_softmax(x)", "torch.nn.functional.log_softmax: `dim` must be given; got None"),
        ("x.log_softmax(1, dtype=torch.float16)",
         "torch.log_softmax: it must not lose precision; got torch.float16"),
        ("x % 2", f"torch.Tensor.remainder: {NO_RULE}"),
        ("x // 2", f"torch.Tensor.__floordiv__: {NO_RULE}"),
        ("x.half()", f"torch.Tensor.half: {NO_RULE}"),
        ("x.to(torch.float16)", "torch.Tensor.to: it must not lose precision; got torch.float16"),
        ("x - torch.zeros(4).to(x)",
         "torch.Tensor.to: it takes its type from the model's input: write `.to(x.dtype)`"),
        ("x.to(x)",
         "torch.Tensor.to: it takes its type from the model's input: write `.to(x.dtype)`"),
        ("torch.einsum('b...->b', x)", "torch.functional.einsum: it must be given one or two "
         "tensors, and all axes by letters"),
        ("torch.einsum('bij,bij,bij->b', x, x, x)", "torch.functional.einsum: it must be given "
         "one or two tensors, and all axes by letters"),
        ("torch.einsum('bij,bkj->b', x, x)", "torch.functional.einsum: an axis it sums must be "
         "in both tensors; got 'bij,bkj->b'"),
        ("torch.where(x, 1.0, 0.0)",
         "torch.where: its condition must not depend on the model's input"),
        ("x.where(x, 0.0)", "torch.where: its condition must not depend on the model's input"),
        ("torch.ones(3, 4).expand_as(x)",
         "torch.Tensor.expand_as: it takes its shape from the model's input: write it with "
         "`x.shape`"),
        ("torch.ones(4).type_as(x)",
         "torch.Tensor.to: it takes its type from the model's input: write `.to(x.dtype)`"),
        ("F.celu(x, -1.0)", "torch.nn.functional.celu: `alpha` must be above 0; got -1.0"),
        ("torch.addcmul(x, x, x, value=2)", "torch.addcmul: `value` must be 1; got 2"),
        ("torch.linalg.norm(x, 2, 1)",
         "torch.linalg.norm: `ord` must be None: write `torch.linalg.vector_norm`"),
        ("x.norm(3, 1)", "torch.functional.norm: the norm must be 1, 2 or infinity; got 3"),
        ("F.normalize(x, p=1)", "torch.nn.functional.normalize: `p` must be 2; got 1"),
        ("F.interpolate(x[:, None], (2, 2), mode='bicubic', antialias=True)",
         "torch.nn.functional.interpolate: antialias=True has no bound rule; "
         "`antialias=False` has one"),
        ("x.__setitem__(0, 1.0)", f"torch.Tensor.__setitem__: {NO_RULE}"),
        ("x.numpy()", f"torch.Tensor.numpy: {NO_RULE}"),
        ("x & 1", "unsupported operand type(s) for &: 'Interval' and 'int'"),
        ("x.T", "an Interval has no `T`"),
        ("torch.add(x, 1, out=torch.empty(0))", "torch.add: `out` must be None"),
        ("x.view(torch.int32)",
         "torch.Tensor.view: it must keep the type of its input; got torch.int32"),
        ("F.max_pool1d(x, 2, return_indices=True)[0]",
         "torch.nn.functional.max_pool1d: `return_indices` must be False: "
         "the indices are not certain"),
        ("nn.MaxPool1d(2, return_indices=True)",
         "torch.nn.functional.max_pool1d: `return_indices` must be False: "
         "the indices are not certain"),
        ("x[:, x.max(1).indices]", "torch.max: its indices are not certain"),
        ("torch.zeros(4).take(torch.max(x, 1, True)[1])", "torch.max: its indices are not certain"),
        ("x + torch.min(x, 1)[1]", "torch.min: its indices are not certain"),
        ("x.min(1).indices.float()", "torch.min: its indices are not certain"),
        *(
            (f"x * ({expression.format('x.max(1, True)[1]')})", "torch.max: its indices are not "
             "certain")
            for expression in (
                "{} == 0", "{} != 0", "{} > 0", "2 >= {}", "not {}", "1 if {} else 2", "-{}",
                "{} + 1", "1 - {}", "{} // 2", "{}[0]", "3 in {}", "len({})", "[*{}][0]",
                "torch.as_tensor({})", "torch.stack([{}])", "torch.eq({}, 0)",
                "F.one_hot({}, 4)", "x.masked_fill({} == 3, 0.0)",
            )
        ),
        ("F.normalize(x, dim=(1, 2))",
         "torch.nn.functional.normalize: `dim` must be one axis; got (1, 2)"),
        ("F.interpolate(x[:, :1, :1], scale_factor=0.5, mode='area')",
         "torch.nn.functional.interpolate: it must leave some elements; got the size (0,)"),
        ("x[:, :, :1].expand_as(x).mul_(2)",
         "torch.Tensor.mul_: it overwrites an expanded tensor, whose elements share memory"),
        ("(x * 1j).abs()", "a complex constant: bounds are of real numbers"),
        ("x + torch.tensor(1j)", "a complex constant: bounds are of real numbers"),
        ("torch.cat([x, 1j * torch.ones(2, 3, 4)])",
         "a complex constant: bounds are of real numbers"),
        ("torch.cat(x, 1)", "torch.cat: it must be given a list or tuple of tensors; got one"),
        ("torch.div(x, x, rounding_mode='trunc')",
         "torch.div: `rounding_mode` must be None; got 'trunc'"),
        ("torch.div(x, 2, rounding_mode='floor')",
         "torch.div: `rounding_mode` must be None; got 'floor'"),
        ("x.sum(1, dtype=torch.float16)",
         "torch.sum: `dtype` must be that of its input; got torch.float16"),
        ("F.softplus(x, beta=-1.0)",
         "torch.nn.functional.softplus: `beta` must be above 0; got -1.0"),
        ("F.linear(x, x[0])", f"torch.nn.functional.linear: {ONLY_FIRST}"),
        ("F.linear(torch.ones(4, 4), x[0])", f"torch.nn.functional.linear: {ONLY_FIRST}"),
        ("F.conv1d(x, torch.ones(1, 3, 1), bias=x[0, 0, :1])",
         f"torch.nn.functional.conv1d: {ONLY_FIRST}"),
        ("torch.addmm(torch.ones(4), x[0], torch.ones(4, 4), alpha=2)",
         "torch.addmm: `beta` and `alpha` must be 1; got 1 and 2"),
        ("torch.addmm(x[0], torch.ones(3, 2), torch.ones(2, 4))",
         "torch.addmm: one of its matrices must depend on the model's input"),
        ("x.clamp(min=x)", f"torch.Tensor.clamp: {ONLY_FIRST}"),
        ("torch.ones(4, 3, 4).add_(x)",
         "torch.Tensor.add_: it overwrites a tensor that cannot hold the result"),
        ("operator.imul(x, torch.ones(2, 4, 3, 4))",
         "torch.Tensor.mul_: it overwrites a tensor that cannot hold the result"),
    ],
)  # fmt: skip
def test_refused_with_its_name(expression, message):
    model = Case(expression, (3, 4)).build().eval()
    lower = torch.zeros(4, 3, 4)
    with pytest.raises(acert.UnsupportedOperation) as refusal:
        acert.interval_bounds(model, lower, lower + 1)
    advice = ADD if message.endswith(NO_RULE) else ""
    assert str(refusal.value) == f"{message} (in the model, {type(model).__name__}){advice}"


@pytest.mark.parametrize(
    ("layer", "operation"),
    [
        (Apply(torch.sinc), f"torch.sinc: {NO_RULE}"),
        (
            nn.Dropout(0.5),
            "torch.nn.functional.dropout: it is random in training; switch the model to "
            "evaluation (`eval()`)",
        ),
        (
            nn.BatchNorm1d(4),
            "torch.nn.functional.batch_norm: it normalises by batch statistics and none were "
            "given; switch the model to evaluation (`model.eval()`), or pass the `statistics` of "
            "`acert.clean_pass`",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_module_path_is_named(layer, operation):
    model = nn.Sequential()
    model.add_module("features", nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Identity(), layer))
    with pytest.raises(acert.UnsupportedOperation) as refusal:
        acert.interval_bounds(model, torch.zeros(2, 3), torch.ones(2, 3))
    where = f"module `features.3`, {type(layer).__name__}"
    advice = ADD if operation.endswith(NO_RULE) else ""
    assert str(refusal.value) == f"{operation} (in {where}){advice}"


def test_a_fault_of_the_model_itself_is_not_hidden():
    with pytest.raises(TypeError, match="can only concatenate"):
        acert.interval_bounds(Apply(lambda x: x + ("a" + 1)), torch.zeros(1, 2), torch.ones(1, 2))


@pytest.mark.parametrize("output", ["(x, x)", "torch.ones(2)", "None"])
def test_an_output_that_is_no_interval_is_refused(output):
    model = Case(f"({output}, x)[0]", (2,)).build()
    with pytest.raises(acert.UnsupportedOperation, match="for an interval: its output must be one"):
        acert.interval_bounds(model, torch.zeros(1, 2), torch.ones(1, 2))


# -- registering ----------------------------------------------------------------------------


@pytest.fixture
def table():
    """Gives the table back as it was."""
    before = dict(RULES)
    yield RULES
    RULES.clear()
    RULES.update(before)


@pytest.mark.parametrize(
    ("function", "rule", "ulps", "message"),
    [
        (
            "torch.sinc",
            len,
            1,
            r"`function` and `rule` must be callable; got 'torch.sinc' and <built-in",
        ),
        (
            torch.sinc,
            None,
            1,
            r"`function` and `rule` must be callable; got <built-in method sinc .* and None",
        ),
        (torch.sinc, len, -1, r"`ulps` must be at least 0; got -1"),
        (torch.sinc, len, math.nan, r"`ulps` must be at least 0; got nan"),
    ],
)
def test_register_rule_checks_its_arguments(table, function, rule, ulps, message):
    with pytest.raises(acert.InvalidInput, match=message):
        acert.register_rule(function, rule, ulps=ulps)
    assert torch.sinc not in table


def test_register_rule_asks_for_ulps():
    with pytest.raises(TypeError, match="ulps"):
        acert.register_rule(torch.sinc, len)


def test_a_rule_must_return_an_interval(table):
    acert.register_rule(torch.sinc, lambda box: box.lower, ulps=1)
    with pytest.raises(acert.UnsupportedOperation, match="its rule returned Tensor, not an Inter"):
        acert.interval_bounds(Apply(torch.sinc), torch.zeros(1, 2), torch.ones(1, 2))


def test_a_registered_rule_is_widened_by_its_ulps(table):
    """By that many ulps of the sample's largest magnitude, and not much more."""
    acert.register_rule(torch.sinc, lambda box: box * 1.0, ulps=1000)
    box = Interval(torch.tensor([[1.0, 8.0]]).double(), torch.tensor([[2.0, 9.0]]).double())
    bounds = propagate(Apply(torch.sinc), box.within(BoundPass(FLOAT32)))
    widened = torch.cat([1.0 - bounds.lower[:, 0], bounds.upper[:, 0] - 2.0])
    assert bool((widened >= 1000 * 9.0 * 2.0**-23).all())
    assert bool((widened <= 1020 * 9.0 * 2.0**-23).all())


@pytest.mark.parametrize("rule", [lambda box, _: box, lambda _, box: box])
def test_a_rule_that_returns_what_it_was_given_is_widened_too(table, rule):
    acert.register_rule(torch.maximum, rule, ulps=1000)
    ones = torch.ones(1, 2, dtype=torch.float64)
    box = Interval(ones, 2 * ones).within(BoundPass(FLOAT32, record=True))
    bounds = torch.maximum(box, box)
    assert bool((bounds.upper >= 2 + 1000 * 2 * 2.0**-23).all())
    assert bounds.source is not None
    assert box.upper.tolist() == [[2.0, 2.0]]


def test_what_comes_behind_inplace_by_place_reaches_the_rule(table):
    def scaled(x, inplace=False, factor=1.0):
        return x * factor

    acert.register_rule(scaled, lambda box, factor=1.0: box * factor, ulps=2)
    box = Interval(torch.zeros(1, 2), torch.ones(1, 2))
    found = Interval.__torch_function__(scaled, (), (box, True, 3.0))
    assert found is box
    assert found.upper.tolist() == [[3.0, 3.0]]


def test_elision_sees_the_rounding_of_a_registered_rule(table):
    """A rule that ends in a linear layer does not lend its own errors to that layer."""
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    acert.register_rule(torch.sinc, lambda box: F.linear(box, weight), ulps=1000)
    image, label = torch.tensor([[0.25, 0.5]], dtype=torch.float64), torch.tensor([1])
    radius = torch.tensor([0.1], dtype=torch.float64)
    with pytest.raises(acert.UnsupportedOperation, match=r"the last one was .*sinc"):
        proven_margin(Apply(torch.sinc), image, label, radius, rounding=FLOAT32)


def test_elision_does_not_take_a_registered_rule_for_its_linear_layer(table):
    """Twice the least and once the greatest element: both in the hull, but not at one point."""

    def rule(box):
        hull = Interval(box.lower.amin(1, keepdim=True), box.upper.amax(1, keepdim=True))
        return F.linear(hull, torch.tensor([[2.0], [1.0]]))

    acert.register_rule(torch.sinc, rule, ulps=4)
    image, label = torch.full((1, 4), 0.5), torch.tensor([0])
    with pytest.raises(acert.UnsupportedOperation, match=r"the last one was .*sinc"):
        acert.certified_margin(Apply(torch.sinc), image, label, 0.3)
    # Least 0.25 and greatest 0.75 are inside, and give another class: 0.5 and 0.75.
    assert acert.certified_margin(Apply(torch.sinc), image, label, 0.25, elide=False) >= 0.25


def test_a_registered_rule_that_bounds_another_function_is_noticed(table):
    acert.register_rule(torch.sinc, lambda box: F.relu(box), ulps=4)
    model = nn.Sequential(nn.Linear(2, 3), Apply(torch.sinc), nn.Linear(3, 2))
    with pytest.raises(acert.UnsupportedOperation, match="or a registered rule is wrong"):
        acert.certified_radius(model, torch.rand(4, 2), max_radius=0.1)


@pytest.mark.parametrize(
    "rule",
    [
        lambda box: Interval(box.lower.reciprocal(), box.upper.reciprocal()),
        lambda box: Interval.ball(box.center.reciprocal(), box.upper.reciprocal() - 1),
        lambda box: (Interval(box.lower.reciprocal(), box.upper.reciprocal()),),
    ],
)
def test_a_registered_rule_with_swapped_ends_is_refused(table, rule):
    """A negative radius makes later ones smaller, and certificates larger than they are."""
    acert.register_rule(torch.reciprocal, rule, ulps=4)
    reason = r"torch.reciprocal: its rule returned lower ends above upper ones, .*falling function"
    with pytest.raises(acert.UnsupportedOperation, match=reason):
        acert.interval_bounds(Apply(torch.reciprocal), torch.ones(1, 2), torch.full((1, 2), 2.0))
    model = nn.Sequential(Apply(lambda x: torch.reciprocal(x + 1)), nn.Linear(2, 2))
    with pytest.raises(acert.UnsupportedOperation, match=reason):
        acert.certified_radius(model, torch.rand(4, 2), max_radius=0.1)


def test_ends_that_only_rounding_swaps_are_no_reason_to_refuse_a_rule(table):
    def rule(box):
        lower, upper = (end.sin().asin() for end in (box.lower, box.upper))
        return Interval(torch.nextafter(lower, lower + 1), torch.nextafter(upper, upper - 1))

    acert.register_rule(torch.sinc, rule, ulps=4)
    point = torch.rand(2, 8, dtype=torch.float64)
    bounds = propagate(Apply(torch.sinc), Interval(point, point).within(BoundPass(REAL)))
    assert bool(((bounds.lower <= point) & (point <= bounds.upper)).all())


@pytest.mark.parametrize("cast", [lambda x: x.float(), lambda x: x.detach()])
def test_casts_that_lose_nothing_change_nothing(cast):
    layer = nn.Linear(3, 2)
    lower, upper = torch.zeros(1, 3), torch.ones(1, 3)
    plain = acert.interval_bounds(layer, lower, upper)
    bounds = acert.interval_bounds(Apply(lambda x: cast(layer(x))), lower, upper)
    assert torch.equal(bounds.lower, plain.lower)
    assert torch.equal(bounds.upper, plain.upper)


def blocks_of_the_page():
    page = Path(__file__).parents[1] / "docs" / "adding-a-layer.md"
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_every_layer_that_the_page_names_is_in_the_catalogue():
    page = Path(__file__).parents[1] / "docs" / "adding-a-layer.md"
    named = set(re.findall(r"`((?:nn|torch|F)\.\w+)`", page.read_text().split("\n## ")[1]))
    tested = {word for case in CASES for word in re.findall(r"\w+\.\w+", case.expression)}
    if any(case.expression.startswith("Attending(") for case in CASES):
        tested.add("nn.MultiheadAttention")  # in that wrapper, since it returns a tuple
    assert len(named) > 20
    assert named - tested == {"torch.compile"}


def test_the_documented_rule_works(table):
    blocks = blocks_of_the_page()
    assert sum(bool(line.strip()) for line in blocks[0].splitlines()) <= 10
    names = {}
    for block in blocks:
        exec(block, names)
    assert torch.cosh in table
    for around, r in (((-4.0, 4.0), 3.0), ((-0.1, 0.1), 0.2)):
        assert_sound_and_tight(Case("torch.cosh(x)", (5,), around=around, r=r, gap=1e-4))


def test_the_documented_rule_is_not_left_behind():
    assert torch.cosh not in RULES
    with pytest.raises(acert.UnsupportedOperation, match=r"torch\.cosh"):
        acert.interval_bounds(Apply(torch.cosh), torch.zeros(1, 2), torch.ones(1, 2))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"stride": 2, "padding": 1},
        {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
        {"padding": "same", "dilation": 3},
        {"padding": "valid"},
    ],
)
def test_a_convolution_by_one_matrix_product_is_the_convolution(how, bias):
    """On CUDA the proven passes run it; float64, where every order of summation is close."""
    x = torch.rand(3, 4, 9, 8, dtype=torch.float64) - 0.5
    weight = torch.rand(5, 4, 2, 3, dtype=torch.float64) - 0.5
    shift = torch.rand(5, dtype=torch.float64) if bias else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch about an even kernel with padding "same"
        expected = torch.conv2d(x, weight, shift, **how)
    assert torch.allclose(convolution_by_matmul(x, weight, shift, **how), expected, atol=1e-14)


@pytest.mark.parametrize(
    ("function", "shape", "kernel", "how"),
    [
        (F.conv1d, (7, 4, 9), (2, 4, 3), {"stride": 2}),
        (F.conv2d, (7, 4, 6, 5), (6, 4, 3, 3), {"padding": 1}),
        (F.conv2d, (7, 4, 6, 5), (6, 2, 3, 2), {"groups": 2, "dilation": (1, 2)}),
        (F.conv2d, (7, 4, 6, 5), (6, 4, 3, 3), {"padding": "same"}),
        (F.conv2d, (1, 4, 6, 5), (6, 4, 3, 3), {"stride": (2, 1)}),
        (F.conv3d, (5, 2, 4, 4, 4), (3, 2, 2, 2, 2), {"padding": (0, 1, 0)}),
    ],
)
def test_convolutions_in_pieces_are_those_of_all_samples(function, shape, kernel, how, monkeypatch):
    monkeypatch.setattr(affine_rules, "_PATCHES", 1)
    pieces = []
    monkeypatch.setattr(
        affine_rules.torch, "split", lambda x, size: pieces.extend(parts := x.split(size)) or parts
    )
    torch.manual_seed(0)
    center, radius = torch.randn(shape).double(), torch.rand(shape).double()
    weight, bias = torch.randn(kernel).double(), torch.randn(kernel[0]).double()
    with torch.no_grad():
        found = function(Interval.ball(center, radius), weight, bias, **how)
    assert len(pieces) == 2 * -(-shape[0] // torch.get_num_threads())
    torch.testing.assert_close(found.center, function(center, weight, bias, **how))
    torch.testing.assert_close(found.radius, function(radius, weight.abs(), **how))
