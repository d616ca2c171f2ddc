"""What several verbs share: kinds of flags, the device, a user's own model, figures."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from acert.errors import InvalidInput
from acert.experiments.budget import duration, spoken
from acert.experiments.choice import own_model
from acert.experiments.override import number
from acert.experiments.preparation import available_device

__all__ = [
    "Parser",
    "add_place",
    "add_verb",
    "as_duration",
    "as_list",
    "as_number",
    "as_numbers",
    "chosen_device",
    "counter",
    "figures",
    "own_model",
]


_SAY_EVERY = 60.0  # seconds, where there is no terminal


class Parser(argparse.ArgumentParser):
    """Reports a mistake as one of our errors, so that all are printed alike."""

    def error(self, message: str) -> NoReturn:
        """Raises what `main` prints as one line."""
        raise InvalidInput(f"{message} (see {self.prog} --help)")


def add_verb(
    verbs: Any,
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    *,
    summary: str,
    description: str,
    examples: str,
) -> Parser:
    """The parser of a verb that calls `run`."""
    parser: Parser = verbs.add_parser(
        name, help=summary, description=description, epilog=examples, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(verb=run)
    return parser


def add_place(parser: Parser) -> None:
    """Adds --data-dir and --device."""
    parser.add_argument("--data-dir", type=Path, help="where the data are ($ACERT_DATA_DIR)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: cuda where there is one)")


def as_number(text: str) -> float:
    """A number or a fraction, for `type=`."""
    # argparse shows the words of this error alone.
    try:
        return number(text)
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def as_duration(text: str) -> float:
    """A duration such as 90s, 25m or 2h in seconds, for `type=`."""
    try:
        return duration(text)
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def as_list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Values between commas, each of them once, for `type=`."""

    def read(text: str) -> list[Any]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise argparse.ArgumentTypeError(f"values between commas are needed; got {text!r}")
        try:
            return list(dict.fromkeys(kind(part) for part in parts))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"whole numbers between commas are needed; got {text!r}"
            ) from None

    return read


def as_numbers(text: str) -> list[float]:
    """Numbers or fractions between commas, for `type=`."""
    return [as_number(part) for part in text.split(",")]


def chosen_device(name: str | None) -> str:
    """The device of that name, CUDA where there is one if none is named; refused if not there."""
    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    available_device(chosen)
    return chosen


def counter(total: int, what: str = "certified") -> Callable[[int], None]:
    """Shows how many samples are done and how long the rest may take.

    Anywhere but on a terminal that is a line a minute, and nothing where it is over before.
    """
    terminal, said = sys.stderr.isatty(), time.monotonic()
    first: tuple[int, float] | None = None

    def show(done: int) -> None:
        nonlocal said, first
        now = time.monotonic()
        # What was kept of an earlier call is there at once, and tells nothing of the time.
        first = first or (done, now)
        count, spent = done - first[0], now - first[1]
        left = f", {spoken(spent * (total - done) / count)} left" if count and done < total else ""
        if terminal:
            end = "\n" if done == total else ""
            print(f"\r\x1b[K{done}/{total} {what}{left}", end=end, file=sys.stderr, flush=True)
        elif now - said >= _SAY_EVERY:
            said = now
            print(f"{done}/{total} {what}{left}", file=sys.stderr, flush=True)

    return show


def figures(accuracy: float, acr: float, art: float) -> str:
    """Accuracy, ACR and ART in per cent."""
    return f"Acc {100 * accuracy:.2f}  ACR {100 * acr:.2f}  ART {100 * art:.2f}"
