"""What tests ask of other processes."""

from __future__ import annotations

import psutil

PATIENCE_S = 1200.0
"""How long anything may take on a busy machine; what takes longer is broken."""


def name_of(process: psutil.Process) -> str:
    """The name of a process; empty where it has ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def command_of(process: psutil.Process) -> str:
    """The command line of a process; empty where it has ended, also where it ends while it is read."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie too
        return ""
