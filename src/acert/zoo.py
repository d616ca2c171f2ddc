"""Trained models by name or run folder, ready to classify, to certify and to attack.

One model comes with the package: `digits-acert`, made by `acert train` with no flag but `--out`.
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from acert import records
from acert.errors import AcertError, InvalidInput, RunError
from acert.experiments.experiment import Experiment, build_model, build_own, read_experiment
from acert.experiments.override import nearest
from acert.experiments.preparation import Factory, dataset_like

__all__ = ["SHIPPED", "load_model", "load_weights"]

# The run folders inside the package, without what only a resumed run needs.
_WEIGHTS = Path(__file__).parent / "weights"
SHIPPED = ("digits-acert",)


def load_model(
    source: str | PathLike[str],
    *,
    device: str | torch.device = "cpu",
    model: nn.Module | Factory | None = None,
) -> nn.Module:
    """The model of a finished run, or a shipped one by name, in evaluation mode.

    Inputs in, logits out: images in [0, 1] as they are, since normalisation is the model's
    first layer. `source` is a run folder or one of `acert.zoo.SHIPPED`. A run on a model of
    one's own needs that `model` again: a module, which is filled in place and returned, or its
    factory.

    >>> load_model("digits-acert")(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    folder = run_folder(source)
    config = records.read_config(folder)
    make = _maker(folder, config, model)
    arrays, weights = records.read_weights(folder), folder / records.WEIGHTS
    with torch.random.fork_rng(devices=[]):  # what is drawn here is overwritten
        if model is None:
            # First without memory: a config may ask for any width; the weights know the true one.
            with torch.device("meta"):
                _check_fit(make(), arrays, weights)
        loaded = make()
    load_weights(loaded, arrays, source=weights)
    loaded.to(device).eval()  # not returned: a module's own `train` may return nothing
    return loaded


def run_folder(source: str | PathLike[str]) -> Path:
    """The folder that a path or the name of a shipped model stands for."""
    if not isinstance(source, (str, PathLike)):
        raise InvalidInput(
            f"`source` must be a run folder, or one of {', '.join(SHIPPED)}; got {source!r}"
        )
    folder = Path(source)
    if folder.is_dir():
        return folder
    if str(source) in SHIPPED:
        return _WEIGHTS / str(source)
    raise RunError(
        f"there is no run folder {folder}, and no shipped model of that name "
        f"({', '.join(SHIPPED)}){nearest(str(source), SHIPPED)}"
    )


def run_experiment(source: str | PathLike[str]) -> Experiment:
    """The experiment of a run folder."""
    return read_experiment(run_folder(source))


def load_weights(model: nn.Module, arrays: dict[str, Any], *, source: Path) -> None:
    """Fills the model with arrays by name; refused if a name, a shape or a number does not fit."""
    _check_fit(model, arrays, source)
    tensors = {name: torch.as_tensor(array) for name, array in arrays.items()}
    for name, held in model.state_dict().items():
        given = tensors[name]
        # What is certified would be another network.
        if given.dtype != held.dtype and not torch.equal(given.to(held.dtype).to(given), given):
            raise RunError(
                f"{source} does not fit the model: {name} holds numbers of {given.dtype} that "
                f"{held.dtype} would round"
            )
    model.load_state_dict(tensors)
    for name, held in model.state_dict().items():
        given = tensors[name]
        if not bool(((held.to(given) == given) | given.isnan()).all()):
            raise RunError(
                f"{source} does not fit the model, which shares the memory of {name} with another "
                "tensor; the file has other numbers for that one"
            )


def _check_fit(model: nn.Module, arrays: dict[str, Any], source: Path) -> None:
    wanted = model.state_dict()
    for name in sorted({*wanted, *arrays}):
        if name not in arrays:
            # What DataParallel and torch.compile put in front of every name.
            other = next((key for key in {*arrays} - {*wanted} if key.endswith(f".{name}")), None)
            hint = "" if other is None else f", but {other}: take {other[: -len(name)]!r} away"
            raise RunError(f"{source} does not fit the model: it has no {name}{hint}")
        if name not in wanted:
            raise RunError(f"{source} does not fit the model, which has no {name}")
        if is_lazy(wanted[name]):
            raise InvalidInput(
                f"`model` must be initialised; got `{name}` without a shape: call it on an input"
            )
        here, there = tuple(wanted[name].shape), tuple(arrays[name].shape)
        if here != there:
            raise RunError(f"{source} does not fit the model: {name} has {there}, not {here}")


def _maker(
    folder: Path, config: dict[str, Any], model: nn.Module | Factory | None
) -> Callable[[], nn.Module]:
    """Makes a fresh network of the run; its data set need not be on this machine."""
    if isinstance(model, nn.Module):
        given = model
        return lambda: given
    if "settings" in config:
        raise InvalidInput(
            f"`model` must be given for {folder}: it holds a run on a {config.get('model')}"
        )
    network = read_experiment(folder).network
    try:
        dataset = dataset_like(config["data"])
    # Everything: torch has no one error for a shape that cannot be.
    except Exception as error:
        raise RunError(
            f"{folder / records.CONFIG} is damaged: what it says of the data is incomplete "
            f"({type(error).__name__}: {_first_line(error)})"
        ) from error
    if model is not None:
        return lambda: build_own(model, dataset.input_shape, dataset.num_classes)
    if ":" in network.name:
        raise InvalidInput(
            f"`model` must be given for {folder}: the run was made with {network.name}"
        )

    def build() -> nn.Module:
        try:
            return build_model(network, dataset, seed=0)
        except AcertError:
            raise
        # Everything: sizes and numbers come from a file, and each layer has errors of its own.
        except Exception as error:
            raise RunError(
                f"{folder / records.CONFIG} is damaged: its network cannot be built "
                f"({type(error).__name__}: {_first_line(error)})"
            ) from error

    return build


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
