"""Processes that make one call each at a time, with a deadline; what ends, hangs or stays stopped is replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
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
"""Times in a row that processes may die without a call before calls fail."""


class ProcessStoppedError(Exception):
    """The process was stopped by a signal, so nothing is known of the call."""


class PoolBrokenError(RunError):
    """Processes do not start, or die again and again without a call."""


class UserProcessPool:
    """`size` processes. Use it from one asyncio loop at a time; calls take turns in order of arrival.

    A process is killed when its call passes the deadline, is cancelled, or raises, since its state is unknown then; and
    when it has been stopped by a signal for STOPPED_GRACE_S while calls wait.
    """

    def __init__(self, size: int, launch: Callable[[], UserProcess], report: Callable[[str], None]) -> None:
        """Starts nothing; `report` is called with the cause when a process is replaced that no call has ended."""
        self._size, self._launch, self._report = size, launch, report
        self._idle: list[UserProcess] = []
        self._all: list[UserProcess] = []
        self._ending: list[UserProcess] = []
        self._stop_times: StopTimes[int] = StopTimes()
        self._looked_at = 0.0
        self._killed: set[UserProcess] = set()
        """Processes that were killed because they stayed stopped."""
        self._deaths = 0
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self.closed = False

    @property
    def processes(self) -> list[UserProcess]:
        """The running processes."""
        return list(self._all)

    def start(self) -> None:
        """Starts missing processes without waiting for them."""
        while not self.closed and len(self._all) < self._size:
            process = self._launch()
            self._all.append(process)
            self._idle.append(process)

    async def call(self, timeout_s: float, function: Callable[..., Any], *args: Any) -> tuple[Any, bool]:
        """What a function returned in a process, and whether that was stopped by a signal meanwhile.

        Raises:
            TimeoutError: no answer within `timeout_s` after the call was sent.
            ProcessEndedError: the process ended in the call.
            ProcessStoppedError: it was killed because it was stopped by a signal.
            CallError: the call raised.
            PoolBrokenError: no process can take the call.
            asyncio.CancelledError: the pool was closed.
        """
        async with self._slot():
            process = await self._take()
            try:
                answer, stopped = await self._answer(process, process.call(function, *args), timeout_s)
                self._deaths = 0
                self._idle.append(process)
                return answer, stopped
            except BaseException:
                self._remove(process)
                if self.closed:
                    raise asyncio.CancelledError from None
                raise

    def close(self) -> None:
        """Kills the processes, waits for their end and cancels calls. Safe to call twice."""
        self.closed = True
        for process in list(self._all):
            self._remove(process)
        while self._ending:
            self._ending.pop().join()

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self._size)
        return self._slots[1]

    async def _take(self) -> UserProcess:
        """A process that waits for a call."""
        while True:
            if self.closed:
                raise asyncio.CancelledError
            self.start()
            process = min(self._idle, key=lambda each: each.ended or each.is_stopped())
            self._idle.remove(process)
            try:
                if not process.ended:
                    await self._answer(process, process.ready, START_TIMEOUT_S)
                    return process
                self._died_idle(process)
            except ProcessEndedError:
                self._died_idle(process)
            except ProcessStoppedError:
                self._remove(process)
            except TimeoutError:
                self._remove(process)
                raise PoolBrokenError(f"its process did not start within {START_TIMEOUT_S:g} s") from None
            except BaseException:
                self._remove(process)
                raise

    def _died_idle(self, process: UserProcess) -> None:
        self._remove(process)
        if self.closed or process in self._killed:
            return
        self._deaths += 1
        if self._deaths > MAX_DEATHS:
            raise PoolBrokenError(f"its processes died {self._deaths} times in a row")
        self._report(DIED_IDLE)

    def _remove(self, process: UserProcess) -> None:
        process.kill()
        if process in self._all:
            self._all.remove(process)
        if process in self._idle:
            self._idle.remove(process)
        self._ending = [process, *(each for each in self._ending if each.alive)]
        self.start()

    async def _answer(self, process: UserProcess, call: Future[Any], timeout_s: float) -> tuple[Any, bool]:
        answer, until, stopped = asyncio.wrap_future(call), time.monotonic() + timeout_s, False
        answer.add_done_callback(lambda late: late.cancelled() or late.exception())
        self._kill_stopped()
        while not (await asyncio.wait([answer], timeout=max(0.0, min(POLL_S, until - time.monotonic()))))[0]:
            stopped = stopped or process.is_stopped()
            self._kill_stopped()
            if process not in self._killed and time.monotonic() >= until:
                if not stopped:
                    raise TimeoutError
                self._report("one of its processes was stopped by a signal until the deadline of its call")
                raise ProcessStoppedError
        try:
            return answer.result(), stopped
        except ProcessEndedError:
            if process in self._killed:
                raise ProcessStoppedError from None
            raise

    def _kill_stopped(self) -> None:
        """Kills processes that stay stopped by a signal: an idle one takes no call, and a call in one does not end."""
        now = time.monotonic()
        if now - self._looked_at < INTERVAL_S:
            return
        self._looked_at = now
        stopped = [process.pid for process in self._all if process.is_stopped()]
        overdue = self._stop_times.overdue(now, stopped)
        for process in [each for each in self._all if each.pid in overdue and each not in self._killed]:
            self._killed.add(process)
            process.kill()
            self._report(f"one of its processes {STOPPED_TOO_LONG}")
