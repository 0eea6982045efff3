"""Where the time of a step went: named, accumulated intervals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepClock:
    """Accumulates seconds by name over one step; a name measured twice adds up."""

    def __init__(self) -> None:
        """Starts the step's own interval."""
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside the block to `time/<name>`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        """`time/<name>` of everything measured, and `time/step` since the clock was made."""
        named = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        return {**named, "time/step": time.perf_counter() - self._start}

    def seconds(self, name: str) -> float:
        """Seconds measured under `name` so far."""
        return self._seconds.get(name, 0.0)
