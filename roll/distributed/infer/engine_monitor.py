r"""Watches the engines of a run, and restarts those that die or no longer answer.

    serving -> restarting -> started -> serving      a weight update makes a started engine serve
                         \-> lost                    after `max_engine_restarts`, or with its Ray node

The engines that serve generate meanwhile. A run whose engines are all lost ends, with the first cause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

from roll.base.events import Repeats
from roll.distributed.calls.remote_errors import PROCESS_DIED, ClusterError, deadline_scope, one_line
from roll.distributed.cluster import Cluster, NodeLostError
from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.infer.sglang_engine import EngineNotRunningError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll.base.events import EventLog
    from roll.configs.run_options import EngineHealthOptions

logger = logging.getLogger(__name__)

WINDOW_S = 3600.0
"""Restarts of the last hour count, so that an engine that dies once a day is restarted every time."""

LONGEST_DELAY_S = 60.0
"""Limit of the time between two restarts, which doubles with each."""

CALL_GRACE_S = 5.0
"""What a health check of an engine's process gets beyond that of the engine itself."""


class EnginesLostError(RuntimeError):
    """No engine serves and none can be restarted; the message has the first cause."""


class EngineState(Enum):
    """Whether an engine takes requests, and if not, what it waits for."""

    SERVING = "serving"
    RESTARTING = "restarting"
    STARTED = "started"
    LOST = "lost"


class RestartLimit:
    """When one engine may be restarted: so many times an hour, first at once, then after delays that double."""

    def __init__(self, restarts: int, delay_s: float) -> None:
        self.restarts, self._delay_s = restarts, delay_s
        self._times: deque[float] = deque()

    @property
    def used(self) -> int:
        """Restarts that count at the moment."""
        return len(self._times)

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before a restart, which counts from now on; None where no more are allowed."""
        while self._times and self._times[0] <= now - WINDOW_S:
            self._times.popleft()
        if len(self._times) >= self.restarts:
            return None
        self._times.append(now)
        again = len(self._times) - 2
        return min(LONGEST_DELAY_S, self._delay_s * 2.0**again) if again >= 0 else 0.0


class EngineMonitor:
    """Checks the health of every engine of one cluster, and restarts engines.

    Attributes:
        states: of each engine.
        events: log of failures and restarts.
        restarts: of all engines so far.
        seconds_down: that engines did not serve, added up over engines that serve again.
    """

    def __init__(
        self,
        infer: Cluster[InferWorker],
        config: EngineHealthOptions,
        events: EventLog,
        needs_weights: bool = True,
        restarts: bool = True,
        waiting_since: float | None = None,
        earlier: EngineMonitor | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Watches nothing before `start`.

        Engines that an earlier trainer left have waited for weights since `waiting_since`, and the counts, limits and
        first cause of their `earlier` monitor continue. With `needs_weights` a restarted engine serves only after a
        weight update.
        """
        self._infer, self._config, self.events, self._needs_weights = infer, config, events, needs_weights
        self._clock, self._sleep = clock, sleep
        count = infer.world_size
        self.states = [EngineState.SERVING if waiting_since is None else EngineState.STARTED] * count
        self.restarts = 0
        self.seconds_down = 0.0
        self._restarts = config.max_engine_restarts if restarts else 0
        self._limits = [RestartLimit(self._restarts, config.engine_restart_delay_s) for _ in range(count)]
        self._first_cause = ""
        if earlier is not None:
            self.restarts, self.seconds_down = earlier.restarts, earlier.seconds_down
            self._limits, self._first_cause = earlier._limits, earlier._first_cause
        self._down_since = [waiting_since or 0.0] * count
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._updates, self._updating = 0, False
        self._failed_since: set[int] = set()
        self._repeats = Repeats(logger)

    @property
    def serving(self) -> list[int]:
        """Engines that take requests and weight updates."""
        return self._with(EngineState.SERVING)

    @property
    def started(self) -> list[int]:
        """Restarted engines that wait for weights."""
        return self._with(EngineState.STARTED)

    @property
    def _running(self) -> list[int]:
        return self._with(EngineState.SERVING, EngineState.STARTED)

    def _with(self, *states: EngineState) -> list[int]:
        return [engine for engine, state in enumerate(self.states) if state in states]

    def start(self) -> None:
        for engine in range(self._infer.world_size):
            self._run(self._watch(engine))

    async def close(self) -> None:
        """Ends watching and restarting."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextmanager
    def updating(self) -> Iterator[set[int]]:
        """In this block engines are busy with a weight update: only death counts as a failure, not a late answer.

        The set gets the engines that fail from here to the next block, also engines that were restarted since.
        """
        self._updates += 1
        self._updating, self._failed_since = True, set()
        try:
            yield self._failed_since
        finally:
            self._updating = False

    async def updated(self, engines: Sequence[int]) -> None:
        """Records that these engines have the current weights."""
        for engine in engines:
            if self.states[engine] is EngineState.STARTED:
                await self._set(engine, EngineState.SERVING)
                seconds = self._clock() - self._down_since[engine]
                self.seconds_down += seconds
                self._record(engine, "serving again", f"serves again after {seconds:.1f} s", seconds)

    async def restart_dead(self) -> None:
        """Restarts the engines whose processes have died or are stopped; does not wait for the answer of an engine."""
        await asyncio.gather(*(self._check(engine, None) for engine in self._running))

    async def restart_unresponsive(self, timeout_s: float) -> None:
        """Restarts the engines that have died, or do not answer within `timeout_s`."""
        await asyncio.gather(*(self._check(engine, timeout_s) for engine in self._running))

    async def failed(self, engine: int, cause: str, responsive: bool = True) -> None:
        """Takes an engine out of use, and restarts it if that is allowed."""
        cause = cause.removeprefix(f"{self._name(engine)}: ")
        if engine not in self._running:
            return
        self._first_cause = self._first_cause or f"{self._name(engine)}: {cause}"
        self._down_since[engine] = self._clock()
        self._failed_since.add(engine)
        await self._set(engine, EngineState.RESTARTING)
        self._record(engine, "failed", f"failed: {cause}")
        self._run(self._restart(engine, responsive))

    async def wait_for_engine(self) -> None:
        """Waits until an engine serves, or has started and waits for weights.

        Raises:
            EnginesLostError: no engine serves or starts, and none may be restarted.
        """
        await self._wait(lambda: bool(self.serving or self.started))

    async def wait_for_started(self) -> None:
        """Waits until a restarted engine waits for weights.

        Raises:
            EnginesLostError: no engine serves, and none may be restarted.
        """
        await self._wait(lambda: bool(self.started))

    async def wait_until_lost(self) -> None:
        """Waits until no engine serves and none may be restarted.

        Raises:
            EnginesLostError: always, with the first cause.
        """
        await self._wait(lambda: False)

    async def _wait(self, reached: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: reached() or self._all_lost)
        if self._all_lost:
            raise EnginesLostError(
                f"{self._infer.role} has no engine left that may be restarted (max_engine_restarts: {self._restarts} "
                f"of each within an hour); the first cause: {self._first_cause}"
            )

    @property
    def _all_lost(self) -> bool:
        return all(state is EngineState.LOST for state in self.states)

    def metrics(self) -> dict[str, float]:
        """`faults/...` of the engines."""
        return {
            "faults/engine_restarts": float(self.restarts),
            "faults/engines_down": float(len(self._with(EngineState.RESTARTING, EngineState.LOST))),
            "faults/engine_seconds_down": self.seconds_down,
        }

    def health(self) -> dict[str, str]:
        return {self._name(engine): state.value for engine, state in enumerate(self.states)}

    def _name(self, engine: int) -> str:
        return f"{self._infer.role}-{engine}"

    def _record(self, engine: int, event: str, message: str, seconds: float | None = None) -> None:
        level = logging.INFO if event == "serving again" else logging.WARNING
        self.events.record(self._name(engine), event, message, seconds, level)

    async def _set(self, engine: int, state: EngineState) -> None:
        async with self._changed:
            self.states[engine] = state
            self._changed.notify_all()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, engine: int) -> None:
        interval_s, timeout_s = self._config.health_check_interval_s, self._config.health_check_timeout_s
        while True:
            try:
                if engine in self._running and await self._check(engine, timeout_s, watch_s=interval_s):
                    await asyncio.sleep(0)  # the check has lasted for the interval
                    continue
            except Exception as error:
                message = f"{self._name(engine)}: its health could not be checked: {one_line(error)}"
                self._repeats.warn(message, message)
            await self._sleep(interval_s)

    async def _check(self, engine: int, timeout_s: float | None, watch_s: float = 0.0) -> bool:
        """Restarts an engine that died, that is stopped, or that does not answer in time; returns whether it passed.

        For `watch_s` seconds after its answer a death is noticed at once. Without `timeout_s` no answer is awaited.
        """
        updates = self._updates
        try:
            with deadline_scope(time.monotonic() + (timeout_s or 0.0) + watch_s + CALL_GRACE_S):
                await self._infer.call([engine], InferWorker.check_health, timeout_s, watch_s)
        except ClusterError as error:
            died = error.kind in (PROCESS_DIED, EngineNotRunningError.__name__)
            if died or not (self._updating or updates != self._updates):
                await self.failed(engine, one_line(error), responsive=not error.process_failed)
            return False
        return True

    async def _restart(self, engine: int, responsive: bool) -> None:
        """Restarts an engine until it has started, or no restart is left.

        Where its worker answers, the first attempt is in the worker's process, which has imported SGLang already: that
        takes half the processor time. Every other attempt is in a new process.
        """
        limit, new_process = self._limits[engine], not responsive
        while (delay_s := limit.next_delay(self._clock())) is not None:
            await self._sleep(delay_s)
            start = self._clock()
            try:
                if new_process:
                    await self._infer.restart(engine, responsive)
                new_process = True
                await self._infer.call([engine], InferWorker.start_again, self._needs_weights)
            except NodeLostError as error:
                await self._lose(engine, f"is not restarted: {error}")
                return
            except Exception as error:  # anything, for example a process that ended while it was looked at
                responsive = isinstance(error, ClusterError) and not error.process_failed
                self._record(engine, "restart failed", f"could not be restarted: {one_line(error)}")
                continue
            self.restarts += 1
            seconds = self._clock() - start
            count = f"restart {limit.used} of {limit.restarts} within an hour"
            self._record(engine, "restarted", f"was restarted in {seconds:.1f} s ({count})", seconds)
            await self._set(engine, EngineState.STARTED)
            if not self._needs_weights:
                await self.updated([engine])
            return
        await self._lose(engine, f"is not restarted again: {limit.restarts} restarts within an hour")

    async def _lose(self, engine: int, message: str) -> None:
        self._record(engine, "lost", message)
        await self._set(engine, EngineState.LOST)
