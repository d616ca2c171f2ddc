"""Certificates kept in a file while there are more to come: a kill costs less than a minute.

They count for the same question only: the same weights, samples, radius and bounds, and a network
that still gives the same answers, since its code has no digest.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from acert import records
from acert.arithmetic import ieee_arithmetic
from acert.bounds.interval import Interval
from acert.bounds.margin import margin
from acert.bounds.propagation import propagate
from acert.errors import RunError
from acert.radius import CertifiedRadius
from acert.version import __version__

__all__ = ["Unfinished"]

Part = tuple[CertifiedRadius, Tensor]

_EVERY = 20.0  # seconds
_COMPARED = 32  # samples


class Unfinished:
    """The file of one certification; `settings` are what its radii depend on besides."""

    def __init__(
        self, path: Path, model: nn.Module, images: Tensor, labels: Tensor, **settings: object
    ) -> None:
        self.path, self.model, self.images, self.labels = path, model, images, labels
        self.settings = settings
        self.written = time.monotonic()

    def read(self) -> list[Part]:
        """What an earlier call has left for this one, in one part; none if it asked for another."""
        try:
            found = records.read_unfinished(self.path)
        except RunError:  # damaged: what it held is proven once more
            return []
        if found is None or found.pop("question") != self._question:
            return []
        at_zero, *columns = (
            torch.from_numpy(found[name]).to(self.images.device)
            for name in ("at_zero", *CertifiedRadius._fields)
        )
        return [(CertifiedRadius(*columns), at_zero)] if self._answers(at_zero) else []

    def keep(self, parts: Sequence[Part]) -> None:
        """Writes the parts if the last time was a while ago; on a full disk nothing is kept."""
        if time.monotonic() - self.written < _EVERY:
            return
        radii, at_zero = zip(*parts, strict=True)
        columns = dict(zip(CertifiedRadius._fields, zip(*radii, strict=True), strict=True))
        arrays = {
            name: torch.cat(column).cpu().numpy()
            for name, column in (columns | {"at_zero": at_zero}).items()
        }
        with suppress(RunError):
            records.write_unfinished(self.path, arrays, question=self._question)
        self.written = time.monotonic()

    @cached_property
    def _question(self) -> str:
        """A digest of all that the radii depend on, code apart."""
        words = (__version__, sorted(self.settings.items()), self.images.shape, self.images.dtype)
        digest = hashlib.sha256(repr(words).encode())
        tensors = {"images": self.images, "labels": self.labels, **self.model.state_dict()}
        for name, value in tensors.items():
            digest.update(name.encode())
            if isinstance(value, Tensor):
                flat = value.detach().cpu().contiguous().flatten()
                digest.update(flat.view(torch.uint8).numpy().data)
            else:
                digest.update(repr(value).encode())
        return digest.hexdigest()

    def _answers(self, at_zero: Tensor) -> bool:
        """Whether the network has the margins at radius 0 that it had; of a few samples."""
        count = min(len(at_zero), _COMPARED)
        exact = self.images[:count].double()
        with ieee_arithmetic(exact.device), torch.no_grad():
            logits = propagate(self.model, Interval(exact, exact)).center
        return torch.allclose(margin(logits, self.labels[:count]), at_zero[:count], rtol=1e-6)
