"""Refusals: every message names the parameter, the constraint and the value."""

import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import acert
from acert import InvalidInput, UnsupportedOperation

IMAGES = torch.full((2, 3), 0.5)
LABELS = torch.tensor([0, 1])


def model():
    return nn.Linear(3, 4)


def margin(model, images=IMAGES, labels=LABELS, radius=0.1, **options):
    return acert.certified_margin(model, images, labels, radius, **options)


def logits(model, images=IMAGES, labels=LABELS, radius=0.1, **options):
    return acert.worst_case_logits(model, images, labels, radius, **options)


def radius(model, images=IMAGES, labels=LABELS, max_radius=0.1, **options):
    return acert.certified_radius(model, images, labels, max_radius=max_radius, **options)


def bounds(model, images=IMAGES):
    return acert.interval_bounds(model, images, images)


with_labels = pytest.mark.parametrize("function", [margin, logits, radius])
with_radius = pytest.mark.parametrize("function", [margin, logits])
every_function = pytest.mark.parametrize("function", [margin, logits, radius, bounds])


def refused(message, error=InvalidInput):
    """The message as it stands, from its first word."""
    return pytest.raises(error, match="^" + re.escape(message))


def test_what_the_refusals_start_from_is_accepted():
    for function in (margin, logits, radius, bounds):
        function(model())


# -- the model --------------------------------------------------------------------------


class Halved(nn.Module):
    """Turns autocast on in its own forward, and hides it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3072, 4)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(x.flatten(1)).float()


@pytest.mark.parametrize("arithmetic", ["nearest", "real", "float32"])
def test_a_model_that_computes_in_half_precision_by_itself(arithmetic):
    """Float32's error bound of a sum of 3072 products may cover bfloat16's error."""
    images = torch.rand(2, 3072)
    with refused("torch.autocast: the model turns it on in its own forward", UnsupportedOperation):
        radius(Halved(), images, None, arithmetic=arithmetic, elide=False)
    with torch.autocast("cpu", torch.bfloat16):  # around it, it does not count
        radius(nn.Linear(3072, 4), images, None, arithmetic=arithmetic)


@every_function
def test_a_module_in_a_wrapper(function):
    with refused("`model` must be the module itself, `model.module`; got DataParallel"):
        function(nn.DataParallel(nn.Sequential(nn.BatchNorm1d(3), model()).eval()))


@every_function
def test_not_a_module(function):
    with refused("`model` must be a torch.nn.Module; got function"):
        function(model)


@every_function
def test_a_model_on_another_device(function):
    with refused("`model` must be on the device of its input, cpu; got `weight` on meta"):
        function(model().to("meta"))


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(1, device="meta"))

    def forward(self, x):
        return x + self.shift


@every_function
def test_a_buffer_on_another_device(function):
    with refused("`model` must be on the device of its input, cpu; got `shift` on meta"):
        function(WithBuffer())


class Returns(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.layer, self.change = nn.Linear(3, 4), change

    def forward(self, x):
        return self.change(self.layer(x))


@with_labels
@pytest.mark.parametrize(
    ("change", "shape"),
    [
        (lambda x: x[:, 0], "(2,)"),
        (lambda x: x[:, :1], "(2, 1)"),
        (lambda x: x.unsqueeze(2), "(2, 4, 1)"),
        (lambda x: x[:1], "(1, 4)"),
        (lambda x: x.t(), "(4, 2)"),
    ],
)
def test_an_output_of_the_wrong_shape(function, change, shape):
    message = "`model` must return logits of shape (2, classes) with classes >= 2; got " + shape
    with refused(message):
        function(Returns(change))


@every_function
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda x: (x, x), "tuple"),
        (lambda x: {"logits": x}, "dict"),
        (lambda x: None, "NoneType"),
        (lambda x: torch.zeros(2, 4), "Tensor"),
    ],
)
def test_an_output_that_is_not_one_tensor_of_the_input(function, change, kind):
    message = f"the model returned {kind} for an interval: its output must be one tensor"
    with refused(message, UnsupportedOperation):
        function(Returns(change))


@every_function
@pytest.mark.parametrize(
    ("layer", "operation", "reason"),
    [
        (nn.BatchNorm1d(3), "batch_norm", "normalises by batch statistics and none were given"),
        (nn.Dropout(0.5), "dropout", "is random in training"),
    ],
)
def test_a_layer_in_training_that_depends_on_it(function, layer, operation, reason):
    net = nn.Sequential(layer, model()).train()
    message = rf"{operation}: it {reason}.*`0`, {type(layer).__name__}"
    with pytest.raises(UnsupportedOperation, match=message):
        function(net)
    with pytest.raises(UnsupportedOperation, match=r"evaluation.*eval\(\)"):
        function(net)
    function(net.eval())


@every_function
def test_a_model_in_training_without_such_a_layer_is_accepted(function):
    function(nn.Sequential(nn.Dropout(0.0), model(), nn.Identity()).train())


# -- images -----------------------------------------------------------------------------


@with_labels
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("domain", [(0.0, 1.0), None])
def test_images_that_are_not_finite(function, bad, domain):
    images = IMAGES.clone()
    images[1, 2] = bad
    with refused(f"`images` must be finite; got {bad}"):
        function(model(), images, domain=domain)


@with_labels
@pytest.mark.parametrize(
    ("images", "kind"),
    [
        (torch.zeros(2, 3, dtype=torch.uint8), "torch.uint8"),
        (torch.zeros(2, 3, dtype=torch.int64), "torch.int64"),
        (torch.zeros(2, 3, dtype=torch.bool), "torch.bool"),
        ([[0.5, 0.5, 0.5]], "list"),
        (np.zeros((2, 3), dtype=np.float32), "ndarray"),
    ],
)
def test_images_that_are_no_floating_point_tensor(function, images, kind):
    with refused(f"`images` must be a floating-point tensor; got {kind}"):
        function(model(), images)


@with_labels
@pytest.mark.parametrize("shape", [(), (3,), (0, 3)])
def test_images_without_samples(function, shape):
    message = f"`images` must have shape (batch, ...) with batch >= 1; got {shape}"
    with refused(message):
        function(model(), torch.zeros(shape))


@with_labels
@pytest.mark.parametrize(
    ("value", "domain", "message"),
    [
        (1.25, (0.0, 1.0), "domain [0.0, 1.0]; got values in [0.5, 1.25]. Normalisation belongs"),
        (-0.25, (0.0, 1.0), "domain [0.0, 1.0]; got values in [-0.25, 0.5]"),
        (255.0, (0, 1), "domain [0, 1]; got values in [0.5, 255]"),
        (0.75, (0.0, torch.tensor([1.0, 0.7, 1.0])), "domain [0.0, tensor of shape (3,)]; got"),
    ],
)
def test_images_outside_the_domain(function, value, domain, message):
    images = IMAGES.clone()
    images[0, 1] = value
    with refused("`images` must lie in the " + message):
        function(model(), images, domain=domain)
    function(model(), images, domain=None)


@with_labels
def test_images_on_another_device(function):
    with refused("`model` must be on the device of its input, meta; got `weight` on cpu"):
        function(model(), IMAGES.to("meta"))


@with_labels
def test_images_without_numbers(function):
    with refused("`images` must hold numbers; got a tensor on the meta device"):
        function(nn.Identity(), IMAGES.to("meta"))


# -- labels -----------------------------------------------------------------------------


@with_labels
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1], "must be a torch.Tensor; got list"),
        (np.array([0, 1]), "must be a torch.Tensor; got ndarray"),
        (torch.tensor([0.0, 1.0]), "must be integers; got torch.float32"),
        (torch.tensor([True, False]), "must be integers; got torch.bool"),
        (torch.tensor([0j, 1j]), "must be integers; got torch.complex64"),
        (torch.tensor([0, 1, 2]), "must have shape (2,); got (3,)"),
        (torch.tensor([[0], [1]]), "must have shape (2,); got (2, 1)"),
        (torch.tensor(0), "must have shape (2,); got ()"),
        (torch.tensor([0, 4]), "must be in [0, 3]; got values in [0, 4]"),
        (torch.tensor([-1, 1]), "must be in [0, 3]; got values in [-1, 1]"),
        (LABELS.to("meta"), "must be on the device of `images`, cpu; got meta"),
    ],
)
def test_labels(function, labels, message):
    with refused("`labels` " + message):
        function(model(), labels=labels)


@pytest.mark.parametrize("function", [margin, logits])
def test_margins_need_labels(function):
    with refused("`labels` must be a torch.Tensor; got NoneType"):
        function(model(), labels=None)


def test_labels_out_of_range_in_a_later_batch():
    with refused("`labels` must be in [0, 3]; got values in [9, 9]"):
        radius(model(), labels=torch.tensor([0, 9]), batch_size=1)


# -- the domain -------------------------------------------------------------------------


@with_labels
@pytest.mark.parametrize(
    ("domain", "message"),
    [
        ((1.0, 0.0), "must be (low, high) with low <= high; got [1.0, 0.0]"),
        ((0.0, float("nan")), "must be (low, high) with low <= high; got [0.0, nan]"),
        (
            (torch.tensor([0.0, 0.9, 0.0]), torch.tensor([1.0, 0.8, 1.0])),
            "must be (low, high) with low <= high; got [tensor of shape (3,), tensor of shape (3,)",
        ),
        ((0.0,), "must be (low, high) or None; got (0.0,)"),
        ((0.0, 0.5, 1.0), "must be (low, high) or None; got (0.0, 0.5, 1.0)"),
        (1.0, "must be (low, high) or None; got 1.0"),
        ("01", "must be (low, high) or None; got '01'"),
        (("0", "1"), "must hold numbers or tensors; got str"),
        ((0.0, None), "must hold numbers or tensors; got NoneType"),
        ((torch.zeros(2), 1.0), "must broadcast to one sample, (3,); got shape (2,)"),
        ((0.0, torch.ones(2, 3)), "must broadcast to one sample, (3,); got shape (2, 3)"),
        ((torch.zeros(3, device="meta"), 1.0), "must be on the device of `images`, cpu; got meta"),
    ],
)
def test_domain(function, domain, message):
    with refused("`domain` " + message):
        function(model(), domain=domain)


# -- radii ------------------------------------------------------------------------------


@with_radius
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-0.1, "must be finite and at least 0; got -0.1"),
        (float("nan"), "must be finite and at least 0; got nan"),
        (float("inf"), "must be finite and at least 0; got inf"),
        (torch.tensor([0.1, -0.5]), "must be finite and at least 0; got -0.5"),
        (torch.tensor([0.1, float("nan")]), "must be finite; got nan"),
        (torch.tensor([float("inf"), 0.1]), "must be finite; got inf"),
        (torch.tensor(0.1), "must be a number or have shape (2,); got ()"),
        (torch.tensor([0.1]), "must be a number or have shape (2,); got (1,)"),
        (torch.full((2, 1), 0.1), "must be a number or have shape (2,); got (2, 1)"),
        (torch.tensor([0, 1]), "must be a floating-point tensor; got torch.int64"),
        ([0.1, 0.1], "must be a number or a tensor; got list"),
        ("0.1", "must be a number or a tensor; got str"),
        (None, "must be a number or a tensor; got NoneType"),
        (True, "must be a number or a tensor; got bool"),
        (torch.zeros(2, device="meta"), "must be on the device of `images`, cpu; got meta"),
    ],
)
def test_radius(function, value, message):
    with refused("`radius` " + message):
        function(model(), radius=value)


@with_radius
def test_numbers_of_numpy_are_radii(function):
    for number in (np.float64(0.25), np.float32(0.25)):
        net = model()
        assert torch.equal(function(net, radius=number), function(net, radius=0.25))


# -- options of the certified radius ----------------------------------------------------


@pytest.mark.parametrize(
    "value", [0, 0.0, -0.1, float("inf"), float("nan"), "0.1", None, True, torch.tensor(0.1)]
)
def test_max_radius(value):
    with refused(f"`max_radius` must be a finite number above 0; got {value!r}"):
        radius(model(), max_radius=value)


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_batch_size(value):
    with refused(f"`batch_size` must be an integer of at least 1 or None; got {value!r}"):
        radius(model(), batch_size=value)


@pytest.mark.parametrize("solver", [acert.Brent, acert.Bisection])
@pytest.mark.parametrize("value", [0, -3])
def test_max_steps(solver, value):
    with refused(f"`max_steps` must be at least 1; got {value}"):
        radius(model(), solver=solver(max_steps=value))


@pytest.mark.parametrize("value", ["brent", None, acert.Brent])
def test_solver(value):
    with refused(f"`solver` must be a Brent, PowerLaw or Bisection; got {value!r}"):
        radius(model(), solver=value)


@pytest.mark.parametrize("value", ["magic", "IBP", None])
def test_bounds(value):
    with pytest.raises(InvalidInput, match=rf"^`bounds` must be .*ibp.*; got {value!r}$"):
        radius(model(), bounds=value)


@pytest.mark.parametrize("value", ["float64", "Real", None])
def test_arithmetic(value):
    pattern = rf"^`arithmetic` must be one of .*'float32'.*'real'.*; got {value!r}$"
    with pytest.raises(InvalidInput, match=pattern):
        radius(model(), arithmetic=value)


def test_float32_arithmetic_of_another_model():
    with refused('`arithmetic="float32"` needs a float32 model; got weight of torch.float64'):
        radius(model().double(), arithmetic="float32")
    statistics = nn.Sequential(nn.BatchNorm1d(3), model()).eval()
    statistics[0].running_mean = statistics[0].running_mean.half()
    with refused(
        '`arithmetic="float32"` needs a float32 model; got 0.running_mean of torch.float16'
    ):
        radius(statistics, arithmetic="float32")


# -- interval_bounds --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lower", "upper", "message"),
    [
        ([[0.0]], IMAGES, "`lower` must be a floating-point tensor; got list"),
        (IMAGES, 1.0, "`upper` must be a floating-point tensor; got float"),
        (IMAGES.long(), IMAGES, "`lower` must be a floating-point tensor; got torch.int64"),
        (IMAGES, IMAGES / 0, "`upper` must be finite; got inf"),
        (IMAGES * float("nan"), IMAGES, "`lower` must be finite; got nan"),
        (IMAGES, IMAGES.to("meta"), "`upper` must hold numbers; got a tensor on the meta device"),
        (IMAGES, IMAGES[:1], "`lower` and `upper` must have one shape and dtype; got (2, 3) "),
        (IMAGES, IMAGES.double(), "`lower` and `upper` must have one shape and dtype; got (2, 3)"),
        (IMAGES, IMAGES - 0.25, "`lower` must nowhere exceed `upper`; got "),
    ],
)
def test_interval_bounds(lower, upper, message):
    with refused(message):
        acert.interval_bounds(model(), lower, upper)


# -- probabilities ----------------------------------------------------------------------


class Probabilities(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        probability = torch.sigmoid(self.layer(x))
        return torch.cat([probability, 1 - probability], dim=1)


@with_labels
def test_a_warning_of_outputs_that_look_like_probabilities(function):
    with pytest.warns(UserWarning, match=r"look like probabilities.*raw logits") as record:
        function(Probabilities(), elide=False)
    # It points at the caller, not into acert.
    assert {warning.filename for warning in record} == {__file__}


@with_labels
def test_no_warning_of_logits(function):
    net = model()
    with torch.no_grad():
        net.bias += torch.tensor([0.25, 0.5, 0.75, 1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(net)
        function(nn.Sequential(nn.Linear(3, 4), nn.Sigmoid()), elide=False)
