"""Starts and ends Ray, the clusters and the remote actors of one run; a run that starts again may keep its engines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from psutil import Process

from roll.base.events import EventLog
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.configs.roles import MegatronRoleConfig
from roll.configs.scoring.scoring_roles import RewardEngineConfig
from roll.distributed.calls.remote_actor import RemoteActor
from roll.distributed.calls.remote_errors import ClusterError, deadline_scope, one_line
from roll.distributed.cluster import Cluster
from roll.distributed.infer.engine_monitor import EngineMonitor
from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.infer.score_worker import ScoreWorker
from roll.distributed.model_download import fetch_on_nodes
from roll.distributed.process_watch import ProcessWatch, ray_death
from roll.distributed.ray_session import start_ray, stop_ray
from roll.distributed.resources import ResourceManager
from roll.distributed.shared_devices import SharedDevices
from roll.distributed.train.train_worker import TrainWorker
from roll.distributed.worker import Worker
from roll.plan.inputs import model_names
from roll.platforms import get_platform

if TYPE_CHECKING:
    from roll.pipeline.rollout_client import RolloutClient

P = ParamSpec("P")
ObjectT = TypeVar("ObjectT")

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0
"""Time for closing one part of the run in this process."""

KEEP_TIMEOUT_S = 30.0
"""Time that engines have to end the requests of a failed run; an engine that takes longer is started again."""


def count_devices(devices: Sequence[int]) -> str:
    return f"{len(devices)} device{'s' if len(devices) > 1 else ''}"


class Session:
    """The clusters of every role that owns devices, and the remote actors of the run.

    Entering the block starts the processes of the clusters, and `ready` waits until they can be used; remote actors
    started in between start at the same time. Leaving the block ends every process it started; only where
    `may_start_again` and the trainer failed, engines that answer keep running, for the next block or until `end`.

    Attributes:
        may_start_again: whether another block follows the failure of this one.
        kept: roles of the engines that have run since the block before.
        kept_since: when that block ended, by `time.monotonic`.
        down: why engines of these roles have to be restarted, by role and engine.
        resumed: whether a block has begun to train, so that the checkpoints in the run's folder are its own.
    """

    def __init__(self, config: BaseConfig) -> None:
        self._config = config
        self._platform = get_platform(config.platform)
        self._resources: ResourceManager | None = None
        self.train_clusters: dict[str, Cluster[TrainWorker]] = {}
        self.infer_clusters: dict[str, Cluster[InferWorker]] = {}
        self.shared_devices: SharedDevices | None = None
        """Set in a run whose trainer and engines take turns on their devices."""
        self.monitors: dict[str, EngineMonitor] = {}
        """Monitor of the engines of each role; the monitors of the next block continue its counts."""
        self.rollout_client: RolloutClient | None = None
        """Client of the rollout process; the client of the next block continues its counts."""
        self._remote_actors: list[RemoteActor[Any]] = []
        self._close_first: list[Callable[[], Awaitable[None]]] = []
        self._running = False
        self.watch: ProcessWatch
        """Of the block that was entered last."""
        self.may_start_again = self.resumed = False
        self.kept: set[str] = set()
        self.kept_since = 0.0
        self.down: dict[str, dict[int, str]] = {}

    async def __aenter__(self) -> Session:
        """Starts Ray, reserves the devices, fetches models to every node, and starts the processes of all roles."""
        try:
            await self._start()
        except BaseException:
            self.end()
            raise
        self.watch = self.watch_processes()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Ends work in this process, then remote actors, clusters, reservation and Ray.

        An error in this is raised, unless the run has failed before: then it is logged, since it is not the cause.
        """
        logger.info("ending the processes of the run")
        try:
            await self._close(error)
        finally:
            self._close_first.clear()
            self.kept, self.kept_since, self.down = set(), time.monotonic(), {}
            if self._engines_may_stay(error):
                self._end_training()
                self.kept = await self._keep_engines()
            if not self.kept:
                self.end()

    async def _close(self, error: BaseException | None) -> None:
        """Ends work in this process; what fails, or takes too long, does not keep the rest from being closed."""
        first: Exception | None = None
        for close in self._close_first:
            try:
                await asyncio.wait_for(close(), CLOSE_TIMEOUT_S)
            except Exception as problem:
                first = first or problem
                if error is not None or first is not problem:
                    logger.exception("a part of the run could not be closed")
        if first is not None and error is None:
            raise first

    async def _start(self) -> None:
        """Starts everything without waiting for it; the pauses are where a Ctrl-C that came meanwhile ends the run."""
        self._running = True
        config = self._config
        roles = config.device_roles()
        per_node = config.num_devices_per_node or self._platform.device_count()
        if self._resources is None:
            logger.info("starting Ray")
            try:
                start_ray(config, self._platform.name, per_node)
            finally:
                await asyncio.sleep(0)
            mappings = {role: worker.device_mapping for role, worker in roles.items()}
            self._resources = ResourceManager(self._platform.name, per_node, mappings)
            await fetch_on_nodes(model_names(config), config, self._resources)
        resources = self._resources
        roles = {role: worker for role, worker in roles.items() if role not in self.kept}
        names = ", ".join(f"{role} on {count_devices(worker.device_mapping)}" for role, worker in roles.items())
        logger.info("starting %s; their logs are in %s", names, config.logging_dir)
        for role, worker in roles.items():
            layout = worker.layout
            if isinstance(worker, MegatronRoleConfig):
                self.train_clusters[role] = Cluster(role, TrainWorker, worker, config, resources, layout)
            else:
                engine = ScoreWorker if isinstance(worker, RewardEngineConfig) else InferWorker
                self.infer_clusters[role] = Cluster(role, engine, worker, config, resources, layout)
        if isinstance(config, RLConfig) and config.takes_turns(self._platform.name):
            trained, infer = self.train_clusters["actor_train"], self.infer_clusters["actor_infer"]
            devices = {*infer.config.device_mapping}
            shared = {
                role: cluster
                for role, cluster in self.train_clusters.items()
                if cluster is not trained and role != "reward" and devices & {*cluster.config.device_mapping}
            }
            critic = shared.pop("critic", None)
            self.shared_devices = SharedDevices(trained, [*shared.values()], infer, config.in_flight_policy, critic)
        await asyncio.sleep(0)

    @property
    def clusters(self) -> list[Cluster[Worker]]:
        return [*self.train_clusters.values(), *self.infer_clusters.values()]

    async def ready(self) -> None:
        """Initializes the roles in their order, and waits for them and for the remote actors.

        Raises:
            ClusterError: one of them did not start.
        """
        for clusters in self._start_order():
            calls = [asyncio.to_thread(cluster.initialize) for cluster in clusters]
            for call in await asyncio.gather(*calls):
                await call
            if self.shared_devices is not None and self.train_clusters["actor_train"] in clusters:
                await self.shared_devices.engines_may_start()
        for remote_actor in self._remote_actors:
            await remote_actor.ready()

    def watch_processes(self) -> ProcessWatch:
        """Watches Ray, training ranks, engines and those remote actors that are ready, until the block is left."""

        def others() -> dict[str, Process]:
            engines = {
                f"{cluster.role}-{rank}": process
                for cluster in self.infer_clusters.values()
                for rank, process in cluster.local_processes.items()
            }
            actors = {actor.name: actor.process for actor in self._remote_actors if actor.process is not None}
            return engines | actors

        watch = ProcessWatch([*self.train_clusters.values()], EventLog(self._config.output_dir), others)
        watch.start()
        self.close_first(watch.close)
        return watch

    def _start_order(self) -> list[list[Cluster[Worker]]]:
        """Clusters that may start at the same time, one list after the other.

        An engine takes a share of the memory that it finds free on its GPU, so it starts once the training ranks on
        that GPU hold theirs, or have moved it to host memory.
        """
        starting = [cluster for cluster in self.clusters if cluster.role not in self.kept]
        if not self._platform.engines_take_free_memory:
            return [starting]
        taken = {device for cluster in self.train_clusters.values() for device in cluster.config.device_mapping}
        later = [each for each in self.infer_clusters.values() if taken & {*each.config.device_mapping}]
        return [[each for each in starting if each not in later], [each for each in starting if each in later]]

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

    def _engines_may_stay(self, error: BaseException | None) -> bool:
        """Whether the run may start again and its trainer, not an engine or a node, is what failed.

        Engines that take turns with the trainer are ended too: the new training ranks need their memory. With a node
        that Ray has lost everything ends, so that all devices are reserved again.
        """
        if not isinstance(error, ClusterError) or not error.process_failed or error.role in self.infer_clusters:
            return False
        if not self.may_start_again or not self.infer_clusters or self.shared_devices is not None:
            return False
        return self._resources is not None and ray_death() is None and not self._resources.lost_nodes()

    async def _keep_engines(self) -> set[str]:
        """Lets the engines end their requests and wait for new weights; the roles of all.

        Engines that do not are in `down`, and are restarted later; none are kept where a role has no other.
        """
        clusters = [*self.infer_clusters.values()]

        async def leave(cluster: Cluster[InferWorker], engine: int) -> None:
            monitor, cause = self.monitors.get(cluster.role), "it was down when the trainer failed"
            if monitor is None or engine in (*monitor.serving, *monitor.started):
                try:
                    await cluster.call([engine], InferWorker.leave_trainer, cluster.role == "actor_infer")
                    return
                except ClusterError as error:
                    cause = one_line(error)
            self.down.setdefault(cluster.role, {})[engine] = cause

        with deadline_scope(time.monotonic() + KEEP_TIMEOUT_S):
            await self.cancel_requests()
            await asyncio.gather(*(leave(each, engine) for each in clusters for engine in range(each.world_size)))
        for cluster in clusters:
            if len(causes := self.down.get(cluster.role, {})) == cluster.world_size:
                logger.warning("the engines are started again too: %s", causes[0])
                return set()
        return {cluster.role for cluster in clusters}

    async def cancel_requests(self) -> None:
        """Ends the requests that dead processes have sent to the engines of all roles."""
        await asyncio.gather(*(cluster.cancel_calls() for cluster in self.infer_clusters.values()))

    def _end_training(self) -> None:
        """Ends remote actors first, then training clusters; a failure does not keep the others from being ended."""
        with contextlib.ExitStack() as ends:
            for cluster in reversed(self.train_clusters.values()):
                ends.callback(cluster.shutdown)
            for remote_actor in self._remote_actors:
                ends.callback(remote_actor.shutdown)
        self.train_clusters.clear()
        self._remote_actors.clear()

    def end(self) -> None:
        """Ends everything, Ray last; a failure does not keep the others from being ended. May be called twice."""
        if not self._running:
            return
        self._running = False
        with contextlib.ExitStack() as ends:
            ends.callback(stop_ray)
            if self._resources is not None and ray_death() is None:
                ends.callback(self._resources.release)
            for cluster in reversed(self.infer_clusters.values()):
                ends.callback(cluster.shutdown)
            ends.callback(self._end_training)
        self.infer_clusters.clear()
        self.kept.clear()
        self.down.clear()
        self._resources = None
