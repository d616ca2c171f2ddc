"""CROWN: linear bounds walked back from the output, with the pass's intervals at every activation.

A bound pass that records (`BoundPass(record=True)`) leaves an output that knows the calls it
came from; `backward/` has the rule for each of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acert.bounds.backward import BACKWARD
from acert.bounds.interval import Interval, refuse
from acert.bounds.linear_bound import LinearBound, Step
from acert.errors import InvalidInput

__all__ = ["crown_differences", "walked_back"]


def crown_differences(output: Interval, labels: Tensor) -> Tensor:
    """Upper bounds of z_i - z_y over the box by CROWN, (batch, classes); 0 at the label.

    `output` comes out of a pass with `BoundPass(record=True)`. Not always tighter than
    interval bounds: take the smaller of both. Rounding-safe if the pass is. Differentiable,
    and free of host syncs.

    >>> from torch.nn import functional as F
    >>> from acert.bounds.interval import BoundPass
    >>> x = torch.tensor([[0.0, 0.0]])
    >>> box = Interval(x - 1, x + 1).within(BoundPass(record=True))
    >>> h = F.linear(box, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    >>> z = F.linear(h, torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([3.0, 0.0]))
    >>> crown_differences(z, torch.tensor([0]))  # z_1 - z_0 = -2 x_0 - 3
    tensor([[ 0., -1.]])
    """
    if not output.bound_pass.record:
        raise InvalidInput(
            "`output` must come out of a pass with BoundPass(record=True); got record=False"
        )
    classes, labels = output.shape[1], labels.long().unsqueeze(1)
    # The classes behind the label, round to the one before it; of one class alone, itself.
    others = (labels + torch.arange(1, max(classes, 2), device=labels.device)) % classes
    unit = torch.eye(classes, dtype=output.dtype, device=output.device)
    # In place: of many classes the rows are the largest tensor of the walk.
    upper = walked_back(LinearBound(output, unit[others].sub_(unit[labels])))
    return upper.new_zeros(output.shape).scatter(1, others, upper).scatter(1, labels, 0.0)


def walked_back(bound: LinearBound) -> Tensor:
    """The largest value of each row over the box, walked back to it, (batch, rows)."""
    while True:
        interval, A = bound.latest()
        bound.refuse_infinite(interval)
        source = interval.source
        if source is None:
            return bound.upper(interval, A)
        rule = BACKWARD.get(source.rule)
        if rule is None:
            refuse(source.function, 'CROWN has no backward rule for it; `bounds="ibp"` has')
        if source.changed:
            refuse(source.function, "one of its constants was overwritten after the bound pass")
        rule(Step(bound, source, A), *source.arguments, **source.keywords)
