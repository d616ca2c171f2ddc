"""Every rule in every argument variant as a small model, and the points that try to break it.

The catalogue is a table: each of its lines is a case, and the line is the model. It is long
because the rules' arguments are many. The rest of the file draws boxes and points for a case,
for the quick tests and the soak alike.
"""

from __future__ import annotations

import copy
import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations

from acert.bounds import BatchStatistics, Interval, Statistics, clean_pass, propagate
from acert.bounds.bound_pass import BoundPass
from acert.bounds.rounding import FLOAT32, REAL, Rounding
from acert.models import Normalize, Residual, cnn7, ibp_init_, mlp, small_cnn, small_resnet

# -- what a case is -------------------------------------------------------------------------


class Apply(nn.Module):
    """`function(x, *constants)`, the constants as buffers."""

    def __init__(self, function: Callable[..., Any], *constants: Tensor) -> None:
        super().__init__()
        self.function = function
        for index, constant in enumerate(constants):
            self.register_buffer(f"constant{index}", constant)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.buffers())


class Twice(nn.Module):
    """Calls one module twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(torch.tanh(self.layer(x)))


class Resized(nn.Module):
    """A transposed convolution that is told its output size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x, output_size=[8, 7])


class Nested(nn.Sequential):
    """A classifier of nested parts; one in-place activation serves twice."""

    def __init__(self) -> None:
        activation = nn.ReLU(inplace=True)
        super().__init__(
            Normalize(0.5, 0.25),
            nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), activation),
            Residual(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))),
            activation,
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 8),
            nn.BatchNorm1d(8),
            nn.SiLU(),
            nn.Linear(8, 3),
        )


class Attending(nn.Module):
    """`nn.MultiheadAttention` called as written, on the input `y`, constants `c` and masks.

    Its output, and its weights if there are any.
    """

    def __init__(self, call: str, **options: Any) -> None:
        super().__init__()
        self.call = eval(f"lambda attend, y, c, later: attend({call})", NAMES)
        self.attention = nn.MultiheadAttention(4, 2, **{"batch_first": True, **options})
        if self.attention.in_proj_bias is not None:  # starts at 0
            nn.init.normal_(self.attention.in_proj_bias)
        self.register_buffer("constant", torch.randn(2, 3, 4))
        self.register_buffer("later", torch.ones(3, 3).triu(1).bool())

    def forward(self, x: Tensor) -> Any:
        first = self.attention.batch_first
        y = x if first else x.transpose(0, 1)
        output, weights = self.call(self.attention, y, self.constant, self.later)
        output = (output if first else output.transpose(0, 1)).flatten(1)
        return output if weights is None else torch.cat([output, weights.flatten(1)], 1)


class Recurring(nn.Module):
    """A recurrent layer called as written, on the input `y` and constant states `h`.

    Its output and its last states, side by side.
    """

    def __init__(self, layer: str, call: str = "layer(y)") -> None:
        super().__init__()
        self.call = eval(f"lambda layer, y, h: {call}", NAMES)
        self.layer = eval(layer, NAMES)
        self.states = nn.Buffer(torch.randn(4, 1, 4))

    def forward(self, x: Tensor) -> Any:
        first = self.layer.batch_first
        y, h = x if first else x.transpose(0, 1), self.states.expand(-1, len(x), -1)
        output, states = self.call(self.layer, y, h)
        output = output if first else output.transpose(0, 1)
        states = states if isinstance(states, tuple) else (states,)
        states = [state.transpose(0, 1).flatten(1) for state in states]
        return torch.cat([output.flatten(1), *states], 1)


class Unrolled(nn.Module):
    """A recurrent cell over the places of its input, its last state from none or a constant one."""

    def __init__(self, cell: str, states: int = 0) -> None:
        super().__init__()
        self.cell, self.count = eval(cell, NAMES), states  # how many of them are constant
        self.states = nn.Buffer(torch.randn(2, 1, 2))

    def forward(self, x: Tensor) -> Any:
        state: Any = None
        if self.count:
            state = tuple(self.states[: self.count].expand(-1, len(x), -1))
            state = state if self.count > 1 else state[0]
        for place in x.unbind(1):
            state = self.cell(place, state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state


def alias(x: Any) -> Any:
    y = x
    y += 1
    return x + y


# What the expressions of the catalogue may name.
NAMES = {
    "torch": torch,
    "math": math,
    "nn": nn,
    "F": F,
    "operator": operator,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "Normalize": Normalize,
    "Nested": Nested,
    "Resized": Resized,
    "Twice": Twice,
    "Attending": Attending,
    "Recurring": Recurring,
    "Unrolled": Unrolled,
    "alias": alias,
    # Neighbours on both axes of which differ by more than centers and radii of a case.
    "apart": torch.tensor([[2.5, -2.5], [-2.5, 2.5], [2.5, -2.5]]).repeat(1, 2),
}


@dataclass(frozen=True)
class Case:
    """A model, the shape of one sample, and its boxes: centers in `around`, radii up to `r`.

    The model is a layer, or what an expression makes of `x` and of `constants`, which are drawn
    in the given shapes. `gap` is the largest share of the bounds' width that no point needs to
    reach: 0 where the rule is exact. `couples` marks models that mix samples; each point is then
    a whole batch. `training` leaves batch norm in training and hands over batch statistics.
    """

    expression: str
    shape: tuple[int, ...]
    around: tuple[float, float] = (-1.5, 1.5)
    r: float = 1.0
    gap: float = 0.0
    couples: bool = False
    training: bool = False
    constants: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        notes = [f"{name} {shape}" for name, shape in {"x": self.shape, **self.constants}.items()]
        notes += [f"around {self.around}"] if self.around != (-1.5, 1.5) else []
        notes += ["training"] if self.training else []
        return f"{self.expression}; {', '.join(notes)}"

    def build(self) -> nn.Module:
        """The model, its weights and constants drawn anew."""
        if not re.search(r"\bx\b", self.expression):
            layer: nn.Module = eval(self.expression, NAMES)
            return layer
        arguments = ", ".join(["x", *self.constants])
        function = eval(f"lambda {arguments}: {self.expression}", NAMES)
        return Apply(function, *(torch.randn(shape) for shape in self.constants.values()))


def cases(shape: tuple[int, ...], table: str, **options: Any) -> list[Case]:
    """A case for each line of `table`."""
    lines = [line.strip() for line in table.splitlines() if line.strip()]
    return [Case(line, shape, **options) for line in lines]


# -- the catalogue --------------------------------------------------------------------------


def linear() -> Iterator[Case]:
    yield from cases((6,), """
        nn.Linear(6, 4)
        nn.Linear(6, 4, bias=False)
        weight_norm(nn.Linear(6, 4))
        spectral_norm(nn.Linear(6, 4))
        orthogonal(nn.Linear(6, 6))
    """)  # fmt: skip
    yield from cases((3, 6), "nn.Linear(6, 4)")
    yield from cases((), "nn.Linear(4, 3)", couples=True)
    yield from cases((6,), """
        F.linear(x, c, d)
        F.linear(input=x, bias=d, weight=c)
        F.linear(x, c)
        x @ c.T
        x.matmul(c.T)
        torch.matmul(x, c.T)
        torch.matmul(input=x, other=c.T)
    """, constants={"c": (4, 6), "d": (4,)})  # fmt: skip
    yield from cases((2, 6), "x @ c", constants={"c": (6, 3)})
    yield from cases((2, 6), """
        torch.matmul(c, x)
        torch.matmul(input=c[None], other=x)
        c @ x
        c.matmul(x)
        torch.matmul(f, x)
        torch.matmul(x, e)
        torch.matmul(x, d)
        x @ d
        torch.bmm(x, d.expand(len(x), -1, -1))
        x.bmm(d.expand(len(x), -1, -1))
        torch.bmm(d.mT.expand(len(x), -1, -1), x.mT)
    """, constants={"c": (3, 2), "d": (1, 6, 4), "e": (6,), "f": (2,)})  # fmt: skip
    yield from cases((6,), """
        torch.mm(x, c)
        torch.mm(input=x, mat2=c)
        x.mm(c)
        torch.addmm(d, x, c)
        torch.addmm(input=e, mat1=x, mat2=c)
        d.addmm(x, c)
    """, constants={"c": (6, 3), "d": (3,), "e": (1, 3)})  # fmt: skip
    yield from cases((4,), "torch.addmm(x, x, c)", constants={"c": (4, 4)}, gap=0.5)
    yield from cases((3, 2), """
        torch.einsum('bij->bi', x)
        torch.einsum('bij -> bji', x)
        torch.einsum('bij,kj->bik', x, c)
        torch.einsum('kj,bij', c, x)
        torch.einsum('bij,j->bi', [x, c[0]])
    """, constants={"c": (4, 2)})  # fmt: skip
    yield from cases((2, 3, 3), """
        torch.einsum('bij,bkj->bik', x[:, 0], x[:, 1])
        torch.einsum('bij,bij->bi', x[:, 0].exp(), x[:, 1])
    """, gap=0.5)  # fmt: skip
    # Two factors of which each takes part in several results, and may change its sign.
    yield from cases((2, 3, 3), """
        torch.matmul(x[:, 0], x[:, 1])
        x[:, 0] @ x[:, 1]
        x[:, 0].matmul(x[:, 1].mT)
        torch.bmm(x[:, 0], x[:, 1])
        x[:, 0].bmm(x[:, 1])
        torch.matmul(x[:, 0].exp(), x[:, 1])
        torch.matmul(-x[:, 0].exp(), x[:, 1])
        torch.matmul(x[:, 0], x[:, 1, :, 0].unsqueeze(-1))
        torch.matmul(x[:, :1], x[:, 1:])
    """, gap=0.5)  # fmt: skip
    yield from cases((3,), """
        torch.matmul(x[0], x[1:].mT)
        torch.matmul(x[1:], x[0])
        torch.matmul(x[0], x[1])
        torch.mm(x[:2], x[1:].mT)
    """, couples=True, gap=0.6)  # fmt: skip


def convolutions(spatial: int) -> Iterator[Case]:
    size, kernel = ((7,), (5, 4), (4, 3, 3))[spatial - 1], (3, 2, 2)[:spatial]
    pair, uneven = (1, 0, 1)[:spatial], (2, 1, 2)[:spatial]
    layer, function = f"nn.Conv{spatial}d(4, 4, {kernel}", f"F.conv{spatial}d"
    yield from cases((4, *size), f"""
        {layer})
        {layer}, bias=False)
        {layer}, stride=2)
        {layer}, padding=1)
        {layer}, dilation=2, padding=2)
        {layer}, groups=2)
        {layer}, groups=4, stride=2, padding=1)
        {layer}, padding="valid")
        {layer}, stride={uneven}, padding={pair})
        nn.Conv{spatial}d(4, 4, 3, padding="same")
        nn.Conv{spatial}d(4, 4, 2, padding="same", dilation=2)
        weight_norm({layer}))
    """)  # fmt: skip
    # A padded element counts twice, with weights that may differ in sign.
    yield from cases((4, *size), f"""
        {layer}, padding=1, padding_mode="reflect")
        {layer}, padding={pair}, padding_mode="replicate")
        {layer}, padding=1, padding_mode="circular", stride=2)
        nn.Conv{spatial}d(4, 4, 3, padding="same", padding_mode="reflect")
        nn.Conv{spatial}d(4, 4, 3, padding="same", padding_mode="circular")
    """, gap=0.5)  # fmt: skip
    yield from cases((4, *size), f"""
        {function}(x, c, d, 1, 1, 1, 2)
        {function}(x, weight=c, padding=1, groups=2)
    """, constants={"c": (4, 2, *kernel), "d": (4,)})  # fmt: skip
    yield from cases(size, f"{layer})", couples=True)  # unbatched: the four boxes are channels


def transposed_convolutions(spatial: int) -> Iterator[Case]:
    size = (3, 3, 2)[:spatial]
    layer, function = f"nn.ConvTranspose{spatial}d(4, 6, 2", f"F.conv_transpose{spatial}d"
    yield from cases((4, *size), f"""
        {layer})
        {layer}, bias=False)
        {layer}, stride=2, padding=1)
        {layer}, stride=2, output_padding=1)
        {layer}, dilation=2)
        {layer}, groups=2)
        {layer}, groups=2, stride=2, padding=1, output_padding=1, dilation=2)
    """)  # fmt: skip
    yield from cases((4, *size), f"""
        {function}(x, c, d, 2, 0, 1, 2, 2)
        {function}(x, weight=c, stride=2, groups=2)
    """, constants={"c": (4, 3, *(2,) * spatial), "d": (6,)})  # fmt: skip
    yield from cases(size, f"{layer})", couples=True)


def normalizations() -> Iterator[Case]:
    for spatial, size in ((1, ()), (1, (5,)), (2, (3, 2)), (3, (2, 3, 2))):
        layer = f"nn.BatchNorm{spatial}d(3"
        for training in (False, True):
            yield from cases((3, *size), f"""
                {layer})
                {layer}, affine=False)
                {layer}, momentum=None)
                {layer}, eps=0.1)
            """, training=training)  # fmt: skip
        yield from cases((3, *size), f"{layer}, track_running_stats=False)", training=True)
    yield from cases((3, 4), """
        F.batch_norm(x, c, d.abs() + 0.5)
        F.batch_norm(x, c, d.abs() + 0.5, e, f)
        F.batch_norm(x, c, d.abs() + 0.5, e, f, False, 0.2, 0.3)
        F.batch_norm(x, c, d.abs() + 0.5, bias=f, weight=e, eps=0.5)
    """, constants=dict.fromkeys("cdef", (3,)))  # fmt: skip
    # Elements of a group move each other's mean and variance: no point reaches all bounds at once.
    yield from cases((6, 4), """
        nn.LayerNorm(4, eps=0.5)
        nn.LayerNorm((6, 4))
        nn.LayerNorm(4, elementwise_affine=False, eps=0.5)
        F.layer_norm(x, (4,), c[0], d[0], 0.5)
        torch.layer_norm(x, (6, 4), weight=c, bias=d)
        nn.GroupNorm(2, 6)
        nn.GroupNorm(3, 6, affine=False)
        nn.GroupNorm(1, 6, eps=0.5)
        nn.GroupNorm(6, 6, eps=0.5)
        F.group_norm(x, 2, c[:, 0], d[:, 0], 0.5)
        F.group_norm(x, num_groups=3, bias=d[:, 0])
        torch.group_norm(x, 2, weight=c[:, 0])
        nn.InstanceNorm1d(6, eps=0.5)
        nn.InstanceNorm1d(6, affine=True, eps=0.5)
        F.instance_norm(x, weight=c[:, 0], eps=0.5)
    """, constants={"c": (6, 4), "d": (6, 4)}, r=0.15, gap=0.9)  # fmt: skip
    yield from cases((6, 4), """
        nn.RMSNorm(4)
        nn.RMSNorm((6, 4), eps=0.5)
        nn.RMSNorm(4, elementwise_affine=False, eps=1e-3)
        F.rms_norm(x, (4,), c, 0.1)
        torch.rms_norm(x, (4,), weight=c)
        F.normalize(x)
        F.normalize(x, dim=-1)
        F.normalize(x, p=2.0, dim=2, eps=0.7)
    """, constants={"c": (4,)}, gap=0.4)  # fmt: skip
    yield from cases((6, 4), """
        F.cosine_similarity(x, c, dim=-1)
        F.cosine_similarity(x, d[:, None])
        nn.functional.cosine_similarity(d[:, None].expand(6, 4), x, 1, 0.5)
        torch.cosine_similarity(x1=x[:, :, None], x2=e, dim=3, eps=1e-6)
    """, constants={"c": (4,), "d": (6,), "e": (3, 4)}, r=0.3, gap=0.95)  # fmt: skip
    yield from cases((6, 4), """
        nn.PairwiseDistance()(x, c)
        F.pairwise_distance(x[:, :, None], e, 1.0, eps=0.1)
        torch.pairwise_distance(x1=c, x2=x, p=math.inf, keepdim=True)
        F.pairwise_distance(x[:, :3], x[:, 3:])
    """, constants={"c": (4,), "e": (3, 4)}, gap=1e-3)  # fmt: skip
    yield from cases((2, 3, 4), "nn.InstanceNorm2d(2)\nnn.GroupNorm(2, 2)", r=0.15, gap=0.9)
    yield from cases((2, 2, 3, 2), "nn.InstanceNorm3d(2)", r=0.15, gap=0.9)
    yield from cases((6, 4), "nn.InstanceNorm1d(6, track_running_stats=True)")
    yield from cases((3, 2, 2), """
        Normalize(0.3, 0.7)
        Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.1])
    """)  # fmt: skip
    yield from cases((3,), "Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.1])")


def activations() -> Iterator[Case]:
    yield from cases((2, 2, 3), """
        nn.ReLU()
        nn.ReLU(inplace=True)
        nn.LeakyReLU()
        nn.LeakyReLU(0.3, inplace=True)
        nn.LeakyReLU(2.5)
        nn.LeakyReLU(0.0)
        nn.ELU()
        nn.ELU(0.3, inplace=True)
        nn.ELU(3.0)
        nn.SELU()
        nn.SELU(inplace=True)
        nn.CELU()
        nn.CELU(0.3, inplace=True)
        nn.CELU(3.0)
        nn.Hardsigmoid()
        nn.Hardsigmoid(inplace=True)
        nn.Softsign()
        nn.LogSigmoid()
        torch.erf(x)
        nn.Hardtanh()
        nn.Hardtanh(-0.3, 0.7)
        nn.Hardtanh(-0.3, 0.7, inplace=True)
        nn.Sigmoid()
        nn.Tanh()
        nn.Softplus()
        nn.Softplus(beta=3.0)
        nn.Softplus(threshold=1000.0)
        nn.Softplus(threshold=-1000.0)
        nn.Identity()
        nn.Dropout(0.5)
        nn.Dropout(0.5, inplace=True)
        nn.Dropout2d(0.5)
        nn.AlphaDropout(0.5)
        nn.FeatureAlphaDropout(0.5)
    """)  # fmt: skip
    yield from cases((4, 3), "nn.Dropout1d(0.5)")
    yield from cases((2, 2, 2, 3), "nn.Dropout3d(0.5)")
    for around, r, table in (
        ((-1.0, 7.0), 4.0, "nn.ReLU6()\nnn.ReLU6(inplace=True)\nF.relu6(x)"),
        (
            (-40.0, 40.0),
            30.0,
            "nn.Sigmoid()\nnn.Softplus(beta=0.1)\nnn.Softsign()\nnn.LogSigmoid()",
        ),
        (
            (-12.0, 12.0),
            9.0,
            "nn.Tanh()\nnn.Softplus(beta=0.3)\nnn.ELU(2.0)\nnn.SELU()\nnn.CELU(2.0)",
        ),
        ((-6.0, 6.0), 4.0, "nn.Hardsigmoid()"),
        (
            (1.0, 3.0),
            0.9,
            "torch.sqrt(x)\ntorch.rsqrt(x)\ntorch.log(x)\n1 / x\ntorch.reciprocal(x)",
        ),
    ):
        yield from cases((5,), table, around=around, r=r)
    # PyTorch's softplus falls at the threshold; its rule allows for the whole fall at once.
    yield from cases((5,), """
        nn.Softplus(threshold=0.5)
        nn.Softplus(beta=2.0, threshold=-1.0)
    """, gap=1.0)  # fmt: skip
    yield from cases((5,), "nn.Softplus()", around=(18.0, 22.0), r=2.0, gap=1e-6)
    # These have a lowest point inside the box, which points only come near.
    yield from cases(
        (5,), "nn.LeakyReLU(-0.4)\nnn.ELU(-0.7)\nabs(x)\nx.abs()\ntorch.abs(x)", gap=1e-2
    )
    dip = """
        nn.GELU()
        nn.GELU("tanh")
        nn.SiLU()
        nn.SiLU(inplace=True)
        nn.Mish()
        nn.Mish(inplace=True)
        F.mish(x)
        F.gelu(x)
        F.gelu(x, approximate="tanh")
        F.silu(x)
    """
    for around, r in (
        ((-1.5, 1.5), 1.0),
        ((-9.0, -1.0), 3.0),
        ((-0.8, -0.7), 0.1),
        ((-1.3, -1.25), 0.1),
        ((-1.25, -1.15), 0.1),
        ((-110.0, -80.0), 20.0),
    ):
        yield from cases((5,), dip, around=around, r=r, gap=1e-4)
    dip = "nn.Hardswish()\nnn.Hardswish(inplace=True)\nF.hardswish(x)"
    for around, r in (((-1.5, 1.5), 1.0), ((-4.0, 4.0), 3.0), ((-1.6, -1.4), 0.2)):
        yield from cases((5,), dip, around=around, r=r, gap=1e-4)
    yield from cases((2, 3), """
        F.relu(x)
        F.relu(x, inplace=True)
        F.relu_(x)
        torch.relu(x)
        torch.relu_(x)
        x.relu()
        x.relu_()
        F.leaky_relu(x, 0.3)
        F.leaky_relu(x, negative_slope=0.3, inplace=True)
        F.leaky_relu_(x, 0.3)
        F.elu(x, 0.5)
        F.elu_(x, alpha=0.5)
        F.selu(x)
        torch.selu(x)
        torch.selu_(x)
        F.celu(x, 0.5)
        torch.celu(x, alpha=0.5)
        torch.celu_(x)
        F.hardsigmoid(x)
        F.softsign(x)
        F.logsigmoid(x)
        x.erf()
        x.erf_()
        torch.erf_(x)
        torch.special.erf(x)
        torch.sqrt(x + 3)
        (x + 3).sqrt()
        torch.sqrt_(x + 3)
        (x + 3).sqrt_()
        torch.rsqrt(x + 3)
        (x + 3).rsqrt()
        torch.rsqrt_(x + 3)
        (x + 3).rsqrt_()
        (x + 3) ** 0.5
        torch.pow(x + 3, -0.5)
        torch.log(x + 3)
        (x + 3).log()
        torch.log_(x + 3)
        (x + 3).log_()
        F.hardtanh(x)
        F.hardtanh(x, -0.1, 0.3)
        F.hardtanh_(x, min_val=-0.1, max_val=0.3)
        F.sigmoid(x)
        torch.sigmoid(x)
        torch.sigmoid_(x)
        x.sigmoid()
        x.sigmoid_()
        torch.special.expit(x)
        F.tanh(x)
        torch.tanh(x)
        torch.tanh_(x)
        x.tanh()
        x.tanh_()
        F.softplus(x)
        F.softplus(x, beta=2, threshold=30)
        torch.clamp(x, -0.1, 0.3)
        torch.clamp_(x, max=0.3)
        x.clamp(min=0.1)
        x.clamp(max=0.1)
        x.clamp(-0.7)
        x.clamp(c - 1, c + 0.3)
        x.clamp(min=c)
        x.clamp(max=c)
        x.clamp_(-0.1, 0.3)
        torch.clip(x, -0.1, 0.3)
        torch.clip_(x, -0.1, 0.3)
        x.clip(max=1 / 3)
        x.clip_(-0.1, 0.3)
        torch.clamp_min(x, 0.1)
        torch.clamp_min_(x, 0.1)
        x.clamp_min(0.1)
        x.clamp_min_(0.1)
        torch.clamp_max(x, 0.1)
        torch.clamp_max_(x, 0.1)
        x.clamp_max(0.1)
        x.clamp_max_(0.1)
        F.dropout(x, 0.3, training=False)
        F.dropout(x, 0.0)
    """, constants={"c": (3,)})  # fmt: skip
    yield from cases((3,), "x.clamp(min=c)", constants={"c": (2, 4, 3)}, couples=True)
    yield from cases((3, 2), """
        nn.PReLU()
        nn.PReLU(3, init=2.5)
        F.prelu(x, c.abs())
        torch.prelu(input=x, weight=c[:1].abs())
        x.prelu(c.abs())
        torch.exp(x)
        x.exp()
        torch.exp_(x)
        x.exp_()
        x ** 3
        x ** 1
        x ** 0
        x.pow(5.0)
        torch.pow(x, 7)
        torch.pow(input=x, exponent=3)
        operator.ipow(x, 3)
        x.pow_(3)
    """, constants={"c": (3,)})  # fmt: skip
    yield from cases((3,), "nn.PReLU(3, init=-0.4)", gap=1e-2)
    yield from cases((5,), "torch.exp(x)", around=(-60.0, 5.0), r=30.0)
    yield from cases((3, 2), """
        F.prelu(x, c)
        x ** 2
        x ** 4
        x.square()
        torch.square(x)
        torch.square_(x)
        x.square_()
    """, constants={"c": (3,)}, gap=1e-2)  # fmt: skip


def steps() -> Iterator[Case]:
    yield from cases((2, 4), """
        torch.sign(x)
        x.sign()
        x.sign_()
        torch.sgn(x)
        x.sgn()
        x.sgn_()
        nn.Threshold(0.3, -1.0)
        nn.Threshold(0.3, 0.1, inplace=True)
        F.threshold(x, 0.1, 0.1)
        F.threshold_(x, -0.1, -0.2)
        torch.threshold(x, 0.0, 0.0)
        nn.Hardshrink()
        F.hardshrink(x, 0.0)
        torch.hardshrink(x, lambd=0.3)
        x.hardshrink(0.7)
        nn.Softshrink()
        F.softshrink(x, 0.3)
        F.softshrink(x, lambd=0.0)
        nn.Tanhshrink()
        F.tanhshrink(x)
        nn.RReLU()
        nn.RReLU(0.2, 0.4, inplace=True)
        F.rrelu(x)
        F.rrelu_(x, 0.1, 0.3)
        torch.rrelu(x, 0.3, 0.7)
        nn.RReLU(1.5, 2.5)
    """)  # fmt: skip
    for name in ("floor", "ceil", "trunc", "fix", "round"):
        yield from cases((4,), f"""
            torch.{name}(3 * x)
            torch.{name}(x)
            x.{name}()
            torch.{name}_(x)
            x.{name}_()
        """)  # fmt: skip
    yield from cases((4,), "torch.special.round(x)\ntorch.round(x, decimals=0)")
    # Just above a threshold, and just below a whole number, points only come near the ends.
    yield from cases((5,), """
        nn.Threshold(0.1, 20.0)
        nn.Threshold(-0.3, 0.5)
        F.hardshrink(x, -0.3)
        torch.frac(x)
        torch.frac(x * 3)
        x.frac()
        torch.frac_(x)
        x.frac_()
    """, gap=0.1)  # fmt: skip
    yield from cases((5,), "nn.Tanhshrink()\nnn.Softshrink(4.0)", around=(-9.0, 9.0), r=4.0)
    yield from cases((2, 3), """
        torch.nan_to_num(x)
        torch.nan_to_num(x, nan=0.3)
        torch.nan_to_num_(x)
        x.nan_to_num(0.1, posinf=2.0)
        x.nan_to_num_()
        F.feature_alpha_dropout(x, 0.3)
    """)  # fmt: skip


def curves() -> Iterator[Case]:
    for name in ("atan", "arctan", "sinh", "asinh", "arcsinh", "exp2", "expm1"):
        yield from cases((4,), f"torch.{name}(x)\nx.{name}()")
        if "sinh" not in name[1:]:  # which have no gradient in place
            yield from cases((4,), f"torch.{name}_(x)\nx.{name}_()")
        yield from cases((5,), f"torch.{name}(x)", around=(-30.0, 30.0), r=20.0)
    yield from cases((4,), "torch.special.exp2(x)\ntorch.special.expm1(x)")
    for name in ("log2", "log10", "log1p"):
        yield from cases((4,), f"""
            torch.{name}(x + 3)
            (x + 3).{name}()
            torch.{name}_(x + 3)
            (x + 3).{name}_()
        """)  # fmt: skip
        yield from cases((4,), f"torch.{name}(x)", around=(0.9, 1.1), r=0.1)
    yield from cases((4,), "torch.special.log1p(x)", around=(-0.5, 0.0), r=0.49)
    yield from cases((4,), """
        torch.logit(x)
        x.logit()
        torch.logit(x, 0.2)
        x.logit(eps=0.3)
        torch.logit_(x)
        x.logit_(0.1)
        torch.special.logit(x)
    """, around=(0.4, 0.6), r=0.39)  # fmt: skip
    for name in ("sin", "cos"):
        wave = f"torch.{name}(x)"
        yield from cases((4,), f"{wave}\nx.{name}()\ntorch.{name}_(x)\nx.{name}_()", gap=1e-3)
        for around, r in (((-8.0, 8.0), 2.0), ((-9.0, 9.0), 9.0), ((1.5, 1.6), 0.1)):
            yield from cases((5,), wave, around=around, r=r, gap=1e-2)
        yield from cases((5,), wave, around=(-300.0, 300.0), r=1.0, gap=1e-2)
    yield from cases((4,), """
        x ** 0.3
        x ** 2.5
        x ** -0.7
        x ** -1
        x ** -2
        x ** -3
        x.pow(1.7)
        x.pow(-3.3)
        torch.pow(x, 1 / 3)
        x.pow_(-1.2)
        operator.ipow(x, 0.3)
    """, around=(1.0, 3.0), r=0.9)  # fmt: skip
    yield from cases((4,), "x ** -1\nx ** -2\nx ** -3", around=(-3.0, -1.5), r=1.0)
    yield from cases((4,), "torch.relu(x) ** 0.7\ntorch.relu(x) ** 1.5")
    yield from cases((4,), """
        2 ** x
        0.3 ** x
        1.0 ** x
        torch.pow(2, x)
        torch.pow(0.7, exponent=x)
        (c.abs() + 0.1) ** x
        (c.abs() + 0.1).pow(x)
        torch.pow(c.abs() + 0.1, x)
    """, constants={"c": (4,)})  # fmt: skip


def mixtures() -> Iterator[Case]:
    yield from cases((4, 2), """
        nn.GLU(1)
        nn.GLU()
        F.glu(x)
        F.glu(x, dim=-2)
        F.glu(x * 5, 1)
    """)  # fmt: skip
    yield from cases((2, 3), """
        torch.lerp(x, c, 0.3)
        torch.lerp(c, x, 0.7)
        x.lerp(c, -0.4)
        c.lerp(x, 1.6)
        x.lerp_(c, 0.5)
        torch.lerp(x, c, c)
        torch.lerp(x, end=c[0], weight=c[1:])
        torch.lerp(x[:, 0], x[:, 1], 0.3)
        torch.lerp(x[:, 0], x[:, 1], c[0])
        x[:, 0].lerp(x[:, 1], 2.5)
        torch.lerp(x[:, :1], x, 0.0)
        (x[:, 0] * 1).lerp_(x[:, 1], 0.3)
    """, constants={"c": (2, 3)})  # fmt: skip
    # The window's squares hold the number itself, too.
    yield from cases((5, 3), """
        nn.LocalResponseNorm(3)
        nn.LocalResponseNorm(2, alpha=0.5, beta=0.3, k=2.0)
        F.local_response_norm(x, 4, 0.3)
    """, gap=0.9)  # fmt: skip
    yield from cases((4, 2, 3), "nn.LocalResponseNorm(3, alpha=0.1)", gap=0.9)


def log_probabilities() -> Iterator[Case]:
    yield from cases((3, 4), """
        torch.logsumexp(x, 1)
        torch.logsumexp(x, dim=-1, keepdim=True)
        torch.logsumexp(x, (1, 2))
        torch.logsumexp(x, (2, 1), True)
        x.logsumexp(2)
        x.logsumexp(dim=(-2, -1), keepdim=True)
        torch.special.logsumexp(x, 1)
        nn.LogSoftmax(1)
        nn.LogSoftmax(dim=-1)
        F.log_softmax(x, 2)
        F.log_softmax(x, dim=1, dtype=torch.float64)
        torch.log_softmax(x, 1)
        torch.log_softmax(input=x, dim=-1)
        x.log_softmax(-1)
        x.log_softmax(dim=1)
        torch.special.log_softmax(x, 1)
        nn.Softmin(1)
        F.softmin(x, dim=-1)
        F.softmin(x, 1, dtype=torch.float64)
    """)  # fmt: skip
    yield from cases((4,), """
        x.log_softmax(1)
        x.logsumexp(1)
        F.softmin(x, 1)
    """, around=(-30.0, 30.0), r=20.0, gap=1e-3)  # fmt: skip
    yield from cases((1,), "x.log_softmax(1)")
    yield from cases((3,), "x.logsumexp(0)\nx.log_softmax(0)", couples=True)


def attention() -> Iterator[Case]:
    # One probability reaches its end, by all logits at once.
    yield from cases((3, 4), """
        nn.Softmax(1)
        nn.Softmax(dim=-1)
        F.softmax(x, 2)
        F.softmax(x, dim=1, dtype=torch.float64)
        torch.softmax(x, 1)
        torch.softmax(input=x, dim=-1)
        x.softmax(-1)
        x.softmax(dim=1)
        torch.special.softmax(x, 1)
    """)  # fmt: skip
    yield from cases((3, 2, 2), "nn.Softmax2d()")
    yield from cases((4,), "x.softmax(1)", around=(-30.0, 30.0), r=20.0, gap=1e-3)
    yield from cases((3, 4), """
        F.scaled_dot_product_attention(x, x, x)
        F.scaled_dot_product_attention(x, key=x, value=x, scale=0.3)
        F.scaled_dot_product_attention(c, x, x)
        F.scaled_dot_product_attention(x, c.expand(len(x), -1, -1), x)
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
        F.scaled_dot_product_attention(x[:, :2], x, x, is_causal=True)
        F.scaled_dot_product_attention(x, x, x, c[:, :, :3])
        F.scaled_dot_product_attention(x, x, x, attn_mask=c[0, :, :3].triu() <= 0.5)
        F.scaled_dot_product_attention(x, x, x, -1e9 * torch.ones(3, 3, dtype=x.dtype).triu(1))
        F.scaled_dot_product_attention(x, x, x, -3e38 * torch.ones(3, 3, dtype=x.dtype).triu(1))
    """, constants={"c": (1, 3, 4)}, r=0.3, gap=0.98)  # fmt: skip
    yield from cases((3, 4), """
        Attending('y, y, y')
        Attending('y, y, y', batch_first=False)
        Attending('y, y, y', bias=False, dropout=0.3)
        Attending('y, y, y, need_weights=False')
        Attending('y, y, y, need_weights=False', batch_first=False)
        Attending('y, y, y, average_attn_weights=False')
        Attending('y[:, :2], y[:, 1:], y[:, 1:]')
        Attending('y[:, :2], y[:, 1:, :3], y[:, :2, :2]', kdim=3, vdim=2)
        Attending('y, y[..., :3], y[..., :2], need_weights=False', kdim=3, vdim=2, bias=False)
        Attending('c[:1].expand(len(y), -1, -1), y, y')
        Attending('y, c[:1].expand(len(y), -1, -1), c[:1].expand(len(y), -1, -1)')
        Attending('y, y, y, attn_mask=later')
        Attending('y, y, y, need_weights=False, attn_mask=later')
        Attending('y, y, y, need_weights=False, attn_mask=later, is_causal=True')
        Attending('y, y, y, attn_mask=c[0, :, :3]')
        Attending('y, y, y, None, False, c[..., :3].repeat(len(y), 1, 1)')
        Attending('y, y, y, key_padding_mask=later[1].expand(len(y), -1)')
        Attending('y, y, y, need_weights=False, key_padding_mask=later[1].expand(len(y), -1)')
        Attending('y, y, y, attn_mask=later, key_padding_mask=later[1].expand(len(y), -1)')
    """, r=0.3, gap=0.99)  # fmt: skip
    yield from cases((4,), "Attending('y, y, y')", r=0.3, gap=0.99, couples=True)


def recurrent() -> Iterator[Case]:
    # Only one step of a plain layer is exact: an input reaches a gate or state by several ways.
    yield from cases((3, 3), """
        Recurring('nn.RNN(3, 2, batch_first=True)')
        Recurring('nn.RNN(3, 2, nonlinearity="relu")')
        Recurring('nn.RNN(3, 2, 2, nonlinearity="relu", bidirectional=True)')
        Recurring('nn.RNN(3, 2, 2, bias=False)')
        Recurring('nn.RNN(3, 4, 2, bidirectional=True)', 'layer(y, h)')
    """, r=0.3, gap=0.9)  # fmt: skip
    yield from cases((3, 3), """
        Recurring('nn.LSTM(3, 2)')
        Recurring('nn.LSTM(3, 2, batch_first=True)', 'layer(y, (h[:1, :, :2], h[1:2, :, :2]))')
        Recurring('nn.LSTM(3, 2, 2, bidirectional=True, bias=False, dropout=0.3)')
        Recurring('nn.LSTM(3, 4, 2, bidirectional=True)', 'layer(y, (h, h.flip(0)))')
        Recurring('nn.LSTM(3, 3, proj_size=2)')
        Recurring('nn.LSTM(3, 3, 2, False, True, proj_size=2, bidirectional=True)')
        Recurring('nn.LSTM(3, 4, 2, proj_size=2)', 'layer(y, (h[:2, :, :2], h[2:]))')
        Recurring('nn.LSTM(2, 2, batch_first=True)', 'layer(y[..., :2], (y[None, :, 0, 1:],) * 2)')
        Recurring('nn.GRU(3, 2, batch_first=True)')
        Recurring('nn.GRU(3, 2, 2, bias=False, bidirectional=True)')
        Recurring('nn.GRU(3, 4, 2, bidirectional=True)', 'layer(y, h)')
        Recurring('nn.GRU(2, 2)', 'layer(h[:, :, :2], y[:1, :, 1:])')
        Unrolled('nn.RNNCell(3, 2)')
        Unrolled('nn.RNNCell(3, 2, nonlinearity="relu")', 1)
        Unrolled('nn.LSTMCell(3, 2)')
        Unrolled('nn.LSTMCell(3, 2, bias=False)', 2)
        Unrolled('nn.GRUCell(3, 2)')
        Unrolled('nn.GRUCell(3, 2, bias=False)', 1)
    """, r=0.3, gap=0.7)  # fmt: skip
    yield from cases((3,), """
        torch.rnn_tanh_cell(x, h.expand(len(x), -1), c, d)
        torch.rnn_relu_cell(input=x, hx=h.expand(len(x), -1), w_ih=c, w_hh=d, b_ih=e, b_hh=-e)
    """, constants={"h": (1, 2), "c": (2, 3), "d": (2, 2), "e": (2,)})  # fmt: skip


def pools(spatial: int) -> Iterator[Case]:
    shape = (2, *((7,), (5, 7), (3, 5, 4))[spatial - 1])
    sides, strides = (2, 3, 1)[:spatial], (1, 2, 2)[:spatial]
    yield from cases(shape, f"""
        nn.MaxPool{spatial}d(2)
        nn.MaxPool{spatial}d(2, stride=1)
        nn.MaxPool{spatial}d({sides}, {strides})
        nn.MaxPool{spatial}d(3, stride=2, padding=1)
        nn.MaxPool{spatial}d(2, dilation=2, stride=1)
        nn.MaxPool{spatial}d(3, stride=2, ceil_mode=True)
        nn.MaxPool{spatial}d(2, padding=1, dilation=2, ceil_mode=True)
        F.max_pool{spatial}d(x, 2)
        F.max_pool{spatial}d(x, kernel_size={sides}, stride={strides}, ceil_mode=True)
        torch.max_pool{spatial}d(x, 2)
        nn.AvgPool{spatial}d(2)
        nn.AvgPool{spatial}d(2, stride=1)
        nn.AvgPool{spatial}d({sides}, {strides})
        nn.AvgPool{spatial}d(3, padding=1)
        nn.AvgPool{spatial}d(3, padding=1, count_include_pad=False)
        nn.AvgPool{spatial}d(3, stride=2, ceil_mode=True)
        nn.AvgPool{spatial}d(2, padding=1, ceil_mode=True, count_include_pad=False)
        F.avg_pool{spatial}d(x, [2])
        F.avg_pool{spatial}d(x, kernel_size={list(sides)}, stride={strides})
        nn.AdaptiveAvgPool{spatial}d(1)
        nn.AdaptiveAvgPool{spatial}d(2)
        nn.AdaptiveAvgPool{spatial}d(3)
        F.adaptive_avg_pool{spatial}d(x, {sides})
        nn.AdaptiveMaxPool{spatial}d(1)
        nn.AdaptiveMaxPool{spatial}d(2)
        F.adaptive_max_pool{spatial}d(x, {sides})
    """)  # fmt: skip
    yield from cases(shape, f"""
        nn.LPPool{spatial}d(2, 2)
        nn.LPPool{spatial}d(1.0, {sides if spatial > 1 else 2}, {strides})
        F.lp_pool{spatial}d(x, norm_type=2.0, kernel_size=3, stride=2, ceil_mode=True)
    """, around=(1.0, 2.0), r=0.9)  # fmt: skip
    if spatial > 1:
        yield from cases(shape, f"""
            nn.AdaptiveAvgPool{spatial}d({(None, 3, 2)[:spatial]})
            nn.AdaptiveAvgPool{spatial}d({(2, None, None)[:spatial]})
            nn.AvgPool{spatial}d(2, divisor_override=3)
            nn.AvgPool{spatial}d(3, padding=1, divisor_override=1)
            nn.AvgPool{spatial}d(2, divisor_override=-2)
        """)  # fmt: skip
    yield from cases(shape[1:], f"""
        nn.MaxPool{spatial}d(2)
        nn.AvgPool{spatial}d(2)
        nn.AdaptiveAvgPool{spatial}d(2)
    """, couples=True)  # fmt: skip


def shapes() -> Iterator[Case]:
    yield from cases((3, 4), """
        nn.Flatten()
        nn.Flatten(1, 2)
        nn.Unflatten(2, (2, 2))
        torch.flatten(x, 1)
        torch.flatten(input=x, start_dim=1, end_dim=-1)
        x.flatten(1)
        torch.unflatten(x, 2, (2, -1))
        x.unflatten(-1, (2, 2))
        x.view(x.size(0), -1)
        x.view((len(x), 12))
        x.view(x.shape[0], 2, x.size(-1) // 2, -1)
        x.reshape(len(x), 4, 3)
        torch.reshape(x, (-1, 6, 2))
        x.transpose(1, 2).contiguous()
        x.permute(0, 2, 1)
        torch.permute(x, (0, 2, 1))
        x.transpose(1, 2)
        torch.transpose(x, -1, -2)
        x.swapaxes(1, 2)
        torch.swapaxes(x, 1, 2)
        x.movedim(2, 1)
        x.mT
        x.clone()
        torch.clone(x)
        x.double()
        x.to(torch.float64)
        x.to('cpu')
        x.unsqueeze(1).to(memory_format=torch.channels_last)
        torch.movedim(x, (1, 2), (2, 1))
        x[:, :1].squeeze()
        x[:, :1].squeeze(1)
        torch.squeeze(x[:, :1, :1], (1, 2))
        x.unsqueeze(1)
        torch.unsqueeze(x, -1)
        x[:, :1].expand(-1, 3, 4)
        x[:, 1]
        x[:, 1:, ::2]
        x[..., -1]
        x[:, None]
        x[:, [2, 0]]
        x[:, torch.tensor([2, 0])]
        x[:, torch.tensor([True, False, True])]
        x.select(1, 2)
        torch.select(x, -1, 0)
        x.narrow(2, 1, 2)
        torch.narrow(x, 1, 0, 2)
        torch.cat(x.split(3, dim=2)[::-1], 2)
        x.split([1, 3], 2)[1]
        torch.cat(torch.split(x, 2, dim=1)[::-1], dim=1)
        x.chunk(2, 2)[1]
        torch.chunk(x, 3, dim=1)[2]
        x.unbind(1)[2]
        torch.unbind(x, dim=2)[1]
        x.tensor_split(3, 2)[0]
        torch.tensor_split(x, (1, 2), dim=1)[1]
        torch.cat([x, x[:, :1]], 1)
        torch.cat((x, x), dim=-1)
        torch.cat((x, x), axis=2)
        torch.cat([c.expand(len(x), -1, -1), x], dim=1)
        torch.concat([x, x], dim=1)
        torch.concatenate([x, x], dim=1)
        torch.stack([x, x], 1)
        torch.stack((x[:, 0], x[:, 1]), dim=-1)
        torch.stack([x, c.expand(len(x), 3, -1)], dim=2)
        x[:, :1].expand_as(c.expand(len(x), 3, -1))
        x[:, :1].expand_as(x)
        x.view_as(torch.empty(len(x), 4, 3))
        x.reshape_as(torch.empty(len(x), 12))
        x.type_as(torch.empty(1, dtype=torch.float64))
        torch.roll(x, 1, 2)
        torch.roll(x, shifts=(1, -2), dims=(1, 2))
        x.roll(-1, dims=1)
        torch.flip(x, (1, 2))
        torch.flip(x, dims=[-1])
        torch.flip(x, dims=())
        x.flip(1)
        x.flip(1, 2)
        x.repeat(1, 2, 1)
        torch.tile(x, (1, 2, 2))
        x.tile((1, 1, 3))
        torch.repeat_interleave(x, 2, dim=1)
        x.repeat_interleave(3, 2)
        torch.index_select(x, 1, torch.tensor([2, 0, 2]))
        x.index_select(2, torch.tensor([3, 1]))
        torch.tril(x)
        x.tril(-1)
        torch.triu(x)
        x.triu(1)
        torch.where(c > 0, x, 0.3)
        torch.where(c > 0, 1 / 3, x)
        torch.where(torch.tensor([True, False, True, False]), x, -x)
        x.where(c > 0, c)
        x.masked_fill(c > 0, -0.1)
        torch.masked_fill(x, c > 0, 0.1)
        x.masked_fill_(c > 0, 0.1)
        F.pad(x, (1, 2))
        F.pad(x, (1, 0, 0, 2), value=-0.1)
        F.pad(x, (1, 1), "constant", 0.3)
        F.pad(x, (-1, 1))
        F.pad(x, (1, 2), mode="reflect")
        F.pad(x, (2, 1), mode="replicate")
        F.pad(x, (1, 1), mode="circular")
        nn.ConstantPad1d(1, 0.7)
        nn.ReflectionPad1d(1)
    """, constants={"c": (1, 4)})  # fmt: skip
    yield from cases((4, 4, 6), """
        nn.PixelShuffle(2)
        nn.PixelUnshuffle(2)
        nn.ChannelShuffle(2)
        nn.Unfold(2)
        F.unfold(x, (2, 3), padding=1, stride=2)
        nn.Fold((5, 4), 2, stride=(2, 1))(x.flatten(2)[:, :, :6])
        F.fold(x.flatten(2)[:, :, :12], (4, 5), 2, stride=1)
        nn.Upsample(scale_factor=2)
        nn.Upsample((3, 9), mode="nearest-exact")
        nn.Upsample(scale_factor=(1.5, 0.5))
        nn.Upsample((7, 4), mode="bilinear")
        nn.Upsample((7, 4), mode="bicubic")
        nn.Upsample(scale_factor=(0.6, 1.7), mode="bicubic", align_corners=True)
        nn.Upsample(scale_factor=1.7, mode="bilinear", align_corners=True)
        F.interpolate(x, (6, 3), mode="area")
        F.interpolate(x, scale_factor=3, recompute_scale_factor=True)
    """)  # fmt: skip
    yield from cases((2, 5), """
        nn.Upsample(scale_factor=1.6, mode="linear")
        F.interpolate(x, 3, mode="area")
        F.interpolate(x, 8)
        F.channel_shuffle(x, 2)
    """)  # fmt: skip
    yield from cases((2, 2, 3, 2), """
        nn.Upsample((3, 2, 4), mode="trilinear")
        F.interpolate(x, (1, 2, 1), mode="area")
        F.interpolate(x, scale_factor=2)
    """)  # fmt: skip
    yield from cases((5,), """
        x.t()
        x.roll(1)
        x.flip(0)
        torch.index_select(x, 0, torch.tensor([2, 0]))
        x.masked_fill(torch.tensor([[True], [False], [True], [False]]), 0.1)
        torch.t(x)
        x.flatten()
        x.view(-1)
        torch.stack([row for row in x], 1)
        x[1:]
        x[0]
        torch.cat([x, x])
        torch.cat(x.split(3)[::-1])
        F.pad(x, (1, 0, 2, 0), value=0.1)
    """, couples=True)  # fmt: skip


def reductions() -> Iterator[Case]:
    for name in ("sum", "mean"):
        yield from cases((3, 4), f"""
            torch.{name}(x, 1)
            torch.{name}(x, dim=-1)
            torch.{name}(x, (1, 2))
            torch.{name}(x, [-1, 1], keepdim=True)
            torch.{name}(x, axis=1)
            x.{name}(1)
            x.{name}(dim=(1, -1))
            x.{name}(2, True)
            x.{name}((1, 2), keepdim=True)
            x.{name}(axis=(1, 2))
            x.{name}(axis=-2, keepdims=True)
        """)  # fmt: skip
        yield from cases((3,), f"""
            torch.{name}(x)
            torch.{name}(x, 0)
            torch.{name}(x, dim=None)
            x.{name}()
            x.{name}(dim=())
        """, couples=True)  # fmt: skip
    for name in ("max", "min"):
        yield from cases((3, 4), f"""
            torch.a{name}(x, 1)
            torch.a{name}(x, dim=(1, 2), keepdim=True)
            x.a{name}(-1)
            x.a{name}(dim=[1, 2])
            torch.{name}(x, 1)[0]
            torch.{name}(x, dim=-1).values
            torch.{name}(x, 2, True)[0]
            x.{name}(1).values
            x.{name}(dim=2, keepdim=True)[0]
            torch.{name}(x, c)
            torch.{name}(c, x)
            x.{name}(other=c)
            torch.{name}imum(x, c)
            torch.{name}imum(c, x)
            x.{name}imum(c)
            c.{name}imum(x)
            torch.{name}imum(x[:, 0], x[:, 1])
        """, constants={"c": (4,)})  # fmt: skip
        yield from cases((3,), f"torch.{name}(x)\nx.{name}()\nx.a{name}()", couples=True)
    yield from cases((3, 4), """
        torch.norm(x, dim=1)
        torch.norm(x, 2, (1, 2), keepdim=True)
        torch.norm(x, p=1, dim=2)
        x.norm(dim=-1)
        x.norm(p=2, dim=(1, 2), keepdim=True)
        x.norm(float("inf"), 1)
        torch.linalg.norm(x, dim=1)
        torch.linalg.vector_norm(x, dim=(1, 2))
        torch.linalg.vector_norm(x, 1, dim=1, keepdim=True)
    """, gap=1e-2)  # fmt: skip
    yield from cases((3,), "torch.norm(x)\ntorch.linalg.norm(x)", couples=True, gap=1e-2)


def arithmetic() -> Iterator[Case]:
    yield from cases((3,), """
        x + 0.1
        0.1 + x
        x - 0.1
        0.1 - x
        x * -1.7
        0.3 * x
        x * 0
        x / 3
        x / -0.7
        -x
        torch.add(x, 0.7)
        torch.add(x, 0.7, alpha=-3)
        torch.add(input=x, other=0.7)
        x.add(other=2)
        torch.sub(x, 0.7)
        torch.sub(x, 0.7, alpha=0.3)
        torch.subtract(x, 1.5)
        x.subtract(1.5)
        torch.rsub(x, 1.5)
        torch.rsub(x, 1.5, alpha=0.3)
        torch.mul(x, 1.1)
        torch.multiply(x, -2)
        x.mul(0.3)
        x.multiply(0.3)
        torch.div(x, 7)
        torch.divide(x, -0.3)
        torch.true_divide(x, 0.3)
        x.div(0.9)
        x.divide(0.9)
        x.true_divide(0.9)
        torch.neg(x)
        torch.negative(x)
        x.neg()
        x.negative()
        operator.iadd(x, 0.1)
        operator.isub(x, 0.1)
        operator.imul(x, 1.3)
        operator.itruediv(x, 1.3)
        x.add_(0.1, alpha=2)
        x.sub_(0.1)
        x.mul_(-0.1)
        x.div_(-0.1)
        x.neg_()
        torch.neg_(x)
        sum([x])
        x + True
        x - torch.tensor([3, 2, 1], dtype=torch.uint8)
        torch.tensor([3, 2, 1], dtype=torch.uint8) - x
        x + torch.tensor([3, 2, 1])
        x * torch.tensor([True, False, True])
        x + x
        1 / (x + 3)
        -2 / (x - 4)
        torch.reciprocal(x + 3)
        (x + 3).reciprocal()
        torch.reciprocal_(x + 3)
        (x + 3).reciprocal_()
        torch.addcmul(x, torch.tensor(0.3), torch.tensor(0.7))
    """)  # fmt: skip
    yield from cases((3,), "x * x", gap=1e-4)
    yield from cases((3,), "x - x", gap=1.0)
    for shape in ((3, 2), (2,), (3, 1), ()):
        yield from cases((3, 2), """
            x + c
            c - x
            x * c
            x / c
        """, constants={"c": shape})  # fmt: skip
    yield from cases((3, 2), """
        c + x
        x - c
        c * x
        c.add(x)
        c.sub(x, alpha=0.7)
        torch.add(c, x, alpha=0.7)
        torch.add(x, c, alpha=-0.7)
        torch.rsub(x, c, alpha=2)
        torch.mul(c, x)
        c.mul(x)
        torch.div(x, c)
        operator.iadd(x, c)
        operator.isub(x, c)
        operator.imul(x, c)
        operator.itruediv(x, c)
        x.add_(c, alpha=0.3)
        x[:, :1] + c.expand(3, 2)
        c.expand(3, 2) * x[:, :1]
        x[:, :1] / c.expand(3, 2)
    """, constants={"c": (2,)})  # fmt: skip
    yield from cases((3, 2), """
        c / (x + 3)
        torch.addcmul(c, x, c)
        torch.addcmul(x, c, c)
        c.addcmul(x, c)
        x.addcmul_(c, c)
    """, constants={"c": (2,)})  # fmt: skip
    # Parts of one input are independent, so that these bounds are reached.
    yield from cases((2, 3), """
        x[:, 0] / (x[:, 1] + 3)
        torch.div(x[:, 0], x[:, 1] - 4)
        torch.addcmul(c, x[:, 0], x[:, 1])
        x[:, 0] + x[:, 1]
        x[:, 0] - x[:, 1]
        x[:, 0] * x[:, 1]
        torch.add(x[:, 0], x[:, 1], alpha=-2.5)
        torch.sub(x[:, 0], x[:, 1], alpha=0.3)
        torch.rsub(x[:, 0], x[:, 1])
        torch.mul(x[:, 0], x[:, 1])
        x[:, 0].mul(x[:, 1])
        x[:, :1] + x[:, 1:, :1]
        x[:, :1] * x[:, 1:, :1]
        operator.iadd(x[:, 0] * 1, x[:, 1])
        operator.isub(x[:, 0] * 1, x[:, 1])
        operator.imul(x[:, 0] * 1, x[:, 1])
        (x[:, 0] * 1).add_(x[:, 1], alpha=0.3)
        sum(x.unbind(1))
    """, constants={"c": (3,)})  # fmt: skip


def orders() -> Iterator[Case]:
    """Order statistics, and numbers picked by constant indices."""
    yield from cases((3, 4), """
        torch.sort(x)[0]
        torch.sort(x, dim=1, descending=True).values
        torch.sort(input=x, stable=True).values
        x.sort(-1, True).values
        x.sort(stable=True, dim=2)[0]
        torch.topk(x, 2)[0]
        torch.topk(x, k=2, dim=1, largest=False).values
        x.topk(3, 2).values
        torch.kthvalue(x, 2).values
        x.kthvalue(3, 1, True)[0]
        torch.median(x, 2).values
        x.median(dim=1, keepdim=True)[0]
        (x.argmax(2), x)[1]
        (torch.argmin(x, dim=1), torch.argmax(x), x.argmin(), x)[-1]
        (torch.argsort(x, descending=True), x.argsort(-1), x)[2]
        torch.diagonal(x, 0, 1, 2)
        x.diagonal(offset=1, dim1=2, dim2=1)
        torch.diag_embed(x)
        x.diag_embed(1, 1, 2)
        x.unfold(2, 3, 1)
        x.unfold(1, 2, 2)
        torch.gather(x, 2, torch.tensor([[[0, 3], [2, 2], [1, 0]]]).expand(len(x), 3, 2))
        x.gather(1, index=torch.tensor([[[2, 0, 1, 2]]]).expand(len(x), 1, 4))
        torch.take_along_dim(x, torch.tensor([[[0], [3], [2]]]), dim=2)
        x.take_along_dim(torch.tensor([[[0, 2, 1, 1]]]), 1)
    """)  # fmt: skip
    yield from cases((3,), """
        torch.median(x)
        x.median()
        torch.msort(x)
        x.msort()
        x.take_along_dim(torch.tensor([5, 0, 5]))
    """, couples=True)  # fmt: skip


def sums() -> Iterator[Case]:
    """Running sums, differences and variances."""
    yield from cases((3, 4), """
        torch.cumsum(x, 2)
        torch.cumsum(x, dim=1, dtype=x.dtype)
        x.cumsum(-1)
        (x * 1).cumsum_(1)
        torch.diff(x)
        x.diff(dim=1)
        torch.diff(x, prepend=torch.full_like(c, 0.1).expand(len(x), 3, 2))
        x.diff(1, 2, c.expand(len(x), 3, 2), c.expand(len(x), 3, 2))
    """, constants={"c": (1, 3, 2)})  # fmt: skip
    # Around centers apart from each other, where the variances in a box are far from 0.
    yield from cases((3, 4), """
        torch.var(x + apart, 2)
        torch.var(x + apart, dim=(1, 2), correction=0)
        torch.var(x + apart, (1, 2), False, True)
        (x + apart).var(-1, keepdim=True)
        (x + apart).var(1, unbiased=False)
        torch.std(x + apart, 2)
        torch.std(x + apart, 1, correction=0.5, keepdim=True)
        (x + apart).std(2, False)
        torch.cat(torch.var_mean(x + apart, 2), 1)
        torch.var_mean(x + apart, 1, correction=0)[1]
        torch.cat(torch.std_mean(x + apart, (2,), keepdim=True), 1)
    """, r=0.2, gap=0.2)  # fmt: skip
    yield from cases((3, 4), "torch.var(x, 2)\nx.var((1, 2))", gap=0.2)
    yield from cases((3,), """
        torch.var(x)
        torch.var(x, False)
        x.std(unbiased=True)
        torch.var_mean(x)[0]
    """, couples=True, r=0.1, gap=0.2)  # fmt: skip


def masks() -> Iterator[Case]:
    """Comparisons of what depends on the input, and what is chosen by their answers."""
    yield from cases((3, 4), """
        torch.where(x[:, 0] > 0, x[:, 1], x[:, 2])
        torch.where(x[:, 0] >= 0.3, x[:, 1], 0.1)
        torch.where(x[:, 0] < c, c, x[:, 2])
        torch.where(c > x[:, 0], x[:, 1], x[:, 2])
        torch.where(input=x[:, 1], condition=x[:, 0].gt(0), other=x[:, 2])
        x[:, 1].where(x[:, 0].ge(0.1), 0.3)
        x[:, 0] * (x[:, 1] > 0)
        (x[:, 0] > 0.1) * x[:, 1]
        operator.imul(x[:, 0] * 1, x[:, 1] > 0)
        (x[:, 0] > 0) + x[:, 1]
        torch.add(x[:, 0], x[:, 1] > 0)
        operator.iadd(x[:, 0] * 1, x[:, 1] > 0)
        x[:, 0].masked_fill(x[:, 1] < 0, 0.1)
        torch.masked_fill(x[:, 0], x[:, 1] > 0, 0.1)
        (x[:, 0] * 1).masked_fill_(x[:, 1] < 0, 0.1)
    """, constants={"c": (4,)})  # fmt: skip
    # Nothing else passes gradients to an attack.
    answers = """
        torch.where(x[:, 0] <= x[:, 1], 1.0, 0.0)
        torch.gt(x[:, 0], c).float()
        torch.ge(x[:, 0], 0.3).to(x.dtype)
        torch.lt(x[:, 0], c).double().to(x.dtype)
        torch.le(x[:, 0], c).type_as(c)
        torch.greater(x[:, 0], c).float()
        torch.greater_equal(x[:, 0], c).float()
        torch.less(x[:, 0], c).float()
        torch.less_equal(x[:, 0], c).float()
        x[:, 0].lt(c).float()
        x[:, 0].le(0.3).float()
        x[:, 0].greater(c).float()
        x[:, 0].greater_equal(c).float()
        x[:, 0].less(c).float()
        x[:, 0].less_equal(c).float()
        torch.mul(x[:, 0] > 0.1, c)
        (0.75 * (x[:, 0] > c))
        ((x[:, 0] > 0) + c)
        c.masked_fill(x[:, 1] < 0, 0.1)
        (~(x[:, 0] > 0))
        torch.logical_not(x[:, 1] > 0).float()
        ((x[:, 0] > 0) & (x[:, 1] < 0.1))
        ((x[:, 0] > 0) | (c > 0))
        ((c > 0) & (x[:, 0] > 0)).float()
        torch.logical_and(x[:, 0] > 0, x[:, 1] > 0)
        (x[:, 0] > 0).logical_or(c > 0).float()
        torch.bitwise_or(x[:, 0] > 0, x[:, 1] > 0)
        (x[:, 0, 0] > 0)[:, None].expand(-1, 4)
        torch.where((x[:, 0, :1] > 0).expand_as(x[:, 0]), c, 0.1)
        (x[:, 0] > 0).reshape(-1, 2, 2).flatten(1)
        (x[:, :2] > 0).float().sum(1)
    """
    table = "\n".join(f"x[:, 2] * {line.strip()}" for line in answers.strip().splitlines())
    yield from cases((3, 4), table, constants={"c": (4,)})
    # One number in several places: the answer and the choice are taken as independent.
    yield from cases((5,), """
        x * (x > 0)
        torch.where(x > 0, x, torch.zeros(()))
        torch.where(x > 0, x, 0.1 * x)
        x.masked_fill(x < 0, 0.0)
        torch.where((x > -1) & (x < 1), x, x.clamp(-1, 1))
    """, gap=0.9999)  # fmt: skip


def compositions() -> Iterator[Case]:
    for training in (False, True):
        yield from cases((2, 4, 4), "Nested()", r=0.2, gap=0.95, training=training)
    yield from cases((2, 4, 4), "Resized()")
    yield from cases((4,), "Twice(nn.Linear(4, 4))", gap=0.9)
    yield from cases((4,), """
        Twice(nn.BatchNorm1d(4))
        alias(x)
        torch.relu_(x) + x
        x.view(len(x), 2, 2).relu_()
    """)  # fmt: skip


FAMILIES: dict[str, list[Case]] = {
    "linear": [*linear()],
    "convolutions": [*chain.from_iterable(map(convolutions, (1, 2, 3)))],
    "transposed convolutions": [*chain.from_iterable(map(transposed_convolutions, (1, 2, 3)))],
    "normalizations": [*normalizations()],
    "activations": [*activations()],
    "steps": [*steps()],
    "curves": [*curves()],
    "mixtures": [*mixtures()],
    "log-probabilities": [*log_probabilities()],
    "attention": [*attention()],
    "recurrent": [*recurrent()],
    "pools": [*chain.from_iterable(map(pools, (1, 2, 3)))],
    "shapes": [*shapes()],
    "reductions": [*reductions()],
    "arithmetic": [*arithmetic()],
    "orders": [*orders()],
    "sums": [*sums()],
    "masks": [*masks()],
    "compositions": [*compositions()],
}
CASES = [*chain.from_iterable(FAMILIES.values())]

# Whole classifiers: the function that builds one, the shape of an image, and the largest radius.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "mlp": (lambda: mlp(16, [32, 32], 10), (16,), 0.1),
    "mlp, tanh": (lambda: mlp(16, [32, 32], 10, activation=nn.Tanh), (16,), 0.1),
    "small_cnn": (lambda: small_cnn((1, 8, 8), width=4), (1, 8, 8), 0.1),
    "small_cnn, GELU": (
        lambda: small_cnn((1, 8, 8), width=4, activation=nn.GELU, normalize=Normalize(0.4, 0.3)),
        (1, 8, 8),
        0.1,
    ),
    "small_resnet": (lambda: small_resnet((3, 8, 8), width=4), (3, 8, 8), 0.02),
    "cnn7": (lambda: cnn7((1, 28, 28)), (1, 28, 28), 0.01),
}

# -- points of the boxes --------------------------------------------------------------------

SHARES = (0.01, 0.1, 0.5, 1.0)  # of the full radius, one for each box of a case
SAMPLES = len(SHARES)
STEPS = 20  # of the attack


class Subject(NamedTuple):
    """A model in float32, a function equal to it point by point, and boxes with float32 ends."""

    model: nn.Module
    reference: nn.Module
    lower: Tensor
    upper: Tensor
    statistics: Statistics | None = None
    couples: bool = False

    def bounds(
        self,
        dtype: torch.dtype,
        rounding: Rounding | None = None,
        parameters: torch.dtype | None = None,
    ) -> Interval:
        """Bounds of the model, computed in `dtype`, its parameters kept in another if given."""
        statistics = self.statistics and tuple(
            BatchStatistics(*(value.to(dtype) for value in pair)) for pair in self.statistics
        )
        box = Interval(self.lower.to(dtype), self.upper.to(dtype))
        model = copy.deepcopy(self.model).to(parameters or dtype)
        with torch.no_grad():
            return propagate(model, box.within(BoundPass(rounding, statistics)))


def subject(case: Case, *, seed: int = 0) -> Subject:
    """The model of a case with random weights and statistics, and random boxes."""
    torch.manual_seed(seed)
    model = case.build().requires_grad_(False)
    randomize_batch_norms(model)
    low, high = case.around
    center = torch.empty(SAMPLES, *case.shape).uniform_(low, high)
    radius = case.r * torch.tensor(SHARES).reshape(-1, *[1] * len(case.shape))
    box = center - radius, center + radius
    if not case.training:
        model.eval()
        return Subject(model, model, *box, couples=case.couples)
    model.train()
    _, statistics = clean_pass(model, center)
    return Subject(model, with_statistics(model, statistics), *box, statistics)


def model_subject(name: str, *, seed: int = 0) -> Subject:
    """A classifier as at the start of certified training, with boxes around random images."""
    torch.manual_seed(seed)
    build, shape, largest = MODELS[name]
    model = ibp_init_(build()).requires_grad_(False)
    for _ in range(3):
        clean_pass(model.train(), torch.rand(32, *shape))
    images = torch.rand(SAMPLES, *shape)
    radius = largest * torch.tensor(SHARES).reshape(-1, *[1] * len(shape))
    box = (images - radius).clamp(0, 1), (images + radius).clamp(0, 1)
    return Subject(model.eval(), model, *box)


def randomize_batch_norms(model: nn.Module) -> None:
    """Draws what batch norm starts with as constants, negative scales among it."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            if module.affine:
                module.weight.normal_()
                module.bias.normal_()
            if module.running_mean is not None and module.running_var is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.3, 2.0)


def with_statistics(model: nn.Module, statistics: Statistics) -> nn.Module:
    """A copy in evaluation whose batch norms, called once each, normalise by `statistics`."""
    model = copy.deepcopy(model).eval()
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for module, (mean, variance) in zip(norms, statistics, strict=True):
        module.running_mean, module.running_var = mean.detach(), variance.detach()
    return model


def sampled(lower: Tensor, upper: Tensor, count: int) -> Tensor:
    """(count, *box): both ends, corners, faces and inner points, every third of a kind."""
    share = torch.rand(count, *lower.shape, dtype=lower.dtype)
    share[1::3] = share[1::3].round()
    share[2::3] = (2 * share[2::3] - 0.5).clamp(0, 1)
    share[0], share[1] = 0, 1
    return torch.clamp(lower + share * (upper - lower), lower, upper)


def attacked(subject: Subject, count: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(count, *box) points that push one output each up or down, and which (count, targets).

    Signed gradient steps that shrink from half the box, so that they settle in a dip.
    """
    lower, upper = subject.lower.to(dtype), subject.upper.to(dtype)
    model = copy.deepcopy(subject.reference).to(dtype)
    points = sampled(lower, upper, count)
    with torch.no_grad():
        outputs = evaluate(model, points, couples=subject.couples).reshape(count, -1)
    groups = 1 if subject.couples else len(lower)
    width = outputs.shape[1] // groups
    targets = torch.randint(width, (count, groups)) + width * torch.arange(groups)
    sign = torch.ones(count, 1, dtype=dtype)
    sign[1::2] = -1
    for step in range(STEPS):
        points.requires_grad_()
        outputs = evaluate(model, points, couples=subject.couples).reshape(count, -1)
        (gradient,) = torch.autograd.grad((sign * outputs.gather(1, targets)).sum(), points)
        move = (upper - lower) * (0.5 * 0.7**step) * gradient.sign()
        points = torch.clamp(points.detach() + move, lower, upper)
    return points, targets


def evaluate(model: nn.Module, points: Tensor, *, couples: bool) -> Tensor:
    """The model's output for (count, batch, ...) points, (count, *output)."""
    if couples:
        outputs: Tensor = torch.vmap(lambda x: model(x.clone()))(points)
        return outputs
    outputs = model(points.flatten(0, 1).clone())
    return outputs.unflatten(0, points.shape[:2])


class Probe(NamedTuple):
    """What points showed about bounds: how many, and the worst of each kind.

    Slacks say how far the points stayed inside, relative to the largest magnitude among bounds
    and inputs; negative means that one left. `missed` is the largest share of the width of plain
    bounds that no point reached, among the attacked outputs.
    """

    sampled: int
    attacked: int
    float64: float
    float32: float
    safe_real: float
    safe_float32: float
    missed: float


def probe(
    subject: Subject,
    *,
    points: int,
    attacks: int,
    attack_dtype: torch.dtype = torch.float64,
    chunk: int = 2000,
) -> Probe:
    """Samples and attacks a subject in both precisions; no tolerance is taken off."""
    boxes = 1 if subject.couples else len(subject.lower)
    found, targets = attacked(subject, attacks // boxes, dtype=attack_dtype)
    # Box ends are float32, so that rounding leaves points inside.
    drawn = sampled(subject.lower, subject.upper, points // boxes)
    every = torch.cat([drawn, found.float()])
    plain = subject.bounds(torch.float64)
    against = {
        "float64": (plain, torch.float64),
        "float32": (subject.bounds(torch.float32), torch.float32),
        "safe_real": (subject.bounds(torch.float64, REAL), torch.float64),
        "safe_float32": (subject.bounds(torch.float64, FLOAT32, torch.float32), torch.float32),
    }
    models = {dtype: copy.deepcopy(subject.reference).to(dtype) for dtype in DTYPES}
    slacks = dict.fromkeys(against, math.inf)
    lowest, highest = plain.upper.double().flatten(), plain.lower.double().flatten()
    for part in every.split(max(1, chunk // boxes)):
        with torch.no_grad():
            outputs = {
                dtype: evaluate(model, part.to(dtype), couples=subject.couples)
                .reshape(len(part), -1)
                .double()
                for dtype, model in models.items()
            }
        for name, (bounds, dtype) in against.items():
            slacks[name] = min(slacks[name], slack(bounds, outputs[dtype], subject))
        lowest = torch.minimum(lowest, outputs[torch.float64].amin(0))
        highest = torch.maximum(highest, outputs[torch.float64].amax(0))
    lower, upper = (end.flatten() for end in plain.ends())
    rounding = 1e-12 * scale(plain, subject)
    above = (upper - highest - rounding) / (upper - lower + rounding)
    below = (lowest - lower - rounding) / (upper - lower + rounding)
    missed = torch.maximum(above[targets[0::2]].max(), below[targets[1::2]].max())
    return Probe(len(drawn) * boxes, len(found) * boxes, **slacks, missed=float(missed))


DTYPES = (torch.float64, torch.float32)


def slack(bounds: Interval, outputs: Tensor, subject: Subject) -> float:
    """How far `outputs`, (count, elements), stay inside; minus infinity where one is NaN."""
    lower, upper = (end.double().flatten() for end in bounds.ends())
    inside = torch.minimum(outputs - lower, upper - outputs).min()
    return float(inside) / scale(bounds, subject) if bool(inside.isfinite()) else -math.inf


def scale(bounds: Interval, subject: Subject) -> float:
    """The largest magnitude among bounds and inputs."""
    ends = (*bounds.ends(), subject.lower, subject.upper)
    return max(float(end.abs().max()) for end in ends)
