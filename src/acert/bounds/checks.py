"""What public functions ask of their input, once, at entry."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from acert.bounds.interval import Interval
from acert.errors import InvalidInput

__all__ = ["Domain", "check_finite_float", "check_images", "check_labels", "check_model"]

Domain = tuple[float | Tensor, float | Tensor] | None


def check_model(model: object, images: object) -> None:
    """Refuses what is no module, or lives on another device than `images`."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"`model` must be a torch.nn.Module; got {type(model).__name__}")
    if not isinstance(images, Tensor):
        raise InvalidInput(f"images must be a torch.Tensor; got {type(images).__name__}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device != images.device:
            raise InvalidInput(
                "`model` and images must be on one device; "
                f"got {name} on {tensor.device} and images on {images.device}"
            )


def check_finite_float(name: str, tensor: object) -> None:
    """Refuses integers, NaN and infinities."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InvalidInput(f"`{name}` must be a floating-point tensor; got {got}")
    if not bool(tensor.isfinite().all()):
        raise InvalidInput(f"`{name}` must be finite; got NaN or infinity")


def check_images(images: Tensor, domain: Domain) -> None:
    """Refuses images that are not finite floats inside the domain, one sample a row."""
    check_finite_float("images", images)
    if images.ndim < 2 or len(images) == 0:
        raise InvalidInput(
            f"`images` must have shape (batch, ...) with batch >= 1; got {tuple(images.shape)}"
        )
    if domain is None:
        return
    lower, upper = domain_ends(domain, images)
    if not bool((lower <= upper).all()):
        raise InvalidInput(f"`domain` must be (low, high) with low <= high; got {domain}")
    if not bool(((images >= lower) & (images <= upper)).all()):
        raise InvalidInput(
            f"`images` must lie in the domain {_describe(domain)}; got values in "
            f"[{images.min():g}, {images.max():g}]. Normalisation belongs into the model "
            "(acert.models.Normalize); `domain=None` leaves the box unclamped"
        )


def domain_ends(domain: Any, images: Tensor) -> list[Tensor]:
    """Both ends of the domain as tensors that broadcast over the batch."""
    if not isinstance(domain, Sequence) or len(domain) != 2:
        raise InvalidInput(f"`domain` must be (low, high) or None; got {domain!r}")
    ends = [torch.as_tensor(end, dtype=images.dtype, device=images.device) for end in domain]
    for end in ends:
        try:
            fits = end.expand(images.shape[1:]).shape == images.shape[1:]
        except RuntimeError:
            fits = False
        if not fits:
            raise InvalidInput(
                f"`domain` must broadcast to one sample, {tuple(images.shape[1:])}; "
                f"got shape {tuple(end.shape)}"
            )
    return ends


def _describe(domain: tuple[float | Tensor, float | Tensor]) -> str:
    low, high = (
        end if not isinstance(end, Tensor) else f"tensor of shape {tuple(end.shape)}"
        for end in domain
    )
    return f"[{low}, {high}]"


def check_radius(radius: Tensor, images: Tensor) -> None:
    """Refuses radii that are negative, NaN or not one a sample."""
    if radius.shape != images.shape[:1]:
        raise InvalidInput(
            f"`radius` must be a number or have shape ({len(images)},); got {tuple(radius.shape)}"
        )
    if not bool((radius >= 0).all()) or not bool(radius.isfinite().all()):
        raise InvalidInput(f"`radius` must be finite and at least 0; got {radius.min().item():g}")


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
            f"`labels` and `images` must be on one device; got {labels.device} and {images.device}"
        )


def check_logits(output: Interval, labels: Tensor | None, samples: int) -> None:
    """Refuses outputs that are not (batch, classes) and labels outside the classes."""
    shape = tuple(output.shape)
    if len(shape) != 2 or shape[0] != samples or shape[1] < 2:
        raise InvalidInput(
            f"`model` must return logits of shape ({samples}, classes) with classes >= 2; "
            f"got {shape}"
        )
    if labels is not None and not bool(((labels >= 0) & (labels < shape[1])).all()):
        raise InvalidInput(
            f"`labels` must be in [0, {shape[1] - 1}]; got values in "
            f"[{labels.min().item()}, {labels.max().item()}]"
        )


def check_max_radius(max_radius: object) -> None:
    """Refuses a largest radius that is not a positive number."""
    if not isinstance(max_radius, (int, float)) or not 0 < max_radius < math.inf:
        raise InvalidInput(f"`max_radius` must be a finite number above 0; got {max_radius}")


def warn_if_probabilities(logits: Tensor) -> None:
    """Warns of rows that look like probabilities: margins need raw logits."""
    in_unit = bool(((logits >= 0) & (logits <= 1)).all())
    if in_unit and bool(((logits.sum(1) - 1).abs() < 1e-3).all()):
        warnings.warn(
            "the model's outputs look like probabilities (in [0, 1], rows sum to 1); acert "
            "expects raw logits: leave the softmax out",
            stacklevel=3,
        )
