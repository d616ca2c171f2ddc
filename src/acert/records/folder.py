"""The run folder itself: free for a new run, made, writable, finished."""

from __future__ import annotations

from pathlib import Path
from tempfile import NamedTemporaryFile

from acert.errors import RunError
from acert.records.files import CONFIG, WEIGHTS, is_draft

__all__ = ["check_free", "create", "is_finished", "make_writable"]


def check_free(folder: Path, *, go_on: str | None = None) -> None:
    """Refuses a folder that already holds anything; `go_on` says how to go on with a run."""
    # Drafts of a run that was killed before its first file count as nothing.
    if folder.is_file() or (
        folder.is_dir() and not all(is_draft(path) for path in folder.iterdir())
    ):
        hint = f", or go on with it: {go_on}" if go_on and (folder / CONFIG).is_file() else ""
        raise RunError(f"the run folder {folder} exists already: choose another{hint}")


def create(folder: Path) -> None:
    """Makes the folder of a new run, with the folders above it."""
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"the run folder {folder} cannot be made: {error.strerror or error}"
        ) from error


def make_writable(folder: Path) -> None:
    """Makes the folder if there is none, and finds out whether a file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A name of its own: the processes of a run all ask at once.
        with NamedTemporaryFile(dir=folder, prefix=".probe-", suffix=".tmp"):
            pass
    except OSError as error:
        raise RunError(f"nothing can be written to {folder}: {error.strerror or error}") from error


def is_finished(folder: Path) -> bool:
    """Whether the run came to its end: the weights are written last."""
    return (folder / WEIGHTS).is_file()
