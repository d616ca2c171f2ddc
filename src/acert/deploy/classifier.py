"""A classifier that answers with a proven radius, as one graph that other runtimes can hold."""

from __future__ import annotations

from dataclasses import replace
from numbers import Real
from typing import Any, final

import torch
from torch import Tensor, nn

from acert.arithmetic import ieee_arithmetic
from acert.bounds.checks import check_max_radius, check_model
from acert.bounds.margin import margin
from acert.bounds.proven import proven_margin
from acert.bounds.rounding import FLOAT32, OWN_UNIT
from acert.bounds.same_network import COMPARED, check_same_network
from acert.bounds.substitution import called_with, own_buffers, own_parameters
from acert.deploy.portable import PortableArithmetic
from acert.errors import InvalidInput

__all__ = ["CertifiedClassifier"]

# Four times the room of `certified_radius` for another order of our own sums: what is proven in
# one runtime then stays proven there.
_ROUNDING = replace(FLOAT32, unit=FLOAT32.unit + 16 * OWN_UNIT)

Bracket = tuple[Tensor, Tensor, Tensor]


@final
class CertifiedClassifier(nn.Module):
    """From images to (logits, prediction, radius of the predicted class), as one graph.

    Within `radius` of an image, in every pixel and inside `domain`, no float32 evaluation of
    `model` predicts another class: what `certified_radius(..., arithmetic="float32")` proves,
    found by `steps` bisections of [0, max_radius] and therefore at most `max_radius` / 2**steps
    below. The radius is float64. It is 0 where the image is outside the domain or not finite,
    where the logits are not finite or tie, and where nothing is proven.

    `model` must be in evaluation mode, with float32 parameters; `images` are float32.
    `elide=False` takes the plain margin (Eq. 3), for models that do not end in a linear layer.
    A model that is another one for tensors than for intervals is refused at the first images;
    not where a graph is all that runs, so call it once before it is compiled.

    >>> model = nn.Sequential(nn.Linear(2, 2)).requires_grad_(False).eval()
    >>> _ = model[0].weight.copy_(torch.eye(2)), model[0].bias.zero_()
    >>> classifier = CertifiedClassifier(model, max_radius=0.2)
    >>> logits, prediction, radius = classifier(torch.tensor([[0.5, 0.25], [0.5, 0.5]]))
    >>> prediction[0], radius.float()
    (tensor(0), tensor([0.1250, 0.0000]))
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_radius: float,
        domain: tuple[float, float] | None = (0.0, 1.0),
        steps: int = 20,
        elide: bool = True,
    ) -> None:
        super().__init__()
        check_model(model, None)
        check_max_radius(max_radius)
        _check_domain(domain)
        _check_steps(steps)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and tensor.dtype != torch.float32:
                raise InvalidInput(f"`model` must be float32; got `{name}` of {tensor.dtype}")
            if not bool(tensor.isfinite().all()):
                raise InvalidInput(f"`model` must hold finite numbers; got others in `{name}`")
        if model.training:
            raise InvalidInput("`model` must be in evaluation mode (`model.eval()`)")
        self.model = model
        self.max_radius, self.domain = float(max_radius), domain
        self.steps, self.elide = steps, elide
        self._compared = False
        self.eval()

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (batch, classes), predicted classes (batch,) and their radii (batch,).

        In float32 under autocast too: the radii are those of float32 logits.
        """
        if not torch.compiler.is_compiling():
            with torch.autocast(images.device.type, enabled=False):
                return self._answered(images)
        return self._answered(images)

    def _answered(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if images.dtype != torch.float32:
            raise InvalidInput(f"`images` must be float32; got {images.dtype}")
        if self.training:
            raise InvalidInput("a certified classifier must be in evaluation mode (`eval()`)")
        if not torch.compiler.is_compiling() and not self._compared:
            self._compare(images.detach())
        logits = self.model(images.clone())  # it may work in place
        prediction = logits.argmax(1)
        usable = self._inside(images) & logits.isfinite().all(1)
        usable = usable & (margin(logits.detach(), prediction) < 0)
        with torch.no_grad():
            radius = self._largest_proven(images.detach().double(), prediction)
        return logits, prediction, torch.where(usable, radius, torch.zeros_like(radius))

    def _compare(self, images: Tensor) -> None:
        """Refuses a model whose bounds are those of another one, as `certified_radius` does."""
        usable = images[self._inside(images)][:COMPARED]
        if len(usable):
            with ieee_arithmetic(images.device):
                check_same_network(self.model, usable)
            self._compared = True

    def _inside(self, images: Tensor) -> Tensor:
        """Which images are finite and lie in the domain."""
        inside = images.isfinite()
        if self.domain is not None:
            inside = inside & (images >= self.domain[0]) & (images <= self.domain[1])
        return inside.flatten(1).all(1)

    def _largest_proven(self, images: Tensor, prediction: Tensor) -> Tensor:
        """The certified end of the bracket after all bisections; 0 where nothing is proven."""
        lower = torch.zeros_like(images.flatten(1)[:, 0])
        # PyTorch's own tracer of Python (`torch.compile`) takes no loop with our intervals in it.
        if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
            with PortableArithmetic(lower):
                upper = lower + self.max_radius
            return self._looped((lower, upper, upper.clone()), images, prediction)[0]
        upper = lower + self.max_radius
        # The first radius tried is the largest.
        bracket = lower, upper, upper
        for _ in range(self.steps + 1):
            value = proven_margin(
                self.model, images, prediction, bracket[2],
                rounding=_ROUNDING, elide=self.elide, domain=self.domain,
            )  # fmt: skip
            bracket = _halved(bracket, value)
        return bracket[0]

    def _looped(self, bracket: Bracket, images: Tensor, prediction: Tensor) -> Bracket:
        """The same as a loop in the graph, which would else hold every step's bound pass."""
        inner = _PortableMargin(self.model, self.domain, self.elide)
        tensors = own_parameters(inner) | own_buffers(inner)
        names, count, rounds = list(tensors), torch.zeros((), dtype=torch.int64), self.steps + 1

        # No round for an empty batch, which runtimes do not take through a bound pass. Samples are
        # counted, since the exporter believes that there always are some.
        def unfinished(count: Tensor, lower: Tensor, *_: Tensor) -> Tensor:
            return (count < rounds) & (torch.ones_like(lower).sum() > 0)

        # A loop sees tensors of the outer graph through its arguments only.
        def once(
            count: Tensor, lower: Tensor, upper: Tensor, tried: Tensor,
            images: Tensor, prediction: Tensor, *values: Tensor,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            held = dict(zip(names, values, strict=True))
            value = called_with(inner, held, images, prediction, tried)
            return (count + 1, *_halved((lower, upper, tried), value))

        _, *found = torch.ops.higher_order.while_loop(
            unfinished, once, (count, *bracket), (images, prediction, *tensors.values())
        )
        return found[0], found[1], found[2]


class _PortableMargin(nn.Module):
    """The proven margin as exported: a module, so that its tensors can be arguments."""

    def __init__(self, model: nn.Module, domain: tuple[float, float] | None, elide: bool) -> None:
        super().__init__()
        self.model, self.domain, self.elide = model, domain, elide

    def forward(self, images: Tensor, prediction: Tensor, radius: Tensor) -> Tensor:
        with PortableArithmetic(radius):
            return proven_margin(
                self.model, images, prediction, radius,
                rounding=_ROUNDING, elide=self.elide, domain=self.domain,
            )  # fmt: skip


def _halved(bracket: Bracket, value: Tensor) -> Bracket:
    """The bracket (lower, upper, next radius to try) once the margin at the third is known."""
    lower, upper, tried = bracket
    holds = value < 0
    lower, upper = torch.where(holds, tried, lower), torch.where(holds, upper, tried)
    return lower, upper, (lower + upper) / 2


def _check_domain(domain: Any) -> None:
    if domain is None:
        return
    pair = isinstance(domain, (tuple, list)) and len(domain) == 2
    if not pair or not all(isinstance(end, Real) for end in domain):
        raise InvalidInput(f"`domain` must be two numbers (low, high) or None; got {domain!r}")
    if not domain[0] < domain[1]:
        raise InvalidInput(f"`domain` must be (low, high) with low < high; got {domain!r}")


def _check_steps(steps: Any) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise InvalidInput(f"`steps` must be an integer of at least 1; got {steps!r}")
