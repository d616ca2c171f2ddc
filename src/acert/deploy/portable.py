"""A float64 bound pass in the operations that runtimes of exported graphs have.

onnxruntime's CPU provider has float64 matrix products but no float64 convolution, and its maximum
loses NaN. PyTorch's exporter writes numbers with float32's digits, and optimisers of ONNX graphs
drop what looks like nothing to float32: `x + 1e-308` and `x * (1 + 2**-51)`, the very terms that
pay for rounding. While a classifier is exported, each such operation of a bound pass is replaced by
one that encloses the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from acert.bounds.rules.affine import padded, sizes_of

__all__ = ["PortableArithmetic"]

# Optimisers compare with 0 and 1 to these tolerances or better; what is nearer is hidden from them.
_NEAR_ZERO, _NEAR_ONE = 1e-6, 1e-4
_POWERS = 126  # 2 to the power of +-126 is a normal float32 number
_WITH_NUMBERS = frozenset(
    getattr(place, name)
    for place, names in (
        (torch, ("add", "sub", "mul", "div", "true_divide", "gt", "ge", "lt", "le")),
        (torch.Tensor, (
            "add", "sub", "mul", "div", "true_divide", "add_", "sub_", "mul_", "div_", "__add__",
            "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__",
            "__imul__", "__truediv__", "__rtruediv__", "__itruediv__", "gt", "ge", "lt", "le",
            "__gt__", "__ge__", "__lt__", "__le__",
        )),
    )
    for name in names
)  # fmt: skip


class PortableArithmetic(TorchFunctionMode):
    """Replaces the float64 operations that a runtime lacks or an optimiser would undo.

    `radius` is any tensor of numbers from 0 on that is known only when the graph runs: it gives
    the 1 that no optimiser can see through.
    """

    def __init__(self, radius: Tensor) -> None:
        super().__init__()
        self._one = (radius.sum() >= 0).to(torch.float64)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.full, torch.as_tensor) and _is_finite(args[-1]):
            number = self._computed(args[-1])
            return number.expand(args[0]) if func is torch.full else number
        if not any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in args):
            return func(*args, **kwargs)
        if func is torch.nextafter:
            return self._further(*args)
        if func in _WITH_NUMBERS:
            args = tuple(self._number(value) for value in args)
        return _REPLACED.get(func, func)(*args, **kwargs)

    def _number(self, value: Any) -> Any:
        """A number as the graph must hold it: computed where it would else be changed."""
        if not _is_finite(value) or value in (0.0, 1.0):
            return value
        near = abs(value) < _NEAR_ZERO or abs(value - 1) < _NEAR_ONE
        exact = float(np.float32(value)) == value
        return value if exact and not near else self._computed(value)

    def _computed(self, value: float) -> Tensor:
        """The number from an integer and powers of two, for a graph that knows float32 numbers.

        Exporters write a float with float32's digits, whatever it is added to, and integers with
        all of theirs; and a tensor that was made inside a loop is none that the loop can hold.
        """
        fraction, exponent = math.frexp(value)
        number = self._one * int(fraction * 2**53)
        exponent -= 53
        while exponent:
            power = max(-_POWERS, min(_POWERS, exponent))
            number, exponent = number * 2.0**power, exponent - power
        return number

    def _further(self, input: Tensor, other: Tensor) -> Tensor:
        """At least as far towards the infinity `other` as the next number; ONNX has no such."""
        kind = torch.finfo(input.dtype)
        step = kind.eps * input.abs() + self._computed(kind.tiny)
        return torch.where(other > input, input + step, input - step)


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _infinite_for_nan(input: Tensor) -> Tensor:
    """NaN, which a runtime's maximum may pass over, as infinity, which proves nothing either."""
    return torch.where(input.isnan(), math.inf, input)


def _amax(input: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    dims = dim if dim != () else tuple(range(input.ndim))
    return torch.amax(_infinite_for_nan(input), dims, keepdim)


def _amin(input: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    return -_amax(-input, dim, keepdim)


def _max_pool(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def max_pool(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return function(_infinite_for_nan(input), *args, **kwargs)

    return max_pool


def _leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    return torch.where(input > 0, input, input * negative_slope)


def _elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    return torch.where(input > 0, input, (input.exp() - 1) * alpha)


def _patches(
    input: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """(batch, channels, kernel elements, places) of each place of the kernel, and its places."""
    sizes = list(input.shape[2:])
    counts = [
        (size - step * (width - 1) - 1) // move + 1
        for size, width, move, step in zip(sizes, kernel, stride, dilation, strict=True)
    ]
    index, pitch = torch.zeros(1, 1, dtype=torch.int64, device=input.device), 1
    for axis in reversed(range(len(sizes))):
        offset = torch.arange(kernel[axis], device=input.device) * dilation[axis]
        start = torch.arange(counts[axis], device=input.device) * stride[axis]
        here = pitch * (offset.unsqueeze(1) + start)
        index = (here[:, None, :, None] + index[None, :, None, :]).flatten(2).flatten(0, 1)
        pitch *= sizes[axis]
    gathered = input.flatten(2).index_select(2, index.flatten())
    return gathered.reshape(-1, input.shape[1], *index.shape), counts


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """A convolution over any number of axes as one matrix product."""
    kernel = weight.shape[2:]
    steps = sizes_of(dilation, len(kernel))
    spans = [step * (width - 1) for step, width in zip(steps, kernel, strict=True)]
    input = padded(input, padding, spans)
    patches, counts = _patches(input, kernel, sizes_of(stride, len(kernel)), steps)
    columns = patches.reshape(-1, groups, weight[0].numel(), math.prod(counts))
    output = weight.reshape(groups, -1, weight[0].numel()) @ columns
    output = output.reshape(-1, *weight.shape[:1], math.prod(counts))
    if bias is not None:
        output = output + bias.unsqueeze(1)
    return output.reshape(-1, *weight.shape[:1], *counts)


def _average_pool(function: Callable[..., Tensor], spatial: int) -> Callable[..., Tensor]:
    def average_pool(
        input: Tensor,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        ceil_mode: bool = False,
        *rest: Any,
        **kwargs: Any,
    ) -> Tensor:
        divisor = rest[1] if len(rest) > 1 else kwargs.get("divisor_override")
        if any(sizes_of(padding, spatial)) or ceil_mode or divisor:  # the runtime is asked for it
            return function(input, kernel_size, stride, padding, ceil_mode, *rest, **kwargs)
        kernel = sizes_of(kernel_size, spatial)
        moves = sizes_of(stride, spatial) if stride else kernel
        patches, counts = _patches(input, kernel, moves, [1] * spatial)
        return patches.mean(2).reshape(-1, input.shape[1], *counts)

    return average_pool


_REPLACED: dict[Any, Callable[..., Tensor]] = {
    torch.amax: _amax,
    torch.Tensor.amax: _amax,
    torch.amin: _amin,
    torch.Tensor.amin: _amin,
    F.leaky_relu: _leaky_relu,
    F.elu: _elu,
    torch.conv1d: _convolution,
    torch.conv2d: _convolution,
    torch.conv3d: _convolution,
    F.avg_pool1d: _average_pool(F.avg_pool1d, 1),
    F.avg_pool2d: _average_pool(F.avg_pool2d, 2),
    F.avg_pool3d: _average_pool(F.avg_pool3d, 3),
    **{
        function: _max_pool(function)
        for function in (
            F.max_pool1d, F.max_pool2d, F.max_pool3d,
            torch.max_pool1d, torch.max_pool2d, torch.max_pool3d,
            F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d,
        )
    },
}  # fmt: skip
