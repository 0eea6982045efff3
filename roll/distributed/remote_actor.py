"""One object in a process of its own that owns no device, such as the rollouter."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.distributed.cluster import CLOSE_TIMEOUT_S, descendants, end, log_file, process_environment
from roll.distributed.remote_call import CallSite, ConcurrentHost, Pending

if TYPE_CHECKING:
    from roll.configs.pipeline import BaseConfig

CALLS = 100
"""Calls one service holds at a time."""


class Service:
    """Runs `make(*args)` beside the driver; coroutines of the object are called by name and run side by side."""

    def __init__(
        self,
        name: str,
        config: BaseConfig,
        deadlines: Mapping[str, float],
        make: Callable[..., Any],
        *args: Any,
    ) -> None:
        """Starts the process, in which the object is then made; `ready` waits for it.

        Args:
            name: for messages and the log file.
            config: of the run.
            deadlines: seconds by the coroutine's name, where it is not `rpc_timeout_s`.
            make: gives the object, which has a coroutine `close`.
            args: of `make`.

        Raises:
            ClusterError: the process did not start.
        """
        self._name, self._config, self._deadlines, self._ended = name, config, deadlines, False
        self._log = log_file(config, name)
        cores = tuple(sorted(os.sched_getaffinity(0)))
        here = ray.get_runtime_context().get_node_id()
        host: Any = ray.remote(ConcurrentHost)
        self._actor = host.options(
            num_cpus=0,
            max_concurrency=CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            runtime_env={"env_vars": process_environment(config, threads=1)},
        ).remote(name, 0, cores, self._log)
        started = self._pending("start", self._actor.process.remote(), config.start_timeout_s)
        self._process = psutil.Process(started.get())
        self._built = self._pending("build", self._actor.build.remote(make, {}, *args), config.start_timeout_s)

    async def ready(self) -> None:
        """Waits until the object is made.

        Raises:
            ClusterError: it could not be.
        """
        await self._built

    def call(self, method: str, *args: Any) -> Pending:
        """The answer of one of the object's coroutines, within its deadline."""
        deadline_s = self._deadlines.get(method, self._config.rpc_timeout_s)
        return self._pending(method, self._actor.call.remote(method, True, *args), deadline_s)

    def shutdown(self) -> None:
        """Closes the object and ends the process and those it started; may be called twice."""
        if self._ended:
            return
        self._ended = True
        processes = descendants(self._process)
        ray.wait([self._actor.call.remote("close", False)], timeout=CLOSE_TIMEOUT_S)
        ray.kill(self._actor)
        end(processes)

    def _pending(self, method: str, answer: ray.ObjectRef, timeout_s: float) -> Pending:
        site = CallSite(self._name, method, {0: f"log {self._log}"})
        return Pending(site, [answer], lambda answers: answers[0], timeout_s)
