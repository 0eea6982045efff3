"""Environments in processes that can be killed, with a deadline for every call: none can stall or corrupt a run."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from roll.base.events import EventLog, Repeats
from roll.usercode.env_process import EnvServer, ResetResult, StepResult, contain_environments, serve_call
from roll.usercode.pool import DIED_IDLE, ProcessStoppedError, UserProcessPool
from roll.usercode.process import ProcessEndedError, UserProcess, do_nothing
from roll.usercode.server import CallError

CAPACITY = 256
"""Environments of one process by default; each may need a thread."""

COMPONENT = "environments"
"""Of the events of processes that are replaced."""

Reason = Literal["env_raised", "env_hung", "env_died"]
"""Why an environment failed: it raised an exception, a call passed its deadline, or its process ended."""

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnvSpec:
    """The arguments of `roll.envs.make_env`, from which any process makes the same environment."""

    env_type: str
    env_config: Mapping[str, Any]


class EnvFailure(RuntimeError):
    """An environment failed and was removed, so its episode has no result. The message names environment and turn."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class _ProcessDiedError(Exception):
    """A process ended during a call; which of its environments ended it is unknown."""


class EnvPool:
    """Opens environments in processes; every call has a deadline of `step_timeout_s` seconds.

    - An environment that raises fails alone.
    - An environment that passes the deadline fails alone. Its process is retired: it takes no new environments and is
      killed when the last of its other environments is closed, because a thread cannot be stopped.
    - When a process dies, or is killed because it stays stopped by a signal, its environments are replayed in another
      one before their next step: reset with the same seed, then the same actions. A call that was running is repeated
      too, one such call at a time, since any of them may have ended the process: an environment fails if its process
      dies again in that call.

    Every failure is an `EnvFailure` with a reason, never a reward. Use a pool from one asyncio loop. `close` kills the
    processes; they also end with the process that started them.

    Attributes:
        processes: in which the environments are.
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
        launch: Callable[[], UserProcess] | None = None,
        events: EventLog | None = None,
    ) -> None:
        """Starts no process; they start with the first `open`.

        Args:
            workers: number of processes.
            step_timeout_s: deadline of a reset, a step, a close, and the replay of an episode.
            start_timeout_s: deadline for the start of a process.
            capacity: environments that one process holds.
            log: file for what the processes print, or None.
            variables: environment variables of the processes.
            launch: starts a process without waiting for it.
            events: log of the processes that are replaced.
        """
        launch = launch or partial(_launch, capacity, log, variables or {})
        self.processes = UserProcessPool(workers, launch, self.report, capacity, start_timeout_s)
        self.step_timeout_s, self._events = step_timeout_s, events
        self._keys = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()
        self._repeat_lock = asyncio.Lock()
        self.failures: Counter[Reason] = Counter()
        self._repeats = Repeats(logger)

    async def open(self, spec: EnvSpec, seed: int) -> tuple[EnvHandle, ResetResult]:
        """Makes an environment and resets it with the seed, in the process with the fewest environments.

        Where all are full it waits, in order of arrival, until another environment is closed.

        Raises:
            EnvFailure: it raised, hung or died.
            PoolBrokenError: no process starts.
        """
        if self.processes.closed:
            raise RuntimeError("the pool of environments is closed")
        env = EnvHandle(self, next(self._keys), spec, seed)
        try:
            return env, await env.open()
        except BaseException:
            env.start_close()
            raise

    def close(self) -> None:
        """Kills the processes and waits for their end; running calls raise EnvFailure. Safe to call twice."""
        self.processes.close()

    def closing(self, task: asyncio.Task[None]) -> None:
        """Keeps the task that closes an environment until it has ended."""
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def repeat(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Makes a call, and makes it once more if the process died in it.

        Raises:
            EnvFailure: the process died in that one too.
        """
        try:
            return await call()
        except _ProcessDiedError as death:
            if self.processes.closed:
                raise self.failure("env_died", str(death)) from None
        async with self._repeat_lock:
            try:
                return await call()
            except _ProcessDiedError as death:
                raise self.failure("env_died", str(death)) from None

    def failure(self, reason: Reason, message: str, location: str = "") -> EnvFailure:
        """Counts a failure and logs the first from each location, unless closing the pool caused it; returns it."""
        if self.processes.closed:
            return EnvFailure("env_died", f"{message} (the pool was closed)")
        self.failures[reason] += 1
        self._repeats.warn(f"{reason} {location}", f"{reason}: {message}")
        return EnvFailure(reason, message)

    def report(self, cause: str) -> None:
        """Records that a process is replaced."""
        if self._events is None:
            logger.error("%s: replaces a process: %s", COMPONENT, cause)
        else:
            self._events.process_replaced(COMPONENT, cause)


class EnvHandle:
    """One environment during one episode. It allows one call at a time; close it after a failure too.

    A call runs to its end or deadline even if its caller is cancelled, because its thread cannot be stopped.
    """

    def __init__(self, pool: EnvPool, key: int, spec: EnvSpec, seed: int) -> None:
        self._pool, self._key, self._spec, self._seed = pool, key, spec, seed
        self._process: UserProcess | None = None
        self._reset_result: ResetResult | None = None
        self._actions: list[str] = []
        self._steps: list[StepResult] = []
        self._running: asyncio.Task[Any] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._failed = False

    async def open(self) -> ResetResult:
        return await self._exclusively(self._open())

    async def step(self, text: str) -> StepResult:
        """Steps the environment with the text that the model wrote.

        Raises:
            EnvFailure: the environment raised, hung or died, and was removed.
            PoolBrokenError: its process died and no other starts.
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
            self._pool.closing(self._closing)
        return self._closing

    async def close(self) -> None:
        """Closes the environment and waits for it; see `start_close`."""
        await asyncio.shield(self.start_close())

    async def _exclusively(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        busy = self._running is not None and not self._running.done()
        if busy or self._failed or self._closing is not None:
            coroutine.close()
            state = "is still in a call" if busy else "has failed" if self._failed else "is closed"
            raise RuntimeError(f"{self._name} {state}")
        running = self._running = asyncio.create_task(self._noting_failure(coroutine))
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(running)

    async def _noting_failure(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        try:
            return await coroutine
        except EnvFailure:
            self._failed = True
            raise

    async def _open(self) -> ResetResult:
        self._reset_result = await self._pool.repeat(lambda: self._call("reset", EnvServer.open, *self._made_from))
        return self._reset_result

    async def _step(self, text: str) -> StepResult:
        async def step() -> StepResult:
            while self._process is None or self._process.ended:  # also if the next process ends at once
                self._leave(DIED_IDLE)
                await self._replay()
            return await self._call(f"turn {len(self._steps) + 1}", EnvServer.step, text)

        result = await self._pool.repeat(step)
        self._actions.append(text)
        self._steps.append(result)
        return result

    async def _replay(self) -> None:
        """Repeats the episode in another process, within the deadline of one call.

        Raises:
            EnvFailure: the results differ from the first ones, so the environment is not reproducible.
        """
        what = f"replay of {len(self._steps)} turns after its process died"
        reset, steps = await self._call(what, EnvServer.replay, *self._made_from, self._actions)
        if (reset, steps) == (self._reset_result, self._steps):
            return
        failure = await self._end(what)
        message = f"{self._name}, {what}: the episode is not reproducible; {self._difference(reset, steps)}"
        raise failure or self._pool.failure("env_died", message)

    def _difference(self, reset: ResetResult, steps: list[StepResult]) -> str:
        if reset != self._reset_result:
            return f"reset returned {reset!r} after {self._reset_result!r}"
        pairs = enumerate(zip(self._steps, steps, strict=True), 1)
        turn, (before, now) = next((turn, pair) for turn, pair in pairs if pair[0] != pair[1])
        return f"turn {turn} returned {now!r} after {before!r}"

    async def _call(
        self,
        what: str,
        method: Callable[Concatenate[EnvServer, int, P], ResultT],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> ResultT:
        """Calls a method of the server of this environment's process, which it takes if it has none.

        Raises:
            EnvFailure: the environment raised or hung, and left its process.
            _ProcessDiedError: its process died, so it has none.
        """
        pool, what = self._pool, f"{self._name}, {what}"
        process = self._process = self._process or await pool.processes.take()
        try:
            answer, _ = await pool.processes.answer(process, pool.step_timeout_s, serve_call, method, self._key, *args)
        except TimeoutError:
            message = f"{what}: no answer within env_step_timeout_s = {pool.step_timeout_s:g}"
            if pool.processes.retire(process):
                pool.report(message)
            self._leave()
            raise pool.failure("env_hung", f"{message}; its process {process.pid} is replaced") from None
        except CallError as error:
            self._leave()
            raise pool.failure("env_raised", f"{what}: {error}", str(error).partition(": ")[0]) from None
        except (ProcessEndedError, ProcessStoppedError) as death:
            message = f"{what}: its process {process.pid} died: {death or 'it was stopped by a signal'}"
            self._leave(message)
            raise _ProcessDiedError(message) from None
        result: ResultT = answer
        return result

    def _leave(self, died: str = "") -> None:
        """Gives the process back; another one replaces a process that died, as `died` says."""
        process, self._process = self._process, None
        if process is None:
            return
        if died and self._pool.processes.retire(process, now=True):
            self._pool.report(died)
        self._pool.processes.give_back(process)

    async def _end(self, what: str) -> EnvFailure | None:
        """Closes the environment, if it has a process. A failure is counted, logged and returned, not raised."""
        if self._process is None or self._process.ended:
            self._leave(DIED_IDLE)
            return None
        try:
            await self._call(what, EnvServer.close)
        except EnvFailure as failure:
            return failure
        except _ProcessDiedError:
            return None  # the environment ended with it
        self._leave()
        return None

    async def _close(self) -> None:
        if self._running is not None:
            await asyncio.wait([self._running])
        await self._end("close")

    @property
    def _made_from(self) -> tuple[str, dict[str, Any], int]:
        return self._spec.env_type, dict(self._spec.env_config), self._seed

    @property
    def _name(self) -> str:
        return f"environment {self._spec.env_type} with seed {self._seed}"


def _launch(capacity: int, log: str | None, variables: Mapping[str, str]) -> UserProcess:
    start = partial(UserProcess, contain_environments, do_nothing, threads=capacity, variables=variables)
    if log is None:
        return start()
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    with Path(log).open("ab") as file:
        return start(output=file.fileno())
