"""Certificates against attacks: an attack inside a certified radius is a bug, and is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from acert.arithmetic import ieee_arithmetic
from acert.attack.search import AttackResult, Found, attack_radius
from acert.bounds.margin import box, margin
from acert.bounds.propagation import propagate
from acert.bounds.rounding import FLOAT32, REAL
from acert.bounds.substitution import called_with, copied_buffers
from acert.data import Split, to_float
from acert.errors import InvalidInput
from acert.evaluation import Certificates, evaluation_mode
from acert.records import rounded_up

__all__ = ["AttackCheck", "Violation", "check_certificates"]

# Images attacked together; enough to fill a device after most of them are done.
_BLOCK = 2048
_STORED = 100
_EVALUATED = 128  # points at a time in float64, by bounds


@dataclass(frozen=True, kw_only=True)
class Violation:
    """An attack inside a certified radius: which sample, how far, and by which margin.

    `distance` and `radius` are compared exactly. `margin` is what float32 computes.
    """

    index: int
    radius: float
    distance: float
    margin: float

    def __str__(self) -> str:
        return (
            f"image {self.index} is certified up to {self.radius!r}, but an attack at distance "
            f"{self.distance!r} changes its prediction (margin {self.margin:.3g})"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackCheck:
    """Certificates with their attack radii, and the attacks that contradict them.

    `certificates.attack_radius` is rounded up to float32: 0 where the sample is misclassified,
    infinity where no attack succeeded. `rounding_only` counts the attacks inside certified
    radii that only float32 rounding makes, against which the arithmetic promises nothing.
    `attacks` holds the points of the first 100 samples that were broken, those in `violations`
    before the others.
    """

    certificates: Certificates
    violations: tuple[Violation, ...]
    rounding_only: int
    attacks: dict[str, npt.NDArray[Any]]

    @property
    def promised(self) -> bool:
        """Whether the certificates claim to be proven, so that a violation is a bug."""
        return self.certificates.arithmetic != "nearest"


def check_certificates(
    model: nn.Module,
    split: Split,
    certificates: Certificates,
    *,
    steps: int = 40,
    restarts: int = 5,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> AttackCheck:
    """Attacks every sample of a split and compares the outcome with its certificates.

    The arguments are those of `attack_radius`; `certificates` are of the same model and split.
    A `"float32"` certificate is contradicted by any float32 success at a distance of at most
    its radius. Others speak of exact arithmetic, so the point is evaluated again with a proven
    error bound; what that does not confirm is counted as rounding.
    """
    if len(split) != len(certificates):
        raise InvalidInput(
            f"`certificates` must be of the same {len(split)} samples; got {len(certificates)}"
        )
    columns: list[npt.NDArray[np.float64]] = []
    stored: list[dict[str, npt.NDArray[Any]]] = []
    violations: list[Violation] = []
    rounding_only = 0
    for start in range(0, len(split), _BLOCK):
        rows = slice(start, start + _BLOCK)
        images, labels = to_float(split.images[rows]), split.labels[rows]
        certified = torch.from_numpy(certificates.radius[rows]).to(images.device)
        result = attack_radius(
            model, images, labels,
            max_radius=certificates.max_radius, certified=certified, domain=certificates.domain,
            steps=steps, restarts=restarts, seed=seed + start, batch_size=batch_size,
            progress=None if progress is None else _shifted(progress, start),
        )  # fmt: skip
        inside = _inside(result, certified)
        if certificates.arithmetic == "float32":
            genuine = torch.ones_like(inside.sample, dtype=torch.bool)
        else:
            genuine = _genuine(model, inside.points, labels[inside.sample])
        bugs = _largest_margin(Found(*(column[genuine] for column in inside)))
        # A sample with a genuine attack is not counted again for another point of it.
        others = inside.sample[~torch.isin(inside.sample, bugs.sample)]
        rounding_only += len(set(others.tolist()))
        violations += [
            Violation(
                index=start + position, radius=float(certified[position]), distance=apart,
                margin=value,
            )
            for position, value, apart in zip(
                *(column.tolist() for column in (bugs.sample, bugs.margin, bugs.distance)),
                strict=True,
            )
        ]  # fmt: skip
        columns.append(result.radius.cpu().numpy())
        stored.append(_rows(result, bugs, start))
    radius = rounded_up(np.concatenate(columns))
    # Who is right is decided in float64, as by certification.
    radius = np.where(certificates.correct, radius, np.float32(0))
    return AttackCheck(
        certificates=replace(certificates, attack_radius=radius, violations=len(violations)),
        violations=tuple(violations),
        rounding_only=rounding_only,
        attacks=_first(stored),
    )


def _shifted(progress: Callable[[int], None], start: int) -> Callable[[int], None]:
    return lambda done: progress(start + done)


def _inside(result: AttackResult, certified: Tensor) -> Found:
    """Every success at a distance of at most the certified radius, which is above 0.

    Of a sample there may be two: the closest one may owe its success to rounding where the one
    at the certified radius does not.
    """
    index = ((result.radius <= certified) & (certified > 0)).nonzero().squeeze(1)
    closest = Found(index, result.points[index], result.margin[index], result.radius[index])
    return Found(*(torch.cat(pair) for pair in zip(result.at_certified, closest, strict=True)))


@torch.no_grad()
def _genuine(model: nn.Module, points: Tensor, labels: Tensor) -> Tensor:
    """Whether the margin at each point is proven not negative in exact arithmetic.

    Also true where float32 logits lie outside the bounds of the very point: then a bound is
    wrong, and nothing that it says of the margin counts.
    """
    parts = [labels[:0].bool()]
    buffers = copied_buffers(model)
    with evaluation_mode(model), ieee_arithmetic(points.device):
        for start in range(0, len(points), _EVALUATED):
            chunk, own = points[start : start + _EVALUATED], labels[start : start + _EVALUATED]
            exact = chunk.double()
            zero = exact.new_zeros(len(exact))
            lower, upper = propagate(model, box(exact, zero, None, rounding=REAL)).ends()
            # The margin from below: the label's logit at most, all others at least. Its sign is
            # right, because a rounded difference never has the wrong one.
            proven = margin(torch.where(_is_label(own, lower), upper, lower), own) >= 0
            least, most = propagate(model, box(exact, zero, None, rounding=FLOAT32)).ends()
            logits = called_with(model, buffers, chunk)
            parts.append(proven | ((logits < least) | (logits > most)).any(1))
    return torch.cat(parts)


def _is_label(labels: Tensor, logits: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(labels, logits.shape[1]).bool()


def _largest_margin(found: Found) -> Found:
    """One point a sample, in order of samples: the clearest evidence."""
    index = found.sample.tolist()
    # The largest comes last, and stays.
    kept = {index[row]: row for row in found.margin.argsort().tolist()}
    rows = [kept[position] for position in sorted(kept)]
    return Found(*(column[rows] for column in found))


def _rows(result: AttackResult, bugs: Found, start: int) -> dict[str, npt.NDArray[Any]]:
    """Attack points of one block, with positions in the split."""
    violation = torch.zeros_like(result.radius, dtype=torch.bool)
    violation[bugs.sample] = True
    points, value, radius = result.points.clone(), result.margin.clone(), result.radius.clone()
    points[bugs.sample], value[bugs.sample] = bugs.points, bugs.margin
    radius[bugs.sample] = bugs.distance
    # Where the image itself is misclassified there is nothing to keep.
    broken = violation | (radius.isfinite() & (radius > 0))
    index = broken.nonzero().squeeze(1)
    clear, plain = index[violation[index]][:_STORED], index[~violation[index]][:_STORED]
    index = torch.cat((clear, plain))
    return {
        "index": start + index.cpu().numpy(),
        "images": points[index].cpu().numpy(),
        "radius": rounded_up(radius[index].cpu().numpy()),
        "margin": value[index].cpu().numpy(),
        "violation": violation[index].cpu().numpy(),
    }


def _first(blocks: list[dict[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    """At most 100 rows of all blocks: violations first, each kind by position."""
    columns = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    order = np.lexsort((columns["index"], ~columns["violation"]))[:_STORED]
    return {name: column[order] for name, column in columns.items()}
