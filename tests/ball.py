"""Oracle: networks and their interval bounds in 128-bit balls (python-flint), never a float.

A ball holds a midpoint of 128 bits and a proven error, so `margin < 0` is a proof. Parameters and
images are floats and therefore exact; layers work on arrays of balls, and sums of products on
matrices of balls, which is what makes a full-width CNN7 a matter of seconds.

The rules are written down anew from the paper (Eqs. 16-19), not taken from the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, reduce, singledispatch
from typing import Any, NamedTuple

import flint
import numpy as np
import torch
from flint import arb, arb_mat
from torch import Tensor, nn

from acert.models import Normalize, Residual

__all__ = ["Box", "array", "box", "inside", "margins", "outputs"]

Array = np.ndarray[Any, np.dtype[np.object_]]

BITS = 128
# Rows of a weight matrix that are held as balls at a time: a Linear of CNN7 has 25,088 columns.
_ROWS = 64

flint.ctx.prec = BITS


class Box(NamedTuple):
    """The interval center -+ radius, element by element; both are arrays of balls."""

    center: Array
    radius: Array

    @property
    def lower(self) -> Array:
        return np.subtract(self.center, self.radius)

    @property
    def upper(self) -> Array:
        return np.add(self.center, self.radius)

    def map(self, move: Callable[[Array], Array]) -> Box:
        return Box(move(self.center), move(self.radius))


def between(lower: Array, upper: Array) -> Box:
    return Box((lower + upper) / 2, (upper - lower) / 2)


def array(values: Tensor) -> Array:
    """The floats of a tensor as exact balls."""
    return _array([arb(value) for value in values.detach().flatten().tolist()], values.shape)


def box(images: Tensor, radius: Tensor, domain: tuple[float, float] | None = (0.0, 1.0)) -> Box:
    """The exact box around each image, inside the domain."""
    center = array(images)
    reach = array(radius).reshape(-1, *[1] * (images.ndim - 1))
    lower, upper = center - reach, center + reach
    if domain is not None:
        low, high = (arb(end) for end in domain)
        lower, upper = _maximum(lower, low), _minimum(upper, high)
    return between(lower, upper)


def outputs(model: nn.Module, inputs: Tensor) -> Array:
    """The model at each input."""
    center = array(inputs)
    return image(model, Box(center, np.full_like(center, arb(0)))).center


def margins(
    model: nn.Sequential,
    images: Tensor,
    labels: Tensor,
    radius: Tensor,
    *,
    elide: bool = True,
    domain: tuple[float, float] | None = (0.0, 1.0),
) -> list[arb]:
    """The certified margin (Eq. 3) of each sample, elided or plain."""
    start = box(images, radius, domain)
    if not elide:
        output = image(model, start)
        worst = output.upper
        return [
            _largest([worst[row, i] - low for i in range(worst.shape[1]) if i != label])
            for row, label in enumerate(labels.tolist())
            for low in [output.lower[row, label]]
        ]
    last = model[-1]
    assert isinstance(last, nn.Linear)
    inner = image(model[:-1], start)
    weight, bias = array(last.weight), _bias(last)
    found = []
    for row, label in enumerate(labels.tolist()):
        differences = weight - weight[label]
        upper = _product(differences, inner.center[row : row + 1].T)[:, 0]
        upper = upper + _product(np.abs(differences), inner.radius[row : row + 1].T)[:, 0]
        upper = upper + bias - bias[label]
        found.append(_largest([upper[i] for i in range(len(upper)) if i != label]))
    return found


def inside(values: Array, lower: Tensor, upper: Tensor, slack: Tensor) -> bool:
    """Whether every value surely lies between the floats `lower - slack` and `upper + slack`."""
    spare = array(slack)
    above = np.subtract(values, array(lower) - spare).ravel()
    below = np.subtract(array(upper) + spare, values).ravel()
    return all(bool(room >= 0) for room in (*above, *below))


@singledispatch
def image(layer: nn.Module, box: Box) -> Box:
    """Bounds of one layer's output."""
    raise NotImplementedError(f"the oracle has no rule for {type(layer).__name__}")


@image.register
def _(layer: nn.Sequential, box: Box) -> Box:
    return reduce(lambda found, part: image(part, found), layer, box)


@image.register
def _(layer: Residual, box: Box) -> Box:
    skipped, branched = image(layer.shortcut, box), image(layer.branch, box)
    return Box(skipped.center + branched.center, skipped.radius + branched.radius)


@image.register
def _(layer: nn.Identity, box: Box) -> Box:
    return box


@image.register
def _(layer: nn.Flatten, box: Box) -> Box:
    return box.map(lambda values: values.reshape(len(values), -1))


@image.register
def _(layer: Normalize, box: Box) -> Box:
    shape = (-1, *[1] * (box.center.ndim - 2))
    mean, std = array(layer.mean).reshape(shape), array(layer.std).reshape(shape)
    return Box((box.center - mean) / std, box.radius / std)


@image.register(nn.BatchNorm1d)
@image.register(nn.BatchNorm2d)
def _(layer: nn.BatchNorm1d | nn.BatchNorm2d, box: Box) -> Box:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    shape = (-1, *[1] * (box.center.ndim - 2))
    deviation = np.sqrt(array(layer.running_var) + arb(layer.eps))
    scale, shift = 1 / deviation, np.full_like(deviation, arb(0))
    if layer.affine:
        scale, shift = array(layer.weight) / deviation, array(layer.bias)
    scale, shift, mean = (
        values.reshape(shape) for values in (scale, shift, array(layer.running_mean))
    )
    return Box((box.center - mean) * scale + shift, box.radius * np.abs(scale))


@image.register
def _(layer: nn.Linear, box: Box) -> Box:
    weight = layer.weight.detach().double()
    center = _sums(weight, box.center.T).T + _bias(layer)
    return Box(center, _sums(weight.abs(), box.radius.T).T)


@image.register
def _(layer: nn.Conv2d, box: Box) -> Box:
    assert layer.groups == 1
    assert layer.padding_mode == "zeros"
    assert not isinstance(layer.padding, str)
    weight = layer.weight.detach().double().flatten(1)
    images = len(box.center)

    def apply(weight: Tensor, values: Array) -> Array:
        windows = _windows(
            values, layer.kernel_size, layer.stride, layer.padding, layer.dilation, fill=arb(0)
        )
        height, width = windows.shape[2:4]
        columns = windows.transpose(1, 4, 5, 0, 2, 3).reshape(weight.shape[1], -1)
        sums = _sums(weight, columns).reshape(-1, images, height, width)
        return sums.transpose(1, 0, 2, 3)

    shift = _bias(layer).reshape(-1, 1, 1)
    return Box(apply(weight, box.center) + shift, apply(weight.abs(), box.radius))


@image.register
def _(layer: nn.AvgPool2d, box: Box) -> Box:
    assert not layer.ceil_mode
    assert layer.divisor_override is None
    assert layer.padding == 0
    return box.map(lambda values: _pooled(values, layer).mean(-1))


@image.register
def _(layer: nn.AdaptiveAvgPool2d, box: Box) -> Box:
    assert layer.output_size == 1
    return box.map(
        lambda values: (
            values.reshape(*values.shape[:2], -1).mean(-1).reshape(*values.shape[:2], 1, 1)
        )
    )


@image.register
def _(layer: nn.MaxPool2d, box: Box) -> Box:
    assert not layer.ceil_mode
    assert layer.padding == 0
    assert layer.dilation == 1
    ends = (_maximum.reduce(_pooled(end, layer), axis=-1) for end in (box.lower, box.upper))
    return between(*ends)


@image.register
def _(layer: nn.ReLU, box: Box) -> Box:
    return between(_maximum(box.lower, arb(0)), _maximum(box.upper, arb(0)))


@image.register
def _(layer: nn.LeakyReLU, box: Box) -> Box:
    slope = arb(layer.negative_slope)
    return _increasing(box, lambda x: x.max(slope * x))


@image.register
def _(layer: nn.Hardtanh, box: Box) -> Box:
    return _increasing(box, lambda x: x.max(arb(layer.min_val)).min(arb(layer.max_val)))


@image.register
def _(layer: nn.Tanh, box: Box) -> Box:
    return _increasing(box, lambda x: x.tanh())


@image.register
def _(layer: nn.Sigmoid, box: Box) -> Box:
    return _increasing(box, _sigmoid)


@image.register
def _(layer: nn.GELU, box: Box) -> Box:
    assert layer.approximate == "none"
    argmin = _gelu_argmin()

    def lowest(lower: arb, upper: arb) -> arb:
        # Balls that overlap the dip are sent to its bottom, which only widens the bounds.
        return _gelu(lower if lower > argmin else upper if upper < argmin else argmin)

    at_lowest: Any = np.frompyfunc(lowest, 2, 1)
    ends = (np.frompyfunc(_gelu, 1, 1)(end) for end in (box.lower, box.upper))
    return between(at_lowest(box.lower, box.upper), _maximum(*ends))


def _increasing(box: Box, function: Callable[[arb], arb]) -> Box:
    each: Any = np.frompyfunc(function, 1, 1)
    return between(each(box.lower), each(box.upper))


def _sigmoid(x: arb) -> arb:
    # Either form overflows on the other side.
    return 1 / (1 + (-x).exp()) if x > 0 else x.exp() / (1 + x.exp())


def _gelu(x: arb) -> arb:
    return x * (-x / arb(2).sqrt()).erfc() / 2


@cache
def _gelu_argmin() -> arb:
    """A ball around the point where the slope of GELU, Phi(x) + x phi(x), changes sign."""

    def slope(x: arb) -> arb:
        density = (-x * x / 2).exp() / (2 * arb.pi()).sqrt()
        return (-x / arb(2).sqrt()).erfc() / 2 + x * density

    low, high = arb(-1), arb(-0.5)
    assert slope(low) < 0 < slope(high)
    for _ in range(BITS - 16):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    assert slope(low) < 0 < slope(high)
    return low.union(high)


_maximum: Any = np.frompyfunc(lambda a, b: a.max(b), 2, 1)
_minimum: Any = np.frompyfunc(lambda a, b: a.min(b), 2, 1)


def _largest(values: list[arb]) -> arb:
    return reduce(lambda a, b: a.max(b), values)


def _array(values: list[arb], shape: tuple[int, ...]) -> Array:
    # Filled rather than converted, because NumPy would look for sequences inside.
    filled: Array = np.empty(len(values), dtype=object)
    filled[:] = values
    return filled.reshape(shape)


def _bias(layer: nn.Linear | nn.Conv2d) -> Array:
    size = layer.weight.shape[0]
    return array(layer.bias if layer.bias is not None else torch.zeros(size))


def _matrix(values: Array) -> arb_mat:
    rows, columns = values.shape
    return arb_mat(rows, columns, values.ravel().tolist())


def _product(left: Array, right: Array) -> Array:
    sums = _matrix(left) * _matrix(right)
    return _array(sums.entries(), (left.shape[0], right.shape[1]))


def _sums(weight: Tensor, columns: Array) -> Array:
    """The matrix product of float64 weights, exact as they are, with a matrix of balls."""
    right = _matrix(columns)
    found = []
    for rows in torch.split(weight, _ROWS):
        left = arb_mat(rows.shape[0], rows.shape[1], rows.flatten().tolist())
        found += (left * right).entries()
    return _array(found, (len(weight), columns.shape[1]))


def _pooled(values: Array, layer: nn.AvgPool2d | nn.MaxPool2d) -> Array:
    kernel, stride = _pair(layer.kernel_size), _pair(layer.stride)
    windows = _windows(values, kernel, stride, (0, 0), (1, 1), fill=arb(0))
    return windows.reshape(*windows.shape[:4], math.prod(kernel))


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _windows(
    values: Array,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    *,
    fill: arb,
) -> Array:
    """(batch, channels, height, width, *kernel): what each output position sees."""
    batch, channels, height, width = values.shape
    padded: Array = np.full(
        (batch, channels, height + 2 * padding[0], width + 2 * padding[1]), fill, dtype=object
    )
    padded[:, :, padding[0] : padding[0] + height, padding[1] : padding[1] + width] = values
    spans = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    windows = np.lib.stride_tricks.sliding_window_view(padded, spans, axis=(2, 3))
    return windows[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]
