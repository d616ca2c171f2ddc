"""CROWN: linear bounds walked back from the output, with IBP's intervals at every ReLU.

A bound pass that records (`BoundPass(record=True)`) leaves an output that knows the calls it
came from; `backward.py` has the rule for each of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from acert.bounds.backward import BACKWARD, backward
from acert.bounds.interval import Interval, refuse
from acert.bounds.linear_bound import LinearBound, Step
from acert.bounds.rounding import OWN_UNIT
from acert.errors import InvalidInput

__all__ = ["crown_differences"]


def crown_differences(output: Interval, labels: Tensor) -> Tensor:
    """Upper bounds of z_i - z_y over the box by CROWN, (batch, classes); 0 at the label.

    `output` comes out of a pass with `BoundPass(record=True)`. Not always tighter than
    interval bounds: take the smaller of both. Rounding-safe if the pass is. Differentiable,
    and free of host syncs.

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
    classes = output.shape[1]
    own = F.one_hot(labels.long(), classes)
    rows = torch.eye(classes, dtype=output.dtype, device=output.device) - own.unsqueeze(1)
    bound = LinearBound(output, rows.to(output.dtype))
    while True:
        interval, A = bound.latest()
        bound.refuse_infinite(interval)
        source = interval.source
        if source is None:
            return bound.upper(interval, A).masked_fill(own.bool(), 0.0)
        rule = BACKWARD.get(source.rule)
        if rule is None:
            refuse(source.function, 'CROWN has no backward rule for it; `bounds="ibp"` has')
        if source.changed:
            refuse(source.function, "one of its constants was overwritten after the bound pass")
        rule(Step(bound, source, A), *source.arguments, **source.keywords)


@backward(F.relu)
def _relu(step: Step, input: Interval) -> None:
    """The one relaxation: a line above the ReLU where A > 0, a line below it where A < 0."""
    lower, upper = input.ends()
    crossing = (lower < 0) & (upper > 0)
    # The chord from (lower, 0) to (upper, upper), else the function itself.
    width = torch.where(crossing, upper - lower, 1.0)
    slope = torch.where(crossing, upper / width, (lower >= 0).to(lower.dtype))
    lift = torch.where(crossing, -slope * lower, 0.0)
    if step.rounding is not None:  # the rounded slope would cut one of the ends off
        raised = torch.maximum(lift, upper - slope * upper) + 4 * OWN_UNIT * (upper - lower)
        lift = torch.where(crossing, raised, 0.0)
    lower_slope = (upper > -lower).to(lower.dtype)
    # Not two clamps: both would hand a gradient on to a coefficient of 0, as a zero head has it.
    above, below = step.A.clamp(min=0), torch.where(step.A < 0, step.A, 0.0)
    step.bound.send(input, above * slope.unsqueeze(1) + below * lower_slope.unsqueeze(1))
    step.bound.shift(above, lift)
    step.bound.allow(step.A, lambda: input.magnitude, own=2)
