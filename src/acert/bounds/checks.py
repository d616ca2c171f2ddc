"""What public functions ask of their input, once, at entry."""

from __future__ import annotations

import math
import sys
import warnings
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from acert.bounds.interval import Interval, constant
from acert.errors import InvalidInput

__all__ = [
    "Domain", "check_finite_float", "check_images", "check_labels", "check_model",
    "check_unwrapped",
]  # fmt: skip

Domain = tuple[float | Tensor, float | Tensor] | None


def check_model(model: object, input: object) -> None:
    """Refuses what is no module, or lives on another device than its input."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"`model` must be a torch.nn.Module; got {type(model).__name__}")
    if not isinstance(input, Tensor):
        return  # whoever checks the input names it
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise InvalidInput(f"`model` must be initialised; got `{name}` without a shape")
        if tensor.device != input.device:
            raise InvalidInput(
                f"`model` must be on the device of its input, {input.device}; "
                f"got `{name}` on {tensor.device}"
            )


def check_unwrapped(model: nn.Module) -> None:
    """Refuses what takes a batch apart or waits for other processes around a module."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InvalidInput(
            f"`model` must be the module itself, `model.module`; got {type(model).__name__}"
        )


def check_finite_float(name: str, tensor: object) -> None:
    """Refuses integers, NaN and infinities."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise InvalidInput(f"`{name}` must be a floating-point tensor; got {_kind(tensor)}")
    if tensor.is_meta:
        raise InvalidInput(f"`{name}` must hold numbers; got a tensor on the meta device")
    finite = tensor.isfinite()
    if not bool(finite.all()):
        raise InvalidInput(f"`{name}` must be finite; got {tensor[~finite][0].item()}")


def check_images(images: Tensor, domain: Domain) -> None:
    """Refuses images that are not finite floats inside the domain, one sample a row."""
    check_finite_float("images", images)
    if images.ndim < 2 or len(images) == 0:
        raise InvalidInput(
            f"`images` must have shape (batch, ...) with batch >= 1; got {tuple(images.shape)}"
        )
    if domain is None:
        return
    _check_domain(domain, images)
    lower, upper = domain_ends(domain, images)
    if not bool((lower <= upper).all()):
        raise InvalidInput(
            f"`domain` must be (low, high) with low <= high; got {_describe(domain)}"
        )
    if not bool(((images >= lower) & (images <= upper)).all()):
        raise InvalidInput(
            f"`images` must lie in the domain {_describe(domain)}; got values in "
            f"[{images.min():.9g}, {images.max():.9g}]. Normalisation belongs into the model "
            "(acert.models.Normalize); `domain=None` leaves the box unclamped"
        )


def _check_domain(domain: object, images: Tensor) -> None:
    """Refuses what is no pair of numbers or tensors that fit one sample."""
    if not isinstance(domain, (tuple, list)) or len(domain) != 2:
        raise InvalidInput(f"`domain` must be (low, high) or None; got {domain!r}")
    for end in domain:
        if not isinstance(end, (Real, Tensor)):
            raise InvalidInput(f"`domain` must hold numbers or tensors; got {_kind(end)}")
        if not isinstance(end, Tensor):
            continue
        if end.device != images.device:
            raise InvalidInput(
                f"`domain` must be on the device of `images`, {images.device}; got {end.device}"
            )
        if not _broadcasts(end.shape, images.shape[1:]):
            raise InvalidInput(
                f"`domain` must broadcast to one sample, {tuple(images.shape[1:])}; "
                f"got shape {tuple(end.shape)}"
            )


def _broadcasts(shape: torch.Size, sample: torch.Size) -> bool:
    """Whether `shape` stretches to `sample` without stretching `sample` itself."""
    last = zip(reversed(shape), reversed(sample), strict=False)
    return len(shape) <= len(sample) and all(size in (1, wanted) for size, wanted in last)


def domain_ends(domain: Any, images: Tensor) -> list[Tensor]:
    """Both ends of the domain as tensors that broadcast over the batch."""
    return [constant(end, images) for end in domain]


def _describe(domain: tuple[float | Tensor, float | Tensor]) -> str:
    low, high = (
        end if not isinstance(end, Tensor) else f"tensor of shape {tuple(end.shape)}"
        for end in domain
    )
    return f"[{low}, {high}]"


def check_radius(radius: object, images: Tensor) -> None:
    """Refuses radii that are negative, not finite, or not one number or one a sample."""
    if isinstance(radius, Tensor):
        if radius.device != images.device:
            raise InvalidInput(
                f"`radius` must be on the device of `images`, {images.device}; got {radius.device}"
            )
        check_finite_float("radius", radius)
        if radius.shape != images.shape[:1]:
            raise InvalidInput(
                f"`radius` must be a number or have shape ({len(images)},); "
                f"got {tuple(radius.shape)}"
            )
        least = radius.min().item()
    elif isinstance(radius, Real) and not isinstance(radius, bool):
        least = float(radius)
    else:
        raise InvalidInput(f"`radius` must be a number or a tensor; got {_kind(radius)}")
    if not 0 <= least < math.inf:
        raise InvalidInput(f"`radius` must be finite and at least 0; got {least:g}")


def check_labels(labels: object, images: Tensor) -> None:
    """Refuses labels that are not integers, one a sample, on the images' device."""
    if not isinstance(labels, Tensor):
        raise InvalidInput(f"`labels` must be a torch.Tensor; got {type(labels).__name__}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InvalidInput(f"`labels` must be integers; got {labels.dtype}")
    if labels.shape != images.shape[:1]:
        raise InvalidInput(f"`labels` must have shape ({len(images)},); got {tuple(labels.shape)}")
    if labels.device != images.device:
        raise InvalidInput(
            f"`labels` must be on the device of `images`, {images.device}; got {labels.device}"
        )


def check_logits(output: Interval | Tensor, labels: Tensor | None, samples: int) -> None:
    """Refuses outputs that are not (batch, classes) and labels outside the classes."""
    shape = tuple(output.shape)
    if len(shape) != 2 or shape[0] != samples or shape[1] < 2:
        raise InvalidInput(
            f"`model` must return logits of shape ({samples}, classes) with classes >= 2; "
            f"got {shape}"
        )
    if labels is None:
        return
    labels = labels.long()  # uint8 would turn 256 classes into none, and uint16 compares nothing
    if not bool(((labels >= 0) & (labels < shape[1])).all()):
        raise InvalidInput(
            f"`labels` must be in [0, {shape[1] - 1}]; got values in "
            f"[{labels.min().item()}, {labels.max().item()}]"
        )


def check_max_radius(max_radius: object) -> None:
    """Refuses a largest radius that is not a positive number."""
    number = isinstance(max_radius, Real) and not isinstance(max_radius, bool)
    if not number or not 0 < max_radius < math.inf:  # type: ignore[operator]
        raise InvalidInput(f"`max_radius` must be a finite number above 0; got {max_radius!r}")


def check_batch_size(batch_size: object) -> None:
    """Refuses a batch size that is neither None nor a positive integer."""
    number = isinstance(batch_size, int) and not isinstance(batch_size, bool)
    if batch_size is not None and (not number or batch_size < 1):  # type: ignore[operator]
        raise InvalidInput(
            f"`batch_size` must be an integer of at least 1 or None; got {batch_size!r}"
        )


def warn_if_probabilities(logits: Tensor) -> None:
    """Warns of rows that look like probabilities: margins need raw logits."""
    in_unit = bool(((logits >= 0) & (logits <= 1)).all())
    if in_unit and bool(((logits.sum(1) - 1).abs() < 1e-3).all()):
        warnings.warn(
            "the model's outputs look like probabilities (in [0, 1], rows sum to 1); acert "
            "expects raw logits: leave the softmax out",
            stacklevel=_first_level_outside(),
        )


def _first_level_outside() -> int:
    """How many calls above our caller the first one stands that is not ours."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("acert."):
        level, frame = level + 1, frame.f_back
    return level


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
