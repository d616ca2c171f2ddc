"""A plain classifier with robustness properties, as the yearly verifier competition lays them out.

`onnx/NAME.onnx`, `vnnlib/prop_K.vnnlib` (VNN-LIB 1.0), and `instances.csv` with a line for each
property. A property is what a verifier looks for: a point of the box that is classified otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from acert.arithmetic import ieee_arithmetic
from acert.bounds.checks import check_images, check_labels
from acert.bounds.margin import margin
from acert.deploy.onnx_file import check_evaluation, write_plain
from acert.errors import InvalidInput, RunError
from acert.records import make_writable

__all__ = ["Benchmark", "box_decimals", "property_text", "write_benchmark"]

_DIGITS = 17  # tell any two float64 numbers apart, and float32 ones all the more


@dataclass(frozen=True)
class Benchmark:
    """What was written: indices of the images with a property, and of those misclassified."""

    properties: tuple[int, ...]
    misclassified: tuple[int, ...]


def write_benchmark(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    folder: Path,
    *,
    name: str,
    radius: float | Fraction,
    domain: tuple[float, float] | None = (0.0, 1.0),
    first: int = 0,
    timeout: int = 300,
    record: dict[str, object] | None = None,
) -> Benchmark:
    """Writes model and properties of all images that it classifies correctly.

    The box of an image is [x - radius, x + radius] inside `domain`, moved outward to float32
    numbers and written with digits that keep them there, so that it holds the exact box whatever
    precision a verifier reads it in. `radius` is exact as a fraction. Properties are numbered
    from `first` on, the place of the first image in its test set; `timeout` is in seconds.
    """
    check_evaluation(model)
    check_images(images, domain)
    check_labels(labels, images)
    if not 0 < radius < float("inf"):
        raise InvalidInput(f"`radius` must be above 0 and finite; got {radius}")
    if timeout < 1:
        raise InvalidInput(f"`timeout` must be at least 1 second; got {timeout}")
    table = folder / "instances.csv"
    if table.exists():
        raise RunError(f"{folder} holds a benchmark already: choose another folder")
    make_writable(folder / "vnnlib")
    with torch.no_grad(), ieee_arithmetic(images.device):
        logits = model(images.clone())  # it may work in place
    # A tie is a counterexample at the image itself.
    right = (margin(logits, labels) < 0).tolist()
    write_plain(model, images, folder / "onnx" / f"{name}.onnx", batch=1, record=record)
    lines = []
    for index in (index for index, good in enumerate(right) if good):
        place, label = first + index, int(labels[index])
        text = property_text(images[index], label, logits.shape[1], Fraction(radius), domain)
        note = f"; image {place} is predicted as {label} within {float(radius):g}\n"
        (folder / "vnnlib" / f"prop_{place}.vnnlib").write_text(note + text, encoding="utf-8")
        lines.append(f"onnx/{name}.onnx,vnnlib/prop_{place}.vnnlib,{timeout}\n")
    table.write_text("".join(lines), encoding="utf-8")
    return Benchmark(
        properties=tuple(first + index for index, good in enumerate(right) if good),
        misclassified=tuple(first + index for index, good in enumerate(right) if not good),
    )


def property_text(
    image: Tensor, label: int, classes: int, radius: Fraction, domain: tuple[float, float] | None
) -> str:
    """The text of one property: the box of the inputs, and a wrong class that leads or ties."""
    pixels = image.flatten().tolist()
    lines = [f"(declare-const X_{i} Real)" for i in range(len(pixels))]
    lines += [f"(declare-const Y_{j} Real)" for j in range(classes)]
    for i, pixel in enumerate(pixels):
        lower, upper = box_decimals(pixel, radius, domain)
        lines += [f"(assert (>= X_{i} {lower}))", f"(assert (<= X_{i} {upper}))"]
    wrong = "".join(f"\n    (and (>= Y_{j} Y_{label}))" for j in range(classes) if j != label)
    return "\n".join([*lines, f"(assert (or{wrong}\n))", ""])


def box_decimals(
    pixel: float, radius: Fraction, domain: tuple[float, float] | None
) -> tuple[str, str]:
    """Decimals of a box that holds [pixel - radius, pixel + radius] inside the domain.

    >>> box_decimals(0.5, Fraction(1, 3), (0.0, 0.75))
    ('0.16666665673255920', '0.75')
    """
    exact = Fraction(pixel)
    lower, upper = exact - radius, exact + radius
    if domain is not None:
        low, high = map(Fraction, domain)
        # A float32 image may lie beyond an end that it was checked against as float32.
        lower, upper = max(lower, min(low, exact)), min(upper, max(high, exact))
    return _outward(lower, -1), _outward(upper, 1)


def _outward(value: Fraction, sign: int) -> str:
    """The nearest float32 number that is not inside, written so that no reader moves it inside."""
    number = np.float32(float(value))
    if sign * (Fraction(float(number)) - value) < 0:
        number = np.nextafter(number, np.float32(sign * np.inf))
    rounding = ROUND_CEILING if sign > 0 else ROUND_FLOOR
    exact = Context(prec=200).create_decimal_from_float(float(number))
    return format(Context(prec=_DIGITS, rounding=rounding).plus(exact), "f")
