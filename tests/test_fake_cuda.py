"""The loss of a step on a CUDA device that is not there: nothing mixes devices or waits for it.

PyTorch's fake tensors have a device and a shape, but no numbers: to ask for one, as a captured step
must not, is an error. Where there is no GPU nothing else tells. A PyTorch for CPUs alone aborts on
such convolutions; `make oldest` has one for CUDA.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from acert import models
from acert.losses import Objective
from acert.methods import METHODS
from acert.precision import PRECISIONS

pytestmark = [
    pytest.mark.skipif(
        torch.version.cuda is None, reason="needs a PyTorch that was built for CUDA"
    ),
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
]


@pytest.fixture
def device(monkeypatch):
    """A mode in which CUDA is there; autocast would find out that it is not."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *_: True)
    with FakeTensorMode():
        yield torch.device("cuda")


def moved(model, device):
    """The model with tensors of the device in place of its own, whatever their numbers."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, device=device)
            setattr(module, name, nn.Parameter(empty))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
    return model


NETWORK = models.cnn7((3, 8, 8), 10, width=2, normalize=models.Normalize(0.5, 0.25))


def terms_of(device, method, precision, regularize):
    form, model = PRECISIONS[precision], moved(NETWORK, device)
    images = torch.rand(6, 3, 8, 8, device=device)
    labels = torch.zeros(6, dtype=torch.long, device=device)
    objective = Objective(method=method, precision=form, fuse=not form.folds, l1=1e-4)
    scalars = torch.rand(7, device=device)
    anchors = torch.rand_like(images)
    return objective(model, images, labels, anchors, scalars, regularize=regularize)


@pytest.mark.parametrize("regularize", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("method", METHODS)
def test_no_step_waits_for_the_device(method, precision, regularize, device):
    terms = terms_of(device, METHODS[method](), precision, regularize)
    assert (terms.device.type, terms.shape) == ("cuda", (5,))


def test_a_step_that_waits_is_noticed(device, monkeypatch):
    monkeypatch.setattr("acert.methods.acert.margin", lambda logits, labels: logits.max().item())
    with pytest.raises(DataDependentOutputException):
        terms_of(device, METHODS["acert"](), "float16", False)
