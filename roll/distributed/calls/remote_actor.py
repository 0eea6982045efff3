"""One object in its own process without devices, such as the rollouter."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.distributed.calls.remote_call import RemoteCall
from roll.distributed.calls.remote_errors import CallContext, ClusterError
from roll.distributed.calls.rpc_batching import RpcClient, rpc_client
from roll.distributed.cluster import CLOSE_TIMEOUT_S, ConcurrentWorkerActor
from roll.distributed.processes import descendants, end, follow, log_file, process_environment

if TYPE_CHECKING:
    from roll.configs.run_options import ProcessOptions

ObjectT = TypeVar("ObjectT", covariant=True)
P = ParamSpec("P")
ResultT = TypeVar("ResultT")

PROCESS_ID_S = 1.0
"""Time for an object that is not ready to answer which process it is in, so that its child processes are ended too."""

CONCURRENT_CALLS = 100
"""Calls one remote actor holds at a time."""


class RemoteActor(Generic[ObjectT]):
    """Runs `make(*args)` on the driver's node; coroutines of the object are called by reference, concurrently.

    Attributes:
        name: for messages and the log file.
        process: in which the object is; None until `ready` has waited for it.
    """

    def __init__(
        self,
        name: str,
        config: ProcessOptions,
        deadlines: Mapping[str, float],
        make: Callable[P, ObjectT],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Starts the process, in which the object is then made, without waiting; `ready` waits for both.

        `make(*args, **kwargs)` gives the object, which has a coroutine `close`. `deadlines` has the seconds of
        coroutines for which it is not `rpc_timeout_s`, by name.
        """
        self.name, self._config, self._deadlines, self._ended = name, config, deadlines, False
        self._log = log_file(config, name)
        self._actor = self._start()
        self.process: psutil.Process | None = None
        self._client: RpcClient | None = None
        self._started: RemoteCall[int] = self._remote_call(
            "start", self._actor.process_id.remote(), config.start_timeout_s
        )
        self._built: RemoteCall[None] = self._remote_call(
            "build", self._actor.build.remote(make, {}, *args, **kwargs), config.start_timeout_s
        )

    def _start(self) -> Any:
        cores = tuple(sorted(os.sched_getaffinity(0)))
        node = ray.get_runtime_context().get_node_id()
        actor_cls: Any = ray.remote(ConcurrentWorkerActor)
        return actor_cls.options(
            num_cpus=0,
            max_concurrency=CONCURRENT_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env={"env_vars": process_environment(self._config, threads=1)},
        ).remote(self.name, 0, cores, self._log)

    async def ready(self) -> None:
        """Waits until the process has started and the object is made.

        Raises:
            ClusterError: one of them failed.
        """
        try:
            self.process = psutil.Process(await self._started)
            follow(f"{self.name}-0", self.process.pid)
        except psutil.NoSuchProcess as error:
            raise self._context("start").died(0, "the process died as soon as it had started") from error
        await self._built

    def call(
        self, method: Callable[Concatenate[ObjectT, P], Awaitable[ResultT]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RemoteCall[ResultT]:
        """Calls one of the object's coroutines, within the deadline of its name."""
        name = method.__name__
        deadline_s = self._deadlines.get(name, self._config.rpc_timeout_s)
        return self._remote_call(name, self._actor.call.remote(name, True, *args, **kwargs), deadline_s)

    def call_batched(
        self, method: Callable[Concatenate[ObjectT, P], Awaitable[ResultT]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RemoteCall[ResultT]:
        """As `call`, in messages that calls of one event loop share; cancelling it cancels it in the actor too."""
        if self._client is None:
            self._client = rpc_client(self._actor)
        name = method.__name__
        answer = self._client.call(name, True, *args, **kwargs)
        deadline_s = self._deadlines.get(name, self._config.rpc_timeout_s)
        return RemoteCall(self._context(name), [answer], lambda answers: answers[0], deadline_s)

    def kill(self) -> None:
        """Ends its process at once, without closing the object."""
        self._ended = True
        ray.kill(self._actor)

    def shutdown(self) -> None:
        """Closes the object and ends its process and child processes; may be called twice."""
        if self._ended:
            return
        self._ended = True
        ray.wait([self._actor.call.remote("close", False)], timeout=CLOSE_TIMEOUT_S)
        processes: list[psutil.Process] = []
        with contextlib.suppress(ClusterError, psutil.NoSuchProcess):
            if self.process is None:
                asked = self._actor.process_id.remote()
                self.process = psutil.Process(self._remote_call("shutdown", asked, PROCESS_ID_S).get())
            processes = descendants(self.process)
        ray.kill(self._actor)
        end(processes)

    def _remote_call(self, method: str, answer: ray.ObjectRef[Any], timeout_s: float) -> RemoteCall[Any]:
        return RemoteCall(self._context(method), [answer.future()], lambda answers: answers[0], timeout_s)

    def _context(self, method: str) -> CallContext:
        return CallContext(self.name, method, {0: f"log {self._log}"})
