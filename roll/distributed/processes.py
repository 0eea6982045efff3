"""Python's garbage collector, in processes that have imported much."""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Takes all objects there are out of the collector's sight; for a process that has just started.

    Modules such as torch and SGLang leave millions of objects that stay. Every full collection would walk through them,
    half a second at a time, and small objects that come and go, such as requests, are what brings one about.
    """
    gc.collect()
    gc.freeze()


def unfreeze_heap() -> None:
    """Gives all objects back to the collector, which at a process's exit is to find what nobody needs any more."""
    gc.unfreeze()
