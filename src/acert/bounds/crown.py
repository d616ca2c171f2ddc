"""CROWN: linear bounds walked back from the output, with IBP's intervals at every activation.

A bound pass that records (`BoundPass(record=True)`) leaves an output that knows the calls it
came from; `backward/` has the rule for each of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acert.bounds.backward import BACKWARD, RELAXED, SUMS
from acert.bounds.interval import Interval, intervals_in, refuse
from acert.bounds.linear_bound import LinearBound, Step
from acert.bounds.table import Function
from acert.errors import InvalidInput

__all__ = ["crown_differences", "narrowed"]


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
    upper = _upper(LinearBound(output, unit[others].sub_(unit[labels])))
    return upper.new_zeros(output.shape).scatter(1, others, upper).scatter(1, labels, 0.0)


def _upper(bound: LinearBound) -> Tensor:
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


# -- narrower activations ---------------------------------------------------------------

# Coefficients of one walk: more of them leave the cache, fewer have more calls.
_COEFFICIENTS = 2**22


def narrowed(interval: Interval, rule: Function) -> Interval:
    """`interval` cut to CROWN's bounds of its elements, where the operation `rule` relaxes them.

    Both enclose what the network computes, so what they have in common does. Nothing is done
    where intervals are exact, or where the operation is a line.
    """
    relaxed = RELAXED.get(rule)
    if relaxed is None or _is_exact(interval):
        return interval
    lower, upper = (end.flatten(1) for end in interval.ends())
    chosen = relaxed(lower, upper).any(0).nonzero().squeeze(1)
    at_once = max(1, _COEFFICIENTS // (2 * len(lower) * _largest(interval)))
    for start in range(0, len(chosen), at_once):
        some = chosen[start : start + at_once]
        unit = lower.new_zeros(len(some), lower.shape[1]).scatter(1, some.unsqueeze(1), 1.0)
        rows = torch.cat((unit, -unit)).expand(len(lower), -1, -1)
        bound = LinearBound(interval, rows.reshape(*rows.shape[:2], *interval.shape[1:]))
        above, below = _upper(bound).chunk(2, dim=1)
        least, most = lower[:, some], upper[:, some]
        least = torch.where(-below > least, -below, least)  # never a NaN of CROWN's
        most = torch.where(above < most, above, most)
        # Plain bounds may cross by their rounding.
        lower = lower.index_copy(1, some, torch.minimum(least, most))
        upper = upper.index_copy(1, some, torch.maximum(least, most))
    return interval.narrowed(lower.view(interval.shape), upper.view(interval.shape))


def _is_exact(interval: Interval) -> bool:
    """Whether each element depends on the box through one sum alone: intervals lose nothing."""
    sums, source = 0, interval.source
    while source is not None:
        inputs = list(intervals_in((source.arguments, [*source.keywords.values()])))
        sums += source.rule in SUMS
        if source.rule in RELAXED or source.rule not in BACKWARD or len(inputs) != 1 or sums > 1:
            return False
        source = inputs[0].source
    return True


def _largest(interval: Interval) -> int:
    """Elements a sample of the largest interval on the way back to the box."""
    largest, ahead, seen = 1, [interval], {0}
    while ahead:
        interval = ahead.pop()
        largest = max(largest, interval.numel() // len(interval))
        source = interval.source
        if source is not None and source.step not in seen:
            seen.add(source.step)
            ahead.extend(intervals_in((source.arguments, [*source.keywords.values()])))
    return largest
