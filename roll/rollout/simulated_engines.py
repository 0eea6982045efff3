"""Engines on a virtual clock: continuous batching whose iterations take longer the more requests run."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

ROUNDING = 1e-9
"""Part of a token by which a request may be short of its end and still has ended: sums of floats differ by less."""


@dataclass(frozen=True)
class DecodeSpeed:
    """Seconds of one decode iteration, in which every running request gets one token: seconds * (1 + batch / doubling).

    The constant part is what is read whatever runs (weights, launches); the other grows with the batch. At a batch of
    `doubling_batch` an iteration takes twice as long as an empty one would.
    """

    seconds: float
    doubling_batch: float = math.inf

    def iteration(self, batch: int) -> float:
        """Seconds of one iteration with `batch` requests."""
        return self.seconds * (1 + batch / self.doubling_batch)


class SimulatedEngine:
    """One engine: up to `slots` requests run at a time, the others wait in order.

    All running requests gain tokens at the same pace, so one counter of iterations says when each of them ends: an
    event costs O(log slots). Call `advance` before anything is read or changed at a later time.
    """

    def __init__(self, speed: DecodeSpeed, slots: int) -> None:
        """Starts idle at time 0."""
        self._speed = speed
        self._slots = slots
        self._waiting: deque[tuple[int, float]] = deque()
        self._running: list[tuple[float, int, int]] = []
        self._iterations = 0.0
        self._at = 0.0
        self._started = 0
        self.stretch = 1.0
        """How much longer an iteration takes because somebody else uses the same cores; change after `advance`."""
        self.paused = False
        """Stands still; change after `advance`."""
        self.admitting = True
        """Lets waiting requests begin."""

    @property
    def active(self) -> bool:
        """Whether any request runs."""
        return bool(self._running)

    def put(self, request: int, tokens: float) -> None:
        """A request waits from now on."""
        self._waiting.append((request, tokens))

    def advance(self, now: float) -> None:
        """Lets time pass."""
        if self._running and not self.paused:
            self._iterations += (now - self._at) / (self._speed.iteration(len(self._running)) * self.stretch)
        self._at = now

    def ended(self) -> list[int]:
        """Removes and gives the requests that have all of their tokens."""
        done = []
        while self._running and self._running[0][0] <= self._iterations + ROUNDING * (1 + self._iterations):
            done.append(heapq.heappop(self._running)[2])
        return done

    def start(self) -> list[int]:
        """Begins what waits and has a slot; gives the requests."""
        begun = []
        while self.admitting and self._waiting and len(self._running) < self._slots:
            request, tokens = self._waiting.popleft()
            self._started += 1
            heapq.heappush(self._running, (self._iterations + tokens, self._started, request))
            begun.append(request)
        return begun

    def next_end(self) -> float:
        """When the next request ends if nothing changes; infinity if none does."""
        if self.paused or not self._running:
            return math.inf
        left = max(0.0, self._running[0][0] - self._iterations)
        return self._at + left * self._speed.iteration(len(self._running)) * self.stretch
