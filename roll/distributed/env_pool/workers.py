"""The worker processes of the pool of environments: starting, watching, replacing and killing them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.base.events import REPLACEMENT_INTERVAL_S, EventLog
from roll.distributed.env_pool.server import EnvActor
from roll.distributed.env_pool.types import EnvWorker, EnvWorkerError
from roll.distributed.processes import END_TIMEOUT_S, descendants, end, thread_environment
from roll.distributed.remote_errors import RAY_GUESSES
from roll.distributed.rpc_batching import rpc_client
from roll.usercode.stopped import INTERVAL_S, STOPPED_TOO_LONG, StopTimes, is_stopped

logger = logging.getLogger(__name__)

STOP_WATCH = "watch for stopped environment workers"
"""Name of the task that runs from the first start of a worker until `close`."""


@dataclass
class _WorkerState:
    worker: EnvWorker
    phase: Literal["starting", "running", "retired"] = "starting"
    envs: set[int] = field(default_factory=set)


class EnvWorkerPool:
    """Keeps `size` workers running and assigns environments to them.

    A worker is starting, then running, and may be retired; only a running worker takes new environments. Arguments as
    of `EnvPool`; `launch` starts a worker without waiting for it.

    - A worker in which a call hangs is retired at once, because a thread cannot be stopped. A replacement is started,
      and the retired worker is killed when the last of its other environments is released.
    - A worker whose process died is replaced at once. Its environments have no worker until they are assigned again.
    - A worker whose process has been stopped by a signal for STOPPED_GRACE_S is killed, and replaced as one that died.
    - A worker that fails to start is killed and not replaced before the next `start` or `assign`, so that a machine on
      which no worker can start is not kept busy by attempts.

    Attributes:
        closed: `close` was called; there are no workers and none will be started.
    """

    def __init__(
        self,
        size: int,
        capacity: int,
        start_timeout_s: float,
        launch: Callable[[], EnvWorker],
        events: EventLog | None = None,
    ) -> None:
        self._events = events
        self._size, self._capacity, self._start_timeout_s, self._launch = size, capacity, start_timeout_s, launch
        self._states: dict[int, _WorkerState] = {}
        self._worker_of: dict[int, int] = {}
        self._indices = itertools.count()
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._start_errors: list[str] = []
        self._killed: list[EnvWorker] = []
        self._stop_watch: asyncio.Task[None] | None = None
        self.closed = False

    @property
    def full(self) -> bool:
        """Whether there are running workers and none has room."""
        running = [state for state in self._states.values() if state.phase == "running"]
        return bool(running) and all(len(state.envs) >= self._capacity for state in running)

    @property
    def starting(self) -> list[asyncio.Task[None]]:
        """A task for each worker that is starting; it ends when the worker runs or has failed to start."""
        return list(self._starting.values())

    async def start(self) -> None:
        """Starts missing workers and waits until all are running.

        Raises:
            EnvWorkerError: workers that did not start, with the reasons.
        """
        self.raise_if_closed()
        self._start_errors.clear()
        self._launch_missing()
        if self._starting:
            await asyncio.wait(self._starting.values())
        if self._start_errors:
            raise EnvWorkerError("; ".join(self._start_errors))

    async def assign(self, key: int) -> None:
        """Assigns an environment to the running worker with the fewest, waiting for one to start if none has room.

        Raises:
            EnvWorkerError: no worker started before the deadline, or all are full.
        """
        self.raise_if_closed()
        self._start_errors.clear()
        self._launch_missing()
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._start_timeout_s
        while not self._assign_now(key):
            left_s = deadline - clock()
            if not self._starting or left_s <= 0:
                raise EnvWorkerError(self._why_no_worker())
            await asyncio.wait(self._starting.values(), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            self.raise_if_closed()

    def worker_of(self, key: int) -> tuple[int, EnvWorker] | None:
        """Index and worker of an environment.

        None before it is assigned, after it was released, and after its worker died.
        """
        index = self._worker_of.get(key)
        return None if index is None else (index, self._states[index].worker)

    def release(self, key: int) -> None:
        """Removes an environment that was closed or has failed and has no call running."""
        index = self._worker_of.pop(key, None)
        if index is None:
            return
        state = self._states[index]
        state.envs.remove(key)
        if state.phase == "retired" and not state.envs:
            self._kill(index)

    def retire_worker_of(self, key: int) -> None:
        """Releases an environment in which a call hangs and retires its worker."""
        index = self._worker_of.get(key)
        if index is None:
            return
        self._states[index].phase = "retired"
        self._record("hung", f"{index} has a call that hangs; another one replaces it")
        self.release(key)
        self._launch_missing()

    def died(self, index: int, reason: str, event: str = "died") -> None:
        """Replaces a worker whose process ended; several failing calls may report the same end.

        The worker is killed as well, in case only the connection to it was lost.
        """
        if index not in self._states:
            return
        self._record(event, f"{index} {'died: ' * (event == 'died')}{reason}; another one replaces it")
        for key in self._states[index].envs:
            del self._worker_of[key]
        if index in self._starting:
            self._starting[index].cancel()
        self._kill(index)
        self._launch_missing()

    def close(self) -> None:
        """Kills all workers and waits for their end. Safe to call twice."""
        self.closed = True
        if self._stop_watch is not None:
            self._stop_watch.cancel()
        for task in self._starting.values():
            task.cancel()
        self._worker_of.clear()
        for index in list(self._states):
            self._kill(index)
        while self._killed:
            self._killed.pop().join()

    def raise_if_closed(self) -> None:
        """Raises RuntimeError after `close`."""
        if self.closed:
            raise RuntimeError("the pool of environments is closed")

    def _record(self, event: str, message: str) -> None:
        component = "environment worker"
        if self._events is None:
            logger.error("%s %s", component, message)
        else:
            self._events.record(component, event, message, interval_s=REPLACEMENT_INTERVAL_S)

    def _launch_missing(self) -> None:
        if self._stop_watch is None:
            self._stop_watch = asyncio.create_task(self._kill_stopped(), name=STOP_WATCH)
        present = sum(state.phase != "retired" for state in self._states.values())
        for index in itertools.islice(self._indices, self._size - present):
            worker = self._launch()
            self._states[index] = _WorkerState(worker)
            task = self._starting[index] = asyncio.create_task(self._wait_until_ready(index, worker))
            task.add_done_callback(partial(self._start_ended, index))

    def _start_ended(self, index: int, _: asyncio.Task[None]) -> None:
        del self._starting[index]

    def _assign_now(self, key: int) -> bool:
        room = {
            index: len(state.envs)
            for index, state in self._states.items()
            if state.phase == "running" and len(state.envs) < self._capacity
        }
        if not room:
            return False
        index = min(room, key=room.__getitem__)
        self._states[index].envs.add(key)
        self._worker_of[key] = index
        return True

    async def _wait_until_ready(self, index: int, worker: EnvWorker) -> None:
        try:
            await asyncio.wait_for(worker.ready(), self._start_timeout_s)
        except TimeoutError:
            self._start_failed(index, f"was not up within start_timeout_s = {self._start_timeout_s:g}")
        except Exception as error:
            self._start_failed(index, f"did not start: {worker.exit_reason(error) or repr(error)}")
        else:
            if index in self._states:
                self._states[index].phase = "running"
            worker.call("watch").add_done_callback(lambda watch: self._watch_ended(index, worker, watch))

    def _start_failed(self, index: int, reason: str) -> None:
        self._start_errors.append(f"environment worker {index} {reason}")
        logger.error(self._start_errors[-1])
        if index in self._states:
            self._kill(index)  # it may still be starting

    def _watch_ended(self, index: int, worker: EnvWorker, watch: asyncio.Future[Any]) -> None:
        if not watch.cancelled():
            error = watch.exception()
            self.died(index, (error and worker.exit_reason(error)) or repr(error))

    async def _kill_stopped(self) -> None:
        """Replaces workers that stay stopped, since their calls would fail one by one at their deadlines."""
        stop_times, clock = StopTimes[int](), asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(INTERVAL_S)
            stopped = [index for index, state in self._states.items() if state.worker.is_stopped()]
            for index in stop_times.overdue(clock(), stopped):
                self.died(index, STOPPED_TOO_LONG, "stopped")

    def _kill(self, index: int) -> None:
        worker = self._states.pop(index).worker
        worker.kill()
        self._killed.append(worker)

    def _why_no_worker(self) -> str:
        if self.full:
            return "every environment worker holds as many environments as it can; use more workers"
        return "; ".join(self._start_errors) or f"no environment worker was up within {self._start_timeout_s:g} s"


class RayEnvWorker:
    """An `EnvActor` on the node of the caller. It reserves no core and no device, and computes with one thread."""

    def __init__(self, capacity: int, log: str | None, variables: Mapping[str, str]) -> None:
        node = ray.get_runtime_context().get_node_id()
        actor: Any = ray.remote(EnvActor)
        self._actor = actor.options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env={"env_vars": {**thread_environment(threads=1), **variables}},
        ).remote(capacity, log)
        self._client = rpc_client(self._actor)
        self._process_id = self._actor.process_id.remote()
        self._processes: list[psutil.Process] | None = None

    async def ready(self) -> None:
        """Returns once the process accepts calls."""
        self._processes = [psutil.Process(await asyncio.wrap_future(self._process_id.future()))]

    def call(self, method: str, *args: Any) -> asyncio.Future[Any]:
        """Calls a method of `EnvServer`."""
        return self._client.call(method, *args)

    def exit_reason(self, error: BaseException) -> str | None:
        """Ray's description of how the process ended, if that is what the error means; else None."""
        if not isinstance(error, ray.exceptions.RayActorError):
            return None
        lines = [line.strip() for line in RAY_GUESSES.split(str(error))[0].splitlines() if line.strip()]
        return " ".join(lines[:1] + [line for line in lines[1:] if "exit detail" in line])

    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process; False before `ready` has returned."""
        return is_stopped(self._processes[0].pid) if self._processes else False

    def kill(self) -> None:
        """Kills the process and the processes that its environments started."""
        stopped = self.is_stopped()
        if self._processes:
            self._processes = descendants(self._processes[0])
        if ray.is_initialized():
            ray.kill(self._actor)  # not a signal: Ray reports a process that a signal ended as an unexpected death
        for process in (self._processes or [])[0 if stopped else 1 :]:  # Ray waits 5 s for a stopped one to end itself
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def join(self) -> None:
        """Waits until a killed process has ended; one killed during its start may have started in the meantime."""
        if self._processes is None and ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError, psutil.NoSuchProcess):
                self._processes = descendants(psutil.Process(ray.get(self._process_id, timeout=END_TIMEOUT_S)))
        end(self._processes or [])
