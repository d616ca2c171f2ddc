"""Passing a box through a model, and the clean pass that sets its batch statistics."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import acert.bounds.rules  # noqa: F401  fills the rule table
from acert.bounds.checks import check_finite_float, check_model, check_unwrapped
from acert.bounds.interval import BatchStatistics, BoundPass, Interval, intervals_in
from acert.bounds.refusals import NO_RULE
from acert.bounds.rounding import HALVES
from acert.bounds.substitution import called_with, copied_buffers, fixed_parameters, other_buffers
from acert.errors import InvalidInput, UnsupportedOperation
from acert.processes import Part

__all__ = ["Statistics", "clean_pass", "evaluation_logits", "interval_bounds", "propagate"]

Statistics = tuple[BatchStatistics, ...]

_ADD_A_RULE = (
    ". acert.register_rule(function, rule, ulps=...) adds a rule: see docs/adding-a-layer.md"
)


def interval_bounds(
    model: nn.Module, lower: Tensor, upper: Tensor, *, statistics: Statistics | None = None
) -> Interval:
    """Bounds of the model's output for every input in the box (Eqs. 16-19).

    `lower` and `upper` have the shape of the model's input; their dtype is the one computed
    in. A model whose batch norm is in training needs the `statistics` of `clean_pass`. The
    model is left as it was. Rounding is not covered: `certified_radius` does that.

    >>> layer = nn.Linear(3, 1)
    >>> _ = nn.init.ones_(layer.weight), nn.init.constant_(layer.bias, 2.0)
    >>> x = torch.tensor([[1.0, 2.0, 3.0]])
    >>> bounds = interval_bounds(layer, x - 1, x + 1)
    >>> bounds.lower.item(), bounds.upper.item()
    (5.0, 11.0)
    """
    if not torch.compiler.is_compiling():
        _check_box(model, lower, upper)
    return propagate(model, Interval(lower, upper).within(BoundPass(statistics=statistics)))


def propagate(model: nn.Module, box: Interval) -> Interval:
    """The model's output for the box; checks nothing, so that a compiled step can call it."""
    # Models count batches and the like in buffers: a bound pass writes to copies.
    if torch.compiler.is_compiling():  # no traceback to read there
        buffers = copied_buffers(model)
        with _Everywhere(), _recurrent(model, box):
            return called_with(model, buffers, box) if buffers else model(box)  # type: ignore[no-any-return]
    check_unwrapped(model)
    try:
        with _as_written(), other_buffers(model), _recurrent(model, box):
            output = model(box)
    except (UnsupportedOperation, TypeError, AttributeError) as error:
        if not isinstance(error, UnsupportedOperation) and "Interval" not in str(error):
            raise
        where = _module_path(model, error.__traceback__)
        advice = _ADD_A_RULE if str(error).endswith(NO_RULE) else ""
        raise UnsupportedOperation(f"{error} (in {where}){advice}") from error
    except ValueError as error:
        if not str(error).startswith(("RNN input", "input must have the type")):
            raise
        where = _module_path(model, error.__traceback__)
        reason = "a recurrent layer for inputs of another dtype must be one of the model's modules"
        raise UnsupportedOperation(f"{reason} (in {where})") from error
    if not isinstance(output, Interval):
        raise UnsupportedOperation(
            f"the model returned {type(output).__name__} for an interval: its output must be one "
            "tensor that depends on its input through supported operations"
        )
    if output.overwritten:
        raise UnsupportedOperation(
            "the model returned a tensor that was overwritten in place through another view"
        )
    bound_pass = box.bound_pass
    if bound_pass.used_statistics != len(bound_pass.statistics or ()):
        raise InvalidInput(
            f"`statistics` must come from a clean pass of the same model in the same mode; got "
            f"{len(bound_pass.statistics or ())} entries, used {bound_pass.used_statistics}"
        )
    return output


def _as_written() -> AbstractContextManager[object]:
    """Parts of a model that were compiled by themselves are run as they were written.

    To compile them for intervals would come to nothing, and to an end after a few shapes.
    """
    # Nothing was compiled before the compiler was loaded, which takes a second.
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else nullcontext()


def _recurrent(model: nn.Module, box: Interval) -> AbstractContextManager[object]:
    """What lets recurrent layers take a box of another dtype than theirs, if there are any."""
    if torch.compiler.is_dynamo_compiling():  # no mode is asked for a dtype there
        return nullcontext()
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    if all(layer._flat_weights[0].dtype == box.dtype for layer in layers):  # type: ignore[union-attr]
        return nullcontext()
    return _Recurrent(layers, box.dtype)


# A new object each time it is asked for, but equal.
_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]


class _Recurrent(TorchFunctionMode):
    """Tells recurrent layers that their weights have the dtype of the box.

    Alone among PyTorch's layers they compare it with that of their input and raise, before they
    call what has a rule, and a proof sends a float64 box through float32 layers. The rules convert
    weights themselves. An interval cannot know who asks for its dtype, and a layer that is lent
    other weights or another check would have to get its own back. A mode changes no module, is seen
    by no other thread, and ends with the pass. It asks each layer for its weights anew: those with
    a parametrization are other tensors in each call.
    """

    def __init__(self, layers: list[nn.RNNBase], dtype: torch.dtype) -> None:
        super().__init__()
        self.layers, self.dtype = layers, dtype
        self.last = dtype  # asked for: of a box itself, or of a constant whose state is a box

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func == _DTYPE:
            weights = any(args[0] is layer._flat_weights[0] for layer in self.layers)
            if weights and self.last == self.dtype:
                return self.dtype
            self.last = result
        return result


class _Everywhere(TorchFunctionMode):
    """Lets torch.compile see the intervals in a tuple, as in `torch.cat((x, y))`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(True for _ in intervals_in((*args, *kwargs.values()))):
            return Interval.__torch_function__(func, types, args, kwargs)
        return func(*args, **kwargs)


def clean_pass(
    model: nn.Module, images: Tensor, *, part: Part | None = None, quick: bool = False
) -> tuple[Tensor, Statistics]:
    """The model's logits, and the statistics of each batch norm call that used the batch's own.

    The only call that moves running statistics, by PyTorch's own rule; bound passes of the
    same step take the statistics, with gradient through them. Where the images are one
    process's `part` of a batch, the statistics are those of the whole. `quick` takes less time on
    a CPU, for figures equal to rounding.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> logits, statistics = clean_pass(model, torch.rand(8, 2))
    >>> len(statistics)
    1
    """
    if not torch.compiler.is_compiling():
        check_model(model, images)
        if not isinstance(images, Tensor):
            raise InvalidInput(f"`images` must be a tensor; got {type(images).__name__}")
    recorder = _Recorder(part, quick=quick)
    with recorder:
        logits = model(images.clone())  # one that works in place is not to change the batch
    return logits, tuple(recorder.statistics)


class _Recorder(TorchFunctionMode):
    """Notes the batch statistics of every `F.batch_norm` that normalises by them."""

    def __init__(self, part: Part | None = None, *, quick: bool = False) -> None:
        super().__init__()
        self.part, self.quick = part, quick
        self.statistics: list[BatchStatistics] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm and _training(*args, **kwargs):
            input = args[0] if args else kwargs["input"]
            dims = [dim for dim in range(input.ndim) if dim != 1]
            # Half precision would round the statistics themselves.
            wide = input.float() if input.dtype in HALVES else input
            several = wide.numel() > wide.shape[1]  # PyTorch refuses one value a channel
            quick = self.quick and several and not (wide.is_cuda or torch.compiler.is_compiling())
            if quick or self.part is not None:
                return self._batch_norm(wide, dims, *args[1:], **kwargs).to(input.dtype)
            variance, mean = torch.var_mean(wide, dims, correction=0)
            self.statistics.append(BatchStatistics(mean, variance))
        return func(*args, **kwargs)

    def _batch_norm(
        self,
        input: Tensor,
        dims: list[int],
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """`F.batch_norm` by statistics that are computed once, those of the whole batch."""
        share = 1.0
        if self.part is None:
            output, mean, variance = _BatchNorm.apply(input, weight, bias, dims, eps)  # type: ignore[no-untyped-call]
        else:
            share, shape = self.part.share, (1, -1, *[1] * (input.ndim - 2))
            mean = self.part.mean(input, dims)
            centered = input - mean.view(shape)
            variance = self.part.mean(centered.square(), dims)
            output = centered * (variance + eps).rsqrt().view(shape)
            output = output if weight is None else output * weight.view(shape)
            output = output if bias is None else output + bias.view(shape)
        self.statistics.append(BatchStatistics(mean, variance))
        if running_mean is not None and running_var is not None:
            count = round(input.numel() / len(mean) / share)
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean), momentum)
                running_var.lerp_((variance * (count / (count - 1))).to(running_var), momentum)
        return output  # type: ignore[no-any-return]


class _BatchNorm(torch.autograd.Function):
    """Batch norm with its mean and variance, which carry gradient too.

    On a CPU a quarter of the time of `F.batch_norm`, whose sums are slow.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, dims: list[int],
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        mean, variance = _moments(input, dims)
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.eps = eps
        return F.batch_norm(input, mean, variance, weight, bias, eps=eps), mean, variance

    @staticmethod
    def backward(
        ctx: Any, by_output: Tensor, by_mean: Tensor, by_variance: Tensor
    ) -> tuple[Tensor | None, ...]:
        input, weight, mean, variance = ctx.saved_tensors
        inverse = (variance.detach() + ctx.eps).rsqrt()
        wanted = [True, *ctx.needs_input_grad[1:3]]
        # Detached: second derivatives of this know that both depend on the input.
        gradient, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
            by_output, input, weight, None, None, mean.detach(), inverse, True, ctx.eps, wanted
        )
        share = mean.numel() / input.numel()
        slope = 2 * share * by_variance
        shape = (-1, *[1] * (input.ndim - 2))
        offset = share * by_mean - slope * mean
        gradient.addcmul_(input, slope.view(shape)).add_(offset.view(shape))
        return gradient, by_weight, by_bias, None, None


def _moments(input: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, with few looks at the memory."""
    if input.ndim > 2 and input.is_contiguous():
        # Group norm finds both for each channel of each sample in one look, in no other layout. It
        # writes its own result as well, but that costs less than another look. Flat, because one
        # channel is contiguous with channels last too, where group norm lets squares cancel.
        flat = input.flatten(2)
        samples, channels, pixels = flat.shape
        _, means, inverses = torch.native_group_norm(
            flat, None, None, samples, channels, pixels, channels, 0.0
        )
        mean = means.mean(0)
        return mean, (inverses.pow(-2) + (means - mean).square()).mean(0)
    mean = input.mean(dims, keepdim=True)
    return mean.flatten(), (input - mean).square_().mean(dims)


class _Evaluation(TorchFunctionMode):
    """Lets batch norm use its running statistics and dropout do nothing, whatever the mode."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        # A batch norm that keeps no running statistics uses the batch's in evaluation too.
        mean = args[1] if len(args) > 1 else kwargs.get("running_mean")
        keeps_none = func is F.batch_norm and mean is None
        if func in _TRAINING_AT and not keeps_none:
            # What eager PyTorch hands on here is by keyword; when compiled, as it was called.
            at = _TRAINING_AT[func]
            if func in _RECURRENT and isinstance(args[4], bool):
                at += 1  # packed sequences come with their lengths
            args = args if len(args) <= at else (*args[:at], False, *args[at + 1 :])
            kwargs = kwargs if len(args) > at else kwargs | {"training": False}
        return func(*args, **kwargs)


_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
# Where the argument `training` stands. Of recurrent layers it is the share that is dropped, where
# False is 0: cuDNN has gradients only for those in training.
_TRAINING_AT: dict[Any, int] = {
    F.batch_norm: 5,
    F.multi_head_attention_forward: 13,
    **dict.fromkeys(_RECURRENT, 5),
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout), 2),
    F.feature_alpha_dropout: 2,
}


def evaluation_logits(model: nn.Module, images: Tensor, *, fixed: bool = False) -> Tensor:
    """The logits that the model would give in evaluation, in whatever mode it is left.

    With `fixed` no gradient goes into its parameters.
    """
    tensors = copied_buffers(model)
    if fixed:
        tensors |= fixed_parameters(model)
    with _Evaluation():
        logits: Tensor = called_with(model, tensors, images)
    return logits


def _training(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    *_: Any,
    **__: Any,
) -> bool:
    return training


def _module_path(model: nn.Module, traceback: TracebackType | None) -> str:
    """Path and type of the innermost module on the way to the error."""
    names = {id(module): name for name, module in model.named_modules()}
    where = f"the model, {type(model).__name__}"
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(id(module)):
            where = f"module `{names[id(module)]}`, {type(module).__name__}"
        traceback = traceback.tb_next
    return where


def _check_box(model: nn.Module, lower: Tensor, upper: Tensor) -> None:
    check_model(model, lower)
    check_finite_float("lower", lower)
    check_finite_float("upper", upper)
    if lower.device != upper.device:
        raise InvalidInput(
            f"`lower` and `upper` must be on one device; got {lower.device} and {upper.device}"
        )
    if lower.shape == upper.shape and not bool((lower <= upper).all()):
        raise InvalidInput("`lower` must nowhere exceed `upper`; got a box that is empty")
