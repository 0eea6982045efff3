"""Environments in worker processes, with a deadline for every call, so that none can stall or corrupt a run."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from roll.base.events import EventLog, Repeats
from roll.distributed.env_pool.server import EnvServer
from roll.distributed.env_pool.types import (
    EnvError,
    EnvFailure,
    EnvSpec,
    EnvWorker,
    Reason,
    ResetResult,
    StepResult,
)
from roll.distributed.env_pool.workers import EnvWorkerPool, RayEnvWorker

CAPACITY = 256
"""Environments of one worker by default; each may need a thread."""

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)


class _WorkerDiedError(Exception):
    """A worker process ended during a call; which of its environments ended it is unknown."""


class EnvPool:
    """Opens environments in worker processes; every call has a deadline of `step_timeout_s` seconds.

    - An environment that raises fails alone.
    - An environment that passes the deadline fails alone. Its worker is retired: it takes no new environments and is
      killed when the last of its other environments is closed.
    - When a worker process dies, or is killed because it stays stopped by a signal, its environments are replayed on
      another worker before their next step: reset with the same seed, then the same actions. A call that was running is
      repeated too, one such call at a time, since any of them may have ended the process: an environment fails if its
      worker dies again in that call.

    Every failure is an `EnvFailure` with a reason, never a reward. Use a pool from one asyncio loop, after Ray was
    initialized. `close` kills the workers; they also end with the process that started them.

    Attributes:
        failures: number of failed environments by reason, including environments that failed while being closed.
    """

    def __init__(
        self,
        workers: int,
        step_timeout_s: float,
        start_timeout_s: float,
        *,
        capacity: int = CAPACITY,
        log: str | None = None,
        variables: Mapping[str, str] | None = None,
        launch: Callable[[], EnvWorker] | None = None,
        events: EventLog | None = None,
    ) -> None:
        """Starts no worker; workers start with `start` or the first `open`.

        Args:
            workers: number of worker processes.
            step_timeout_s: deadline of a reset, a step, a close, and the replay of an episode.
            start_timeout_s: deadline for the start of a worker, and for an environment to get a worker.
            capacity: environments that one worker holds.
            log: file for what the workers print, or None.
            variables: environment variables of the workers.
            launch: starts a worker without waiting for it; None starts a Ray actor.
            events: log of the workers that are replaced.
        """
        launch = launch or (lambda: RayEnvWorker(capacity, log, variables or {}))
        self._workers = EnvWorkerPool(workers, capacity, start_timeout_s, launch, events)
        self._step_timeout_s = step_timeout_s
        self._keys = itertools.count()
        self._closing: dict[int, asyncio.Task[None]] = {}
        self._assign_lock = asyncio.Lock()
        self._repeat_lock = asyncio.Lock()
        self.failures: Counter[Reason] = Counter()
        self._repeats = Repeats(logger)

    async def start(self) -> None:
        """Waits until all workers are running.

        Raises:
            EnvWorkerError: workers that did not start, with the reasons.
        """
        await self._workers.start()

    async def open(self, spec: EnvSpec, seed: int) -> tuple[EnvHandle, ResetResult]:
        """Makes an environment and resets it with the seed.

        Raises:
            EnvFailure: it raised, hung or died.
            EnvWorkerError: no worker can take it.
        """
        env = EnvHandle(self, next(self._keys), spec, seed)
        try:
            return env, await env.open()
        except BaseException:
            env.start_close()
            raise

    def close(self) -> None:
        """Kills the workers and waits for their end; running calls raise EnvFailure. Safe to call twice."""
        self._workers.close()

    async def assign(self, key: int) -> None:
        """Assigns an environment to a worker.

        If all workers are full, waits, in order of arrival, for environments that are being closed, which occupy their
        worker until then, and for workers that are starting.

        Raises:
            EnvWorkerError: no worker can take it.
        """
        async with self._assign_lock:
            while self._workers.full and (closing := [self._closing[k] for k in self._closing if self.assigned(k)]):
                await asyncio.wait([*closing, *self._workers.starting], return_when=asyncio.FIRST_COMPLETED)
        await self._workers.assign(key)

    def assigned(self, key: int) -> bool:
        """Whether an environment has a worker."""
        return self._workers.worker_of(key) is not None

    def closing(self, key: int, task: asyncio.Task[None]) -> None:
        """Registers the task that closes an environment."""
        self._closing[key] = task
        task.add_done_callback(lambda _: self._closing.pop(key))

    async def call(
        self,
        key: int,
        what: str,
        method: Callable[Concatenate[EnvServer, int, P], ResultT | EnvError],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> ResultT:
        """Calls a method of `EnvServer` on the worker of an environment; `what` is environment and turn, for messages.

        Raises:
            EnvFailure: the environment raised or hung, and was released.
            _WorkerDiedError: its worker died, so it has none.
        """
        self._workers.raise_if_closed()
        found = self._workers.worker_of(key)
        assert found is not None and not kwargs, f"{what}: no worker is assigned"
        index, worker = found
        answer: asyncio.Future[ResultT | EnvError] = worker.call(method.__name__, key, *args)
        done, _ = await asyncio.wait([answer], timeout=self._step_timeout_s)
        if not done:
            answer.add_done_callback(lambda late: late.cancelled() or late.exception())
            if worker.is_stopped():  # so the environment is not what hangs
                self._workers.died(index, "is stopped by a signal", "stopped")
                raise _WorkerDiedError(f"{what}: worker {index} is stopped by a signal")
            self._workers.retire_worker_of(key)
            message = f"{what}: no answer within step_timeout_s = {self._step_timeout_s:g}; worker {index} is retired"
            raise self.failure("env_hung", message)
        error = answer.exception()
        exit_reason = None if error is None else worker.exit_reason(error)
        if exit_reason is not None:
            self._workers.died(index, exit_reason)
            raise _WorkerDiedError(f"{what}: worker {index} died: {exit_reason}")
        result = EnvError(repr(error), f"worker {index}") if error is not None else answer.result()
        if isinstance(result, EnvError):
            self._workers.release(key)
            raise self.failure("env_raised", f"{what}: {result.error} ({result.location})", result.location)
        return result

    async def repeat(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Makes a call, and makes it once more if the worker died in it.

        Raises:
            EnvFailure: the worker died in that one too.
        """
        try:
            return await call()
        except _WorkerDiedError as death:
            if self._workers.closed:
                raise self.failure("env_died", str(death)) from None
        async with self._repeat_lock:
            try:
                return await call()
            except _WorkerDiedError as death:
                raise self.failure("env_died", str(death)) from None

    def failure(self, reason: Reason, message: str, location: str = "") -> EnvFailure:
        """Counts a failure and logs the first from each location, unless closing the pool caused it; returns it."""
        if self._workers.closed:
            return EnvFailure("env_died", f"{message} (the pool was closed)")
        self.failures[reason] += 1
        self._repeats.warn(f"{reason} {location}", f"{reason}: {message}")
        return EnvFailure(reason, message)

    async def end(self, key: int, what: str) -> EnvFailure | None:
        """Closes an environment on its worker, if it has one. A failure is counted, logged and returned, not raised."""
        if self._workers.closed or not self.assigned(key):
            return None
        try:
            await self.call(key, what, EnvServer.close)
        except EnvFailure as failure:
            return failure
        except _WorkerDiedError:
            return None  # the environment ended with it
        self._workers.release(key)
        return None


class EnvHandle:
    """One environment during one episode. It allows one call at a time; close it after a failure too.

    A call runs to its end or deadline even if its caller is cancelled, because its thread cannot be stopped.
    """

    def __init__(self, pool: EnvPool, key: int, spec: EnvSpec, seed: int) -> None:
        self._pool, self._key, self._spec, self._seed = pool, key, spec, seed
        self._reset_result: ResetResult | None = None
        self._actions: list[str] = []
        self._steps: list[StepResult] = []
        self._call: asyncio.Task[Any] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._failed = False

    async def open(self) -> ResetResult:
        """Makes and resets the environment; called by `EnvPool.open`."""
        return await self._exclusively(self._open())

    async def step(self, text: str) -> StepResult:
        """Steps the environment with the text that the model wrote.

        Raises:
            EnvFailure: the environment raised, hung or died, and was removed.
            EnvWorkerError: its worker died and no other can take it.
            RuntimeError: it is closed, has failed before, or another call is running.
        """
        return await self._exclusively(self._step(text))

    def start_close(self) -> asyncio.Task[None]:
        """Starts to close the environment, after its running call if there is one. Safe to call twice.

        Returns:
            A task that ends when the environment is closed; it need not be awaited.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
            self._pool.closing(self._key, self._closing)
        return self._closing

    async def close(self) -> None:
        """Closes the environment and waits for it; see `start_close`."""
        await asyncio.shield(self.start_close())

    async def _exclusively(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        busy = self._call is not None and not self._call.done()
        if busy or self._failed or self._closing is not None:
            coroutine.close()
            state = "is still in a call" if busy else "has failed" if self._failed else "is closed"
            raise RuntimeError(f"{self._name} {state}")
        call = self._call = asyncio.create_task(self._noting_failure(coroutine))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(call)

    async def _noting_failure(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        try:
            return await coroutine
        except EnvFailure:
            self._failed = True
            raise

    async def _open(self) -> ResetResult:
        async def reset() -> ResetResult:
            await self._pool.assign(self._key)
            return await self._pool.call(self._key, f"{self._name}, reset", EnvServer.open, *self._made_from)

        self._reset_result = await self._pool.repeat(reset)
        return self._reset_result

    async def _step(self, text: str) -> StepResult:
        async def step() -> StepResult:
            while not self._pool.assigned(self._key):  # repeated if the next worker dies at once
                await self._replay()
            return await self._pool.call(self._key, f"{self._name}, turn {len(self._steps) + 1}", EnvServer.step, text)

        result = await self._pool.repeat(step)
        self._actions.append(text)
        self._steps.append(result)
        return result

    async def _replay(self) -> None:
        """Repeats the episode on another worker, within the deadline of one call.

        Raises:
            EnvFailure: the results differ from the first ones, so the environment is not reproducible.
        """
        await self._pool.assign(self._key)
        what = f"{self._name}, replay of {len(self._steps)} turns after its worker died"
        reset, steps = await self._pool.call(self._key, what, EnvServer.replay, *self._made_from, self._actions)
        if (reset, steps) == (self._reset_result, self._steps):
            return
        failure = await self._pool.end(self._key, what)
        message = f"{what}: the episode is not reproducible; {self._difference(reset, steps)}"
        raise failure or self._pool.failure("env_died", message)

    def _difference(self, reset: ResetResult, steps: list[StepResult]) -> str:
        if reset != self._reset_result:
            return f"reset returned {reset!r} after {self._reset_result!r}"
        pairs = enumerate(zip(self._steps, steps, strict=True), 1)
        turn, (before, now) = next((turn, pair) for turn, pair in pairs if pair[0] != pair[1])
        return f"turn {turn} returned {now!r} after {before!r}"

    async def _close(self) -> None:
        if self._call is not None:
            await asyncio.wait([self._call])
        await self._pool.end(self._key, f"{self._name}, close")

    @property
    def _made_from(self) -> tuple[str, dict[str, Any], int]:
        return self._spec.env_type, dict(self._spec.env_config), self._seed

    @property
    def _name(self) -> str:
        return f"environment {self._spec.env_type} with seed {self._seed}"
