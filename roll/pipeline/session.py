"""Starts and ends Ray, the clusters and the remote actors of one run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from roll.configs.pipeline import BaseConfig
from roll.configs.roles import MegatronRoleConfig
from roll.distributed.cluster import Cluster
from roll.distributed.infer_worker import InferWorker
from roll.distributed.model_download import fetch_on_nodes
from roll.distributed.remote_actor import RemoteActor
from roll.distributed.resources import ResourceManager, start_ray, stop_ray
from roll.distributed.train_worker import TrainWorker
from roll.distributed.worker import Worker
from roll.platforms import get_platform

P = ParamSpec("P")
ObjectT = TypeVar("ObjectT")

logger = logging.getLogger(__name__)


def count_devices(devices: Sequence[int]) -> str:
    """`1 device` or `4 devices`."""
    return f"{len(devices)} device{'s' if len(devices) > 1 else ''}"


class Session:
    """The clusters of every role that owns devices, and the remote actors of the run.

    Entering the block starts the processes of the clusters, and `ready` waits until they can be used; remote actors
    started in between start at the same time. Leaving the block ends every process it started.
    """

    def __init__(self, config: BaseConfig) -> None:
        self._config = config
        self._platform = get_platform(config.platform)
        self._resources: ResourceManager | None = None
        self.train_clusters: dict[str, Cluster[TrainWorker]] = {}
        self.infer_clusters: dict[str, Cluster[InferWorker]] = {}
        self._remote_actors: list[RemoteActor[Any]] = []
        self._close_first: list[Callable[[], Awaitable[None]]] = []

    async def __aenter__(self) -> Session:
        """Starts Ray, reserves the devices, fetches models to every node, and starts the processes of all roles."""
        try:
            await self._start()
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        """Ends work in this process, then remote actors, clusters, reservation and Ray.

        An error in this is raised, unless the run has failed before: then it is logged, since it is not the cause.
        """
        logger.info("ending the processes of the run")
        try:
            for close in self._close_first:
                await close()
        except Exception:
            if error[0] is None:
                raise
            logger.exception("closing failed after the run did")
        finally:
            self._stop()

    async def _start(self) -> None:
        """Starts everything without waiting for it; the pauses are where a Ctrl-C that came meanwhile ends the run."""
        config = self._config
        roles = config.device_roles()
        per_node = config.num_devices_per_node or self._platform.device_count()
        logger.info("starting Ray")
        start_ray(config, self._platform.name, per_node)
        await asyncio.sleep(0)
        mappings = {role: worker.device_mapping for role, worker in roles.items()}
        resources = self._resources = ResourceManager(self._platform.name, per_node, mappings)
        await fetch_on_nodes(config, resources)
        names = ", ".join(f"{role} on {count_devices(worker.device_mapping)}" for role, worker in roles.items())
        logger.info("starting %s; their logs are in %s", names, config.logging_dir)
        for role, worker in roles.items():
            layout = worker.layout
            if isinstance(worker, MegatronRoleConfig):
                self.train_clusters[role] = Cluster(role, TrainWorker, worker, config, resources, layout)
            else:
                self.infer_clusters[role] = Cluster(role, InferWorker, worker, config, resources, layout)
        await asyncio.sleep(0)

    @property
    def clusters(self) -> list[Cluster[Worker]]:
        """The clusters of all roles."""
        return [*self.train_clusters.values(), *self.infer_clusters.values()]

    async def ready(self) -> None:
        """Initializes all roles at the same time, and waits for them and for the remote actors.

        Raises:
            ClusterError: one of them did not start.
        """
        calls = [asyncio.to_thread(cluster.initialize) for cluster in self.clusters]
        for call in await asyncio.gather(*calls):
            await call
        for remote_actor in self._remote_actors:
            await remote_actor.ready()

    def start_remote_actor(
        self, name: str, deadlines: Mapping[str, float], make: Callable[P, ObjectT], *args: P.args, **kwargs: P.kwargs
    ) -> RemoteActor[ObjectT]:
        """Runs `make(*args)` in a separate process; see `RemoteActor`."""
        remote_actor = RemoteActor(name, self._config, deadlines, make, *args, **kwargs)
        self._remote_actors.append(remote_actor)
        return remote_actor

    def close_first(self, close: Callable[[], Awaitable[None]]) -> None:
        """Registers a coroutine function that is called first when the block is left."""
        self._close_first.append(close)

    def _stop(self) -> None:
        """Ends remote actors first and Ray last; a failure does not keep the others from being ended."""
        with contextlib.ExitStack() as ends:
            ends.callback(stop_ray)
            if self._resources is not None:
                ends.callback(self._resources.release)
            for cluster in reversed(self.clusters):
                ends.callback(cluster.shutdown)
            for remote_actor in self._remote_actors:
                ends.callback(remote_actor.shutdown)
