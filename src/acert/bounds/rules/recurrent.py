"""Recurrent layers and their cells: `nn.RNN`, `nn.LSTM`, `nn.GRU`, step by step.

Each step sums over its input and its state, bends the sums by sigmoid or tanh, and multiplies or
mixes what comes out. Input and state count as independent, and so do the gates of a step. Kernels
add up all of a gate in any order, biases among it, so that it is bounded as one sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acert.bounds.interval import Interval, intervals_in
from acert.bounds.refusals import refuse
from acert.bounds.rules.affine import affine
from acert.bounds.rules.arithmetic import add, mul
from acert.bounds.rules.elementwise import increasing, relu
from acert.bounds.rules.shape import ends_of
from acert.bounds.table import Function, rule

Part = Interval | Tensor
State = tuple[Interval, ...]  # what a step hands to the next; the hidden state comes first
Step = Callable[[Interval, State], State]

# Fused kernels have a sigmoid and a tanh of their own, good to a few ulps of 1, near 0 too.
_CURVE_ULPS = 8


def _columns(*parts: Tensor | None) -> Tensor:
    """Weights and biases side by side, those that there are."""
    return torch.cat([x.unsqueeze(1) if x.ndim == 1 else x for x in parts if x is not None], 1)


def _sum(weight: Tensor, *inputs: Interval) -> Interval:
    """All of W x + U h + b + d as one sum; biases are products with 1, as they may cancel."""
    bound_pass = inputs[0].bound_pass
    balls = [input.as_ball() for input in inputs]
    centers, radii = ([ball[place] for ball in balls] for place in (0, 1))
    biases = weight.shape[1] - sum(center.shape[-1] for center in centers)
    room = (*centers[0].shape[:-1], biases)
    center = torch.cat([*centers, centers[0].new_ones(room)], -1)
    radius = torch.cat([*radii, centers[0].new_zeros(room)], -1)
    output, *_ = affine(
        Interval.ball(center, radius).within(bound_pass),
        F.linear,
        weight,
        None,
        summands=weight.shape[1],
        summed_dims=(-1,),
    )
    return output.within(bound_pass)


def _curve(input: Interval, function: Callable[[Tensor], Tensor]) -> Interval:
    """Bounds of sigmoid or tanh inside of a kernel."""
    output = increasing(input, function).within(input.bound_pass)
    rounding = input.rounding
    if rounding is None:
        return output
    center, radius = output.as_ball()
    size = output.magnitude.clamp(min=1.0)
    radius = rounding.widen(radius, size, ulps=_CURVE_ULPS)
    return Interval.ball(center, radius).within(input.bound_pass)


def _gates(sums: Interval, count: int) -> list[Interval]:
    """The sums of each gate, which lie one behind the other."""
    parts = [
        sums.map(lambda x, part=part: x.chunk(count, -1)[part])  # type: ignore[misc]
        for part in range(count)
    ]
    return [part.within(sums.bound_pass) for part in parts]


def _product(input: Interval, other: Interval) -> Interval:
    return mul(input, other).within(input.bound_pass)


def _total(input: Interval, other: Interval) -> Interval:
    return add(input, other).within(input.bound_pass)


def _started(total: Interval, first: Interval, summands: int) -> Interval:
    """The total with what is lost where a kernel starts the sum with `first` and adds the rest."""
    rounding = total.rounding
    if rounding is None:
        return total
    center, radius = total.as_ball()
    radius = radius + 2 * rounding.gamma(summands) * first.magnitude
    return Interval.ball(center, radius).within(total.bound_pass)


def _mixture(share: Interval, new: Interval, old: Interval) -> Interval:
    """(1 - z) n + z h: rises with n and with h, and is linear in z, so z is at either end."""
    rounding, bound_pass = share.rounding, share.bound_pass
    lower = torch.minimum(*(torch.lerp(new.lower, old.lower, end) for end in share.ends()))
    upper = torch.maximum(*(torch.lerp(new.upper, old.upper, end) for end in share.ends()))
    output = Interval(lower, upper).within(bound_pass)
    if rounding is None:
        return output
    # As (1 - z) n + z h, n + z (h - n) or h + (1 - z)(n - h) it is off by less than 8 units of
    # |n| + |h|. A z beyond 0 or 1, by the ulps of its curve, moves it by as much again, and our
    # ends once more: not cut off there, because a runtime may make a number of NaN by that.
    sizes = new.magnitude, old.magnitude
    center, radius = output.as_ball()
    radius = rounding.widen(radius, sizes[0] + sizes[1], ulps=4 * _CURVE_ULPS)
    return Interval.ball(center, radius + rounding.underflow(64, *sizes)).within(bound_pass)


def _lstm(
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    w_hr: Tensor | None = None,
) -> Step:
    weight = _columns(w_ih, w_hh, b_ih, b_hh)

    def step(input: Interval, state: State) -> State:
        hidden, cell = state
        sums = _gates(_sum(weight, input, hidden), 4)
        curves = (torch.sigmoid, torch.sigmoid, torch.tanh, torch.sigmoid)
        enter, keep, new, leave = map(_curve, sums, curves)
        cell = _total(_product(keep, cell), _product(enter, new))
        hidden = _product(leave, _curve(cell, torch.tanh))
        return hidden if w_hr is None else _sum(w_hr, hidden), cell

    return step


def _gru(
    w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Step:
    last = 2 * w_hh.shape[1]  # the rows of the new state; those of its two gates come first
    parts = [(None, None) if x is None else (x[:last], x[last:]) for x in (w_ih, w_hh, b_ih, b_hh)]
    (gates_ih, new_ih), (gates_hh, new_hh), (shift_ih, new_b_ih), (shift_hh, new_b_hh) = parts
    weight = _columns(gates_ih, gates_hh, shift_ih, shift_hh)
    by_input, by_hidden = _columns(new_ih, new_b_ih), _columns(new_hh, new_b_hh)

    def step(input: Interval, state: State) -> State:
        (hidden,) = state
        sums = _gates(_sum(weight, input, hidden), 2)
        reset, update = (_curve(part, torch.sigmoid) for part in sums)
        recalled = _product(reset, _sum(by_hidden, hidden))
        total = _started(_total(_sum(by_input, input), recalled), recalled, by_input.shape[1])
        return (_mixture(update, _curve(total, torch.tanh), hidden),)

    return step


def _rnn(activation: Callable[[Interval], Interval]) -> Callable[..., Step]:
    def cell(
        w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Step:
        weight = _columns(w_ih, w_hh, b_ih, b_hh)

        def step(input: Interval, state: State) -> State:
            return (activation(_sum(weight, input, *state)).within(input.bound_pass),)

        return step

    return cell


_CELLS: dict[str, Callable[..., Step]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _rnn(lambda x: _curve(x, torch.tanh)),
    "rnn_relu": _rnn(relu),
}


def _intervals(*parts: Part) -> list[Interval]:
    """The parts, a constant as an interval of the same pass that holds it as the network does."""
    like = next(intervals_in(parts))
    found = [
        part if isinstance(part, Interval) else Interval(*(ends[0] for ends in ends_of(part, like)))
        for part in parts
    ]
    return [part.within(like.bound_pass) for part in found]


def _refuse_record(like: Interval, function: Function) -> None:
    """Refuses a pass that CROWN is to walk back, before the model goes on to other refusals."""
    if like.bound_pass.record:
        refuse(function, 'CROWN has no backward rule for it; `bounds="ibp"` has one')


def _states(hx: Any) -> Sequence[Part]:
    """The states handed in: two of an LSTM, else one alone."""
    return hx if isinstance(hx, (list, tuple)) else (hx,)


def _cell_rule(name: str, function: Function) -> Any:
    def cell(
        input: Part,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        start, *state = _intervals(input, *_states(hx))
        _refuse_record(start, function)
        output = _CELLS[name](w_ih, w_hh, b_ih, b_hh)(start, tuple(state))
        return output if len(output) > 1 else output[0]

    return cell


def _layer_rule(name: str, function: Function) -> Any:
    def layers(
        input: Part,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool = False,
    ) -> tuple[Interval, ...]:
        # Packed, the lengths of the samples come second, and the state behind them.
        if isinstance(hx, Tensor) if name == "lstm" else not isinstance(params, (list, tuple)):
            refuse(
                function, "it must be given padded sequences, not an nn.utils.rnn.PackedSequence"
            )
        if train and dropout > 0 and num_layers > 1:
            refuse(function, "it is random in training; switch the model to evaluation (`eval()`)")
        whole, *states = _intervals(input, *_states(hx))
        _refuse_record(whole, function)
        bound_pass = whole.bound_pass
        if bound_pass.observe and bound_pass.first_input is None:
            bound_pass.first_input = Interval.ball(*whole.as_ball())  # not that with the state
        whole.as_ball()  # once, not for every place
        axis = 1 if batch_first else 0
        inputs = [_at(whole, axis, place) for place in range(whole.shape[axis])]
        directions = 2 if bidirectional else 1
        share = len(params) // (num_layers * directions)
        last: list[State] = []
        for _ in range(num_layers):
            sequences = []
            for backward in range(directions):
                part = len(last)
                w_ih, w_hh, *rest = params[part * share : (part + 1) * share]
                step = _CELLS[name](w_ih, w_hh, *(rest if has_biases else (None, None, *rest)))
                state = tuple(_at(each, 0, part) for each in states)
                outputs = []
                for each in reversed(inputs) if backward else inputs:
                    state = step(each, state)
                    outputs.append(state[0])
                sequences.append(outputs[::-1] if backward else outputs)
                last.append(state)
            inputs = [_joined(torch.cat, places, -1) for places in zip(*sequences, strict=True)]
        ends = [_joined(torch.stack, parts, 0) for parts in zip(*last, strict=True)]
        return _joined(torch.stack, inputs, axis), *ends

    return layers


def _at(input: Interval, axis: int, place: int) -> Interval:
    return input.map(lambda x: x.select(axis, place)).within(input.bound_pass)


def _joined(function: Callable[..., Tensor], parts: Sequence[Interval], axis: int) -> Interval:
    """The parts as one interval; a single one as it is, where nothing is stacked."""
    if len(parts) == 1 and function is torch.cat:
        return parts[0]
    lower, upper = (function(ends, axis) for ends in ends_of(*parts))
    return Interval(lower, upper).within(parts[0].bound_pass)


for _name in _CELLS:
    _function, _cell = getattr(torch, _name), getattr(torch, f"{_name}_cell")
    rule(_function, ulps=None, mixed=True)(_layer_rule(_name, _function))
    rule(_cell, ulps=None, mixed=True)(_cell_rule(_name, _cell))
