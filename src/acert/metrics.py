"""Accuracy, ACR, ART and certified accuracy from certified radii: small pure functions.

Every figure is a fraction in [0, 1]; displays multiply by 100, as the paper's tables do.
Per-sample values come as a tensor, an array or a list of length N: `radius` (0 where nothing is
proven) and `correct` (whether the clean image is classified rightly).

A sample is certified at r when it is correct and its radius is at least r. At r = 0 this is plain
accuracy: a correct sample of radius 0 counts there, though nothing around it is proven.
A number compared with radii (`at`, `max_radius`) is first rounded to their precision, since a
radius stored in float32 would otherwise miss the very cap it was solved to.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from acert.errors import InvalidInput

__all__ = [
    "Curve",
    "RadiusDistribution",
    "Spread",
    "accuracy",
    "acr",
    "art",
    "certified_accuracy",
    "certified_accuracy_curve",
    "pareto_front",
    "radius_distribution",
    "spread",
]

Values = torch.Tensor | npt.ArrayLike
Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Curve:
    """Certified accuracy at rising radii, from 0 to max_radius; both float64 of one length.

    Between two knots the value is that of the right knot, because a radius counts up to and
    including itself.
    """

    radius: npt.NDArray[np.float64]
    accuracy: npt.NDArray[np.float64]

    @property
    def area(self) -> float:
        """Area under the steps; divided by max_radius it is the ACR if the curve is exact.

        On a grid it is at most that, since certified accuracy falls between two knots.
        """
        return float(np.sum(np.diff(self.radius) * self.accuracy[1:]))


@dataclass(frozen=True)
class RadiusDistribution:
    """Shares of all samples: at radius 0, strictly between in equal bins, at max_radius.

    The two ends hold many samples of one value each, so they are not mixed into a bin. All
    shares together are 1; `edges` is one longer than `share`.
    """

    edges: npt.NDArray[np.float64]
    share: npt.NDArray[np.float64]
    at_zero: float
    at_max: float


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (n - 1) over seeds; `std` is None for a single run."""

    n: int
    mean: float
    std: float | None
    low: float
    high: float


def accuracy(correct: Values) -> float:
    """Share of samples that are classified rightly (Acc)."""
    return float(np.mean(_correct(correct)))


def acr(radius: Values, *, max_radius: float) -> float:
    """Average certified radius over all samples, divided by max_radius (Eq. 12)."""
    values, largest = _radius(radius, max_radius)
    # In float64: a mean of many float32 numbers would lose the digits that tables show. The sum of
    # many equal numbers is rounded, and may come out above what they all are.
    return min(float(np.mean(values, dtype=np.float64)) / largest, 1.0)


def art(accuracy: float, acr: float) -> float:
    """Geometric mean of accuracy and ACR of the whole set (Eq. 13)."""
    for name, value in (("accuracy", accuracy), ("acr", acr)):
        if not 0 <= value <= 1:
            raise InvalidInput(f"`{name}` must be a fraction in [0, 1]; got {value}")
    return math.sqrt(accuracy * acr)


def certified_accuracy(radius: Values, correct: Values, *, at: float) -> float:
    """Share of samples that are correct and certified at the radius `at` (Table 7)."""
    values, right = _samples(radius, correct)
    if not (at >= 0 and math.isfinite(at)):
        raise InvalidInput(f"`at` must be >= 0 and finite; got {at}")
    return float(np.mean(right & (values >= values.dtype.type(at))))


def certified_accuracy_curve(
    radius: Values, correct: Values, *, max_radius: float, points: int | None = None
) -> Curve:
    """Certified accuracy as a function of the radius, from 0 to max_radius (Figure 3).

    Exact with a knot at every radius that occurs, whose area is ACR times max_radius;
    with `points`, the same function read off at that many evenly spaced radii.

    >>> curve = certified_accuracy_curve([0.0, 0.1, 0.3], [True, True, True], max_radius=0.4)
    >>> curve.radius.tolist(), [round(value, 3) for value in curve.accuracy.tolist()]
    ([0.0, 0.1, 0.3, 0.4], [1.0, 0.667, 0.333, 0.0])
    >>> round(curve.area / 0.4, 6) == round(acr([0.0, 0.1, 0.3], max_radius=0.4), 6)
    True
    """
    values, right = _samples(radius, correct)
    _, largest = _radius(values, max_radius)
    if points is None:
        knots = np.unique(np.concatenate([[0.0, largest], values.astype(np.float64)]))
    elif points < 2:
        raise InvalidInput(f"`points` must be >= 2; got {points}")
    else:
        knots = np.linspace(0.0, largest, points).astype(values.dtype).astype(np.float64)
    certified = np.sort(values[right].astype(np.float64))
    at_least = certified.size - np.searchsorted(certified, knots, side="left")
    return Curve(radius=knots, accuracy=at_least / values.size)


def radius_distribution(radius: Values, *, max_radius: float, bins: int = 20) -> RadiusDistribution:
    """How the radii spread over [0, max_radius], with both ends counted on their own."""
    values, largest = _radius(radius, max_radius)
    if bins < 1:
        raise InvalidInput(f"`bins` must be >= 1; got {bins}")
    exact = values.astype(np.float64)
    inside = exact[(exact > 0) & (exact < largest)]
    counts, edges = np.histogram(inside, bins=bins, range=(0.0, largest))
    return RadiusDistribution(
        edges=edges,
        share=counts / values.size,
        at_zero=float(np.mean(exact == 0)),
        at_max=float(np.mean(exact == largest)),
    )


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points no other point beats, by rising first coordinate (more is better).

    One point beats another when it is at least as good in both coordinates and better in one;
    equal points stay together, in the order they came.
    """
    if not all(math.isfinite(value) for point in points for value in point):
        raise InvalidInput("`points` must be finite; got NaN or infinity")

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one != other and one[0] >= other[0] and one[1] >= other[1]

    front = [i for i, mine in enumerate(points) if not any(beats(other, mine) for other in points)]
    return sorted(front, key=lambda i: points[i][0])


def spread(values: Sequence[float]) -> Spread:
    """Mean, sample standard deviation and extremes of one figure over seeds (Table 5)."""
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or numbers.size == 0 or not np.isfinite(numbers).all():
        raise InvalidInput(f"`values` must be one or more finite numbers; got {list(values)}")
    return Spread(
        n=numbers.size,
        mean=float(numbers.mean()),
        std=float(numbers.std(ddof=1)) if numbers.size > 1 else None,
        low=float(numbers.min()),
        high=float(numbers.max()),
    )


def _array(values: Values) -> npt.NDArray[Any]:
    if isinstance(values, torch.Tensor):
        # numpy has no bfloat16; float32 holds every such number.
        dtype = torch.float32 if values.dtype is torch.bfloat16 else values.dtype
        return values.detach().to("cpu", dtype).numpy()
    return np.asarray(values)


def _correct(correct: Values) -> npt.NDArray[np.bool_]:
    array = _array(correct)
    if array.dtype != np.bool_ or array.ndim != 1 or array.size == 0:
        raise InvalidInput(
            "`correct` must hold one boolean a sample, at least one; "
            f"got {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.bool_, copy=False)


def _radius(radius: Values, max_radius: float | None = None) -> tuple[Floats, float]:
    """Radii in their own precision, and max_radius rounded to it; infinity if there is none."""
    array = _array(radius)
    if array.dtype.kind not in "fiu" or array.ndim != 1 or array.size == 0:
        raise InvalidInput(
            "`radius` must hold one number a sample, at least one; "
            f"got {array.dtype} of shape {array.shape}"
        )
    values: Floats = array if array.dtype.kind == "f" else array.astype(np.float64)
    if max_radius is not None and not 0 < max_radius < math.inf:
        raise InvalidInput(f"`max_radius` must be positive and finite; got {max_radius}")
    largest = math.inf if max_radius is None else float(values.dtype.type(max_radius))
    outside = ~((values >= 0) & (values <= largest) & np.isfinite(values))
    if outside.any():
        raise InvalidInput(
            f"`radius` must be in [0, {largest:g}]; got {values[outside][0]} "
            f"at sample {int(np.argmax(outside))}"
        )
    return values, largest


def _samples(radius: Values, correct: Values) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Radii and correctness of the same samples; a wrong sample's radius is 0 (Def. 3.1)."""
    (values, _), right = _radius(radius), _correct(correct)
    if values.shape != right.shape:
        raise InvalidInput(
            f"`radius` and `correct` must be of one length; got {values.size} and {right.size}"
        )
    unsound = ~right & (values > 0)
    if unsound.any():
        raise InvalidInput(
            f"`radius` must be 0 where the sample is misclassified; got {values[unsound][0]} "
            f"at sample {int(np.argmax(unsound))}"
        )
    return values, right
