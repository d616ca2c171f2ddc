"""From a model and a data split to figures: quick ones while training, proven ones at the end."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from acert import metrics, records
from acert.bounds import propagate
from acert.bounds.bound_pass import BoundPass, Kept
from acert.bounds.checks import check_batch_size
from acert.bounds.margin import box, margin, plain_worst_case, upper_differences
from acert.bounds.substitution import called_with, copied_buffers
from acert.data import Split, to_float
from acert.errors import AcertError, InvalidInput
from acert.memory import keep_freed_memory
from acert.processes import ALONE, Processes
from acert.radius import Status, certified_batches
from acert.records import rounded_down
from acert.rootfind import Brent
from acert.unfinished import Unfinished

__all__ = ["Certificates", "Evaluation", "certify", "checksum", "evaluate", "examples"]

# Good to a hundredth of a point of ACR, in half as many bound passes as a certificate takes.
_QUICK = Brent(xtol=1e-8, rtol=1e-4, max_steps=50)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Accuracy, ACR (Eq. 12) and ART (Eq. 13) of a split, as fractions."""

    accuracy: float
    acr: float
    art: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Certificates:
    """Proven radii of a split, a row per sample, with what they mean.

    `radius` is float64; apart from `max_radius` itself its values are representable in float32,
    so that a file holds them as they are. `margin` is the margin at radius 0, negative where
    the sample is classified rightly. `attack_radius` is NaN where no attack was made, infinity
    where none succeeded up to `max_radius`, and 0 where the sample is classified wrongly.
    `violations` counts the attacks that contradict their certificate, float32 rounding apart;
    -1 where none were made. `images` is a checksum of the images, -1 where it is not known.
    """

    index: npt.NDArray[np.int64]
    label: npt.NDArray[np.int64]
    prediction: npt.NDArray[np.int64]
    radius: npt.NDArray[np.float64]
    status: npt.NDArray[np.uint8]
    margin: npt.NDArray[np.float32]
    attack_radius: npt.NDArray[np.float32]
    max_radius: float
    arithmetic: str
    bounds: str
    elide: bool = True
    domain: tuple[float, float] = (0.0, 1.0)
    violations: int = -1
    images: int = -1

    def __len__(self) -> int:
        return len(self.index)

    @property
    def columns(self) -> dict[str, Any]:
        """All fields by name, as `records.write_certificates` takes them."""
        return dict(vars(self))

    @property
    def correct(self) -> npt.NDArray[np.bool_]:
        """Whether each sample is classified rightly; a tie of the top classes is not."""
        return np.asarray(self.status != Status.MISCLASSIFIED)

    @property
    def accuracy(self) -> float:
        """Share of samples that are classified rightly."""
        return metrics.accuracy(self.correct)

    @property
    def acr(self) -> float:
        """Average certified radius over max_radius (Eq. 12)."""
        return metrics.acr(self.radius, max_radius=self.max_radius)

    @property
    def art(self) -> float:
        """Geometric mean of accuracy and ACR (Eq. 13)."""
        return metrics.art(self.accuracy, self.acr)

    def certified_accuracy(self, at: float) -> float:
        """Share of samples that are proven at the radius `at`, which is at most max_radius."""
        if not 0 <= at <= self.max_radius:
            raise InvalidInput(
                f"`at` must be in [0, {self.max_radius:g}], where radii were looked for; got {at}"
            )
        return metrics.certified_accuracy(self.radius, self.correct, at=at)

    @property
    def attacked(self) -> bool:
        """Whether every sample was attacked."""
        return not bool(np.isnan(self.attack_radius).any())

    def attacked_accuracy(self, at: float) -> float:
        """Share of right samples that no attack broke at `at`: at least the robust accuracy."""
        if not 0 <= at <= self.max_radius:
            raise InvalidInput(
                f"`at` must be in [0, {self.max_radius:g}], where attacks were made; got {at}"
            )
        return float(np.mean(self.correct & (self._attack_radius > at)))

    @property
    def attacked_acr(self) -> float:
        """Average attack radius over max_radius: no ACR (Eq. 12) that holds can be larger.

        Samples that no attack broke count as max_radius.
        """
        reached = np.minimum(self._attack_radius, self.max_radius)
        return metrics.acr(reached, max_radius=self.max_radius)

    @property
    def _attack_radius(self) -> npt.NDArray[np.float64]:
        if not self.attacked:
            raise InvalidInput("`attack_radius` must hold every sample's; got NaN: none was made")
        # In float64, so that a number it is compared with is not rounded.
        return self.attack_radius.astype(np.float64)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: Split,
    *,
    max_radius: float,
    domain: tuple[float, float] = (0.0, 1.0),
    elide: bool = True,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Accuracy, ACR and ART of a split: interval bounds in float32, for choices while training.

    Nothing is proven: rounding is not covered, and the root is found to four digits. The model
    runs in evaluation mode and is left in the mode it was found in. `progress` is called with
    the number of samples done. `batch_size=None` takes 500, on a CPU 64.
    """
    check_batch_size(batch_size)
    on_cpu = not split.images.is_cuda
    size = batch_size or (64 if on_cpu else 500)
    kept: dict[int, Kept] | None = {} if on_cpu else None
    if on_cpu:
        keep_freed_memory()
    worst_case = upper_differences if elide else plain_worst_case
    radii, right = [], []
    with evaluation_mode(model):
        for start in range(0, len(split), size):
            images = to_float(split.images[start : start + size])
            labels = split.labels[start : start + size]

            def margin_at(
                radius: Tensor, index: Tensor, images: Tensor = images, labels: Tensor = labels
            ) -> Tensor:
                around = box(images[index], radius, domain)
                output = propagate(model, around.within(BoundPass(fold=on_cpu, kept=kept)))
                return margin(worst_case(output, labels[index]), labels[index])

            # With copies: a model may count what it sees in a buffer.
            logits = called_with(model, copied_buffers(model), images)
            at_zero = margin(logits, labels)
            zero = torch.zeros_like(at_zero)
            top = torch.full_like(zero, max_radius)
            root = _QUICK.solve(margin_at, zero, top, f_lower=at_zero, indexed=True)
            radii.append(root.lower)
            right.append(at_zero < 0)
            if progress is not None:
                progress(start + len(images))
    accuracy = metrics.accuracy(torch.cat(right))
    acr = metrics.acr(torch.cat(radii), max_radius=max_radius)
    return Evaluation(accuracy=accuracy, acr=acr, art=metrics.art(accuracy, acr))


def certify(
    model: nn.Module,
    split: Split,
    *,
    max_radius: float,
    bounds: str = "ibp",
    arithmetic: str = "real",
    domain: tuple[float, float] = (0.0, 1.0),
    elide: bool = True,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
    processes: Processes = ALONE,
    folder: Path | None = None,
) -> Certificates:
    """The proven certified radius of every sample of a split (Def. 3.1).

    The arguments are those of `acert.certified_radius`. The model runs in evaluation mode and
    is left in the mode it was found in. `progress` is called with the number of samples done.
    Of several `processes` each certifies a part, and each gets the whole. What is proven so far is
    kept in `folder`, and the same call goes on from there.
    """
    if len(split) < processes.count:
        raise InvalidInput(
            f"the {processes.count} processes need a sample each; got {len(split)} samples"
        )
    own = processes.slice_of(len(split))
    images, labels = to_float(split.images[own]), split.labels[own]
    asked: dict[str, Any] = {
        "max_radius": max_radius, "bounds": bounds, "arithmetic": arithmetic, "domain": domain,
        "elide": elide,
    }  # fmt: skip
    kept = None
    if folder is not None:
        place = records.unfinished_file(folder, processes.rank)
        kept = Unfinished(place, model, images, labels, **asked)
    with evaluation_mode(model), _misfits_told(model, images):
        parts = [] if kept is None else kept.read()
        done = sum(len(at_zero) for _, at_zero in parts)
        if not parts or done < len(images):
            for part in certified_batches(
                model, images[done:], labels[done:], batch_size=batch_size, **asked
            ):
                parts.append(part)
                done += len(part[1])
                if kept is not None:
                    kept.keep(parts)
                if progress is not None:
                    progress(done)
    columns = zip(*((*certified, at_zero) for certified, at_zero in parts), strict=True)
    mine = [torch.cat(column).cpu() for column in columns]
    value, status, _, prediction, at_zero = (
        torch.cat(column) for column in zip(*processes.gathered(mine), strict=True)
    )
    count = len(split)
    return Certificates(
        index=np.arange(count),
        label=split.labels.cpu().numpy(),
        prediction=prediction.numpy(),
        radius=_representable(value.numpy(), max_radius),
        status=status.numpy(),
        margin=at_zero.float().numpy(),
        attack_radius=np.full(count, math.nan, dtype=np.float32),
        max_radius=max_radius,
        arithmetic=arithmetic,
        bounds=bounds,
        elide=elide,
        domain=domain,
        images=checksum(split),
    )


def checksum(split: Split) -> int:
    """CRC-32 of the images of a split as they are stored, which tells test sets apart."""
    return zlib.crc32(np.ascontiguousarray(split.images.cpu().numpy()).data)


def examples(
    certificates: Certificates, split: Split, *, count: int = 16
) -> dict[str, npt.NDArray[Any]]:
    """The most and the least certified images as uint8, with their positions in the split.

    Ordered by radius; where radii are equal, by the margin at 0. Least comes first who is
    classified wrongly by the widest margin. Fewer than `count` if the split is smaller.
    """
    order = np.lexsort((certificates.margin, -certificates.radius))
    chosen = {"most": order[:count], "least": order[::-1][:count]}
    low, high = certificates.domain
    columns: dict[str, npt.NDArray[Any]] = {}
    for name, index in chosen.items():
        images = to_float(split.images[torch.from_numpy(index.copy())].cpu()).numpy()
        shade = (images - low) / (high - low) * 255
        columns[f"{name}_index"] = certificates.index[index]
        columns[f"{name}_images"] = np.rint(shade).clip(0, 255).astype(np.uint8)
    return columns


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards every module has its own mode again."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _misfits_told(model: nn.Module, images: Tensor) -> Iterator[None]:
    """Whatever goes wrong is told as a misfit if the model itself does not take such inputs."""
    try:
        yield
    except AcertError:
        raise
    # Everything: what a module raises for a wrong shape is its own affair.
    except Exception:
        try:
            with torch.no_grad():
                model(images[:1])
        except Exception as error:
            raise InvalidInput(
                f"`model` must take the inputs, of shape {tuple(images.shape[1:])}; it answered: "
                f"{(str(error) or type(error).__name__).splitlines()[0]}"
            ) from error
        raise


def _representable(radius: npt.NDArray[np.float64], max_radius: float) -> npt.NDArray[np.float64]:
    """Radii as a file holds them: float32 towards 0, but max_radius where that is reached."""
    return np.where(radius == max_radius, radius, rounded_down(radius).astype(np.float64))
