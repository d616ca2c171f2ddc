"""CROWN: against a slow dense form, the truth, exact arithmetic, float32 networks and intervals."""

import copy
import itertools
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from tests import ball
from tests.slopes import Weighted, assert_slope
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode

import acert
from acert import models
from acert.bounds import Interval, propagate
from acert.bounds.backward import BACKWARD
from acert.bounds.crown import crown_differences
from acert.bounds.interval import BoundPass
from acert.bounds.linear_bound import LinearBound, Step, dot, scaled
from acert.bounds.margin import box, upper_differences
from acert.bounds.proven import proven_margin
from acert.bounds.rounding import FLOAT32, REAL
from acert.bounds.table import RULES

DOMAIN = (0.0, 1.0)


class Apply(nn.Module):
    """Any function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def recorded(model, images, radius, *, rounding=None, statistics=None, domain=DOMAIN):
    """The output of a bound pass that CROWN can walk back."""
    radius = torch.as_tensor(radius, dtype=images.dtype).expand(len(images))
    start = box(images, radius, domain, rounding=rounding)
    return propagate(model, start.within(BoundPass(rounding, statistics, record=True)))


def differences(logits, labels):
    return logits - logits.gather(1, labels.unsqueeze(1))


def shaken(layer):
    """The batch norm layer with statistics and weights that are not the identity."""
    for values, ends in (
        (layer.running_mean, (-0.3, 0.3)),
        (layer.running_var, (0.3, 1.5)),
        (layer.weight, (-1.0, 1.5)),
        (layer.bias, (-0.3, 0.3)),
    ):
        if values is not None:
            nn.init.uniform_(values, *ends)
    return layer


MODELS = {
    "mlp": lambda: models.mlp(64, [24, 16], 5),
    "small_cnn": lambda: models.small_cnn(
        (1, 8, 8), 5, width=3, normalize=models.Normalize(0.4, 0.3)
    ),
    "small_resnet": lambda: models.small_resnet((1, 8, 8), 5, width=3),
    "cnn7": lambda: models.cnn7((1, 8, 8), 5, width=2),
}


def make(name, dtype=torch.float64):
    """One of the models, its batch norm with random weights and the digits' statistics."""
    model = MODELS[name]()
    for layer in model.modules():
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            shaken(layer).momentum = 1.0
    model.train()(digits(100, dtype=torch.float32)[0])
    return model.to(dtype).eval()


def digits(count, *, dtype=torch.float64):
    data = load_digits()
    images = torch.tensor(data.images[-count:] / 16, dtype=dtype).unsqueeze(1)
    return images, torch.tensor(data.target[-count:])


# -- the slow, direct form --------------------------------------------------------------


def inner(left, right):
    return sum(a * b for a, b in zip(left, right, strict=True))


def largest(row, lower, upper):
    """Maximum of row . x over a box."""
    return inner(row, [u if a > 0 else v for a, v, u in zip(row, lower, upper, strict=True)])


def dense_intervals(layers, lower, upper):
    """Pre-activation bounds of every hidden layer, and the box before the last layer."""
    found = []
    for weight, bias in layers[:-1]:
        high = [b + largest(row, lower, upper) for row, b in zip(weight, bias, strict=True)]
        low = [b + largest(row, upper, lower) for row, b in zip(weight, bias, strict=True)]
        found.append((low, high))
        lower, upper = ([max(end, 0) for end in side] for side in (low, high))
    return found, lower, upper


def fused(layers, label):
    """Rows W_i - W_y and shifts b_i - b_y of the last layer."""
    weight, bias = layers[-1]
    rows = [[w - v for w, v in zip(row, weight[label], strict=True)] for row in weight]
    return zip(rows, [b - bias[label] for b in bias], strict=True)


def dense_ibp(layers, lower, upper, label):
    _, low, high = dense_intervals(layers, lower, upper)
    return [shift + largest(row, low, high) for row, shift in fused(layers, label)]


def walk(row, constant, layers, hidden, lower, upper):
    """The largest row . x + constant behind these layers, one neuron at a time."""
    row = list(row)
    for (weight, bias), (low, high) in zip(layers[::-1], hidden[::-1], strict=True):
        for j, (left, right) in enumerate(zip(low, high, strict=True)):
            if left >= 0:
                continue
            if right <= 0:
                row[j] *= 0
            elif row[j] > 0:
                constant += row[j] * -left * right / (right - left)
                row[j] *= right / (right - left)
            else:
                row[j] *= 1 if right > -left else 0
        constant += inner(row, bias)
        row = [inner(row, column) for column in zip(*weight, strict=True)]
    return constant + largest(row, lower, upper)


def dense_crown(layers, lower, upper, label):
    """CROWN with interval intermediate bounds; floats or fractions."""
    hidden, _, _ = dense_intervals(layers, lower, upper)
    return [
        walk(row, shift, layers[:-1], hidden, lower, upper) for row, shift in fused(layers, label)
    ]


def parts(model, number=float):
    """Weights and biases of an MLP as nested lists."""
    return [
        (
            [[number(w) for w in row] for row in layer.weight.tolist()],
            [number(b) for b in layer.bias.tolist()],
        )
        for layer in model
        if isinstance(layer, nn.Linear)
    ]


def exact_box(image, radius):
    pixels, reach = [Fraction(p) for p in image.tolist()], Fraction(radius)
    lower = [max(p - reach, Fraction(0)) for p in pixels]
    return lower, [min(p + reach, Fraction(1)) for p in pixels]


@pytest.mark.parametrize("hidden", [[], [7], [6, 5], [5, 6, 4]])
@pytest.mark.parametrize("radius", [0.0, 0.05, 0.4])
def test_equals_a_dense_loop(hidden, radius):
    model = models.mlp(4, hidden, 3).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    images, labels = torch.rand(6, 4).double(), torch.randint(3, (6,))
    found = crown_differences(recorded(model, images, radius), labels)
    for image, label, row in zip(images, labels.tolist(), found, strict=True):
        low = (image - radius).clamp(min=0).tolist()
        high = (image + radius).clamp(max=1).tolist()
        wanted = torch.tensor(dense_crown(parts(model), low, high, label), dtype=torch.float64)
        torch.testing.assert_close(row, wanted, rtol=1e-12, atol=1e-12)
        assert row[label] == 0


def test_by_hand():
    # h = x + 0.25 on [-0.25, 0.75] has the chord 0.75 h + 0.1875; z_1 - z_0 = relu(h) - 1.
    box = Interval(torch.tensor([[-0.5]]), torch.tensor([[0.5]])).within(BoundPass(record=True))
    output = F.linear(F.relu(box + 0.25), torch.tensor([[0.0], [1.0]]), torch.tensor([1.0, 0.0]))
    assert crown_differences(output, torch.tensor([0])).tolist() == [[0.0, -0.25]]
    # From the other side, z_0 - z_1 = 1 - relu(h) <= 1 - h, because 0.75 > 0.25.
    assert crown_differences(output, torch.tensor([1])).tolist() == [[1.25, 0.0]]


def test_stable_neurons_give_the_true_maximum():
    model = models.mlp(4, [6], 3).double()
    with torch.no_grad():
        model[1].bias.copy_(torch.tensor([9.0, -9.0] * 3))  # always on, always off
    images, labels = torch.rand(5, 4).double(), torch.randint(3, (5,))
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=4)), dtype=torch.float64)
    corners = images.unsqueeze(1) + 0.2 * signs
    logits = model(corners.flatten(0, 1)).unflatten(0, (5, -1))
    truth = torch.stack(
        [(z - z[:, [label]]).amax(0) for z, label in zip(logits, labels, strict=True)]
    )
    output = recorded(model, images, 0.2, domain=None)
    torch.testing.assert_close(crown_differences(output, labels), truth, rtol=1e-12, atol=1e-12)
    assert (upper_differences(output, labels) >= truth - 1e-12).all()


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that anything returns."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if isinstance(result, torch.Tensor):
            self.size = max(self.size, result.nbytes)
        return result


def test_many_classes_take_no_tensor_larger_than_their_rows():
    # int64 rows of 1,000 classes took twice the time and a third more memory.
    images, labels = torch.rand(2, 8), torch.tensor([0, 99])
    output = recorded(models.mlp(8, [], 100), images, 0.1)
    with Largest() as largest:
        crown_differences(output, labels)
    assert largest.size == 2 * 99 * 100 * 4


# -- every affine rule is exact ---------------------------------------------------------


def with_head(function, features, *layers):
    """A classifier around one operation."""
    return nn.Sequential(*layers, Apply(function), nn.Flatten(), nn.Linear(features, 3))


WEIGHT = torch.randn(12, 5, generator=torch.Generator().manual_seed(3))
IMAGE = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(4))

AFFINE = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 3)),
    "linear without bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 3, bias=False)),
    "linear on the last axis": lambda: nn.Sequential(
        nn.Linear(6, 4), nn.Flatten(), nn.Linear(48, 3)
    ),
    "matmul": lambda: with_head(lambda x: x.reshape(-1, 6, 12) @ WEIGHT.to(x.dtype), 30),
    "conv": lambda: with_head(nn.Conv2d(2, 3, 3), 48),
    "conv stride": lambda: with_head(nn.Conv2d(2, 3, 3, stride=2, padding=1), 27),
    "conv unreached": lambda: with_head(nn.Conv2d(2, 3, 2, stride=(3, 4), bias=False), 12),
    "conv padding": lambda: with_head(nn.Conv2d(2, 3, (3, 2), padding=(2, 1)), 168),
    "conv groups": lambda: with_head(nn.Conv2d(2, 4, 3, groups=2, padding=1), 144),
    "conv dilation": lambda: with_head(nn.Conv2d(2, 3, 2, dilation=(2, 3)), 36),
    "conv same": lambda: with_head(nn.Conv2d(2, 3, (2, 3), padding="same", dilation=(3, 1)), 108),
    "conv valid": lambda: with_head(nn.Conv2d(2, 3, 3, padding="valid"), 48),
    "conv1d": lambda: nn.Sequential(
        nn.Flatten(2), nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(54, 3)
    ),
    "conv3d": lambda: with_head(
        lambda x: F.conv3d(
            x.unsqueeze(1), torch.ones(3, 1, 2, 3, 3).to(x.dtype), padding=(0, 1, 0)
        ),
        72,
    ),
    "transposed": lambda: with_head(nn.ConvTranspose2d(2, 3, 3, padding=1), 108),
    "transposed stride": lambda: with_head(
        nn.ConvTranspose2d(2, 4, (2, 3), stride=(2, 3), output_padding=(1, 0), groups=2), 936
    ),
    "transposed and wide": lambda: with_head(
        nn.ConvTranspose2d(2, 1, 2, stride=1, dilation=3, output_padding=2, bias=False), 121
    ),
    "transposed 1d": lambda: with_head(
        lambda x: F.conv_transpose1d(x.flatten(2), torch.ones(2, 1, 2).to(x.dtype), stride=2), 72
    ),
    "average pool 1d": lambda: with_head(lambda x: F.avg_pool1d(x.flatten(2), 3, 2, 1), 36),
    "average pool 3d": lambda: with_head(
        lambda x: F.avg_pool3d(x.unsqueeze(1), (2, 3, 1), stride=1), 24
    ),
    "maximum of one": lambda: with_head(nn.MaxPool2d(1, stride=2), 18),
    "batch norm": lambda: with_head(shaken(nn.BatchNorm2d(2)), 72),
    "batch norm without weights": lambda: with_head(shaken(nn.BatchNorm2d(2, affine=False)), 72),
    "normalize": lambda: with_head(models.Normalize([0.3, 0.5], [0.2, 0.4]), 72),
    "average pool": lambda: with_head(nn.AvgPool2d(2), 18),
    "average pool padded": lambda: with_head(nn.AvgPool2d((3, 2), stride=(2, 1), padding=1), 42),
    "average pool divisor": lambda: with_head(nn.AvgPool2d(3, divisor_override=-2), 8),
    "average pool uncounted": lambda: with_head(nn.AvgPool2d(2, count_include_pad=False), 18),
    "adaptive pool": lambda: with_head(nn.AdaptiveAvgPool2d(1), 2),
    "adaptive pool sizes": lambda: with_head(nn.AdaptiveAvgPool2d((3, None)), 36),
    "mean": lambda: with_head(lambda x: x.mean((2, 3)), 2),
    "mean of one axis": lambda: with_head(lambda x: x.mean(-1, keepdim=True), 12),
    "sum": lambda: with_head(lambda x: x.sum(axis=1), 36),
    "residual": lambda: with_head(models.Residual(nn.Conv2d(2, 2, 3, padding=1)), 72),
    "used three times": lambda: with_head(lambda x: x + x * 2.0 - x / 4, 72),
    "alpha": lambda: with_head(lambda x: torch.add(x, x * 2, alpha=-3), 72),
    "alpha of a constant": lambda: with_head(
        lambda x: torch.sub(x, IMAGE.to(x.dtype), alpha=0.5), 72
    ),
    "constants from the left": lambda: with_head(lambda x: 3 * (IMAGE.to(x.dtype) - x) + 1, 72),
    "rsub": lambda: with_head(lambda x: torch.rsub(x, IMAGE.to(x.dtype), alpha=2), 72),
    "negated": lambda: with_head(lambda x: -x, 72),
    "divided": lambda: with_head(lambda x: x / IMAGE.to(x.dtype), 72),
    "in place": lambda: with_head(lambda x: (x * 1).mul_(2).add_(1).sub_(IMAGE.to(x.dtype)), 72),
    "views": lambda: with_head(
        lambda x: x.view(-1, 1, 72).squeeze(1).unsqueeze(-1).reshape(x.shape[0], 2, 36), 72
    ),
    "permutations": lambda: with_head(
        lambda x: x.permute(0, 2, 3, 1).transpose(1, -1).movedim(2, 3).swapaxes(1, 2).mT, 72
    ),
    "cat": lambda: with_head(
        lambda x: torch.cat((x, 2 * x, IMAGE.to(x.dtype).expand(len(x), -1, -1, -1)), -2), 216
    ),
    "cat of an empty tensor": lambda: with_head(lambda x: torch.concat([torch.empty(0), x], 1), 72),
    "stack": lambda: with_head(
        lambda x: torch.stack([x, -x, IMAGE.to(x.dtype).expand(x.shape)], 2), 216
    ),
    "indices": lambda: with_head(
        lambda x: x[:, 1, ::2, None, 2:] * 2 - x[..., 3, :4].unsqueeze(2)[:, :1], 12
    ),
    "a list that repeats": lambda: with_head(lambda x: x[:, :, [1, 5, 1, -1]], 48),
    "a list behind an ellipsis": lambda: with_head(lambda x: x[..., torch.tensor([0, 0])], 24),
    "the whole batch": lambda: with_head(lambda x: x[: len(x), ..., 2:][:], 48),
    "parts": lambda: with_head(
        lambda x: x.chunk(3, 2)[2] - 2 * x.split(2, dim=-2)[0] + x.tensor_split((2, 4), 2)[1], 24
    ),
    "single parts": lambda: with_head(
        lambda x: x.select(1, 1) + x.unbind(1)[0] * 3 - x.narrow(1, 0, 1).squeeze(1), 36
    ),
    "expand": lambda: with_head(lambda x: x[:, :, :, :1].expand(-1, 2, 6, 3), 36),
    "centered": lambda: with_head(lambda x: x - x.mean((1, 3), keepdim=True), 72),
    "scaled while broadcast": lambda: with_head(
        lambda x: IMAGE.to(x.dtype) * x.sum(1, keepdim=True), 72
    ),
    "pad": lambda: with_head(lambda x: F.pad(x, (1, 0, 2, -1), value=0.3), 98),
    "pad that cuts": lambda: with_head(lambda x: F.pad(x, (-1, -2, 0, 0, 0, 0, 0, 0)), 36),
    "reflected": lambda: with_head(nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect"), 192),
    "replicated": lambda: with_head(
        nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="replicate"), 144
    ),
    "circular": lambda: with_head(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), 108),
    "one number a sample": lambda: with_head(
        lambda x: torch.stack([x.sum((1, 2, 3)), x[:, 0, 0, 0] + 1], 1), 2
    ),
    "copies and casts": lambda: with_head(lambda x: x.clone().double().to(x.dtype), 72),
    "no linear layer at the end": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(72, 3), nn.BatchNorm1d(3)
    ),
    "nothing but its input": lambda: nn.Identity(),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("rounding", [None, REAL, FLOAT32], ids=["plain", "real", "float32"])
@pytest.mark.parametrize("name", AFFINE)
def test_affine_models_get_their_true_maximum(name, rounding):
    model = AFFINE[name]().double().eval()
    images = torch.rand(2, 2, 6, 6).double() if name[:7] != "nothing" else torch.rand(2, 3).double()
    labels = torch.tensor([0, 2])
    output = recorded(model, images, 0.1, rounding=rounding, domain=None)
    found = crown_differences(output, labels)
    logits = model(images)
    slopes = torch.stack(
        [torch.autograd.functional.jacobian(model, image.unsqueeze(0))[0, :, 0] for image in images]
    ).flatten(2)
    fused = slopes - slopes[torch.arange(2), labels].unsqueeze(1)
    truth = differences(logits, labels) + 0.1 * fused.abs().sum(2)
    assert found.gather(1, labels.unsqueeze(1)).eq(0).all()
    slack = {None: 1e-12, REAL: 1e-10, FLOAT32: 1e-3}[rounding]
    assert (found >= truth - 1e-12).all()
    assert (found <= truth + slack * (1 + truth.abs())).all()


# -- sound, and never looser than intervals ---------------------------------------------


def attacked(model, lower, upper, labels, *, count):
    """Points of the box after 20 steps of PGD towards a random other class each."""
    repeat = [count] + [1] * (lower.ndim - 1)
    lower, upper, labels = lower.repeat(repeat), upper.repeat(repeat), labels.repeat(count)
    targets = (labels + torch.randint(1, 5, labels.shape)) % 5
    points = lower + torch.rand_like(lower) * (upper - lower)
    for _ in range(20):
        points.requires_grad_()
        logits = model(points)
        gained = logits.gather(1, targets.unsqueeze(1)) - logits.gather(1, labels.unsqueeze(1))
        (gradient,) = torch.autograd.grad(gained.sum(), points)
        points = points.detach() + 0.15 * (upper - lower) * gradient.sign()
        points = torch.minimum(torch.maximum(points, lower), upper)
    return points


def with_statistics(model, images):
    """The statistics of a clean pass, and an evaluation copy that normalises by them."""
    called = []
    copied = copy.deepcopy(model).train()
    norms = [m for m in copied.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))]
    for norm in norms:
        norm.register_forward_hook(lambda layer, *_: called.append(layer))
    _, statistics = acert.clean_pass(copied, images)
    for norm, taken in zip(called, statistics, strict=True):
        norm.running_mean.copy_(taken.mean.detach())
        norm.running_var.copy_(taken.variance.detach())
    return statistics, copied.eval()


@pytest.mark.parametrize("radius", [0.005, 0.08])
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "eval") for name in MODELS] + [("small_resnet", "train"), ("cnn7", "train")],
)
def test_points_of_the_box_stay_below_the_bounds(name, mode, radius):
    model, statistics = make(name), None
    images, labels = digits(10)
    labels = labels % 5
    evaluated = model
    if mode == "train":
        statistics, evaluated = with_statistics(model, images)
        model.train()
    with torch.no_grad():
        output = recorded(model, images, radius, statistics=statistics)
        crown, ibp = crown_differences(output, labels), upper_differences(output, labels)
        both = acert.worst_case_logits(
            model, images, labels, radius, statistics=statistics, bounds="crown-ibp"
        )
    assert (both <= ibp).all()
    assert torch.equal(both, torch.minimum(crown, ibp))
    assert radius > 0.01 or (crown < ibp - 1e-6).sum() > 30  # and well ahead in small boxes
    start = box(images, torch.full((10,), radius).double(), DOMAIN)
    lower, upper = start.ends()
    samples = 50 if name == "cnn7" else 2000
    for count in [samples // 10] * 10 + [0]:
        if count:
            points = lower + torch.rand(count, *lower.shape).double() * (upper - lower)
            points = points.flatten(0, 1)
        else:
            points = attacked(evaluated, lower, upper, labels, count=samples // 10)
        with torch.no_grad():
            z = differences(evaluated(points), labels.repeat(len(points) // 10))
        assert (z.unflatten(0, (-1, 10)) <= both + 1e-10).all()


@pytest.mark.parametrize("radius", [0.0, 0.3])
def test_the_margin_is_that_of_the_smaller_bound(radius):
    model, (images, labels) = make("mlp"), digits(6)
    labels = labels % 5
    for elide in (True, False):
        kinds = {
            bounds: acert.certified_margin(
                model, images, labels, radius, elide=elide, bounds=bounds
            )
            for bounds in ("ibp", "crown-ibp")
        }
        crown = crown_differences(recorded(model, images, radius), labels)
        own = F.one_hot(labels, 5).bool()
        alone = crown.masked_fill(own, -torch.inf).amax(1)
        assert (kinds["crown-ibp"] <= kinds["ibp"]).all()
        assert (kinds["crown-ibp"] <= alone + 1e-12).all()


# -- rounding ---------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [[5], [5, 4]])
def test_exact_crown_is_negative_at_the_value(hidden):
    proven = 0
    for seed in range(12):
        torch.manual_seed(seed)
        model = models.mlp(3, hidden, 3).double()
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        images = torch.rand(2, 3).double()
        result = acert.certified_radius(
            model, images, max_radius=0.5, bounds="crown-ibp",
            solver=acert.Brent(xtol=1e-15, rtol=1e-15, max_steps=200),
        )  # fmt: skip
        exact = parts(model, Fraction)
        for image, value, label in zip(images, result.value, result.prediction, strict=True):
            if value == 0:
                continue
            sides, label = exact_box(image, value.item()), label.item()
            bounds = zip(
                dense_crown(exact, *sides, label), dense_ibp(exact, *sides, label), strict=True
            )
            margins = [min(pair) for i, pair in enumerate(bounds) if i != label]
            assert max(margins) < 0
            proven += 1
    assert proven > 15


def cancelling(seed):
    """A network whose neurons come in pairs of about 1e9 that nearly cancel, and one image."""
    generator = torch.Generator().manual_seed(seed)
    model = models.mlp(6, [64], 2).double()
    with torch.no_grad():
        half = 1e8 * torch.randn(32, 6, generator=generator).double()
        change = 1e-8 * 1e5 ** (seed % 2) * torch.randn(32, 6, generator=generator)
        sign, order = torch.randn(32, generator=generator), torch.randperm(64, generator=generator)
        model[1].weight.copy_(torch.cat((half, half + change))[order])
        model[1].bias.fill_(1e9)
        model[3].weight.zero_()[0].copy_(torch.cat((sign, -sign))[order])
        model[3].bias.zero_()
    return model, torch.rand(1, 6, generator=generator).double()


def exact_logits(model, image):
    values = [Fraction(p) for p in image.flatten().tolist()]
    layers = parts(model, Fraction)
    for weight, bias in layers:
        values = [b + inner(row, values) for row, b in zip(weight, bias, strict=True)]
        if weight is not layers[-1][0]:
            values = [max(v, Fraction(0)) for v in values]
    return values


@pytest.mark.parametrize(("arithmetic", "fails"), [("nearest", True), ("real", False)])
def test_networks_that_cancel(arithmetic, fails):
    wrong = proven = 0
    for seed in range(24):
        model, image = cancelling(seed)
        result = acert.certified_radius(
            model, image, max_radius=0.5, bounds="crown-ibp", arithmetic=arithmetic
        )
        logits, label = exact_logits(model, image), result.prediction.item()
        proven += bool(result.value > 0)
        wrong += bool(result.value > 0) and logits[1 - label] >= logits[label]
    assert proven > 0
    assert (wrong > 0) == fails


@pytest.mark.parametrize("name", ["small_resnet", "cnn7", "small_cnn"])
def test_exact_networks_stay_certified_at_the_value(name):
    """Corners of the box at `value`, evaluated in balls: the truth is never above the proof."""
    model, (images, _) = make(name), digits(2)
    result = acert.certified_radius(model, images, max_radius=0.2, bounds="crown-ibp")
    assert (result.value > 0).all()
    reach = torch.nextafter(result.value, torch.zeros(())).reshape(-1, 1, 1, 1)
    lower, upper = (images - reach).clamp(min=0), (images + reach).clamp(max=1)
    points = [torch.where(torch.rand_like(lower) < 0.5, lower, upper) for _ in range(2)]
    points.append(attacked(model, lower, upper, result.prediction, count=1))
    bound = crown_differences(
        recorded(model, images, result.value, rounding=REAL), result.prediction
    )
    for point in points:
        logits = ball.outputs(model, point)
        for row, label in enumerate(result.prediction.tolist()):
            for i in range(5):
                if i != label:
                    truth = logits[row, i] - logits[row, label]
                    assert truth < 0
                    assert truth <= ball.array(bound[row, i])


def wide(seed):
    torch.manual_seed(seed)
    model = models.mlp(3000, [20, 20], 5)
    return model, torch.rand(4, 3000)


@pytest.mark.parametrize(("rounding", "holds"), [(FLOAT32, True), (REAL, False)])
@pytest.mark.parametrize("name", [*MODELS, "wide"])
def test_what_float32_computes(name, rounding, holds):
    """At radius 0 nothing but rounding is left; the float32 network errs by more than 1e-13."""
    if name == "wide":
        model, images = wide(0)
    else:
        model, images = make(name, torch.float32), digits(4, dtype=torch.float32)[0]
    labels = torch.arange(4)
    bound = crown_differences(
        recorded(model, images.double(), torch.zeros(4).double(), rounding=rounding), labels
    )
    single = torch.cat([model(image.unsqueeze(0)) for image in images])
    held = []
    for logits in (model(images), single, reordered(model)(images)):
        held.append((differences(logits.double(), labels) <= bound).all())
    assert all(held) == holds
    if rounding is FLOAT32:
        exact = differences(copy.deepcopy(model).double()(images.double()), labels)
        assert (bound - exact).max() < 1e-2  # and not by a bound that says nothing


def reordered(model):
    """The same float32 network with the summands of its last two layers' sums in another order."""
    model = copy.deepcopy(model)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    last = layers[-1]
    order = torch.randperm(last.in_features)
    with torch.no_grad():
        last.weight.copy_(last.weight[:, order])
    last.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, order],))
    return model


@pytest.mark.parametrize("layers", [1, 2])
def test_nothing_is_proven_where_float32_may_overflow(layers):
    model = nn.Sequential(*[nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)][: 2 * layers - 1])
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3e38, 0.0], [-3e38, 0.0]]))
    images, labels = torch.tensor([[1.0, 1.0], [1e-3, 1e-3]]), torch.tensor([0, 0])
    for rounding, proven in ((FLOAT32, [False, True]), (REAL, [True, True])):
        output = recorded(model, images.double(), 0.0, rounding=rounding)
        assert crown_differences(output, labels)[:, 1].isfinite().tolist() == proven


class Spy:
    """Stands for a bound, and keeps what a rule does to it."""

    def __init__(self, rounding):
        self.rounding = rounding

    def send(self, interval, A):
        self.slope = A

    def shift(self, A, constant):
        self.lift = constant

    def allow(self, *args, **kwargs):
        pass


@pytest.mark.parametrize(("rounding", "holds"), [(REAL, True), (None, False)])
def test_the_upper_line_of_relu_holds_at_both_ends(rounding, holds):
    lower, upper = -torch.rand(2000, 1).double(), torch.rand(2000, 1).double().pow(4)
    spy = Spy(rounding)
    rule = BACKWARD[RULES[F.relu].rule]
    rule(Step(spy, None, torch.ones(2000, 1, 1).double()), Interval(lower, upper))
    held = []
    for ends in zip(lower, upper, spy.slope, spy.lift, strict=True):
        left, right, slope, lift = (Fraction(value.item()) for value in ends)
        held.append(slope * left + lift >= 0 and slope * right + lift >= right)
    assert all(held) == holds


def test_our_own_sums_are_paid_for():
    """The error of A W and of A b, in exact arithmetic, times what it is multiplied by."""
    output = recorded(nn.Identity(), torch.zeros(1, 2).double(), 0.0, rounding=REAL)
    for seed in range(20):
        torch.manual_seed(seed)
        A, weight, bias, size = (
            torch.randn(shape).double() * 10.0 ** torch.randint(-6, 6, shape)
            for shape in ((1, 1, 30), (30, 5), (30,), (1, 5))
        )
        bound = LinearBound(output, torch.zeros(1, 2, 2).double())
        bound.shift(A, bias)
        bound.allow(A, lambda: F.linear(size.abs(), weight.abs(), bias.abs()), own=30)  # noqa: B023
        (error,), (term,) = bound._errors, bound._terms
        row = [Fraction(a) for a in A.flatten().tolist()]
        columns = [[Fraction(w) for w in column] for column in weight.T.tolist()]
        made = inner(row, [Fraction(b) for b in bias.tolist()]) - Fraction(term.item())
        needed = abs(made) + sum(
            abs(inner(row, column) - Fraction(found)) * abs(Fraction(x))
            for column, found, x in zip(
                columns, (A @ weight).flatten().tolist(), size.flatten().tolist(), strict=True
            )
        )
        assert 0 < needed <= Fraction(error.item())


# -- certified radii --------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", ["real", "float32", "nearest"])
@pytest.mark.parametrize("name", MODELS)
def test_radii_are_never_below_those_of_intervals(name, arithmetic):
    model, (images, _) = make(name, torch.float32), digits(5, dtype=torch.float32)
    ibp, crown = (
        acert.certified_radius(
            model, images, max_radius=0.3, bounds=bounds, arithmetic=arithmetic, batch_size=2
        )
        for bounds in ("ibp", "crown-ibp")
    )
    assert (crown.value >= ibp.value * (1 - 1e-5)).all()
    assert (crown.value > ibp.value * 1.2).any()
    rounding = {"real": REAL, "float32": FLOAT32, "nearest": None}[arithmetic]
    margin = proven_margin(
        model, images.double(), crown.prediction, crown.value, rounding=rounding,
        bounds="crown-ibp",
    )  # fmt: skip
    assert (margin[crown.value > 0] < 0).all()
    beyond = proven_margin(
        model, images.double(), crown.prediction, crown.value * 1.01, rounding=rounding,
        bounds="crown-ibp",
    )  # fmt: skip
    assert (beyond[crown.status == acert.Status.ROOT] >= 0).all()


@pytest.mark.parametrize("arithmetic", ["real", "nearest"])
def test_elision_is_not_needed(arithmetic):
    """CROWN starts at the differences in any case; only the interval side gets looser."""
    model, (images, _) = make("mlp"), digits(4)
    elided, plain, intervals = (
        acert.certified_radius(
            model, images, max_radius=0.3, bounds=bounds, elide=elide, arithmetic=arithmetic
        ).value
        for bounds, elide in (("crown-ibp", True), ("crown-ibp", False), ("ibp", False))
    )
    torch.testing.assert_close(plain, elided, rtol=1e-4, atol=1e-9)
    assert (plain > 1.2 * intervals).any()
    ending = nn.Sequential(model, nn.BatchNorm1d(5).double().eval())
    result = acert.certified_radius(
        ending, images, max_radius=0.3, bounds="crown-ibp", elide=False, arithmetic=arithmetic
    )
    torch.testing.assert_close(result.value, elided, rtol=1e-4, atol=1e-9)


def test_rounding_safety_costs_little():
    model, (images, labels) = trained(), digits(60, dtype=torch.float32)
    values = [
        acert.certified_radius(
            model, images, labels, max_radius=0.3, bounds="crown-ibp", arithmetic=arithmetic
        ).value
        for arithmetic in ("float32", "real", "nearest")
    ]
    assert (values[0] <= values[1] * (1 + 1e-5)).all()
    assert (values[1] <= values[2] * (1 + 1e-5)).all()
    assert values[0].sum() > 0.99 * values[2].sum()


def re_entering():
    """A network whose margin is negative, positive and negative again as the radius grows."""
    torch.manual_seed(41)
    model = models.mlp(2, [6, 6], 3).double()
    for parameter in model.parameters():
        parameter.data.mul_(3)
    return model, torch.rand(64, 2).double()[4:5]


def test_a_margin_that_is_not_monotone_is_negative_at_the_value():
    model, image = re_entering()
    label = model(image).argmax(1)
    grid = torch.linspace(0, 0.3, 301).double()
    margins = proven_margin(
        model, image.expand(301, -1), label.expand(301), grid, rounding=None,
        domain=None, bounds="crown-ibp",
    )  # fmt: skip
    negative = margins < 0
    assert (~negative[:-1] & negative[1:]).any()  # it does fall again
    for cap in (0.1, 0.2, 0.25, 0.3):
        result = acert.certified_radius(
            model, image, max_radius=cap, domain=None, bounds="crown-ibp"
        )
        at_value = proven_margin(
            model, image, label, result.value, rounding=REAL, domain=None, bounds="crown-ibp"
        )
        assert 0 < result.value <= cap
        assert at_value < 0


def trained():
    """A small classifier of digits after a few steps of interval training."""
    data = load_digits()
    images = torch.tensor(data.images[:1200] / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(data.target[:1200])
    torch.manual_seed(0)
    model = models.mlp(64, [32, 32], 10)
    models.ibp_init_(model)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for step in range(150):
        chosen = torch.randint(1200, (64,))
        logits = acert.worst_case_logits(
            model, images[chosen], labels[chosen], 0.03 * min(1.0, step / 100)
        )
        optimizer.zero_grad()
        F.cross_entropy(logits, labels[chosen]).backward()
        optimizer.step()
    return model.requires_grad_(False)


def shortfall(model, images, labels, *, max_radius, points=1000):
    """How far `value` stays behind the largest radius of a grid with a negative margin."""
    value = acert.certified_radius(
        model, images, labels, max_radius=max_radius, bounds="crown-ibp"
    ).value
    best = torch.zeros_like(value)
    for radius in (torch.arange(1, points + 1).double() * max_radius / points).split(20):
        count = len(radius)
        margin = proven_margin(
            model,
            images.double().repeat(count, 1, 1, 1),
            labels.repeat(count),
            radius.repeat_interleave(len(images)),
            rounding=None,
            bounds="crown-ibp",
        )
        reached = torch.where(margin < 0, radius.repeat_interleave(len(images)), 0.0)
        best = torch.maximum(best, reached.unflatten(0, (count, -1)).amax(0))
    return value, (best - value).clamp(min=0)


def test_radii_reach_those_of_a_grid():
    images, labels = digits(30, dtype=torch.float32)
    value, behind = shortfall(trained(), images, labels, max_radius=0.2)
    assert (value > 0).sum() > 20
    assert behind.max() < 1e-4


@pytest.mark.parametrize("bounds", ["crown-ibp", "crown"])
def test_differentiable_radii(bounds):
    model = make("mlp")
    images = 0.5 + 0.3 * torch.rand(3, 1, 8, 8).double()
    labels = model(images).argmax(1)
    direction = torch.randn_like(images)

    def radii(points):
        return acert.certified_radius(
            model, points, labels, max_radius=0.5, domain=None, bounds=bounds,
            differentiable=points.requires_grad, solver=acert.Brent(xtol=1e-15, rtol=1e-14),
        ).value  # fmt: skip

    ahead, behind = radii(images + 1e-6 * direction), radii(images - 1e-6 * direction)
    images.requires_grad_()
    (gradient,) = torch.autograd.grad(radii(images).sum(), images)
    slope = (gradient * direction).flatten(1).sum(1)
    torch.testing.assert_close(slope, (ahead - behind) / 2e-6, rtol=1e-4, atol=1e-8)


# -- gradients and compilation ----------------------------------------------------------


def test_a_last_layer_of_zeros_has_the_gradient_of_its_input():
    # Surely active: z_1 - z_0 = (w_1 - w_0) . h, whose slope in w_1 is h at radius 0.
    images, hidden = torch.rand(2, 4).double(), nn.Linear(4, 6).double()
    nn.init.constant_(hidden.bias, 9.0)
    weight = torch.zeros(3, 6, dtype=torch.float64, requires_grad=True)
    output = F.linear(F.relu(recorded(hidden, images, 0.0)), weight)
    crown_differences(output, torch.tensor([0, 0]))[0, 1].backward()
    active = hidden(images)[0].detach()
    torch.testing.assert_close(weight.grad, torch.stack((-active, active, 0 * active)))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_against_finite_differences(name):
    model, (images, labels) = make(name), digits(3)
    labels = labels % 5
    model.train()

    def loss(images, *values):
        bound = Weighted(model, values)
        _, statistics = acert.clean_pass(bound, images)
        output = recorded(bound, images, 0.02, statistics=statistics, domain=None)
        return F.cross_entropy(crown_differences(output, labels), labels)

    values = [images, *(p.detach().clone() for p in model.parameters())]
    assert_slope(loss, values)


def test_compiled_equals_eager():
    branch = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2))
    model = nn.Sequential(
        models.Normalize(0.4, 0.3),
        nn.Conv2d(1, 2, 3, stride=2, padding=1),
        nn.ReLU(),
        models.Residual(branch),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).double()
    images, labels = digits(3)
    labels = labels % 5

    def bounds(images, labels):
        _, statistics = acert.clean_pass(model, images)
        radius = torch.full((3,), 0.03, dtype=images.dtype)
        bound_pass = BoundPass(statistics=statistics, record=True)
        start = box(images, radius, DOMAIN).within(bound_pass)
        return crown_differences(propagate(model, start), labels)

    eager = bounds(images, labels)
    gradients = torch.autograd.grad(eager.logsumexp(1).sum(), list(model.parameters()))
    compiled = torch.compile(bounds, fullgraph=True, backend="aot_eager")(images, labels)
    torch.testing.assert_close(compiled, eager)
    found = torch.autograd.grad(compiled.logsumexp(1).sum(), list(model.parameters()))
    torch.testing.assert_close(found, gradients)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("function", [dot, scaled])
def test_compiled_sums_go_through_the_memory_in_its_order(function, layout):
    A = torch.randn(2 * 3, 4, 5, 6, dtype=torch.float64).to(memory_format=layout)
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64).to(memory_format=layout)
    A, x = A.unflatten(0, (2, 3)).requires_grad_(), x.requires_grad_()
    nodes = []

    def keep(graph, _):
        nodes.extend(node for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    product = torch.einsum("brchw,bchw->brchw", A, x)
    expected = product if function is scaled else product.sum((2, 3, 4))
    weights = torch.randn_like(expected)

    def weighted(
        A, x, weights
    ):  # inside, as in a step: gradients that come in have their own order
        found = function(A, x)
        return found.detach(), (found * weights).sum()

    torch.compiler.reset()
    compiled = torch.compile(weighted, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    found, total = compiled(A, x, weights)
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(total, (A, x))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (A, x), weights))
    aten = torch.ops.aten
    assert not {node.target for node in nodes} & {aten.clone.default, aten._unsafe_view.default}
    summed = [node.args[0].meta["val"] for node in nodes if node.target is aten.sum.dim_IntList]
    assert summed
    # Element after element along the last axis; what stays where it is was broadcast.
    assert all(tensor.stride(-1) in (0, 1) for tensor in summed)


@pytest.mark.parametrize("safe", [False, True], ids=["plain", "safe"])
@torch.no_grad()  # else torch.compile asks intermediate results for their gradients, and warns
def test_a_model_that_was_compiled_by_itself_has_the_bounds_of_the_model(safe):
    torch.compiler.reset()
    layers = [nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)]
    model, images = nn.Sequential(*layers), torch.rand(3, 4)

    def bounds(model):
        if safe:
            return acert.certified_radius(model, images, max_radius=0.5, bounds="crown-ibp").value
        labels = torch.tensor([0, 1, 2])
        return acert.certified_margin(model, images, labels, 0.1, bounds="crown-ibp")

    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(bounds(compiled), bounds(model))
    torch.compiler.reset()
    part = nn.Sequential(*layers[:2], torch.compile(nn.Sequential(*layers[2:]), backend="eager"))
    torch.testing.assert_close(bounds(part), bounds(model), rtol=1e-6, atol=0)


# -- the record -------------------------------------------------------------------------


def test_in_place_operations_do_not_confuse_the_record():
    class Model(nn.Module):
        def __init__(self, inplace):
            super().__init__()
            torch.manual_seed(1)
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
            self.inplace = inplace

        def forward(self, x):
            hidden = self.first(x)
            scaled = hidden * 2  # the record must keep what `hidden` was here
            activated = F.relu(hidden, inplace=self.inplace)
            if self.inplace:
                activated += scaled
            else:
                activated = activated + scaled
            return self.last(activated)

    images, labels = torch.rand(3, 4), torch.tensor([0, 1, 2])
    found, wanted = (
        crown_differences(recorded(Model(inplace=inplace), images, 0.1), labels)
        for inplace in (True, False)
    )
    assert torch.equal(found, wanted)


def test_nothing_is_recorded_unless_asked_for():
    model, (images, _) = make("mlp"), digits(1)
    assert acert.interval_bounds(model, images, images).source is None
    output = recorded(model, images, 0.1)
    assert output.source.function is F.linear
    assert output.source.step == 6
    with pytest.raises(acert.InvalidInput, match=r"BoundPass\(record=True\); got record=False"):
        crown_differences(acert.interval_bounds(model, images, images), torch.tensor([0]))


# -- refusals ---------------------------------------------------------------------------

REFUSED = {
    r"softmax: CROWN has no backward rule for it": ((2, 3), lambda x: F.softmax(x, 1)),
    r"clamp: CROWN needs an interval to clamp to; got \[1, 0\.0\]": (
        (2, 3),
        lambda x: x.clamp(1, 0.0),
    ),
    r"clamp: CROWN needs numbers to clamp to; got Tensor": (
        (2, 3),
        lambda x: x.clamp(min=torch.zeros(3)),
    ),
    r"leaky_relu: CROWN has a backward rule only for slopes in \[0, 1\]; got 1.5": (
        (2, 3),
        lambda x: F.leaky_relu(x, 1.5),
    ),
    r"max_pool1d: CROWN needs a batch axis": ((2, 6), lambda x: F.max_pool1d(x, 2)),
    r"avg_pool1d: CROWN needs a batch axis": ((2, 6), lambda x: F.avg_pool1d(x, 2)),
    r"conv_transpose1d: CROWN needs a batch": (
        (2, 6),
        lambda x: F.conv_transpose1d(x, torch.ones(2, 3, 1)),
    ),
    r"mul: .* a product of two intervals": ((2, 3), lambda x: x * x),
    r"add: CROWN needs the samples to stay on the first": (
        (2, 3),
        lambda x: (x + torch.zeros(2, 2, 1)).flatten(1),
    ),
    r"mul: CROWN needs the samples to stay on": ((1, 3), lambda x: torch.ones(2, 3) * x),
    r"permute: CROWN needs the samples to stay": ((3, 3), lambda x: x.permute(1, 0)),
    r"Tensor\.t: CROWN needs the samples": ((3, 3), lambda x: x.t()),
    r"expand: CROWN needs the samples to stay": ((2, 2), lambda x: x.expand(2, 2, 2).flatten(1)),
    r"narrow: CROWN needs the samples to": ((3, 3), lambda x: x.narrow(0, 0, 2)),
    r"split: CROWN needs the samples to": ((4, 3), lambda x: x.split(2)[1]),
    r"unbind: CROWN needs the samples to": ((4, 3, 2), lambda x: x.unbind()[1]),
    r"stack: CROWN needs the samples": ((2, 3), lambda x: torch.stack([x, x]).flatten(1)),
    r"cat: CROWN needs the samples to": ((2, 3), lambda x: torch.cat([x, x])),
    r"getitem.*: CROWN needs the samples": ((2, 3), lambda x: x[:1]),
    r"__getitem__: CROWN needs the samples": ((2, 3), lambda x: x[None, 0]),
    r"_getitem__: CROWN needs the samples": ((2, 3), lambda x: x[[1, 0]]),
    r"getitem__: CROWN needs the samples": ((2, 3), lambda x: x[..., 0:1, 1:]),
    r"getitem__: CROWN takes slices and numbers": ((2, 3, 3), lambda x: x[:, [0, 1], [1, 2]]),
    r"getitem__: CROWN takes slices and numb": ((2, 3, 3), lambda x: x[:, [0, 1], 1]),
    r"getitem__: CROWN takes slices and num": (
        (2, 3),
        lambda x: x[:, torch.tensor([True, False, True])],
    ),
    r"getitem__: CROWN takes slices and nu": ((2, 3), lambda x: x[:, True].flatten(1)),
    r"pad: CROWN needs the samples to stay": ((2, 3), lambda x: F.pad(x, (0, 0, 1, 0))),
    r"sum: .* axes besides the batch": ((2, 3), lambda x: x.sum(0, keepdim=True)),
    r"avg_pool2d: .* all its windows weigh the same": (
        (2, 1, 6, 6),
        lambda x: F.avg_pool2d(x, 4, ceil_mode=True).flatten(1),
    ),
    r"avg_pool2d: .* where all its windows": (
        (2, 1, 6, 6),
        lambda x: F.avg_pool2d(x, 2, padding=1, count_include_pad=False).flatten(1),
    ),
    r"adaptive_avg_pool2d: .* where \[4, 6\] divides \[6, 6\]": (
        (2, 1, 6, 6),
        lambda x: F.adaptive_avg_pool2d(x, (4, None)).flatten(1),
    ),
    r"reshape: CROWN needs the samples to stay on": ((2, 6), lambda x: x.reshape(4, 3)),
    r"conv2d: CROWN needs a batch axis": (
        (2, 6, 6),
        lambda x: F.conv2d(x, torch.ones(3, 2, 1, 1)).flatten(1),
    ),
    r"linear: CROWN needs a matrix": (
        (2, 3, 4),
        lambda x: F.linear(x, torch.ones(4)),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_name_the_operation(message):
    shape, function = REFUSED[message]
    box = Interval(torch.zeros(shape), torch.ones(shape)).within(BoundPass(record=True))
    output = function(box)
    with pytest.raises(acert.UnsupportedOperation, match=message):
        crown_differences(output, torch.zeros(len(output), dtype=torch.int64))


def test_a_padding_constant_that_float32_cannot_hold_is_refused():
    model = Apply(lambda x: F.pad(x, (0, 1), value=1e39))
    output = recorded(model, torch.rand(2, 3).double(), 0.1, rounding=FLOAT32)
    with pytest.raises(acert.UnsupportedOperation, match=r"pad: `value` must be .*; got 1e\+39"):
        crown_differences(output, torch.tensor([0, 1]))


def test_a_refusal_reaches_the_caller():
    model, images = models.mlp(3, [4], 3, activation=lambda: nn.Softmax(1)), torch.rand(2, 3)
    assert (acert.certified_radius(model, images, max_radius=0.1).value > 0).all()
    with pytest.raises(acert.UnsupportedOperation, match=r'softmax: .*; `bounds="ibp"` has'):
        acert.certified_radius(model, images, max_radius=0.1, bounds="crown-ibp")


def test_a_registered_rule_is_refused_by_name():
    def doubled(x):
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(doubled, (x,), x)
        return 2 * x

    acert.register_rule(doubled, lambda x: x * 2, ulps=1)
    try:
        model = nn.Sequential(nn.Linear(3, 3), Apply(doubled))
        with pytest.raises(acert.UnsupportedOperation, match="doubled: CROWN has no backward rule"):
            crown_differences(recorded(model, torch.rand(2, 3), 0.1), torch.tensor([0, 1]))
    finally:
        del RULES[doubled]


def test_a_constant_overwritten_after_the_pass_is_refused():
    model = nn.Linear(3, 3).requires_grad_(False)
    output = recorded(model, torch.rand(2, 3), 0.1)
    model.weight.zero_()
    with pytest.raises(acert.UnsupportedOperation, match="constants was overwritten after"):
        crown_differences(output, torch.tensor([0, 1]))


def test_inference_tensors_are_taken():
    with torch.inference_mode():
        model = nn.Linear(3, 3)
        found = crown_differences(recorded(model, torch.rand(2, 3), 0.0), torch.tensor([0, 1]))
    assert found.isfinite().all()


@pytest.mark.parametrize("function", ["certified_radius", "certified_margin", "worst_case_logits"])
def test_unknown_bounds_are_refused(function):
    more = {"max_radius": 0.1} if function == "certified_radius" else {"radius": 0.1}
    with pytest.raises(acert.InvalidInput, match=r"`bounds` must be one of .*; got 'alpha-crown'"):
        getattr(acert, function)(
            nn.Linear(3, 3), torch.rand(2, 3), torch.tensor([0, 1]), bounds="alpha-crown", **more
        )


def test_unknown_arithmetic_is_refused():
    with pytest.raises(acert.InvalidInput, match=r"\['float32', 'nearest', 'real'\]; got 'exact'"):
        acert.certified_radius(
            nn.Linear(3, 3), torch.rand(2, 3), max_radius=0.1, arithmetic="exact"
        )
