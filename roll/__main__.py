"""Runs `roll` as `python -m roll`."""

import os
import sys

if __name__ == "__main__":
    library = os.path.dirname(os.__file__)
    sys.path[:0] = library, f"{library}/lib-dynload"  # before the current folder, which `-m` puts first

    from roll.cli import main

    sys.exit(main())
