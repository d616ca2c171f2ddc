"""Passing boxes through models: the clean pass, its statistics, and a model left as it was."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tests.rule_cases import Nested, Twice
from torch import nn

import acert
from acert import BatchStatistics
from acert.bounds import Interval, propagate
from acert.bounds.bound_pass import BoundPass
from acert.bounds.pending import Convolution
from acert.bounds.propagation import evaluation_logits
from acert.models import small_resnet


def images(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


# -- the clean pass -------------------------------------------------------------------------

# A model, the shape of one sample, and how many batch norm calls use the batch's statistics.
NORMALISED = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), (3,), 1),
    "BatchNorm1d rank 3": (lambda: nn.BatchNorm1d(3), (3, 4), 1),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (3, 2, 4), 1),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(3), (3, 2, 2, 3), 1),
    "momentum": (lambda: nn.BatchNorm1d(3, momentum=0.7), (3,), 1),
    "momentum=None": (lambda: nn.BatchNorm1d(3, momentum=None), (3,), 1),
    "affine=False": (lambda: nn.BatchNorm1d(3, affine=False), (3,), 1),
    "track_running_stats=False": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (3,), 1),
    "reused": (lambda: Twice(nn.BatchNorm1d(3)), (3,), 2),
    "nested": (Nested, (2, 4, 4), 3),
    "residual": (lambda: small_resnet((1, 8, 8), width=2), (1, 8, 8), 9),
    "none": (lambda: nn.Linear(3, 2), (3,), 0),
}
NORMALISED_CASES = pytest.mark.parametrize(
    ("build", "shape", "calls"), NORMALISED.values(), ids=NORMALISED.keys()
)


@NORMALISED_CASES
def test_the_clean_pass_is_pytorchs_own(build, shape, calls):
    """Bit for bit: logits, and running statistics after two steps."""
    model = build().train()
    twin = copy.deepcopy(model)
    for step in range(2):
        batch = images(6, *shape) + step
        logits, statistics = acert.clean_pass(model, batch)
        assert torch.equal(logits, twin(batch))
        assert len(statistics) == calls
    for (name, buffer), expected in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(buffer, expected), name


@NORMALISED_CASES
def test_the_clean_pass_in_evaluation_moves_nothing(build, shape, calls):
    model = build().eval()
    before = copy.deepcopy(model.state_dict())
    logits, statistics = acert.clean_pass(model, images(6, *shape))
    assert torch.equal(logits, model(images(6, *shape)))
    untracked = isinstance(model, nn.BatchNorm1d) and not model.track_running_stats
    assert len(statistics) == (1 if untracked else 0)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_statistics_are_mean_and_biased_variance_of_each_call():
    layer = nn.BatchNorm2d(3)
    batch = images(5, 3, 2, 4)
    _, ((mean, variance),) = acert.clean_pass(layer, batch)
    torch.testing.assert_close(mean, batch.mean((0, 2, 3)))
    torch.testing.assert_close(variance, batch.var((0, 2, 3), correction=0))


@NORMALISED_CASES
def test_bounds_at_radius_zero_are_the_training_logits(build, shape, calls):
    model = build().double().train()
    batch = images(6, *shape).double()
    logits, statistics = acert.clean_pass(model, batch)
    bounds = acert.interval_bounds(model, batch, batch, statistics=statistics)
    torch.testing.assert_close(bounds.lower, logits)
    torch.testing.assert_close(bounds.upper, logits)


def test_statistics_of_functional_batch_norm():
    class Functional(nn.Module):
        def forward(self, x):
            x = F.batch_norm(x, None, None, training=True)
            return F.batch_norm(input=x, running_mean=None, running_var=None, training=True)

    batch = images(6, 3)
    logits, statistics = acert.clean_pass(Functional(), batch)
    assert len(statistics) == 2
    bounds = acert.interval_bounds(Functional(), batch, batch, statistics=statistics)
    torch.testing.assert_close(bounds.upper, logits)


def test_the_gradient_flows_through_the_statistics():
    """Against the formula of the normalised box, written out."""
    layer = nn.BatchNorm1d(3).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.5, -2.0, 0.5]))
        layer.bias.copy_(torch.tensor([0.1, 0.2, -0.3]))
    batch = images(6, 3).double().requires_grad_()
    leaves = batch, layer.weight, layer.bias
    coefficients = torch.randn(2, 6, 3, dtype=torch.float64)

    _, statistics = acert.clean_pass(layer, batch)
    bounds = acert.interval_bounds(layer, batch - 0.2, batch + 0.3, statistics=statistics)
    loss = (coefficients * torch.stack(bounds.ends())).sum()
    found = torch.autograd.grad(loss, leaves)

    mean = batch.mean(0)
    scale = layer.weight / (((batch - mean) ** 2).mean(0) + layer.eps).sqrt()
    center = (batch + 0.05 - mean) * scale + layer.bias
    reach = 0.25 * scale.abs()
    loss = (coefficients * torch.stack((center - reach, center + reach))).sum()
    expected = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(found, expected)
    # And it is not the gradient with the statistics held fixed.
    fixed = tuple(BatchStatistics(*(value.detach() for value in pair)) for pair in statistics)
    bounds = acert.interval_bounds(layer, batch - 0.2, batch + 0.3, statistics=fixed)
    (held,) = torch.autograd.grad((coefficients * torch.stack(bounds.ends())).sum(), batch)
    assert float((held - expected[0]).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.BatchNorm2d(3), (6, 3, 4, 5)),
        (lambda: nn.BatchNorm2d(3, affine=False, momentum=None), (6, 3, 4, 5)),
        (lambda: nn.BatchNorm2d(3), (6, 3, 1, 1)),
        (lambda: nn.BatchNorm1d(3, track_running_stats=False), (6, 3)),
        (lambda: nn.BatchNorm1d(3, momentum=0.3, eps=0.1), (6, 3, 4)),
    ],
)
def test_quick_batch_norm_is_batch_norm(build, shape):
    """In output, statistics, running statistics and the gradient of all three."""
    torch.manual_seed(0)
    batch = (torch.randn(shape, dtype=torch.float64) * 3 + 2).requires_grad_()
    results = []
    for quick in (False, True):
        layer = build().double()
        for parameter in layer.parameters():
            parameter.data = torch.tensor([0.5, -2.0, 0.0], dtype=torch.float64)
        logits, ((mean, variance),) = acert.bounds.clean_pass(layer, batch, quick=quick)
        loss = (logits.sin().sum() + 3 * mean.cos().sum() + variance.exp().sum()) / 5
        gradients = torch.autograd.grad(loss, [batch, *layer.parameters()])
        results.append((logits, mean, variance, gradients, list(layer.buffers())))
    torch.testing.assert_close(*results, atol=1e-12, rtol=1e-11)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_quick_statistics_do_not_cancel(layout):
    """Deviations of 1e-3 around a mean of 100, some channels constant in a sample or in all."""
    batch = 100 + 1e-3 * torch.randn(6, 3, 4, 5, dtype=torch.float64)
    batch[:, 1] = torch.arange(6.0).view(-1, 1, 1)
    batch[:, 2] = 7
    batch = batch.float().contiguous(memory_format=layout)
    _, ((mean, variance),) = acert.bounds.clean_pass(nn.BatchNorm2d(3), batch, quick=True)
    exact = batch.double()
    torch.testing.assert_close(mean.double(), exact.mean((0, 2, 3)), atol=3e-5, rtol=0)
    expected = exact.var((0, 2, 3), correction=0)
    torch.testing.assert_close(variance.double(), expected, atol=1e-9, rtol=1e-3)


@pytest.mark.parametrize("shape", [(6, 1, 8, 8), (1, 1, 8, 8), (6, 1, 4, 4, 4)])
def test_quick_statistics_of_one_channel_do_not_cancel(shape):
    """Its memory is contiguous with the channels last as well."""
    batch = (100 + 1e-3 * torch.randn(shape, dtype=torch.float64)).float()
    layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    batch = batch.to(memory_format=layout)
    layer = nn.BatchNorm2d(1) if len(shape) == 4 else nn.BatchNorm3d(1)
    _, ((_, variance),) = acert.bounds.clean_pass(layer, batch, quick=True)
    torch.testing.assert_close(
        variance.double().squeeze(), batch.double().var(correction=0), atol=1e-9, rtol=1e-3
    )


def test_quick_batch_norm_refuses_one_value_a_channel():
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        acert.bounds.clean_pass(nn.BatchNorm1d(3), images(1, 3), quick=True)


# -- batch norm folded into convolutions ----------------------------------------------------


class Around(nn.Module):
    """A convolution whose result is used beside its batch norm too."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)

    def forward(self, x):
        y = self.convolution(x)
        return self.norm(y) + 2 * y


class Overwritten(nn.Module):
    """The convolution's input changes before its result is asked for."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x):
        x = x - 0.5
        y = self.convolution(x)
        x.relu_()
        return self.norm(y) + x


# A model, the shape of one sample, and whether batch norm meets a convolution not computed yet.
FOLDED = {
    "Conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3)), (2, 5), True),
    "Conv2d": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), (2, 5, 4), True),
    "Conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3)), (2, 3, 3, 3), True),
    "no bias": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3)), (2, 5, 4), True,
    ),
    "groups, strides": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1, groups=2), nn.BatchNorm2d(4)), (2, 5, 4),
        True,
    ),
    "affine=False": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, affine=False)), (2, 5, 4), True,
    ),
    "twice": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.BatchNorm2d(3)), (2, 5, 4),
        True,
    ),
    "used beside": (Around, (2, 5, 4), True),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 3), nn.BatchNorm2d(3)), (2, 4, 4), False,
    ),
    "linear": (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), (4,), False),
    "ReLU between": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.BatchNorm2d(3)), (2, 5, 4), False,
    ),
    "residual": (lambda: small_resnet((2, 8, 8), width=2), (2, 8, 8), True),
}  # fmt: skip


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(("build", "shape", "folds"), FOLDED.values(), ids=FOLDED.keys())
def test_folded_batch_norm_is_batch_norm(build, shape, folds, training, monkeypatch):
    """In value and in gradient, through the statistics too; scales of any sign, 0 among them."""
    torch.manual_seed(0)
    model = build().double().train(training)
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(layer.running_mean, -1, 1)
            nn.init.uniform_(layer.running_var, 0.5, 2)
            if layer.affine:
                nn.init.uniform_(layer.weight, -2, 2)
                nn.init.normal_(layer.bias)
                layer.weight.data[1] = 0.0
    batch = images(6, *shape).double().requires_grad_()
    seen = []
    replaced = Convolution._replace
    monkeypatch.setattr(
        Convolution, "_replace", lambda self, **new: seen.append(new) or replaced(self, **new)
    )
    results = []
    for fold in (False, True):
        _, statistics = acert.clean_pass(model, batch)
        box = Interval(batch - 0.1, batch + 0.2)
        bound_pass = BoundPass(statistics=statistics if training else None, fold=fold)
        output = propagate(model, box.within(bound_pass))
        loss = (output.lower.sin() + 2 * output.upper.cos()).sum()
        gradients = torch.autograd.grad(loss, [batch, *model.parameters()])
        results.append((*output.ends(), gradients))
        assert bool(seen) == (fold and folds)
    torch.testing.assert_close(*results, atol=1e-11, rtol=1e-10)


def test_a_convolution_is_computed_when_it_is_asked_for():
    layer, batch = nn.Conv2d(2, 3, 3), images(4, 2, 5, 5)
    plain = layer(Interval(batch, batch + 1))
    output = layer(Interval(batch, batch + 1).within(BoundPass(fold=True)))
    assert output.convolution is not None
    assert output.ndim == output.dim() == 4
    assert output.convolution is not None  # the number of axes asks for no numbers
    assert output.shape == (4, 3, 3, 3)
    assert output.convolution is None
    assert torch.equal(output.center, plain.center)
    assert torch.equal(output.radius, plain.radius)


def test_a_convolution_remembers_its_input_as_it_was():
    model, batch = Overwritten().eval(), images(4, 2, 5, 5)
    found = propagate(model, Interval(batch, batch + 1).within(BoundPass(fold=True)))
    wanted = propagate(model, Interval(batch, batch + 1))
    torch.testing.assert_close(found.ends(), wanted.ends())


class Frozen(nn.Module):
    """A convolution and its batch norm, each with gradients on or off."""

    def __init__(self, *, convolution, norm):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)
        self.graded = convolution, norm

    def forward(self, x):
        with torch.set_grad_enabled(self.graded[0]):
            y = self.first(x)
        with torch.set_grad_enabled(self.graded[1]):
            y = self.norm(y)
        return y.flatten(1)


@pytest.mark.parametrize("convolution", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_a_layer_that_is_not_to_be_trained_gets_no_gradient_by_waiting(convolution, norm):
    torch.manual_seed(0)
    model, batch = Frozen(convolution=convolution, norm=norm).eval(), images(4, 2, 5, 5)
    found = []
    for fold in (False, True):
        output = propagate(model, Interval(batch, batch + 1).within(BoundPass(fold=fold)))
        model.zero_grad()
        if output.upper.requires_grad:
            output.upper.sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for plain, folded in zip(*found, strict=True):
        assert (plain is None) == (folded is None)
        if plain is not None:
            torch.testing.assert_close(folded, plain)


def test_a_convolution_that_is_looked_at_without_gradients_still_has_them():
    layer, batch = nn.Conv2d(2, 3, 3), images(4, 2, 5, 5)
    output = layer(Interval(batch, batch + 1).within(BoundPass(fold=True)))
    with torch.no_grad():
        assert output.upper.isfinite().all()
    assert output.center.requires_grad


class Rectified(nn.Module):
    """A convolution whose result is used before and behind its ReLU."""

    def __init__(self, *, before):
        super().__init__()
        self.convolution, self.norm, self.before = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), before

    def forward(self, x):
        y = self.norm(self.convolution(x))
        first = 3 * y if self.before else 0.0
        return first + y.relu() + 2 * y + y.view(y.shape).relu()


RECTIFIED = {
    "Conv2d": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 1), nn.ReLU()),
    "in place": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.ReLU()),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()),
    "used before": lambda: Rectified(before=True),
    "used behind": lambda: Rectified(before=False),
    "residual": lambda: small_resnet((2, 8, 8), width=2),
}


@pytest.mark.parametrize("build", RECTIFIED.values(), ids=RECTIFIED.keys())
@pytest.mark.parametrize("graded", [False, True])
def test_relu_of_a_convolution_is_relu(build, graded):
    """Whoever else asks for the convolution's result, before or afterwards."""
    torch.manual_seed(0)
    model, batch = build().double().eval(), images(4, 2, 8, 8).double()
    with torch.set_grad_enabled(graded):
        found, wanted = (
            propagate(model, Interval(batch - 0.5, batch + 0.5).within(BoundPass(fold=fold)))
            for fold in (True, False)
        )
    torch.testing.assert_close(found.ends(), wanted.ends(), atol=1e-12, rtol=1e-11)


def test_relu_in_place_of_a_convolution_computes_it_once(monkeypatch):
    layer, batch = nn.Conv2d(2, 3, 3), images(4, 2, 5, 5)
    seen = []
    ball = Convolution.ball
    monkeypatch.setattr(Convolution, "ball", lambda self: seen.append(self) or ball(self))
    with torch.no_grad():
        output = layer(Interval(batch, batch + 1).within(BoundPass(fold=True))).relu_()
    assert output.shape == (4, 3, 3, 3)
    assert len(seen) == 1


class Shrinking(nn.Conv2d):
    """A layer that changes its weights whenever it is called, unseen by autograd."""

    def forward(self, x):
        self.weight.data.mul_(0.5)
        return super().forward(x)


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Shrinking(2, 2, 3, padding=1)

    def forward(self, x):
        first = self.layer(x)
        return first + self.layer(first.relu())


def test_a_convolution_that_was_looked_at_keeps_its_numbers():
    torch.manual_seed(0)
    model, batch = Repeated(), images(4, 2, 5, 5)
    with torch.no_grad():
        output = copy.deepcopy(model)(batch)
        box = Interval(batch - 0.01, batch + 0.01).within(BoundPass(fold=True))
        lower, upper = propagate(model, box).ends()
    assert (lower <= output).all()
    assert (output <= upper).all()


class Gated(nn.Module):
    """A branch without gradient beside one with it."""

    def __init__(self, pool):
        super().__init__()
        self.first, self.gate, self.last = (nn.Conv2d(2, 2, 1) for _ in range(3))
        self.pool = pool

    def forward(self, x):
        y = self.pool(self.first(x).relu())
        with torch.no_grad():
            gate = self.gate(y)
        return self.last(y) + gate


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("pool", [nn.Identity(), nn.MaxPool2d(2), nn.AvgPool2d(2)], ids=str)
def test_a_branch_without_gradient_takes_none_from_others(pool, fold):
    torch.manual_seed(0)
    model, batch = Gated(pool).double(), images(4, 2, 4, 4).double()
    output = propagate(model, Interval(batch, batch + 0.1).within(BoundPass(fold=fold)))
    output.upper.sum().backward()
    assert model.gate.weight.grad is None
    assert model.first.weight.grad.norm() > 0
    # The same without the branch: it adds a constant.
    wanted = [layer.weight.grad.clone() for layer in (model.first, model.last)]
    model.zero_grad()
    y = model.pool(model.first(Interval(batch, batch + 0.1)).relu())
    model.last(y).upper.sum().backward()
    found = [layer.weight.grad for layer in (model.first, model.last)]
    torch.testing.assert_close(found, wanted)


def test_relu_without_gradient_leaves_a_convolution_its_own():
    layer, batch = nn.Conv2d(2, 3, 3), images(4, 2, 5, 5)
    output = layer(Interval(batch, batch + 1).within(BoundPass(fold=True)))
    with torch.no_grad():
        above = output.relu()
    assert not above.center.requires_grad
    assert output.center.requires_grad


def test_a_convolution_under_autocast_is_computed_there():
    layer, batch = nn.Conv2d(2, 3, 3), images(4, 2, 5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(Interval(batch, batch + 1).within(BoundPass(fold=True)))
    assert output.dtype == torch.float32  # for whatever comes next
    for numbers in output.as_ball():
        assert torch.equal(numbers, numbers.bfloat16().float())


def test_bounds_outside_of_a_training_step_have_derivatives_of_every_kind():
    """Second ones, and those of torch.func: the shortcuts of a training step have neither."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    batch, labels = images(5, 2, 2, 2).double(), torch.arange(5) % 3

    def penalty(weight, create_graph):
        model[1].weight.data.copy_(weight)
        margins = acert.certified_margin(model, batch, labels, 0.05)
        (slope,) = torch.autograd.grad(
            margins.exp().sum(), model[1].weight, create_graph=create_graph
        )
        return slope.square().sum()

    weight = model[1].weight.detach().clone()
    found = torch.autograd.grad(penalty(weight, True), list(model.parameters()), allow_unused=True)
    assert all(gradient is not None for gradient in found[:1])
    step = 1e-6 * torch.randn_like(weight)
    change = penalty(weight + step, False) - penalty(weight - step, False)
    assert float(change) == pytest.approx(2 * float((found[0] * step).sum()), rel=1e-4)

    def loss(images):
        return acert.certified_margin(model, images, labels, 0.05).sum()

    model.requires_grad_(False)
    inputs = batch.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(inputs), inputs)
    torch.testing.assert_close(torch.func.grad(loss)(batch), expected)


def test_unbatched_convolutions_are_computed_at_once():
    layer, image = nn.Conv2d(2, 3, 3), images(2, 5, 5)
    output = layer(Interval(image, image + 1).within(BoundPass(fold=True)))
    assert output.convolution is None
    assert output.shape == (3, 3, 3)


# -- statistics that do not fit -------------------------------------------------------------


def test_missing_statistics_are_refused():
    batch = images(6, 2, 4, 4)
    message = "it normalises by batch statistics and none were given; switch the model to evaluati"
    with pytest.raises(acert.UnsupportedOperation, match=message) as refusal:
        acert.interval_bounds(Nested().train(), batch, batch)
    assert "(in module `1.1`, BatchNorm2d)" in str(refusal.value)


def test_a_norm_that_keeps_no_statistics_is_not_sent_to_evaluation():
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)).eval()
    with pytest.raises(acert.UnsupportedOperation, match=r"let it keep them.*`0`, BatchNorm1d"):
        ends_of(model, images(6, 3), images(6, 3) + 1)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class _Own(nn.Module):
    def forward(self, x):
        return _Doubled.apply(x)


def test_an_autograd_function_that_would_cut_gradients_off_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), _Own(), nn.Linear(4, 2))
    lower, upper = images(6, 3), images(6, 3) + 1
    with pytest.raises(acert.UnsupportedOperation, match=r"gradients of bounds end.*`1`, _Own"):
        acert.interval_bounds(model, lower, upper)
    plain = nn.Sequential(model[0], nn.Identity(), nn.Linear(4, 2))
    plain[2].weight, plain[2].bias = nn.Parameter(2 * model[2].weight), model[2].bias
    expected = ends_of(plain, lower, upper)
    with torch.no_grad():
        found = acert.interval_bounds(model, lower, upper)
    torch.testing.assert_close(torch.stack(found.ends()), expected)
    # Nothing is lost where nothing before it is trained.
    acert.interval_bounds(nn.Sequential(_Own(), nn.Linear(3, 2)), lower, upper).lower.sum()
    model[0].requires_grad_(False)
    acert.interval_bounds(model, lower, upper).lower.sum().backward()
    assert model[2].weight.grad.abs().sum() > 0


def test_inference_mode_inside_of_a_model_is_no_autograd_function():
    class Fixed(nn.Linear):
        @torch.inference_mode()
        def forward(self, x):
            return super().forward(x)

    model = nn.Sequential(Fixed(3, 4), nn.ReLU())
    assert not acert.interval_bounds(model, images(6, 3), images(6, 3) + 1).lower.requires_grad


def test_too_few_statistics_are_refused():
    model, batch = Nested().train(), images(6, 2, 4, 4)
    _, statistics = acert.clean_pass(model, batch)
    with pytest.raises(acert.UnsupportedOperation, match="none were given"):
        acert.interval_bounds(model, batch, batch, statistics=statistics[:2])


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_too_many_statistics_are_refused(mode):
    model, batch = Nested().train(), images(6, 2, 4, 4)
    _, statistics = acert.clean_pass(model, batch)
    model.train(mode)
    given = statistics * 2 if mode else statistics
    message = (
        "`statistics` must come from a clean pass of the same model in the same mode; got "
        f"{len(given)} entries, used {3 if mode else 0}"
    )
    with pytest.raises(acert.InvalidInput, match=message):
        acert.interval_bounds(model, batch, batch, statistics=given)


def test_statistics_serve_several_bound_passes():
    model, batch = Nested().train(), images(6, 2, 4, 4)
    _, statistics = acert.clean_pass(model, batch)
    first = acert.interval_bounds(model, batch, batch + 0.1, statistics=statistics)
    second = acert.interval_bounds(model, batch, batch + 0.1, statistics=statistics)
    assert torch.equal(first.lower, second.lower)


# -- the model is left as it was ------------------------------------------------------------


class Counting(nn.Module):
    """Writes to a buffer that no state dict shows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize("training", [True, False])
def test_a_bound_pass_leaves_the_model_as_it_was(training):
    model = nn.Sequential(Nested(), Counting()).train(training)
    seen = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(type(output)))
    batch = images(6, 2, 4, 4)
    _, statistics = acert.clean_pass(model, batch)
    state = copy.deepcopy({**dict(model.named_parameters()), **dict(model.named_buffers())})
    versions = {name: value._version for name, value in model.state_dict(keep_vars=True).items()}
    tensors = {name: id(value) for name, value in model.named_buffers()}
    hooks = dict(model[0]._forward_hooks)
    modes = [module.training for module in model.modules()]

    bounds = acert.interval_bounds(model, batch, batch + 0.1, statistics=statistics or None)

    for name, value in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(value, state[name]), name
    for name, value in model.state_dict(keep_vars=True).items():
        assert value._version == versions[name], name
    assert {name: id(value) for name, value in model.named_buffers()} == tensors
    assert [module.training for module in model.modules()] == modes
    assert dict(model[0]._forward_hooks) == hooks
    assert all(parameter.grad is None for parameter in model.parameters())
    assert seen == [torch.Tensor, Interval]  # hooks run, as in any forward pass
    # The counter the pass sees is the next one, not one that earlier passes moved.
    assert float(model[1].calls) == 1.0
    inner = acert.interval_bounds(model[0], batch, batch + 0.1, statistics=statistics or None)
    torch.testing.assert_close(bounds.upper, 2 * inner.upper)


class Sinc(nn.Module):
    def forward(self, x):
        return torch.sinc(x)


def test_a_refused_pass_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.BatchNorm1d(3), Counting(), Sinc()).eval()
    tensors = {name: (id(value), value.clone()) for name, value in model.named_buffers()}
    with pytest.raises(acert.UnsupportedOperation):
        acert.interval_bounds(model, images(2, 3), images(2, 3))
    for name, value in model.named_buffers():
        assert id(value) == tensors[name][0]
        assert torch.equal(value, tensors[name][1])


# -- what changes between calls is seen -----------------------------------------------------


def ends_of(model, lower, upper):
    return torch.stack(propagate(model, Interval(lower, upper)).ends())


def test_a_replaced_layer_is_seen():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    lower = torch.zeros(2, 3)
    before = ends_of(model, lower, lower + 1)
    model[1] = nn.Tanh()
    after = ends_of(model, lower, lower + 1)
    assert not torch.equal(before, after)
    assert torch.equal(after, ends_of(nn.Sequential(model[0], nn.Tanh()), lower, lower + 1))


def test_reloaded_weights_are_seen():
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    lower = torch.zeros(2, 3)
    before = ends_of(model, lower, lower + 1)
    model.load_state_dict(other.state_dict())
    after = ends_of(model, lower, lower + 1)
    assert not torch.equal(before, after)
    assert torch.equal(after, ends_of(other, lower, lower + 1))


def test_a_new_mode_is_seen():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).eval()
    lower = torch.zeros(2, 3)
    ends_of(model, lower, lower + 1)
    model.train()
    with pytest.raises(acert.UnsupportedOperation, match=r"none were given.*`0`, BatchNorm1d"):
        ends_of(model, lower, lower + 1)
    model[0].eval()
    with pytest.raises(acert.UnsupportedOperation, match=r"random in training.*`1`, Dropout"):
        ends_of(model, lower, lower + 1)
    model.eval()
    ends_of(model, lower, lower + 1)


# -- logits of evaluation, in any mode ------------------------------------------------------


def test_evaluation_logits_leave_the_mode_and_the_statistics():
    model = nn.Sequential(Nested(), nn.Dropout(0.5)).train()
    batch = images(6, 2, 4, 4)
    acert.clean_pass(model, batch)
    state = copy.deepcopy(model.state_dict())
    logits = evaluation_logits(model, batch)
    assert all(module.training for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(logits, model.eval()(batch))


def test_evaluation_logits_of_a_norm_without_running_statistics():
    model = nn.BatchNorm1d(3, track_running_stats=False).train()
    batch = images(6, 3)
    assert torch.equal(evaluation_logits(model, batch), model.eval()(batch))


# -- input ----------------------------------------------------------------------------------

ZEROS, ONES = torch.zeros(2, 3), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("model", "lower", "upper", "message"),
    [
        (F.relu, ZEROS, ONES, "`model` must be a torch.nn.Module; got function"),
        (nn.ReLU(), [0.0], ONES, "`lower` must be a floating-point tensor; got list"),
        (nn.ReLU(), ZEROS.long(), ONES, "`lower` must be a floating-point tensor; got torch.int64"),
        (nn.ReLU(), ZEROS, 1.0, "`upper` must be a floating-point tensor; got float"),
        (nn.ReLU(), ZEROS / 0, ONES, "`lower` must be finite; got nan"),
        (nn.ReLU(), ZEROS, ONES / 0, "`upper` must be finite; got inf"),
        (nn.ReLU(), ONES, ZEROS, "`lower` must nowhere exceed `upper`"),
        (nn.ReLU(), ZEROS, torch.ones(3), "`lower` and `upper` must have one shape and dtype"),
        (nn.ReLU(), ZEROS, ONES.double(), "`lower` and `upper` must have one shape and dtype"),
        (
            nn.Linear(3, 3, device="meta"),
            ZEROS,
            ONES,
            "`model` must be on the device of its input, cpu; got `weight` on meta",
        ),
    ],
)
def test_a_bad_box_is_refused(model, lower, upper, message):
    with pytest.raises(acert.InvalidInput, match=message):
        acert.interval_bounds(model, lower, upper)


@pytest.mark.parametrize(
    "how",
    [{"quick": True}, {"quick": False}, {"part": SimpleNamespace(share=1.0, mean=torch.mean)}],
    ids=["quick", "plain", "a part of the batch"],
)
def test_batch_norm_of_half_precision_stays_there(how):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
            self.last = nn.Linear(6, 2).bfloat16()

        def forward(self, x):
            return self.last(self.norm(self.first(x).bfloat16()))

    logits, _ = acert.clean_pass(Half().train(), torch.rand(5, 4), **how)
    assert logits.dtype == torch.bfloat16


def test_quick_batch_norm_has_second_derivatives():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double().train()
    batch = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)

    def outputs(batch):
        logits, ((mean, variance),) = acert.clean_pass(model, batch, quick=True)
        return logits, mean, variance

    assert torch.autograd.gradcheck(outputs, batch)
    assert torch.autograd.gradgradcheck(outputs, batch)
