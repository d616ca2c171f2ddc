"""What the intervals of one bound pass share, and the record that CROWN walks back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from acert.bounds.rounding import Rounding
from acert.bounds.table import Entry, Function

__all__ = ["BatchStatistics", "BoundPass", "Source"]

_Result = TypeVar("_Result")


class BatchStatistics(NamedTuple):
    """Mean and biased variance of one batch norm call, as its clean pass saw them."""

    mean: Tensor
    variance: Tensor


class Source(NamedTuple):
    """The call an interval came out of, in a pass that records: what CROWN walks back.

    `step` counts the calls of the pass from 1 on, so parents have smaller numbers; it tells
    intervals apart. Intervals among the arguments are copies, which no later in-place
    operation changes. `statistics` are the last ones that a batch norm of the pass took. `part`
    is the place of the interval among the call's results.
    """

    step: int
    function: Function
    rule: Function
    arguments: list[Any]
    keywords: dict[str, Any]
    statistics: BatchStatistics | None
    versions: list[int]
    part: int

    def changed(self) -> bool:
        """Whether a constant was overwritten after the call, so that the record misleads."""
        return self.versions != versions((self.arguments, [*self.keywords.items()]))


class Kept(NamedTuple):
    """What a function made of its arguments, for as long as they are the same."""

    function: Callable[..., Any]
    arguments: list[Any]
    memory: list[Any]
    result: Any


class BoundPass:
    """What all intervals of one pass share: the rounding and the batch statistics to replay.

    With `record`, every interval also remembers the call it came out of: see `Source`. With
    `observe`, the pass keeps what regularisers look at: the input of the first affine layer and
    the inputs of all ReLUs, in call order. With `fold`, as in a training step at full precision,
    a batch norm right behind a convolution scales its weights instead of its result, and ReLU goes
    over memory fewer times. That rounds the weights anew, which matters where products are rounded
    to fewer bits than float32 has, and gives first derivatives only. With `fuse`, as in a training
    step on CUDA, batch norm and ReLU behind a product are one operator (`acert.bounds.fused`), and
    what enters the next product is kept in its format. Passes without gradient that
    have `kept` in common compute what they make of their weights once. In a pass of `points`, boxes
    of one point each, nobody asks for a radius, and none goes through weights. `narrow` gets each
    interval on its way into an operation, with that operation's rule, and returns it or a narrower
    one of the same numbers: CROWN's bounds of activations.
    """

    def __init__(
        self,
        rounding: Rounding | None = None,
        statistics: tuple[BatchStatistics, ...] | None = None,
        *,
        record: bool = False,
        observe: bool = False,
        fold: bool = False,
        fuse: bool = False,
        kept: dict[int, Kept] | None = None,
        points: bool = False,
        narrow: Callable[[Any, Function], Any] | None = None,
    ) -> None:
        self.rounding = rounding
        self.statistics = statistics
        self.used_statistics = 0
        self.record = record
        self.recorded = 0
        self.observe = observe
        self.fold = fold
        self.fuse = fuse
        self.kept = kept
        self.made = 0
        self.points = points
        self.narrow = narrow
        # Whether whoever asked for the pass may want gradients of it.
        self.graded = torch.is_grad_enabled()
        self.first_input: Any = None
        self.relu_inputs: list[Any] = []

    def once(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """`function(*arguments)`, or what an earlier pass made of the same at the same place.

        Numbers are compared, except in plain passes that `fold`: those of a training step, of
        validation and of guesses. There tensors are the same as long as they have their memory and
        PyTorch counts no write to it; of writes through `.data` it counts none.
        """
        if self.kept is None or torch.is_grad_enabled():
            return function(*arguments)
        self.made += 1
        by_numbers = self.rounding is not None or not self.fold
        memory = _memory(arguments)

        def fits(kept: Kept) -> bool:
            if kept.function is not function:
                return False
            if by_numbers:
                return all(map(_equal, kept.arguments, arguments))
            return kept.memory == memory

        kept = self.kept.get(self.made)
        if kept is None or not fits(kept):
            # A layer that is called several times has its weights kept once.
            alike = (each for each in self.kept.values() if each.memory == memory and fits(each))
            kept = next(alike, None) if by_numbers else None
        if kept is None:
            held = _own(arguments) if by_numbers else _held(arguments)
            kept = Kept(function, held, memory, function(*arguments))
        self.kept[self.made] = kept
        found: _Result = kept.result
        return found

    def next_statistics(self) -> BatchStatistics | None:
        """The statistics of the next batch norm call, in call order; None if there are none."""
        if self.statistics is None or self.used_statistics == len(self.statistics):
            return None
        self.used_statistics += 1
        return self.statistics[self.used_statistics - 1]

    def noted(
        self,
        function: Function,
        entry: Entry,
        arguments: list[Any],
        keywords: list[Any],
        *,
        part: int = 0,
    ) -> Source:
        """The record of one call, which gets the next number."""
        self.recorded += 1
        if self.rounding is not None:
            # Nothing counts writes through `.data`, and a proof must not miss one.
            arguments, keywords = _own(arguments), _own(keywords)
        used = self.statistics[: self.used_statistics] if self.statistics else ()
        return Source(
            step=self.recorded,
            function=function,
            rule=entry.rule,
            arguments=arguments,
            keywords=dict(keywords),
            statistics=used[-1] if used else None,
            versions=versions((arguments, keywords)),
            part=part,
        )


def _memory(arguments: tuple[Any, ...]) -> list[Any]:
    """Where tensors are and how often they were written to; anything else is as it is."""
    places = [
        (id(each), each.data_ptr()) if isinstance(each, Tensor) else each for each in arguments
    ]
    return places + versions(arguments)


def _held(arguments: tuple[Any, ...]) -> list[Any]:
    """The arguments and their memory, so that no others get the identity or address of one."""
    return [*arguments, *(each.detach() for each in arguments if isinstance(each, Tensor))]


def _equal(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return bool(one == other)
    alike = one.dtype == other.dtype and one.device == other.device
    return alike and torch.equal(one, other)


def _own(value: Any) -> Any:
    """`value` with copies in place of the tensors in it."""
    if isinstance(value, (list, tuple)):
        return [_own(part) for part in value]
    return value.clone() if isinstance(value, Tensor) else value


def versions(values: Any) -> list[int]:
    """How often each tensor among `values` was written to in place, where PyTorch counts that."""
    if isinstance(values, (list, tuple)):
        return [version for value in values for version in versions(value)]
    counted = isinstance(values, Tensor) and not torch.compiler.is_compiling()
    return [values._version] if counted and not values.is_inference() else []
