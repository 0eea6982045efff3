"""Timers: seconds of a step by name, and busy and idle seconds of overlapping activities."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Lap:
    """Seconds since the lap before, split."""

    busy: float
    idle: float

    @property
    def idle_share(self) -> float:
        """Idle part of the lap, 0 where the lap is empty."""
        seconds = self.busy + self.idle
        return self.idle / seconds if seconds > 0 else 0.0


class Busy:
    """Adds up the time in which at least one activity is on; those that overlap count once.

    The clock is passed in: any that does not run backwards. Totals only grow; a lap is a difference of totals, so no
    second is lost or counted twice however laps and activities lie.
    """

    def __init__(self, now: float) -> None:
        """Starts idle at `now`."""
        self._start = self._last = self._lap_start = now
        self._active = 0
        self._busy = self._lap_busy = 0.0

    def enter(self, now: float) -> None:
        """One activity begins."""
        self._to(now)
        self._active += 1

    def exit(self, now: float) -> None:
        """One activity ends.

        Raises:
            ValueError: none is on.
        """
        if not self._active:
            raise ValueError("exit without enter: nothing is busy")
        self._to(now)
        self._active -= 1

    def busy(self, now: float) -> float:
        """Seconds with at least one activity on, since the start."""
        self._to(now)
        return self._busy

    def idle(self, now: float) -> float:
        """Seconds with none on, since the start."""
        self._to(now)
        return now - self._start - self._busy

    def lap(self, now: float) -> Lap:
        """What passed since the last lap or the start; the next lap begins here."""
        self._to(now)
        busy, seconds = self._busy - self._lap_busy, now - self._lap_start
        self._lap_start, self._lap_busy = now, self._busy
        return Lap(busy, max(0.0, seconds - busy))

    def _to(self, now: float) -> None:
        if now < self._last:
            raise ValueError(f"the clock ran backwards: from {self._last} to {now}")
        if self._active:
            self._busy += now - self._last
        self._last = now


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
