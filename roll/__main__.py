"""`python -m roll` is the command `roll`."""

import sys

from roll.cli import main

if __name__ == "__main__":
    sys.exit(main())
