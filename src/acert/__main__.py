"""`python -m acert` is the command `acert`."""

import sys

from acert.cli import main

if __name__ == "__main__":
    sys.exit(main())
