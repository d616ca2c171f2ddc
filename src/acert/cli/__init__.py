"""The command `acert`: one file a verb, which parses, calls and prints.

Errors are one line on stderr and exit status 2; Ctrl-C is 130, with the command that goes on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from acert.errors import AcertError, LostProcess
from acert.untrusted import shown

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    # torchrun numbers its processes; all of them fail alike, and one tells.
    first = os.environ.get("RANK", "0") == "0"
    try:
        # Here, because torch takes a second to import and Ctrl-C must be ours by then.
        from acert.cli.parser import parsed

        options = parsed(words)
        options.command = ["acert", *words]
        status: int | None = options.verb(options)
        # Here, where a closed pipe is still ours to handle.
        sys.stdout.flush()
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
        print(f"acert: this needs the package {error.name}: install it", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        if first:
            print(f"\nacert: {str(stop) or 'stopped'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone, as `head` does; what is left of it goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status or 0
