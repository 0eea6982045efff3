"""Runs `roll` as `python -m roll`."""

import sys

from roll.cli import main

if __name__ == "__main__":
    sys.exit(main())
