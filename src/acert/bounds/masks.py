"""What comparisons return: masks that know where their answer is certain.

A mask is no number. What a model may do with it is in a table of its own, `MASKED`; everything
else is refused by name, Python's own questions included, whose answers would be wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from acert.bounds.refusals import Uncertain
from acert.bounds.table import Function

__all__ = ["NO_MASKS", "Mask", "masks_in"]

NO_MASKS = "it has no bound rule for a mask that depends on the model's input"


class Mask(Uncertain):
    """The answers of a comparison: surely true, surely false or unknown, element by element.

    `numbers` is an interval: [1, 1], [0, 0] or [0, 1]. A mask does not change, nor do they.
    """

    numbers: Any

    _reason = "its answers depend on the model's input: choose by `torch.where`"

    def __init__(self, function: Function, numbers: Any) -> None:
        super().__init__(function)
        object.__setattr__(self, "numbers", numbers)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        self.refuse()

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        mask = next(masks_in((*args, *(kwargs or {}).values())))
        return mask.numbers.__torch_function__(func, types, args, kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(f"a mask has no `{name}`")
        function = getattr(torch.Tensor, name, None)
        if not callable(function):
            self.refuse()

        def method(*args: Any, **kwargs: Any) -> Any:
            return self.numbers.__torch_function__(function, (), (self, *args), kwargs)

        return method

    @property
    def function(self) -> Function:
        """What was asked: the comparison, or how answers were combined."""
        return self._function

    @property
    def shape(self) -> torch.Size:
        """Shape, as of a tensor."""
        shape: torch.Size = self.numbers.shape
        return shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Type, as of a tensor."""
        return torch.bool

    @property
    def device(self) -> torch.device:
        """Device, as of a tensor."""
        device: torch.device = self.numbers.device
        return device

    def dim(self) -> int:
        """Number of axes."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """Shape, or the length of one axis."""
        return self.shape if dim is None else self.shape[dim]

    # Lets `array * mask` come to us instead of numpy taking the mask for an object.
    __array_ufunc__ = None


def _operator(name: str, function: Function, *, swapped: bool = False) -> None:
    def method(self: Mask, *others: Any) -> Any:
        args = (*others, self) if swapped else (self, *others)
        return self.numbers.__torch_function__(function, (), args)

    method.__name__ = name
    setattr(Mask, name, method)


_operator("__invert__", torch.Tensor.logical_not)
_operator("__getitem__", torch.Tensor.__getitem__)
for _name, _function in {
    "and": torch.Tensor.logical_and,
    "or": torch.Tensor.logical_or,
    "mul": torch.Tensor.mul,
    "add": torch.Tensor.add,
}.items():
    _operator(f"__{_name}__", _function)
    _operator(f"__r{_name}__", _function, swapped=True)


def masks_in(values: tuple[Any, ...]) -> Iterator[Mask]:
    """The masks among `values` and inside the lists and tuples there."""
    for value in values:
        if isinstance(value, Mask):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from masks_in(tuple(value))
