"""Normalisation by a sample's own mean and variance: group, layer and instance norm.

y_i = (x_i - mean) / sqrt(var + eps) over n elements. Mean and variance move with x, and taken as
independent of it the bounds would be far too wide. With d_i = x_i - mean, the others' part of the
variance does not depend on x_i:

    var = (d_i^2 n / (n - 1) + N_i^2) / n,  N_i = | x_j - mean of these |_2 over j != i,

so that y_i rises with d_i and shrinks as N_i grows, and each is at the end of its range. That
|y_i| <= sqrt(n - 1) comes with it. d_i is linear in x. N_i is a seminorm of x, and moves no further
than the norm of what x moves by. The variance has a least value in the box, too, which is more than
that where the box is wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from acert.bounds.interval import Interval
from acert.bounds.refusals import refuse
from acert.bounds.rounding import OWN_UNIT, REAL, Rounding, own_gamma
from acert.bounds.rules.affine import batch_norm
from acert.bounds.rules.arithmetic import add, div, mul
from acert.bounds.rules.powers import power, square, square_root
from acert.bounds.table import rule


def least_squares(center: Tensor, radius: Tensor, *, safe: bool) -> Tensor:
    """The least sum of squared deviations from the mean in the box, or a little less.

    It is the least over all points of the sum of squared distances from the box's sides: convex, so
    that its value and slope at any point bound it from below. Newton's steps seek the best point;
    one that leads out of the points known to be on either side goes to their middle.
    With `safe` it holds whatever our own float64 rounding does.
    """
    count = center.shape[-1]
    shift = center - center.mean(-1, keepdim=True)
    with torch.no_grad():
        point = torch.zeros_like(shift[..., :1])
        left = (shift - radius).amin(-1, keepdim=True)
        right = (shift + radius).amax(-1, keepdim=True)
        for _ in range(_STEPS):
            pull = _beyond(shift - point, radius)
            slope = pull.sum(-1, keepdim=True)
            left, right = torch.where(slope > 0, point, left), torch.where(slope < 0, point, right)
            point = point + slope / (pull != 0).sum(-1, keepdim=True).clamp(1)
            inside = ((left < point) & (point < right)) | (slope == 0)
            point = torch.where(inside, point, (left + right) / 2)
    distance = _beyond(shift - point, radius)
    squares = distance.square().sum(-1, keepdim=True)
    # The best point is the mean of some x, and so within mean(r) of the center's. No gradient: at
    # the best point the slope is 0, and what is left of it has any sign.
    span = point.abs() + radius.mean(-1, keepdim=True)
    squares = squares - (2 * distance.sum(-1, keepdim=True).abs() * span).detach()
    if not safe:
        return squares.relu()
    sizes = [
        square_root(part.square().sum(-1, keepdim=True)) for part in (center, radius, distance)
    ]
    # The vector of distances is off by `error`, and their sum by the root of n times that.
    root = math.sqrt(count)
    error = 8 * own_gamma(count) * (sizes[0] + sizes[1] + root * point.abs()) + 2.0**-500 * root
    slack = 16 * error * (sizes[2] + error + root * span)
    return (squares - slack).relu() * (1 - 16 * OWN_UNIT)


_STEPS = 5


def _beyond(value: Tensor, radius: Tensor) -> Tensor:
    """How far a value lies above its radius, or below minus that; 0 in between."""
    return (value.abs() - radius).relu() * value.sign()


def normalized(
    center: Tensor, radius: Tensor, squares: Tensor, *, eps: float, safe: bool
) -> tuple[Tensor, Tensor]:
    """Both ends of (x - mean) / sqrt(var + eps), the groups along the last axis.

    `squares` is a lower bound of n var. With `safe` the ends hold whatever our own float64
    rounding does.
    """
    count = center.shape[-1]
    others = max(count - 1, 1)
    shift = center - center.mean(-1, keepdim=True)
    # |I - 1/n| r: an element is one n-th of its own mean.
    spread = radius * (1 - 2 / count) + radius.mean(-1, keepdim=True)
    whole = shift.square().sum(-1, keepdim=True)
    rest = whole - shift.square() - (shift.sum(-1, keepdim=True) - shift).square() / others
    moves = radius.square().sum(-1, keepdim=True)
    reach = moves - radius.square()
    if count <= 2:  # a single other element is its own mean
        rest, reach = torch.zeros_like(rest), torch.zeros_like(reach)
    if safe:
        # Each of these sums is off by its gamma of what went into it, before it cancels.
        own = own_gamma(count)
        size = center.abs() + radius
        spread = spread + 2 * own * (size + size.mean(-1, keepdim=True)) + 16 * REAL.tiny
        off = 16 * own * whole
        least, most = square_root(rest - off), square_root(rest + off)
        reach = square_root(reach + 4 * own * moves)
        # The rounded deviations are a vector next to the true one. Squares may be flushed to 0.
        reach = reach + 4 * own * square_root(center.square().sum(-1, keepdim=True))
        reach = reach + 8 * OWN_UNIT * most + 2.0**-500 * math.sqrt(count)
        inner, outer = (least - reach).relu() * (1 - 16 * OWN_UNIT), (most + reach)
        outer = outer * (1 + 16 * OWN_UNIT)
    else:
        least, reach = square_root(rest), square_root(reach)
        inner, outer = (least - reach).relu(), least + reach

    def quotient(deviation: Tensor, smaller: Tensor, larger: Tensor) -> Tensor:
        own_part = deviation.square() / others if count > 1 else 0.0
        above = torch.maximum(smaller.square() / count + own_part, squares / count)
        below = larger.square() / count + own_part
        return deviation * (torch.where(deviation >= 0, above, below) + eps).rsqrt()

    lower = -quotient(spread - shift, inner, outer)
    upper = quotient(shift + spread, inner, outer)
    if safe:  # nothing cancels any more: a few ulps of the result
        slack = 32 * OWN_UNIT * torch.maximum(lower.abs(), upper.abs()) + 16 * REAL.tiny
        lower, upper = lower - slack, upper + slack
    return lower, upper


def _network_error(
    center: Tensor,
    radius: Tensor,
    squares: Tensor,
    output: Tensor,
    *,
    eps: float,
    rounding: Rounding,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a network may be off by, and 1 / deviation and the magnitudes met; NaN if anything.

    Its mean is off by less than 2 g mean|x|, by one sum as by running means. Its variance is off by
    less than 8 g mean(x^2): mean(x^2) - mean^2 by 6 g, running updates (Welford) by 5 g, the mean
    of squared deviations by less. One that may come out at half its value with `eps`, or below 0,
    proves nothing: not every kernel clamps it.
    """
    count = center.shape[-1]
    gamma, own = rounding.gamma(count), own_gamma(count)
    size = center.abs() + radius
    mean_size = size.mean(-1, keepdim=True) * (1 + 2 * own)
    mean_square = size.square().mean(-1, keepdim=True) * (1 + 2 * own)
    smallest = (squares / count + eps) * (1 - 8 * OWN_UNIT)
    largest = size.amax(-1, keepdim=True)
    off = 8 * gamma * mean_square + 8 * rounding.tiny * (1 + largest)
    share = off / smallest + 8 * rounding.unit
    # 1 / sqrt(1 - share) is at most 1 + share, and below 1.5.
    inverse = 1.5 * smallest.rsqrt()
    error = share * output.abs() + 4 * gamma * mean_size * inverse
    usable = (share <= 0.5) & (count * mean_square <= rounding.largest)
    usable = usable & (smallest >= rounding.tiny / rounding.unit)
    return torch.where(usable, error, math.nan), inverse, size + mean_size


def _norm(
    input: Interval,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
) -> Interval:
    """Bounds of the normalisation of `input` seen in `shape`, the groups along the last axis.

    `weight` and `bias` broadcast to that shape.
    """
    center, radius = (part.reshape(shape) for part in input.as_ball())
    rounding = input.rounding
    safe = rounding is not None
    squares = least_squares(center, radius, safe=safe)
    lower, upper = normalized(center, radius, squares, eps=eps, safe=safe)
    middle, half = (lower + upper) / 2, (upper - lower) / 2
    factor = center.new_ones(()) if weight is None else weight.to(center.dtype)
    shift = center.new_zeros(()) if bias is None else bias.to(center.dtype)
    output, spread = middle * factor + shift, half * factor.abs()
    if rounding is not None:
        highest = torch.maximum(lower.abs(), upper.abs())
        error, inverse, met = _network_error(
            center, radius, squares, highest, eps=eps, rounding=rounding
        )
        spread = spread + error * factor.abs()
        # As with batch norm: what is added counts, and a * x + (b - mean * a) adds most.
        magnitude = (met * inverse + highest) * factor.abs() + shift.abs()
        spread = rounding.widen(spread, magnitude, ulps=8)
        product = (1 + met) * (1 + inverse) * (1 + factor.abs())
        spread = spread + rounding.underflow(8, 0.0, product)
        spread = torch.where(product <= rounding.largest, spread, math.nan)
    return Interval.ball(output.reshape(input.shape), spread.reshape(input.shape))


@rule(F.layer_norm, torch.layer_norm, ulps=None)
def layer_norm(
    input: Interval,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Interval:
    kept = input.shape[: input.ndim - len(normalized_shape)]
    if tuple(input.shape[len(kept) :]) != tuple(normalized_shape):
        refuse(
            F.layer_norm,
            f"`normalized_shape` must be the last axes of its input; got {normalized_shape} for "
            f"{tuple(input.shape)}",
        )
    weight = None if weight is None else weight.flatten()
    bias = None if bias is None else bias.flatten()
    return _norm(input, (*kept, math.prod(normalized_shape)), weight, bias, eps=eps)


@rule(F.group_norm, torch.group_norm, ulps=None)
def group_norm(
    input: Interval,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Interval:
    samples, channels, *places = input.shape
    if channels % num_groups:
        refuse(F.group_norm, f"`num_groups` must divide the {channels} channels; got {num_groups}")

    def each(parameter: Tensor | None) -> Tensor | None:
        """One number a channel as one an element, in groups."""
        if parameter is None:
            return None
        parameter = parameter.reshape(channels, 1).expand(channels, math.prod(places))
        return parameter.reshape(num_groups, -1)

    count = channels // num_groups * math.prod(places)
    return _norm(input, (samples, num_groups, count), each(weight), each(bias), eps=eps)


@rule(F.instance_norm, ulps=None)
def instance_norm(
    input: Interval,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Interval:
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, eps=eps)
    if running_mean is not None:
        refuse(
            F.instance_norm,
            "it is another function in evaluation, by its running statistics; switch the model to "
            "evaluation (`model.eval()`), or keep none (`track_running_stats=False`)",
        )
    return group_norm(input, input.shape[1], weight, bias, eps)


@rule(F.local_response_norm, ulps=None)
def local_response_norm(
    input: Interval, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Interval:
    """A quotient as PyTorch computes it, of two intervals that are taken as independent."""
    bound_pass = input.bound_pass
    places = square(input).within(bound_pass).reshape(*input.shape[:2], -1).unsqueeze(1)
    padded = F.pad(places, (0, 0, size // 2, (size - 1) // 2))
    squares = F.avg_pool2d(padded, (size, 1), stride=1).reshape(input.shape)
    base = add(mul(squares, alpha).within(bound_pass), k).within(bound_pass)
    return div(input, power(base, beta).within(bound_pass))
