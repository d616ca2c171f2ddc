"""Published records: what of a run folder goes under `results/`, small, and read back.

A record is a folder with `config.json`, `metrics.jsonl`, `certificates.npz`, `env.json`, and
where there are any `examples.npz` and `root-steps.json`. Weights and states do not go in. At most
250 kB a record and 10 MB in all.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acert import records
from acert.errors import AcertError, InvalidInput, RunError
from acert.evaluation import Certificates
from acert.experiments.experiment import Experiment, read_experiment
from acert.experiments.paper.root_steps import RootSteps
from acert.untrusted import fresh, parsed_json, read_text, within

__all__ = [
    "RECORD_LIMIT",
    "ROOT_STEPS",
    "STORE_LIMIT",
    "Record",
    "folder_size",
    "publish",
    "read_record",
    "read_records",
    "write_root_steps",
]

RECORD_LIMIT = 250_000
STORE_LIMIT = 10_000_000
ROOT_STEPS = "root-steps.json"
# Of both the most and the least certified images.
_EXAMPLES_LIMIT = 25_000
# Digits that a table or a curve could show.
_DIGITS = 6


@dataclass(frozen=True, eq=False)
class Record:
    """A finished and certified run: what it was, what was proven, and where it was made."""

    folder: Path
    experiment: Experiment
    certificates: Certificates
    environment: dict[str, Any]
    metrics: list[records.Row]
    root_steps: RootSteps | None

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.experiment.settings.seed

    @property
    def epochs(self) -> int:
        """How many epochs the run had."""
        return self.experiment.settings.epochs

    @property
    def hardware(self) -> str:
        """The GPU, or the CPU where none was used."""
        return str(self.environment.get("gpu") or self.environment.get("cpu") or "unknown")

    @property
    def shared(self) -> bool:
        """Whether another run had the same GPU, which makes times too long."""
        return bool(self.environment.get("gpu_shared"))

    @property
    def minutes(self) -> float | None:
        """Time of the whole training; None where nobody knows, or the GPU was shared."""
        seconds = None if self.shared else self.environment.get("seconds")
        return None if seconds is None else float(seconds) / 60

    @property
    def epoch_seconds(self) -> float:
        """Median time of an epoch; the first, which compiles, is left out where there are more."""
        seconds = sorted(float(row["seconds"]) for row in self.metrics[1:] or self.metrics)
        return seconds[len(seconds) // 2]

    @property
    def step_seconds(self) -> float | None:
        """Time of a training step, from the median epoch; None where the GPU was shared."""
        if self.shared:
            return None
        return self.epoch_seconds * len(self.metrics) / float(self.metrics[-1]["step"])


def publish(run: Path, results: Path, *, name: str | None = None) -> Path:
    """Copies what belongs to a record into `results`, shrunk; returns the record's folder.

    The run must be finished and certified. An older record of the same experiment is replaced;
    a record of another one is refused, and so is one that is too large.
    """
    if not records.is_finished(run):
        raise RunError(f"the run in {run} is not finished: it cannot be published")
    config = records.read_config(run)
    folder = results / (name or run.name)
    if folder.is_dir():
        there = records.read_config(folder).get("experiment")
        found = records.first_difference(there, config.get("experiment"))
        if found is not None:
            raise RunError(f"{folder} holds the record of another run: {found}")
    # Beside its place, with the dot of a draft: half a record is never seen.
    draft = results / f".{folder.name}.tmp"
    shutil.rmtree(draft, ignore_errors=True)
    records.make_writable(draft)
    records.write_config(draft, config)
    records.write_metrics(draft, [_rounded(row) for row in records.read_metrics(run)])
    records.write_environment(draft, _without_places(records.read_environment(run)))
    records.write_certificates(draft, records.read_certificates(run))
    if (run / records.EXAMPLES).is_file():
        records.write_examples(draft, _fewer(records.read_examples(run)))
    steps = _read_root_steps(run)
    if steps is not None:
        write_root_steps(draft, steps)
    size = folder_size(draft)
    rest = folder_size(results) - size - folder_size(folder)
    for what, bytes_, limit in (
        (f"the record of {run}", size, RECORD_LIMIT),
        (f"{results} with it", size + rest, STORE_LIMIT),
    ):
        if bytes_ > limit:
            shutil.rmtree(draft)
            raise RunError(f"{what} must be at most {limit // 1000} kB; got {bytes_ // 1000} kB")
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    return folder


def read_record(folder: Path) -> Record:
    """The record in a folder; a damaged file is named, before a table asks for its figures."""
    record = Record(
        folder=folder,
        experiment=read_experiment(folder),
        certificates=Certificates(**records.read_certificates(folder)),
        environment=records.read_environment(folder),
        metrics=records.read_metrics(folder),
        root_steps=_read_root_steps(folder),
    )
    _check_certificates(record)
    _check_epochs(record)
    _check_times(record)
    return record


def read_records(results: Path) -> tuple[list[Record], list[str]]:
    """Every record under `results` by name, and a line for each that cannot be read."""
    found, complaints = [], []
    for folder in _folders(results):
        try:
            found.append(read_record(folder))
        except AcertError as error:
            complaints.append(str(error))
    return found, complaints


def write_root_steps(run: Path, found: RootSteps) -> None:
    """Writes `root-steps.json` into a run folder."""
    draft = run / f".{ROOT_STEPS}.tmp"
    with fresh(draft) as stream:
        stream.write((json.dumps({"schema": records.SCHEMA, **vars(found)}) + "\n").encode())
    draft.replace(run / ROOT_STEPS)


def folder_size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _read_root_steps(folder: Path) -> RootSteps | None:
    path = folder / ROOT_STEPS
    if not path.is_file():
        return None
    try:
        value = parsed_json(read_text(within(path, folder)))
        schema, found = int(value["schema"]), RootSteps.from_json(value)
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise RunError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if schema > records.SCHEMA:
        raise RunError(
            f"{path} has schema {schema}, this acert knows schemas up to {records.SCHEMA}: "
            "a newer acert is needed"
        )
    return found


def _check_certificates(record: Record) -> None:
    """Refuses radii that have no mean, such as NaN."""
    try:
        _ = record.certificates.art
    except InvalidInput as error:
        path = record.folder / records.CERTIFICATES
        raise RunError(f"{path} is damaged: {error}") from error


def _check_epochs(record: Record) -> None:
    """Refuses the figures of a run that was not trained to its end."""
    epochs = [row.get("epoch") for row in record.metrics]
    if epochs != [*range(1, record.epochs + 1)]:
        raise RunError(
            f"{record.folder / records.METRICS} is damaged: it must hold every epoch from 1 to "
            f"{record.epochs} once; got {len(epochs)} rows"
        )


def _check_times(record: Record) -> None:
    """Refuses rows without times and steps, and times that are no numbers."""
    path = record.folder / records.METRICS
    try:
        _ = (
            record.step_seconds,
            record.epoch_seconds,
            [float(row["seconds"]) for row in record.metrics],
        )
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    for name in ("seconds", "certification_seconds"):
        value = record.environment.get(name)
        if value is not None and not _is_time(value):
            path = record.folder / records.ENVIRONMENT
            raise RunError(f"{path} is damaged: `{name}` must be a number; got {value!r}")


def _is_time(value: object) -> bool:
    # Compared, since JSON has whole numbers that no float holds.
    return isinstance(value, (int, float)) and 0 <= value <= sys.float_info.max


def _folders(results: Path) -> list[Path]:
    if not results.is_dir():
        return []
    found = [path.parent for path in results.glob(f"*/{records.CONFIG}")]
    return sorted(folder for folder in found if not folder.name.startswith("."))


def _rounded(row: records.Row) -> records.Row:
    return {
        key: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
        for key, value in row.items()
    }


def _without_places(environment: dict[str, Any]) -> dict[str, Any]:
    """The environment with `DATA` for the folder of the data."""
    command = environment.get("command")
    if not isinstance(command, str):
        return environment
    try:
        words = shlex.split(command)
    except ValueError:  # a quote without its end, which no command of ours has
        return environment | {"command": None}
    for at, word in enumerate(words):
        if word == "--data-dir" and at + 1 < len(words):
            words[at + 1] = "DATA"
        elif word.startswith("--data-dir="):
            words[at] = "--data-dir=DATA"
    return environment | {"command": shlex.join(words)}


def _fewer(examples: dict[str, records.Array]) -> dict[str, records.Array]:
    """As many of the most and the least certified images as are small."""
    images: Sequence[records.Array] = [
        array for name, array in examples.items() if name.endswith("_images")
    ]
    each = sum(int(array[0].nbytes) for array in images if len(array))
    count = _EXAMPLES_LIMIT // max(each, 1)
    return {name: array[:count] for name, array in examples.items()}
