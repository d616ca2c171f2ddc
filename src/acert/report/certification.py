"""What was proven of a test set, from `certificates.npz` and `examples.npz`.

Curves are binned here and images picked, so that a page with hundreds of runs stays light.
Figures in [0, 1] are those of `acert.metrics`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from acert import metrics, records
from acert.errors import RunError
from acert.metrics import Curve, RadiusDistribution

__all__ = ["CURVE_POINTS", "Attack", "Certification", "Examples", "read_certification"]

Floats = npt.NDArray[np.float64]

CURVE_POINTS = 65
_BINS = 20
# `Status.MISCLASSIFIED` of certification.
_MISCLASSIFIED = 0


@dataclass(frozen=True, eq=False)
class Attack:
    """Upper bounds beside the certified lower bounds, of the samples that were attacked.

    `acr` is the mean upper bound over max_radius, where no attack up to max_radius counts as
    max_radius; `curve` is accuracy under attack, `certified` the certified accuracy of the same
    samples. `inside` counts attacks within a certified radius: where the record says which of
    them contradict it (`judged`), those alone.
    """

    samples: int
    acr: float
    curve: Curve
    certified: Curve
    inside: int
    judged: bool


@dataclass(frozen=True, eq=False)
class Examples:
    """A few test images, uint8 of shape (N, C, H, W), with what was found out about each."""

    images: npt.NDArray[np.uint8]
    index: tuple[int, ...]
    label: tuple[int, ...]
    prediction: tuple[int, ...]
    radius: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True, eq=False)
class Certification:
    """What was proven of a test set; `class_radius` is NaN for a class without samples.

    `test_set` tells test sets apart: a checksum of their labels, and `images` one of their images,
    -1 in older records.
    """

    max_radius: float
    arithmetic: str
    bounds: str
    elide: bool
    domain: tuple[float, float]
    samples: int
    test_set: int
    images: int
    accuracy: float
    acr: float
    art: float
    curve: Curve
    distribution: RadiusDistribution
    class_radius: Floats
    attack: Attack | None
    most: Examples | None
    least: Examples | None


def read_certification(folder: Path, *, classes: int) -> Certification:
    """What the certificates of a run folder prove; a damaged file raises and is named."""
    columns = records.read_certificates(folder)
    radius: Floats = columns["radius"]
    largest = float(columns["max_radius"])
    correct = np.asarray(columns["status"] != _MISCLASSIFIED)
    accuracy = metrics.accuracy(correct)
    acr = metrics.acr(radius, max_radius=largest)
    label = np.asarray(columns["label"], dtype=np.int64)
    if label.min() < 0 or label.max() >= classes:
        raise RunError(
            f"{folder / records.CERTIFICATES} is damaged: labels must be in [0, {classes - 1}]; "
            f"got {label.min()} to {label.max()}"
        )
    count = np.bincount(label, minlength=classes)
    total = np.bincount(label, weights=radius, minlength=classes)
    most, least = _examples(folder, columns)
    return Certification(
        max_radius=largest,
        arithmetic=str(columns["arithmetic"]),
        bounds=str(columns["bounds"]),
        elide=bool(columns["elide"]),
        domain=columns["domain"],
        samples=radius.size,
        test_set=zlib.crc32(label.tobytes()),
        images=int(columns["images"]),
        accuracy=accuracy,
        acr=acr,
        art=metrics.art(accuracy, acr),
        curve=_curve(radius, correct, largest),
        distribution=metrics.radius_distribution(radius, max_radius=largest, bins=_BINS),
        class_radius=np.where(count > 0, total / np.maximum(count, 1), np.nan),
        attack=_attack(columns, correct, largest),
        most=most,
        least=least,
    )


def _curve(radius: Floats, correct: npt.NDArray[np.bool_], largest: float) -> Curve:
    return metrics.certified_accuracy_curve(
        radius, correct, max_radius=largest, points=CURVE_POINTS
    )


def _attack(
    columns: Mapping[str, Any], correct: npt.NDArray[np.bool_], largest: float
) -> Attack | None:
    attacked = np.asarray(columns["attack_radius"], dtype=np.float64)
    tried = ~np.isnan(attacked)
    if not tried.any():
        return None
    radius, attacked, right = columns["radius"][tried], attacked[tried], correct[tried]
    certified = _curve(radius, right, largest)
    # An attack that succeeds at a radius breaks the sample there, not only beyond.
    standing = [float(np.mean(right & (attacked > at))) for at in certified.radius]
    # Where no attack succeeded within max_radius the record says infinity.
    upper = np.where(right, np.minimum(attacked, largest), 0.0)
    # A certified radius holds at its very end; compared in the precision of the file.
    inside = (radius > 0) & (attacked <= records.rounded_up(radius))
    violations = columns["violations"]
    return Attack(
        samples=int(tried.sum()),
        acr=metrics.acr(upper, max_radius=largest),
        curve=Curve(certified.radius, np.asarray(standing)),
        certified=certified,
        inside=int(inside.sum()) if violations < 0 else violations,
        judged=violations >= 0,
    )


def _examples(
    folder: Path, columns: Mapping[str, Any]
) -> tuple[Examples, Examples] | tuple[None, None]:
    """The most and the least certified images; None where there are none, or no images."""
    path = folder / records.EXAMPLES
    if not path.is_file():
        return None, None
    found = records.read_examples(folder)
    row_of = {int(index): row for row, index in enumerate(columns["index"])}
    most, least = (_picked(path, found, kind, row_of, columns) for kind in ("most", "least"))
    return (None, None) if most is None or least is None else (most, least)


def _picked(
    path: Path,
    found: Mapping[str, npt.NDArray[Any]],
    kind: str,
    row_of: Mapping[int, int],
    columns: Mapping[str, Any],
) -> Examples | None:
    images, index = found.get(f"{kind}_images"), found.get(f"{kind}_index")
    if images is None or index is None or index.shape != images.shape[:1]:
        raise RunError(f"{path} is damaged: it holds no {kind} certified images with their index")
    if images.ndim != 4 or images.shape[1] not in (1, 3) or images.dtype != np.uint8:
        return None
    positions = [int(i) for i in index]
    unknown = [i for i in positions if i not in row_of]
    if unknown:
        raise RunError(f"{path} is damaged: {records.CERTIFICATES} has no image {unknown[0]}")
    rows = [row_of[i] for i in positions]

    def column(name: str) -> Sequence[Any]:
        return [columns[name][row].item() for row in rows]

    return Examples(
        images=images,
        index=tuple(positions),
        label=tuple(column("label")),
        prediction=tuple(column("prediction")),
        radius=tuple(column("radius")),
    )
