"""Which worker hosts which environment, and when a worker is started or killed. Knows neither Ray nor clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal


@dataclass
class _Seat:
    """A worker that exists: `starting`, then `taking` new environments, then perhaps `retired`, which takes none."""

    phase: Literal["starting", "taking", "retired"] = "starting"
    envs: set[int] = field(default_factory=set)


class Fleet:
    """Keeps `size` workers besides the retired ones.

    A worker in which a call hangs is retired at once, since a thread cannot be stopped: a fresh one takes its place,
    and it is killed when the last of its other environments has left. A worker that died is replaced; its environments
    are then nowhere until they are placed again. A worker that does not start is not replaced before the next `fill`,
    so that a machine on which none can start is not kept busy with trying.
    """

    def __init__(self, size: int, capacity: int, start: Callable[[int], None], kill: Callable[[int], None]) -> None:
        """Starts nothing.

        Args:
            size: workers that take environments.
            capacity: environments one worker holds.
            start: begins to start the worker of this number; `up` or `not_started` follows.
            kill: ends a worker, which is no more part of the fleet.
        """
        self._size, self._capacity, self._start, self._kill = size, capacity, start, kill
        self._seats: dict[int, _Seat] = {}
        self._worker_of: dict[int, int] = {}
        self._started = 0

    @property
    def full(self) -> bool:
        """Whether a worker takes environments but none has room."""
        taking = [seat for seat in self._seats.values() if seat.phase == "taking"]
        return bool(taking) and all(len(seat.envs) >= self._capacity for seat in taking)

    def fill(self) -> None:
        """Starts the workers that are missing."""
        there = sum(seat.phase != "retired" for seat in self._seats.values())
        for _ in range(self._size - there):
            worker, self._started = self._started, self._started + 1
            self._seats[worker] = _Seat()
            self._start(worker)

    def up(self, worker: int) -> None:
        """The worker has started."""
        if worker in self._seats:
            self._seats[worker].phase = "taking"

    def not_started(self, worker: int) -> None:
        """The worker did not start; it is killed, for it may still be trying."""
        if self._seats.pop(worker, None) is not None:
            self._kill(worker)

    def place(self, env: int) -> int | None:
        """The worker that hosts the environment from now on: of those with room, one with the fewest. Else None."""
        room = {
            worker: len(seat.envs)
            for worker, seat in self._seats.items()
            if seat.phase == "taking" and len(seat.envs) < self._capacity
        }
        if not room:
            return None
        worker = min(room, key=room.__getitem__)
        self._seats[worker].envs.add(env)
        self._worker_of[env] = worker
        return worker

    def worker_of(self, env: int) -> int | None:
        """Where the environment is; None before it is placed, after it left, and after its worker died."""
        return self._worker_of.get(env)

    def leave(self, env: int) -> None:
        """The environment is closed or has failed, and no call of it is open."""
        worker = self._worker_of.pop(env, None)
        if worker is None:
            return
        seat = self._seats[worker]
        seat.envs.remove(env)
        if seat.phase == "retired" and not seat.envs:
            del self._seats[worker]
            self._kill(worker)

    def hung(self, env: int) -> None:
        """A call of the environment hangs: it leaves, and its worker is retired."""
        worker = self._worker_of.get(env)
        if worker is None:
            return
        self._seats[worker].phase = "retired"
        self.leave(env)
        self.fill()

    def died(self, worker: int) -> None:
        """The worker's process has ended; it is killed as well, in case only the connection to it has."""
        seat = self._seats.pop(worker, None)
        if seat is None:
            return
        for env in seat.envs:
            del self._worker_of[env]
        self._kill(worker)
        self.fill()

    def close(self) -> None:
        """Kills all workers; from now on there is none, and every environment has left."""
        self._size = 0
        self._worker_of.clear()
        while self._seats:
            self._kill(self._seats.popitem()[0])
