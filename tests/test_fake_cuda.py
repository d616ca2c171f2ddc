"""The loss of a step on a CUDA device that is not there: nothing mixes devices or waits for it.

PyTorch's fake tensors have a device and a shape, but no numbers: whatever asks for one, as a
captured step must not, is an error.
"""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from acert import models
from acert.losses import Objective
from acert.methods import METHODS
from acert.precision import PRECISIONS


def subject(channels=3):
    model = models.cnn7((channels, 8, 8), 10, width=2, normalize=models.Normalize(0.5, 0.25))
    return models.ibp_init_(model)


@pytest.mark.parametrize("regularize", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("method", METHODS)
def test_no_step_waits_for_the_device(method, precision, regularize):
    form = PRECISIONS[precision]
    with FakeTensorMode(allow_non_fake_inputs=False), torch.device("cuda"):
        model = subject()
        images, labels = torch.rand(6, 3, 8, 8), torch.zeros(6, dtype=torch.long)
        scalars = torch.rand(7)
        objective = Objective(
            method=METHODS[method](kappa=0.5), precision=form, fuse=not form.folds, l1=1e-4
        )
        terms = objective(
            model, images, labels, torch.rand_like(images), scalars, regularize=regularize
        )
        assert terms.device.type == "cuda"
        assert terms.shape == (5,)
