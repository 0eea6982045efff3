"""A worker of the pool of environments, as a Ray actor on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.distributed.processes import END_TIMEOUT_S, descendants, end, thread_environment
from roll.distributed.rpc_batching import RpcActor, RpcServer, rpc_client
from roll.pipeline.agentic.environments.host import EnvHost


class EnvActor(RpcActor):
    """An `EnvHost` in a process of its own; every call of an environment runs in a thread."""

    def __init__(self, capacity: int, log: str | None) -> None:
        """See `RayEnvWorker`."""
        self._host = EnvHost(log)
        self._threads = ThreadPoolExecutor(capacity)
        self._server = RpcServer(self._run)

    async def process(self) -> int:
        """The process id."""
        return os.getpid()

    async def _run(self, method: str, *args: Any) -> Any:
        if method == "watch":  # never answers, so the call ends with the process and tells of its end
            await asyncio.Event().wait()
        return await asyncio.get_running_loop().run_in_executor(self._threads, getattr(self._host, method), *args)


class RayEnvWorker:
    """Starts with its making. It owns no core and no device, and computes with one thread."""

    def __init__(self, capacity: int, log: str | None, variables: Mapping[str, str]) -> None:
        """Begins to start the process.

        Args:
            capacity: environments it holds, and so threads at most.
            log: file that gets what it prints, or None.
            variables: of its environment.
        """
        here = ray.get_runtime_context().get_node_id()
        actor: Any = ray.remote(EnvActor)
        self._actor = actor.options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            runtime_env={"env_vars": {**thread_environment(threads=1), **variables}},
        ).remote(capacity, log)
        self._client = rpc_client(self._actor)
        self._started = self._actor.process.remote()
        self._processes: list[psutil.Process] | None = None

    async def ready(self) -> None:
        """Returns once the process takes calls."""
        process = await asyncio.wrap_future(self._started.future())
        self._processes = [psutil.Process(process)]

    def call(self, method: str, *args: Any) -> asyncio.Future[Any]:
        """The answer of a method of `EnvHost`."""
        return self._client.call(method, *args)

    def death(self, error: BaseException) -> str | None:
        """How the process ended, in Ray's words, if that is what the error means."""
        if not isinstance(error, ray.exceptions.RayActorError):
            return None
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return " ".join(lines[:1] + [line for line in lines[1:] if "exit detail" in line])

    def kill(self) -> None:
        """Kills the process and those its environments started."""
        if self._processes:
            self._processes = descendants(self._processes[0])
        if ray.is_initialized():
            ray.kill(self._actor)  # not a signal: Ray reports a process that a signal ended as an unexpected death
        for child in (self._processes or [])[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def join(self) -> None:
        """Waits until a killed process is gone; one that was killed while it started may have come up meanwhile."""
        if self._processes is None and ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError, psutil.NoSuchProcess):
                self._processes = descendants(psutil.Process(ray.get(self._started, timeout=END_TIMEOUT_S)))
        end(self._processes or [])
