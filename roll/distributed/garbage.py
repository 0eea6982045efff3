"""Python's garbage collector, in processes that have imported much."""

from __future__ import annotations

import gc


def leave_out_what_is_here() -> None:
    """Takes all objects there are out of the collector's sight, once a process has started.

    Modules such as torch and SGLang leave millions of objects that stay. Every full collection would walk through them,
    half a second at a time, and small objects that come and go, such as requests, are what brings one about.
    """
    gc.collect()
    gc.freeze()


def take_in_all() -> None:
    """Ends that; a process that exits is to find what nobody needs any more."""
    gc.unfreeze()
