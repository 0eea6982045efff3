"""Ray, the devices and the clusters of one run: all started here, all ended here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from roll.configs.pipeline import BaseConfig
from roll.distributed.cluster import Cluster
from roll.distributed.infer_worker import InferWorker
from roll.distributed.resources import ResourceManager, start_ray, stop_ray
from roll.distributed.service import Service
from roll.distributed.train_worker import TrainWorker
from roll.distributed.worker import Worker
from roll.platforms import get_platform

logger = logging.getLogger(__name__)

WORKERS: dict[str, type[Worker]] = {
    "megatron_train": TrainWorker,
    "megatron_infer": TrainWorker,
    "sglang": InferWorker,
}
"""The worker that runs each `strategy_name`."""


class Session:
    """The clusters of every role that owns devices, and services beside them.

    Entering the block starts the clusters' processes, `ready` waits until they can be used; a service that is started
    in between comes up beside them. Leaving the block ends every process it started.
    """

    def __init__(self, config: BaseConfig) -> None:
        """Starts nothing yet."""
        self._config = config
        self._platform = get_platform(config.platform)
        self._resources: ResourceManager | None = None
        self.clusters: dict[str, Cluster] = {}
        self._services: list[Service] = []
        self._first: list[Callable[[], Awaitable[None]]] = []

    async def __aenter__(self) -> Session:
        """Starts Ray, reserves the devices, and starts the processes of all roles."""
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        """Ends what runs in this process, then clusters, reservation and Ray.

        What fails in this is raised, unless the run has failed already: then it is logged, for the cause is the other.
        """
        try:
            for close in self._first:
                await close()
        except Exception:
            if error[0] is None:
                raise
            logger.exception("closing failed after the run did")
        finally:
            self._stop()

    def _start(self) -> None:
        config = self._config
        roles = config.device_roles()
        per_node = config.num_devices_per_node or self._platform.device_count()
        start_ray(config, self._platform.name, per_node)
        mappings = {role: worker.device_mapping for role, worker in roles.items()}
        self._resources = ResourceManager(self._platform.name, per_node, mappings)
        for role, worker in roles.items():
            cls = WORKERS[worker.strategy_args.strategy_name]
            self.clusters[role] = Cluster(role, cls, worker, config, self._resources, worker.layout)

    async def ready(self) -> None:
        """Brings all roles up side by side, and waits for them and for the services.

        Raises:
            ClusterError: one of them did not come up.
        """
        calls = [asyncio.to_thread(cluster.initialize) for cluster in self.clusters.values()]
        for pending in await asyncio.gather(*calls):
            await pending
        for service in self._services:
            await service.ready()

    def start_service(self, name: str, deadlines: Mapping[str, float], make: Callable[..., Any], *args: Any) -> Service:
        """Runs `make(*args)` in a process of its own; see `Service`."""
        service = Service(name, self._config, deadlines, make, *args)
        self._services.append(service)
        return service

    def close_first(self, close: Callable[[], Awaitable[None]]) -> None:
        """Has a coroutine function called when the block is left, before anything else is ended."""
        self._first.append(close)

    def _stop(self) -> None:
        """Services first, Ray last; each is ended though the one before it could not be."""
        with contextlib.ExitStack() as ends:
            ends.callback(stop_ray)
            if self._resources is not None:
                ends.callback(self._resources.release)
            for cluster in reversed(self.clusters.values()):
                ends.callback(cluster.shutdown)
            for service in self._services:
                ends.callback(service.shutdown)
