"""The command `acert`: one file a verb, which parses, calls and prints.

Errors are one line on stderr and exit status 2; Ctrl-C is 130, with the command that goes on.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence

from acert.errors import AcertError, LostProcess
from acert.extras import needs
from acert.untrusted import shown

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    _open_streams()
    # torchrun numbers its processes; all of them fail alike, and one tells.
    first = os.environ.get("RANK", "0") == "0"
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: _warn(message)
            return _run(words)
    except LostProcess as error:
        from acert.processes import speaks_for_all

        # Whoever is left speaks, but one of them only.
        if speaks_for_all():
            print(f"acert: {error}", file=sys.stderr)
        return 2
    except AcertError as error:
        if not first:
            return 2
        # Names of files and what is in them may be a stranger's.
        print(f"acert: {shown(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"acert: this {needs(str(error.name))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        if first:
            print(f"\nacert: {str(stop) or 'stopped'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone, as `head` does; what is left of it goes nowhere.
        _drop_output()
        return 141
    except OSError as error:
        # A disk that is full or read-only may be met anywhere, by what is printed too.
        place = "" if error.filename is None else f"{error.filename}: "
        print(f"acert: {shown(f'{place}{error.strerror or error}')}", file=sys.stderr)
        _drop_output()
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        reason = (str(error).splitlines() or ["no memory"])[0]
        hint = "a smaller --batch-size or network needs less"
        print(f"acert: there is not enough memory: {hint} ({reason})", file=sys.stderr)
        return 2


def _run(words: list[str]) -> int:
    # Here, because torch takes a second to import and Ctrl-C must be ours by then.
    from acert.cli.parser import parsed

    options = parsed(words)
    options.command = ["acert", *words]
    status: int | None = options.verb(options)
    # Here, where a closed pipe is still ours to handle.
    sys.stdout.flush()
    return status or 0


def _warn(message: Warning | str) -> None:
    """A warning in one line, as errors are."""
    print(f"acert: {shown(' '.join(str(message).split()))}", file=sys.stderr)


def _open_streams() -> None:
    """Gives a process that was started without output some, and any name letters it can show."""
    for name in ("stdout", "stderr"):
        stream = vars(sys)[name]
        if stream is None:  # closed by the caller, as `>&-` does
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, io.TextIOWrapper(io.FileIO(nowhere, "w"), encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _out_of_memory(error: Exception) -> bool:
    """Whether memory was short; on a CPU PyTorch has words for that, but no class."""
    from torch import OutOfMemoryError

    return isinstance(error, MemoryError | OutOfMemoryError) or "allocate memory" in str(error)


def _drop_output() -> None:
    """Sends what is still to be flushed nowhere: Python would complain of it at its exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
