"""Euclidean lengths, and vectors divided by theirs: `norm`, `F.lp_pool2d`, `F.normalize`.

x_i / |x| rises with x_i and shrinks as any other |x_j| grows. So each end is reached at a corner:
x_i at one of its ends, and all others as near to 0 as they get, or as far from it. Taken as a
quotient of two intervals it would be far too wide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acert.bounds.interval import Interval, constant
from acert.bounds.refusals import refuse
from acert.bounds.rounding import OWN_UNIT, REAL, Rounding, own_gamma
from acert.bounds.rules.affine import sizes_of
from acert.bounds.rules.arithmetic import Operand, add, mul, sub
from acert.bounds.rules.elementwise import absolute, increasing
from acert.bounds.rules.powers import power, square_root
from acert.bounds.table import Function, rule


def _squares(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest square of each element."""
    nearest = torch.maximum(lower, -upper).relu()
    return nearest.square(), torch.maximum(-lower, upper).square()


def _length(input: Interval, axes: Sequence[int], *, keepdim: bool) -> Interval:
    count = math.prod([input.shape[axis] for axis in axes])
    sums = [part.sum(tuple(axes), keepdim=keepdim) for part in _squares(*input.ends())]
    rounding = input.rounding
    if rounding is None:
        return Interval(*map(square_root, sums))
    # A root halves what its argument is off by; a square may be flushed to 0.
    share = rounding.gamma(count) + 8 * rounding.unit + 2 * own_gamma(count)
    flushed = 4 * math.sqrt(count * rounding.tiny)
    least, most = (
        square_root(sums[0]) * (1 - share) - flushed,
        square_root(sums[1]) * (1 + share) + flushed,
    )
    known = most.square() <= rounding.largest
    return Interval(*(torch.where(known, end, math.nan) for end in (least.relu(), most)))


def _norm(function: Function) -> Any:
    def norm(
        input: Interval,
        ord: Any = 2,
        dim: Any = None,
        keepdim: bool = False,
        *,
        p: Any = None,
        dtype: torch.dtype | None = None,
    ) -> Interval:
        kind = ord if p is None else p
        if dtype not in (None, input.dtype):
            refuse(function, f"`dtype` must be that of its input; got {dtype}")
        axes = (dim,) if isinstance(dim, int) else tuple(dim or range(input.ndim))
        if kind in (2, "fro"):
            return _length(input, axes, keepdim=keepdim)
        size = absolute(input).within(input.bound_pass)
        if kind == 1:
            total: Interval = size.sum(axes, keepdim)
            return total
        if kind == math.inf:
            largest: Interval = size.amax(axes, keepdim)
            return largest
        refuse(function, f"the norm must be 1, 2 or infinity; got {kind!r}")

    return norm


rule(torch.norm, torch.Tensor.norm, ulps=None)(_norm(torch.norm))
_vector_norm = rule(torch.linalg.vector_norm, ulps=None)(_norm(torch.linalg.vector_norm))


@rule(torch.linalg.norm, ulps=None)
def linalg_norm(
    input: Interval, ord: Any = None, dim: Any = None, keepdim: bool = False, **options: Any
) -> Interval:
    if ord is not None:  # of two axes it may be a norm of matrices
        refuse(torch.linalg.norm, "`ord` must be None: write `torch.linalg.vector_norm`")
    length: Interval = _vector_norm(input, dim=dim, keepdim=keepdim, **options)
    return length


@rule(F.pairwise_distance, torch.pairwise_distance, ulps=None, mixed=True)
def pairwise_distance(
    x1: Operand, x2: Operand, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Interval:
    like = x1 if isinstance(x1, Interval) else x2
    assert isinstance(like, Interval)
    apart = sub(x1, x2).within(like.bound_pass)
    distance: Interval = _vector_norm(
        add(apart, eps).within(like.bound_pass), p, -1, keepdim
    )  # as PyTorch writes it
    return distance


def _lp_pool(function: Function, average: Function, spatial: int) -> Any:
    def lp_pool(
        input: Interval, norm_type: float, kernel_size: Any, stride: Any = None,
        ceil_mode: bool = False,
    ) -> Interval:  # fmt: skip
        if norm_type not in (1, 2):  # what infinity means depends on PyTorch's version
            refuse(function, f"`norm_type` must be 1 or 2; got {norm_type}")
        powers = power(input, norm_type).within(input.bound_pass)
        means = average(powers, kernel_size, stride, 0, ceil_mode)
        sums = mul(means, math.prod(sizes_of(kernel_size, spatial))).within(input.bound_pass)
        if norm_type == 2:  # negative by what allows for rounding, which squares never are
            sums = increasing(sums, torch.relu).within(input.bound_pass)
        return power(sums, 1 / norm_type)

    return lp_pool


for _spatial, _pool, _average in (
    (1, F.lp_pool1d, F.avg_pool1d),
    (2, F.lp_pool2d, F.avg_pool2d),
    (3, F.lp_pool3d, F.avg_pool3d),
):
    rule(_pool, ulps=None)(_lp_pool(_pool, _average, _spatial))


def _directions(
    lower: Tensor,
    upper: Tensor,
    divisor: Callable[[Tensor], Tensor],
    rounding: Rounding | None,
) -> tuple[Tensor, Tensor]:
    """Both ends of x_i / divisor(sum of squares), over the last axis.

    The divisor grows with the sum, by at most the same share of itself, and keeps x_i / divisor
    rising with x_i.
    """
    count = lower.shape[-1]
    least, most = _squares(lower, upper)
    smallest, largest = least.sum(-1, keepdim=True), most.sum(-1, keepdim=True)
    rest, other_rest = smallest - least, largest - most
    if rounding is not None:
        # The difference is off by the whole sum's error.
        rest = rest - 2 * own_gamma(count) * smallest
        other_rest = other_rest + 2 * own_gamma(count) * largest
    rest, other_rest = rest.relu(), other_rest.relu()

    def quotient(end: Tensor, near: Tensor) -> Tensor:
        return end / divisor(end.square() + torch.where(near, rest, other_rest))

    low, high = quotient(lower, lower < 0), quotient(upper, upper > 0)
    if rounding is None:
        return low, high
    scale = divisor(smallest * (1 - 2 * own_gamma(count)))
    # A sum of squares is off by gamma of itself, and by what is flushed to 0; so is its root, by
    # half as much, or `eps` in its place.
    own = rounding.gamma(count) + 8 * rounding.unit + 16 * OWN_UNIT
    share = own + 8 * count * rounding.tiny / scale.square()
    flushed = 8 * rounding.tiny * (1 + 1 / scale)
    low, high = low - low.abs() * share - flushed, high + high.abs() * share + flushed
    known = (share <= 0.5) & (2 * largest <= rounding.largest) & (scale >= rounding.tiny)
    return torch.where(known, low, math.nan), torch.where(known, high, math.nan)


@rule(F.normalize, ulps=None)
def normalize(input: Interval, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Interval:
    if p != 2:
        refuse(F.normalize, f"`p` must be 2; got {p}")
    if not isinstance(dim, int):
        refuse(F.normalize, f"`dim` must be one axis; got {dim}")
    lower, upper = (end.movedim(dim, -1) for end in input.ends())
    low, high = _directions(
        lower, upper, lambda squares: square_root(squares).clamp(min=eps), input.rounding
    )
    return Interval(low.movedim(-1, dim), high.movedim(-1, dim))


@rule(F.cosine_similarity, torch.cosine_similarity, ulps=None, mixed=True)
def cosine_similarity(x1: Operand, x2: Operand, dim: int = 1, eps: float = 1e-8) -> Interval:
    """The product with a constant direction by the length, each at its end, and within [-1, 1]."""
    input, other = (x1, x2) if isinstance(x1, Interval) else (x2, x1)
    if not isinstance(input, Interval) or isinstance(other, Interval):
        refuse(F.cosine_similarity, "one of its arguments must not depend on the model's input")
    direction = constant(other, input)
    shape = torch.broadcast_shapes(input.shape, direction.shape)  # type: ignore[no-untyped-call]
    center, radius, lower, upper, direction = (
        part.expand(shape).movedim(dim, -1) for part in (*input.as_ball(), *input.ends(), direction)
    )
    count = shape[dim]
    whole = direction.square().sum(-1, keepdim=True)
    size = square_root(whole).clamp(min=eps)
    direction = direction / size
    middle, reach = (center * direction).sum(-1), (radius * direction.abs()).sum(-1)
    sums = [part.sum(-1) for part in _squares(lower, upper)]
    near, far = (square_root(part).clamp(min=eps) for part in sums)
    rounding = input.rounding
    if rounding is not None:
        # Our own sums, of terms that may cancel.
        met = ((center.abs() + radius) * direction.abs()).sum(-1)
        reach = reach + 4 * own_gamma(count) * met + REAL.tiny * count
    low, high = middle - reach, middle + reach
    low = (low / torch.where(low >= 0, far, near)).clamp(-1, 1)
    high = (high / torch.where(high >= 0, near, far)).clamp(-1, 1)
    if rounding is None:
        return Interval(low, high)
    # At every point the absolute values of what is added come to 1 at most (Cauchy). Products and
    # sum are off by gamma of that, and either length by half of it, whatever is done first.
    slack = 4 * rounding.gamma(count) + 8 * count * rounding.tiny * (1 + 1 / near)
    smallest = torch.minimum(near, size.squeeze(-1))
    known = smallest.square() >= count * rounding.tiny / rounding.unit
    known = known & (2 * torch.maximum(sums[1], whole.squeeze(-1)) <= rounding.largest)
    return Interval(*(torch.where(known, end, math.nan) for end in (low - slack, high + slack)))


@rule(F.rms_norm, torch.rms_norm, ulps=None)
def rms_norm(
    input: Interval,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Interval:
    axes = len(normalized_shape)
    count = math.prod(normalized_shape)
    lower, upper = (end.flatten(-axes) for end in input.ends())

    def ends(eps: float) -> tuple[Tensor, Tensor]:
        return _directions(
            lower, upper, lambda squares: (squares / count + eps).sqrt(), input.rounding
        )

    if eps is None:
        # That of the type which the network's numbers have there: float32, or float64 by a cast.
        found = [ends(torch.finfo(dtype).eps) for dtype in (torch.float32, torch.float64)]
        low, high = torch.minimum(found[0][0], found[1][0]), torch.maximum(found[0][1], found[1][1])
    else:
        low, high = ends(eps)
    output = Interval(low.reshape(input.shape), high.reshape(input.shape))
    return output if weight is None else mul(output.within(input.bound_pass), weight)
