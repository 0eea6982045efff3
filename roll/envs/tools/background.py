"""One event loop in a thread of its own, for what tools wait for: programs and servers outlive a call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_starting = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []


def tool_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process, which runs."""
    with _starting:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            threading.Thread(target=_loops[0].run_forever, name="tools", daemon=True).start()
    return _loops[0]


def run_on_tool_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, which must end by itself."""
    return asyncio.run_coroutine_threadsafe(coroutine, tool_loop()).result()
