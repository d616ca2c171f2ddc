"""Operations that only move elements, seen backward: coefficients move the other way.

Samples must stay on the first axis.
"""

from __future__ import annotations

from typing import Any

import torch

from acert.bounds.backward.table import backward
from acert.bounds.interval import Interval, refuse
from acert.bounds.linear_bound import Step


@backward(
    torch.flatten, torch.Tensor.flatten, torch.unflatten, torch.Tensor.unflatten,
    torch.Tensor.view, torch.reshape, torch.Tensor.reshape, torch.Tensor.contiguous,
    torch.squeeze, torch.Tensor.squeeze, torch.unsqueeze, torch.Tensor.unsqueeze,
    torch.clone, torch.Tensor.to, torch.Tensor.float, torch.Tensor.double,
)  # fmt: skip
def _reshape(step: Step, input: Interval, *_: Any, **__: Any) -> None:
    if input.shape[:1] != step.A.shape[:1]:
        refuse(step.source.function, "CROWN needs the samples to stay on the first axis")
    step.bound.send(input, step.A.reshape(*step.A.shape[:2], *input.shape[1:]))
