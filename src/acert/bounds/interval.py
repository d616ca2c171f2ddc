"""The interval: a box of tensors that an unmodified model takes in place of its input.

`Interval` answers to every PyTorch operation through `__torch_function__`, by looking the
operation up in the rule table. So nothing is traced or rewritten: control flow, nested and
reused modules work as they are, and nothing is stored on layers.

A box is held as ends (lower, upper) or as a ball (center, radius), whichever the last rule
produced; the other form is computed when a rule asks for it.

Longer than other modules, because PyTorch and its models ask one object for all of this: numbers,
shape, operators and rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from acert.bounds.bound_pass import BatchStatistics, BoundPass, Source, versions
from acert.bounds.masks import NO_MASKS, Mask, masks_in
from acert.bounds.pending import Chain, Convolution, Pending, Scaled, Stored
from acert.bounds.refusals import NO_RULE, Uncertain, operation_name, refuse
from acert.bounds.rounding import OWN_UNIT, Rounding
from acert.bounds.table import MASKED, RULES, Entry, Function
from acert.errors import InvalidInput, UnsupportedOperation

__all__ = ["Affine", "BatchStatistics", "BoundPass", "Interval", "Source"]


class Affine(NamedTuple):
    """How an interval came out of a linear layer: what elision needs to fuse it with margins."""

    input: Interval
    weight: Tensor
    bias: Tensor | None
    underflow: Tensor | None
    # Whether autocast computed it in a lower precision than its input's.
    lowered: bool = False
    # How often weight and bias had been written to when the model called it.
    versions: tuple[int, ...] = ()

    def check(self) -> None:
        """Refuses a layer whose parameters were overwritten since it was called.

        Not through `.data`, which PyTorch does not count: its gradients are wrong then, too. A
        proof holds copies, but a copy of every layer nearly doubles the time of one image of CNN7.
        """
        if [*self.versions] != versions((self.weight, self.bias)):
            raise UnsupportedOperation(
                "the weight or bias of the last linear layer was overwritten in place after the "
                "model called it: call it with a copy (`weight.clone()`), or pass `elide=False`"
            )


class Part(NamedTuple):
    """Where an interval was cut out of a larger one: its first element on each of the last axes."""

    whole: Interval
    start: tuple[int, ...]


class Interval:
    """All x with lower <= x <= upper, element by element. Frozen: rules return new ones.

    >>> box = Interval(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 4.0]))
    >>> box.center, box.radius
    (tensor([0.5000, 3.0000]), tensor([0.5000, 1.0000]))
    """

    __slots__ = (
        "_affine",
        "_center",
        "_lower",
        "_memory",
        "_operation",
        "_part",
        "_pass",
        "_pending",
        "_radius",
        "_source",
        "_upper",
        "_version",
    )
    _lower: Tensor | None
    _upper: Tensor | None
    _center: Tensor | None
    _radius: Tensor | None
    _affine: Affine | None
    _pending: Pending | None
    _operation: Function | None
    _part: Part | None
    _pass: BoundPass
    _memory: list[int]
    _version: int
    _source: Source | None

    def __init__(self, lower: Tensor, upper: Tensor) -> None:
        for name, end in (("lower", lower), ("upper", upper)):
            if not isinstance(end, Tensor):
                raise InvalidInput(f"`{name}` must be a tensor; got {type(end).__name__}")
        if lower.shape != upper.shape or lower.dtype != upper.dtype:
            raise InvalidInput(
                "`lower` and `upper` must have one shape and dtype; got "
                f"{tuple(lower.shape)} {lower.dtype} and {tuple(upper.shape)} {upper.dtype}"
            )
        self._fill(lower=lower, upper=upper)

    @classmethod
    def ball(cls, center: Tensor, radius: Tensor) -> Interval:
        """The box around `center` that reaches `radius` >= 0 to either side."""
        interval = cls.__new__(cls)
        interval._fill(center=center, radius=radius)
        return interval

    @classmethod
    def of(cls, pending: Pending) -> Interval:
        """A ball that is computed once it is asked for."""
        interval = cls.__new__(cls)
        interval._fill(pending=pending)
        return interval

    def _fill(
        self,
        *,
        lower: Tensor | None = None,
        upper: Tensor | None = None,
        center: Tensor | None = None,
        radius: Tensor | None = None,
        affine: Affine | None = None,
        pending: Pending | None = None,
        source: Source | None = None,
        bound_pass: BoundPass | None = None,
    ) -> None:
        # One by one: a step makes dozens of intervals, and a loop over names takes twice as long.
        object.__setattr__(self, "_lower", lower)
        object.__setattr__(self, "_upper", upper)
        object.__setattr__(self, "_center", center)
        object.__setattr__(self, "_radius", radius)
        object.__setattr__(self, "_pass", bound_pass or BoundPass())
        object.__setattr__(self, "_affine", affine)
        object.__setattr__(self, "_pending", pending)
        object.__setattr__(self, "_operation", None)
        object.__setattr__(self, "_source", source)
        object.__setattr__(self, "_part", None)
        object.__setattr__(self, "_memory", [0])
        object.__setattr__(self, "_version", 0)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"an Interval is frozen; `{name}` cannot be set")

    def within(self, bound_pass: BoundPass) -> Interval:
        """This box as part of a pass: same numbers, that pass's rounding and statistics."""
        object.__setattr__(self, "_pass", bound_pass)
        return self

    # -- the two forms ------------------------------------------------------------------

    def ends(self) -> tuple[Tensor, Tensor]:
        """(lower, upper), rounded outward if the pass is rounding-safe."""
        if self._lower is None or self._upper is None:
            with _graded(*self.as_ball()):
                lower, upper = self._ball_ends()
            object.__setattr__(self, "_lower", lower)
            object.__setattr__(self, "_upper", upper)
        assert self._lower is not None and self._upper is not None
        return self._lower, self._upper

    def own_ends(self) -> tuple[Tensor, Tensor]:
        """(lower, upper) in new memory, which a rule may overwrite."""
        if self._lower is None or self._upper is None:
            return self._ball_ends()
        return self._lower.clone(), self._upper.clone()

    def _ball_ends(self) -> tuple[Tensor, Tensor]:
        center, radius = self.as_ball()
        lower, upper = center - radius, center + radius
        if self.rounding is not None:
            slack = center.abs().add_(radius).mul_(4 * OWN_UNIT)
            lower, upper = lower.sub_(slack), upper.add_(slack)
        return lower, upper

    def as_ball(self) -> tuple[Tensor, Tensor]:
        """(center, radius), rounded outward if the pass is rounding-safe."""
        if self._pending is not None:
            center, radius = self._pending.ball()
            object.__setattr__(self, "_center", center)
            object.__setattr__(self, "_radius", radius)
            object.__setattr__(self, "_pending", None)
        if self._center is None or self._radius is None:
            lower, upper = self._lower, self._upper
            assert lower is not None and upper is not None
            with _graded(lower, upper):
                # In place: on a CPU new memory costs more than the arithmetic.
                center = (lower + upper).div_(2)
                if self.rounding is None:
                    radius = (upper - lower).div_(2)
                else:
                    reach = torch.maximum(upper - center, center - lower)
                    radius = (reach * (1 + 4 * OWN_UNIT)).add_(torch.finfo(reach.dtype).tiny)
            object.__setattr__(self, "_center", center)
            object.__setattr__(self, "_radius", radius)
        assert self._center is not None and self._radius is not None
        return self._center, self._radius

    def operands(self) -> tuple[Tensor, Tensor]:
        """(center, radius) as a product takes them: in half precision if they are kept so."""
        stored = self.stored
        return self.as_ball() if stored is None or stored.bias is not None else stored[:2]

    def map(self, function: Callable[[Tensor], Tensor]) -> Interval:
        """The box with its elements rearranged by `function`, which must not compute."""
        stored = None if self.stored is None else self.stored.map(function)
        if stored is not None:
            return Interval.of(stored)
        if self.is_ball:
            center, radius = self.as_ball()
            return Interval.ball(function(center), function(radius))
        lower, upper = self.ends()
        return Interval(function(lower), function(upper))

    def between(self, lower: Tensor, upper: Tensor) -> Interval:
        """The same numbers of the network, known to lie between other ends."""
        interval = Interval.__new__(Interval)
        interval._fill(lower=lower, upper=upper, bound_pass=self._pass, source=self._source)
        return interval

    def cut(self, start: tuple[int, ...], stop: tuple[int, ...]) -> Interval:
        """The elements from `start` to `stop` on the last axes; itself if those are all."""
        if not any(start) and stop == self.shape[self.ndim - len(stop) :]:
            return self
        if self._pending is not None:
            self.as_ball()
        forms = (self._lower, self._upper, self._center, self._radius)
        # Both forms where both are known: one made of the other would be wider by its rounding.
        lower, upper, center, radius = (x if x is None else cut(x, start, stop) for x in forms)
        interval = Interval.__new__(Interval)
        interval._fill(
            lower=lower, upper=upper, center=center, radius=radius,
            bound_pass=self._pass, source=self._source,
        )  # fmt: skip
        object.__setattr__(interval, "_part", Part(self, start))
        return interval

    @property
    def part(self) -> Part | None:
        """Where it was cut out of a larger one; None for a whole one."""
        return self._part

    @property
    def lower(self) -> Tensor:
        """Lower ends."""
        return self.ends()[0]

    @property
    def upper(self) -> Tensor:
        """Upper ends."""
        return self.ends()[1]

    @property
    def center(self) -> Tensor:
        """Midpoints."""
        return self.as_ball()[0]

    @property
    def radius(self) -> Tensor:
        """Half widths."""
        return self.as_ball()[1]

    @property
    def rounding(self) -> Rounding | None:
        """The rounding this box is safe against; None for plain arithmetic."""
        return self._pass.rounding

    @property
    def magnitude(self) -> Tensor:
        """Largest |x| of each element."""
        if self.is_ball:
            return self.center.abs() + self.radius
        lower, upper = self.ends()
        return torch.maximum(-lower, upper)

    @property
    def bound_pass(self) -> BoundPass:
        """What the intervals of this pass share."""
        return self._pass

    @property
    def is_ball(self) -> bool:
        """Whether the box has the form (center, radius), or will have once computed."""
        return self._center is not None or self._pending is not None

    @property
    def convolution(self) -> Convolution | None:
        """The convolution this box will come out of."""
        return self._pending if isinstance(self._pending, Convolution) else None

    @property
    def chain(self) -> Chain | None:
        """The chain of sums and products this box will come out of."""
        return self._pending if isinstance(self._pending, Chain) else None

    @property
    def affine(self) -> Affine | None:
        """The linear layer this box came out of, if that was the last operation."""
        return self._affine

    @property
    def stored(self) -> Stored | None:
        """The ball as a product left it, or as the next one takes it."""
        return self._pending if isinstance(self._pending, Stored) else None

    @property
    def scaled(self) -> Scaled | None:
        """The stored ball that this one is behind a batch norm."""
        return self._pending if isinstance(self._pending, Scaled) else None

    @property
    def source(self) -> Source | None:
        """The call this box came out of; None for a pass's input, and where none is recorded."""
        return self._source

    @property
    def overwritten(self) -> bool:
        """Whether its memory was overwritten through another view, so that it is out of date."""
        return self._version != self._memory[0]

    @property
    def operation(self) -> str:
        """Name of the operation this box came out of."""
        return "its input" if self._operation is None else operation_name(self._operation)

    # -- what models ask of a tensor ----------------------------------------------------

    @property
    def _any(self) -> Tensor:
        if isinstance(self._pending, (Chain, Stored, Scaled)):
            return self._pending.like()
        tensor = self.as_ball()[0] if self.is_ball else self._lower
        assert tensor is not None
        return tensor

    @property
    def _expanded(self) -> bool:
        """Whether several elements are one number in memory."""
        if self._pending is not None:
            return False
        reach, tensor = 0, self._any
        for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size > 1 and step <= reach:
                return True
            reach += step * (size - 1)
        return False

    @property
    def shape(self) -> torch.Size:
        """Shape of either end."""
        return self._any.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of either end."""
        if self.stored is not None:
            return self.stored.dtype
        if self.scaled is not None:
            return self.scaled.stored.dtype
        return self._any.dtype

    @property
    def device(self) -> torch.device:
        """Device of either end."""
        return self._any.device

    @property
    def ndim(self) -> int:
        """Number of axes."""
        # Batch norm asks for it, and is not to have the convolution computed.
        return self._any.ndim if self.convolution is None else self.convolution.center.ndim

    @property
    def is_nested(self) -> bool:
        """Whether samples differ in shape: never. Attention asks for it."""
        return False

    def dim(self) -> int:
        """Number of axes."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """Shape, or the length of one axis."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Number of elements."""
        return self._any.numel()

    def __len__(self) -> int:
        if not self.ndim:  # `torch.tensor(x)` takes x apart until it comes here
            refuse("len() of a number, or torch.tensor() of one")
        return self.shape[0]

    def __iter__(self) -> Iterator[Interval]:
        return iter(self.unbind(0))

    def __repr__(self) -> str:
        return f"Interval(lower={self.lower}, upper={self.upper})"

    # -- every operation goes through the table -----------------------------------------

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        for numpy, name in (("axis", "dim"), ("keepdims", "keepdim")):  # PyTorch takes both names
            if numpy in kwargs:
                kwargs[name] = kwargs.pop(numpy)
        # What torch.compile makes of `interval - tensor` and `interval / tensor`; and it does not
        # find the wrapped function of `tensor ** interval` in the table.
        if func is torch.Tensor.__rsub__:
            func = torch.rsub
        elif func is torch.Tensor.__rtruediv__:
            func, args = torch.div, args[::-1]
        elif func is torch.Tensor.__pow__:
            func = torch.pow
        elif func is torch.Tensor.matmul and isinstance(args[0], Tensor):
            _refuse_if_swapped()
        masked = any(True for _ in masks_in((*args, *kwargs.values())))
        entry = (MASKED if masked else RULES).get(func)
        if entry is None:
            refuse(func, NO_MASKS if masked else NO_RULE)
        if kwargs.pop("out", None) is not None:
            refuse(func, "`out` must be None")
        inputs = list(intervals_in(args))
        inputs.extend(intervals_in(tuple(kwargs.values())))
        for interval in inputs:
            if interval.overwritten:
                refuse(func, "one of its inputs was overwritten in place through another view")
        if _ends_gradient(inputs, args):
            refuse(
                func,
                "it is called in the forward of a torch.autograd.Function (or of a reentrant "
                "checkpoint), where gradients of bounds end: write it without one, or ask for "
                "bounds under torch.no_grad()",
            )
        proven = len(inputs) > 0 and inputs[0].rounding is not None
        if proven and torch.is_autocast_enabled(inputs[0].device.type):
            refuse(
                "torch.autocast",
                "the model turns it on in its own forward; a certificate does not hold for half "
                "precision, so leave it out",
            )
        first = args[0] if args else kwargs.get("input")
        if not entry.mixed and not (len(inputs) == 1 and inputs[0] is first):
            refuse(func, "only its first argument may depend on the model's input")
        overwrite = kwargs.pop("inplace", False) or entry.inplace
        at = entry.inplace_at
        if at is not None and len(args) > at:
            overwrite, args = args[at], (*args[:at], *args[at + 1 :])
        narrow = inputs[0].bound_pass.narrow
        if narrow is not None and len(inputs) == 1 and inputs[0] is first:
            inputs = [narrow(first, entry.rule)]
            args, kwargs = (inputs[0], *args[1:]), {k: v for k, v in kwargs.items() if k != "input"}
        # Asked for before ReLU takes the memory of a convolution that nobody has seen.
        room = None
        if overwrite and isinstance(first, Interval):
            room = first.shape
            if first._expanded:
                refuse(func, "it overwrites an expanded tensor, whose elements share memory")
        result = entry.rule(*args, **kwargs)
        if entry.ulps and any(result is interval for interval in inputs):
            result = copied(result)  # bounds as they were, but still to be widened
        outputs = result if isinstance(result, tuple) else (result,)
        for part, output in enumerate(outputs):
            if isinstance(output, Uncertain) or (part and output is None):
                continue  # indices and masks; weights of attention that nobody asked for
            if not isinstance(output, Interval):
                refuse(func, f"its rule returned {type(output).__name__}, not an Interval")
            output._finish(func, entry, inputs, args, kwargs, part=part)
        if overwrite and result is not first:
            if not isinstance(first, Interval) or room != result.shape:
                refuse(func, "it overwrites a tensor that cannot hold the result")
            return first._overwrite(result)
        return result

    def _finish(
        self,
        func: Function,
        entry: Entry,
        inputs: list[Interval],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        part: int,
    ) -> None:
        """Files a rule's result into the pass, widened by the rounding the table states."""
        if any(self is interval for interval in inputs):
            return  # the identity
        self.within(inputs[0]._pass)
        object.__setattr__(self, "_operation", func)
        if entry.view:
            object.__setattr__(self, "_memory", inputs[0]._memory)
            object.__setattr__(self, "_version", inputs[0]._version)
        if entry.ulps is not None:
            # A rule that ends in a linear layer bounds each result by it; elision would take the
            # operation for that layer, and would not see the widening.
            object.__setattr__(self, "_affine", None)
        if entry.ulps and self.rounding is not None:
            radius = self.radius
            magnitude = self.magnitude
            if not entry.elementwise:
                magnitude = _of_sample(magnitude, magnitude.ndim).expand_as(magnitude)
            for interval in inputs:
                met = interval.magnitude
                if not entry.elementwise or met.shape != magnitude.shape:
                    met = _of_sample(met, magnitude.ndim)
                magnitude = torch.maximum(magnitude, met)
            object.__setattr__(
                self, "_radius", self.rounding.widen(radius, magnitude, ulps=entry.ulps)
            )
            object.__setattr__(self, "_lower", None)
            object.__setattr__(self, "_upper", None)
        if self._pass.record:
            source = self._pass.noted(
                func, entry, copied(args), copied([*kwargs.items()]), part=part
            )
            object.__setattr__(self, "_source", source)

    def _overwrite(self, result: Interval) -> Interval:
        """Takes over `result` in place; other views of this memory become unusable."""
        for name in (
            "_lower", "_upper", "_center", "_radius", "_affine", "_pending", "_operation",
            "_source",
        ):  # fmt: skip
            object.__setattr__(self, name, getattr(result, name))
        self._memory[0] += 1
        object.__setattr__(self, "_version", self._memory[0])
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(torch.Tensor, name, None)
        if name.startswith("_") or not callable(function):
            raise AttributeError(f"an Interval has no `{name}`")

        def method(*args: Any, **kwargs: Any) -> Any:
            return Interval.__torch_function__(function, (), (self, *args), kwargs)

        return method

    # Lets `array * interval` come to us instead of numpy taking the interval apart.
    __array_ufunc__ = None

    @property
    def mT(self) -> Interval:  # noqa: N802  as PyTorch spells it
        """The last two axes swapped."""
        transposed: Interval = self.transpose(-2, -1)
        return transposed

    def __bool__(self) -> NoReturn:
        refuse("a data-dependent `if`, `while` or `bool()`")

    def __hash__(self) -> int:
        return id(self)


def _operator(name: str, function: Any, *, swapped: bool = False) -> None:
    def method(self: Interval, *others: Any) -> Any:
        args = (*others, self) if swapped else (self, *others)
        return Interval.__torch_function__(function, (), args)

    method.__name__ = name
    setattr(Interval, name, method)


for _name in ("add", "sub", "mul", "truediv", "matmul", "pow", "floordiv", "mod"):
    _function = getattr(
        torch.Tensor, {"truediv": "div", "mod": "remainder"}.get(_name, _name), None
    )
    _function = _function or getattr(torch.Tensor, f"__{_name}__")
    _operator(f"__{_name}__", _function)
    _operator(f"__r{_name}__", _function, swapped=True)
for _name, _function in {
    "iadd": torch.Tensor.add_,
    "isub": torch.Tensor.sub_,
    "imul": torch.Tensor.mul_,
    "itruediv": torch.Tensor.div_,
    "ipow": torch.Tensor.pow_,
    "neg": torch.Tensor.neg,
    "abs": torch.Tensor.abs,
    "getitem": torch.Tensor.__getitem__,
    "setitem": torch.Tensor.__setitem__,
    "lt": torch.Tensor.lt,
    "le": torch.Tensor.le,
    "gt": torch.Tensor.gt,
    "ge": torch.Tensor.ge,
    "eq": torch.Tensor.eq,
    "ne": torch.Tensor.ne,
    "float": torch.Tensor.item,
    "int": torch.Tensor.item,
}.items():
    _operator(f"__{_name}__", _function)


def intervals_in(values: tuple[Any, ...]) -> Iterator[Interval]:
    """The intervals among `values` and inside the masks, lists and tuples there."""
    for value in values:
        if isinstance(value, Interval):
            yield value
        elif isinstance(value, Mask):
            yield value.numbers
        elif isinstance(value, (list, tuple)):
            yield from intervals_in(tuple(value))


def _refuse_if_swapped() -> None:
    """Refuses what torch.compile makes of `interval @ tensor`: the call of `tensor @ interval`."""
    if torch.compiler.is_compiling():
        refuse("`a @ b` with one constant", "torch.compile swaps them: torch.matmul(a, b)")


def _graded(one: Tensor, other: Tensor) -> AbstractContextManager[object]:
    """Gradients on where a box has some: its other form is kept, whoever asked for it first."""
    if torch.is_grad_enabled() or not (one.requires_grad or other.requires_grad):
        return nullcontext()
    return torch.enable_grad()


def _ends_gradient(inputs: list[Interval], args: tuple[Any, ...]) -> bool:
    """Whether a call inside of an autograd function loses a gradient that the pass is to have.

    PyTorch connects what goes in and comes out only if it is a tensor. Only there does it turn off
    derivatives in forward mode as well; `torch.no_grad()` in a model is meant as it stands.
    """
    if torch.compiler.is_compiling() or torch._C._is_fwd_grad_enabled():
        return False
    if torch.is_inference_mode_enabled() or not inputs[0].bound_pass.graded:
        return False
    if any(isinstance(part, Mask) for part in args):  # its numbers have none, its input may
        return True
    # Of what is not computed yet, a weight may have the only gradient.
    balls = (part for interval in inputs for part in interval.as_ball())
    return any(isinstance(part, Tensor) and part.requires_grad for part in (*balls, *args))


def _of_sample(magnitude: Tensor, ndim: int) -> Tensor:
    """The largest magnitude of each sample, to broadcast over `ndim` axes."""
    return magnitude.reshape(len(magnitude), -1).amax(1).reshape(-1, *[1] * (ndim - 1))


def cut(x: Tensor, start: tuple[int, ...], stop: tuple[int, ...]) -> Tensor:
    """The elements from `start` to `stop` on the last axes."""
    for axis, (first, last) in enumerate(zip(start, stop, strict=True), x.ndim - len(start)):
        x = x.narrow(axis, first, last - first)
    return x


def copied(value: Any) -> Any:
    """`value`, with copies that share their tensors in place of the intervals in it."""
    if isinstance(value, (list, tuple)):
        return [copied(part) for part in value]
    if not isinstance(value, Interval):
        return value
    copy = Interval.__new__(Interval)
    copy._fill(
        lower=value._lower, upper=value._upper, center=value._center, radius=value._radius,
        bound_pass=value._pass, source=value._source, pending=value._pending,
    )  # fmt: skip
    return copy


def constant(value: Tensor | float, like: Tensor | Interval) -> Tensor:
    """A constant in the type and on the device of `like`; a number gets there without a sync."""
    if isinstance(value, (int, float)):
        return torch.full((), value, dtype=like.dtype, device=like.device)
    if isinstance(value, Uncertain):
        value.refuse()
    value = torch.as_tensor(value)  # arrays and numbers of numpy too
    if value.is_complex():
        refuse("a complex constant", "bounds are of real numbers")
    return value.to(like.device, like.dtype)
