"""Plain graphs: what is left of shapes and constants for a verifier to read."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from acert import load_model
from acert.deploy import onnx_file, write_plain
from acert.models import Normalize, Residual


class Own(nn.Module):
    """Constants of every rank, shapes put together, and terms that only look like nothing."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.tensor([[[[0.1]], [[0.2]]]]))

    def forward(self, images):
        images = (images * 1.0 + self.shift) / 1.0000001 - 0.0
        pairs = images.reshape(images.shape[0], 2, 2, 4) * torch.tensor([2.0, 1.0, 1.0, 3.0])
        sums = pairs.sum(3) + torch.zeros(2)
        return 1 - sums.reshape(-1, 4)


class Cold(nn.Module):
    """Divides by a number without axes, and by what is left of -0."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("zero", torch.tensor([-0.0]))

    def forward(self, images):
        logits = images.flatten(1) / self.temperature.view(1, 1)
        return torch.cat((logits, 1 / (-images.flatten(1) - self.zero)), 1)


NETWORKS = {
    "cold": (Cold(), (2, 2)),
    "normalised": (
        nn.Sequential(
            Normalize([0.1, 1e-9], [0.3, 1.000001]),
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            Residual(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())),
            nn.Flatten(),
            nn.Linear(16, 3),
        ),
        (2, 4, 4),
    ),
    "folded": (nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), nn.Flatten()), (8,)),
    "own": (Own(), (2, 2, 4)),
}


def nodes(path):
    return [node.op_type for node in onnx.load(path).graph.node]


def answers(path, images):
    runner = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return runner.run(None, {"images": images.numpy()})[0]


def test_a_verifier_finds_the_layers_alone(tmp_path):
    write_plain(load_model("digits-acert"), torch.rand(1, 1, 8, 8), tmp_path / "net.onnx", batch=1)
    layers = ["Conv", "Relu", "Conv", "Relu", "Flatten", "Gemm", "Relu", "Gemm"]
    assert nodes(tmp_path / "net.onnx") == layers
    write_plain(load_model("digits-acert"), torch.rand(1, 1, 8, 8), tmp_path / "any.onnx")
    assert nodes(tmp_path / "any.onnx") == layers


@pytest.mark.parametrize("batch", [1, None])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_numbers_are_those_of_the_graph_as_exported(name, batch, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model, shape = NETWORKS[name]
    images = torch.rand(3, *shape)
    images[0] = 0.0
    simple, raw = tmp_path / "simple.onnx", tmp_path / "raw.onnx"
    write_plain(model.eval(), images, simple, batch=batch)
    monkeypatch.setattr(onnx_file, "simplify", lambda graph: None)
    write_plain(model, images, raw, batch=batch)
    assert len(nodes(simple)) < len(nodes(raw))
    for part in images.split(batch or 3):
        np.testing.assert_array_equal(answers(simple, part), answers(raw, part))
    onnx.checker.check_model(simple, full_check=True)


@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_but_the_input_says_how_many_images_there_are(name, tmp_path):
    torch.manual_seed(0)
    model, shape = NETWORKS[name]
    images, path = torch.rand(5, *shape), Path(tmp_path, "net.onnx")
    write_plain(model.eval(), images, path, batch=1)
    file = onnx.load(path)
    del file.graph.value_info[:]
    for value in (*file.graph.input, *file.graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_value == 1
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(file, path)
    np.testing.assert_allclose(answers(path, images), model(images).detach(), atol=1e-5)


def test_constants_have_the_rank_of_the_images_and_stay_what_they_are(tmp_path):
    model, shape = NETWORKS["normalised"]
    write_plain(model.eval(), torch.rand(1, *shape), tmp_path / "net.onnx", batch=1)
    graph = onnx.load(tmp_path / "net.onnx").graph
    stored = {value.name: numpy_helper.to_array(value) for value in graph.initializer}
    mean, deviation = (stored[node.input[1]] for node in graph.node[:2])
    assert [node.op_type for node in graph.node[:2]] == ["Sub", "Div"]
    np.testing.assert_array_equal(mean, np.float32([0.1, 1e-9]).reshape(1, 2, 1, 1))
    np.testing.assert_array_equal(deviation, np.float32([0.3, 1.000001]).reshape(1, 2, 1, 1))
