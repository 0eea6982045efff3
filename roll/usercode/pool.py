"""Processes that make calls with a deadline; what ends, hangs or stays stopped is replaced."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from operator import methodcaller
from typing import Any

from roll.base.errors import RunError
from roll.usercode.process import ProcessEndedError, UserProcess
from roll.usercode.stopped import INTERVAL_S, STOPPED_TOO_LONG, StopTimes

START_TIMEOUT_S = 120.0
"""Deadline for a process to start; importing torch on a busy machine takes seconds."""

POLL_S = 0.5
"""How often a call looks whether its process is stopped by a signal."""

DIED_IDLE = "one of its processes died without a call; starting another one"
"""Cause of the replacement of a process that was killed while it waited."""

MAX_DEATHS = 3
"""Times in a row that processes may end as they start before calls fail."""


class ProcessStoppedError(Exception):
    """The process was stopped by a signal, so nothing is known of the call."""


class PoolBrokenError(RunError):
    """Processes do not start, or die again and again without a call."""


class UserProcessPool:
    """`size` processes, each held by at most `capacity` users at a time; users take turns in order of arrival.

    A reward holds a process for one `call`, an environment for an episode of many (`take`, `answer`, `give_back`). A
    retired process takes no more users: another one replaces it, and it is killed when its last user gives it back. A
    process that has been stopped by a signal for STOPPED_GRACE_S while calls wait is killed.

    Use a pool from one asyncio loop at a time.
    """

    def __init__(
        self,
        size: int,
        launch: Callable[[], UserProcess],
        report: Callable[[str], None],
        capacity: int = 1,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Starts nothing; `report` is called with the cause when a process is replaced that no call has ended."""
        self._size, self._launch, self._report = size, launch, report
        self._capacity, self._start_timeout_s = capacity, start_timeout_s
        self._running: list[UserProcess] = []
        self._users: Counter[UserProcess] = Counter()
        """Also of processes that are retired."""
        self._ending: list[UserProcess] = []
        self._stop_times: StopTimes[UserProcess] = StopTimes(methodcaller("is_stopped"))
        self._looked_at = 0.0
        self._killed: set[UserProcess] = set()
        """Processes that were killed because they stayed stopped."""
        self._deaths = 0
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self.closed = False

    @property
    def processes(self) -> list[UserProcess]:
        """The processes that take users."""
        return list(self._running)

    def start(self) -> None:
        """Starts missing processes without waiting for them."""
        for process in [each for each in self._running if each.ended and not self._users[each]]:
            self._running.remove(process)
            self._kill(process)
            self._report(DIED_IDLE)
        while not self.closed and sum(not each.ended for each in self._running) < self._size:
            self._running.append(self._launch())

    async def call(self, timeout_s: float, function: Callable[..., Any], *args: Any) -> tuple[Any, bool]:
        """As `answer`, in a process of its own, which is killed if the call raises or is cancelled.

        Raises:
            asyncio.CancelledError: the pool was closed.
        """
        process = await self.take()
        try:
            return await self.answer(process, timeout_s, function, *args)
        except BaseException:
            self.retire(process, now=True)
            if self.closed:
                raise asyncio.CancelledError from None
            raise
        finally:
            self.give_back(process)

    async def take(self) -> UserProcess:
        """A process that has started, the one with the fewest users; hold it until `give_back`.

        Raises:
            PoolBrokenError: no process starts.
            asyncio.CancelledError: the pool was closed.
        """
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = loop, asyncio.Semaphore(self._size * self._capacity)
        await self._places[1].acquire()
        while not self.closed:
            self.start()
            free = [each for each in self._running if self._users[each] < self._capacity]
            process = min(free, key=lambda each: (_is_unfit(each), self._users[each], not each.ready.done()))
            self._users[process] += 1
            if await self._has_started(process):
                return process
            await self._places[1].acquire()
        self._places[1].release()
        raise asyncio.CancelledError

    async def _has_started(self, process: UserProcess) -> bool:
        try:
            await self.answer_of(process, process.ready, self._start_timeout_s)
            return True
        except ProcessStoppedError:
            self._discard(process)
        except ProcessEndedError as death:
            self._deaths += self._discard(process)  # once, however many wait for it
            if self._deaths > MAX_DEATHS and not self.closed:
                raise PoolBrokenError(f"its processes died {self._deaths} times in a row: {death}") from death
            self._report(DIED_IDLE)
        except TimeoutError:
            self._discard(process)
            raise PoolBrokenError(f"its process did not start within {self._start_timeout_s:g} s") from None
        except asyncio.CancelledError:
            self.give_back(process)  # others may wait for it
            raise
        except BaseException:
            self._discard(process)
            raise
        return False

    def _discard(self, process: UserProcess) -> bool:
        first = self.retire(process, now=True)
        self.give_back(process)
        return first

    def give_back(self, process: UserProcess) -> None:
        """A user of a process no longer holds it."""
        assert self._places is not None
        self._places[1].release()
        self._users[process] -= 1
        if not self._users[process]:
            del self._users[process]
            if process not in self._running:
                self._kill(process)

    def retire(self, process: UserProcess, *, now: bool = False) -> bool:
        """Replaces a process, which is killed when its users have given it back, or `now`. False: it was before."""
        first = process in self._running
        if first:
            self._running.remove(process)
        if now or not self._users[process]:
            self._kill(process)
        self.start()
        return first

    async def answer(
        self, process: UserProcess, timeout_s: float, function: Callable[..., Any], *args: Any
    ) -> tuple[Any, bool]:
        """What a function returned in a process that was taken, and whether a signal stopped that meanwhile.

        Raises:
            TimeoutError: no answer within `timeout_s` after the call was sent.
            ProcessEndedError: the process ended in the call.
            ProcessStoppedError: it was killed because it was stopped by a signal, or is stopped at the deadline.
            CallError: the call raised.
        """
        answer = await self.answer_of(process, process.call(function, *args), timeout_s)
        self._deaths = 0
        return answer

    async def answer_of(self, process: UserProcess, call: Future[Any], timeout_s: float) -> tuple[Any, bool]:
        """As `answer`, of a call that was sent."""
        clock = asyncio.get_running_loop().time
        answer, until, stopped = asyncio.wrap_future(call), clock() + timeout_s, False
        answer.add_done_callback(lambda late: late.cancelled() or late.exception())
        self._kill_stopped(clock())
        while not (await asyncio.wait([answer], timeout=max(0.0, min(POLL_S, until - clock()))))[0]:
            stopped = stopped or process.is_stopped()
            self._kill_stopped(clock())
            if process not in self._killed and clock() >= until:
                if not stopped:
                    raise TimeoutError
                if self.retire(process, now=True):
                    self._report("one of its processes was stopped by a signal until the deadline of its call")
                raise ProcessStoppedError
        try:
            return answer.result(), stopped
        except ProcessEndedError:
            if process in self._killed:
                raise ProcessStoppedError from None
            raise

    def _kill_stopped(self, now: float) -> None:
        """Kills processes that stay stopped by a signal: an idle one takes no call, and a call in one does not end."""
        if now - self._looked_at < INTERVAL_S:
            return
        self._looked_at = now
        for process in self._stop_times.overdue(now, {*self._running, *self._users} - self._killed):
            self._killed.add(process)
            self.retire(process, now=True)
            self._report(f"one of its processes {STOPPED_TOO_LONG}")

    def close(self) -> None:
        """Kills the processes, waits for their end and cancels calls. Safe to call twice."""
        self.closed = True
        for process in {*self._running, *self._users}:
            self._kill(process)
        self._running.clear()
        while self._ending:
            self._ending.pop().join()

    def _kill(self, process: UserProcess) -> None:
        process.kill()
        self._ending = [process, *(each for each in self._ending if each.alive and each is not process)]


def _is_unfit(process: UserProcess) -> bool:
    return process.ended or process.is_stopped()
