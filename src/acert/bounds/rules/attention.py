"""Softmax along an axis, and attention, which multiplies values by it, with one head or several.

p_i = e^x_i / (e^x_i + sum_{j != i} e^x_j) rises with x_i and falls with every other x_j, so each
end is reached at a corner of the box: x_i at one end and all others at the opposite one. A logit
far below another one, as masks make them, is gone: its p_i is below the smallest number.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acert.bounds.interval import Interval, constant
from acert.bounds.refusals import refuse
from acert.bounds.rounding import Rounding, largest_magnitude
from acert.bounds.rules.affine import averaged, linear
from acert.bounds.rules.arithmetic import add, mul
from acert.bounds.rules.products import matmul, point
from acert.bounds.table import Function, rule

_FAR = 80.0  # e^80 is a float32 number, and 1 + e^-80 is 1 in float64
_GONE = 1000.0  # e^-1000 is 0 in float64


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


def error_of_shares(lower: Tensor, upper: Tensor, rounding: Rounding) -> Tensor:
    """By what share of itself each e^x_i over their sum may be off, and that sum, (..., 1)."""
    count = lower.shape[-1]
    # By far more than a network rounds such logits: they are 0 for it too, as is minus infinity.
    gone = upper + _GONE + upper.abs() / 1024 <= lower.amax(-1, keepdim=True)
    gone = gone | (upper == -math.inf)
    reach = torch.maximum(lower.abs(), upper.abs()).masked_fill(gone, 0.0)
    # An exponent is off by a few roundings of |x|: x - max, its product with log2(e), or the
    # logarithm of the sum. An exponential is off by 20 ulps, 40 units, in the fastest kernels, and
    # one that keeps a running maximum multiplies by up to one more for each element. Quotients
    # have twice that, and so have ours.
    share = rounding.unit * (8 * reach.amax(-1, keepdim=True) + 48 * (count + 1))
    return 5 * (share + rounding.gamma(count))


def _softmax(input: Interval, dim: int) -> Interval:
    lower, upper = (end.movedim(dim, -1) for end in input.ends())
    rounding = input.rounding
    if rounding is None:
        least, most = probabilities(lower, upper)
        return Interval(least.movedim(-1, dim), most.movedim(-1, dim))
    least, most = probabilities(lower, upper, tiny=16 * torch.finfo(lower.dtype).tiny)
    count, share = lower.shape[-1], error_of_shares(lower, upper, rounding)
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


@rule(F.softmin, ulps=None)
def softmin(
    input: Interval, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Interval:
    lower, upper = input.ends()
    return softmax(Interval(-upper, -lower).within(input.bound_pass), dim, dtype=dtype)


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
    function = F.scaled_dot_product_attention
    if enable_gqa:
        refuse(function, "`enable_gqa` must be False: repeat the keys and values yourself")
    if dropout_p:
        refuse(function, f"it is random where `dropout_p` is not 0; got {dropout_p}")
    if is_causal and attn_mask is not None:
        refuse(function, "`attn_mask` must be None where `is_causal` is True")
    query, key, value = _intervals(query, key, value)
    if is_causal:
        attn_mask = _causal(query, key)
    elif isinstance(attn_mask, Tensor) and attn_mask.dtype == torch.bool:
        attn_mask = ~attn_mask  # True is to be seen here, to be hidden in `nn.MultiheadAttention`
    _, output = _attention(function, query, key, value, _added(function, attn_mask, query), scale)
    return output


def _intervals(*parts: Interval | Tensor) -> tuple[Interval, ...]:
    """The parts, a constant as an interval of the same pass."""
    like = next(part for part in parts if isinstance(part, Interval))
    return tuple(part if isinstance(part, Interval) else point(part, like) for part in parts)


def _causal(query: Interval, key: Interval) -> Tensor:
    """True where a key comes after a query."""
    sizes = query.shape[-2], key.shape[-2]
    return torch.ones(sizes, dtype=torch.bool, device=query.device).triu(1)


def _added(function: Function, mask: Tensor | None, like: Interval) -> Tensor | None:
    """What a mask adds to the logits: minus infinity where a boolean one is True."""
    if isinstance(mask, Interval):
        refuse(function, "masks must not depend on the model's input")
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else constant(mask, like)
    zeros = torch.zeros(mask.shape, dtype=like.dtype, device=like.device)
    return zeros.masked_fill(mask.to(like.device), -math.inf)


def _attention(
    function: Function,
    query: Interval,
    key: Interval,
    value: Interval,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Interval, Interval]:
    """The weights softmax(scale q k^T + mask), and their product with the values."""
    bound_pass, rounding = query.bound_pass, query.rounding
    if bound_pass.record:
        refuse(function, 'CROWN has no backward rule for it; `bounds="ibp"` has one')
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    turned = key.map(lambda x: x.mT).within(bound_pass)
    scores = mul(matmul(query, turned).within(bound_pass), scale).within(bound_pass)
    if rounding is not None:
        scores = _scaled_before(scores, query, key, scale, rounding).within(bound_pass)
    if mask is not None:
        scores = _masked(scores, mask, query.shape[-1]).within(bound_pass)
    # Kernels that never form the weights sum e^x v and e^x in one go: each value is then multiplied
    # by some weight within the bounds of softmax, and the sum rounds as any other.
    weights = _softmax(scores, -1).within(bound_pass)
    if rounding is not None:
        value = _summed_before(value, rounding).within(bound_pass)
    return weights, matmul(weights, value).within(bound_pass)


@rule(F.multi_head_attention_forward, ulps=None, mixed=True)
def multi_head_attention(
    query: Interval | Tensor,
    key: Interval | Tensor,
    value: Interval | Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Interval, Interval | None]:
    """`nn.MultiheadAttention`: places first, then samples; or places alone."""
    function = F.multi_head_attention_forward
    if training and dropout_p > 0:
        refuse(function, "it is random in training; switch the model to evaluation (`eval()`)")
    for name, given in (
        ("add_bias_kv", bias_k is not None or bias_v is not None), ("add_zero_attn", add_zero_attn),
        ("static_k", static_k is not None), ("static_v", static_v is not None),
    ):  # fmt: skip
        if given:
            refuse(function, f"`{name}` must be left at its default")
    if is_causal and attn_mask is None:
        refuse(function, "`attn_mask` must be given with `is_causal`, as PyTorch asks for it")
    bound_pass = _intervals(query, key, value)[0].bound_pass
    batched = query.ndim == 3
    if use_separate_proj_weight:
        weights: Any = q_proj_weight, k_proj_weight, v_proj_weight
    else:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)

    def headed(x: Tensor) -> Tensor:
        """(places, samples, width) as (samples, heads, places, width of a head)."""
        x = x if batched else x.unsqueeze(1)
        return x.reshape(*x.shape[:2], num_heads, -1).permute(1, 2, 0, 3)

    query, key, value = (
        linear(part, weight, bias).map(headed).within(bound_pass)
        for part, weight, bias in zip(_intervals(query, key, value), weights, biases, strict=True)
    )
    if is_causal and key_padding_mask is None and not need_weights:
        attn_mask = _causal(query, key)  # PyTorch takes the hint at its word here
    mask = _added(function, attn_mask, query)
    if mask is not None and mask.ndim == 3:
        mask = mask.reshape(-1, num_heads, *mask.shape[1:])
    padding = _added(function, key_padding_mask, query)
    if padding is not None:
        padding = padding.reshape(-1, 1, 1, padding.shape[-1])
        mask = padding if mask is None else mask + padding
    seen, mixed = _attention(function, query, key, value, mask, None)

    def joined(x: Tensor) -> Tensor:
        x = x.permute(2, 0, 1, 3).flatten(2)
        return x if batched else x.squeeze(1)

    output = linear(mixed.map(joined).within(bound_pass), out_proj_weight, out_proj_bias)
    if not need_weights:
        return output, None
    if average_attn_weights:
        seen = averaged(seen, lambda x: x.mean(1), summands=num_heads)
    return output, seen if batched else seen.map(lambda x: x.squeeze(0))


@rule(torch._nested_tensor_from_mask_left_aligned, ulps=None)
def nested_tensor(input: Interval, mask: Tensor) -> Interval:
    refuse(
        "nn.TransformerEncoder",
        "a padding mask may make it pack samples into nested tensors, and padding comes out as 0 "
        "then; build it with `enable_nested_tensor=False`",
    )


def _masked(scores: Interval, mask: Tensor, summands: int) -> Interval:
    """The scores plus the mask, which a kernel may start its sums with."""
    rounding = scores.rounding
    if rounding is None:
        return add(scores, mask)
    # Minus infinity counts as a number that is out of reach of all others: if it is gone, so is
    # minus infinity, and if not, softmax takes the row for unknown.
    mask = mask.clamp(min=-rounding.largest / 4)
    center, radius = add(scores, mask).as_ball()
    return Interval.ball(center, radius + 2 * rounding.gamma(summands) * mask.abs())


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
