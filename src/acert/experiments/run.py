"""Training runs: an experiment by its config, or a user's own model and arrays, into a folder.

A run can be stopped at any moment. Its state is saved at the end of every epoch, and inside an
epoch whenever `save_every` seconds have passed, 60 unless told otherwise; it is copied at once
and written while training goes on. A validation that is interrupted is made again as a whole. A
resumed run goes on from the last state and ends, on the CPU with as many threads, with the same
bytes.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from acert import data, records
from acert.data import Augmentation, Dataset, Split
from acert.data.dataset import split_from_arrays
from acert.errors import InvalidInput, RunError
from acert.evaluation import Certificates, examples
from acert.experiments.ahead import Ahead
from acert.experiments.execution import (
    SAVE_EVERY,
    Execution,
    fitted,
    stop_on_signal,
    to_tensors,
)
from acert.experiments.experiment import Experiment, read_experiment, to_config
from acert.experiments.preparation import (
    Arrays,
    Factory,
    available_device,
    check_fit,
    check_kept,
    check_savable,
    check_seed,
    check_training_mode,
    data_facts,
    layers,
    network_to_train,
    own_surroundings,
    pair_of_arrays,
    refuse_other,
    with_validation,
)
from acert.experiments.progress import Events, Progress, display
from acert.fields import check_fields
from acert.methods import Method
from acert.optimizers import Adam, Optimizer
from acert.processes import ALONE, Processes
from acert.records import Row
from acert.schedules import LearningRate, OneCycle, RadiusSchedule, SmoothRadius
from acert.settings import Settings
from acert.training import Trainer
from acert.untrusted import within

__all__ = [
    "Run",
    "command_words",
    "record_certification",
    "resume_run",
    "train",
    "train_run",
]


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run: the model in evaluation mode, a row per epoch, and the folder if any.

    A row holds `epoch`, `step`, `loss` and its parts, `train_accuracy`, `learning_rate`,
    `radius_cap` and `seconds`; where the epoch was validated also `accuracy`, `acr` and `art`.
    """

    model: nn.Module
    history: list[Row]
    folder: Path | None = None


# -- the three ways in --------------------------------------------------------------------


def train_run(
    experiment: Experiment,
    *,
    out: str | PathLike[str],
    data_dir: str | PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    resume: bool = False,
    model: nn.Module | Factory | None = None,
    progress: Progress | bool = True,
    tensorboard: bool = False,
    command: Sequence[str] | None = None,
    save_every: float = SAVE_EVERY,
    processes: Processes = ALONE,
) -> Run:
    """Trains an experiment into the folder `out`, which must not exist yet unless `resume`.

    `model` is needed where the network is a user's own: a module, taken as it is, or a factory,
    called with (input_shape, num_classes) and initialised as the experiment says. Ctrl-C and
    SIGTERM save the state and raise KeyboardInterrupt, whose message says how to go on. Of
    several `processes` each calls this with the same arguments, and the first one writes.
    """
    folder = Path(out)
    go_on = f"{_program(processes)} train --resume {command_words(experiment, folder)}"
    check_seed(experiment.settings.seed)
    config = {"experiment": to_config(experiment)}
    if resume:
        refuse_other(folder, "experiment", config["experiment"])
        data_dir = data_dir or records.place_of_data(folder)
    elif processes.first:
        records.check_free(folder, go_on=go_on)
    settings = experiment.settings
    dataset = data.load(experiment.dataset, data_dir=data_dir, train_on_all=experiment.train_on_all)
    if settings.domain != dataset.domain:
        raise InvalidInput(
            f"`domain` must be that of the data, {dataset.domain}; got {settings.domain}"
        )
    chosen = available_device(device)
    with own_surroundings(settings.seed, chosen):
        return _run(
            network_to_train(experiment, dataset, model, judge=resume), dataset, settings,
            config=config, folder=folder, device=chosen, resume=resume,
            validate_every=experiment.validate_every,
            progress=progress, tensorboard=tensorboard, command=command, save_every=save_every,
            local={"data_dir": None if data_dir is None else str(Path(data_dir).resolve())},
            go_on=go_on,
            processes=processes,
            own=model is not None,
        )  # fmt: skip


def resume_run(
    out: str | PathLike[str],
    *,
    data_dir: str | PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    model: nn.Module | Factory | None = None,
    progress: Progress | bool = True,
    tensorboard: bool = False,
    command: Sequence[str] | None = None,
    save_every: float = SAVE_EVERY,
    processes: Processes = ALONE,
) -> Run:
    """Goes on with the run in the folder `out`, by its own config; a finished one is loaded."""
    return train_run(
        read_experiment(Path(out)), out=out, data_dir=data_dir, device=device, resume=True,
        model=model, progress=progress, tensorboard=tensorboard, command=command,
        save_every=save_every, processes=processes,
    )  # fmt: skip


def command_words(experiment: Experiment, folder: Path) -> str:
    """What a command needs to find a run again: its folder, and the model if it was one's own."""
    own = ["--model", experiment.network.name] if ":" in experiment.network.name else []
    return shlex.join([str(folder), *own])


def _program(processes: Processes) -> str:
    if not processes.joined:
        return "acert"
    return f"torchrun --nproc-per-node={processes.count} -m acert"


def train(
    model: nn.Module,
    samples: Arrays,
    *,
    method: Method,
    max_radius: float,
    epochs: int,
    batch_size: int | None = None,
    optimizer: Optimizer | None = None,
    learning_rate: float | LearningRate | None = None,
    radius_schedule: RadiusSchedule | None = None,
    regularization: float = 0.5,
    l1: float = 0.0,
    clip_norm: float = 10.0,
    elide: bool = True,
    domain: tuple[float, float] = (0.0, 1.0),
    augmentation: Augmentation | None = None,
    precision: str = "float32",
    validation: Arrays | None = None,
    validate_every: int = 5,
    seed: int = 0,
    device: str | torch.device | None = None,
    out: str | PathLike[str] | None = None,
    resume: bool = False,
    progress: Progress | bool = True,
    tensorboard: bool = False,
    save_every: float = SAVE_EVERY,
) -> Run:
    """Trains a user's own model, in place, on arrays (images, labels); files only with `out`.

    Images are uint8, or float inside `domain`; labels count from 0. What is not given follows
    from the rest: batches of 128, fewer where there are few samples; Adam; a one-cycle learning
    rate with its peak at 2e-3, or at `learning_rate` if that is a number; a radius cap that rises
    from epoch 2 on for 40 % of the epochs. With `validation`, accuracy, ACR and ART of those
    samples are in the history every `validate_every` epochs and at the end. `device=None` is
    where the model is. Every part of it is put into training mode by `model.train()`, and into
    evaluation at the end: a batch norm that is to keep its statistics needs a `train` method of
    its own, `eval()` before the call is not enough.

    >>> from acert import models
    >>> from acert.methods import Acert
    >>> model = models.mlp(2, [8], 2)
    >>> images, labels = torch.tensor([[0.1, 0.9], [0.9, 0.1]] * 8), torch.tensor([0, 1] * 8)
    >>> run = train(
    ...     model, (images, labels), method=Acert(), max_radius=0.1, epochs=2, progress=False
    ... )
    >>> [row["epoch"] for row in run.history]
    [1, 2]
    """
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"`model` must be a torch.nn.Module; got {type(model).__name__}")
    if not isinstance(method, Method):
        raise InvalidInput(f"`method` must be a method such as acert.Acert(); got {method!r}")
    if out is None and (resume or tensorboard):
        raise InvalidInput("`out` must name a folder to resume from or to write events to")
    domain = _as_tuple(domain)
    # Numbers that were drawn from an array are as good as any.
    max_radius, epochs, batch_size, learning_rate, validate_every, seed = map(
        _plain, (max_radius, epochs, batch_size, learning_rate, validate_every, seed)
    )
    check_fields(Experiment, {"validate_every": validate_every})
    if validate_every < 1:
        raise InvalidInput(f"`validate_every` must be at least 1; got {validate_every}")
    given = {
        "max_radius": max_radius, "epochs": epochs, "regularization": regularization, "l1": l1,
        "clip_norm": clip_norm, "seed": seed, "precision": precision, "elide": elide,
        "domain": domain, "augmentation": augmentation,
    }  # fmt: skip
    if radius_schedule is not None:
        given["radius_schedule"] = radius_schedule
    optimizer = Adam() if optimizer is None else optimizer
    given["optimizer"] = optimizer
    check_fields(Settings, given if batch_size is None else given | {"batch_size": batch_size})
    check_seed(seed)
    dataset = data.from_arrays(*pair_of_arrays("samples", samples), domain=domain)
    if validation is not None:
        checked = split_from_arrays(*pair_of_arrays("validation", validation), domain=domain)
        dataset = with_validation(dataset, checked)
    if radius_schedule is None:
        length = max(1, round(0.4 * epochs))
        radius_schedule = SmoothRadius(start_epoch=min(2, max(epochs, 1)), length=length)
    if not isinstance(learning_rate, LearningRate):
        learning_rate = _one_cycle(learning_rate)
    count = len(dataset.train)
    settings = Settings(
        method=method, max_radius=max_radius, epochs=epochs,
        batch_size=min(count, 128, max(16, count // 8)) if batch_size is None else batch_size,
        optimizer=optimizer, learning_rate=learning_rate, radius_schedule=radius_schedule,
        regularization=regularization, l1=l1, clip_norm=clip_norm, seed=seed,
        precision=precision, elide=elide, domain=domain, augmentation=augmentation,
    )  # fmt: skip
    config = {
        "settings": to_config(settings),
        "model": type(model).__qualname__,
        "validate_every": validate_every,
    }
    folder = None if out is None else Path(out)
    go_on = f"the same call with resume=True and out={str(folder)!r}"
    if folder is not None and resume:
        for name, value in config.items():
            refuse_other(folder, name, value)
    elif folder is not None:
        records.check_free(folder, go_on=go_on)
    own = next(model.parameters(), torch.empty(0)).device
    where = own if device is None else available_device(device)
    with own_surroundings(seed, where):
        return _run(
            model, dataset, settings,
            config=config, folder=folder, device=where, resume=resume,
            validate_every=validate_every, progress=progress, tensorboard=tensorboard,
            command=None, save_every=save_every, local={},
            go_on=go_on,
        )  # fmt: skip


def _one_cycle(peak: float | None) -> OneCycle:
    """The learning rate with that peak, if it was given."""
    try:
        return OneCycle() if peak is None else OneCycle(max_rate=peak)
    except InvalidInput:
        raise InvalidInput(
            "`learning_rate` must be a number above 0, or a schedule such as OneCycle(); "
            f"got {peak!r}"
        ) from None


def _plain(value: Any) -> Any:
    """A number of numpy as the one of Python that it stands for."""
    return value.item() if isinstance(value, np.generic) else value


def _as_tuple(value: Any) -> Any:
    """A list as the tuple that it was meant to be."""
    return tuple(value) if isinstance(value, list) else value


def record_certification(
    out: str | PathLike[str],
    certificates: Certificates,
    split: Split,
    *,
    attacks: dict[str, npt.NDArray[Any]] | None = None,
) -> None:
    """Writes `certificates.npz` and `examples.npz` into a run folder, and `attacks.npz` if given.

    Without `attacks` an older `attacks.npz` is removed: it speaks of other certificates.
    """
    folder = Path(out)
    records.write_certificates(folder, certificates.columns)
    records.write_examples(folder, examples(certificates, split))
    records.drop_unfinished(folder)
    if attacks is None:
        (folder / records.ATTACKS).unlink(missing_ok=True)
    else:
        records.write_attacks(folder, attacks)


# -- one run ------------------------------------------------------------------------------


def _run(
    model: nn.Module,
    dataset: Dataset,
    settings: Settings,
    *,
    config: dict[str, Any],
    folder: Path | None,
    device: torch.device,
    resume: bool,
    validate_every: int,
    progress: Progress | bool,
    tensorboard: bool,
    command: Sequence[str] | None,
    save_every: float,
    local: dict[str, Any],
    go_on: str,
    processes: Processes = ALONE,
    own: bool = True,
) -> Run:
    """Checks, prepares the folder, trains to the end and writes what the run leaves behind.

    A model of the caller's `own` can be built by nobody else, and its name says little of it.
    """
    saved = folder is not None
    if saved:
        check_savable(model)
    if not processes.first:
        folder, progress, tensorboard = None, False, False
    facts = data_facts(dataset)
    model.to(device)
    train_split = dataset.train.to(device)
    fitting = replace(dataset, train=train_split)
    check_fit(model, fitting, settings, exact="experiment" in config, own=own)
    trainer = Trainer(model, train_split, settings, processes=processes)
    if settings.method.uses_bounds:
        check_training_mode(model, train_split, settings)
    if saved:
        check_kept(model, train_split)
    listener = display(progress, every=validate_every)
    listeners = [listener]
    validation = None if dataset.validation is None else dataset.validation.to(device)
    execution = Execution(trainer, validation, validate_every, folder, save_every, listeners)
    known = ({"layers": layers(model)} if own else {}) | {"data": facts}
    if folder is not None and resume:
        for name, value in known.items():
            refuse_other(folder, name, value)
    finished = folder is not None and resume and records.is_finished(folder)
    if processes.as_first(finished):
        model.eval()  # by itself: a module's own `train` may return nothing
        if folder is None:
            return Run(model, [])
        weights = records.read_weights(folder)
        fitted(folder, lambda: model.load_state_dict(to_tensors(weights)))
        listener.note(f"the run in {folder} is finished already")
        return Run(model, records.read_metrics(folder), folder)
    if folder is not None:
        if tensorboard:
            listeners.append(Events(_within(folder / "events", folder)))
        if not resume:
            records.create(folder)
            size = {"parameters": sum(each.numel() for each in model.parameters())} if own else {}
            records.write_config(folder, config | size | known)
            records.write_local(folder, local)
        if not own and _compiles(device, processes):
            listeners.append(Ahead(folder))
    execution.start(resume=resume, command=command)
    with stop_on_signal(execution):
        execution.train(go_on)
    model.eval()
    if folder is not None:
        execution.finish(command=command)
    return Run(model, execution.rows, folder)


def _compiles(device: torch.device, processes: Processes) -> bool:
    """Whether steps are compiled that another process could compile just as well."""
    return device.type == "cuda" and not processes.joined


def _within(path: Path, folder: Path) -> Path:
    try:
        return within(path, folder)
    except ValueError as error:
        raise RunError(f"{path} cannot be written: {error}") from error
