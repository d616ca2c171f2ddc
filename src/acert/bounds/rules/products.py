"""Matrix products and `einsum` of intervals with intervals, and with constants on either side.

With a constant the center goes through W and the radius through |W|. Of two balls a and b, the sum
of all products is the center's product with, for each pair of factors, |a| r_b for b's part, and
for a's part r_a times the largest |b|; or, where a keeps its sign, |b| at the end that the sign
picks, which is exact. Attention weights, all of one sign, are what this is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from acert.bounds.interval import Interval, constant
from acert.bounds.refusals import refuse
from acert.bounds.rounding import OWN_UNIT, own_gamma
from acert.bounds.rules.affine import affine, averaged, linear
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
        return _bilinear(left, right, torch.matmul, summands=left.shape[-1])
    summands = left.shape[-1]
    if isinstance(left, Interval):
        assert isinstance(right, Tensor)
        output, *_ = affine(
            left, lambda x, w, _: x @ w, right, None, summands=summands, summed_dims=(-1,)
        )
        return output
    assert isinstance(right, Interval)
    output, *_ = affine(
        right, lambda x, w, _: w @ x, left, None, summands=summands, summed_dims=(-2,)
    )
    return output


def _bilinear(
    left: Interval, right: Interval, multiply: Callable[[Tensor, Tensor], Tensor], *, summands: int
) -> Interval:
    """Bounds of `multiply(a, b)`, each of whose results adds `summands` products of elements."""
    (center, radius), (other, reach) = left.as_ball(), right.as_ball()
    # (a + s)(b + t) with |s| <= r_a, |t| <= r_b: for a > 0 throughout the largest is
    # a b + a r_b + r_a |b + r_b|, since a + s and with it the choice t = r_b never changes sign.
    high, low = (other + reach).abs(), (other - reach).abs()
    positive = center >= radius
    negative = (center <= -radius) & ~positive
    plus, minus = radius * positive, radius * negative
    both = multiply(center.abs(), reach)
    both = both + multiply(radius - plus - minus, torch.maximum(high, low))
    above = both + multiply(plus, high) + multiply(minus, low)
    below = both + multiply(plus, low) + multiply(minus, high)
    # Autocast makes products in half precision; whatever comes next is not to stay there.
    output = multiply(center, other).to(center.dtype)
    above, below = above.to(center.dtype), below.to(center.dtype)
    rounding = left.rounding
    if rounding is not None:
        size, other_size = center.abs() + radius, other.abs() + reach
        # The network's sum is off by gamma |a||b|, each of ours by its own, and an end of b by an
        # ulp of |b| + r_b.
        own = own_gamma(summands)
        total = multiply(size, other_size) * (1 + 2 * own)
        error = (rounding.gamma(summands) + 16 * own) * total
        # Every factor and every product may be flushed to zero.
        error = error + 8 * rounding.tiny * multiply(1 + size, 1 + other_size)
        error = torch.where(total <= rounding.largest, error, math.nan)
        slack = 4 * OWN_UNIT * (output.abs() + total)
        above, below = above + error + slack, below + error + slack
    return Interval(output - below, output + above)


@rule(torch.einsum, ulps=None, mixed=True)
def einsum(equation: str, *operands: Any) -> Interval:
    if isinstance(operands[0], (list, tuple)):  # torch.compile hands them on as they are
        operands = tuple(operands[0])
    if "." in equation or len(operands) > 2:
        refuse(torch.einsum, "it must be given one or two tensors, and all axes by letters")
    inputs, arrow, kept = equation.replace(" ", "").partition("->")
    letters = inputs.replace(",", "")
    kept = kept if arrow else "".join(axis for axis in letters if letters.count(axis) == 1)
    terms = inputs.split(",")
    summed = {axis for axis in letters if axis not in kept}
    if not all(axis in term for axis in summed for term in terms):
        # PyTorch sums it before it multiplies, and that sum alone may overflow.
        refuse(torch.einsum, f"an axis it sums must be in both tensors; got {equation!r}")
    shapes = [(axes, part.shape) for axes, part in zip(terms, operands, strict=True)]
    sizes = {axis: shape[at] for axes, shape in shapes for at, axis in enumerate(axes)}
    if any(
        shape[at] != sizes[axis]
        for axes, shape in shapes
        for at, axis in enumerate(axes)
        if axis in summed
    ):
        # One of length 1 is broadcast, which is to sum the other one's alone as well.
        refuse(torch.einsum, f"an axis it sums must have one length; got {equation!r}")
    summands = math.prod([sizes[axis] for axis in sorted(summed)])
    if len(operands) == 1:
        return averaged(operands[0], lambda x: torch.einsum(equation, x), summands=summands)
    like = next(part for part in operands if isinstance(part, Interval))
    left, right = (part if isinstance(part, Interval) else point(part, like) for part in operands)
    return _bilinear(left, right, lambda a, b: torch.einsum(equation, a, b), summands=summands)


def point(part: Tensor, like: Interval) -> Interval:
    """A constant as an interval of the same pass."""
    fixed = constant(part, like)
    return Interval(fixed, fixed).within(like.bound_pass)


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
    output = add(input, matmul(mat1, mat2).within(like.bound_pass)).within(like.bound_pass)
    rounding = like.rounding
    if rounding is None:
        return output
    # A kernel starts its sums with `input`: it is rounded, and may overflow, with each product.
    size = input.magnitude if isinstance(input, Interval) else constant(input, like).abs()
    center, radius = output.as_ball()
    radius = radius + 2 * rounding.gamma(mat1.shape[-1]) * size
    return Interval.ball(center, torch.where(2 * size <= rounding.largest, radius, math.nan))
