"""Errors that end a run with a sentence instead of a traceback."""

from __future__ import annotations


class RunError(RuntimeError):
    """The run cannot go on; the message says what happened, where, and what to change."""
