"""How many root steps a trained model's radii take: the histogram beside Figure 2."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from acert.arithmetic import ieee_arithmetic
from acert.bounds import propagate
from acert.bounds.margin import box, margin, plain_worst_case, upper_differences
from acert.data import Split, to_float
from acert.evaluation import evaluation_mode
from acert.rootfind import Brent, RootStatus

__all__ = ["RootSteps", "root_steps"]

# The paper's tolerances in training.
_SOLVER = Brent(xtol=1e-6, rtol=1e-4)


@dataclass(frozen=True, kw_only=True)
class RootSteps:
    """Steps of Brent's method to its tolerance, as (steps, samples) in rising order.

    `arrived` counts up to the first point within the tolerance of the root, as the paper seems to;
    `proven` up to where both ends of the bracket are. Samples that need no root are counted
    apart: those that are classified wrongly, and those certified to max_radius.
    """

    samples: int
    misclassified: int
    certified_to_max: int
    arrived: tuple[tuple[int, int], ...]
    proven: tuple[tuple[int, int], ...]
    xtol: float = _SOLVER.xtol
    rtol: float = _SOLVER.rtol

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RootSteps:
        """What `vars` gave, back from JSON."""
        known = {name: value[name] for name in cls.__dataclass_fields__}
        for name in ("arrived", "proven"):
            known[name] = tuple((int(steps), int(count)) for steps, count in known[name])
        return cls(**known)


@torch.no_grad()
def root_steps(
    model: nn.Module,
    split: Split,
    *,
    max_radius: float,
    domain: tuple[float, float] = (0.0, 1.0),
    elide: bool = True,
    samples: int = 10_000,
    batch_size: int = 500,
) -> RootSteps:
    """Steps to xtol 1e-6 and rtol 1e-4 for `samples` images, evenly spaced over the split.

    Float32 interval bounds and running batch statistics: what training does, at its end.
    """
    spaced = np.unique(np.linspace(0, len(split) - 1, samples).astype(np.int64))
    device = next(model.parameters()).device
    chosen = torch.from_numpy(spaced).to(split.images.device)
    worst_case = upper_differences if elide else plain_worst_case
    statuses: Counter[int] = Counter()
    arrived: Counter[int] = Counter()
    proven: Counter[int] = Counter()
    with evaluation_mode(model), ieee_arithmetic(device):
        for start in range(0, len(chosen), batch_size):
            index = chosen[start : start + batch_size]
            images = to_float(split.images[index].to(device))
            labels = split.labels[index].to(device)
            points: list[Tensor] = []

            def margin_at(
                radius: Tensor,
                rows: Tensor,
                images: Tensor = images,
                labels: Tensor = labels,
                points: list[Tensor] = points,
            ) -> Tensor:
                point = torch.full((len(images),), torch.nan, device=images.device)
                point[rows] = radius
                points.append(point)
                output = propagate(model, box(images[rows], radius, domain))
                return margin(worst_case(output, labels[rows]), labels[rows])

            at_zero = margin(model(images.clone()), labels)  # it may work in place
            zero = torch.zeros_like(at_zero)
            top = torch.full_like(zero, max_radius)
            root = _SOLVER.solve(margin_at, zero, top, f_lower=at_zero, indexed=True)
            statuses.update(root.status.tolist())
            inner = root.status == RootStatus.CONVERGED
            proven.update(root.steps[inner].tolist())
            # The first evaluation is that of the upper end, no step. The last step of a sample is
            # an end of its final bracket, and so within the tolerance.
            steps = torch.stack([*points[1:], top])[:, inner]
            close = (steps - root.estimate[inner]).abs() <= _SOLVER.xtol + _SOLVER.rtol * steps
            arrived.update((close.int().argmax(dim=0) + 1).tolist())
    return RootSteps(
        samples=len(chosen),
        misclassified=statuses[RootStatus.POSITIVE_THROUGHOUT],
        certified_to_max=statuses[RootStatus.NEGATIVE_THROUGHOUT],
        arrived=tuple(sorted(arrived.items())),
        proven=tuple(sorted(proven.items())),
    )
