"""The verbs and flags of the command `acert`; mistakes in them are our errors."""

from __future__ import annotations

import argparse
import os
from types import ModuleType

import acert
from acert.cli import certify, export, report, reproduce, sweep, train
from acert.cli.flags import Parser
from acert.errors import InvalidInput
from acert.experiments.override import nearest

__all__ = ["parsed", "verbs"]

# In the order of --help. Each has `add(verbs)`, which returns its parser.
_VERBS: dict[str, ModuleType] = {
    "train": train,
    "certify": certify,
    "export": export,
    "sweep": sweep,
    "report": report,
    "reproduce": reproduce,
}
# Several processes of torchrun share the work of these.
_SHARED = ("train", "certify")


def parsed(words: list[str]) -> argparse.Namespace:
    """The flags of one command, with the function to call under `verb`."""
    parser, parsers = verbs()
    if not words:
        parser.print_help()
        raise SystemExit(0)
    if not words[0].startswith("-") and words[0] not in parsers:
        raise InvalidInput(
            f"the verb must be one of {', '.join(parsers)}; got {words[0]!r}"
            f"{nearest(words[0], parsers)}"
        )
    if words[0].startswith("-") and words[0] not in parser._option_string_actions:
        raise InvalidInput(
            f"unknown argument {words[0]!r}{nearest(words[0], parser._option_string_actions)}"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ and words[0] not in _SHARED:
        raise InvalidInput(
            f"torchrun is for {' and '.join(_SHARED)}, whose processes share the work; start "
            f"`acert {words[0]}` without it"
        )
    options, unknown = parser.parse_known_args(words)
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-")] or unknown
    if flags:
        known = parsers[words[0]]._option_string_actions if words[0] in parsers else ()
        raise InvalidInput(f"unknown argument {flags[0]!r}{nearest(flags[0], known)}")
    return options


def verbs() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole command, and that of every verb by its name."""
    parser = Parser(prog="acert", description=acert.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"acert {acert.__version__}")
    subparsers = parser.add_subparsers(metavar="VERB", required=True)
    return parser, {name: verb.add(subparsers) for name, verb in _VERBS.items()}
