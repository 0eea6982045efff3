"""Answers that are fetched later, by the id of their request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from roll.base.errors import RunError
from roll.serve.wire import WireError

logger = logging.getLogger(__name__)

KEPT = 256
"""Fetched answers that are kept, the newest: a client fetches one again when its connection was lost."""

Answer = dict[str, Any] | bytes


class Futures:
    """Requests that are being worked on, and their answers. A request that is sent again joins the first one."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Answer]] = {}
        self._fetched: dict[str, None] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tasks

    def start(self, request_id: str, work: Callable[[], Coroutine[Any, Any, Answer]]) -> None:
        """Begins the work of a request, unless it has begun."""
        if request_id not in self._tasks:
            self._tasks[request_id] = asyncio.create_task(work())

    async def fetch(self, request_id: str, seconds: float) -> Answer | None:
        """The answer, or the error in Tinker's form; None if there is none after these seconds.

        Raises:
            WireError: no request has this id.
        """
        if request_id not in self._tasks:
            raise WireError(f"request_id: {request_id} is unknown, or its answer was fetched long ago")
        task = self._tasks[request_id]
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            return None
        self._fetched[request_id] = None
        if len(self._fetched) > KEPT:
            oldest = next(iter(self._fetched))
            del self._fetched[oldest]
            self._tasks.pop(oldest, None)
        return await _answer(task)

    def close(self) -> None:
        """Cancels all work."""
        for task in self._tasks.values():
            task.cancel()


async def _answer(task: Awaitable[Answer]) -> Answer:
    try:
        return await task
    except WireError as error:
        return {"error": str(error), "category": "user"}
    except RunError as error:
        return {"error": str(error), "category": "server"}
    except Exception as error:
        logger.exception("a request failed")
        return {"error": f"{type(error).__name__}: {error}", "category": "server"}
