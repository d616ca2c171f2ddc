"""CROWN: linear bounds walked back from the output, with the pass's intervals at every activation.

A bound pass that records (`BoundPass(record=True)`) leaves an output that knows the calls it
came from; `backward/` has the rule for each of them.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from acert.bounds.backward import BACKWARD, LOCAL, REACHING
from acert.bounds.bound_pass import Source
from acert.bounds.interval import Interval, intervals_in
from acert.bounds.linear_bound import LinearBound, Step, padded
from acert.bounds.refusals import refuse
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
        source, part = interval.source, interval.part
        if source is not None and part is not None and not _takes_parts(source, part.whole):
            A, part = padded(A, part, part.whole), None
        bound.peak = max(bound.peak, math.prod(A.shape[2:]))
        if source is None:
            return bound.upper(interval, A)
        rule = BACKWARD.get(source.rule)
        if rule is None:
            refuse(source.function, 'CROWN has no backward rule for it; `bounds="ibp"` has one')
        if source.changed():
            refuse(source.function, "one of its constants was overwritten after the bound pass")
        arguments, keywords = source.arguments, source.keywords
        if part is not None and source.rule in LOCAL:
            stop = tuple(map(operator.add, part.start, A.shape[3:]))
            arguments = _cut(arguments, part.start, stop)
            keywords = {name: _cut(value, part.start, stop) for name, value in keywords.items()}
        rule(Step(bound, source, A, part), *arguments, **keywords)


def _takes_parts(source: Source, result: Interval) -> bool:
    """Whether the way back through a call needs no more than a part of its result."""
    if source.rule in LOCAL:
        inputs = intervals_in((source.arguments, [*source.keywords.values()]))
        return all(interval.shape[2:] == result.shape[2:] for interval in inputs)
    return source.rule in REACHING


def _cut(value: Any, start: tuple[int, ...], stop: tuple[int, ...]) -> Any:
    """The intervals of a call, each cut to the same part."""
    if isinstance(value, list):
        return [_cut(each, start, stop) for each in value]
    return value.cut(start, stop) if isinstance(value, Interval) else value
