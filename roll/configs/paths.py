"""Why what is at a path is of no use to this user."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def unreachable(path: str | Path) -> str | None:
    """Why nothing at the path can be read, in the system's words; None where it can, or where nothing is."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.strerror
    needed = os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK
    return None if os.access(path, needed) else os.strerror(errno.EACCES)
