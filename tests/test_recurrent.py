"""Recurrent layers: by hand, at a point, attacked, in float32, trained, and left as found."""

import copy
import math
import threading
import warnings

import numpy as np
import pytest
import torch
from flint import arb
from tests import ball
from tests.rule_cases import Apply, sampled
from tests.test_transformers import flips
from torch import nn
from torch.nn.utils import parametrizations

import acert
from acert.bounds import Interval, propagate
from acert.bounds.bound_pass import BoundPass
from acert.bounds.propagation import evaluation_logits
from acert.bounds.rounding import FLOAT32, REAL

LAYERS = [nn.RNN, nn.LSTM, nn.GRU]
CELLS = [nn.RNNCell, nn.LSTMCell, nn.GRUCell]


def bounds_of(function, lower, upper, rounding=None):
    return function(Interval(lower, upper).within(BoundPass(rounding)))


def filled(module, **values):
    """The module with constant parameters, 0 unless they are named."""
    for name, parameter in module.named_parameters():
        nn.init.constant_(parameter, values.get(name, 0.0))
    return module


class Reading(nn.Module):
    """A classifier of sequences by the last place of the output, or by the last hidden state."""

    def __init__(self, layer, *, by="output"):
        super().__init__()
        self.layer, self.by = layer, by
        self.head = nn.LazyLinear(3)
        with torch.no_grad():
            self(torch.zeros(2, 4, layer.input_size))

    def forward(self, x):
        output, states = self.layer(x if self.layer.batch_first else x.transpose(0, 1))
        if self.by == "state":
            hidden = states[0] if isinstance(states, tuple) else states
            return self.head(hidden[-1])
        return self.head(output[:, -1] if self.layer.batch_first else output[-1])


class Looping(nn.Module):
    """A classifier that calls a cell place by place, with its own state or none to start with."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell, nn.Linear(cell.hidden_size, 3)

    def forward(self, x):
        state = None
        for place in x.unbind(1):
            state = self.cell(place, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


CLASSIFIERS = {
    "rnn": lambda: Reading(nn.RNN(2, 6, batch_first=True)),
    "rnn, relu": lambda: Reading(nn.RNN(2, 6, nonlinearity="relu"), by="state"),
    "lstm": lambda: Reading(nn.LSTM(2, 6, batch_first=True)),
    "lstm, two ways": lambda: Reading(nn.LSTM(2, 4, 2, bidirectional=True), by="state"),
    "lstm, projected": lambda: Reading(nn.LSTM(2, 6, proj_size=3)),
    "gru": lambda: Reading(nn.GRU(2, 6, batch_first=True), by="state"),
    "gru, two layers": lambda: Reading(nn.GRU(2, 4, 2)),
    "rnn cell": lambda: Looping(nn.RNNCell(2, 6)),
    "lstm cell": lambda: Looping(nn.LSTMCell(2, 6)),
    "gru cell": lambda: Looping(nn.GRUCell(2, 6)),
}


def sequences(count):
    """Noisy copies of three sequences, each the same in all places."""
    labels = torch.arange(count) % 3
    whole = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])[labels].unsqueeze(1)
    return 0.7 * whole + 0.3 * torch.rand(count, 4, 2), labels


# -- by hand --------------------------------------------------------------------------------


def test_a_relu_step_by_hand():
    cell = filled(nn.RNNCell(2, 1, nonlinearity="relu"), weight_ih=2.0, bias_ih=1.0, bias_hh=-3.0)
    cell.weight_hh.data.fill_(-1.0)
    state = Interval(torch.tensor([[1.0]]), torch.tensor([[2.0]]))
    found = cell(Interval(torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 3.0]])), state)
    # 2 (x + y) - h - 2, between 2 - 2 - 2 and 8 - 1 - 2
    assert (found.lower.item(), found.upper.item()) == (0.0, 5.0)


def test_a_relu_layer_by_hand():
    """Each place adds its input to the state: running sums, of a constant start too."""
    layer = filled(nn.RNN(1, 1, nonlinearity="relu", batch_first=True),
                   weight_ih_l0=1.0, weight_hh_l0=1.0)  # fmt: skip
    lower, upper = torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[[2.0], [2.0], [5.0]]])
    output, last = bounds_of(layer, lower, upper)
    assert output.lower.flatten().tolist() == [1.0, 3.0, 6.0]
    assert output.upper.flatten().tolist() == [2.0, 4.0, 9.0]
    assert (last.lower.tolist(), last.upper.tolist()) == ([[[6.0]]], [[[9.0]]])
    output, _ = layer(Interval(lower, upper), torch.full((1, 1, 1), 10.0))
    assert output.upper.flatten().tolist() == [12.0, 14.0, 19.0]


def test_an_lstm_step_by_hand():
    """Gates by their biases alone: c' = f c + i g and h' = o tanh(c')."""
    cell = filled(nn.LSTMCell(1, 1))
    cell.bias_ih.data = torch.tensor([0.5, -0.5, 2.0, 1.0])
    state = [Interval(torch.tensor([[low]]), torch.tensor([[high]]))
             for low, high in ((-1.0, 1.0), (-1.0, 3.0))]  # fmt: skip
    hidden, memory = cell(torch.zeros(1, 1), tuple(state))
    enter, keep, new, leave = cell.bias_ih.sigmoid()
    new = torch.tanh(cell.bias_ih[2])
    ends = -1 * keep + enter * new, 3 * keep + enter * new
    torch.testing.assert_close((memory.lower[0, 0], memory.upper[0, 0]), ends)
    torch.testing.assert_close(
        (hidden.lower[0, 0], hidden.upper[0, 0]), tuple(leave * end.tanh() for end in ends)
    )


def test_a_gru_step_by_hand():
    """The update lies between old and new state, whichever is larger: no wider than both."""
    cell = filled(nn.GRUCell(1, 1))
    cell.weight_ih.data = torch.tensor([[0.0], [1.0], [0.0]])
    cell.bias_ih.data = torch.tensor([0.0, 0.0, 0.5])
    lower, upper = torch.tensor([[-2.0]]), torch.tensor([[1.0]])
    new = math.tanh(0.5)
    least, most = (end.sigmoid().item() for end in (lower, upper))
    for low, high in ((-1.0, 0.2), (0.6, 0.9), (0.0, 2.0)):
        state = Interval(torch.tensor([[low]]), torch.tensor([[high]]))
        found = cell(Interval(lower, upper), state)
        ends = [[(1 - z) * new + z * h for z in (least, most)] for h in (low, high)]
        assert found.lower.item() == pytest.approx(min(ends[0]), abs=1e-6)
        assert found.upper.item() == pytest.approx(max(ends[1]), abs=1e-6)


# -- at a point -----------------------------------------------------------------------------

OPTIONS = [
    {"num_layers": layers, "bias": bias, "batch_first": first, "bidirectional": both}
    for layers in (1, 2) for bias in (True, False) for first in (True, False)
    for both in (True, False)
]  # fmt: skip


def flat(result):
    return [part for each in result for part in (each if isinstance(each, tuple) else (each,))]


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("layer", [*LAYERS, "projected", "relu"])
def test_bounds_of_a_point_are_what_the_layer_returns(layer, started):
    extra = {"projected": {"proj_size": 2}, "relu": {"nonlinearity": "relu"}}.get(layer, {})
    kind = {"projected": nn.LSTM, "relu": nn.RNN}.get(layer, layer)
    for options in OPTIONS:
        module = kind(3, 4, dropout=0.0, **options, **extra).double()
        x = torch.randn(2, 5, 3).double()
        count = module.num_layers * (2 if module.bidirectional else 1)
        hx = None
        if started:
            samples = x.shape[0 if module.batch_first else 1]
            hx = torch.randn(count, samples, extra.get("proj_size", 4)).double()
            hx = (hx, torch.randn(count, samples, 4).double()) if kind is nn.LSTM else hx
        found, wanted = module(Interval(x, x), hx), module(x, hx)
        assert isinstance(found[1], tuple) == isinstance(wanted[1], tuple)
        for bounds, value in zip(flat(found), flat(wanted), strict=True):
            torch.testing.assert_close(bounds.lower, value)
            torch.testing.assert_close(bounds.upper, value)


@pytest.mark.parametrize("layer", LAYERS)
def test_one_sequence_alone_has_the_bounds_it_has_in_a_batch(layer):
    for first in (True, False):
        module = layer(3, 4, 2, batch_first=first, bidirectional=True)
        lower, axis = torch.randn(5, 3), 0 if first else 1
        hx = torch.randn(4, 4)
        hx = (hx, hx.flip(0)) if layer is nn.LSTM else hx
        alone = flat(module(Interval(lower, lower + 0.1), hx))
        batch = Interval(lower.unsqueeze(axis), lower.unsqueeze(axis) + 0.1)
        hx = tuple(x.unsqueeze(1) for x in hx) if layer is nn.LSTM else hx.unsqueeze(1)
        for one, part, at in zip(alone, flat(module(batch, hx)), (axis, 1, 1), strict=False):
            torch.testing.assert_close(one.ends(), tuple(x.squeeze(at) for x in part.ends()))


@pytest.mark.parametrize("cell", CELLS)
def test_one_step_alone_has_the_bounds_it_has_in_a_batch(cell):
    module, lower = cell(3, 4), torch.randn(3)
    alone = flat([module(Interval(lower, lower + 0.1))])
    batch = flat([module(Interval(lower[None], lower[None] + 0.1))])
    for one, part in zip(alone, batch, strict=True):
        torch.testing.assert_close(one.ends(), tuple(x.squeeze(0) for x in part.ends()))


@pytest.mark.parametrize("cell", CELLS)
def test_a_layer_is_its_cell_step_by_step(cell):
    module = cell(3, 4)
    layer = LAYERS[CELLS.index(cell)](3, 4)
    for name, parameter in module.named_parameters():
        getattr(layer, f"{name}_l0").data = parameter.data
    lower = torch.randn(5, 2, 3)
    for rounding in (None, REAL, FLOAT32):
        box = Interval(lower.double(), lower.double() + 0.1).within(BoundPass(rounding))
        state = None
        for place in box.unbind(0):
            state = module(place, state)
        wanted = flat(copy.deepcopy(layer).double()(box)[1:])
        for one, part in zip(flat([state]), wanted, strict=True):
            torch.testing.assert_close(one.ends(), tuple(x[0] for x in part.ends()))


# -- sound ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_no_attack_inside_the_certified_radii(name):
    model = CLASSIFIERS[name]().eval()
    images, _ = sequences(16)
    values = {
        arithmetic: acert.certified_radius(model, images, max_radius=0.5, arithmetic=arithmetic)
        for arithmetic in ("nearest", "real", "float32")
    }
    plain, real, single = (result.value for result in values.values())
    assert bool((real > 0).all())
    assert bool((single > 0).all())
    assert bool((single <= real).all())
    torch.testing.assert_close(real, plain, rtol=1e-4, atol=0)
    for result in (values["real"], values["float32"]):
        assert flips(model, images, result.prediction, result.value) == 0


def lstm_step(x, h, c, weight, *, order, clip=None):
    """One step in float32, a sum in the given order of its summands, biases among them."""
    products = weight * torch.cat([x, h, torch.ones(len(x), 2)], 1).unsqueeze(1)
    enter, keep, new, leave = products[..., order].cumsum(-1)[..., -1].chunk(4, 1)
    c = torch.sigmoid(keep) * c + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(c), c


def gru_step(x, h, weights, *, order, form):
    """One step in float32, in one of the forms that kernels have of the last line."""
    (w_ih, w_hh, b_ih, b_hh), size = weights, h.shape[1]
    joined = torch.cat([w_ih, w_hh, b_ih[:, None], b_hh[:, None]], 1)[: 2 * size]
    products = joined * torch.cat([x, h, torch.ones(len(x), 2)], 1).unsqueeze(1)
    r, z = products[..., order].cumsum(-1)[..., -1].sigmoid().chunk(2, 1)
    recalled = r * (h @ w_hh[2 * size :].T + b_hh[2 * size :])
    n = recalled  # summed up first or last
    if form:
        for column, value in zip(w_ih[2 * size :].T, x.T, strict=True):
            n = n + column * value[:, None]
        n = n + b_ih[2 * size :]
    else:
        n = x @ w_ih[2 * size :].T + b_ih[2 * size :] + n
    n = torch.tanh(n)
    return [(1 - z) * n + z * h, n + z * (h - n), h + (1 - z) * (n - h)][form]


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_every_float32_evaluation_of_an_lstm_is_inside(scale, offset):
    """Sums in any order, of biases that cancel each other, and PyTorch's own kernels."""
    layer = nn.LSTM(3, 5)
    for parameter in layer.parameters():
        parameter.data.mul_(scale)
    layer.bias_ih_l0.data.add_(offset)
    layer.bias_hh_l0.data.sub_(offset)
    weight = torch.cat(
        [layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0[:, None],
         layer.bias_hh_l0[:, None]], 1,
    ).detach()  # fmt: skip
    center = torch.randn(4, 6, 3)
    lower, upper = center - 0.05, center + 0.05
    for low, high in ((lower, upper), (center, center)):
        output, (hidden, memory) = propagated(layer, low, high, FLOAT32)
        assert bool(output.upper.isfinite().all())
        for points in sampled(low, high, 10):
            with torch.no_grad():
                fused, (_, cell) = layer(points)
                with torch.backends.mkldnn.flags(enabled=False):
                    own, _ = layer(points)
            assert contains(output, fused)
            assert contains(output, own)
            assert contains(memory, cell)
            h = c = torch.zeros(6, 5)
            order = torch.randperm(weight.shape[1])
            for place in points:
                h, c = lstm_step(place, h, c, weight, order=order)
            assert contains(hidden, h[None])
            assert contains(memory, c[None])


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_every_float32_evaluation_of_a_gru_is_inside(scale, offset):
    layer = nn.GRU(3, 5)
    for parameter in layer.parameters():
        parameter.data.mul_(scale)
    layer.bias_ih_l0.data.add_(offset)
    layer.bias_hh_l0.data.sub_(offset)
    weights = [parameter.detach() for parameter in layer.parameters()]
    center, start = torch.randn(4, 6, 3), 100 * torch.randn(1, 6, 5)
    lower, upper = center - 0.05, center + 0.05
    for low, high in ((lower, upper), (center, center)):
        output, hidden = propagated(layer, low, high, FLOAT32, start)
        assert bool(output.upper.isfinite().all())
        for points in sampled(low, high, 10):
            with torch.no_grad():
                assert contains(output, layer(points, start)[0])
            for form in range(3):
                h = start[0]
                order = torch.randperm(10)
                for place in points:
                    h = gru_step(place, h, weights, order=order, form=form)
                assert contains(hidden, h[None])


class Whole(nn.Module):
    """A layer and what it starts with, its results handed out."""

    def __init__(self, layer, *start):
        super().__init__()
        self.layer, self.start, self.results = layer, start, None

    def forward(self, x):
        self.results = self.layer(x, *self.start)
        return self.results[0]


def propagated(layer, lower, upper, rounding, *start):
    model = Whole(layer, *start)
    propagate(model, Interval(lower.double(), upper.double()).within(BoundPass(rounding)))
    return model.results


def contains(bounds, values):
    return bool(((bounds.lower <= values.double()) & (values.double() <= bounds.upper)).all())


def exactly(kind, layer, points, start):
    """Output of a layer on (places, samples, inputs) points, in balls."""
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    w_ih, w_hh, b_ih, b_hh = (ball.array(getattr(layer, name)) for name in names)
    sigmoid = np.frompyfunc(lambda x: 1 / (1 + (-x).exp()), 1, 1)
    tanh = np.frompyfunc(lambda x: x.tanh(), 1, 1)
    relu = np.frompyfunc(lambda x: x.max(arb(0)), 1, 1)
    h, c, places = ball.array(start), ball.array(0 * start), []
    for x in ball.array(points):
        by_input, by_hidden = x.dot(w_ih.T) + b_ih, h.dot(w_hh.T) + b_hh
        if kind == "lstm":
            i, f, g, o = np.split(by_input + by_hidden, 4, 1)
            c = sigmoid(f) * c + sigmoid(i) * tanh(g)
            h = sigmoid(o) * tanh(c)
        elif kind == "gru":
            (r, z, n), (s, y, m) = (np.split(part, 3, 1) for part in (by_input, by_hidden))
            r, z = sigmoid(r + s), sigmoid(z + y)
            n = tanh(n + r * m)
            h = (1 - z) * n + z * h
        else:
            h = (relu if kind == "relu" else tanh)(by_input + by_hidden)
        places.append(h)
    return np.stack(places)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 20.0])
@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh", "relu"])
def test_exact_values_are_inside(kind, scale):
    makers = {"lstm": nn.LSTM, "gru": nn.GRU}
    how = {} if kind in makers else {"nonlinearity": kind}
    layer = makers.get(kind, nn.RNN)(3, 4, **how).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.data.mul_(scale)
    center, start = torch.randn(3, 2, 3), torch.randn(1, 2, 4)
    state = (start, torch.zeros_like(start)) if kind == "lstm" else start
    for share in (0.0, 1e-9, 0.1):
        low, high = center.double() - share, center.double() + share
        output, _ = propagated(layer, low, high, REAL, state)
        zero = torch.zeros_like(output.lower)
        assert bool(output.upper.isfinite().all())
        if not share:
            assert float((output.upper - output.lower).max()) < 1e-9 * max(1, scale) ** 3
        for points in sampled(low, high, 4):
            values = exactly(kind, layer, points, start[0])
            assert ball.inside(values, output.lower, output.upper, zero)


@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_is_proven_where_a_sum_may_overflow(layer):
    module = layer(2, 3)
    x = torch.full((1, 1, 2), 1e30)
    for factor, rounding, proven in ((1.0, FLOAT32, True), (1e10, FLOAT32, False),
                                     (1e10, REAL, True)):  # fmt: skip
        scaled = copy.deepcopy(module)
        scaled.weight_ih_l0.data.fill_(factor)
        output, _ = propagated(scaled, x, x, rounding)
        assert bool(output.upper.isfinite().all()) == proven
        assert bool(output.upper.isnan().all()) != proven


@pytest.mark.parametrize("layer", LAYERS)
def test_a_constant_start_is_rounded_by_the_network(layer):
    """In float64 here, and in float32 where the network runs."""
    module, x = layer(2, 3), torch.randn(2, 4, 2)
    start = 0.1 + torch.rand(1, 4, 3).double()
    state, rounded = start, start.float()
    if layer is nn.LSTM:
        state, rounded = (state, 50 * state), (rounded, (50 * state).float())
    output, _ = propagated(module, x, x, FLOAT32, state)
    assert contains(output, module(x, rounded)[0])


def test_a_state_that_float32_has_not_proves_nothing():
    module, x = nn.LSTM(2, 3), torch.zeros(1, 1, 2)
    state = torch.zeros(1, 1, 3), torch.full((1, 1, 3), 1e39, dtype=torch.float64)
    _, (_, memory) = propagated(module, x, x, FLOAT32, state)
    assert bool(memory.upper.isnan().all())


# -- whole models ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rnn", "rnn, relu", "lstm", "gru", "lstm cell"])
def test_two_epochs_of_acert_give_larger_radii(name):
    torch.manual_seed(0)
    model, (images, labels) = CLASSIFIERS[name](), sequences(192)

    def acr():
        found = acert.certified_radius(model.eval(), images, labels, max_radius=0.05)
        return float(found.value.mean())

    before = acr()
    acert.train(
        model, (images, labels), method=acert.Acert(kappa=0.5), max_radius=0.05, epochs=2,
        batch_size=8, learning_rate=0.02, progress=False,
    )  # fmt: skip
    assert acr() > 1.5 * before


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_deployed_classifier_gives_no_more_than_what_is_proven(name):
    model = CLASSIFIERS[name]().eval().requires_grad_(False)
    images, _ = sequences(4)
    deployed = acert.CertifiedClassifier(model, max_radius=0.1, steps=8)
    logits, prediction, radius = deployed(images)
    torch.testing.assert_close(logits, model(images))
    wanted = acert.certified_radius(model, images, max_radius=0.1, arithmetic="float32")
    assert torch.equal(prediction, wanted.prediction)
    assert bool((radius <= wanted.value * (1 + 1e-4)).all())
    assert bool((radius >= wanted.value - 0.1 / 2**8 - 1e-9).all())


def state_of(model):
    """All that a pass could leave behind, by identity where it is an object."""
    found = []
    for module in model.modules():
        for name, value in module.__dict__.items():
            if isinstance(value, (dict, list)):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                found += [(name, key, id(each)) for key, each in items]
            else:
                found.append((name, "", id(value)))
    return found


@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_as_it_was(training):
    model = CLASSIFIERS["lstm, two ways"]().train(training)
    images, _ = sequences(4)
    before, numbers = state_of(model), copy.deepcopy(model.state_dict())
    acert.interval_bounds(model, images, images)
    acert.interval_bounds(model, images.double(), images.double())
    acert.certified_radius(model, images, max_radius=0.1)
    with pytest.raises(RuntimeError):
        acert.interval_bounds(model, images[..., :1].double(), images[..., :1].double())
    assert state_of(model) == before
    assert model.layer.weight_ih_l0.dtype == torch.float32
    torch.testing.assert_close(model.state_dict(), numbers, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"RNN input dtype|input must have the type"):
        model(images.double())


def test_no_other_thread_is_told_another_dtype():
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = nn.LSTM(2, 3), []

        def ask(self):
            self.seen.append(self.layer.weight_ih_l0.dtype)

        def forward(self, x):
            thread = threading.Thread(target=self.ask)
            thread.start()
            thread.join()
            return self.layer(x)[0]

    model = Asking()
    x = torch.rand(2, 3, 2).double()
    acert.interval_bounds(model, x, x)
    assert model.seen == [torch.float32]


def test_parametrized_weights_are_weights():
    layer = nn.LSTM(2, 4, batch_first=True)
    for name in ("weight_ih_l0", "weight_hh_l0"):
        parametrizations.weight_norm(layer, name)
    model = Reading(layer).eval()
    images, _ = sequences(4)
    found = acert.certified_radius(model, images, max_radius=0.5)
    assert bool((found.value > 0).all())
    assert flips(model, images, found.prediction, found.value) == 0


def test_a_layer_that_is_no_module_of_the_model_is_refused_for_another_dtype():
    layer, x = nn.GRU(2, 3), torch.rand(4, 2, 2)
    model = Apply(lambda x: layer(x)[0])
    wanted = layer(x)[0]
    torch.testing.assert_close(acert.interval_bounds(model, x, x).lower, wanted)
    with pytest.raises(acert.UnsupportedOperation, match="one of the model's modules"):
        acert.interval_bounds(model, x.double(), x.double())


@pytest.mark.parametrize("layer", LAYERS)
def test_dropout_is_refused_in_training_and_nowhere_else(layer):
    images, _ = sequences(4)
    model = Reading(layer(2, 4, 2, dropout=0.5)).eval()
    wanted = model(images)
    acert.interval_bounds(model, images, images)
    name = {nn.RNN: "rnn_tanh", nn.LSTM: "lstm", nn.GRU: "gru"}[layer]
    with pytest.raises(acert.UnsupportedOperation, match=rf"torch.{name}: it is random in train"):
        acert.interval_bounds(model.train(), images, images)
    # Evaluation is asked for in training too.
    torch.testing.assert_close(evaluation_logits(model, images), wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, that one layer drops nothing
        single = Reading(layer(2, 4, dropout=0.5)).train()
    acert.interval_bounds(single, images, images)


def test_packed_sequences_are_refused():
    layer, x = nn.LSTM(2, 3), torch.rand(4, 2, 2)
    pack = nn.utils.rnn.pack_padded_sequence
    model = Apply(lambda x: layer(pack(x, torch.tensor([4, 2])))[0].data)
    with pytest.raises(acert.UnsupportedOperation, match=r"_pack_padded_sequence"):
        acert.interval_bounds(model, x, x)
    for kind in LAYERS:
        packed = pack(torch.rand(4, 2, 2), torch.tensor([4, 2]))
        layer = kind(2, 3)

        def run(x, layer=layer, packed=packed):
            return layer(packed, (x, x) if isinstance(layer, nn.LSTM) else x)[1]

        start = torch.rand(1, 2, 3)
        with pytest.raises(acert.UnsupportedOperation, match="PackedSequence"):
            acert.interval_bounds(Apply(run), start, start)


@pytest.mark.parametrize("bounds", ["crown", "crown-ibp"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_crown_refuses_them_by_name(name, bounds):
    model, (images, _) = CLASSIFIERS[name]().eval(), sequences(2)
    called = {"rnn, relu": "rnn_relu", "rnn": "rnn_tanh", "rnn cell": "rnn_tanh_cell"}
    function = called.get(name, name.split(",")[0].replace(" ", "_"))
    with pytest.raises(acert.UnsupportedOperation, match=rf"torch\.{function}: CROWN has no back"):
        acert.certified_radius(model, images, max_radius=0.1, bounds=bounds)


@pytest.mark.parametrize("name", ["lstm", "gru", "lstm cell"])
def test_a_classifier_compiles_whole(name):
    """Cells as they are; layers where Dynamo is told to let them in."""
    torch._dynamo.reset()
    model = CLASSIFIERS[name]()
    images, labels = sequences(3)

    def margins(images, radius):
        return acert.certified_margin(model, images, labels, radius)

    radius = torch.full((3,), 0.01)
    with torch._dynamo.config.patch(allow_rnn="cell" not in name):
        compiled = torch.compile(margins, backend="aot_eager", fullgraph=True)(images, radius)
    torch.testing.assert_close(compiled, margins(images, radius), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights")  # PyTorch's own
@pytest.mark.parametrize("name", ["rnn", "lstm", "gru cell"])
def test_a_graph_holds_the_proof(name):
    """Float64 boxes go through float32 layers there, too."""
    model = CLASSIFIERS[name]().eval().requires_grad_(False)
    images, _ = sequences(3)
    deployed = acert.CertifiedClassifier(model, max_radius=0.1, steps=2)
    graph = torch.export.export(deployed, (images,), strict=False).module()
    torch.testing.assert_close(graph(images), deployed(images))


def test_attacks_see_packed_sequences_in_evaluation():
    """Where `dropout` stands one further: the lengths come with them."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.GRU(4, 5, 2, dropout=0.5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            lengths = torch.full((len(x),), 3)
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.head(self.layer(packed)[1][-1])

    model, images = Packed(), torch.rand(2, 3, 4)
    logits = evaluation_logits(model, images)
    torch.testing.assert_close(logits, model.eval()(images))
