"""Environments side by side in processes that can be killed, so that none can stall or spoil a run."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from roll.pipeline.agentic.environments.hosted import Env
from roll.pipeline.agentic.environments.ray_worker import RayEnvWorker
from roll.pipeline.agentic.environments.types import EnvFailure, EnvSpec, EnvWorker, Opened, Raised, Reason
from roll.pipeline.agentic.environments.workers import EnvWorkers

CAPACITY = 256
"""Environments of one worker: each may hold a thread."""

logger = logging.getLogger(__name__)


class EnvPool:
    """Workers that host environments, each call under a deadline of `step_timeout_s` seconds.

    An environment that raises fails alone. One that passes the deadline fails alone too; its worker is retired, and
    killed once its other environments are gone. When a worker's process dies, the environments in a call fail, and the
    others are repeated on another worker at their next step: reset with the seed, then the same actions. Every failure
    is an `EnvFailure` with a reason, never a reward.

    Use it from one asyncio loop, where Ray is initialised. `close` kills the workers; they also end with the process
    that made them.

    Attributes:
        failures: how many environments failed, by reason; those that failed while they were closed too.
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
    ) -> None:
        """Starts nothing; workers start with `start`, or with the first `open`.

        Args:
            workers: processes.
            step_timeout_s: deadline of a reset, a step, a close, and the repetition of an episode.
            start_timeout_s: deadline of a worker's start, and of an environment's wait for a worker.
            capacity: environments one worker holds.
            log: file that gets what the workers print, or None.
            variables: environment variables of the workers.
            launch: begins to start a worker; None takes a Ray actor.
        """
        launch = launch or (lambda: RayEnvWorker(capacity, log, variables or {}))
        self._workers = EnvWorkers(workers, capacity, start_timeout_s, launch)
        self._step_timeout_s = step_timeout_s
        self._keys = itertools.count()
        self._closing: dict[int, asyncio.Task[None]] = {}
        self._line = asyncio.Lock()
        self.failures: Counter[Reason] = Counter()

    async def start(self) -> None:
        """Waits until all workers are up.

        Raises:
            EnvWorkerError: which did not start, and why.
        """
        await self._workers.start()

    async def open(self, spec: EnvSpec, seed: int) -> tuple[Env, Opened]:
        """A new environment, reset with the seed.

        Raises:
            EnvFailure: it raised, hung or died.
            EnvWorkerError: there is no worker for it.
        """
        key = next(self._keys)
        env = Env(self, key, spec, seed)
        try:
            return env, await env.open()
        except BaseException:
            env.leave()
            raise

    def close(self) -> None:
        """Kills the workers and waits for their end; who awaits an answer gets an EnvFailure. Safe to call twice."""
        self._workers.close()

    async def place(self, key: int) -> None:
        """Gives an environment a worker; raises EnvWorkerError where there is none.

        Where all are full, it waits in line for those that are leaving, which hold their place until then, and for
        workers that start.
        """
        async with self._line:
            while self._workers.full and (leaving := [self._closing[one] for one in self._closing if self.hosted(one)]):
                coming = [*leaving, *self._workers.starting]
                await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
        await self._workers.place(key)

    def leaving(self, key: int, closing: asyncio.Task[None]) -> None:
        """Remembers an environment that is being closed."""
        self._closing[key] = closing
        closing.add_done_callback(lambda _: self._closing.pop(key))

    def hosted(self, key: int) -> bool:
        """Whether an environment has a worker."""
        return self._workers.of(key) is not None

    async def call(self, key: int, what: str, method: str, *args: Any) -> Any:
        """The answer of an environment's worker; `what` names environment and turn in the failure.

        Raises:
            EnvFailure: it raised, hung or died, and has left its worker.
        """
        self._workers.raise_if_closed()
        found = self._workers.of(key)
        assert found is not None, f"{what}: it has no worker"
        index, worker = found
        answer = worker.call(method, key, *args)
        done, _ = await asyncio.wait([answer], timeout=self._step_timeout_s)
        if not done:
            answer.add_done_callback(lambda late: late.cancelled() or late.exception())
            self._workers.hung(key)
            message = f"{what}: no answer within step_timeout_s = {self._step_timeout_s:g}; worker {index} is retired"
            raise self.failure("env_hung", message)
        error = answer.exception()
        death = None if error is None else worker.death(error)
        if death is not None:
            self._workers.died(index, death)
            raise self.failure("env_died", f"{what}: worker {index} died: {death}")
        result = Raised(repr(error), f"worker {index}") if error is not None else answer.result()
        if isinstance(result, Raised):
            self._workers.leave(key)
            raise self.failure("env_raised", f"{what}: {result.error} ({result.frame})")
        return result

    def failure(self, reason: Reason, message: str) -> EnvFailure:
        """A failure, counted unless it comes from closing the pool."""
        if self._workers.closed:
            return EnvFailure("env_died", f"{message} (the pool was closed)")
        self.failures[reason] += 1
        logger.warning("%s: %s", reason, message)
        return EnvFailure(reason, message)

    async def end(self, key: int, what: str) -> EnvFailure | None:
        """Closes an environment where it is. That it fails in this is counted and logged, not raised."""
        if self._workers.closed or not self.hosted(key):
            return None
        try:
            await self.call(key, what, "close")
        except EnvFailure as failure:
            return failure
        self._workers.leave(key)
        return None
