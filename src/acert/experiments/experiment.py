"""An experiment as a value: data set, network and training settings; to JSON and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from acert import data, models
from acert.data import Augmentation, Dataset
from acert.errors import InvalidInput, RunError
from acert.methods import METHODS
from acert.rootfind import Bisection, Brent
from acert.schedules import Constant, FullRadius, OneCycle, SmoothRadius, StepDecay
from acert.training import Settings

__all__ = ["SCHEMA", "Experiment", "Network", "build_model", "from_config", "to_config"]

SCHEMA = 1

# Every class that may stand in a config; nothing else is ever built from a file.
_ALLOWED: tuple[type, ...] = (
    *METHODS.values(), Brent, Bisection, SmoothRadius, FullRadius, OneCycle, StepDecay, Constant,
    Augmentation, Settings,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Network:
    """Which network is trained: a name of `acert.models`, or a user's `package.module:factory`.

    A factory is called with (input_shape, num_classes). `initialization` is "ibp" or "default".
    """

    name: str = "cnn7"
    width: int | None = None
    initialization: str = "ibp"

    def __post_init__(self) -> None:
        if self.initialization not in ("ibp", "default"):
            raise InvalidInput(
                f"`initialization` must be ibp or default; got {self.initialization!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """All that is needed to repeat a run, besides the files of its data set."""

    dataset: str
    settings: Settings
    network: Network = field(default_factory=Network)
    train_on_all: bool = False
    validate_every: int = 5

    def __post_init__(self) -> None:
        if self.dataset not in data.NAMES:
            raise InvalidInput(f"`dataset` must be one of {data.NAMES}; got {self.dataset!r}")
        if self.validate_every < 1:
            raise InvalidInput(f"`validate_every` must be at least 1; got {self.validate_every}")


_CLASSES = {cls.__name__: cls for cls in (*_ALLOWED, Network, Experiment)}


def build_model(network: Network, dataset: Dataset, *, seed: int) -> nn.Module:
    """The network of an experiment, freshly initialised from the seed, [0, 1] in, logits out."""
    torch.manual_seed(seed)
    if ":" in network.name:
        raise InvalidInput(f"the factory {network.name!r} must be given by the caller")
    factories: dict[str, Callable[..., nn.Module]] = {
        "cnn7": models.cnn7,
        "small_cnn": models.small_cnn,
        "small_resnet": models.small_resnet,
    }
    if network.name not in factories:
        raise InvalidInput(f"`model` must be one of {sorted(factories)}; got {network.name!r}")
    normalize = models.Normalize(dataset.mean, dataset.std)
    extra = {} if network.width is None else {"width": network.width}
    model = factories[network.name](
        dataset.input_shape, dataset.num_classes, normalize=normalize, **extra
    )
    return models.ibp_init_(model) if network.initialization == "ibp" else model


def to_config(value: Any) -> Any:
    """Plain JSON values; a dataclass becomes an object with its class under "class"."""
    if is_dataclass(value) and not isinstance(value, type):
        body = {entry.name: to_config(getattr(value, entry.name)) for entry in fields(value)}
        return {"class": type(value).__name__} | body
    if isinstance(value, (tuple, list)):
        return [to_config(item) for item in value]
    return value


def from_config(config: Any) -> Any:
    """The value that `to_config` wrote; unknown classes and fields are refused by name."""
    if isinstance(config, list):
        return tuple(from_config(item) for item in config)
    if not isinstance(config, Mapping):
        return config
    name = config.get("class")
    if name not in _CLASSES:
        raise RunError(f"the config names an unknown class, {name!r}")
    cls = _CLASSES[name]
    known = {entry.name for entry in fields(cls)}
    unknown = sorted(set(config) - known - {"class"})
    if unknown:
        raise RunError(f"the config has unknown fields of {name}: {', '.join(unknown)}")
    return cls(**{key: from_config(item) for key, item in config.items() if key != "class"})
