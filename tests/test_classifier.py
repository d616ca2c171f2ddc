"""A classifier that answers with its radius: the library's radii, in PyTorch and as a graph."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import acert
from acert import CertifiedClassifier, InvalidInput, UnsupportedOperation, data
from acert.deploy.portable import PortableArithmetic
from acert.models import mlp

MAX_RADIUS = 0.3


@pytest.fixture(scope="module")
def model():
    return acert.load_model("digits-acert")


@pytest.fixture(scope="module")
def images():
    return data.to_float(data.load_test("digits").images)[:40]


def small(domain=(0.0, 1.0), **options):
    torch.manual_seed(0)
    return CertifiedClassifier(
        mlp(4, [8], 3).eval(), max_radius=MAX_RADIUS, domain=domain, **options
    )


def assert_fits(radius, expected, max_radius, solver=1e-5):
    """Never above what the library proves, beyond its solver's tolerance, and hardly below."""
    assert bool((radius <= expected * (1 + solver) + 1e-10).all())
    assert bool((radius >= 0.98 * expected - max_radius / 500).all())


def library(classifier, images):
    return acert.certified_radius(
        classifier.model, images, max_radius=classifier.max_radius, arithmetic="float32",
        domain=classifier.domain, elide=classifier.elide,
    )  # fmt: skip


# -- the radius ---------------------------------------------------------------------------


def test_logits_prediction_and_radius_are_the_librarys(model, images):
    classifier = CertifiedClassifier(model, max_radius=MAX_RADIUS)
    logits, prediction, radius = classifier(images)
    expected = library(classifier, images)
    assert torch.equal(logits, model(images))
    assert torch.equal(prediction, expected.prediction)
    assert radius.dtype == torch.float64
    assert_fits(radius, expected.value, MAX_RADIUS)
    # All kinds of radii were compared, and the largest is met exactly.
    assert {acert.Status.ROOT, acert.Status.CERTIFIED_TO_MAX} <= set(expected.status.tolist())
    assert (radius.max().item(), radius.min().item() > 0) == (MAX_RADIUS, True)


def test_each_step_halves_what_is_missing(model, images):
    exact = library(CertifiedClassifier(model, max_radius=MAX_RADIUS), images).value
    for steps in (1, 4, 9):
        radius = CertifiedClassifier(model, max_radius=MAX_RADIUS, steps=steps)(images)[2]
        missing = exact - radius
        assert missing.max() <= MAX_RADIUS / 2**steps + 1e-5
        assert missing.max() > MAX_RADIUS / 2 ** (steps + 1)


def test_an_image_that_proves_nothing_gets_0_and_leaves_the_others_alone():
    classifier = small()
    good = torch.full((1, 4), 0.5)
    _, _, alone = classifier(good)
    bad = good.repeat(6, 1)
    bad[0, 0], bad[1, 1], bad[2, 2] = math.nan, math.inf, -math.inf
    bad[3, 3], bad[4, 0] = 1.0 + 1e-6, -1e-6
    radius = classifier(torch.cat((good, bad)))[2]
    assert alone.item() > 0
    assert radius.tolist() == [alone.item(), 0, 0, 0, 0, 0, alone.item()]


def test_autocast_around_it_changes_nothing():
    """In half precision the logits would be others than those that the radii speak of."""
    classifier, images = small(), torch.rand(3, 4)
    expected = classifier(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = classifier(images)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_without_a_domain_only_finite_images_count():
    classifier = small(domain=None)
    images = torch.tensor([[0.5, 0.5, 0.5, 0.5], [9.0, -9.0, 9.0, 9.0], [0.0, 0.0, 0.0, math.inf]])
    radius = classifier(images)[2]
    assert (radius > 0).tolist() == [True, True, False]
    assert_fits(radius[:2], library(classifier, images[:2]).value, MAX_RADIUS)


def test_logits_that_tie_or_overflow_get_0():
    tie = mlp(4, [], 3).eval()
    nn.init.zeros_(tie[1].weight)
    nn.init.zeros_(tie[1].bias)
    assert CertifiedClassifier(tie, max_radius=0.1)(torch.rand(2, 4))[2].tolist() == [0, 0]
    huge = mlp(4, [4], 3).eval()
    nn.init.constant_(huge[1].weight, 1e20)
    nn.init.constant_(huge[3].weight, 1e20)
    nn.init.constant_(huge[3].bias[:1], 1e30)
    assert CertifiedClassifier(huge, max_radius=0.1)(torch.rand(2, 4))[2].tolist() == [0, 0]


def test_a_model_without_a_last_linear_layer_takes_the_plain_margin():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).eval()
    images = torch.rand(5, 4)
    with pytest.raises(UnsupportedOperation, match="Pass `elide=False`"):
        CertifiedClassifier(model, max_radius=0.1)(images)
    classifier = CertifiedClassifier(model, max_radius=0.1, elide=False)
    radius = classifier(images)[2]
    assert radius.max() > 0
    assert_fits(radius, library(classifier, images).value, 0.1)


def test_logits_keep_their_gradient():
    classifier = small()
    logits, _, radius = classifier(torch.rand(2, 4))
    assert logits.requires_grad
    assert not radius.requires_grad


# -- as a graph ---------------------------------------------------------------------------


def test_it_compiles_as_one_graph():
    classifier = small(steps=2)
    images = torch.rand(5, 4)
    compiled = torch.compile(classifier, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for found, expected in zip(compiled(images), classifier(images), strict=True):
            assert torch.equal(found, expected)


def test_it_is_exported_with_one_bound_pass_in_a_loop():
    domain = (-0.3, 0.7)  # neither is a float32 number
    classifier = small(domain=domain)
    images = torch.rand(5, 4) - 0.3
    batch = torch.export.Dim("batch")
    program = torch.export.export(classifier, (images[:2],), dynamic_shapes=({0: batch},))
    loops = [node for node in program.graph.nodes if "while_loop" in str(node.target)]
    assert len([node for node in loops if node.op == "call_function"]) == 1
    for count in (1, 5):
        logits, prediction, radius = program.module()(images[:count])
        expected = classifier(images[:count])
        torch.testing.assert_close(logits, expected[0])
        assert torch.equal(prediction, expected[1])
        torch.testing.assert_close(radius, expected[2], rtol=0, atol=1e-6)
        assert (radius > 0).all()


# -- the operations of an exported pass ---------------------------------------------------


@pytest.fixture
def portable():
    return PortableArithmetic(torch.rand(3))


@pytest.mark.parametrize(
    ("operation", "input", "weight", "options"),
    [
        (torch.conv1d, (2, 3, 9), (4, 3, 3), {}),
        (torch.conv1d, (2, 4, 9), (6, 2, 2), {"groups": 2, "stride": 2, "padding": 1}),
        (torch.conv2d, (2, 3, 7, 6), (5, 3, 3, 2), {"stride": (2, 1), "padding": (1, 0)}),
        (torch.conv2d, (2, 3, 7, 6), (5, 3, 2, 4), {"padding": "same"}),
        (torch.conv2d, (2, 3, 9, 9), (5, 3, 3, 3), {"padding": "valid", "dilation": (2, 3)}),
        (torch.conv3d, (1, 2, 4, 5, 6), (3, 2, 2, 3, 2), {"stride": 2, "padding": (1, 0, 2)}),
    ],
)
@pytest.mark.parametrize("biased", [True, False])
# PyTorch's own note that an even kernel needs a padded copy.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
def test_a_convolution_is_a_matrix_product(portable, operation, input, weight, options, biased):
    x, w = torch.rand(input).double(), torch.rand(weight).double()
    bias = torch.rand(weight[0]).double() if biased else None
    expected = operation(x, w, bias, **options)
    with Seen() as seen, portable:
        found = operation(x, w, bias, **options)
    assert operation not in seen.functions
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("operation", "shape", "options"),
    [
        (F.avg_pool1d, (2, 3, 8), {"kernel_size": 2}),
        (F.avg_pool2d, (2, 3, 7, 8), {"kernel_size": (2, 3), "stride": (1, 2)}),
        (F.avg_pool3d, (2, 1, 4, 4, 4), {"kernel_size": 2, "stride": 1}),
    ],
)
def test_an_average_pool_is_a_mean(portable, operation, shape, options):
    x = torch.rand(shape).double()
    with Seen() as seen, portable:
        found = operation(x, **options)
    assert operation not in seen.functions
    torch.testing.assert_close(found, operation(x, **options))
    with Seen() as seen, portable:  # padding is left to the runtime, which is asked for it
        found = operation(x, **options, padding=1)
    assert operation in seen.functions
    torch.testing.assert_close(found, operation(x, **options, padding=1))


def test_float32_operations_are_left_alone(portable):
    x, w = torch.rand(1, 2, 5, 5), torch.rand(3, 2, 3, 3)
    with Seen() as seen, portable:
        torch.conv2d(x, w)
    assert torch.conv2d in seen.functions


def test_nan_counts_as_infinity_where_a_maximum_might_lose_it(portable):
    x = torch.rand(2, 1, 4, 4).double()
    x[0, 0, 3, 3] = math.nan
    with portable:
        whole, rows = x.amax(), torch.amax(x, (1, 2, 3), keepdim=True)
        pooled = F.max_pool2d(x, 2)
    assert whole == math.inf
    assert (rows.flatten() == math.inf).tolist() == [True, False]
    assert pooled[0, 0, 1, 1] == math.inf
    assert torch.equal(pooled[1], F.max_pool2d(x[1], 2))


def test_the_next_number_is_reached_or_passed(portable):
    x = torch.tensor([0.0, 1.0, -1.0, 1e-310, 3e300, 0.1], dtype=torch.float64)
    for end in (math.inf, -math.inf):
        far = torch.full_like(x, end)
        with portable:
            found = torch.nextafter(x, far)
        exact = torch.nextafter(x, far)
        assert bool(((found - exact) * math.copysign(1, end) >= 0).all())
        assert bool(((found - exact).abs() <= 2.0**-51 * x.abs() + 1e-307).all())


def test_numbers_next_to_0_and_1_are_computed_and_others_are_not(portable):
    x = torch.rand(3).double()
    for number, hidden in ((1e-300, True), (1 + 2**-50, True), (0.5, False), (1.0, False)):
        with Seen() as seen, portable:
            found = x * number + number
        assert torch.equal(found, x * number + number)
        assert seen.operands == [hidden, hidden]


def test_constants_keep_float64s_digits(portable):
    with portable:
        full = torch.full((2, 1), 0.7, dtype=torch.float64)
        number = torch.as_tensor(1e-38, dtype=torch.float64)
        assert torch.equal(torch.full((2,), 3), torch.tensor([3, 3]))
    assert full.tolist() == [[0.7], [0.7]]
    assert (number.item(), number.dtype) == (1e-38, torch.float64)


class Seen(torch.overrides.TorchFunctionMode):
    """Notes which functions reach PyTorch, and whether their last operand is a tensor."""

    def __init__(self):
        self.functions, self.operands = set(), []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.add(func)
        # A number times the hidden 1 is how an operand is hidden; that product is not one itself.
        if len(args) == 2 and isinstance(args[0], torch.Tensor) and args[0].ndim:
            self.operands.append(isinstance(args[1], torch.Tensor))
        return func(*args, **(kwargs or {}))


# -- refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_radius": 0}, "`max_radius` must be a finite number above 0; got 0"),
        ({"steps": 0}, "`steps` must be an integer of at least 1; got 0"),
        ({"steps": True}, "`steps` must be an integer of at least 1; got True"),
        ({"domain": 1.0}, r"`domain` must be two numbers \(low, high\) or None; got 1.0"),
        ({"domain": (0, "1")}, r"`domain` must be two numbers \(low, high\) or None; got"),
        ({"domain": (1.0, 0.0)}, "`domain` must be .* with low < high; got"),
    ],
)
def test_arguments_are_refused_by_name(options, message):
    with pytest.raises(InvalidInput, match=message):
        CertifiedClassifier(mlp(4, [], 3).eval(), **{"max_radius": 0.1, **options})


def test_models_that_no_radius_can_hold_for_are_refused():
    for model, message in (
        (len, "`model` must be a torch.nn.Module; got builtin_function_or_method"),
        (mlp(4, [], 3), "`model` must be in evaluation mode"),
        (mlp(4, [], 3).double().eval(), "`model` must be float32; got `1.weight` of torch.float64"),
    ):
        with pytest.raises(InvalidInput, match=message):
            CertifiedClassifier(model, max_radius=0.1)
    broken = mlp(4, [], 3).eval()
    nn.init.constant_(broken[1].bias, math.nan)
    with pytest.raises(InvalidInput, match="`model` must hold finite numbers; got others in `1"):
        CertifiedClassifier(broken, max_radius=0.1)


class OtherForFloat32(nn.Module):
    """Bounds are computed in float64, and would be those of the last layer alone."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(20 * (x - 0.5) if x.dtype == torch.float32 else x)


def test_a_model_whose_bounds_are_of_another_is_refused_at_the_first_usable_image():
    classifier = CertifiedClassifier(OtherForFloat32().eval(), max_radius=MAX_RADIUS)
    outside = torch.full((2, 4), 2.0)
    assert not classifier(outside)[2].any()
    with pytest.raises(UnsupportedOperation, match="computes something else of images than of int"):
        classifier(torch.cat((outside, torch.rand(2, 4))))


def test_inputs_and_modes_are_refused_when_called():
    classifier = small()
    with pytest.raises(InvalidInput, match=r"`images` must be float32; got torch\.float64"):
        classifier(torch.rand(2, 4).double())
    with pytest.raises(InvalidInput, match="must be in evaluation mode"):
        classifier.train()(torch.rand(2, 4))
