"""The smallest radius at which PGD changes a prediction: an upper bound of the robust radius.

Steps are taken in whatever float32 the hardware is fast at (TF32 on CUDA). Whether a point
succeeds is decided in plain IEEE float32, and its distance is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from acert.arithmetic import ieee_arithmetic
from acert.attack.exact_box import distance, float32_below, float32_box
from acert.bounds.checks import (
    Domain,
    check_batch_size,
    check_images,
    check_labels,
    check_logits,
    check_max_radius,
    check_model,
    check_radius,
)
from acert.bounds.interval import Interval
from acert.bounds.margin import margin
from acert.bounds.substitution import called_with, copied_buffers, fixed_parameters
from acert.errors import InvalidInput
from acert.evaluation import evaluation_mode
from acert.precision import float32_products

__all__ = ["AttackResult", "Found", "attack_radius"]

# Points moved at a time. CNN7 keeps about 2 MB of each for its gradient.
_BATCH = 512
# 2**-8 of max_radius is the width to which the radius is bisected.
_HALVINGS = 8


class Found(NamedTuple):
    """Points that changed a prediction: of which sample, where, the margin, and how far away."""

    sample: Tensor
    points: Tensor
    margin: Tensor
    distance: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackResult:
    """The closest successful point of every sample, and those at the certified radius.

    `radius` is float64: the distance of `points` from the image, 0 where the image itself is
    misclassified, infinity where no attack succeeded; `points` holds the image there. `margin`
    is the float32 margin at `points`, negative where nothing succeeded. `at_certified` lists
    the successes of the attack at exactly the certified radius; a sound certificate has none.
    """

    radius: Tensor
    points: Tensor
    margin: Tensor
    at_certified: Found


def attack_radius(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    max_radius: float,
    certified: Tensor | None = None,
    domain: Domain = (0.0, 1.0),
    steps: int = 40,
    restarts: int = 5,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> AttackResult:
    """Smallest radius per sample at which PGD on the margin succeeds, up to `max_radius`.

    A success is a point of the box, inside the domain, whose margin in float32 is not negative:
    a tie counts, as it does for `Status.MISCLASSIFIED`. The radius is bisected until a failed
    and a successful one are `max_radius` / 256 apart; a point closer than the radius tried
    counts at its own distance. At each radius there are `restarts` random starts of `steps`
    signed steps: the first climbs the margin, the others the difference to one wrong class each,
    in order of the logits at the image, since the margin alone ends at whichever class leads.
    PGD is no proof: a smaller radius may exist, the true one is never larger.

    `certified` is tried too, at exactly these radii, and is used for nothing else: bisection
    starts at 0 all the same. The model runs in evaluation mode and is left as it was found.
    `batch_size` points are moved at a time, 512 if None. The same seed gives the same points.
    `progress` hears how many samples' worth of work is done.

    >>> model = nn.Linear(2, 2).requires_grad_(False)
    >>> _ = model.weight.copy_(torch.eye(2)), model.bias.zero_()
    >>> images, labels = torch.tensor([[0.5, 0.25], [0.5, 0.5]]), torch.tensor([0, 0])
    >>> attack_radius(model, images, labels, max_radius=0.25).radius
    tensor([0.1250, 0.0000], dtype=torch.float64)
    """
    _check(model, images, labels, max_radius, certified, domain, steps, restarts, batch_size)
    report = progress or (lambda done: None)
    count = len(images)
    with evaluation_mode(model):
        search = _Search(
            model, images, labels, domain=domain, steps=steps, restarts=restarts, seed=seed,
            batch_size=batch_size or _BATCH,
        )  # fmt: skip
        closest = _Closest(search.images, _no_nan(margin(search.at_images, labels)))
        right = (closest.radius > 0).nonzero().squeeze(1)

        bound = closest.radius.new_zeros(count) if certified is None else certified.double()
        tried = right[bound[right] > 0]
        at_certified = search.attempt(tried, bound[tried])
        closest.note(at_certified)
        report(count // (_HALVINGS + 2))

        # Radii tried are float32 numbers, so that distances rounded up to float32 stay below.
        tried = right[bound[right] < max_radius]
        closest.note(search.attempt(tried, float32_below(bound[tried].fill_(max_radius))))

        failed = torch.zeros_like(closest.radius)
        # The middle of two float32 numbers is rounded, which the last halvings would notice.
        width = max_radius / 2**_HALVINGS * (1 + 2**-16)
        for halving in range(_HALVINGS):
            wide = closest.radius.isfinite() & (closest.radius - failed > width)
            tried = wide.nonzero().squeeze(1)
            if not len(tried):
                break
            report((halving + 2) * count // (_HALVINGS + 2))
            middle = float32_below((failed[tried] + closest.radius[tried]) / 2)
            found = search.attempt(tried, middle)
            failed[tried] = torch.where(torch.isin(tried, found.sample), failed[tried], middle)
            closest.note(found)
        report(count)
    return AttackResult(
        radius=closest.radius, points=closest.points, margin=closest.margin,
        at_certified=at_certified,
    )  # fmt: skip


class _Closest:
    """The closest successful point of every sample so far; the image itself to begin with."""

    def __init__(self, images: Tensor, at_zero: Tensor) -> None:
        self.points = images.clone()
        self.margin = at_zero
        self.radius = torch.where(at_zero < 0, torch.inf, 0.0).double()

    def note(self, found: Found) -> None:
        """Keeps the points that are closer than those before."""
        closer = found.distance < self.radius[found.sample]
        index = found.sample[closer]
        self.points[index] = found.points[closer]
        self.margin[index] = found.margin[closer]
        self.radius[index] = found.distance[closer]


class _Search:
    """PGD on the margin of some samples at a radius each."""

    def __init__(
        self, model: nn.Module, images: Tensor, labels: Tensor, *, domain: Domain, steps: int,
        restarts: int, seed: int, batch_size: int,
    ) -> None:  # fmt: skip
        self.model = model
        self.images, self.labels, self.domain = images.detach(), labels.long(), domain
        self.steps, self.restarts, self.batch_size = steps, restarts, batch_size
        self.generator = torch.Generator(images.device).manual_seed(seed)
        # Detached, so that no gradient of theirs is computed; buffers copied, so that a model
        # that counts its calls is left alone.
        self.tensors = fixed_parameters(model) | copied_buffers(model)
        self.at_images = self.logits(self.images)
        check_logits(Interval(self.at_images, self.at_images), labels, len(images))
        ranked = self.at_images.scatter(1, self.labels.unsqueeze(1), torch.inf)
        self.rivals = ranked.argsort(1, descending=True)[:, 1:]  # all but the label

    def attempt(self, index: Tensor, radius: Tensor) -> Found:
        """Successes at the radius of each sample of `index`, the one of largest margin each."""
        first = self._best_of(index, radius, None)
        # Those that withstood one start mostly withstand all, so the others run together.
        left = ~torch.isin(index, first.sample)
        if self.restarts == 1 or not bool(left.any()):
            return first
        ranks = torch.arange(self.restarts - 1, device=index.device) % self.rivals.shape[1]
        later = self._best_of(index[left], radius[left], self.rivals[index[left]][:, ranks])
        return Found(*(torch.cat(pair) for pair in zip(first, later, strict=True)))

    def _best_of(self, index: Tensor, radius: Tensor, rivals: Tensor | None) -> Found:
        """Successes of one start towards each of the `rivals`, (samples, starts), or of one."""
        copies = 1 if rivals is None else rivals.shape[1]
        size = max(1, self.batch_size // copies)
        parts = [self._nothing()]
        for start in range(0, len(index), size):
            rows = slice(start, start + size)
            repeated = index[rows].repeat_interleave(copies)
            rival = None if rivals is None else rivals[rows].reshape(-1)
            points = self._ascended(repeated, radius[rows].repeat_interleave(copies), rival)
            value = _no_nan(margin(self.logits(points), self.labels[repeated]))
            best = value.reshape(-1, copies).argmax(1)
            best += torch.arange(0, len(points), copies, device=points.device)
            won = best[value[best] >= 0]
            apart = distance(points[won], self.images[repeated[won]]).flatten(1).amax(1)
            parts.append(Found(repeated[won], points[won], value[won], apart))
        return Found(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _nothing(self) -> Found:
        none = self.images[:0]
        number = none.flatten(1)[:, 0]
        return Found(self.labels[:0], none, number, number.double())

    @torch.no_grad()
    def _ascended(self, index: Tensor, radius: Tensor, rival: Tensor | None) -> Tensor:
        """The point of largest margin on the way of PGD from a random start; no host sync."""
        images, labels = self.images[index], self.labels[index]
        lower, upper = float32_box(images, radius, self.domain)
        reach = radius.float().reshape(-1, *[1] * (images.ndim - 1))
        start = torch.rand(images.shape, generator=self.generator, device=images.device)
        points = (lower + start * (upper - lower)).clamp(lower, upper)
        best, highest = points, torch.full_like(radius, -torch.inf, dtype=images.dtype)
        with _fast_arithmetic(images.device):
            for step in range(self.steps):
                value, slope = self._slope(points, labels, rival)
                higher = value > highest
                best = torch.where(higher.reshape(reach.shape), points, best)
                highest = torch.where(higher, value, highest)
                # A slope that is not a number leads nowhere.
                move = _step_size(step, self.steps) * reach * slope.sign().nan_to_num(0.0)
                points = (points + move).clamp(lower, upper)
            higher = _no_nan(margin(self._output(points), labels)) > highest
        return torch.where(higher.reshape(reach.shape), points, best)

    @torch.enable_grad()
    def _slope(self, points: Tensor, labels: Tensor, rival: Tensor | None) -> tuple[Tensor, Tensor]:
        """The margin at each point, and the gradient of what is climbed there."""
        moving = points.detach().requires_grad_()
        logits = self._output(moving)
        value = climbed = margin(logits, labels)
        if rival is not None:
            pair = logits.gather(1, torch.stack((rival, labels), 1))
            climbed = pair[:, 0] - pair[:, 1]
        slope = None
        if climbed.requires_grad:
            (slope,) = torch.autograd.grad(climbed.sum(), moving, allow_unused=True)
        if slope is None:
            raise InvalidInput(
                "`model` must let gradients through to its input, for an attack; they end in a "
                "part of it that is under `torch.no_grad()` or detached"
            )
        return _no_nan(value.detach()), slope

    @torch.no_grad()
    def logits(self, points: Tensor) -> Tensor:
        """What the model computes of the points in IEEE float32."""
        starts = range(0, len(points), self.batch_size)
        with ieee_arithmetic(points.device):
            parts = [self._output(points[start : start + self.batch_size]) for start in starts]
        return torch.cat(parts)

    def _output(self, points: Tensor) -> Tensor:
        logits: Tensor = called_with(self.model, self.tensors, points)
        return logits


def _step_size(step: int, steps: int) -> float:
    """Share of the radius: from the whole down to a hundredth, geometrically.

    The first steps cross the box, the last ones settle those coordinates whose best place is
    not an end. Found better on digits than constant steps and than smaller first ones.
    """
    return float(0.01 ** (step / steps))


def _no_nan(values: Tensor) -> Tensor:
    """Infinity in place of NaN: a prediction that is not a number is no right one."""
    return values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)


@contextmanager
def _fast_arithmetic(device: torch.device) -> Iterator[None]:
    """TF32 on CUDA, for gradients; the caller's settings come back afterwards."""
    with float32_products("tf32"), torch.autocast(device.type, enabled=False):
        yield


def _check(
    model: nn.Module, images: Tensor, labels: Tensor, max_radius: float, certified: Tensor | None,
    domain: Domain, steps: int, restarts: int, batch_size: int | None,
) -> None:  # fmt: skip
    check_model(model, images)
    check_images(images, domain)
    check_labels(labels, images)
    check_max_radius(max_radius)
    check_batch_size(batch_size)
    counts: dict[str, object] = {"steps": steps, "restarts": restarts}
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InvalidInput(f"`{name}` must be an integer of at least 1; got {count!r}")
    if certified is not None:
        check_radius(certified, images)
    tensors = [("images", images), *model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise InvalidInput(f"an attack needs float32; got `{name}` of {tensor.dtype}")
    if torch.is_inference_mode_enabled():
        raise InvalidInput("an attack must be outside of torch.inference_mode(); it needs slopes")
