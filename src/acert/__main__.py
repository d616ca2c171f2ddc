"""`python -m acert` is the command `acert`."""

import os
import sys

from acert.cli import main

if __name__ == "__main__":
    status = main()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A process of torchrun ends here. Gloo's threads abort about one in forty while Python
        # takes itself down, and torchrun then ends the others, whatever they are still writing.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
