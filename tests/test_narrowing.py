"""CROWN's own bounds of activations: `bounds="crown"`."""

import copy
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from tests.slopes import Weighted, assert_slope
from tests.test_crown import exact_box, fused, largest, parts, walk
from tests.test_crown_networks import CLASSES, NETWORKS, digits, make, trained
from torch import nn
from torch.overrides import TorchFunctionMode

import acert
from acert import models
from acert.attack import attack_radius
from acert.bounds import narrowing, propagate
from acert.bounds.backward import RELAXED
from acert.bounds.crown import crown_differences, walked_back
from acert.bounds.interval import BoundPass, Interval, cut
from acert.bounds.linear_bound import LinearBound
from acert.bounds.margin import bounding, box, upper_differences
from acert.bounds.proven import proven_margin
from acert.bounds.rounding import FLOAT32, REAL
from acert.bounds.table import RULES

# The networks whose activations differ in kind.
KINDS = ["leaky relu", "hardtanh", "max pool", "tanh", "dense", "up and down"]


def output_of(model, images, radius, *, rounding=None, narrow=narrowing.narrowed):
    radius = torch.as_tensor(radius, dtype=images.dtype).expand(len(images))
    start = box(images, radius, (0.0, 1.0), rounding=rounding)
    return propagate(model, start.within(BoundPass(rounding, record=True, narrow=narrow)))


def random_mlp(hidden, *, inputs=4, classes=3):
    model = models.mlp(inputs, hidden, classes).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


# -- the slow, direct form --------------------------------------------------------------


def activations(layers, lower, upper):
    """Bounds of every hidden layer by walks through those before it, and by intervals."""
    hidden, low, high = [], lower, upper
    for depth, (weight, bias) in enumerate(layers[:-1]):
        found = []
        for row, b in zip(weight, bias, strict=True):
            left, right = b + largest(row, high, low), b + largest(row, low, high)
            if left < 0 < right:  # else a line, which nothing is gained for
                right = min(right, walk(row, b, layers[:depth], hidden, lower, upper))
                negative = [-w for w in row]
                left = max(left, -walk(negative, -b, layers[:depth], hidden, lower, upper))
            found.append((left, right))
        hidden.append(tuple(zip(*found, strict=True)))
        low, high = ([max(end, 0) for end in side] for side in hidden[-1])
    return hidden


@pytest.mark.parametrize("hidden", [[7], [6, 5], [5, 6, 4], [4, 4, 4, 4]])
@pytest.mark.parametrize("radius", [0.0, 0.05, 0.4])
def test_equals_a_dense_loop(hidden, radius):
    model = random_mlp(hidden)
    images, labels = torch.rand(6, 4).double(), torch.randint(3, (6,))
    seen = []

    def narrow(interval, rule):
        found = narrowing.narrowed(interval, rule)
        if rule in RELAXED:
            seen.append(found)
        return found

    found = crown_differences(output_of(model, images, radius, narrow=narrow), labels)
    layers = parts(model)
    for at, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        low = (image - radius).clamp(min=0).tolist()
        high = (image + radius).clamp(max=1).tolist()
        wanted = activations(layers, low, high)
        for interval, (left, right) in zip(seen, wanted, strict=True):
            lower, upper = interval.lower[at], interval.upper[at]
            left, right = (torch.tensor(side, dtype=torch.float64) for side in (left, right))
            torch.testing.assert_close(lower, left, rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(upper, right, rtol=1e-11, atol=1e-11)
        rows = [
            walk(row, shift, layers[:-1], wanted, low, high) for row, shift in fused(layers, label)
        ]
        rows = torch.tensor(rows, dtype=torch.float64)
        torch.testing.assert_close(found[at], rows, rtol=1e-10, atol=1e-10)


def test_by_hand():
    # Both rows are x, so that their difference is 0, where intervals have [-2, 2].
    start = Interval(-torch.ones(1, 1), torch.ones(1, 1))
    twice, difference = torch.ones(2, 1), torch.tensor([[1.0, -1.0]])
    for narrow, width in ((None, 2.0), (narrowing.narrowed, 0.0)):
        start.within(BoundPass(record=True, narrow=narrow))
        activated = F.relu(F.linear(F.linear(start, twice), difference))
        assert activated.lower.tolist() == [[0.0]]
        assert activated.upper.tolist() == [[width]]


# -- what is walked, and what is not ----------------------------------------------------


@pytest.fixture
def walks(monkeypatch):
    """The number of rows of every walk for an activation."""
    rows = []

    def counted(bound):
        upper = walked_back(bound)
        rows.append(upper.shape[1])
        return upper

    monkeypatch.setattr(narrowing, "walked_back", counted)
    return rows


def test_nothing_is_walked_where_intervals_are_exact(walks):
    first = nn.Sequential(
        models.Normalize(0.4, 0.3), nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(),
        nn.MaxPool2d(2), nn.LeakyReLU(), nn.Flatten(), nn.Linear(27, 10),
    ).eval()  # fmt: skip
    output_of(first, digits(2)[0], 0.1)
    assert walks == []
    pooled = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten())
    output_of(pooled, digits(2)[0], 0.1)
    assert walks != []


def test_only_neurons_that_may_switch_are_walked(walks):
    model = random_mlp([6, 8])
    with torch.no_grad():
        model[3].bias.copy_(torch.tensor([99.0, -99.0, 99.0, -99.0, 0.0, 99.0, 0.0, -99.0]))
    output = output_of(model, torch.rand(3, 4).double(), 0.3)
    assert walks == [4]  # both ends of two
    assert output.shape == (3, 3)


def test_bounds_do_not_depend_on_the_size_of_a_walk(walks, monkeypatch):
    model, (images, labels) = trained("max pool"), digits(3)
    whole = crown_differences(output_of(model, images, 0.02), labels)
    count = len(walks)
    monkeypatch.setitem(narrowing._COEFFICIENTS, "cpu", 2**13)
    parted = crown_differences(output_of(model, images, 0.02), labels)
    assert len(walks) > 3 * count
    torch.testing.assert_close(parted, whole)


def test_another_default_device_changes_nothing():
    model = Calls(lambda x, one, two: two(one(x).relu()).relu(), nn.Linear(4, 6), nn.Linear(6, 3))
    images, labels = torch.rand(5, 4), torch.randint(3, (5,))

    def margin():
        return acert.certified_margin(model, images, labels, 0.2, bounds="crown", elide=False)

    wanted = margin()
    with torch.device("meta"):
        assert torch.equal(margin(), wanted)


def test_in_place_activations_are_narrowed_too():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)]
    model = nn.Sequential(*layers)
    inplace = nn.Sequential(*(nn.ReLU(inplace=True) if i % 2 else layers[i] for i in range(5)))
    images, labels = torch.rand(5, 4), torch.randint(3, (5,))
    margins = [
        acert.certified_margin(each, images, labels, 0.2, bounds=bounds)
        for each, bounds in ((model, "crown"), (inplace, "crown"), (model, "crown-ibp"))
    ]
    assert torch.equal(margins[0], margins[1])
    assert (margins[0] < margins[2]).any()


def test_elision_keeps_the_layer_that_was_called():
    """Logits that a side branch activates: what is narrowed is not what elision looks at."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x):
            logits = self.last(F.relu(self.first(x)))
            F.relu(logits)
            return logits

    model, images, labels = Model(), torch.rand(5, 4), torch.randint(3, (5,))
    output = output_of(model, images, 0.1)
    plain = output_of(model, images, 0.1, narrow=None)
    assert torch.equal(upper_differences(output, labels), upper_differences(plain, labels))


# -- parts ------------------------------------------------------------------------------


class Around(nn.Module):
    """Convolutions around something else, all of it activated."""

    def __init__(self, between, *, convolution=nn.Conv2d):
        super().__init__()
        self.first = convolution(1, 4, 3, padding=1)
        self.between = copy.deepcopy(between)
        self.last = convolution(4, 3, 3, padding=1)

    def forward(self, x):
        inner = F.relu(self.between(F.relu(self.first(x))))
        return F.relu(self.last(inner)).flatten(1)


class Calls(nn.Module):
    """A function as a module, with the parameters it calls."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)

    def forward(self, x):
        return self.function(x, *self.inner)


SIDES = torch.linspace(-1, 1, 132).reshape(12, 11).double()
# What is between two convolutions, and whether parts go through it.
BETWEEN = {
    "stride": (nn.Conv2d(4, 4, 3, stride=2, padding=1), True),
    "stride that does not reach the end": (nn.Conv2d(4, 4, 2, stride=3), True),
    "dilation": (nn.Conv2d(4, 4, 3, padding=(2, 1), dilation=(2, 3)), True),
    "groups": (nn.Conv2d(4, 4, (3, 2), padding=(1, 0), groups=2), True),
    "same": (nn.Conv2d(4, 4, (5, 3), padding="same"), True),
    "one more border than kernel": (nn.Sequential(nn.Conv2d(4, 4, 2, padding=3), nn.Tanh()), True),
    "batch norm": (nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)), True),
    "averages": (nn.AvgPool2d(3, 1, padding=1), True),
    "averages of all": (nn.AdaptiveAvgPool2d((4, 11)), True),
    "maxima": (nn.MaxPool2d(3, 2, padding=1), True),
    "maxima of few": (nn.MaxPool2d(2, 3, dilation=2, ceil_mode=True), True),
    "residual": (
        Calls(lambda x, one, two: x + two(F.leaky_relu(one(x), 0.2)),
              nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 5, padding=2)), True,
    ),
    "shortcut that strides": (
        Calls(lambda x, one, two: one(x) - two(x),
              nn.Conv2d(4, 4, 3, 2, padding=1), nn.Conv2d(4, 4, 1, 2)), True,
    ),
    "keywords": (
        Calls(lambda x, one: torch.sub(one(x), other=x, alpha=2), nn.Conv2d(4, 4, 3, padding=1)),
        True,
    ),
    "joined": (
        Calls(lambda x, one: torch.cat((one(x)[:, :1], x[:, :1], one(x)[:, 1:]), 1),
              nn.Conv2d(4, 3, 3, padding=1)), False,
    ),
    "joined at once": (
        Calls(lambda x, one: one(torch.cat((torch.tanh(x), x, SIDES.expand(len(x), 1, 12, 11)), 1)),
              nn.Conv2d(9, 4, 3, padding=1)), True,
    ),
    "joined sides": (Calls(lambda x: torch.cat((x, x.tanh()), 3)), False),
    "constants with sides": (Calls(lambda x: (x + SIDES[4]) * SIDES / (2 + SIDES)), True),
    "means beside": (Calls(lambda x: x - x.mean((2, 3), keepdim=True)), False),
    "up": (nn.ConvTranspose2d(4, 4, 2, stride=2), False),
    "reflected": (nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(4, 4, 3)), False),
    "turned": (Calls(lambda x: x.transpose(2, 3)), False),
}  # fmt: skip


def activation_bounds(model, images, radius, *, rounding=None):
    """Both ends of everything that goes into a curve, one after the other."""
    seen = []

    def narrow(interval, rule):
        found = narrowing.narrowed(interval, rule)
        if rule in RELAXED:
            seen.extend(found.ends())
        return found

    output_of(model, images, radius, rounding=rounding, narrow=narrow)
    return seen


@pytest.fixture
def peaks(monkeypatch):
    """The largest number of coefficients of a row, in every walk for an activation."""
    found = []

    def seen(bound):
        upper = walked_back(bound)
        found.append(bound.peak)
        return upper

    monkeypatch.setattr(narrowing, "walked_back", seen)
    return found


def bounds_by_tiles(model, images, peaks, monkeypatch, *, rounding):
    """The bounds of activations by tiles of one element, of a few and of all, with their peaks."""
    for tile in (1, 16, 10**6):
        monkeypatch.setitem(narrowing._TILES, "cpu", tile)
        peaks.clear()
        found = activation_bounds(model, images, 0.1, rounding=rounding)
        yield found, max(peaks)


def assert_same_bounds(model, images, peaks, monkeypatch, *, rounding, through=True):
    one, few, whole = bounds_by_tiles(model, images, peaks, monkeypatch, rounding=rounding)
    for found in (one, few):
        for part, all_of_it in zip(found[0], whole[0], strict=True):
            torch.testing.assert_close(part, all_of_it, rtol=1e-10, atol=1e-10)
    assert (one[1] < whole[1]) is through


ROUNDINGS = pytest.mark.parametrize("rounding", [None, REAL, FLOAT32], ids=["-", "real", "float32"])


@pytest.mark.parametrize(
    ("name", "rounding"),
    [*((name, REAL) for name in BETWEEN), ("residual", None), ("residual", FLOAT32)],
)
def test_parts_give_the_bounds_of_the_whole(name, rounding, peaks, monkeypatch):
    torch.manual_seed(0)
    between, through = BETWEEN[name]
    model, images = Around(between).double().eval(), torch.rand(2, 1, 12, 11).double()
    for each in model.modules():
        if isinstance(each, nn.BatchNorm2d):
            nn.init.uniform_(each.weight, -1, 1)
            nn.init.uniform_(each.running_mean, -1, 1)
    assert_same_bounds(model, images, peaks, monkeypatch, rounding=rounding, through=through)


@ROUNDINGS
@pytest.mark.parametrize(
    ("convolution", "pooling", "sides"),
    [(nn.Conv1d, nn.MaxPool1d(3, 2, 1), (40,)), (nn.Conv3d, nn.AvgPool3d(2), (8, 9, 8))],
    ids=["one axis", "three"],
)
def test_parts_on_other_axes(convolution, pooling, sides, rounding, peaks, monkeypatch):
    torch.manual_seed(0)
    model = Around(pooling, convolution=convolution).double()
    images = torch.rand(2, 1, *sides).double()
    assert_same_bounds(model, images, peaks, monkeypatch, rounding=rounding)


def test_walks_fill_their_room_and_keep_to_it(monkeypatch):
    """The box counts too: the largest of all here, and no operation has it as its result."""
    model = nn.Sequential(
        nn.Conv2d(3, 2, 8, stride=8), nn.Tanh(), nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(),
        nn.Flatten(),
    ).double()  # fmt: skip
    seen, upper = [], LinearBound.upper

    def counted(bound, interval, A):
        seen.append(A.numel())
        return upper(bound, interval, A)

    monkeypatch.setattr(LinearBound, "upper", counted)
    monkeypatch.setitem(narrowing._COEFFICIENTS, "cpu", 2**16)
    output_of(model, torch.rand(2, 3, 48, 48).double(), 0.1)
    assert 2**15 < max(seen) <= 2**16


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("sides", [(37,), (12, 11), (5, 9, 4)])
def test_only_tiles_with_something_to_walk_are_cut(sides, share):
    torch.manual_seed(0)
    convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(sides)](1, 4, 3, padding=1)
    start = Interval(torch.zeros(2, 1, *sides), torch.ones(2, 1, *sides))
    interval = propagate(convolution, start.within(BoundPass(record=True)))
    asked = torch.rand(4, *sides) < share
    every = list(narrowing._tiles(interval, torch.ones_like(asked).flatten()))
    assert sum(cut(asked, *tile).numel() for tile in every) == asked.numel()
    found = list(narrowing._tiles(interval, asked.flatten()))
    assert found == [tile for tile in every if cut(asked, *tile).any()]


# -- soundness --------------------------------------------------------------------------


class Activations(TorchFunctionMode):
    """Keeps what goes into every curve of a model, in the order of its calls."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        entry = RULES.get(func)
        if entry is not None and entry.rule in RELAXED:
            self.seen.append(args[0].clone())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("rounding", "dtype"), [(REAL, torch.float64), (FLOAT32, torch.float32)])
@pytest.mark.parametrize("radius", [1e-7, 0.02, 0.1])
@pytest.mark.parametrize("name", NETWORKS)
def test_activations_stay_inside(name, radius, rounding, dtype):
    """Every number that goes into a curve, at many points of the box, in the network's own type."""
    model, (images, _) = copy.deepcopy(trained(name)).to(dtype), digits(4)
    seen, improved = [], 0

    def narrow(interval, rule):
        nonlocal improved
        found = narrowing.narrowed(interval, rule)
        if rule in RELAXED:
            seen.append(found.ends())  # the interval itself may be overwritten
            improved += (found.upper < interval.upper).sum() + (found.lower > interval.lower).sum()
        return found

    output_of(model, images.double(), radius, rounding=rounding, narrow=narrow)
    curves = sum(isinstance(each, (nn.MaxPool1d, nn.MaxPool2d)) for each in model.modules())
    assert improved > 0 or radius < 1e-6 or len(seen) == 1 or curves
    lower, upper = box(images.double(), torch.full((4,), radius).double(), (0.0, 1.0)).ends()
    for _ in range(20):
        corner = torch.where(torch.rand_like(lower) < 0.5, lower, upper)
        points = (corner + torch.rand(4, 1, 1, 1) * (images - corner)).to(dtype).double()
        points = torch.where((lower <= points) & (points <= upper), points, images.double())
        with Activations() as here, torch.no_grad():
            model(points.to(dtype))
        assert len(here.seen) == len(seen)
        for value, (least, most) in zip(here.seen, seen, strict=True):
            value = value.double()
            # Exact arithmetic is meant there, and float64 is not quite that.
            slack = 1e-13 * (1 + value.abs().max()) if rounding is REAL else 0.0
            assert (value >= least - slack).all()
            assert (value <= most + slack).all()


@pytest.mark.parametrize("name", NETWORKS)
def test_attacks_inside_the_radii_find_nothing(name):
    model, (images, _) = trained(name), digits(6, start=1000)
    found = {}
    for bounds in ("ibp", "crown-ibp", "crown"):
        found[bounds] = acert.certified_radius(
            model, images, max_radius=0.1, bounds=bounds, arithmetic="float32"
        )
    crown = found["crown"]
    assert (crown.value >= found["ibp"].value * (1 - 1e-5)).all()
    assert crown.value.sum() >= found["crown-ibp"].value.sum()
    attack = attack_radius(
        model, images, crown.prediction, max_radius=0.1, steps=15, restarts=2, certified=crown.value
    )
    assert (attack.radius > crown.value).all()
    assert (attack.radius < 0.1).any()


def test_radii_are_well_ahead_where_training_had_no_bounds():
    model, (images, labels) = trained("leaky relu"), digits(20, start=1000)
    ibp, mixed, crown = (
        acert.certified_radius(model, images, labels, max_radius=0.3, bounds=bounds).value.mean()
        for bounds in ("ibp", "crown-ibp", "crown")
    )
    assert crown > 1.2 * mixed > 1.2 * 1.2 * ibp


@pytest.mark.parametrize("hidden", [[5, 4], [4, 4, 4]])
def test_exact_crown_is_negative_at_the_value(hidden):
    """The whole of it in fractions, where a root was found to the last digits of float64."""
    proven = 0
    for seed in range(10):
        torch.manual_seed(seed)
        model, images = random_mlp(hidden, inputs=3), torch.rand(2, 3).double()
        result = acert.certified_radius(
            model, images, max_radius=0.5, bounds="crown",
            solver=acert.Brent(xtol=1e-15, rtol=1e-15, max_steps=200),
        )  # fmt: skip
        layers = parts(model, Fraction)
        for image, value, label in zip(images, result.value, result.prediction, strict=True):
            if value == 0:
                continue
            lower, upper = exact_box(image, value.item())
            narrowed = activations(layers, lower, upper)
            rows = [
                walk(row, shift, layers[:-1], narrowed, lower, upper)
                for row, shift in fused(layers, label.item())
            ]
            intervals = [[max(end, Fraction(0)) for end in side] for side in narrowed[-1]]
            plain = [shift + largest(row, *intervals) for row, shift in fused(layers, label.item())]
            both = [min(pair) for pair in zip(rows, plain, strict=True)]
            del both[label]
            assert max(both) < 0
            proven += 1
    assert proven > 12


@pytest.mark.parametrize("arithmetic", ["real", "float32", "nearest"])
@pytest.mark.parametrize("name", KINDS)
def test_the_margin_at_the_value_is_negative(name, arithmetic):
    model, (images, _) = trained(name), digits(4, start=900)
    result = acert.certified_radius(
        model, images, max_radius=0.2, bounds="crown", arithmetic=arithmetic, batch_size=3
    )
    assert (result.value > 0).all()
    rounding = {"real": REAL, "float32": FLOAT32, "nearest": None}[arithmetic]
    for index in range(4):  # in a batch of its own
        alone = slice(index, index + 1)
        margin = proven_margin(
            model, images[alone].double(), result.prediction[alone], result.value[alone],
            rounding=rounding, bounds="crown",
        )  # fmt: skip
        assert margin < 0


def test_walks_that_overflow_leave_the_interval():
    """Coefficients pass the largest float32 on their way back, where no activation does."""
    model = models.mlp(4, [6, 6, 6], 3)
    for layer, size in zip(model[1::2], (1e-30, 1e25, 1e25, 1e-20), strict=True):
        nn.init.normal_(layer.weight, std=size)
        nn.init.zeros_(layer.bias)
    images, labels = torch.rand(5, 4), torch.randint(3, (5,))
    ibp, crown = (
        acert.certified_margin(model, images, labels, 0.1, bounds=bounds)
        for bounds in ("ibp", "crown")
    )
    assert crown.isfinite().all()
    assert (crown <= ibp + 1e-5 * ibp.abs()).all()


# -- gradients, compilation, a peer -----------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_gradients_against_finite_differences(name):
    model, labels = make(name, torch.float64), torch.tensor([3, 7])
    images = torch.rand(2, 1, 8, 8).double()

    def loss(images, *values):
        output = output_of(Weighted(model, values), images, 0.03)
        return F.cross_entropy(crown_differences(output, labels), labels)

    assert_slope(loss, [images, *(p.detach().clone() for p in model.parameters())])


@pytest.mark.parametrize("name", ["leaky relu", "max pool", "tanh"])
def test_compiled_equals_eager(name):
    torch.compiler.reset()
    model, (images, labels) = make(name), digits(2)

    def bounds(images, labels):
        start = box(images, torch.full((2,), 0.03), (0.0, 1.0)).within(bounding("crown"))
        return crown_differences(propagate(model, start), labels)

    compiled = torch.compile(bounds, fullgraph=True, backend="eager")(images, labels)
    torch.testing.assert_close(compiled, bounds(images, labels))


# Networks that auto_LiRPA takes, and that it has the same lines for.
@pytest.mark.filterwarnings("ignore")  # its own: it traces with torch.jit
@pytest.mark.parametrize("name", ["leaky relu", "dense", "max pool"])
def test_bounds_are_those_of_a_peer(name):
    lirpa = pytest.importorskip("auto_LiRPA")
    model, (images, labels) = make(name), digits(3)
    found = crown_differences(output_of(model, images, 0.02), labels)
    around = lirpa.PerturbationLpNorm(
        x_L=(images - 0.02).clamp(min=0), x_U=(images + 0.02).clamp(max=1)
    )
    bounded = lirpa.BoundedModule(model, images, bound_opts={"conv_mode": "matrix"})
    rows = torch.eye(CLASSES) - F.one_hot(labels, CLASSES).unsqueeze(1)
    _, upper = bounded.compute_bounds(
        x=(lirpa.BoundedTensor(images, around),), C=rows, method="CROWN"
    )
    torch.testing.assert_close(found, upper, rtol=1e-5, atol=1e-5)


# -- refusals ---------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", ["crown-ibp", "crown"])
def test_an_operation_without_a_backward_rule_is_named(bounds):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Softmax(1), nn.Tanh(), nn.Linear(8, 4))
    images, labels = digits(2)
    with pytest.raises(acert.UnsupportedOperation) as refusal:
        acert.certified_margin(model, images, labels % 4, 0.1, bounds=bounds)
    # Not the module of an activation behind it, nor advice to register an interval rule.
    wanted = 'softmax: CROWN has no backward rule for it; `bounds="ibp"` has one'
    assert str(refusal.value) == f"torch.nn.functional.{wanted}"


class Aside(nn.Module):
    """Logits beside something that CROWN has no way back from, and activates."""

    def __init__(self, aside):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.aside = aside

    def forward(self, x):
        hidden = self.inner(F.relu(self.first(x)))
        torch.tanh(self.aside(hidden))
        return self.last(F.relu(hidden))


@pytest.mark.parametrize(
    "aside", [lambda x: F.softmax(x, 1), torch.sum, torch.t], ids=["softmax", "sum", "t"]
)
def test_what_the_logits_do_not_depend_on_is_not_refused(aside):
    model, images, labels = Aside(aside), torch.rand(5, 4), torch.randint(3, (5,))
    plain = Aside(torch.clone)
    plain.load_state_dict(model.state_dict())
    found, wanted = (
        acert.certified_margin(each, images, labels, 0.2, bounds="crown") for each in (model, plain)
    )
    assert torch.equal(found, wanted)


class OneByOne(nn.Module):
    """Takes the samples apart, so that layers see inputs of one axis."""

    def __init__(self, width):
        super().__init__()
        self.first, self.inner = nn.Linear(4, 6), nn.Linear(6, width)
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        rows = [torch.tanh(self.inner(torch.tanh(row))) for row in self.first(x)]
        return self.last(torch.stack(rows))


@pytest.mark.parametrize("width", [1, 2, 6])
@pytest.mark.parametrize("bounds", ["crown-ibp", "crown"])
def test_samples_that_are_taken_apart_are_refused(bounds, width):
    with pytest.raises(acert.UnsupportedOperation, match="stack: CROWN needs the samples to stay"):
        acert.certified_margin(
            OneByOne(width), torch.rand(2, 4), torch.tensor([0, 1]), 0.1, bounds=bounds
        )
