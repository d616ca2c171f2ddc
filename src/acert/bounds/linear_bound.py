"""A linear upper bound on its way back through a network: what CROWN's rules work on.

The bound says target <= sum over intervals of A . x + constant, for every x the network can
meet. A rule replaces the A . x of one operation's result by coefficients of its arguments.
In a rounding-safe pass each replacement pays for its rounding into the constant: docs/crown.md
has the argument.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from acert.bounds.bound_pass import BatchStatistics, Source
from acert.bounds.interval import Interval, Part
from acert.bounds.refusals import refuse
from acert.bounds.rounding import REAL, Rounding, own_gamma

__all__ = ["LinearBound", "Step", "dot", "padded", "scaled"]


def scaled(A: Tensor, x: Tensor) -> Tensor:
    """A x for every row, element by element: (B, rows, ...) and what broadcasts to (B, ...)."""
    x = x.reshape(*[1] * (A.ndim - 1 - x.ndim), *x.shape)
    if not torch.compiler.is_compiling():
        return A * x.unsqueeze(1)
    # Compiled, sums over rows take the order of the product's axes: let it be that of the memory.
    order = _memory_order(A)
    product = A.permute(0, 1, *order) * x.permute(0, *[axis - 1 for axis in order]).unsqueeze(1)
    return product.permute(0, 1, *[2 + order.index(axis) for axis in range(2, A.ndim)])


def dot(A: Tensor, x: Tensor) -> Tensor:
    """A . x for every sample and row: (B, rows, ...) and what broadcasts to (B, ...)."""
    if torch.compiler.is_compiling():  # in one kernel with what else reads A; a product is its own
        return scaled(A, x).permute(0, 1, *_memory_order(A)).flatten(2).sum(2)
    x = x.expand(A.shape[0], *A.shape[2:])
    return (A.reshape(*A.shape[:2], -1) @ x.reshape(len(A), -1, 1)).squeeze(2)


def _memory_order(A: Tensor) -> list[int]:
    """The axes behind the rows, those that are furthest apart in memory first."""
    return sorted(range(2, A.ndim), key=A.stride, reverse=True)


class LinearBound:
    """The coefficients of all intervals not yet replaced, and the constant so far.

    Coefficients have the shape (B, rows, ...) for an interval of shape (B, ...): one bound a
    row. The constant is kept as terms, so that one sum at the end has one rounding error. An
    interval may be cut out of a larger one whose other elements all have coefficient 0. `peak` is
    the largest number of coefficients that a row has had on its way.
    """

    def __init__(self, output: Interval, rows: Tensor) -> None:
        self.rounding = output.rounding
        self._pending: dict[int, tuple[Interval, Tensor]] = {}
        self._terms: list[Tensor] = []
        self._errors: list[Tensor] = []
        self.peak = 0
        self.send(output, rows)

    def latest(self) -> tuple[Interval, Tensor]:
        """The interval computed last among those left, with its coefficients, taken out."""
        return self._pending.pop(max(self._pending))

    def send(self, interval: Interval, A: Tensor) -> None:
        """Adds `A . interval` to the bound."""
        number = 0 if interval.source is None else interval.source.step
        if number not in self._pending:
            self._pending[number] = interval, A
            return
        other, B = self._pending[number]
        if interval.part is not None or other.part is not None:
            both = _around(interval, other)
            A, B = padded(A, interval.part, both), padded(B, other.part, both)
            interval = both
        total = B + A
        self._pending[number] = interval, total
        self.allow(total, lambda: interval.magnitude, own=2)

    def shift(self, A: Tensor, constant: Tensor) -> None:
        """Adds `A . constant` to the bound."""
        self._terms.append(dot(A, constant))

    def allow(
        self,
        A: Tensor,
        magnitude: Callable[[], Tensor],
        *,
        own: int,
        network: int | None = None,
        factor: Tensor | float = 1.0,
        reach: Callable[[], Tensor] | None = None,
    ) -> None:
        """Pays for the rounding of one replacement, in a rounding-safe pass.

        `magnitude` is |W| |x| + |b|, the absolute values of all that one result adds, over the
        box; `reach` the same for its input if that differs. The network adds `network` products
        a result (None: it does not round here), we add `own` products a coefficient. No factor
        exceeds `factor`.
        """
        if self.rounding is None:
            return
        size = magnitude()
        peak = _largest(size)
        entry = peak if reach is None else _largest(reach())
        count = math.prod(A.shape[2:])
        error = (own_gamma(own) + own_gamma(count)) * size
        if network is not None:
            lost = self.rounding.underflow(network, 0.0, (1 + factor) * (1 + entry))
            lost = lost.expand_as(peak).reshape(-1, *[1] * (size.ndim - 1))
            error = error + self.rounding.gamma(network) * size + lost
        inflation = 1 + 2 * (own_gamma(count) + own_gamma(network or 0))
        A = A.abs()
        # What our own products may lose to underflow, each at most tiny times its factors.
        flushed = 8 * count * own * REAL.tiny * (1 + factor) * (1 + entry) * (1 + peak)
        flushed = flushed.unsqueeze(1) * (1 + A.reshape(*A.shape[:2], -1).amax(2))
        self._errors.append(dot(A, error) * inflation + flushed)

    def refuse_infinite(self, interval: Interval) -> None:
        """Gives the bound up where the network may overflow, in a rounding-safe pass."""
        if self.rounding is not None:
            finite = interval.radius.isfinite().reshape(len(interval), -1).all(1, keepdim=True)
            zero = torch.zeros((), dtype=interval.dtype, device=interval.device)
            self._errors.append(torch.where(finite, zero, math.inf))

    def upper(self, box: Interval, A: Tensor) -> Tensor:
        """The bound's largest value over the box, (B, rows): A c + |A| r + constant."""
        center, radius = box.as_ball()
        self.shift(A, center)
        self.shift(A.abs(), radius)
        self.allow(A, lambda: box.magnitude, own=1)
        terms = torch.stack(self._terms)
        value = terms.sum(0)
        if self.rounding is None:
            return value
        error = own_gamma(len(terms)) * terms.abs().sum(0)
        for part in self._errors:
            error = error + part
        value = value + error * (1 + 2 * own_gamma(len(self._errors)))
        # Overflow on our side, in either direction, proves nothing.
        return torch.where(value.isfinite(), value, math.inf)


def padded(A: Tensor, part: Part | None, around: Interval) -> Tensor:
    """The coefficients of a part of an interval as those of a larger part, 0 elsewhere."""
    sides: list[int] = []
    for first, its, length, room in zip(
        _start(part, around), _start(around.part, around), A.shape[3:], around.shape[2:],
        strict=True,
    ):  # fmt: skip
        sides = [first - its, its + room - first - length, *sides]
    return F.pad(A, sides) if any(sides) else A


def _start(part: Part | None, interval: Interval) -> tuple[int, ...]:
    return (0,) * (interval.ndim - 2) if part is None else part.start


def _around(one: Interval, other: Interval) -> Interval:
    """The smallest part that holds both parts of an interval."""
    starts = [_start(each.part, each) for each in (one, other)]
    stops = [
        map(operator.add, start, each.shape[2:])
        for start, each in zip(starts, (one, other), strict=True)
    ]
    whole = one if one.part is None else one.part.whole
    return whole.cut(tuple(map(min, *starts)), tuple(map(max, *stops)))


class Step:
    """One recorded operation on the way back: the coefficients `A` of its result, or of a part."""

    def __init__(
        self, bound: LinearBound, source: Source, A: Tensor, part: Part | None = None
    ) -> None:
        self.bound = bound
        self.source = source
        self.A = A
        self.part = part

    @property
    def rounding(self) -> Rounding | None:
        """The rounding the bound must be safe against."""
        return self.bound.rounding

    @property
    def statistics(self) -> BatchStatistics | None:
        """The batch statistics that the operation took."""
        return self.source.statistics

    def under(
        self, input: Interval, kernel: Sequence[int], stride: Sequence[int],
        padding: Sequence[int], dilation: Sequence[int],
    ) -> tuple[Interval, list[int]]:  # fmt: skip
        """What of its input a convolution takes for this result, and the padding before that."""
        if self.part is None:
            return input, [*padding]
        begin: list[int] = []
        end: list[int] = []
        before: list[int] = []
        for axis, first in enumerate(self.part.start):
            left = first * stride[axis] - padding[axis]
            right = left + (self.A.shape[3 + axis] - 1) * stride[axis]
            right += dilation[axis] * (kernel[axis] - 1) + 1
            begin.append(max(left, 0))
            end.append(min(right, input.shape[2 + axis]))
            before.append(begin[-1] - left)
        if any(map(operator.ge, begin, end)):  # nothing but padding
            self.A, self.part = padded(self.A, self.part, self.part.whole), None
            return input, [*padding]
        return input.cut(tuple(begin), tuple(end)), before

    def cut(self, constant: Tensor) -> Tensor:
        """What of a constant belongs to this part of the result; it may be broadcast."""
        if self.part is not None:
            start = self.part.start
            for axis in range(-min(len(start), constant.ndim), 0):
                if constant.shape[axis] > 1:
                    constant = constant.narrow(axis, start[axis], self.A.shape[axis])
        return constant

    def scale(
        self,
        input: Interval,
        factor: Tensor,
        shift: Tensor | None = None,
        *,
        magnitude: Callable[[], Tensor],
        largest: Tensor | None = None,
    ) -> None:
        """Replaces x * factor + shift, element by element; `magnitude` as in `allow`.

        x may be broadcast. `largest` is the product of all factors a network may multiply x by,
        if there are more.
        """
        repeats = self.spread(input, scaled(self.A, factor))
        if shift is not None:
            self.bound.shift(self.A, shift)
        self.bound.allow(
            self.A, magnitude, own=1 + repeats, network=16, reach=lambda: input.magnitude,
            factor=factor.abs().amax() if largest is None else largest,
        )  # fmt: skip

    def add_constant(self, A: Tensor, value: Tensor) -> None:
        """Replaces A . value; a network rounds the constant to its own precision."""
        self.bound.shift(A, value)
        self.bound.allow(A, lambda: value.abs().expand(len(A), *A.shape[2:]), network=16, own=2)

    def spread(self, input: Interval, A: Tensor) -> int:
        """Replaces A . x, x broadcast to the result; how many coefficients that adds up for one."""
        shape = (A.shape[0], *A.shape[2:])
        if input.ndim != len(shape) or input.shape[0] != shape[0]:
            refuse(self.source.function, "CROWN needs the samples to stay on the first axis")
        repeated = [axis for axis in range(1, input.ndim) if input.shape[axis] == 1 != shape[axis]]
        if repeated:
            A = A.sum([axis + 1 for axis in repeated], keepdim=True)
        self.bound.send(input, A)
        return math.prod([shape[axis] for axis in repeated])


def _largest(size: Tensor) -> Tensor:
    return size.reshape(len(size), -1).amax(1)
