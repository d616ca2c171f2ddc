"""The certified margin (Eqs. 3, 4) and the worst-case logits (Eq. 6), elided or plain."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acert.bounds.bound_pass import Kept
from acert.bounds.checks import (
    Domain,
    check_images,
    check_labels,
    check_logits,
    check_model,
    check_radius,
    domain_ends,
    warn_if_probabilities,
)
from acert.bounds.crown import crown_differences
from acert.bounds.interval import Affine, BoundPass, Interval
from acert.bounds.narrowing import narrowed
from acert.bounds.propagation import Statistics, propagate
from acert.bounds.rounding import OWN_UNIT, Rounding, own_gamma
from acert.errors import InvalidInput, UnsupportedOperation

__all__ = ["box", "certified_margin", "margin", "upper_differences", "worst_case_logits"]

# From the cheapest to the tightest.
BOUNDS = ("ibp", "crown-ibp", "crown")
# With more, all pairs of classes take longer than the pairs that a batch asks for.
_FEW_CLASSES = 16


def certified_margin(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    radius: float | Tensor,
    *,
    elide: bool = True,
    domain: Domain = (0.0, 1.0),
    statistics: Statistics | None = None,
    bounds: str = "ibp",
) -> Tensor:
    """Upper bound of max_{i != y} z_i - z_y over the box, one a sample (Eq. 3).

    Negative means certified at that `radius` (Eq. 4), up to rounding. `elide=True` fuses the
    last linear layer with the difference, which is never looser. The box is
    [x - radius, x + radius] inside `domain`; `domain=None` leaves it unclamped.
    `bounds="crown-ibp"` takes the smaller of CROWN's and the interval bound for each class, and
    `"crown"` bounds every activation by CROWN too.

    >>> model = nn.Linear(2, 2).requires_grad_(False)
    >>> _ = model.weight.copy_(torch.eye(2)), model.bias.zero_()
    >>> certified_margin(model, torch.tensor([[0.5, 0.25]]), torch.tensor([0]), 0.05)
    tensor([-0.1500])
    """
    logits = worst_case_logits(
        model, images, labels, radius,
        elide=elide, domain=domain, statistics=statistics, bounds=bounds,
    )  # fmt: skip
    return margin(logits, labels)


def worst_case_logits(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    radius: float | Tensor,
    *,
    elide: bool = True,
    domain: Domain = (0.0, 1.0),
    statistics: Statistics | None = None,
    bounds: str = "ibp",
) -> Tensor:
    """Logits whose cross entropy is the robust loss (Eqs. 5, 6), shape (batch, classes).

    Plain: upper bounds, and the lower bound at the label. Elided: upper bounds of z_i - z_y,
    which is 0 at the label; the same up to a shift if nothing were gained by eliding.
    `bounds="crown-ibp"` and `"crown"` give differences in both cases, the smaller of CROWN's and
    these.

    >>> model = nn.Linear(2, 2).requires_grad_(False)
    >>> _ = model.weight.copy_(torch.eye(2)), model.bias.zero_()
    >>> image, label = torch.tensor([[0.5, 0.25]]), torch.tensor([0])
    >>> worst_case_logits(model, image, label, 0.05, elide=False)
    tensor([[0.4500, 0.3000]])
    """
    check_bounds(bounds)
    compiling = torch.compiler.is_compiling()
    if not compiling:
        check_model(model, images)
        check_images(images, domain)
        check_labels(labels, images)
        check_radius(radius, images)
    if not isinstance(radius, Tensor):
        radius = torch.full(images.shape[:1], radius, dtype=images.dtype, device=images.device)
    bound_pass = bounding(bounds, statistics=statistics)
    output = propagate(model, box(images, radius, domain).within(bound_pass))
    if not compiling:
        check_logits(output, labels, len(images))
        warn_if_probabilities(output.center.detach())
    worst_case = upper_differences(output, labels) if elide else plain_worst_case(output, labels)
    return worst_case if bounds == "ibp" else tighter_differences(output, labels, worst_case)


def check_bounds(bounds: str) -> None:
    """Refuses bounds that do not exist."""
    if bounds not in BOUNDS:
        raise InvalidInput(f"`bounds` must be one of {sorted(BOUNDS)}; got {bounds!r}")


def bounding(
    bounds: str,
    *,
    rounding: Rounding | None = None,
    statistics: Statistics | None = None,
    fold: bool = False,
    kept: dict[int, Kept] | None = None,
) -> BoundPass:
    """A pass for these bounds. What CROWN walks back is recorded as the model computes it."""
    record = bounds != "ibp"
    return BoundPass(
        rounding, statistics, record=record, fold=fold and not record, kept=kept,
        narrow=narrowed if bounds == "crown" else None,
    )  # fmt: skip


def box(
    images: Tensor, radius: Tensor, domain: Domain, *, rounding: Rounding | None = None
) -> Interval:
    """[x - radius, x + radius] inside the domain, rounded outward for a rounding-safe pass."""
    radius = radius.reshape(-1, *[1] * (images.ndim - 1))
    lower, upper = images - radius, images + radius
    if rounding is not None:
        lower = torch.nextafter(lower, torch.full_like(lower, -math.inf))
        upper = torch.nextafter(upper, torch.full_like(upper, math.inf))
    if domain is not None:
        low, high = ends_around(images, domain)
        # A pixel at an end of the domain has its whole gradient at radius 0.
        lower = torch.where(lower < low, low, lower)
        upper = torch.where(upper > high, high, upper)
    return Interval(lower, upper).within(BoundPass(rounding))


def ends_around(images: Tensor, domain: Domain) -> tuple[Tensor, Tensor]:
    """Both ends of the domain, none of which an image is beyond."""
    low, high = domain_ends(domain, images)
    if images.dtype is torch.float64:
        # A float32 image may lie beyond an end that it was checked against as float32.
        # Detached, because a pixel at an end of the domain does not move that end.
        pixels = images.detach()
        low, high = torch.minimum(low, pixels), torch.maximum(high, pixels)
    return low, high


def margin(worst_case: Tensor, labels: Tensor) -> Tensor:
    """max_{i != y} of the worst-case logits less that at the label, shape (batch,)."""
    labels = labels.long().unsqueeze(1)
    others = worst_case.masked_fill(_own(labels, worst_case), -math.inf).amax(1)
    return others - worst_case.gather(1, labels).squeeze(1)


def _own(labels: Tensor, logits: Tensor) -> Tensor:
    """Where each row of the logits has its label, of (batch, 1); `F.one_hot` takes more calls."""
    return labels == torch.arange(logits.shape[1], device=labels.device)


def plain_worst_case(output: Interval, labels: Tensor) -> Tensor:
    """Upper bounds everywhere, the lower bound at the label (Eq. 6)."""
    lower, upper = output.ends()
    return torch.where(_own(labels.long().unsqueeze(1), upper), lower, upper)


def tighter_differences(output: Interval, labels: Tensor, worst_case: Tensor) -> Tensor:
    """Upper bounds of z_i - z_y: CROWN's where smaller than those of the worst-case logits."""
    differences = worst_case - worst_case.gather(1, labels.long().unsqueeze(1))
    crown = crown_differences(output, labels)
    return torch.where(crown < differences, crown, differences)  # never a NaN of CROWN's


def upper_differences(output: Interval, labels: Tensor) -> Tensor:
    """Upper bounds of z_i - z_y through the last linear layer, 0 at the label."""
    if output.affine is None:
        raise UnsupportedOperation(
            "`elide=True` needs a model whose last operation is a linear layer; the last one "
            f"was {output.operation}. Pass `elide=False` for the plain margin (Eq. 3): "
            "`--set elide=False` to `acert train`, `--no-elide` with `--weights`"
        )
    output.affine.check()
    column = labels.long().unsqueeze(1)
    inner, weight = output.affine.input, output.affine.weight
    center, radius = inner.as_ball()
    weight = weight.to(center.dtype)
    few = output.bound_pass.fold and len(weight) <= _FEW_CLASSES
    if few and not torch.compiler.is_compiling():
        reach = _reach_by_pairs(output.bound_pass.once(_pairs, weight), column, radius)
    else:
        reach = _reach(weight, column, radius)
    logits = output.center
    if output.affine.lowered:  # the last layer is worth its full precision
        logits = F.linear(center, weight, output.affine.bias)
    difference = logits - logits.gather(1, column)
    if output.rounding is not None:
        reach = _safe_reach(output, output.affine, reach, column)
    # Exactly 0 at the label, whatever rounding adds there.
    return (difference + reach).masked_fill(_own(column, logits), 0.0)


def _reach(weight: Tensor, labels: Tensor, radius: Tensor) -> Tensor:
    """sum_j |W_ij - W_yj| r_j, (batch, classes); `labels` are (batch, 1)."""
    spread = (weight - weight[labels]).abs()  # |W_i - W_y|, (batch, classes, inputs)
    return torch.bmm(spread, radius.unsqueeze(2)).squeeze(2)


def _reach_by_pairs(pairs: Tensor, labels: Tensor, radius: Tensor) -> Tensor:
    """The same by all pairs of classes.

    Few classes have fewer pairs than a batch has rows of differences, and a CPU multiplies all of
    them together sooner than it writes the rows down.
    """
    classes = math.isqrt(len(pairs))
    every = F.linear(radius, pairs).view(-1, classes, classes)
    return every.gather(1, labels.unsqueeze(2).expand(-1, 1, classes)).squeeze(1)


def _pairs(weight: Tensor) -> Tensor:
    """|W_i - W_k| of all pairs of classes, a row for each."""
    return (weight.unsqueeze(1) - weight).abs().flatten(0, 1)


def _safe_reach(output: Interval, layer: Affine, reach: Tensor, labels: Tensor) -> Tensor:
    """The radius of z_i - z_y with the rounding errors of both logits added.

    The network forms z_i and z_y, never their difference, so it errs by
    g (|W_i| + |W_y|) |x| + g (|b_i| + |b_y|), and so do our centers.
    """
    rounding = output.rounding
    assert rounding is not None and layer.underflow is not None
    summands = layer.weight.shape[1]
    center, radius = layer.input.as_ball()
    weight = layer.weight.to(center.dtype).abs()
    bias = None if layer.bias is None else layer.bias.to(center.dtype).abs()
    error = rounding.gamma(summands) * F.linear(center.abs() + radius, weight, bias)
    error = (error + layer.underflow) + 4 * OWN_UNIT * output.center.abs()
    error = torch.where(output.radius.isfinite(), error, math.inf)
    both = error + error.gather(1, labels)
    return (reach + both) * (1 + 4 * own_gamma(summands))
