"""The settings of a training run: everything that decides it besides the model and the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from acert.data import Augmentation
from acert.errors import InvalidInput
from acert.fields import check_fields
from acert.methods import Method
from acert.optimizers import Adam, Optimizer
from acert.precision import PRECISIONS
from acert.schedules import LearningRate, OneCycle, RadiusSchedule, SmoothRadius

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides a training run besides the model and the data."""

    method: Method
    max_radius: float
    epochs: int
    batch_size: int = 128
    optimizer: Optimizer = field(default_factory=Adam)
    learning_rate: LearningRate = field(default_factory=OneCycle)
    radius_schedule: RadiusSchedule = field(default_factory=SmoothRadius)
    regularization: float = 0.5
    l1: float = 0.0
    clip_norm: float = 10.0
    seed: int = 0
    precision: str = "float32"
    elide: bool = True
    domain: tuple[float, float] = (0.0, 1.0)
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))
        faults = [
            f"`{name}` must be {constraint}; got {value}"
            for name, constraint, value, fits in (
                ("max_radius", "above 0", self.max_radius, self.max_radius > 0),
                ("max_radius", "finite", self.max_radius, self.max_radius < math.inf),
                ("epochs", "at least 1", self.epochs, self.epochs >= 1),
                ("batch_size", "at least 2", self.batch_size, self.batch_size >= 2),
                (
                    "regularization",
                    "at least 0 and finite",
                    self.regularization,
                    0 <= self.regularization < math.inf,
                ),
                ("l1", "at least 0 and finite", self.l1, 0 <= self.l1 < math.inf),
                ("clip_norm", "above 0", self.clip_norm, self.clip_norm > 0),
                (
                    "precision",
                    f"one of {', '.join(PRECISIONS)}",
                    self.precision,
                    self.precision in PRECISIONS,
                ),
            )
            if not fits
        ]
        low, high = self.domain
        if not low < high:
            faults.append(f"`domain` must be (low, high) with low < high; got {self.domain}")
        elif not self.max_radius <= (high - low) * (1 + 1e-6):  # 0.3 - 0.1 is below 0.2
            faults.append(
                f"`max_radius` must be at most the width of the domain, {high - low:g}; "
                f"got {self.max_radius}"
            )
        if faults:
            raise InvalidInput("; ".join(faults))
