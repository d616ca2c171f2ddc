"""What a run needs before it begins: seed, device, network and data, checked and prepared.

All of it is refused, if it must be, before anything is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from acert import data, models, records
from acert.arithmetic import ieee_arithmetic
from acert.bounds import clean_pass, worst_case_logits
from acert.bounds.checks import check_unwrapped, warn_if_probabilities
from acert.bounds.same_network import check_same_network
from acert.bounds.substitution import called_with, copied_buffers, other_buffers, own_buffers
from acert.data import Dataset, Split, to_float
from acert.errors import AcertError, InvalidInput, RunError, UnsupportedOperation
from acert.evaluation import evaluation_mode
from acert.experiments.experiment import (
    Experiment,
    build_model,
    build_own,
    from_config,
    read_experiment,
    to_config,
)
from acert.methods import CrownIBP
from acert.settings import Settings
from acert.untrusted import check_size

__all__ = [
    "Arrays",
    "Factory",
    "available_device",
    "check_fit",
    "check_kept",
    "check_savable",
    "check_seed",
    "check_training_mode",
    "data_facts",
    "dataset_like",
    "layers",
    "network_to_train",
    "opened_test_set",
    "own_surroundings",
    "pair_of_arrays",
    "refuse_other",
    "with_validation",
]

# Called with (input_shape, num_classes).
Factory = Callable[[tuple[int, ...], int], nn.Module]
Arrays = tuple[Tensor | npt.ArrayLike, Tensor | npt.ArrayLike]
# What factories have made for runs of this process: each is trained in place.
_MADE: WeakSet[nn.Module] = WeakSet()
# What a step draws comes from products of the seed that must fit into 64 bits.
_SEEDS = 10_000_000
_SAVED = frozenset(
    {
        torch.float16, torch.float32, torch.float64, torch.bool,
        torch.int8, torch.int16, torch.int32, torch.int64,
        torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    }
)  # fmt: skip


def check_seed(seed: int) -> None:
    """Refuses a seed that runs cannot be drawn from."""
    if not 0 <= seed < _SEEDS:
        raise InvalidInput(f"`seed` must be in [0, {_SEEDS - 1}]; got {seed}")


def available_device(device: str | torch.device) -> torch.device:
    """The device of that name; refused if it is not there."""
    try:
        return torch.empty(0, device=torch.device(device)).device
    # AssertionError: torch was built without CUDA. ImportError: a device is a package of its own.
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0].partition(". ")[0]
        why = f" ({reason})" if len(reason) <= 70 else ""  # else torch lists all it knows
        here, found = ["cpu"], torch.accelerator.current_accelerator(check_available=True)
        if found is not None:
            here += [f"{found.type}:{index}" for index in range(torch.accelerator.device_count())]
        raise InvalidInput(
            f"`device` must be available here; got {device}{why}. Name one of these, or leave it "
            f"out: {', '.join(here)}"
        ) from error


@contextmanager
def own_surroundings(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from the seed for what a model draws itself, gradients, full precision.

    What the caller had comes back afterwards.
    """
    if torch.is_inference_mode_enabled():
        raise InvalidInput("training must be outside of torch.inference_mode(); it needs gradients")
    if device.type == "meta":
        raise InvalidInput("`device` must hold numbers; got meta, which has shapes alone")
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        torch.manual_seed(seed)
        yield


def network_to_train(
    experiment: Experiment,
    dataset: Dataset,
    model: nn.Module | Factory | None,
    *,
    judge: bool,
) -> nn.Module:
    """The network to be trained; with `judge`, its size comes from a file and is judged first."""
    seed, network = experiment.settings.seed, experiment.network
    if model is None:
        if judge:
            with torch.device("meta"):  # takes no memory
                draft = build_model(network, dataset, seed=seed)
            try:
                check_size(sum(p.numel() * p.element_size() for p in draft.parameters()))
            except ValueError as error:
                raise RunError(f"the network of the config is too large: {error}") from error
        return build_model(network, dataset, seed=seed)
    if isinstance(model, nn.Module):
        return model
    torch.manual_seed(seed)
    built = build_own(model, dataset.input_shape, dataset.num_classes)
    if built in _MADE:
        raise InvalidInput(
            "`model` must make a new module at each call; got one that another run has trained"
        )
    _MADE.add(built)
    return models.ibp_init_(built) if network.initialization == "ibp" else built


def pair_of_arrays(name: str, samples: object) -> Arrays:
    """The samples, refused unless they are two: a loader or a data set is not taken apart."""
    if not isinstance(samples, (tuple, list)) or len(samples) != 2:
        count = f" of {len(samples)}" if isinstance(samples, (tuple, list)) else ""
        raise InvalidInput(
            f"`{name}` must be a pair of arrays, (images, labels); "
            f"got a {type(samples).__name__}{count}"
        )
    return samples[0], samples[1]


def with_validation(dataset: Dataset, split: Split) -> Dataset:
    """The data with samples to validate on; refused unless they are like those to train on."""
    shape, largest = tuple(split.images.shape[1:]), int(split.labels.max())
    if shape != dataset.input_shape or largest >= dataset.num_classes:
        raise InvalidInput(
            f"`validation` must be like the training samples, inputs of {dataset.input_shape} and "
            f"labels up to {dataset.num_classes - 1}; got {shape} and {largest}"
        )
    return replace(dataset, validation=split)


def data_facts(dataset: Dataset) -> dict[str, Any]:
    """What a config says of the data: enough to build the model, and to know them again."""
    held_out = dataset.validation
    return {
        "name": dataset.name,
        "input_shape": list(dataset.input_shape),
        "classes": list(dataset.classes),
        "mean": list(dataset.mean),
        "std": list(dataset.std),
        "domain": list(dataset.domain),
        "train": len(dataset.train),
        "validation": 0 if held_out is None else len(held_out),
        "sha256": _digest(dataset.train),
        "validation_sha256": None if held_out is None else _digest(held_out),
    }


def _digest(split: Split) -> str:
    digest = hashlib.sha256()
    for tensor in (split.images, split.labels):
        digest.update(np.ascontiguousarray(tensor.numpy()).data)
    return digest.hexdigest()


def layers(model: nn.Module) -> dict[str, str]:
    """What a config says of a user's own model: every module by its path, as torch writes it.

    Of a module whose text is not torch's the class alone: it may tell addresses or weights. A
    change inside a `forward` is not seen.

    >>> layers(nn.Sequential(nn.Linear(2, 8), nn.ReLU()))["0"]
    'Linear(in_features=2, out_features=8, bias=True)'
    """
    return {path: _written(module) for path, module in model.named_modules()}


def _written(module: nn.Module) -> str:
    kind = type(module)
    owner = kind.extra_repr.__module__
    # Lists and dicts of parameters tell their device.
    plain = owner.startswith("torch.nn.modules.") and not owner.endswith(".container")
    return f"{kind.__name__}({module.extra_repr() if plain else ''})"


def refuse_other(folder: Path, name: str, value: Any) -> None:
    """Refuses to resume a run with another config, or on other data, than it was begun with."""
    config = records.read_config(folder)
    if name == "layers" and name not in config:
        return  # older runs do not tell
    kept = config.get(name)
    if name == "data" and isinstance(kept, Mapping):  # nor of the samples to validate on
        key = "validation_sha256"
        kept = {**kept, key: kept.get(key, value[key])}
    if isinstance(kept, Mapping) and "class" in kept:
        # A field that is younger than the run had its default then.
        with suppress(RunError, InvalidInput):
            kept = to_config(from_config(kept))
    found = records.first_difference({name: kept}, {name: value})
    if found is not None:
        raise RunError(f"the run in {folder} cannot be resumed with another config: {found}")


def opened_test_set(folder: Path, *, data_dir: str | PathLike[str] | None = None) -> Split:
    """The test set of a run; refused where domain or classes are others than it was trained on."""
    experiment, place = read_experiment(folder), data_dir or records.place_of_data(folder)
    here = data.facts(experiment.dataset, data_dir=place)
    facts = records.read_config(folder).get("data")
    classes = facts.get("classes") if isinstance(facts, Mapping) else None
    for name, own, found in (
        ("domain", experiment.settings.domain, here.domain),
        ("classes", classes, classes if here.classes is None else list(here.classes)),
    ):
        if found != own:
            raise InvalidInput(f"the test set must have the {name} of the run, {own}; got {found}")
    return data.load_test(experiment.dataset, data_dir=place)


def check_savable(model: nn.Module) -> None:
    """Refuses a model with state that the files of a run cannot hold."""
    for name, value in model.state_dict().items():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        if kind not in _SAVED:
            raise InvalidInput(
                "`model` must hold real numbers that a run folder can keep (NumPy's integers and "
                f"floats); got `{name}` of {kind}. A buffer with persistent=False is not kept"
            )


def check_kept(model: nn.Module, train: Split) -> None:
    """Refuses a model whose answers rest on what training leaves in a buffer that no file holds.

    One that is computed once, as tables of positions are, comes back by itself.
    """
    before = own_buffers(model)
    lost = {name: before[name] for name in before.keys() - model.state_dict().keys()}
    if not lost:
        return
    images = to_float(train.images[:2])
    drawn = torch.random.fork_rng([images.device] if images.is_cuda else [])
    with drawn, evaluation_mode(model), other_buffers(model), torch.no_grad():
        model.train()
        model(images.clone())
        model.eval()
        now = own_buffers(model)
        answers = called_with(model, copied_buffers(model), images)
        for name in sorted(lost):
            others = {each: buffer.clone() for each, buffer in (now | {name: lost[name]}).items()}
            again = called_with(model, others, images)
            if not torch.allclose(again, answers, equal_nan=True):
                raise InvalidInput(
                    "`model` must keep what training changes where a run folder keeps it too; got "
                    f"`{name}`, a buffer with persistent=False: register it without that, or leave "
                    "`out` away"
                )


def check_fit(
    model: nn.Module, dataset: Dataset, settings: Settings, *, exact: bool, own: bool
) -> None:
    """Refuses a model that does not fit the data or the method, before anything is written.

    One of the user's `own` must be the same network for tensors and for intervals, too.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidInput("`model` must have parameters to train; got none")
    check_unwrapped(model)
    if settings.augmentation is not None and len(dataset.input_shape) != 3:
        raise InvalidInput(
            "`augmentation` must come with images of shape (channels, height, width); "
            f"got inputs of {dataset.input_shape}"
        )
    images, labels = to_float(dataset.train.images[:2]), dataset.train.labels[:2]
    with evaluation_mode(model), torch.no_grad():
        try:
            logits = _answer(model, images)
        except AcertError:
            raise
        # Everything: what a module raises for a wrong shape is its own affair.
        except Exception as error:
            raise InvalidInput(
                f"`model` must take the inputs of {dataset.name}, of shape {dataset.input_shape}"
                f"{_other_type(model)}; "
                f"it answered: {(str(error) or type(error).__name__).splitlines()[0]}"
            ) from error
        if not isinstance(logits, Tensor):
            raise InvalidInput(
                f"`model` must return logits alone, one tensor; got {type(logits).__name__}"
            )
        shape = tuple(logits.shape)
        if len(shape) != 2 or shape[0] != len(images):
            raise InvalidInput(f"`model` must return logits of shape (batch, classes); got {shape}")
        classes = dataset.num_classes
        if shape[1] < classes or (exact and shape[1] > classes):
            raise InvalidInput(
                f"`model` must have {classes} outputs, one for each class of {dataset.name}; "
                f"got {shape[1]}"
            )
        warn_if_probabilities(logits)
        if settings.method.uses_bounds:
            _check_bounded(model, images, labels, settings, own=own)
        elif dataset.validation is not None:
            try:
                _check_bounded(model, images, labels, settings, own=own)
            except UnsupportedOperation as error:
                raise UnsupportedOperation(
                    f"`model` cannot be validated, which takes its bounds: {error}. Training "
                    "alone needs none: leave `validation` out (`--train-on-all`)"
                ) from error


def _other_type(model: nn.Module) -> str:
    """Names a parameter that is not in float32, as inputs are."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            return f" and in float32 (`{name}` is in {parameter.dtype})"
    return ""


def _check_bounded(
    model: nn.Module, images: Tensor, labels: Tensor, settings: Settings, *, own: bool
) -> None:
    """Refuses a model without the bounds that the method and its validation ask for."""

    def bounded(bounds: str) -> None:
        worst_case_logits(
            model, images, labels, settings.max_radius,
            elide=settings.elide, domain=settings.domain, bounds=bounds,
        )  # fmt: skip

    bounded("ibp")
    if own:  # in float64, which takes a wide network of ours seconds
        with ieee_arithmetic(images.device):
            check_same_network(model, images)
    # Without a warm-up CROWN-IBP is intervals alone from the first step on.
    if isinstance(settings.method, CrownIBP) and settings.radius_schedule.last_epoch > 0:
        try:
            bounded("crown-ibp")
        except UnsupportedOperation as error:
            raise UnsupportedOperation(
                f"`model` cannot be trained with CROWN-IBP: {error}. The other methods take "
                "interval bounds alone"
            ) from error


def _answer(model: nn.Module, images: Tensor) -> Tensor:
    """What the model answers; its buffers and the images, maybe the data, stay as they are."""
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        return model(images.clone())  # type: ignore[no-any-return]  # it gets its shapes here
    return called_with(model, copied_buffers(model), images)  # type: ignore[no-any-return]


def check_training_mode(model: nn.Module, train: Split, settings: Settings) -> None:
    """Refuses a model that can be bounded in evaluation mode only; its buffers stay as they are."""
    images, labels = to_float(train.images[:2]), train.labels[:2]
    before = [buffer.clone() for buffer in model.buffers()]
    with evaluation_mode(model), torch.no_grad():
        model.train()
        try:
            with torch.enable_grad():  # as in a step: some bounds exist without gradient only
                _, statistics = clean_pass(model, images)
                drawn = _random_state(images.device)
                worst_case_logits(
                    model, images, labels, settings.max_radius,
                    elide=settings.elide, domain=settings.domain, statistics=statistics,
                )  # fmt: skip
            if not torch.equal(drawn, _random_state(images.device)):
                raise UnsupportedOperation("it draws random numbers, others in every pass")
        except (UnsupportedOperation, InvalidInput) as error:
            raise UnsupportedOperation(
                f"`model` cannot be bounded in training mode: {error}. Dropout and other noise "
                "have no bounds there: take it out, or train with method=Standard()"
            ) from error
        finally:
            for buffer, old in zip(model.buffers(), before, strict=True):
                buffer.copy_(old)


def _random_state(device: torch.device) -> Tensor:
    """What tells whether a model has drawn random numbers."""
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat([torch.get_rng_state(), *own])


def dataset_like(facts: Mapping[str, Any], samples: int = 0) -> Dataset:
    """A data set as `data_facts` tells of it, with so many samples, all of them noise."""
    shape = (samples, *facts["input_shape"])
    images = torch.randint(256, shape, dtype=torch.uint8)
    return Dataset(
        name=facts["name"],
        train=Split(images, torch.zeros(samples, dtype=torch.int64)),
        classes=tuple(facts["classes"]),
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
        domain=tuple(facts["domain"]),
    )
