"""An experiment as a value: data set, network and training settings; to JSON and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from acert import data, models, records
from acert.data import Augmentation, Dataset
from acert.errors import AcertError, InvalidInput, RunError
from acert.evaluation import evaluation_mode
from acert.fields import check_fields
from acert.methods import METHODS
from acert.optimizers import Adam, Muon
from acert.rootfind import Bisection, Brent, PowerLaw
from acert.schedules import Constant, FullRadius, OneCycle, SmoothRadius, StepDecay
from acert.settings import Settings

__all__ = [
    "SCHEMA",
    "Experiment",
    "Network",
    "build_model",
    "build_own",
    "from_config",
    "needed_fields",
    "read_experiment",
    "to_config",
]

SCHEMA = 1

# Every class that may stand in a config; nothing else is ever built from a file.
_ALLOWED: tuple[type, ...] = (
    *METHODS.values(), Brent, Bisection, PowerLaw, SmoothRadius, FullRadius, OneCycle, StepDecay,
    Constant, Adam, Muon, Augmentation, Settings,
)  # fmt: skip


def _mlp(
    in_shape: tuple[int, ...], num_classes: int, *, normalize: models.Normalize, width: int = 128
) -> nn.Module:
    """Two hidden layers of `width`, for inputs of any shape."""
    features = torch.Size(in_shape).numel()
    # Normalize has one entry a channel, and what is not an image has no channels.
    first = normalize if len(in_shape) == 3 else None
    return models.mlp(features, [width, width], num_classes, normalize=first)


_FACTORIES: dict[str, Callable[..., nn.Module]] = {
    "cnn7": models.cnn7,
    "mlp": _mlp,
    "small_cnn": models.small_cnn,
    "small_resnet": models.small_resnet,
}


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
        if ":" not in self.name and self.name not in _FACTORIES:
            raise InvalidInput(f"`model` must be one of {sorted(_FACTORIES)}; got {self.name!r}")


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
    shape = dataset.input_shape
    if network.name != "mlp" and len(shape) != 3:
        raise InvalidInput(
            f"`model` {network.name} needs images, (channels, height, width); the inputs of "
            f"{dataset.name} have shape {shape}: take --model mlp, or one of your own"
        )
    normalize = models.Normalize(dataset.mean, dataset.std)
    extra = {} if network.width is None else {"width": network.width}
    model = _FACTORIES[network.name](shape, dataset.num_classes, normalize=normalize, **extra)
    return models.ibp_init_(model) if network.initialization == "ibp" else model


def build_own(factory: object, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A user's own network, as its factory makes it; what the factory raises is told in one line.

    >>> build_own(lambda shape, classes: nn.Linear(*shape, classes), (2,), 3)
    Linear(in_features=2, out_features=3, bias=True)
    """
    if not callable(factory):
        raise InvalidInput(
            "`model` must be a torch.nn.Module, or a function of (input_shape, num_classes); "
            f"got {type(factory).__name__}"
        )
    try:
        model = factory(input_shape, num_classes)
    except AcertError:
        raise
    # Everything: the function is the user's.
    except Exception as error:
        raise InvalidInput(
            "`model` must be a function of (input_shape, num_classes); called with "
            f"{input_shape} and {num_classes}, it raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"`model` must make a torch.nn.Module; got {type(model).__name__}")
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        _give_shapes(model, input_shape)
    return model


def _give_shapes(model: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Has lazy layers take their shapes from an input, before weights are drawn or loaded."""
    try:
        with evaluation_mode(model), torch.no_grad():  # in training batch norm would count it
            model(torch.zeros(2, *input_shape))
    # Everything: what a module raises for a wrong shape is its own affair.
    except Exception as error:
        raise InvalidInput(
            f"`model` must take inputs of shape {input_shape}; it answered: "
            f"{(str(error) or type(error).__name__).splitlines()[0]}"
        ) from error


def read_experiment(folder: Path) -> Experiment:
    """The experiment of a run folder; every refusal names the file."""
    path, config = folder / records.CONFIG, records.read_config(folder)
    if "experiment" not in config:
        if "settings" not in config:
            raise RunError(f"{path} is damaged: it names no experiment")
        raise RunError(
            f"{folder} holds a run on arrays in memory: it names no data set. In Python, "
            f"acert.train(..., out={str(folder)!r}, resume=True) goes on with it, and "
            f"acert.load_model({str(folder)!r}, model=...) loads it"
        )
    try:
        found = from_config(config["experiment"])
    except (InvalidInput, RunError) as error:
        raise RunError(f"{path}: {error}") from error
    if not isinstance(found, Experiment):
        raise RunError(f"{path} is damaged: it names no experiment")
    return found


def to_config(value: Any) -> Any:
    """Plain JSON values; a dataclass becomes an object with its class under "class"."""
    if is_dataclass(value) and not isinstance(value, type):
        body = {entry.name: to_config(getattr(value, entry.name)) for entry in fields(value)}
        return {"class": type(value).__name__} | body
    if isinstance(value, (tuple, list)):
        return [to_config(item) for item in value]
    # numpy's numbers are no JSON.
    return value.item() if isinstance(value, np.generic) else value


def from_config(config: Any) -> Any:
    """The value that `to_config` wrote; unknown classes and fields are refused by name."""
    if isinstance(config, list):
        return tuple(from_config(item) for item in config)
    if not isinstance(config, Mapping):
        return config
    name = config.get("class")
    if not isinstance(name, str) or name not in _CLASSES:
        raise RunError(f"the config names an unknown class, {name!r}")
    cls = _CLASSES[name]
    known = {entry.name for entry in fields(cls)}
    unknown = sorted(set(config) - known - {"class"})
    if unknown:
        raise RunError(f"the config has unknown fields of {name}: {', '.join(unknown)}")
    given = {key: from_config(item) for key, item in config.items() if key != "class"}
    absent = [field for field in needed_fields(cls) if field not in given]
    if absent:
        raise RunError(f"the config lacks fields of {name}: {', '.join(absent)}")
    check_fields(cls, given)
    return cls(**given)


def needed_fields(cls: type) -> list[str]:
    """The fields of a dataclass that have no default."""
    return [
        entry.name
        for entry in fields(cls)
        if entry.default is MISSING and entry.default_factory is MISSING
    ]
