"""Exported files: what onnxruntime answers, what verifiers read, and what is refused."""

import errno
import json
import math
import subprocess
import sys
import warnings
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from benchmarks import export as benchmark
from benchmarks import verifier
from onnx import numpy_helper
from safetensors.torch import save_file
from torch import nn
from vnnlib.compat import read_vnnlib_simple

import acert
from acert import CertifiedClassifier, InvalidInput, RunError, UnsupportedOperation, cli, data
from acert.attack import attack_radius
from acert.cli import export as export_verb
from acert.deploy import write_benchmark, write_certified, write_plain
from acert.deploy.benchmark import box_decimals, property_text
from acert.deploy.portable import PortableArithmetic
from acert.models import Normalize, Residual, mlp
from acert.records import files

pytestmark = pytest.mark.skipif(torch.__version__ < "2.11", reason="PyTorch's exporter fails on it")

MAX_RADIUS = 0.3
SAMPLES = 1000


def session(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def answers(path_or_session, images, batch=64):
    """All outputs for all images, a batch at a time."""
    runner = session(path_or_session) if isinstance(path_or_session, Path) else path_or_session
    parts = [runner.run(None, {"images": part.numpy()}) for part in images.split(batch)]
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def assert_fits(radius, expected, max_radius):
    """Never above what the library proves, beyond its solver's tolerance, and hardly below."""
    assert (radius <= expected * (1 + 1e-5) + 1e-10).all()
    assert (radius >= 0.98 * expected - max_radius / 500).all()


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Runs a command in a folder of its own; returns status, standard output and error."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        status = cli.main([str(word) for word in words])
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def digits():
    """1,000 images with labels: the whole test set, and training images."""
    test, train = data.load_test("digits"), data.load("digits", train_on_all=True).train
    images = torch.cat((data.to_float(test.images), data.to_float(train.images)))
    return images[:SAMPLES], torch.cat((test.labels, train.labels))[:SAMPLES]


@pytest.fixture(scope="module")
def model():
    return acert.load_model("digits-acert")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The shipped model with its radius, as the command writes it."""
    path = tmp_path_factory.mktemp("export") / "deep" / "digits.onnx"
    assert cli.main(["export", "digits-acert", "--to", str(path)]) == 0
    return path


# -- a model that answers with its radius -------------------------------------------------


def test_onnxruntime_answers_as_the_library(exported, model, digits):
    images, _ = digits
    runner = session(exported)
    expected = acert.certified_radius(model, images, max_radius=MAX_RADIUS, arithmetic="float32")
    with torch.no_grad():
        expected_logits = model(images).numpy()
    for batch, count in ((1, 10), (7, 70), (64, SAMPLES)):
        logits, prediction, radius = answers(runner, images[:count], batch)
        size = np.abs(expected_logits[:count]).max()
        # An ulp of a logit of 133, which is among them, is 1.5e-5 already.
        assert np.abs(logits - expected_logits[:count]).max() <= 1e-6 * max(10, size)
        assert (prediction == expected.prediction[:count].numpy()).all()
        assert radius.dtype == np.float64
        assert_fits(radius, expected.value[:count].numpy(), MAX_RADIUS)
    assert radius.max() == MAX_RADIUS


def test_an_image_that_proves_nothing_gets_0_in_the_file_too(exported, digits):
    images = digits[0][2:3].repeat(5, 1, 1, 1)
    images[1, 0, 0, 0], images[2, 0, 1, 1] = math.nan, math.inf
    images[3, 0, 2, 2], images[4, 0, 3, 3] = -0.001, 1.001
    radius = answers(exported, images)[2]
    assert radius[0] > 0
    assert radius[1:].tolist() == [0, 0, 0, 0]


def test_an_empty_batch_has_empty_answers(exported):
    logits, prediction, radius = session(exported).run(
        None, {"images": np.empty((0, 1, 8, 8), "f4")}
    )
    assert (logits.shape, prediction.shape, radius.shape) == ((0, 10), (0,), (0,))


def test_weights_are_stored_once(exported, model):
    file = onnx.load(exported)
    onnx.checker.check_model(file)
    arrays = {item.name: numpy_helper.to_array(item) for item in file.graph.initializer}
    for name, parameter in model.named_parameters():
        assert np.array_equal(arrays.pop(f"model.{name}"), parameter.detach().numpy())
    assert sum(array.size for array in arrays.values()) < 100
    constants = [node for node in nodes(file.graph) if node.op_type == "Constant"]
    assert constants
    # Without a kernel, and a line on the terminal of whoever loads the file, each.
    assert not [node for node in nodes(file.graph) if node.op_type == "CastLike"]
    assert all(number_of(node).size < 100 for node in constants)
    assert not exported.with_suffix(".onnx.data").exists()
    assert exported.stat().st_size < 4 * sum(p.numel() for p in model.parameters()) + 200_000


def nodes(graph):
    """All nodes of a graph, those of loops included."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from nodes(attribute.g)


def number_of(node):
    """What a Constant node holds, as an array."""
    (attribute,) = node.attribute
    held = onnx.helper.get_attribute_value(attribute)
    return numpy_helper.to_array(held) if isinstance(held, onnx.TensorProto) else np.array(held)


def test_no_term_that_pays_for_rounding_looks_like_nothing_to_an_optimiser(exported):
    """Runtimes drop `x + c` and `x * c` where c as float32 is 0 or 1."""
    graph = onnx.load(exported).graph
    everything = list(nodes(graph))
    numbers = {n.output[0]: number_of(n) for n in everything if n.op_type == "Constant"}
    for node in everything:  # the exporter writes a number as a constant and a cast
        if node.op_type in ("Cast", "CastLike", "Identity", "Reshape") and node.input[0] in numbers:
            numbers[node.output[0]] = numbers[node.input[0]]
    met = 0
    for node in everything:
        neutral = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}.get(node.op_type)
        for name in node.input if neutral is not None else ():
            if name not in numbers or numbers[name].size != 1 or numbers[name].dtype.kind != "f":
                continue
            met += 1
            number = float(numbers[name].reshape(()))
            assert number == neutral or not math.isclose(
                number, neutral, rel_tol=1e-5, abs_tol=1e-8
            )
    assert met > 10


def test_metadata_say_what_the_radius_means(exported):
    file = onnx.load(exported)
    facts = {item.key: item.value for item in file.metadata_props}
    assert (float(facts["max_radius"]), facts["norm"]) == (MAX_RADIUS, "linf")
    assert json.loads(facts["domain"]) == [0.0, 1.0]
    assert facts["steps"] == "20"
    assert "largest distance proven" in facts["radius"]
    for word in ("IEEE float32", "onnxruntime's CPU provider", "not TF32", "quantised", "Winograd"):
        assert word in facts["holds_for"]
    training = json.loads(facts["training"])
    assert training["experiment"]["dataset"] == "digits"
    assert {"commit", "acert", "torch"} <= {*training}
    assert (file.producer_name, file.producer_version) == ("acert", acert.__version__)
    assert str(Path(acert.__file__).parent).encode() not in exported.read_bytes()


def unusual():
    """Pooling, a shortcut, groups and activations."""
    torch.manual_seed(1)
    return nn.Sequential(
        Normalize((0.1,), (0.7,)),
        nn.Conv2d(1, 4, 3, padding="same"),
        nn.LeakyReLU(0.1),
        Residual(nn.Conv2d(4, 4, 3, padding=1, groups=2)),
        nn.MaxPool2d(2),
        nn.ELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    ).eval()


def test_unusual_layers_and_domains_are_exported(tmp_path):
    model, domain, path = unusual(), (-0.3, 0.7), tmp_path / "unusual.onnx"
    images = torch.rand(20, 1, 8, 8) - 0.3
    classifier = CertifiedClassifier(model, max_radius=0.1, domain=domain, steps=12)
    write_certified(classifier, images, path)
    logits, prediction, radius = answers(path, images)
    expected = acert.certified_radius(
        model, images, max_radius=0.1, arithmetic="float32", domain=domain
    )
    assert (expected.value > 0).sum() > 5
    assert (prediction == expected.prediction.numpy()).all()
    assert_fits(radius, expected.value.numpy(), 0.1)
    np.testing.assert_allclose(logits, model(images).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_what_the_exporter_takes_apart_without_types_is_exported(tmp_path):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus(beta=3.0), nn.Linear(4, 3)).eval()
    model[0].weight.data.mul_(10)
    images = torch.rand(20, 4)
    classifier = CertifiedClassifier(model, max_radius=0.5, steps=12)
    write_certified(classifier, images, tmp_path / "softplus.onnx")
    logits, _, radius = answers(tmp_path / "softplus.onnx", images)
    expected = acert.certified_radius(model, images, max_radius=0.5, arithmetic="float32").value
    assert expected.min() > 0
    assert expected.max() < 0.5
    assert_fits(radius, expected.numpy(), 0.5)
    write_plain(model, images, tmp_path / "plain.onnx")
    (plain,) = session(tmp_path / "plain.onnx").run(None, {"images": images.numpy()})
    for found in (plain, logits):
        np.testing.assert_allclose(found, model(images).detach().numpy(), rtol=1e-5, atol=1e-5)


class Attending(nn.Module):
    """Attention of three places on themselves and those before them, and the same in an encoder."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(12, 3)
        self.register_buffer("later", torch.ones(3, 3).triu(1).bool())

    def forward(self, x):
        if isinstance(self.layer, nn.MultiheadAttention):
            seen, _ = self.layer(x, x, x, attn_mask=self.later, need_weights=False)
        else:
            seen = self.layer(x, self.later)
        return self.head(seen.flatten(1))


@pytest.mark.parametrize(
    "layer", [nn.MultiheadAttention, partial(nn.TransformerEncoderLayer, dim_feedforward=6)]
)
def test_attention_is_exported(tmp_path, layer):
    torch.manual_seed(0)
    model, images = Attending(layer(4, 2, batch_first=True)).eval(), torch.rand(20, 3, 4)
    write_plain(model, images, tmp_path / "plain.onnx")
    (plain,) = session(tmp_path / "plain.onnx").run(None, {"images": images.numpy()})
    np.testing.assert_allclose(plain, model(images).detach().numpy(), rtol=1e-5, atol=1e-5)
    if layer is not nn.MultiheadAttention:
        return  # with its radius a matter of minutes, of layer norms above all
    classifier = CertifiedClassifier(model, max_radius=0.3, steps=12)
    write_certified(classifier, images, tmp_path / "radius.onnx")
    logits, _, radius = answers(tmp_path / "radius.onnx", images)
    expected = acert.certified_radius(model, images, max_radius=0.3, arithmetic="float32").value
    assert ((expected > 0) & (expected < 0.3)).sum() > 5
    assert_fits(radius, expected.numpy(), 0.3)
    np.testing.assert_allclose(logits, plain, rtol=1e-5, atol=1e-5)


class Exploding(nn.Module):
    """Three inputs as logits, the second of which is infinite as soon as it is not 0."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor([1.0, 8e37, 1.0]))

    def forward(self, x):
        return x * self.factor * self.factor


def test_a_class_that_may_overflow_proves_nothing_in_the_file_either(tmp_path):
    """Its bound is NaN, which the maximum of onnxruntime passes over."""
    path, images = tmp_path / "exploding.onnx", torch.tensor([[0.9, 0.0, 0.2]])
    classifier = CertifiedClassifier(Exploding().eval(), max_radius=0.1, steps=2, elide=False)
    write_certified(classifier, images, path)
    logits, prediction, radius = answers(path, images)
    assert (logits.tolist(), prediction.tolist()) == (images.tolist(), [0])
    assert radius.tolist() == [0]


class Smallest(nn.Module):
    """A finite number and one that may overflow, and what an extreme makes of both."""

    def __init__(self, extreme):
        super().__init__()
        self.extreme, self.last = extreme, nn.Linear(1, 2)
        with torch.no_grad():
            self.last.weight.copy_(torch.tensor([[1e-8], [0.0]]))
            self.last.bias.copy_(torch.tensor([1.75, 0.0]))

    def forward(self, x):
        both = torch.cat([x * 0 - 1e38, x * -3.3e20 * 1e18], 1)
        return self.last(self.extreme(both) * 1e-30)


def test_an_exporter_that_is_too_old_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("acert.deploy.onnx_file._OLDEST", "99.1")
    classifier = CertifiedClassifier(mlp(2, [3], 2).eval(), max_radius=0.1)
    with pytest.raises(acert.AcertError, match=r"needs PyTorch 99\.1 or newer; .* is installed"):
        write_certified(classifier, torch.rand(2, 2), tmp_path / "old.onnx")


@pytest.mark.parametrize(
    "extreme",
    [
        lambda x: torch.min(x, 1, keepdim=True).values,
        pytest.param(
            lambda x: -F.adaptive_max_pool2d(-x[:, None, None], 1).flatten(1),
            marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="not exported before"),
        ),
    ],
    ids=["min", "adaptive pooling"],
)  # fmt: skip
def test_no_extreme_loses_an_overflow_in_the_file(tmp_path, extreme):
    """From 0.516 on class 0 has minus infinity; before that nothing may overflow."""
    path, images = tmp_path / "extreme.onnx", torch.tensor([[0.1]])
    write_certified(CertifiedClassifier(Smallest(extreme).eval(), max_radius=0.7), images, path)
    _, prediction, radius = answers(path, torch.tensor([[0.1], [0.62]]))
    assert prediction.tolist() == [0, 1]
    assert 0.4 < radius[0] < 0.416


class Numbers(nn.Module):
    """Terms that exporters and optimisers would change."""

    def forward(self, images):
        x = images.double()
        with PortableArithmetic(images.square()):
            rounded = x * (1 + 2.0**-50) + 1e-300, x + 0.1, x * 0.7, x / (1 - 2.0**-40)
            return (*rounded, x + torch.full((), -1 / 3, dtype=torch.float64), x - 1e-20)


def test_numbers_reach_the_runtime_with_all_their_digits(tmp_path):
    images = torch.tensor([[0.0], [1.0], [-3.0], [1e-30]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch's exporter, of itself
        program = torch.onnx.export(
            Numbers().eval(), (images,), dynamo=True, verbose=False, input_names=["images"]
        )
    program.save(tmp_path / "numbers.onnx")
    x = images.double().numpy()
    exact = [
        x * (1 + 2.0**-50) + 1e-300,
        x + 0.1,
        x * 0.7,
        x / (1 - 2.0**-40),
        x - 1 / 3,
        x - 1e-20,
    ]
    for found, expected in zip(answers(tmp_path / "numbers.onnx", images), exact, strict=True):
        assert found.dtype == np.float64
        assert found.tolist() == expected.tolist()


# -- properties for other verifiers -------------------------------------------------------


@pytest.fixture(scope="module")
def attacked(model, digits):
    """Twelve images that can be attacked, their labels, certified radii and attacks."""
    images, labels = digits
    right = (model(images).argmax(1) == labels).nonzero().squeeze(1)[:12]
    images, labels = images[right], labels[right]
    certified = acert.certified_radius(
        model, images, labels, max_radius=MAX_RADIUS, arithmetic="float32"
    )
    attacks = attack_radius(model, images, labels, max_radius=0.6, steps=20, restarts=2)
    return images, labels, certified.value, attacks


def read_property(path, inputs=64, outputs=10):
    """The ends of the box, as float64, and the rows of the wrong classes: row @ y <= bound."""
    ((box, rows),) = read_vnnlib_simple(path, inputs, outputs)
    return np.array(box), [(matrix, bound) for matrix, bound in rows]


def is_counterexample(logits, rows):
    return any((matrix @ logits <= bound).all() for matrix, bound in rows)


def test_attacks_and_certificates_agree_on_the_properties(tmp_path, model, attacked):
    images, labels, certified, attacks = attacked
    assert attacks.radius.isfinite().sum() >= 6
    torch.manual_seed(0)
    write_plain(model, images, tmp_path / "net.onnx")
    runner = session(tmp_path / "net.onnx")
    path = tmp_path / "property.vnnlib"

    def described(index, radius):
        text = property_text(images[index], int(labels[index]), 10, Fraction(radius), (0.0, 1.0))
        path.write_text(text)
        return read_property(path)

    for index in range(len(images)):
        image, label = images[index : index + 1], labels[index : index + 1]
        # The box is moved outward to float32 numbers, so it must be a little smaller.
        box, rows = described(index, 0.999 * certified[index].item())
        assert len(rows) == 9
        for point in ascended(model, image, label, torch.tensor(box)):
            (logits,) = runner.run(None, {"images": point.numpy()})
            assert not is_counterexample(logits[0], rows)
        if attacks.radius[index].isfinite():
            box, rows = described(index, 1.01 * attacks.radius[index].item())
            point = attacks.points[index : index + 1]
            flat = point.flatten().double().numpy()
            assert ((box[:, 0] <= flat) & (flat <= box[:, 1])).all()
            (logits,) = runner.run(None, {"images": point.numpy()})
            assert is_counterexample(logits[0], rows)


def ascended(model, image, label, box):
    """Points of PGD on the loss inside the box, in PyTorch."""
    lower, upper = (end.float().reshape(image.shape) for end in box.T)
    for _ in range(2):
        point = lower + torch.rand_like(lower) * (upper - lower)
        for step in range(10):
            point = point.detach().requires_grad_()
            (slope,) = torch.autograd.grad(F.cross_entropy(model(point), label), point)
            point = point + 0.5**step * (upper - lower) * slope.sign()
            point = point.detach().clamp(lower, upper)
        yield point


@pytest.mark.parametrize("domain", [(0.0, 1.0), (-0.3, 0.7), None])
def test_boxes_hold_the_exact_box_in_any_precision(domain):
    generator = np.random.default_rng(0)
    low, high = domain or (-1.0, 1.0)
    pixels = [low, high, *generator.uniform(low, high, 200)]
    for radius in (Fraction(2, 255), Fraction(1, 10**9), Fraction(0.1)):
        for pixel in (float(np.float32(p)) for p in pixels):
            exact = Fraction(pixel) - radius, Fraction(pixel) + radius
            if domain:
                exact = max(exact[0], Fraction(low)), min(exact[1], Fraction(high))
            texts = box_decimals(pixel, radius, domain)
            for read in (Fraction, float, np.float32):
                ends = [Fraction(float(read(text))) if read is not Fraction else Fraction(text)
                        for text in texts]  # fmt: skip
                assert ends[0] <= exact[0]
                assert exact[1] <= ends[1]
                assert ends[0] <= Fraction(pixel) <= ends[1]
                # And no further out than two float32 numbers.
                assert max(exact[0] - ends[0], ends[1] - exact[1]) < 2 * Fraction(2) ** -23


def test_the_command_writes_a_benchmark(call, model):
    status, out, err = call(
        "export", "digits-acert", "--plain", "--vnnlib", "bench", "--images", "3:33",
        "--radius", "2/255", "--timeout", "60",
    )  # fmt: skip
    assert (status, err) == (0, "")
    split = data.load_test("digits")
    images, labels = data.to_float(split.images[3:33]), split.labels[3:33]
    right = (model(images).argmax(1) == labels).tolist()
    assert 0 < right.count(False) < 30
    assert out == (
        f"wrote {right.count(True)} properties to bench; "
        f"misclassified and left out: {right.count(False)}\n"
    )
    kept = [3 + index for index, good in enumerate(right) if good]
    lines = Path("bench/instances.csv").read_text().splitlines()
    assert lines == [f"onnx/digits-acert.onnx,vnnlib/prop_{k}.vnnlib,60" for k in kept]
    for line in lines:
        network, described, _ = line.split(",")
        assert Path("bench", network).is_file()
        assert Path("bench", described).is_file()
    box, rows = read_property(f"bench/vnnlib/prop_{kept[0]}.vnnlib")
    assert box.shape == (64, 2)
    assert (box.min(), box.max()) == (0.0, 1.0)  # clamped
    # Every wrong class may lead: y_label - y_other <= 0.
    label = labels[kept[0] - 3].item()
    assert sorted(int(matrix[0].argmin()) for matrix, _ in rows) == sorted({*range(10)} - {label})
    assert all(matrix[0, label] == 1 and bound == 0 for matrix, bound in rows)
    logits = answers(Path("bench/onnx/digits-acert.onnx"), images, batch=1)[0]
    np.testing.assert_allclose(logits, model(images).detach().numpy(), rtol=1e-5, atol=1e-5)
    again = call("export", "digits-acert", "--plain", "--vnnlib", "bench", "--radius", "0.1")
    assert again[2] == "acert: bench holds a benchmark already: choose another folder\n"


def test_the_plain_network_takes_any_batch(call, model):
    status, out, _ = call("export", "digits-acert", "--plain", "--to", "net.onnx")
    assert (status, out) == (0, "wrote net.onnx: images in, logits out\n")
    images = torch.rand(5, 1, 8, 8)
    (logits,) = answers(Path("net.onnx"), images, batch=3)
    np.testing.assert_allclose(logits, model(images).detach().numpy(), rtol=1e-5, atol=1e-5)


def test_a_division_that_nearly_does_nothing_is_kept(tmp_path):
    model, images = Normalize((0.0,), (1.000004,)).eval(), torch.rand(50, 1, 2, 2)
    write_plain(model, images, tmp_path / "net.onnx")
    (found,) = answers(tmp_path / "net.onnx", images)
    np.testing.assert_allclose(found, model(images).numpy(), rtol=2e-7)
    assert np.abs(found / images.numpy() - 1).max() > 3e-6


def test_a_model_of_ones_own_is_exported(call, tmp_path, monkeypatch):
    (tmp_path / "exported_models.py").write_text(
        "from acert.models import mlp\n"
        "def net(input_shape, num_classes):\n"
        "    return mlp(64, [], num_classes)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = mlp(64, [], 10)
    save_file(own.state_dict(), "mine.safetensors")
    words = ["--model", "exported_models:net", "--weights", "mine.safetensors"]
    words += ["--dataset", "digits", "--max-radius", "0.2", "--steps", "3", "--to", "mine.onnx"]
    written = {}

    def write(classifier, images, path, *, record):
        written.update(classifier=classifier, shape=images.shape, path=path, record=record)

    monkeypatch.setattr(export_verb, "write_certified", write)
    status, out, _ = call("export", *words)
    assert status == 0
    assert out == ("wrote mine.onnx: images in; logits, prediction and radius out, up to 0.2\n")
    classifier = written.pop("classifier")
    assert (classifier.max_radius, classifier.steps, classifier.domain) == (0.2, 3, (0.0, 1.0))
    assert torch.equal(classifier.model[1].weight, own[1].weight)
    assert (written["shape"], written["path"]) == ((2, 1, 8, 8), Path("mine.onnx"))
    assert written["record"] == {"model": "exported_models:net"}


# -- refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits-acert"], "give `--to FILE`, or `--plain --vnnlib DIR`"),
        (["digits-acert", "--to", "."], "`--to` must name a file; got ."),
        (["digits-acert", "--vnnlib", "b", "--radius", "1"], "`--vnnlib` must come with `--plain`"),
        (["digits-acert", "--plain", "--vnnlib", "b"], "`--vnnlib` and `--radius` must come toget"),
        (["digits-acert", "--to", "x", "--images", "0:3"], "`--images` must come with `--vnnlib`"),
        (["digits-acert", "--to", "x", "--timeout", "9"], "`--timeout` must come with `--vnnlib`"),
        (["digits-acert", "--to", "x", "--plain", "--steps", "9"], "`--steps` must be left out"),
        (["digits-acert", "--to", "x", "--plain", "--no-elide"], "`--no-elide` must be left out w"),
        (["digits-acert", "--to", "x", "--no-elide"], "`--no-elide` must be left out where a run"),
        (["digits-acert", "--to", "x", "--plain", "--max-radius", "1"], "`--max-radius` must be l"),
        (["digits-acert", "--plain", "--vnnlib", "b", "--radius", "0.1", "--images", "300:400"],
         "`--images` must lie in the test set of 359 images; got 300:400"),
        (["digits-acert", "--to", "x", "--images", "5:5"], "a range such as 0:100 is needed; got"),
        (["digits-acert", "--to", "x", "--images", "-1:5"], "argument --images: expected one arg"),
        (["digits-acert", "--to", "x", "--radius", "x"], "a number is needed, such as 0.01 or 2/2"),
        (["digits-acert", "--to", "x", "--radius", "1/0"], "a number is needed, such as 0.01 or 2"),
        (["digits-acert", "--plain", "--vnnlib", "b", "--radius", "0"], "`radius` must be above 0"),
        (["digits-acert", "--plain", "--vnnlib", "b", "--radius", "1", "--timeout", "0"],
         "`timeout` must be at least 1 second; got 0"),
        (["digits-acert", "--to", "x", "--steps", "0"], "`steps` must be an integer of at least 1"),
        (["digits-acert", "--to", "x", "--max-radius", "0"], "`max_radius` must be a finite numb"),
        (["digits-acert", "--to", "x", "--dataset", "mnist"], "`--dataset` must be left out where"),
        (["nowhere", "--to", "x"], "there is no run folder nowhere"),
        (["--to", "x", "--model", "m:n"], "which needs --weights, --dataset, --max-radius too"),
        (["--to", "x", "--plain"], "which needs --model, --weights, --dataset too"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_status_2(call, words, message):
    status, _, err = call("export", *words)
    assert status == 2
    assert err.count("\n") == 1
    assert message in err
    assert not list(Path().iterdir())  # nothing was begun


@pytest.mark.parametrize(
    "words", [("--to", "taken/x.onnx"), ("--plain", "--vnnlib", "taken", "--radius", "0.1")]
)
def test_where_nothing_can_be_written_is_said_before_the_work(call, monkeypatch, words):
    Path("taken").write_text("a file")
    monkeypatch.setattr(torch.export, "export", None)  # the work
    status, _, err = call("export", "digits-acert", *words)
    assert status == 2
    assert err.startswith("acert: nothing can be written to taken")


def test_a_file_that_was_there_is_kept_where_the_disk_is_full(tmp_path, model, monkeypatch):
    path = tmp_path / "x.onnx"
    path.write_text("precious")

    def full(draft):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "fresh", full)
    with pytest.raises(RunError, match=r"x\.onnx could not be written.*untouched"):
        write_plain(model, torch.rand(2, 1, 8, 8), path)
    assert path.read_text() == "precious"


def test_the_exporter_does_not_speak_of_itself(tmp_path, model):
    program = "import sys; from acert.cli import main; sys.exit(main(sys.argv[1:]))"
    # torchvision is what it misses most often.
    program = f"import sys; sys.modules['torchvision'] = None; {program}"
    done = subprocess.run(
        [sys.executable, "-c", program, "export", "digits-acert", "--plain", "--to", "x.onnx"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("wrote x.onnx: images in, logits out\n", "")


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_package_is_named_with_its_command(call, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    status, _, err = call("export", "digits-acert", "--to", "x.onnx")
    assert status == 2
    assert err == f"acert: exporting needs the package {package}: pip install 'acert[export]'\n"


def test_a_run_on_ones_own_model_needs_it_again(call, tmp_path):
    from acert import records
    from acert.zoo import run_folder

    config = records.read_config(run_folder("digits-acert"))
    config["experiment"]["network"]["name"] = "mine:net"
    (tmp_path / "run").mkdir()
    records.write_config(tmp_path / "run", config)
    _, _, err = call("export", "run", "--to", "x.onnx")
    assert err == "acert: the run in run needs its own model again: --model mine:net\n"


class Bessel(nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x)


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_operations_that_cannot_be_exported_are_named(tmp_path):
    path, images = tmp_path / "x.onnx", torch.rand(2, 4)
    with pytest.raises(UnsupportedOperation, match="bessel_j0 has no counterpart in ONNX"):
        write_plain(Bessel().eval(), images, path)
    with pytest.raises(UnsupportedOperation, match="cannot be exported: GuardOnDataDependent"):
        write_plain(Branching().eval(), images, path)
    unbounded = nn.Sequential(nn.Linear(4, 3), Bessel(), nn.Linear(3, 3)).eval()
    with pytest.raises(UnsupportedOperation, match=r"bessel_j0: it has no bound rule \(in module"):
        write_certified(CertifiedClassifier(unbounded, max_radius=0.1), images, path)
    gelu = mlp(4, [3], 3, activation=nn.GELU).eval()
    with pytest.raises(UnsupportedOperation, match="the bounds need Gelu in float64, which onnx"):
        write_certified(CertifiedClassifier(gelu, max_radius=0.1, steps=1), images, path)
    inexact = nn.Sequential(nn.Linear(4, 3), nn.LogSigmoid(), nn.Linear(3, 3)).eval()
    with pytest.raises(UnsupportedOperation, match="with its radius: logsigmoid comes out as log"):
        write_certified(CertifiedClassifier(inexact, max_radius=0.1, steps=1), images, path)
    larger = nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Upsample(scale_factor=2), nn.Flatten(), nn.Linear(16, 3)
    )
    with pytest.raises(UnsupportedOperation, match="the bounds need Resize in float64, which onnx"):
        write_certified(CertifiedClassifier(larger.eval(), max_radius=0.1, steps=1), images, path)
    assert not path.exists()


def test_docs_show_the_record():
    record = json.loads(benchmark.RECORD.read_text(encoding="utf-8"))
    text = benchmark.PAGE.read_text(encoding="utf-8")
    assert f"<!-- export:begin -->\n{benchmark.table(record)}\n<!-- export:end -->" in text
    assert benchmark.failures(record) == []
    assert [record[name]["images"] for name in benchmark.TITLES] == [1000, 100, 1000]
    assert all(set(record[name]["batches"]) == {"1", "7", "64"} for name in benchmark.TITLES)
    assert not record["commit"].endswith("-modified")
    # Two ulps, where the absolute error is not asked for.
    assert all(
        found["relative_logit_error"] <= 2**-22 for found in record["shipped"]["batches"].values()
    )


def test_the_benchmark_fails_where_a_network_does():
    record = json.loads(benchmark.RECORD.read_text(encoding="utf-8"))
    record["shipped"]["batches"]["7"]["logit_error"] = 1.0  # large logits: nothing is asked
    assert benchmark.failures(record) == []
    record["digits"]["batches"]["1"]["logit_error"] = 1.1e-5
    record["shipped"]["batches"]["64"]["never_above"] = False
    record["cnn7"]["batches"]["7"] |= {"same_prediction": False, "images": 70}
    record["cnn7"]["batches"]["64"]["never_far_below"] = False
    assert benchmark.failures(record) == [
        "digits, batch 1: logits differ by 1.1e-05",
        "cnn7, batch 7: another class is predicted",
        "cnn7, batch 7: images are missing",
        "cnn7, batch 64: a radius is far below the library's",
        "shipped, batch 64: a radius is above the library's",
    ]


def test_benchmarks_are_refused_by_what_is_wrong(tmp_path):
    model, image = mlp(4, [], 3).eval(), torch.rand(1, 4)
    label = model(image).argmax(1)
    with pytest.raises(InvalidInput, match="`images` must lie in the domain"):
        write_benchmark(model, image + 1, label, tmp_path, name="x", radius=0.1)
    (tmp_path / "instances.csv").touch()
    with pytest.raises(RunError, match="holds a benchmark already: choose another folder"):
        write_benchmark(model, image, label, tmp_path, name="x", radius=0.1)


# -- what other verifiers say -------------------------------------------------------------


def test_models_in_training_mode_are_not_written(tmp_path):
    layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)).eval()
    before = layers[1].running_mean.clone()
    layers[1].train()
    images, labels = torch.rand(3, 2), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(InvalidInput, match=r"evaluation mode \(`model.eval\(\)`\); got 1 in train"):
        write_plain(layers, images, tmp_path / "net.onnx")
    layers.train()
    with pytest.raises(InvalidInput, match=r"evaluation mode .* got itself in training"):
        write_benchmark(layers, images, labels, tmp_path / "b", name="net", radius=0.1)
    assert torch.equal(layers[1].running_mean, before)
    assert not [*tmp_path.iterdir()]


def test_docs_show_what_verifiers_said():
    record = json.loads(verifier.RECORD.read_text(encoding="utf-8"))
    text = verifier.PAGE.read_text(encoding="utf-8")
    assert f"<!-- verifier:begin -->\n{verifier.table(record)}\n<!-- verifier:end -->" in text
    assert set(record) == set(verifier.VERIFIERS)
    assert verifier.failures(record) == []
    for entry in record.values():
        assert not entry["commit"].endswith("-modified")
        assert list(entry["radii"]) == list(verifier.RADII)
        assert min(one["certified"] for one in entry["radii"].values()) > 50
        assert entry["radii"]["0.2"]["attacked"] > 10


def test_verdicts_are_held_against_radii():
    certified, attacked = [0.2, 0.05, 0.0, 0.2, 0.2], [0.3, 0.15, 0.1, 0.3, math.inf]
    verdicts = {0: "unsat", 1: "sat", 2: "sat", 4: "unsat"}
    found = verifier.compared(verdicts, certified, attacked, 0.1)
    assert (found["properties"], found["certified"], found["attacked"]) == (4, 2, 1)
    assert (found["unsat"], found["sat"], found["undecided"]) == (2, 2, {})
    entry = {"radii": {"0.1": found | {"asked": 4}}}
    assert verifier.failures({"one": entry}) == []
    wrong = {0: "sat", 1: "unsat", 2: "unsat", 4: "undecided (timeout)"}
    found = verifier.compared(wrong, certified, attacked, 0.1)
    assert found["undecided"] == {4: "undecided (timeout)"}
    entry = {"radii": {"0.1": found | {"asked": 5}}}
    assert verifier.failures({"one": entry}) == [
        "one, 0.1: certified, but not proven: [0, 4]",
        "one, 0.1: attacked, but not broken: [2]",
        "one, 0.1: answered: 4",
    ]


def test_verdicts_of_alpha_beta_crown_are_read():
    said = [
        "Using vnnlib vnnlib/prop_3.vnnlib\nattack\nResult: unsafe-pgd in 0.0146 seconds",
        "Using vnnlib vnnlib/prop_4.vnnlib\nResult: safe-incomplete (timed out) in 24.1 seconds",
        "Using vnnlib vnnlib/prop_15.vnnlib\nResult: unknown in 60.0 seconds",
        "Using vnnlib vnnlib/prop_16.vnnlib\nTraceback",
    ]
    assert dict(verifier.crown_verdicts("\n".join(["Configurations:", *said]))) == {
        3: "sat", 4: "unsat", 15: "undecided (unknown)", 16: "undecided ()",
    }  # fmt: skip
