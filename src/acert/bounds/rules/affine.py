"""Affine operations (Eqs. 16-17): the center goes through W, the radius through |W|.

Rounding-safe form: before the operation the radius grows by g(|c| + r), which pays for the
center's rounding and for the network's own; after it g|b| is added and the radius is raised
by its own rounding. No further convolution is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acert.bounds.bound_pass import versions
from acert.bounds.interval import Affine, Interval, copied
from acert.bounds.pending import Convolution, Stored
from acert.bounds.refusals import refuse
from acert.bounds.rounding import HALVES, own_gamma
from acert.bounds.table import rule

Map = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# Patches with as few numbers, those of images: cuDNN has slow kernels only.
_FEW = 32
_PIXELS = 2**21  # of a batch; a gradient keeps the patches of more, 32 numbers each, no longer
_PATCHES = 2**23  # bytes of patches that a convolution writes down at a time


def affine(
    input: Interval,
    operation: Map,
    weight: Tensor,
    bias: Tensor | None,
    *,
    summands: int,
    summed_dims: tuple[int, ...],
    later: bool = False,
    channels_second: bool = False,
) -> tuple[Interval, Tensor, Tensor | None]:
    """Bounds of `operation(x, weight, bias)`, its weight, and the absolute error for underflow.

    `operation` is linear in x, and each of its results adds `summands` products of elements
    that lie in one slice along `summed_dims`. A `later` one waits for a batch norm;
    `channels_second` says that its channels are where a batch norm looks for them. Rounding-safe,
    the weight is a copy: what is proven holds whatever the model does to its parameters later on.
    """
    lowered = torch.is_autocast_enabled(weight.device.type)
    center, radius = input.operands() if lowered else input.as_ball()
    dtype = input.dtype
    if input.bound_pass.observe and input.bound_pass.first_input is None:
        input.bound_pass.first_input = Interval.ball(center, radius)
    bias = None if bias is None else bias.to(dtype)
    rounding = input.rounding
    if rounding is None:
        factor = weight
        if weight.dtype != center.dtype:
            factor = input.bound_pass.once(torch.Tensor.to, weight, center.dtype)
        if later:
            pending = Convolution.called(operation, center, radius, factor, bias, input.bound_pass)
            return Interval.of(pending), weight, None
        if input.bound_pass.fuse and channels_second:
            ball = operation(center, factor, None), operation(radius, factor.abs(), None)
            # A copy, since the model may overwrite its own.
            bias = None if bias is None else bias.clone()
            return Interval.of(Stored(*ball, dtype, torch.is_grad_enabled(), bias)), weight, None
        output = operation(center, factor, bias)
        if input.bound_pass.points:
            spread = torch.zeros_like(output)
        else:
            spread = operation(radius, input.bound_pass.once(torch.abs, factor), None)
        # Autocast makes products in half precision; whatever comes next is not to stay there.
        return Interval.ball(output.to(dtype), spread.to(dtype)), weight, None
    weight, size, largest_weight = input.bound_pass.once(_measured, weight, center.dtype)
    gamma = rounding.gamma(summands)
    magnitude = center.abs().add_(radius)
    reach = magnitude.amax(dim=summed_dims, keepdim=True)
    largest_bias = bias.abs().amax() if bias is not None else weight.new_zeros(())
    error = None if bias is None else gamma * bias.abs()
    radius = operation(torch.add(radius, magnitude, alpha=gamma), size, error)
    underflow = rounding.underflow(summands, largest_weight, reach)
    overflow = summands * largest_weight * reach + largest_bias > rounding.largest
    radius = (radius * (1 + 2 * own_gamma(summands))).add_(underflow)
    radius = radius.masked_fill_(overflow, math.nan)
    return Interval.ball(operation(center, weight, bias), radius), weight, underflow


def _measured(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A copy of the weight, its absolute values and the largest of them."""
    weight = weight.to(dtype, copy=True)
    size = weight.abs()
    return weight, size, size.amax()


@rule(F.linear, ulps=None)
def linear(input: Interval, weight: Tensor, bias: Tensor | None = None) -> Interval:
    if input.rounding is not None and bias is not None:
        bias = bias.to(input.dtype, copy=True)
    output, weight, underflow = affine(
        input, F.linear, weight, bias, summands=weight.shape[-1], summed_dims=(-1,),
        channels_second=input.ndim == 2 and (bias is None or bias.shape == weight.shape[:1]),
    )  # fmt: skip
    lowered = torch.is_autocast_enabled(weight.device.type)
    # A copy, because the model may overwrite the input later on.
    written = tuple(versions((weight, bias)))
    record = Affine(copied(input), weight, bias, underflow, lowered, written)
    object.__setattr__(output, "_affine", record)
    return output


def _convolution(function: Callable[..., Tensor], spatial: int, *, transposed: bool) -> Any:
    def convolution(
        input: Interval, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Interval:
        # `groups` comes fourth after the bias: (stride, padding, dilation | output_padding, ...)
        groups = args[3] if len(args) > 3 else kwargs.get("groups", 1)
        channels = weight.shape[0] // groups if transposed else weight.shape[1]
        batched = input.ndim == spatial + 2
        # cuDNN is off where rounding counts, and PyTorch then takes the samples one by one.
        slow = weight.is_cuda and not torch.backends.cudnn.enabled
        plain = spatial == 2 and not transposed and groups == 1 and batched
        operate = convolution_by_matmul if slow and plain else function
        few = weight[0].numel() <= _FEW and input.numel() <= _PIXELS * input.shape[1]
        if input.bound_pass.fuse and plain and few:
            operate = partial(convolution_by_matmul, multiple=_FEW)
        on_cpu = input.dtype == torch.float64 and not weight.is_cuda and batched and not transposed
        if on_cpu and not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            operate = _in_pieces(function, spatial)
        output, *_ = affine(
            input,
            lambda x, w, b: operate(x, w, b, *args, **kwargs),
            weight,
            bias,
            summands=channels * math.prod(weight.shape[2:]),
            summed_dims=tuple(range(1 if batched else 0, input.ndim)),
            later=input.bound_pass.fold
            and batched
            and not transposed
            and not torch.is_autocast_enabled(weight.device.type),
            channels_second=batched and spatial == 2,
        )
        return output

    return convolution


def _in_pieces(function: Callable[..., Tensor], spatial: int) -> Callable[..., Tensor]:
    """A convolution of few samples at a time.

    PyTorch's own, which a CPU has for float64, writes down the patches of all samples it gets. That
    is more memory than the system leaves to the process, and costs more than the products.
    """

    def convolution(
        input: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        stride = sizes_of(args[0] if args else kwargs.get("stride", 1), spatial)
        results = math.prod(input.shape[2:]) / math.prod(stride)
        patches = input.element_size() * results * weight[0].numel()
        threads = torch.get_num_threads()  # each takes a sample at a time
        size = max(1, int(_PATCHES / patches) // threads) * threads
        parts = [function(part, weight, bias, *args, **kwargs) for part in torch.split(input, size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return convolution


def padded(input: Tensor, padding: int | Sequence[int] | str, spans: Sequence[int]) -> Tensor:
    """The input of a convolution with its zeros; a kernel reaches over `spans` beside its first."""
    if isinstance(padding, str):  # "same" puts the odd element at the end
        before = [span // 2 if padding == "same" else 0 for span in spans]
        after = [span - span // 2 if padding == "same" else 0 for span in spans]
    else:
        before = after = list(sizes_of(padding, len(spans)))
    ends = [end for pair in zip(before, after, strict=True) for end in reversed(pair)]
    return F.pad(input, ends[::-1])


def convolution_by_matmul(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    multiple: int = 1,
) -> Tensor:
    """`torch.conv2d` of one group as one matrix product: sums of products in any precision.

    Zeros make the number of products in a sum a `multiple`.
    """
    (height, width), (down, right) = sizes_of(stride, 2), sizes_of(dilation, 2)
    span = down * (weight.shape[2] - 1), right * (weight.shape[3] - 1)
    # Channels last: a patch is then a few long runs of memory, and the result has that form too.
    input = padded(input, padding, span).contiguous(memory_format=torch.channels_last)
    rows, columns = (
        (size - reach - 1) // step + 1
        for size, reach, step in zip(input.shape[2:], span, (height, width), strict=True)
    )
    # A view of all patches, one row a result; `F.unfold` starts a kernel a sample on CUDA.
    sample, channel, below, beside = input.stride()
    patches = input.as_strided(
        (len(input), rows, columns, *weight.shape[2:], weight.shape[1]),
        (sample, below * height, beside * width, below * down, beside * right, channel),
    )
    factors = weight.permute(2, 3, 1, 0).flatten(0, 2)
    patches = patches.reshape(len(input) * rows * columns, len(factors))
    spare = -len(factors) % multiple
    if spare:
        patches, factors = F.pad(patches, (0, spare)), F.pad(factors, (0, 0, 0, spare))
    output = patches @ factors
    if bias is not None:
        output = output + bias
    return output.view(len(input), rows, columns, len(weight)).permute(0, 3, 1, 2)


for _spatial, _forward, _transposed in (
    (1, torch.conv1d, torch.conv_transpose1d),
    (2, torch.conv2d, torch.conv_transpose2d),
    (3, torch.conv3d, torch.conv_transpose3d),
):
    rule(_forward, ulps=None)(_convolution(_forward, _spatial, transposed=False))
    rule(_transposed, ulps=None)(_convolution(_transposed, _spatial, transposed=True))


def averaged(input: Interval, operation: Callable[[Tensor], Tensor], *, summands: int) -> Interval:
    """Bounds of a sum or mean of `summands` elements: the radius goes the way of the center."""
    center, radius = input.as_ball()
    if input.rounding is not None:
        rounding = input.rounding
        magnitude = center.abs() + radius
        # Partial sums of a mean overflow before the division saves them.
        magnitude = torch.where(summands * magnitude <= rounding.largest, magnitude, math.nan)
        radius = radius + rounding.gamma(summands) * magnitude
        radius = radius + rounding.underflow(summands, 1.0, 1.0)
    output = operation(radius).abs()
    if input.rounding is not None:
        output = output * (1 + 2 * own_gamma(summands)) + input.rounding.underflow(1, 1.0, 1.0)
    return Interval.ball(operation(center), output)


def _average_pool(function: Callable[..., Tensor], spatial: int) -> Any:
    def average_pool(input: Interval, kernel_size: Any, *args: Any, **kwargs: Any) -> Interval:
        window = sizes_of(kernel_size, spatial)
        return averaged(
            input,
            lambda x: function(x, kernel_size, *args, **kwargs),
            summands=math.prod(window),
        )

    return average_pool


def _adaptive_average_pool(function: Callable[..., Tensor], spatial: int) -> Any:
    def adaptive_average_pool(input: Interval, output_size: Any) -> Interval:
        sizes = input.shape[-spatial:]
        wanted = sizes_of(output_size, spatial)
        window = [
            size if out is None else math.ceil(size / out) + 1
            for size, out in zip(sizes, wanted, strict=True)
        ]
        return averaged(input, lambda x: function(x, output_size), summands=math.prod(window))

    return adaptive_average_pool


def sizes_of(size: Any, spatial: int) -> tuple[Any, ...]:
    """One size an axis, where PyTorch takes one for all of them."""
    if not isinstance(size, (tuple, list)):
        return (size,) * spatial
    return tuple(size) if len(size) == spatial else (size[0],) * spatial


rule(F.avg_pool1d, ulps=None)(_average_pool(F.avg_pool1d, 1))
rule(F.avg_pool2d, ulps=None)(_average_pool(F.avg_pool2d, 2))
rule(F.avg_pool3d, ulps=None)(_average_pool(F.avg_pool3d, 3))
rule(F.adaptive_avg_pool1d, ulps=None)(_adaptive_average_pool(F.adaptive_avg_pool1d, 1))
rule(F.adaptive_avg_pool2d, ulps=None)(_adaptive_average_pool(F.adaptive_avg_pool2d, 2))
rule(F.adaptive_avg_pool3d, ulps=None)(_adaptive_average_pool(F.adaptive_avg_pool3d, 3))


def _reduction(function: Callable[..., Tensor]) -> Any:
    def reduction(
        input: Interval,
        dim: Any = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Interval:
        if dtype not in (None, input.dtype):
            refuse(function, f"`dtype` must be that of its input; got {dtype}")
        axes = dim if isinstance(dim, Sequence) else [] if dim is None else [dim]
        axes = axes or range(input.ndim)  # PyTorch takes no axes for all of them
        return averaged(
            input,
            lambda x: function(x, dim=tuple(axes), keepdim=keepdim),
            summands=math.prod([input.shape[axis] for axis in axes]),
        )

    return reduction


rule(torch.sum, torch.Tensor.sum, ulps=None)(_reduction(torch.sum))
rule(torch.mean, torch.Tensor.mean, ulps=None)(_reduction(torch.mean))


def normalization(
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    dtype: torch.dtype,
    ndim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, 1 / deviation, factor and shift of a batch norm, shaped for inputs of `ndim` axes."""
    mean = mean.to(dtype)
    inverse = (variance.to(dtype) + eps).rsqrt()
    factor = torch.ones_like(mean) if weight is None else weight.to(dtype)
    shift = torch.zeros_like(mean) if bias is None else bias.to(dtype)
    shape = (-1, *[1] * (ndim - 2))
    return mean.reshape(shape), inverse.reshape(shape), factor.reshape(shape), shift.reshape(shape)


@rule(F.batch_norm, ulps=None)
def batch_norm(
    input: Interval,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Interval:
    if training:
        statistics = input.bound_pass.next_statistics()
        if statistics is None and running_mean is None:
            refuse(
                F.batch_norm,
                "it keeps no running statistics and normalises by the batch in evaluation too, so "
                "that one sample has no bounds; let it keep them (`track_running_stats=True`)",
            )
        if statistics is None:
            refuse(
                F.batch_norm,
                "it normalises by batch statistics and none were given; switch the model to "
                "evaluation (`model.eval()`), or pass the `statistics` of `acert.clean_pass`",
            )
        mean, variance = statistics
    else:
        assert running_mean is not None and running_var is not None
        mean, variance = running_mean, running_var
    # Unless one of the two is not to be trained.
    if input.stored is not None and input.stored.graded == torch.is_grad_enabled():
        numbers = normalization(mean, variance, weight, bias, eps=eps, dtype=input.dtype, ndim=2)
        return Interval.of(input.stored.scaled(*numbers))
    convolution = input.convolution
    if convolution is not None and convolution.graded != torch.is_grad_enabled():
        convolution = None  # one of the two is not to be trained
    if convolution is not None:
        of_layers = (convolution.weight, convolution.bias, mean, variance, weight, bias)
        scaled, shift = input.bound_pass.once(_folded, *of_layers, eps)
        return Interval.of(convolution._replace(weight=scaled, bias=shift))
    # Products in half precision (autocast) leave the rest in float32.
    dtype = torch.float32 if input.dtype in HALVES else input.dtype
    mean, inverse, factor, shift = normalization(
        mean, variance, weight, bias, eps=eps, dtype=dtype, ndim=input.ndim
    )
    scale = inverse * factor
    center, radius = input.as_ball()
    rounding = input.rounding
    output = ((center - mean) * scale).add_(shift)
    if rounding is None:
        return Interval.ball(output, radius * scale.abs())
    reach = center.abs().add_(radius).add_(mean.abs())
    # Parts that cancel in the result do not cancel in the error.
    magnitude = (reach * scale.abs()).add_(shift.abs())
    radius = rounding.widen(radius * scale.abs(), magnitude, ulps=8)
    # A network may multiply in any order, and each product may overflow or be flushed. The largest
    # of a channel stands for all: this is next to nothing, unless it is the end of all bounds.
    pixels = tuple(range(2, reach.ndim))
    most = reach.amax(pixels, keepdim=True) if pixels else reach
    product = (1 + most) * (1 + inverse) * (1 + factor.abs())
    radius = radius.add_(rounding.underflow(8, 0.0, product))
    smallest = (variance.to(dtype) + eps).reshape(mean.shape)
    usable = (product <= rounding.largest) & (smallest >= rounding.tiny / rounding.unit)
    return Interval.ball(output, radius.masked_fill_(~usable, math.nan))


def _folded(
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    factor: Tensor | None,
    shift: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Weight and bias of a convolution with the batch norm behind it."""
    mean, inverse, factor, shift = normalization(
        mean, variance, factor, shift, eps=eps, dtype=weight.dtype, ndim=2
    )
    scale = inverse * factor
    offset = -mean if bias is None else bias - mean
    return weight * scale.view(-1, *[1] * (weight.ndim - 1)), offset * scale + shift
