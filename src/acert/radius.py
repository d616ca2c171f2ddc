"""The certified radius (Def. 3.1): the root of the certified margin, proven in floating point."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from acert.arithmetic import (
    ARITHMETICS,
    QUICK_ERROR,
    check_float64,
    ieee_arithmetic,
    quick_arithmetic,
)
from acert.bounds.bound_pass import Kept
from acert.bounds.checks import (
    Domain,
    check_batch_size,
    check_images,
    check_labels,
    check_logits,
    check_max_radius,
    check_model,
    warn_if_probabilities,
)
from acert.bounds.interval import BoundPass, Interval
from acert.bounds.margin import check_bounds, margin
from acert.bounds.propagation import propagate
from acert.bounds.proven import proven_margin
from acert.bounds.rounding import OWN_UNIT, Rounding
from acert.bounds.same_network import COMPARED, check_same_network
from acert.errors import InvalidInput
from acert.memory import keep_freed_memory
from acert.root_proof import finer, prove
from acert.rootfind import Brent, RootStatus, Solver

__all__ = ["CertifiedRadius", "Status", "certified_batches", "certified_radius"]


class Status(IntEnum):
    """How a certified radius came about, as `CertifiedRadius.status` holds it.

    MISCLASSIFIED: the margin at radius 0 is not negative, and the value is 0.
    CERTIFIED_TO_MAX: the value is `max_radius`.
    ROOT: the value is the root of the margin, to the solver's tolerance.
    UNCONVERGED: the value is proven, but not known to be the largest such radius.

    >>> Status(2).name
    'ROOT'
    """

    MISCLASSIFIED = 0
    CERTIFIED_TO_MAX = 1
    ROOT = 2
    UNCONVERGED = 3


class CertifiedRadius(NamedTuple):
    """Radii, how they came about, their cost and the predicted classes, all (batch,).

    `value` holds proven radii in float64, `status` numbers of `Status`; `steps` counts the
    evaluations of the proven margin.
    """

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
    of summation (not TF32, half precision or Winograd), and `"nearest"` is a plain float64
    computation that does not cover rounding. `bounds="crown-ibp"` takes the smaller of CROWN's
    and the interval bound for each class; `"crown"` bounds every activation by CROWN too, which a
    network that was not trained for intervals needs. These margins may fall again as the radius
    grows, so a larger certified radius can exist; the margin at `value` itself is negative all the
    same.

    `batch_size` samples are held in memory at a time. None takes as many as have the pixels of
    32 images of 32 x 32, between 16 and 128; on CUDA those of 1,000 such in colour; for CROWN 8,
    on CUDA 32, and fewer of larger images.
    `differentiable=True` gives `value` the gradient of the implicit function theorem (Thm. 3.4)
    with respect to parameters and images; it is 0 where the radius is 0 or `max_radius`, and
    where the margin does not grow with the radius. CROWN's margin may jump over 0: there is no root
    then, and the gradient is that of the margin below the jump, not of the place where it jumps.

    >>> model = nn.Linear(2, 2).requires_grad_(False)
    >>> _ = model.weight.copy_(torch.eye(2)), model.bias.zero_()
    >>> result = certified_radius(model, torch.tensor([[0.5, 0.25], [0.5, 0.5]]), max_radius=0.2)
    >>> result.value
    tensor([0.1250, 0.0000], dtype=torch.float64)
    >>> [Status(status).name for status in result.status.tolist()]
    ['ROOT', 'MISCLASSIFIED']
    """
    if differentiable and not torch.is_grad_enabled():
        raise InvalidInput("`differentiable` must be False where gradients are off; got True")
    parts, start = [], 0
    for part, _ in certified_batches(
        model, images, labels, max_radius=max_radius, solver=solver, elide=elide, domain=domain,
        bounds=bounds, arithmetic=arithmetic, batch_size=batch_size,
    ):  # fmt: skip
        size = batch_size or _default_batch(images, bounds)
        for at in range(0, len(part.value), size):
            piece = CertifiedRadius(*(column[at : at + size] for column in part))
            here = slice(start, start := start + len(piece.value))
            if differentiable:
                target = piece.prediction if labels is None else labels[here].long()
                with ieee_arithmetic(images.device):
                    value = _implicit(
                        model, images[here], target, piece,
                        elide=elide, domain=domain, bounds=bounds,
                    )  # fmt: skip
                piece = piece._replace(value=value)
            parts.append(piece)
    return CertifiedRadius(*(torch.cat(column) for column in zip(*parts, strict=True)))


def certified_batches(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None,
    *,
    max_radius: float,
    solver: Solver = Brent(xtol=1e-10, rtol=1e-5, max_steps=100),  # noqa: B008  a frozen value
    elide: bool,
    domain: Domain,
    bounds: str,
    arithmetic: str,
    batch_size: int | None,
) -> Iterator[tuple[CertifiedRadius, Tensor]]:
    """What `certified_radius` returns, some batches at a time, with the margins at radius 0."""
    rounding = _check(model, images, labels, max_radius, domain, bounds, arithmetic, batch_size)
    if not isinstance(solver, Solver):
        raise InvalidInput(f"`solver` must be a Brent, PowerLaw or Bisection; got {solver!r}")
    size = batch_size or _default_batch(images, bounds)
    if not images.is_cuda:
        keep_freed_memory()
    shared = _Shared() if images.is_cuda else _Shared({}, {}, {})
    with ieee_arithmetic(images.device), torch.no_grad():
        check_same_network(model, images[:COMPARED], kept=shared.proven)
    group = size * _batches_together(images.device)
    for start in range(0, len(images), group):
        some = images[start : start + group]
        target = None if labels is None else labels[start : start + group]
        with ieee_arithmetic(images.device), torch.no_grad():
            part = _certify(
                model, some, target, float(max_radius), solver, elide, domain, bounds, rounding,
                size, shared,
            )  # fmt: skip
        yield part


class _Shared(NamedTuple):
    """What passes of each kind make of weights, once for all batches.

    On a CPU weights take longer to read and to write than images to be multiplied by them.
    """

    points: dict[int, Kept] | None = None
    plain: dict[int, Kept] | None = None
    proven: dict[int, Kept] | None = None


def _certify(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None,
    max_radius: float,
    solver: Solver,
    elide: bool,
    domain: Domain,
    bounds: str,
    rounding: Rounding | None,
    batch_size: int,
    shared: _Shared,
) -> tuple[CertifiedRadius, Tensor]:
    """Radii and margins at 0: a guess in low precision, then a proof in float64.

    `batch_size` samples go through the model at a time, but one search serves all of them.
    """
    parts = []
    for start in range(0, len(images), batch_size):
        exact = images[start : start + batch_size].double()
        points = BoundPass(points=True, kept=shared.points)
        output = propagate(model, Interval(exact, exact).within(points))
        check_logits(
            output, None if labels is None else labels[start : start + batch_size], len(exact)
        )
        parts.append(output.center)
    logits = torch.cat(parts)
    warn_if_probabilities(logits)
    prediction = logits.argmax(1)
    labels = prediction if labels is None else labels.long()
    at_zero = margin(logits, labels)  # unwidened: accuracy does not depend on the arithmetic
    candidates = (at_zero < 0).nonzero().squeeze(1)

    def margins(
        rounding: Rounding | None, kept: dict[int, Kept] | None, *, fold: bool = False
    ) -> Callable[[Tensor, Tensor], Tensor]:
        def margin_at(radius: Tensor, index: Tensor) -> Tensor:
            found = [
                proven_margin(
                    model, images[chosen].to(part.dtype), labels[chosen], part,
                    rounding=rounding, elide=elide, domain=domain, bounds=bounds,
                    fold=fold, kept=kept,
                )
                for part, chosen in zip(
                    torch.split(radius, batch_size),
                    torch.split(candidates[index], batch_size),
                    strict=True,
                )
            ]  # fmt: skip
            return torch.cat(found)

        return margin_at

    if rounding is not None:
        # The order of a sum depends on the batch, so two evaluations of one bound differ. Room
        # for both keeps what is proven here proven in any other batch.
        rounding = replace(rounding, unit=rounding.unit + 4 * OWN_UNIT)
    plain = margins(None, shared.plain, fold=not images.is_cuda)
    proven = margins(rounding, shared.proven)
    value = torch.zeros(len(images), dtype=torch.float64, device=images.device)
    status = torch.full_like(value, Status.MISCLASSIFIED, dtype=torch.uint8)
    steps = torch.zeros_like(value, dtype=torch.int32)
    if len(candidates):
        zero, slope = images.new_zeros(len(candidates)), None
        # The guess is sought in the images' own precision, which may not reach so far.
        top = min(max_radius, torch.finfo(zero.dtype).max)
        rough = replace(solver, rtol=max(solver.rtol, QUICK_ERROR))
        with quick_arithmetic("tf32"):
            guess = rough.solve(plain, zero, torch.full_like(zero, top), indexed=True).estimate
        if rough.rtol > solver.rtol:
            with quick_arithmetic("ieee"):
                guess, slope = finer(guess, plain, top, error=rough.rtol)
        # Clamped, because `max_radius` may have been rounded up to the images' precision.
        guess = guess.double().clamp(max=max_radius)
        root = prove(guess, proven, max_radius, solver, slope=slope)
        value[candidates] = root.lower
        # Right, but not provable even at 0: a proven radius of 0 that is no root.
        unproven = root.status == RootStatus.POSITIVE_THROUGHOUT
        status[candidates] = root.status.masked_fill(unproven, Status.UNCONVERGED)
        steps[candidates] = root.steps
    return CertifiedRadius(value, status, steps, prediction), at_zero


def _implicit(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    certified: CertifiedRadius,
    *,
    elide: bool,
    domain: Domain,
    bounds: str,
) -> Tensor:
    """`certified.value` with the gradient -dR/dw / dR/deps (Thm. 3.4)."""
    radius = certified.value.detach().requires_grad_()
    with torch.enable_grad():
        value = proven_margin(
            model, images.double(), labels, radius,
            rounding=None, elide=elide, domain=domain, bounds=bounds,
        )  # fmt: skip
        if not value.requires_grad:  # of comparisons alone, and weights that are not trained
            return certified.value
        (slope,) = torch.autograd.grad(
            value.sum(), radius, retain_graph=True, materialize_grads=True
        )
        inside = (certified.value > 0) & (certified.status != Status.CERTIFIED_TO_MAX)
        inside &= slope > 0
        slope = torch.where(inside, slope, 1.0)
        # Rows outside are cut off before the division, so that no NaN comes back through them.
        moved = torch.where(inside, value, 0.0)
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
) -> Rounding | None:
    check_model(model, images)
    check_images(images, domain)
    if labels is not None:
        check_labels(labels, images)
    check_max_radius(max_radius)
    check_bounds(bounds)
    if arithmetic not in ARITHMETICS:
        raise InvalidInput(f"`arithmetic` must be one of {sorted(ARITHMETICS)}; got {arithmetic!r}")
    check_batch_size(batch_size)
    if ARITHMETICS[arithmetic] is not None:
        check_float64()
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        other = parameter.is_floating_point() and parameter.dtype != torch.float32
        if arithmetic == "float32" and other:
            raise InvalidInput(
                f'`arithmetic="float32"` needs a float32 model; got {name} of {parameter.dtype}'
            )
    return ARITHMETICS[arithmetic]


def _default_batch(images: Tensor, bounds: str) -> int:
    pixels = math.prod(images.shape[2:])
    if bounds != "ibp":  # a coefficient a class for every activation
        return max(1, (32 if images.is_cuda else 8) * 1024 // max(1024, pixels))
    if images.is_cuda:  # a large batch hides the launches; 1,000 CIFAR-10 images of CNN7 take 8 GiB
        return max(32, 1000 * 3072 // images[0].numel())
    # A small one leaves its memory in the process and its activations in the cache.
    return min(max(16, 32 * 1024 // max(1, pixels)), 128)


def _batches_together(device: torch.device) -> int:
    """Batches of one search: on CUDA its last few samples cost as many launches as all."""
    return 16 if device.type == "cuda" else 1
