"""The certified radius (Def. 3.1): the root of the certified margin, proven in floating point."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from acert.bounds.checks import (
    Domain,
    check_images,
    check_labels,
    check_logits,
    check_max_radius,
    check_model,
    warn_if_probabilities,
)
from acert.bounds.interval import Interval
from acert.bounds.margin import box, margin, plain_worst_case, upper_differences
from acert.bounds.propagation import propagate
from acert.bounds.rounding import OWN_UNIT, ROUNDINGS, Rounding
from acert.errors import InvalidInput
from acert.rootfind import Brent, RootStatus, Solver

__all__ = ["CertifiedRadius", "Status", "certified_radius", "proven_margin"]

_DEFAULT_BATCH = 256


class Status(IntEnum):
    """How a certified radius came about."""

    MISCLASSIFIED = 0  # the margin at radius 0 is >= 0: value 0
    CERTIFIED_TO_MAX = 1  # proven up to `max_radius`
    ROOT = 2  # the root of the margin, to the solver's tolerance
    UNCONVERGED = 3  # proven, but not known to be the largest such radius


class CertifiedRadius(NamedTuple):
    """Radii, how they came about, the solver's steps and the predicted classes, all (batch,)."""

    value: Tensor
    status: Tensor
    steps: Tensor
    prediction: Tensor


def certified_radius(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None = None,
    *,
    max_radius: float,
    solver: Solver = Brent(xtol=1e-10, rtol=1e-5, max_steps=100),  # noqa: B008  a frozen value
    elide: bool = True,
    domain: Domain = (0.0, 1.0),
    bounds: str = "ibp",
    arithmetic: str = "real",
    batch_size: int | None = None,
    differentiable: bool = False,
) -> CertifiedRadius:
    """Largest radius per sample at which the certified margin stays negative (Def. 3.1).

    0 where the image is misclassified (or its top classes tie), `max_radius` where it is
    certified throughout, otherwise the leftmost root (Thm. A.1), on its safe side: at `value`
    a float64 margin with rounding-safe bounds was evaluated and is negative. `value` is
    float64, so that no last rounding undoes the proof.

    `labels=None` certifies the predicted class. `arithmetic="real"` speaks of the network in
    exact arithmetic, `"float32"` of the network as float32 hardware evaluates it in any order
    of summation (not TF32, half precision or Winograd). `batch_size` samples are held in
    memory at a time, 256 if None. `differentiable=True` gives `value` the gradient of the
    implicit function theorem (Thm. 3.4) with respect to parameters and images; it is 0 where
    the radius is 0 or `max_radius`, and where the margin does not grow with the radius.

    >>> model = nn.Linear(2, 2).requires_grad_(False)
    >>> _ = model.weight.copy_(torch.eye(2)), model.bias.zero_()
    >>> result = certified_radius(model, torch.tensor([[0.5, 0.25], [0.5, 0.5]]), max_radius=0.2)
    >>> result.value
    tensor([0.1250, 0.0000], dtype=torch.float64)
    >>> [Status(status).name for status in result.status.tolist()]
    ['ROOT', 'MISCLASSIFIED']
    """
    rounding = _check(model, images, labels, max_radius, domain, bounds, arithmetic, batch_size)
    if not isinstance(solver, Solver):
        raise InvalidInput(f"`solver` must be a Brent or Bisection; got {solver!r}")
    size = batch_size or _DEFAULT_BATCH
    parts = []
    with ieee_arithmetic(images.device):
        for start in range(0, len(images), size):
            batch = images[start : start + size]
            target = None if labels is None else labels[start : start + size]
            with torch.no_grad():
                part = _certify(
                    model, batch.double(), target, max_radius, solver, elide, domain, rounding
                )
            if differentiable:
                part = part._replace(
                    value=_implicit(model, batch, target, part, elide=elide, domain=domain)
                )
            parts.append(part)
    return CertifiedRadius(*(torch.cat(column) for column in zip(*parts, strict=True)))


def proven_margin(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    radius: Tensor,
    *,
    rounding: Rounding,
    elide: bool = True,
    domain: Domain = (0.0, 1.0),
) -> Tensor:
    """The certified margin with rounding-safe bounds, in float64; +inf where nothing is proven.

    `images` and `radius` are float64 and checked already.
    """
    output = propagate(model, box(images, radius, domain, rounding=rounding))
    worst_case = upper_differences(output, labels) if elide else _lifted(output, labels)
    value = margin(worst_case, labels)
    return value.masked_fill(~value.isfinite(), torch.inf)


def _lifted(output: Interval, labels: Tensor) -> Tensor:
    """Plain worst-case logits, raised by the rounding of the subtraction that follows."""
    worst_case = plain_worst_case(output, labels)
    size = worst_case.abs()
    slack = 4 * OWN_UNIT * (size + size.gather(1, labels.unsqueeze(1)))
    own = torch.nn.functional.one_hot(labels, worst_case.shape[1]).bool()
    return torch.where(own, worst_case, worst_case + slack)


def _certify(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None,
    max_radius: float,
    solver: Solver,
    elide: bool,
    domain: Domain,
    rounding: Rounding,
) -> CertifiedRadius:
    """One batch, in float64."""
    output = propagate(model, Interval(images, images))
    check_logits(output, labels, len(images))
    logits = output.center
    warn_if_probabilities(logits)
    prediction = logits.argmax(1)
    labels = prediction if labels is None else labels.long()
    right = margin(logits, labels) < 0  # unwidened: accuracy does not depend on the arithmetic
    candidates = right.nonzero().squeeze(1)

    def proven(radius: Tensor, index: Tensor) -> Tensor:
        chosen = candidates[index]
        return proven_margin(
            model, images[chosen], labels[chosen], radius,
            rounding=rounding, elide=elide, domain=domain,
        )  # fmt: skip

    value = torch.zeros(len(images), dtype=torch.float64, device=images.device)
    status = torch.full_like(value, Status.MISCLASSIFIED, dtype=torch.uint8)
    steps = torch.zeros_like(value, dtype=torch.int32)
    if len(candidates):
        ends = value[candidates], torch.full_like(value[candidates], max_radius)
        root = solver.solve(proven, *ends, indexed=True)
        value[candidates] = root.lower
        # Right, but not provable even at 0: a proven radius of 0 that is no root.
        unproven = root.status == RootStatus.POSITIVE_THROUGHOUT
        status[candidates] = root.status.masked_fill(unproven, Status.UNCONVERGED)
        steps[candidates] = root.steps
    return CertifiedRadius(value, status, steps, prediction)


def _implicit(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None,
    certified: CertifiedRadius,
    *,
    elide: bool,
    domain: Domain,
) -> Tensor:
    """`certified.value` with the gradient -dR/dw / dR/deps (Thm. 3.4)."""
    labels = certified.prediction if labels is None else labels.long()
    radius = certified.value.detach().requires_grad_()
    with torch.enable_grad():
        output = propagate(model, box(images.double(), radius, domain))
        worst_case = (
            upper_differences(output, labels) if elide else plain_worst_case(output, labels)
        )
        value = margin(worst_case, labels)
        (slope,) = torch.autograd.grad(value.sum(), radius, retain_graph=True)
        inside = (certified.value > 0) & (certified.status != Status.CERTIFIED_TO_MAX)
        inside &= slope > 0
        slope = torch.where(inside, slope, 1.0)
        # Rows outside are cut off before the division, so that no NaN comes back through them.
        moved = torch.where(inside, value, value.detach())
        return certified.value - (moved - moved.detach()) / slope


def _check(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None,
    max_radius: float,
    domain: Domain,
    bounds: str,
    arithmetic: str,
    batch_size: int | None,
) -> Rounding:
    check_model(model, images)
    check_images(images, domain)
    if labels is not None:
        check_labels(labels, images)
    check_max_radius(max_radius)
    if bounds != "ibp":
        raise InvalidInput(f'`bounds` must be "ibp"; got {bounds!r}')
    if arithmetic not in ROUNDINGS:
        raise InvalidInput(f"`arithmetic` must be one of {sorted(ROUNDINGS)}; got {arithmetic!r}")
    if batch_size is not None and batch_size < 1:
        raise InvalidInput(f"`batch_size` must be at least 1 or None; got {batch_size}")
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        other = parameter.is_floating_point() and parameter.dtype != torch.float32
        if arithmetic == "float32" and other:
            raise InvalidInput(
                f'`arithmetic="float32"` needs a float32 model; got {name} of {parameter.dtype}'
            )
    return ROUNDINGS[arithmetic]


@contextmanager
def ieee_arithmetic(device: torch.device) -> Iterator[None]:
    """Plain sums of products: no autocast, no TF32, no convolution algorithm but im2col.

    cuDNN's own algorithms (Winograd, FFT) break the error bound, so it is off. The caller's
    settings come back afterwards.
    """
    backends: Any = torch.backends
    cudnn, matmul, conv = backends.cudnn, backends.cuda.matmul, backends.cudnn.conv
    before = cudnn.enabled, matmul.fp32_precision, conv.fp32_precision
    try:
        cudnn.enabled, matmul.fp32_precision, conv.fp32_precision = False, "ieee", "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        cudnn.enabled, matmul.fp32_precision, conv.fp32_precision = before
