"""Which requests an engine runs next: the oldest first, and few newer ones beside requests due in the next batch.

Training waits for prompts that are due in the next batch. Where each request makes a step of the engine longer, as on a
CPU, newer requests that share the engine delay them. At async_generation_ratio 1 that feeds on itself: the next batch
begins to generate as soon as training waits for the last answers of this one, makes them late, and is itself complete
early, so that the engine then waits for training. So engine and trainer wait in turn, and a step takes longer than
either needs. Plain Python, without a clock.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from typing import Generic, TypeVar

T = TypeVar("T")


class RequestOrder(Generic[T]):
    """Waiting and running requests of one engine. Each change costs O(log requests).

    Requests start in the order of their prompts' versions, and of their arrival within a version. One starts while

    - fewer than `running` run, and
    - no older one runs that is due, or fewer than `newer` that are newer than the oldest.
    """

    def __init__(self, running: int, newer: int | None) -> None:
        """Starts with no request.

        Args:
            running: most requests that run at a time.
            newer: most that start beside an older one that is due; None: no limit.

        Raises:
            ValueError: a limit is out of range.
        """
        if running < 1 or (newer is not None and newer < 0):
            raise ValueError(f"running: {running} is not at least 1, or newer: {newer} is not at least 0")
        self._limit, self._newer = running, newer
        self._waiting: list[tuple[int, int, T]] = []
        self._arrivals = itertools.count()
        self._running: Counter[int] = Counter()

    def add(self, version: int, request: T) -> None:
        """Enqueues a request for a prompt that was submitted at this version of the weights."""
        heapq.heappush(self._waiting, (version, next(self._arrivals), request))

    def start(self, due: float) -> list[tuple[int, T]]:
        """Removes the requests that may start now and returns them with their versions; they run until `end`.

        Args:
            due: requests of versions up to this one are due in the next batch.
        """
        started = []
        while self._waiting and self._may_start(self._waiting[0][0], due):
            version, _, request = heapq.heappop(self._waiting)
            self._running[version] += 1
            started.append((version, request))
        return started

    def end(self, version: int) -> None:
        """Records that a running request of this version ended.

        Raises:
            ValueError: none runs.
        """
        if not self._running[version]:
            raise ValueError(f"no request of version {version} runs")
        self._running[version] -= 1
        if not self._running[version]:
            del self._running[version]

    def _may_start(self, version: int, due: float) -> bool:
        running = self._running.total()
        if running >= self._limit:
            return False
        oldest = min(self._running, default=version)
        limited = self._newer is not None and oldest < version and oldest <= due
        return not limited or running - self._running[oldest] < (self._newer or 0)
