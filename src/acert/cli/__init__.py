"""The command `acert`: one file a verb, which parses, calls and prints.

Errors are one line on stderr and exit status 2; Ctrl-C is 130, with the command that goes on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from acert.errors import AcertError
from acert.untrusted import shown

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        # Here, because torch takes a second to import and Ctrl-C must be ours by then.
        from acert.cli.parser import parsed

        options = parsed(words)
        options.command = ["acert", *words]
        status: int | None = options.verb(options)
        # Here, where a closed pipe is still ours to handle.
        sys.stdout.flush()
    except AcertError as error:
        # Names of files and what is in them may be a stranger's.
        print(f"acert: {shown(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"acert: this needs the package {error.name}: install it", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"\nacert: {str(stop) or 'stopped'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone, as `head` does; what is left of it goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status or 0
