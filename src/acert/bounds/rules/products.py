"""Matrix products of intervals with intervals, and with constants on either side.

With a constant the center goes through W and the radius through |W|. Of two balls a and b, the sum
of all products is the center's product with, for each pair of factors, |a| r_b for b's part, and
for a's part r_a times the largest |b|; or, where a keeps its sign, |b| at the end that the sign
picks, which is exact. Attention weights, all of one sign, are what this is for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from acert.bounds.interval import Interval, constant, refuse
from acert.bounds.rounding import largest_magnitude, own_gamma
from acert.bounds.rules.affine import affine, linear
from acert.bounds.rules.arithmetic import Operand, add
from acert.bounds.table import rule

Factor = Interval | Tensor


@rule(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, ulps=None, mixed=True)
def matmul(input: Factor, other: Factor) -> Interval:
    if isinstance(input, Interval) and isinstance(other, Tensor) and other.ndim == 2:
        return linear(input, other.mT)
    like = input if isinstance(input, Interval) else other
    assert isinstance(like, Interval)
    if like.bound_pass.record:
        refuse(
            torch.matmul,
            'CROWN has a backward rule only for a matrix on its right; `bounds="ibp"` has one',
        )
    left = _matrix(input, like, -2) if input.ndim == 1 else _part(input, like)
    right = _matrix(other, like, -1) if other.ndim == 1 else _part(other, like)
    output = _product(left, right)
    if input.ndim == 1:
        output = output.map(lambda x: x.squeeze(-2))
    return output.map(lambda x: x.squeeze(-1)) if other.ndim == 1 else output


def _part(factor: Factor, like: Interval) -> Factor:
    return factor if isinstance(factor, Interval) else constant(factor, like)


def _matrix(factor: Factor, like: Interval, dim: int) -> Factor:
    """A vector as a matrix of one row or column."""
    if isinstance(factor, Interval):
        return factor.map(lambda x: x.unsqueeze(dim)).within(factor.bound_pass)
    return constant(factor, like).unsqueeze(dim)


def _product(left: Factor, right: Factor) -> Interval:
    if isinstance(left, Interval) and isinstance(right, Interval):
        return _of_intervals(left, right)
    summands = left.shape[-1]
    if isinstance(left, Interval):
        assert isinstance(right, Tensor)
        output, _ = affine(
            left, lambda x, w, _: x @ w, right, None, summands=summands, summed_dims=(-1,)
        )
        return output
    assert isinstance(right, Interval)
    output, _ = affine(
        right, lambda x, w, _: w @ x, left, None, summands=summands, summed_dims=(-2,)
    )
    return output


def _of_intervals(left: Interval, right: Interval) -> Interval:
    (center, radius), (other, reach) = left.as_ball(), right.as_ball()
    summands = center.shape[-1]
    # (a + s)(b + t) with |s| <= r_a, |t| <= r_b: for a > 0 throughout the largest is
    # a b + a r_b + r_a |b + r_b|, since a + s and with it the choice t = r_b never changes sign.
    high, low = (other + reach).abs(), (other - reach).abs()
    positive, negative = center >= radius, center <= -radius
    either = radius.masked_fill(positive | negative, 0.0)
    spread = torch.cat(
        [center.abs(), radius * positive, radius * (negative & ~positive), either], -1
    )
    largest = torch.maximum(high, low)
    above = spread @ torch.cat([reach, high, low, largest], -2)
    below = spread @ torch.cat([reach, low, high, largest], -2)
    output = center @ other
    # Autocast makes products in half precision; whatever comes next is not to stay there.
    output, above, below = (part.to(center.dtype) for part in (output, above, below))
    rounding = left.rounding
    if rounding is not None:
        size, other_size = center.abs() + radius, other.abs() + reach
        # The network's sum is off by gamma |a||b|, ours (four times as long) by its own, and an
        # end of b by an ulp of |b| + r_b.
        share = rounding.gamma(summands) + 8 * own_gamma(4 * summands)
        error = share * (size @ other_size) * (1 + 2 * own_gamma(summands))
        by_row = largest_magnitude(center, radius, (-1,))
        by_column = largest_magnitude(other, reach, (-2,))
        error = error + rounding.underflow(4 * summands, by_row, by_column)
        overflow = summands * by_row * by_column > rounding.largest
        error = torch.where(overflow, math.nan, error)
        above, below = above + error, below + error
        slack = 4 * own_gamma(1) * (output.abs() + torch.maximum(above, below))
        above, below = above + slack, below + slack
    return Interval(output - below, output + above)


@rule(torch.mm, torch.Tensor.mm, torch.bmm, torch.Tensor.bmm, ulps=None, mixed=True)
def mm(input: Factor, mat2: Factor) -> Interval:
    return matmul(input, mat2)


@rule(torch.addmm, torch.Tensor.addmm, ulps=None, mixed=True)
def addmm(
    input: Operand, mat1: Factor, mat2: Factor, *, beta: float = 1, alpha: float = 1
) -> Interval:
    if beta != 1 or alpha != 1:
        refuse(torch.addmm, f"`beta` and `alpha` must be 1; got {beta} and {alpha}")
    if isinstance(mat1, Tensor) and isinstance(mat2, Tensor):
        refuse(torch.addmm, "one of its matrices must depend on the model's input")
    bias = input if isinstance(input, Tensor) and input.ndim == 1 else None
    if bias is not None and isinstance(mat1, Interval) and isinstance(mat2, Tensor):
        return linear(mat1, mat2.mT, bias)
    like = mat1 if isinstance(mat1, Interval) else mat2
    assert isinstance(like, Interval)
    return add(input, matmul(mat1, mat2).within(like.bound_pass))
