"""Coroutines side by side of which none is left running, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any


async def side_by_side(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs all to their end. Where one raises, or the caller is cancelled, the others are given up first."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        await give_up(tasks)


async def give_up(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancels what still runs, waits until nothing does, and raises the exception of one that raised."""
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
