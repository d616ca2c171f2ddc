"""Softmax along an axis, and attention, which multiplies values by it.

p_i = e^x_i / (e^x_i + sum_{j != i} e^x_j) rises with x_i and falls with every other x_j, so each
end is reached at a corner of the box: x_i at one end and all others at the opposite one.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from acert.bounds.interval import Interval, refuse
from acert.bounds.rounding import Rounding, largest_magnitude
from acert.bounds.rules.arithmetic import mul
from acert.bounds.rules.products import matmul, point
from acert.bounds.table import rule

_FAR = 80.0  # e^80 is a float32 number, and 1 + e^-80 is 1 in float64


def probabilities(lower: Tensor, upper: Tensor, *, tiny: float = 0.0) -> tuple[Tensor, Tensor]:
    """Both ends of the softmax over the last axis, for logits between `lower` and `upper`.

    `tiny` is what an exponential may be off by where it underflows.
    """
    count = lower.shape[-1]
    # Sums over the others, one by one: the whole less one's own would cancel.
    others = 1 - torch.eye(count, dtype=lower.dtype, device=lower.device)
    # Every logit less the largest: exponentials up to 1. A shift changes nothing, nor do gradients.
    top, peak = (end.detach().amax(-1, keepdim=True) for end in (upper, lower))
    own = (lower - top).exp()
    own = own if not tiny else (own - tiny).relu()
    rest = ((upper - top).exp() @ others).to(own.dtype)
    # Where both underflow, 0 is below them.
    least = own / (own + rest + (2 * count * tiny + torch.finfo(own.dtype).tiny))
    own = (upper - peak).clamp(max=_FAR).exp() + tiny
    rest = ((lower - peak).exp() @ others).to(own.dtype)
    return least, own / (own + rest)


def _softmax(input: Interval, dim: int) -> Interval:
    lower, upper = (end.movedim(dim, -1) for end in input.ends())
    rounding = input.rounding
    if rounding is None:
        least, most = probabilities(lower, upper)
        return Interval(least.movedim(-1, dim), most.movedim(-1, dim))
    least, most = probabilities(lower, upper, tiny=16 * torch.finfo(lower.dtype).tiny)
    count = lower.shape[-1]
    reach = torch.maximum(lower.abs(), upper.abs()).amax(-1, keepdim=True)
    # An exponent is off by a few roundings of |x|: x - max, its product with log2(e), or the
    # logarithm of the sum. An exponential is off by 20 ulps, 40 units, in the fastest kernels, and
    # one that keeps a running maximum multiplies by up to one more for each element. Quotients
    # have twice that, and so have ours.
    share = 5 * (rounding.unit * (8 * reach + 48 * (count + 1)) + rounding.gamma(count))
    flushed = 4 * (count + 4) * rounding.tiny
    least = (least * (1 - share) - flushed).relu()
    most = most * (1 + share) + flushed
    known = share <= 0.1
    least, most = (torch.where(known, end, math.nan) for end in (least, most))
    return Interval(least.movedim(-1, dim), most.movedim(-1, dim))


@rule(F.softmax, ulps=None)
def softmax(
    input: Interval, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Interval:
    if dim is None:
        refuse(F.softmax, "`dim` must be given; got None")
    if dtype not in (None, torch.float32, torch.float64):
        refuse(F.softmax, f"it must not lose precision; got {dtype}")
    return _softmax(input, dim)


@rule(torch.softmax, torch.Tensor.softmax, torch.special.softmax, ulps=None)
def softmax_function(
    input: Interval, dim: int | None = None, dtype: torch.dtype | None = None
) -> Interval:
    return softmax(input, dim, dtype=dtype)


@rule(F.scaled_dot_product_attention, ulps=None, mixed=True)
def scaled_dot_product_attention(
    query: Interval | Tensor,
    key: Interval | Tensor,
    value: Interval | Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Interval:
    for name, given in (
        ("attn_mask", attn_mask is not None), ("dropout_p", dropout_p != 0),
        ("is_causal", is_causal), ("enable_gqa", enable_gqa),
    ):  # fmt: skip
        if given:
            refuse(F.scaled_dot_product_attention, f"`{name}` must be left at its default")
    like = next(part for part in (query, key, value) if isinstance(part, Interval))

    query, key, value = (
        part if isinstance(part, Interval) else point(part, like) for part in (query, key, value)
    )
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    turned = key.map(lambda x: x.mT).within(like.bound_pass)
    scores = mul(matmul(query, turned).within(like.bound_pass), scale)
    if like.rounding is not None:
        scores = _scaled_before(scores, query, key, scale, like.rounding)
    # Kernels that never form the weights sum e^x v and e^x in one go: each value is then multiplied
    # by some weight within the bounds of softmax, and the sum rounds as any other.
    weights = _softmax(scores.within(like.bound_pass), -1)
    if like.rounding is not None:
        value = _summed_before(value, like.rounding).within(like.bound_pass)
    return matmul(weights.within(like.bound_pass), value)


def _scaled_before(
    scores: Interval, query: Interval, key: Interval, scale: float, rounding: Rounding
) -> Interval:
    """Adds what is lost where queries or keys are scaled instead of their products.

    Roundings are paid for by the spare ones of the sum; what may be flushed or overflow is not.
    """
    rows = largest_magnitude(*query.as_ball(), (-1,))
    columns = largest_magnitude(*key.as_ball(), (-1,)).mT
    center, radius = scores.as_ball()
    flushed = rounding.underflow(8 * query.shape[-1], rows, columns) * (1 + abs(scale))
    usable = (1 + abs(scale)) * (rows + columns) <= rounding.largest
    return Interval.ball(center, torch.where(usable, radius + flushed, math.nan))


def _summed_before(value: Interval, rounding: Rounding) -> Interval:
    """The values, unknown where their sum overflows before it is divided by that of weights."""
    center, radius = value.as_ball()
    total = value.shape[-2] * largest_magnitude(center, radius, (-2,))
    return Interval.ball(center, torch.where(total <= rounding.largest, radius, math.nan))
