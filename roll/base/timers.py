"""Timers: seconds of a step by name, and busy and idle seconds of overlapping activities."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol


class Timer(Protocol):
    """Measures blocks of work by name: `StepClock` adds them up, the rollouter counts overlapping ones once."""

    def measure(self, name: str) -> AbstractContextManager[None]:
        """Counts the block as work of that name."""


class StepClock:
    """Accumulates seconds by name over one step; a name measured twice adds up."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []
        """What was measured, from when and until when, in seconds since 1970."""

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside the block to `time/<name>`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds, end = time.perf_counter() - start, time.time()
            self.add(name, seconds)
            self.spans.append((name, end - seconds, end))

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        """`time/<name>` of everything measured, and `time/step` since the clock was made."""
        named = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        return {**named, "time/step": time.perf_counter() - self._start}


@dataclass(frozen=True)
class Interval:
    """Busy and idle seconds of one interval."""

    busy: float
    idle: float

    @property
    def idle_share(self) -> float:
        """Idle part of the interval; 0 where it is empty."""
        seconds = self.busy + self.idle
        return self.idle / seconds if seconds > 0 else 0.0


MOST_SPANS = 50
"""Busy times that a timer keeps apart between two calls of `spans`."""

SHORTEST_GAP_S = 1e-3
"""Idle seconds that separate two busy times; more where there are more than MOST_SPANS."""


class BusyTimer:
    """Measures the time in which at least one activity runs; activities that overlap count once.

    The caller passes the time of every event, from any clock that does not run backwards. Intervals are differences of
    totals that only grow, so no second is lost or counted twice, however intervals and activities overlap.
    """

    def __init__(self, now: float) -> None:
        self._last = self._interval_start = now
        self._active = 0
        self._busy = self._interval_busy = 0.0
        self._since = now
        self._spans: list[tuple[float, float]] = []
        self._gap = SHORTEST_GAP_S

    def enter(self, now: float) -> None:
        """Records that one activity begins."""
        self._advance(now)
        if not self._active:
            self._since = now
        self._active += 1

    def exit(self, now: float) -> None:
        """Records that one activity ends.

        Raises:
            ValueError: no activity runs.
        """
        if not self._active:
            raise ValueError("exit without enter: no activity runs")
        self._advance(now)
        self._active -= 1
        if not self._active:
            self._add_span(now)

    def spans(self, now: float) -> list[tuple[float, float]]:
        """Start and end of the busy times since the last call, at most MOST_SPANS: the shortest gaps are left out."""
        if self._active:
            self._add_span(now)
            self._since = now
        spans, self._spans, self._gap = self._spans, [], SHORTEST_GAP_S
        return spans

    def _add_span(self, end: float) -> None:
        self._spans[-1:] = without_gaps([*self._spans[-1:], (self._since, end)], self._gap)
        while len(self._spans) > MOST_SPANS:
            self._gap *= 2
            self._spans = without_gaps(self._spans, self._gap)

    def interval(self, now: float) -> Interval:
        """Busy and idle seconds since the last call of this method, or since the timer was made."""
        self._advance(now)
        busy, seconds = self._busy - self._interval_busy, now - self._interval_start
        self._interval_start, self._interval_busy = now, self._busy
        return Interval(busy, max(0.0, seconds - busy))

    def _advance(self, now: float) -> None:
        if now < self._last:
            raise ValueError(f"the clock ran backwards: from {self._last} to {now}")
        if self._active:
            self._busy += now - self._last
        self._last = now


def without_gaps(spans: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Spans in their order, where a gap of at most `gap` between two is none."""
    found: list[tuple[float, float]] = []
    for start, end in spans:
        if found and start - found[-1][1] <= gap:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found
