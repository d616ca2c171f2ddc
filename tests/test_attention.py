"""Softmax and attention: ends at corners, safe against overflow, in balls and in float32."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from flint import arb
from tests import ball
from tests.rule_cases import NAMES, Apply, Attending, Case, probe, sampled, subject
from torch import nn

import acert
from acert.bounds import Interval, propagate
from acert.bounds.bound_pass import BoundPass
from acert.bounds.propagation import evaluation_logits
from acert.bounds.rounding import FLOAT32, REAL


def exactly(rows):
    """The softmax of each row of float64 numbers, in balls."""
    found = []
    for row in ball.array(rows):
        # A shift keeps exponentials of balls in range and changes nothing.
        powers = [(x - max(row, key=lambda each: float(each.mid()))).exp() for x in row]
        total = sum(powers, arb(0))
        found += [power / total for power in powers]
    return ball._array(found, rows.shape)


def boxes(count, *, scale, r, rows=4):
    center = scale * torch.randn(rows, count, dtype=torch.float64)
    radius = r * torch.rand(rows, count, dtype=torch.float64)
    return (center - radius).float().double(), (center + radius).float().double()


def bounds_of(lower, upper, rounding=None):
    return F.softmax(Interval(lower, upper).within(BoundPass(rounding)), -1)


def test_both_ends_are_reached_at_corners():
    lower, upper = boxes(4, scale=1.0, r=1.0)
    bounds = bounds_of(lower, upper)
    shares = [torch.tensor(choice) for choice in itertools.product((0.0, 1.0), repeat=4)]
    values = torch.stack([(lower + share * (upper - lower)).softmax(-1) for share in shares])
    torch.testing.assert_close(bounds.lower, values.amin(0))
    torch.testing.assert_close(bounds.upper, values.amax(0))


@pytest.mark.parametrize("r", [0.0, 1e-7, 1.0, 50.0, 900.0])
@pytest.mark.parametrize("scale", [1e-3, 3.0, 100.0, 1000.0])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_exact_values_are_inside(count, scale, r):
    lower, upper = boxes(count, scale=scale, r=r)
    bounds = bounds_of(lower, upper, REAL)
    assert bool((bounds.lower >= 0).all())
    assert bool((bounds.upper <= 1 + 1e-9).all())
    for points in sampled(lower, upper, 6):
        values = exactly(points)
        assert ball.inside(values, bounds.lower, bounds.upper, torch.zeros_like(lower))
    # The corner that each end stands for, where rounding is not hidden by the width.
    for element in range(count):
        for ends in ((lower, upper), (upper, lower)):
            points = ends[1].clone()
            points[:, element] = ends[0][:, element]
            values = exactly(points)
            assert ball.inside(values, bounds.lower, bounds.upper, torch.zeros_like(lower))


def with_a_running_maximum(x):
    """One pass over the row, as kernels that never hold it whole."""
    top, total = x[:, 0], torch.ones_like(x[:, 0])
    for value in x.unbind(1)[1:]:
        new = torch.maximum(top, value)
        total, top = total * (top - new).exp() + (value - new).exp(), new
    return (x - top.unsqueeze(1)).exp() / total.unsqueeze(1)


def by_powers_of_two(x):
    scaled = x * (1 / math.log(2))
    powers = torch.exp2(scaled - scaled.amax(1, keepdim=True))
    return powers * (1 / powers.sum(1, keepdim=True))


def by_logarithm(x):
    return (x - x.logsumexp(1, keepdim=True)).exp()


def directly(x):
    return F.softmax(x, 1)


@pytest.mark.parametrize(
    "evaluated", [directly, with_a_running_maximum, by_powers_of_two, by_logarithm]
)
@pytest.mark.parametrize("r", [0.0, 1e-7, 1.0])
@pytest.mark.parametrize("scale", [1e-3, 3.0, 100.0, 5000.0])
@pytest.mark.parametrize("count", [1, 2, 9, 300])
def test_every_float32_evaluation_is_inside(count, scale, r, evaluated):
    lower, upper = boxes(count, scale=scale, r=r)
    bounds = bounds_of(lower, upper, FLOAT32)
    assert bool(bounds.upper.isfinite().all())
    for points in sampled(lower.float(), upper.float(), 6):
        value = evaluated(points).double()
        assert bool((value >= bounds.lower).all())
        assert bool((value <= bounds.upper).all())


def test_nothing_is_proven_where_float32_cannot_tell_logits_apart():
    lower = torch.tensor([[1e6, 1e6 + 0.01]]).double()
    assert bounds_of(lower, lower, FLOAT32).upper.isnan().all()
    assert bounds_of(lower, lower, REAL).upper.isfinite().all()


@pytest.mark.parametrize("rounding", [REAL, FLOAT32], ids=["real", "float32"])
@pytest.mark.parametrize("far", [2e3, 1e9, 1e30])
def test_logits_far_below_cost_nothing(far, rounding):
    lower, upper = boxes(4, scale=1.0, r=0.5)
    lower[:, 2], upper[:, 2] = -far - 1, -far
    bounds = bounds_of(lower, upper, rounding)
    kept = [0, 1, 3]
    without = bounds_of(lower[:, kept], upper[:, kept], rounding)
    torch.testing.assert_close(bounds.upper[:, kept], without.upper, rtol=1e-4, atol=0)
    torch.testing.assert_close(bounds.lower[:, kept], without.lower, rtol=1e-4, atol=0)
    assert float(bounds.upper[:, 2].max()) < 1e-36
    for points in sampled(lower, upper, 6):
        assert ball.inside(exactly(points), bounds.lower, bounds.upper, torch.zeros_like(lower))


HIDDEN = torch.tensor([False, False, True, False])
HIDING = {
    "masked_fill": lambda x: x.masked_fill(HIDDEN, -math.inf),
    "where": lambda x: torch.where(HIDDEN, -math.inf, x),
    "the smallest number": lambda x: x.masked_fill(HIDDEN, torch.finfo(x.dtype).min),
    "a sum": lambda x: x + torch.zeros(4).masked_fill(HIDDEN, -math.inf),
    "a difference": lambda x: x - torch.zeros(4).masked_fill(HIDDEN, math.inf),
}


@pytest.mark.parametrize("rounding", [None, REAL, FLOAT32], ids=["plain", "real", "float32"])
@pytest.mark.parametrize("hiding", HIDING)
def test_minus_infinity_hides_a_place_and_costs_nothing(hiding, rounding):
    lower, upper = (end.requires_grad_() for end in boxes(4, scale=1.0, r=0.5))
    bounds = HIDING[hiding](Interval(lower, upper).within(BoundPass(rounding))).softmax(-1)
    without = bounds_of(lower[:, ~HIDDEN], upper[:, ~HIDDEN], rounding)
    torch.testing.assert_close(bounds.upper[:, ~HIDDEN], without.upper, rtol=1e-4, atol=0)
    torch.testing.assert_close(bounds.lower[:, ~HIDDEN], without.lower, rtol=1e-4, atol=0)
    assert float(bounds.upper[:, HIDDEN].detach().abs().max()) < 1e-36
    for gradient in torch.autograd.grad((bounds.upper - bounds.lower).sum(), (lower, upper)):
        assert bool(gradient.isfinite().all())
    for points in sampled(lower.detach(), upper.detach(), 6):
        values = HIDING[hiding](points).softmax(-1)
        assert bool((bounds.lower - 1e-12 <= values).all())
        assert bool((values <= bounds.upper + 1e-12).all())


def test_minus_infinity_hides_no_overflow():
    # 3e38 may be infinite in a network, and infinity less infinity is no number.
    box = Interval(*[torch.full((1, 4), 3e38, dtype=torch.float64)] * 2).within(BoundPass(FLOAT32))
    assert bool(HIDING["a sum"](box).upper.isnan().all())


def test_bounds_and_gradients_of_wide_boxes_are_numbers():
    lower = torch.tensor([[-1e4, 0.0, 5.0], [0.0, 1e4, -1e4]], requires_grad=True)
    upper = torch.tensor([[1e4, 0.0, 6.0], [1e4, 2e4, 3e4]], requires_grad=True)
    bounds = bounds_of(lower, upper)
    assert bool((bounds.lower <= bounds.upper).all())
    for gradient in torch.autograd.grad((bounds.upper - bounds.lower).sum(), (lower, upper)):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("F.softmax(x)", "`dim` must be given; got None"),
        ("x.softmax(1, torch.float16)", "it must not lose precision; got torch.float16"),
        (
            "F.scaled_dot_product_attention(x, x, x, torch.ones(3, 3), is_causal=True)",
            "`attn_mask` must be None where `is_causal` is True",
        ),
        ("F.scaled_dot_product_attention(x, x, x, x)", "masks must not depend on the model's"),
        ("F.scaled_dot_product_attention(x, x, x, None, 0.1)", "random where `dropout_p` is not 0"),
        ("F.scaled_dot_product_attention(x, x, x, enable_gqa=True)", "`enable_gqa` must be False"),
        ("nn.MultiheadAttention(4, 2, 0.1).train()(x, x, x)[0]", "it is random in training"),
        ("nn.TransformerEncoderLayer(4, 2).train()(x)", "multi_head_.*: it is random in training"),
        ("nn.MultiheadAttention(4, 2, add_bias_kv=True)(x, x, x)[0]", "`add_bias_kv` must be left"),
        ("nn.MultiheadAttention(4, 2, add_zero_attn=True)(x, x, x)[0]", "`add_zero_attn` must be"),
        (
            "nn.MultiheadAttention(4, 2)(x, x, x, is_causal=True)[0]",
            "`attn_mask` must be given with `is_causal`",
        ),
        (
            "nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, batch_first=True), 1).eval()"
            "(x, src_key_padding_mask=torch.zeros(2, 3).bool())",
            "nn.TransformerEncoder: a padding mask .* build it with `enable_nested_tensor=False`",
        ),
    ],
)
def test_what_has_no_bounds_is_refused(expression, message):
    model = Case(expression, (3, 4)).build()
    with pytest.raises(acert.UnsupportedOperation, match=message):
        acert.interval_bounds(model, torch.zeros(2, 3, 4), torch.ones(2, 3, 4))


def test_crown_refuses_attention_by_name():
    model = nn.Sequential(Attending("y, y, y"), nn.Linear(21, 3)).eval()
    with pytest.raises(acert.UnsupportedOperation, match=r"multi_head_.*: CROWN has no backward"):
        acert.certified_radius(model, torch.rand(2, 3, 4), max_radius=0.1, bounds="crown-ibp")


@pytest.mark.parametrize("scale", [None, 2.5])
def test_attention_encloses_float32_kernels_and_its_written_form(scale):
    def fused(x):
        return F.scaled_dot_product_attention(x, 2 * x, x - 1, scale=scale)

    def written(x):
        weights = torch.matmul(x, (2 * x).mT) * (scale or 1 / math.sqrt(8))
        return torch.matmul(weights.softmax(-1), x - 1)

    x = torch.randn(2, 3, 70, 8)
    exact = Interval(x.double(), x.double()).within(BoundPass(FLOAT32))
    bounds = propagate(Apply(fused), exact)
    for computed in (fused(x), written(x), fused(x.double())):
        assert bool(((computed >= bounds.lower) & (computed <= bounds.upper)).all())
    assert float((bounds.upper - bounds.lower).max()) < 0.02


def test_attention_proves_nothing_where_scaled_queries_overflow():
    query, key = torch.full((1, 2, 2), 1e19).double(), torch.full((1, 2, 2), 1e-19).double()
    key = Interval(key, key).within(BoundPass(FLOAT32))
    for scale, proven in ((1.0, True), (1e20, False)):
        assert bool(attention_of(query, key, scale).upper.isfinite().all()) == proven


def test_attention_proves_nothing_where_the_values_overflow_before_they_are_averaged():
    query, value = torch.zeros(1, 1, 8, 4), torch.full((1, 1, 8, 4), 5e37)
    assert F.scaled_dot_product_attention(query, query, value).isinf().any()
    for size, rounding, proven in (
        (5e37, FLOAT32, False),
        (1e37, FLOAT32, True),
        (5e37, REAL, True),
    ):
        values = torch.full((1, 1, 8, 4), size).double()
        values = Interval(values, values).within(BoundPass(rounding))
        bounds = F.scaled_dot_product_attention(query, query, values)
        assert bool(bounds.upper.isfinite().all()) == proven


def attention_of(query, key, scale):
    return F.scaled_dot_product_attention(query, key, key, scale=scale)


# -- masks, several heads, encoders ---------------------------------------------------------


def written(attention, x, seen):
    """The attention of each place on the places of `seen`, (places, places), by softmax alone."""
    weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    query, key, value = (
        F.linear(x, w, b).unflatten(-1, (2, -1)).transpose(1, 2)
        for w, b in zip(weights, biases, strict=True)
    )
    rows = []
    for place, row in enumerate(seen):
        at = row.nonzero().flatten().tolist()
        keys, values = key[:, :, at], value[:, :, at]
        scores = torch.matmul(query[:, :, place : place + 1], keys.mT) / math.sqrt(2)
        rows.append(torch.matmul(scores.softmax(-1), values))
    mixed = torch.cat(rows, 2).transpose(1, 2).flatten(2)
    return attention.out_proj(mixed)


SEEN = torch.ones(3, 3).tril().bool()
MASKS = {
    "boolean": ~SEEN,
    "minus infinity": torch.zeros(3, 3).masked_fill(~SEEN, -math.inf),
    "-1e9": torch.zeros(3, 3).masked_fill(~SEEN, -1e9),
    "the least float32": torch.zeros(3, 3).masked_fill(~SEEN, torch.finfo(torch.float32).min),
    "none": None,
}


def attending(mask, **keywords):
    """An attention of two heads with such a mask, and the same one written by hand."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    nn.init.normal_(attention.in_proj_bias)
    seen = torch.ones(3, 3) if mask is None else SEEN
    whole = Apply(lambda x: attention(x, x, x, attn_mask=mask, **keywords)[0])
    return whole, Apply(lambda x: written(attention, x, seen))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("rounding", [None, REAL, FLOAT32], ids=["plain", "real", "float32"])
@pytest.mark.parametrize("name", MASKS)
def test_bounds_are_those_of_the_places_that_are_seen(name, rounding, need_weights):
    whole, by_hand = attending(MASKS[name], need_weights=need_weights)
    x = torch.randn(2, 3, 4).double()
    box = Interval(x - 0.1, x + 0.1).within(BoundPass(rounding))
    bounds, expected = (propagate(model, box) for model in (whole, by_hand))
    rtol, atol = (1e-3, 1e-4) if rounding is FLOAT32 else (1e-9, 1e-9)
    torch.testing.assert_close(bounds.lower, expected.lower, rtol=rtol, atol=atol)
    torch.testing.assert_close(bounds.upper, expected.upper, rtol=rtol, atol=atol)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_the_point_is_the_models_own_output_on_every_path(name, need_weights):
    whole, by_hand = attending(MASKS[name], need_weights=need_weights)
    x = torch.randn(2, 3, 4)
    exact = Interval(x.double(), x.double()).within(BoundPass(FLOAT32))
    bounds = propagate(whole, exact)
    with torch.no_grad():
        fast = whole(x)  # PyTorch fuses the whole layer where nothing has gradients
        outputs = [fast, by_hand(x), torch.compile(whole, backend="aot_eager")(x)]
    for output in (whole(x), *outputs):
        assert bool(((output >= bounds.lower) & (output <= bounds.upper)).all())
    point = acert.interval_bounds(whole, x, x)
    torch.testing.assert_close(point.lower, fast, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(point.upper, fast, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hiding", [torch.ones(3, 3).bool(), torch.full((3, 3), -3e38)])
def test_nothing_is_known_where_nothing_is_seen(hiding):
    hiding[1:] = 0
    whole, _ = attending(hiding)
    x = torch.randn(2, 3, 4).double()
    # Of finite masks a pass that proves nothing knows what float64 makes of them.
    for rounding in (REAL, FLOAT32) if hiding.dtype != torch.bool else (None, REAL, FLOAT32):
        bounds = propagate(whole, Interval(x, x).within(BoundPass(rounding)))
        assert bool(bounds.upper[:, 0].isnan().all())
        assert bool(bounds.upper[:, 1:].isfinite().all())


LAYER = "nn.TransformerEncoderLayer(4, {}, 6, layer_norm_eps=0.5, batch_first=True{})"
ENCODERS = [
    LAYER.format(2, ""),
    LAYER.format(2, ", norm_first=True, activation='gelu'"),
    LAYER.format(1, ", activation=F.gelu, bias=False"),
    f"nn.TransformerEncoder({LAYER.format(2, '')}, 1)",
    f"nn.TransformerEncoder({LAYER.format(2, ', norm_first=True')}, 2, nn.LayerNorm(4, 0.5), 0)",
    f"Decoding({LAYER.format(2, '').replace('En', 'De')})",
]


class Decoding(nn.Module):
    """The first place of a sample decoded by the others."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x[:, :1], x[:, 1:])


@pytest.mark.parametrize("expression", ENCODERS)
def test_no_point_leaves_the_bounds_of_an_encoder(expression, monkeypatch):
    monkeypatch.setitem(NAMES, "Decoding", Decoding)
    probed = subject(Case(expression, (3, 4), r=0.02))
    found = probe(probed, points=4_000, attacks=400)
    assert found.float64 >= -1e-12
    assert found.float32 >= -1e-5
    assert found.safe_real >= 0
    assert found.safe_float32 >= 0
    assert found.missed < 0.9


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_makes_padding_0_without_gradients_is_not_certified():
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, mask_check=False)
    hidden = torch.tensor([[False, False, True]])
    model = Apply(lambda x: encoder(x, src_key_padding_mask=hidden.expand(len(x), -1)).flatten(1))
    model.encoder = encoder.eval()
    images = torch.rand(2, 3, 4)
    with pytest.raises(acert.UnsupportedOperation, match=r"mha.set_fastpath_enabled\(False\)"):
        acert.certified_radius(model, images, max_radius=0.1, elide=False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        acert.certified_radius(model, images, max_radius=0.1, elide=False)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_dropout_of_attention_is_off_where_evaluation_is_asked_for():
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 6, 0.5, batch_first=True), nn.Flatten())
    x = torch.rand(2, 3, 4)
    wanted = model.eval()(x)
    torch.testing.assert_close(evaluation_logits(model.train(), x), wanted)
