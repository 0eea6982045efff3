"""What tests ask of other processes."""

from __future__ import annotations

import psutil


def command_of(process: psutil.Process) -> str:
    """The command line of a process; empty where it has ended, also where it ends while it is read."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie too
        return ""
