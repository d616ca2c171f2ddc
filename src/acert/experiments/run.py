"""Training runs: an experiment by its config, or a user's own model and arrays, into a folder.

A run can be stopped at any moment. Its state is saved at the end of every epoch, and inside an
epoch whenever `save_every` seconds have passed, 60 unless told otherwise. A save that takes more
than 0.1 s waits at an epoch's end until ten times its duration has passed, but never longer than
`save_every`: on a fast device with a large model it would otherwise cost more than the training.
A validation that is interrupted is made again as a whole. A resumed run goes on from the last
state and ends, on the CPU with as many threads, with the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path, PurePath
from types import FrameType
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from acert import data, models, records
from acert.bounds import worst_case_logits
from acert.data import Augmentation, Dataset, Split, to_float
from acert.data.dataset import split_from_arrays
from acert.errors import AcertError, InvalidInput, RunError
from acert.evaluation import Certificates, evaluate, evaluation_mode, examples
from acert.experiments.experiment import Experiment, build_model, from_config, to_config
from acert.methods import Method
from acert.records import Row
from acert.schedules import LearningRate, OneCycle, RadiusSchedule, SmoothRadius
from acert.training import Settings, Trainer

__all__ = [
    "Bar",
    "Events",
    "Factory",
    "Lines",
    "Progress",
    "Run",
    "Silent",
    "record_certification",
    "resume_run",
    "train",
    "train_run",
]

# Called with (input_shape, num_classes).
Factory = Callable[[tuple[int, ...], int], nn.Module]
Arrays = tuple[Tensor | npt.ArrayLike, Tensor | npt.ArrayLike]

_SAVE_EVERY = 60.0
_SAVE_SHARE = 10
_CHEAP_SAVE = 0.1


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run: the model in evaluation mode, a row per epoch, and the folder if any."""

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
    save_every: float = _SAVE_EVERY,
) -> Run:
    """Trains an experiment into the folder `out`, which must not exist yet unless `resume`.

    `model` is needed where the network is a user's own: a module, taken as it is, or a factory,
    called with (input_shape, num_classes) and initialised as the experiment says. Ctrl-C and
    SIGTERM save the state and raise KeyboardInterrupt, whose message says how to go on.
    """
    folder = Path(out)
    config = {"experiment": to_config(experiment)}
    if resume:
        _refuse_other(folder, "experiment", config["experiment"])
        data_dir = data_dir or records.read_local(folder).get("data_dir")
    else:
        records.check_free(folder)
    settings = experiment.settings
    dataset = data.load(experiment.dataset, data_dir=data_dir, train_on_all=experiment.train_on_all)
    if settings.domain != dataset.domain:
        raise InvalidInput(
            f"`domain` must be that of the data, {dataset.domain}; got {settings.domain}"
        )
    chosen = _device(device)
    with _own_randomness(settings.seed, chosen):
        return _run(
            _network(experiment, dataset, model), dataset, settings,
            config=config, folder=folder, device=chosen, resume=resume,
            validate_every=experiment.validate_every,
            progress=progress, tensorboard=tensorboard, command=command, save_every=save_every,
            local={"data_dir": None if data_dir is None else str(Path(data_dir).resolve())},
            go_on=f"acert train --resume {shlex.quote(str(folder))}",
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
    save_every: float = _SAVE_EVERY,
) -> Run:
    """Goes on with the run in the folder `out`, by its own config; a finished one is loaded."""
    config = records.read_config(Path(out))
    if "experiment" not in config:
        raise RunError(
            f"{out} holds the run of a user's own arrays: call acert.train(..., resume=True) again"
        )
    return train_run(
        from_config(config["experiment"]), out=out, data_dir=data_dir, device=device, resume=True,
        model=model, progress=progress, tensorboard=tensorboard, command=command,
        save_every=save_every,
    )  # fmt: skip


def train(
    model: nn.Module,
    samples: Arrays,
    *,
    method: Method,
    max_radius: float,
    epochs: int,
    batch_size: int | None = None,
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
    save_every: float = _SAVE_EVERY,
) -> Run:
    """Trains a user's own model, in place, on arrays (images, labels); files only with `out`.

    Images are uint8, or float inside `domain`; labels count from 0. What is not given follows
    from the rest: batches of 128, fewer where there are few samples; a one-cycle learning rate
    with its peak at 2e-3, or at `learning_rate` if that is a number; a radius cap that rises
    from epoch 2 on for 40 % of the epochs. With `validation`, accuracy, ACR and ART of those
    samples are in the history every `validate_every` epochs and at the end. `device=None` is
    where the model is.

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
    if validate_every < 1:
        raise InvalidInput(f"`validate_every` must be at least 1; got {validate_every}")
    dataset = data.from_arrays(*samples, domain=domain)
    if validation is not None:
        dataset = _with_validation(dataset, split_from_arrays(*validation, domain=domain))
    if radius_schedule is None:
        length = max(1, round(0.4 * epochs))
        radius_schedule = SmoothRadius(start_epoch=min(2, max(epochs, 1)), length=length)
    if not isinstance(learning_rate, LearningRate):
        learning_rate = OneCycle() if learning_rate is None else OneCycle(max_rate=learning_rate)
    count = len(dataset.train)
    settings = Settings(
        method=method, max_radius=max_radius, epochs=epochs,
        batch_size=min(count, 128, max(16, count // 8)) if batch_size is None else batch_size,
        learning_rate=learning_rate, radius_schedule=radius_schedule,
        regularization=regularization, l1=l1, clip_norm=clip_norm, seed=seed,
        precision=precision, elide=elide, domain=domain, augmentation=augmentation,
    )  # fmt: skip
    config = {
        "settings": to_config(settings),
        "model": type(model).__qualname__,
        "validate_every": validate_every,
    }
    folder = None if out is None else Path(out)
    if folder is not None and resume:
        for name, value in config.items():
            _refuse_other(folder, name, value)
    elif folder is not None:
        records.check_free(folder)
    where = next(model.parameters(), torch.empty(0)).device if device is None else _device(device)
    with _own_randomness(seed, where):
        return _run(
            model, dataset, settings,
            config=config, folder=folder, device=where, resume=resume,
            validate_every=validate_every, progress=progress, tensorboard=tensorboard,
            command=None, save_every=save_every, local={},
            go_on=f"the same call with resume=True and out={str(folder)!r}",
        )  # fmt: skip


def record_certification(
    out: str | PathLike[str], certificates: Certificates, split: Split
) -> None:
    """Writes `certificates.npz` and `examples.npz` into a run folder."""
    folder = Path(out)
    records.write_certificates(folder, certificates.columns)
    records.write_examples(folder, examples(certificates, split))


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
) -> Run:
    """Checks, prepares the folder, trains to the end and writes what the run leaves behind."""
    facts = _facts(dataset)
    model.to(device)
    train_split = dataset.train.to(device)
    _check_fit(model, replace(dataset, train=train_split), settings, exact="experiment" in config)
    trainer = Trainer(model, train_split, settings)
    listener = _progress(progress, every=validate_every)
    listeners = [listener]
    validation = None if dataset.validation is None else dataset.validation.to(device)
    execution = _Execution(trainer, validation, validate_every, folder, save_every, listeners)
    if folder is not None:
        if resume:
            _refuse_other(folder, "data", facts)
            if records.is_finished(folder):
                weights = records.read_weights(folder)
                _fitted(folder, lambda: model.load_state_dict(_to_tensors(weights)))
                listener.note(f"the run in {folder} is finished already")
                return Run(model.eval(), records.read_metrics(folder), folder)
        if tensorboard:
            listeners.append(Events(folder / "events"))
        if not resume:
            records.create(folder)
            records.write_config(folder, config | {"data": facts})
            records.write_local(folder, local)
    execution.start(resume=resume, command=command)
    with _stop_on_signal(execution):
        execution.train(go_on)
    model.eval()
    if folder is not None:
        execution.finish(command=command)
    return Run(model, execution.rows, folder)


@final
class _Execution:
    """One run under way: trains, validates, records, and saves its state when it is due."""

    def __init__(
        self,
        trainer: Trainer,
        validation: Split | None,
        validate_every: int,
        folder: Path | None,
        save_every: float,
        listeners: list[Progress],
    ) -> None:
        self.trainer = trainer
        self.validation = validation
        self.validate_every = validate_every
        self.folder = folder
        self.save_every = save_every
        self.listeners = listeners
        self.rows: list[Row] = []
        # The row of an epoch that is trained but not validated yet.
        self.pending: Row | None = None
        self.stop_requested = False
        self.seconds_before = 0.0
        self.began = self.saved = time.monotonic()
        self.save_cost = 0.0
        self.saved_step: int | None = None

    @property
    def seconds(self) -> float:
        """Time the run has taken, over all its parts."""
        return self.seconds_before + time.monotonic() - self.began

    def start(self, *, resume: bool, command: Sequence[str] | None) -> None:
        """Goes to the last state, or saves the first one; tells the listeners where it stands."""
        if self.folder is not None:
            state = records.read_state(self.folder) if resume else None
            if state is not None:
                self._restore(state)
            # Rows that the state does not know yet are cut off: they will be made again.
            records.write_metrics(self.folder, self.rows)
            self._write_environment(command)
            if state is None:
                self.save()
        for listener in self.listeners:
            listener.start(self.trainer)

    def train(self, go_on: str) -> None:
        """Trains to the end; a failure names the last good state, a stop says how to go on."""
        try:
            self._epochs()
        except RunError as error:
            where = "none, since `out` was not given"
            if self.folder is not None:
                where = f"{self.folder / records.STATE}, step {self.saved_step}"
            raise RunError(f"{error}; the last good checkpoint: {where}") from error
        except _Stop:
            self.save()
            step, total = self.trainer.step, self.trainer.total_steps
            raise KeyboardInterrupt(
                f"stopped after step {step} of {total}, with everything saved. To go on: {go_on}"
            ) from None
        finally:
            for listener in self.listeners:
                listener.close()

    def _epochs(self) -> None:
        trainer = self.trainer
        while len(self.rows) < trainer.settings.epochs:
            if self.pending is None:
                self.pending = self._trained_epoch()
            row = self.pending | self._validated(self.pending["epoch"])
            self.rows.append(row)
            self.pending = None
            over = len(self.rows) == trainer.settings.epochs
            if self.folder is not None:
                records.write_metrics(self.folder, self.rows)
                wait = min(self.save_every, _SAVE_SHARE * self.save_cost)
                if over or self.save_cost < _CHEAP_SAVE or self._since_save() >= wait:
                    self.save()
            for listener in self.listeners:
                listener.epoch(row)

    def _trained_epoch(self) -> Row:
        """The row of one epoch without validation; rate and cap are those of its last step."""
        trainer = self.trainer
        settings, per_epoch = trainer.settings, trainer.steps_per_epoch
        figures = trainer.run_epoch(self._on_step)
        last = trainer.step - 1
        return {
            "epoch": int(figures.pop("epoch")),
            "step": trainer.step,
            "loss": figures["loss"],
            "standard": figures["standard"],
            "robust": figures["robust"],
            "regularization": figures["regularization"],
            "train_accuracy": figures["correct"],
            "learning_rate": settings.learning_rate.rate(
                last, steps_per_epoch=per_epoch, epochs=settings.epochs
            ),
            "radius_cap": settings.radius_schedule.cap(
                last, max_radius=settings.max_radius, steps_per_epoch=per_epoch
            ),
            "seconds": round(figures["seconds"], 3),
        }

    def _validated(self, epoch: int) -> Row:
        """Accuracy, ACR and ART of the validation samples, on epochs that ask for them."""
        settings = self.trainer.settings
        if self.validation is None or (epoch % self.validate_every and epoch < settings.epochs):
            return {}
        if self.folder is not None and self._since_save() >= self.save_every:
            self.save()
        with self.trainer.arithmetic():
            found = evaluate(
                self.trainer.model, self.validation, max_radius=settings.max_radius,
                domain=settings.domain, elide=settings.elide,
                progress=lambda done: self._stop_if_asked(),
            )  # fmt: skip
        return dict(vars(found))

    def _on_step(self, step: int) -> None:
        for listener in self.listeners:
            listener.step(step)
        self._stop_if_asked()
        if self.folder is not None and self._since_save() >= self.save_every:
            self.save()

    def _stop_if_asked(self) -> None:
        # Without a folder nothing could be saved, and no handler is in place.
        if self.stop_requested:
            raise _Stop

    def _since_save(self) -> float:
        return time.monotonic() - self.saved

    def save(self) -> None:
        """Writes the state; refused if NaN has got into it."""
        assert self.folder is not None
        began = time.monotonic()
        tensors, numbers = self.trainer.state()
        facts = numbers | {"rows": len(self.rows), "elapsed": self.seconds}
        records.write_state(self.folder, _to_arrays(tensors), facts | {"pending": self.pending})
        self.saved, self.saved_step = time.monotonic(), self.trainer.step
        self.save_cost = self.saved - began

    def _restore(self, state: records.State) -> None:
        assert self.folder is not None
        tensors, facts = _to_tensors(state.arrays), state.facts
        _fitted(self.folder, lambda: self.trainer.restore(tensors, facts))
        rows = records.read_metrics(self.folder)
        if len(rows) < facts["rows"]:
            raise RunError(
                f"{self.folder / records.METRICS} has {len(rows)} rows, "
                f"but the state knows {facts['rows']}"
            )
        self.rows = rows[: facts["rows"]]
        self.pending, self.seconds_before = facts["pending"], facts["elapsed"]
        self.saved_step = self.trainer.step
        if state.complaint is not None:
            for listener in self.listeners:
                listener.note(state.complaint)

    def finish(self, *, command: Sequence[str] | None) -> None:
        """Writes the weights, last of all, and what the run cost."""
        assert self.folder is not None
        self._write_environment(command)
        records.drop_previous_state(self.folder)
        records.write_weights(self.folder, _to_arrays(self.trainer.model.state_dict()))

    def _write_environment(self, command: Sequence[str] | None) -> None:
        assert self.folder is not None
        facts = _environment(self.trainer.device, command)
        records.write_environment(self.folder, facts | {"seconds": round(self.seconds, 1)})


class _Stop(Exception):
    """Raised between two steps after a signal; never leaves this module."""


@contextmanager
def _stop_on_signal(execution: _Execution) -> Iterator[None]:
    """Ctrl-C and SIGTERM stop the run after its step, a second one at once.

    An exception in the middle of a step would leave weights of two different steps.
    """
    before: dict[int, Any] = {}

    def give_back() -> None:
        while before:
            number, handler = before.popitem()
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        execution.stop_requested = True
        give_back()

    # Without a folder there is nothing to save; only the main thread may set handlers; a
    # signal that is ignored (nohup) stays so.
    if execution.folder is not None and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, ask)
    try:
        yield
    finally:
        give_back()


# -- checks and preparations --------------------------------------------------------------


def _network(
    experiment: Experiment, dataset: Dataset, model: nn.Module | Factory | None
) -> nn.Module:
    seed, network = experiment.settings.seed, experiment.network
    if model is None:
        return build_model(network, dataset, seed=seed)
    if isinstance(model, nn.Module):
        return model
    torch.manual_seed(seed)
    built = model(dataset.input_shape, dataset.num_classes)
    if not isinstance(built, nn.Module):
        raise InvalidInput(f"`model` must make a torch.nn.Module; got {type(built).__name__}")
    return models.ibp_init_(built) if network.initialization == "ibp" else built


def _with_validation(dataset: Dataset, split: Split) -> Dataset:
    shape, largest = tuple(split.images.shape[1:]), int(split.labels.max())
    if shape != dataset.input_shape or largest >= dataset.num_classes:
        raise InvalidInput(
            f"`validation` must be like the training samples, inputs of {dataset.input_shape} and "
            f"labels up to {dataset.num_classes - 1}; got {shape} and {largest}"
        )
    return replace(dataset, validation=split)


def _device(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    # torch raises an AssertionError where it was built without CUDA.
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(f"`device` must be available here; got {device} ({reason})") from error
    return torch.empty(0, device=chosen).device


@contextmanager
def _own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from the seed for what a model draws itself; the caller's come back."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _check_fit(model: nn.Module, dataset: Dataset, settings: Settings, *, exact: bool) -> None:
    """Refuses a model that does not fit the data or the method, before anything is written."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidInput("`model` must have parameters to train; got none")
    images, labels = to_float(dataset.train.images[:2]), dataset.train.labels[:2]
    with evaluation_mode(model), torch.no_grad():
        try:
            logits = model(images)
        except AcertError:
            raise
        # Everything: what a module raises for a wrong shape is its own affair.
        except Exception as error:
            raise InvalidInput(
                f"`model` must take the inputs of {dataset.name}, of shape {dataset.input_shape}; "
                f"it answered: {(str(error) or type(error).__name__).splitlines()[0]}"
            ) from error
        shape = tuple(logits.shape)
        if len(shape) != 2 or shape[0] != len(images):
            raise InvalidInput(f"`model` must return logits of shape (batch, classes); got {shape}")
        classes = dataset.num_classes
        if shape[1] < classes or (exact and shape[1] > classes):
            raise InvalidInput(
                f"`model` must have {classes} outputs, one a class of {dataset.name}; "
                f"got {shape[1]}"
            )
        if settings.method.uses_bounds:
            worst_case_logits(
                model, images, labels, settings.max_radius,
                elide=settings.elide, domain=settings.domain,
            )  # fmt: skip


def _refuse_other(folder: Path, name: str, value: Any) -> None:
    """Refuses to resume a run with another config, or on other data, than it was begun with."""
    kept = records.read_config(folder)
    found = records.first_difference({name: kept.get(name)}, {name: value})
    if found is not None:
        raise RunError(f"the run in {folder} cannot be resumed with another config: {found}")


def _fitted(folder: Path, load: Callable[[], object]) -> None:
    try:
        load()
    except (RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise RunError(f"the state in {folder} does not fit the model: {reason}") from error


def _to_arrays(tensors: dict[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
    return {name: value.detach().cpu().contiguous().numpy() for name, value in tensors.items()}


def _to_tensors(arrays: dict[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in arrays.items()}


def _facts(dataset: Dataset) -> dict[str, Any]:
    """What a config says of the data: enough to build the model, and to know them again."""
    digest = hashlib.sha256()
    for tensor in (dataset.train.images, dataset.train.labels):
        digest.update(np.ascontiguousarray(tensor.numpy()).data)
    return {
        "name": dataset.name,
        "input_shape": list(dataset.input_shape),
        "classes": list(dataset.classes),
        "mean": list(dataset.mean),
        "std": list(dataset.std),
        "domain": list(dataset.domain),
        "train": len(dataset.train),
        "validation": 0 if dataset.validation is None else len(dataset.validation),
        "sha256": digest.hexdigest(),
    }


# -- env.json -----------------------------------------------------------------------------


def _environment(device: torch.device, command: Sequence[str] | None) -> dict[str, Any]:
    """Commit, versions and hardware; no host names, user names or paths."""
    from acert import __version__

    facts: dict[str, Any] = {
        "commit": _commit(),
        "acert": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": device.type,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "command": None if command is None else shlex.join(_without_paths(command)),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = properties.name
        facts["gpu_memory_gib"] = round(properties.total_memory / 2**30)
        facts["cuda"] = torch.version.cuda
    return facts


def _commit() -> str | None:
    """The commit that this package was checked out from.

    A copied tree has no history: there `$ACERT_COMMIT` may say it, else None.
    """
    package = Path(__file__).parent.parent

    def git(*words: str) -> str:
        call = ["git", "-C", str(package), *words]
        done = subprocess.run(call, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        # An installed package may lie inside a repository that is not its own.
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = "-modified" if git("status", "--porcelain", "--", str(package)) else ""
        return git("rev-parse", "HEAD") + changed
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("ACERT_COMMIT")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _without_paths(words: Sequence[str]) -> list[str]:
    """The words of a command with the last part of each path that does not start here."""
    short = []
    for word in words:
        name, equals, value = word.rpartition("=")
        path = PurePath(value)
        outside = path.is_absolute() or value.startswith("~") or ".." in path.parts
        short.append(name + equals + (path.name if outside else value))
    return short


# -- what is shown while a run is under way -----------------------------------------------


class Progress(ABC):
    """Told how a run goes; what it prints goes to stderr."""

    @abstractmethod
    def start(self, trainer: Trainer) -> None:
        """The run begins, or goes on, from `trainer.step`."""

    @abstractmethod
    def step(self, step: int) -> None:
        """So many steps are done."""

    @abstractmethod
    def epoch(self, row: Row) -> None:
        """An epoch is over; its row is on disk."""

    @abstractmethod
    def close(self) -> None:
        """The run is over, at its end or before."""

    def note(self, text: str) -> None:
        """Something that the user should know."""
        print(text, file=sys.stderr)


@final
class Silent(Progress):
    """Shows notes only."""

    def start(self, trainer: Trainer) -> None:
        """Shows nothing."""

    def step(self, step: int) -> None:
        """Shows nothing."""

    def epoch(self, row: Row) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Shows nothing."""


@final
class Lines(Progress):
    """A line for every epoch that was validated; for all of them where none is, every few."""

    def __init__(self, *, every: int = 1) -> None:
        self.every = every

    def start(self, trainer: Trainer) -> None:
        """Notes the time, to tell how much is left."""
        self.began, self.first = time.monotonic(), trainer.step
        self.epochs, self.total = trainer.settings.epochs, trainer.total_steps

    def step(self, step: int) -> None:
        """Shows nothing."""

    def epoch(self, row: Row) -> None:
        """Prints epoch, figures and the time left."""
        if "art" in row or row["epoch"] % self.every == 0 or row["epoch"] == self.epochs:
            spent, done = time.monotonic() - self.began, row["step"] - self.first
            left = spent / max(done, 1) * (self.total - row["step"])
            print(
                f"epoch {row['epoch']}/{self.epochs}  {_figures(row)}  {left:.0f} s left",
                file=sys.stderr,
            )

    def close(self) -> None:
        """Shows nothing."""


@final
class Bar(Progress):
    """A bar with the last epoch's loss, the last validation and the time left; needs rich."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.bar = RichProgress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console or Console(stderr=True),
        )
        self.validation: Row = {}

    def start(self, trainer: Trainer) -> None:
        """Shows the bar as far as the run is."""
        self.epochs = trainer.settings.epochs
        self.task = self.bar.add_task(
            "", total=trainer.total_steps, completed=trainer.step,
            epoch=f"{min(trainer.epoch, self.epochs)}/{self.epochs}", figures="",
        )  # fmt: skip
        self.bar.start()

    def step(self, step: int) -> None:
        """Moves the bar."""
        self.bar.update(self.task, completed=step)

    def epoch(self, row: Row) -> None:
        """Shows the figures until there are newer ones."""
        if "art" in row:
            self.validation = {name: row[name] for name in ("accuracy", "acr", "art")}
        epoch = f"{min(row['epoch'] + 1, self.epochs)}/{self.epochs}"
        self.bar.update(self.task, epoch=epoch, figures=_figures(self.validation | row))

    def note(self, text: str) -> None:
        """Prints above the bar."""
        self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the bar as it is."""
        self.bar.stop()


@final
class Events(Progress):
    """The rows as TensorBoard events; needs the package tensorboard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise RunError("`tensorboard` needs the package tensorboard: install it") from None
        self.open: Callable[[int], Any] = lambda step: SummaryWriter(str(folder), purge_step=step)

    def start(self, trainer: Trainer) -> None:
        """Opens the file; events of steps that a resumed run makes again are hidden."""
        self.writer = self.open(trainer.step + 1)

    def step(self, step: int) -> None:
        """Writes nothing."""

    def epoch(self, row: Row) -> None:
        """Writes every figure of the row at its step."""
        for name, value in row.items():
            if name != "step":
                self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Closes the file."""
        self.writer.close()


def _progress(chosen: Progress | bool, *, every: int) -> Progress:
    """A bar on a terminal where rich is installed, else lines."""
    if isinstance(chosen, Progress):
        return chosen
    if not chosen:
        return Silent()
    if sys.stderr.isatty():
        try:
            return Bar()
        except ImportError:
            pass
    return Lines(every=every)


def _figures(row: Row) -> str:
    text = f"loss {row['loss']:.4f}"
    if "art" in row:
        shown = (("Acc", "accuracy"), ("ACR", "acr"), ("ART", "art"))
        text += "  val " + " ".join(f"{label} {100 * row[name]:.2f}" for label, name in shown)
    return text
