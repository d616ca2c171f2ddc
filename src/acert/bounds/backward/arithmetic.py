"""Sums, differences and products with constants, and sums of two intervals, seen backward."""

from __future__ import annotations

import torch
from torch import Tensor

from acert.bounds.backward.table import backward
from acert.bounds.interval import Interval
from acert.bounds.linear_bound import Step
from acert.bounds.refusals import refuse
from acert.bounds.rules.arithmetic import Operand


@backward(torch.add, local=True)
def _add(step: Step, input: Operand, other: Operand, *, alpha: float = 1) -> None:
    for operand, factor in ((input, 1.0), (other, float(alpha))):
        if isinstance(operand, Interval):
            _times(step, operand, step.A.new_full((), factor))
        else:
            step.add_constant(step.A, _constant(step, operand) * factor)


@backward(torch.sub, local=True)
def _sub(step: Step, input: Operand, other: Operand, *, alpha: float = 1) -> None:
    _add(step, input, other, alpha=-alpha)


@backward(torch.rsub, local=True)
def _rsub(step: Step, input: Operand, other: Operand, *, alpha: float = 1) -> None:
    _sub(step, other, input, alpha=alpha)


@backward(torch.neg, local=True)
def _neg(step: Step, input: Interval) -> None:
    step.bound.send(input, -step.A)


@backward(torch.mul, local=True)
def _mul(step: Step, input: Operand, other: Operand) -> None:
    if not isinstance(input, Interval):
        input, other = other, input
    if not isinstance(input, Interval) or isinstance(other, Interval):
        refuse(step.source.function, "CROWN has no backward rule for a product of two intervals")
    _times(step, input, _constant(step, other))


@backward(torch.div, local=True)
def _div(step: Step, input: Operand, other: Operand, *, rounding_mode: str | None = None) -> None:
    if not isinstance(input, Interval) or isinstance(other, Interval):
        refuse(step.source.function, "CROWN has no backward rule for division by an interval")
    _times(step, input, 1 / _constant(step, other))


def _times(step: Step, input: Interval, factor: Tensor) -> None:
    step.scale(input, factor, magnitude=lambda: input.magnitude * factor.abs())


def _constant(step: Step, operand: Tensor | float) -> Tensor:
    return step.cut(torch.as_tensor(operand, dtype=step.A.dtype, device=step.A.device))
