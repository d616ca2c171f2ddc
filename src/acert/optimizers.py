"""Optimisers: what decides an update as a value, and torch optimisers that make it.

Rate and momentum change from step to step. On CUDA both are tensors, so that a captured step
follows them, and no update waits for the host.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from acert.errors import InvalidInput

__all__ = ["Adam", "Muon", "Optimizer", "orthogonalized"]

_BETAS = (0.9, 0.999)
# One step of the iteration maps a singular value s to a s + b s^3 + c s^5. These leave values
# between 0.7 and 1.2 after five steps, and lift small ones by 3.4 a step (Jordan, 2024).
_QUINTIC = (3.4445, -4.7750, 2.0315)
# Smaller matrices are padded to a common size and go through the iteration together.
_SMALL = 2**18


class Optimizer(ABC):
    """What makes an update of a gradient."""

    @abstractmethod
    def momentum_at(self, height: float) -> float:
        """Momentum where the learning rate is at this height of its cycle, from 0 to 1."""

    @abstractmethod
    def build(
        self, parameters: list[nn.Parameter], *, rate: float | Tensor, capturable: bool
    ) -> torch.optim.Optimizer:
        """The optimiser of these parameters. `rate` and `momentum` of its groups may be set."""


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015), with `momentum` as its first beta.

    Where the learning rate has a cycle, it goes to `peak_momentum` and back with the rate, if that
    is given: PyTorch's `OneCycleLR` has 0.95 and 0.85.
    """

    momentum: float = 0.9
    peak_momentum: float | None = None

    def __post_init__(self) -> None:
        _check_momentum("momentum", self.momentum)
        if self.peak_momentum is not None:
            _check_momentum("peak_momentum", self.peak_momentum)

    def momentum_at(self, height: float) -> float:
        """Momentum on the line from foot to peak."""
        peak = self.momentum if self.peak_momentum is None else self.peak_momentum
        return self.momentum + (peak - self.momentum) * height

    def build(
        self, parameters: list[nn.Parameter], *, rate: float | Tensor, capturable: bool
    ) -> torch.optim.Optimizer:
        """PyTorch's fused Adam, or ours around it where the momentum changes."""
        constant = self.peak_momentum in (None, self.momentum)
        cls = torch.optim.Adam if constant else _CycledAdam
        betas = (self.momentum if constant else _BETAS[0], _BETAS[1])
        return cls(
            parameters, lr=rate, betas=betas, fused=_dense(parameters), capturable=capturable
        )


@dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Muon (Jordan, 2024): hidden weights move along their momentum, made orthogonal.

    Every singular value of such an update is near `scale` times the root of the longer side of the
    matrix, so that its mean square is that of Adam's updates and both share a rate (Liu et al.,
    2025). Kernels of convolutions are matrices with a row for each output channel. Biases, scales
    and the last weight of the model are Adam's.
    """

    momentum: float = 0.95
    scale: float = 0.2

    def __post_init__(self) -> None:
        _check_momentum("momentum", self.momentum)
        if not 0 < self.scale < math.inf:
            raise InvalidInput(f"`scale` must be positive and finite; got {self.scale}")

    def momentum_at(self, height: float) -> float:
        """Always the same."""
        return self.momentum

    def build(
        self, parameters: list[nn.Parameter], *, rate: float | Tensor, capturable: bool
    ) -> torch.optim.Optimizer:
        """An optimiser of two groups: Adam's parameters, and the matrices."""
        matrices = [p for p in parameters if p.ndim > 1][:-1]
        chosen = {id(p) for p in matrices}
        others = [p for p in parameters if id(p) not in chosen]
        groups: list[dict[str, Any]] = [
            {"params": others},
            {"params": matrices, "scale": self.scale},
        ]
        return _MuonWithAdam(
            groups, lr=rate, betas=_BETAS, fused=_dense(parameters), capturable=capturable,
        )  # fmt: skip


class _CycledAdam(torch.optim.Adam):
    """Fused Adam whose first beta is the `momentum` of its group; the kernel itself has 0.9.

    The kernel takes the average m to 0.9 m + 0.1 g, and b m + (1 - b) g is wanted: so m goes
    towards g beforehand by 1 - b / 0.9 of the way, a step back where b is the larger one.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; none where a scaled gradient has overflowed."""
        group = self.param_groups[0]
        trained = [p for p in group["params"] if p.grad is not None]
        for parameter in trained:
            if parameter not in self.state:
                self.state[parameter] = _moments(parameter, group["capturable"])
        keep, rate, momentum = _keep(self), group["lr"], group["momentum"]
        if group["capturable"] and all(_kernels_fit(p, p.grad) for p in trained):
            self._by_kernels(trained, keep, rate, momentum)
            return
        shares = (1 - momentum / _BETAS[0]) * keep
        for parameter in trained:
            self.state[parameter]["exp_avg"].lerp_(_numeric(parameter.grad, keep), shares)
        count = self.state[trained[0]]["step"] + 1
        if not isinstance(rate, Tensor):
            count = float(count)
        # The kernel divides by 1 - 0.9^t.
        group["lr"] = rate * (1 - _BETAS[0] ** count) / (1 - momentum**count)
        super().step()
        group["lr"] = rate

    def _by_kernels(
        self, trained: list[nn.Parameter], keep: float | Tensor, rate: Tensor, momentum: Tensor
    ) -> None:
        from acert import kernels

        states = [self.state[parameter] for parameter in trained]
        # One for each: of a single tensor its value would be asked for.
        torch._foreach_add_(
            [state["step"] for state in states], [_numbers(keep, momentum)[0]] * len(states)
        )
        count, beta = states[0]["step"].double(), momentum.double()
        length, root = rate / (1 - beta**count), (1 - _BETAS[1] ** count).sqrt()
        numbers = _numbers(keep, beta, length, root)
        for p, state in zip(trained, states, strict=True):
            assert p.grad is not None
            kernels.adam_(
                p, p.grad, state["exp_avg"], state["exp_avg_sq"], numbers,
                beta2=_BETAS[1], epsilon=self.defaults["eps"],
            )  # fmt: skip


class _MuonWithAdam(torch.optim.Adam):
    """Adam for the first group, Muon for the second."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; none where a scaled gradient has overflowed."""
        matrices = [p for p in self.param_groups[1]["params"] if p.grad is not None]
        kinds = [list(alike) for _, alike in groupby(sorted(matrices, key=_kind), key=_kind)]

        def small() -> None:
            self._adam()
            for alike in kinds:
                if _is_small(alike[0]):
                    self._move(alike)

        def large() -> None:
            for alike in kinds:
                if not _is_small(alike[0]):
                    self._move(alike)

        _side_by_side(small, large, matrices)

    def _adam(self) -> None:
        both = self.param_groups
        self.param_groups = both[:1]
        try:
            super().step()
        finally:
            self.param_groups = both

    def _move(self, alike: list[nn.Parameter]) -> None:
        """Moves matrices of one kind along their momentum, made orthogonal."""
        group = self.param_groups[1]
        keep, momentum = _keep(self), group["momentum"]
        updates = []
        for parameter in alike:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            assert parameter.grad is not None
            update = _direction(state["momentum"], parameter.grad, momentum, keep).flatten(1)
            updates.append(update if update.shape[0] <= update.shape[1] else update.mT)
        rate = group["lr"] * keep * group["scale"]
        found = orthogonalized(_stacked(updates))
        for parameter, update, moved in zip(alike, updates, found, strict=True):
            moved = moved[: update.shape[0], : update.shape[1]]
            if parameter.shape[0] > parameter[0].numel():
                moved = moved.mT
            length = rate * max(update.shape) ** 0.5
            _subtract(parameter, moved.reshape(parameter.shape), length)


def _side_by_side(one: Callable[[], None], other: Callable[[], None], on: list[Tensor]) -> None:
    """Both, at the same time on CUDA: kernels of small matrices leave most of a device idle."""
    if not (on and on[0].is_cuda):
        one()
        other()
        return
    here, side = torch.cuda.current_stream(on[0].device), _side_stream(on[0].device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        one()
    other()
    here.wait_stream(side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _stacked(matrices: list[Tensor]) -> Tensor:
    """One batch of them, padded: rows and columns of zeros stay zero."""
    if len(matrices) == 1:  # a large one is not copied
        return matrices[0][None]
    height, width = (max(matrix.shape[axis] for matrix in matrices) for axis in (0, 1))
    return torch.stack(
        [pad(each, (0, width - each.shape[1], 0, height - each.shape[0])) for each in matrices]
    )


def _kind(matrix: Tensor) -> tuple[int, ...]:
    """What matrices of one batch have in common."""
    return () if _is_small(matrix) else tuple(matrix.shape)


def _is_small(matrix: Tensor) -> bool:
    return matrix.numel() <= _SMALL


def orthogonalized(matrices: Tensor) -> Tensor:
    """A batch of matrices, none higher than wide, with singular values of about 1.

    By five steps of a Newton-Schulz iteration, so without a decomposition; in bfloat16 on CUDA. A
    matrix of zeros stays one.

    >>> found = orthogonalized(torch.eye(2, 3)[None] * 5)
    >>> bool(((found - torch.eye(2, 3)).abs() < 0.4).all())
    True
    """
    found = matrices.bfloat16() if matrices.is_cuda else matrices
    exact = matrices.dtype if matrices.dtype != torch.bfloat16 else torch.float32
    gram = _gram(found).to(exact)
    # No singular value is larger than the root of the sum of all squares.
    squares = gram.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    squares = squares.clamp_min(torch.finfo(squares.dtype).tiny)
    factor = _steps(gram / squares, 2) * squares.rsqrt()
    found = torch.bmm(factor.to(found.dtype), found)
    # From the wide matrix again, because each step multiplies the errors of a small one by 12.
    gram = _gram(found).to(exact)
    return torch.bmm(_steps(gram, 3).to(found.dtype), found)


def _gram(matrices: Tensor) -> Tensor:
    """X X^T; of a wide X by pieces, since few rows alone keep few of a device's cores busy."""
    count, height, width = matrices.shape
    pieces = width // (4 * height)
    if pieces < 2 or width % pieces:
        return torch.bmm(matrices, matrices.mT)
    parts = matrices.view(count, height, pieces, -1).transpose(1, 2).flatten(0, 1)
    return torch.bmm(parts, parts.mT).view(count, pieces, height, height).sum(1)


def _steps(gram: Tensor, count: int) -> Tensor:
    """The matrix that X is multiplied by in some steps of the iteration, from X X^T."""
    first, third, fifth = _QUINTIC
    whole: Tensor | None = None
    for left in reversed(range(count)):
        factor = torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth)
        factor.diagonal(dim1=1, dim2=2).add_(first)
        whole = factor if whole is None else torch.bmm(factor, whole)
        if left:
            gram = torch.bmm(torch.bmm(factor, gram), factor)
    assert whole is not None
    return whole


def _direction(
    average: Tensor, gradient: Tensor, momentum: float | Tensor, keep: float | Tensor
) -> Tensor:
    """Moves the average towards the gradient; the gradient moved towards that one (Nesterov)."""
    if isinstance(momentum, Tensor) and _kernels_fit(average, gradient):
        from acert import kernels

        return kernels.nesterov_(average, gradient, _numbers(keep, momentum))
    gradient = _numeric(gradient, keep)
    return gradient.lerp(average.lerp_(gradient, (1 - momentum) * keep), momentum)


def _kernels_fit(*tensors: Tensor | None) -> bool:
    """Whether Triton's kernels can be had for these: alike in memory, without gaps."""
    first = tensors[0]
    return (
        first is not None
        and first.is_cuda
        and _kernels_run(first.device)
        and _dense([first])
        and all(
            t is not None and t.dtype == torch.float32 and t.stride() == first.stride()
            for t in tensors
        )
    )


@cache
def _kernels_run(device: torch.device) -> bool:
    """Whether Triton is there and builds kernels: it wants a C compiler."""
    try:
        from acert import kernels

        zeros = torch.zeros(16, device=device)
        kernels.subtract_(zeros, zeros, zeros[0])
    except Exception:  # Whatever is amiss, there is another way.
        return False
    return True


def _subtract(weight: Tensor, update: Tensor, length: float | Tensor) -> None:
    """Takes `length` times the update from the weight."""
    if isinstance(length, Tensor) and _kernels_fit(weight) and update.stride() == weight.stride():
        from acert import kernels

        kernels.subtract_(weight, update, length)
    else:
        weight.addcmul_(update, torch.as_tensor(length, dtype=weight.dtype), value=-1)


def _keep(optimizer: torch.optim.Optimizer) -> Tensor | float:
    """0 where a scaled gradient has overflowed, else 1."""
    overflowed: Tensor | None = getattr(optimizer, "found_inf", None)
    return 1.0 if overflowed is None else 1 - overflowed


def _numeric(gradient: Tensor, keep: float | Tensor) -> Tensor:
    """The gradient, with 0 for NaN where it may have overflowed: 0 times NaN is not 0."""
    return gradient.nan_to_num_(0.0, 0.0, 0.0) if isinstance(keep, Tensor) else gradient


def _numbers(keep: float | Tensor, *others: Tensor) -> Tensor:
    """All of them as one tensor on the device, for a kernel."""
    first = keep if isinstance(keep, Tensor) else torch.ones_like(others[0])
    return torch.stack([first.to(others[0].dtype), *others]).float()


def _moments(parameter: Tensor, capturable: bool) -> dict[str, Tensor]:
    """What Adam remembers of a parameter, before its first step."""
    device = parameter.device if capturable else "cpu"
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def _dense(parameters: Sequence[Tensor]) -> bool:
    """Whether no parameter has gaps: the fused kernel walks through memory."""
    return all(torch.empty_like(p).stride() == p.stride() for p in parameters)


def _check_momentum(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise InvalidInput(f"`{name}` must be in [0, 1); got {value}")
