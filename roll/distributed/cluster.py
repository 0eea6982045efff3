"""All workers of one role as one object: the cluster, and the Ray actor that runs the methods.

A call goes from `Cluster.call` to `WorkerActor.call` and comes back as a `RemoteCall` with a deadline
(`remote_call.py`). Imports no torch: the actor pins its process before torch counts the cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.configs.devices.parallel_layout import ParallelLayout, spans
from roll.distributed.calls.remote_call import ClusterClient, RemoteCall, WorkerT, retrieve_error
from roll.distributed.calls.remote_errors import PROCESS_DIED, WATCH, ClusterError, Failure, failure_of
from roll.distributed.calls.rpc_batching import RpcActor
from roll.distributed.process_groups import hold_port
from roll.distributed.processes import (
    descendants,
    end,
    follow,
    gc_freeze,
    kill,
    log_file,
    pin,
    print_to,
    process_environment,
)
from roll.distributed.worker import Worker, WorkerRank, process_name, registered_methods
from roll.platforms import get_platform
from roll.sandbox.isolation import end_with_parent

if TYPE_CHECKING:
    from roll.configs.roles import RoleConfig
    from roll.configs.run_options import WorkerOptions
    from roll.distributed.resources import ResourceManager

CONCURRENT_CALLS = 1000
"""Calls of a cluster and batched messages that one concurrent worker holds at a time; its engine has its own queue."""
CLOSE_TIMEOUT_S = 20.0
"""Time a worker has to end its engine before it is killed."""
RESTART_POLL_S = 0.2
"""Interval at which a process that Ray starts again is asked for its id."""
NODE_CHECK_S = 2.0
"""Interval at which Ray is asked for the node of a process that is to start again."""
CANCEL_TIMEOUT_S = 2.0
"""Time that workers have to answer that they cancel calls, while no prompt is generated."""


class NodeLostError(RuntimeError):
    """The process of a rank cannot be started again, since Ray has lost its node."""


class Cluster(ClusterClient[WorkerT]):
    """Workers of one role on the devices of its `device_mapping`: calls them, and starts, restarts and ends them.

    Attributes:
        config: the role's section of the configuration.
    """

    def __init__(
        self,
        role: str,
        worker_cls: type[WorkerT],
        config: RoleConfig,
        pipeline_config: WorkerOptions,
        resources: ResourceManager,
        layout: ParallelLayout,
    ) -> None:
        """Starts the processes without waiting, so that clusters start concurrently; the first call waits for them.

        Raises:
            ValueError: the devices do not divide among the layout's ranks.
        """
        super().__init__(role, (), layout, resources.platform_name, (), _deadlines(worker_cls, pipeline_config))
        self.config = config
        self._workers = ParallelLayout(data=layout.data) if worker_cls.spans_tensor_parallel else layout
        self._worker_cls, self._pipeline_config, self._resources = worker_cls, pipeline_config, resources
        self._slots = resources.device_slots(role, self._workers.world_size)
        self._processes = [
            [self._start(rank, node) for node in range(len(slots))] for rank, slots in enumerate(self._slots)
        ]
        self.actors = tuple(row[0] for row in self._processes)
        self.locations = tuple(self._location(rank) for rank in range(self.world_size))
        self._local: dict[tuple[int, int], psutil.Process] = {}
        self._process_ids: list[int] = []
        self._built = self._ended = False

    def _start(self, rank: int, node_rank: int) -> Any:
        slot, name = self._slots[rank][node_rank], self._name(rank, node_rank)
        cores, threads = self._resources.cores(slot), self._resources.threads(slot)
        concurrent = self._worker_cls.concurrent
        platform = get_platform(self._resources.platform_name)
        environment = {
            **platform.worker_environment(),
            **(platform.deterministic_environment if self._pipeline_config.deterministic else {}),
            **process_environment(self._pipeline_config, threads),
            **self.config.system_envs,
        }
        if self._resources.platform_name == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = self._resources.visible_devices(slot)
        if len(self._resources.nodes) == 1:
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        actor_cls: Any = ray.remote(ConcurrentWorkerActor if concurrent else WorkerActor)
        return actor_cls.options(
            num_cpus=0,
            max_concurrency=CONCURRENT_CALLS if concurrent else 1,
            max_restarts=-1 if self._worker_cls.restartable else 0,
            scheduling_strategy=self._resources.scheduling(slot),
            runtime_env={"env_vars": environment},
        ).remote(name, rank, cores, log_file(self._pipeline_config, name))

    def _name(self, rank: int, node_rank: int) -> str:
        return process_name(self.role, rank, self._slots[rank][node_rank].node, node_rank)

    def initialize(self) -> RemoteCall[list[None]]:
        ranks = range(self.world_size)
        return self._call("initialize", dict.fromkeys(ranks, ()), ranks)

    async def restart(self, rank: int, responsive: bool) -> None:
        """Starts the process of a rank again and makes its worker, which is not initialized; child processes end.

        A worker that is `responsive`, since its process runs and answers, is closed first.

        Raises:
            ClusterError: the process did not start within `start_timeout_s`.
            NodeLostError: there is no node to start it on.
        """
        await asyncio.to_thread(self._require_nodes, rank)
        old, actor, local = self._process_ids[rank], self.actors[rank], self._local.get((rank, 0))
        children = [] if local is None else descendants(local)
        if responsive:
            closing = asyncio.wrap_future(actor.call.remote("close", False).future())
            closing.add_done_callback(retrieve_error)
            await asyncio.wait([closing], timeout=CLOSE_TIMEOUT_S)
        if local is None:
            self._kill_on_its_node(rank, old)
        else:
            with contextlib.suppress(psutil.NoSuchProcess):  # also where another process has its id by now
                local.kill()  # Ray starts the process again by itself
        await asyncio.to_thread(end, children)
        until = time.monotonic() + self._pipeline_config.start_timeout_s
        while (started := await self._restarted_process(rank, until)) == old:
            await asyncio.sleep(RESTART_POLL_S)
        self._process_ids[rank] = started
        if local is not None:
            self._local[rank, 0] = self._process(rank, started)
        port = self.ranks[0].master_port
        known = self._worker_rank(rank, 0, port)
        built = actor.build.remote(self._worker_cls, known.environment(), known, self.config, self._pipeline_config)
        await self._answers("build", {rank: built}, max(1.0, until - time.monotonic()))

    async def cancel_calls(self) -> None:
        """Cancels the calls of clients in other processes, which have died.

        A worker that does not answer in time is left out: it has died, or its calls end by themselves.
        """
        calls = [asyncio.wrap_future(actor.cancel_all.remote().future()) for actor in self.actors]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), CANCEL_TIMEOUT_S)

    def _kill_on_its_node(self, rank: int, process_id: int) -> None:
        node = self._resources.nodes[self._slots[rank][0].node].node_id
        task: Any = ray.remote(kill)
        task.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            process_id
        )

    def _require_nodes(self, rank: int) -> None:
        lost = self._resources.lost_nodes()
        for slot in self._slots[rank]:
            if slot.node in lost:
                raise NodeLostError(f"Ray has lost its node {slot.node} at {self._resources.nodes[slot.node].address}")

    async def _restarted_process(self, rank: int, until: float) -> int:
        """Id of the process of a rank that Ray is starting again; its node may turn out to be lost."""
        while True:
            await asyncio.to_thread(self._require_nodes, rank)
            asked = {rank: self.actors[rank].process_id.remote()}
            try:
                [process_id] = await self._answers("start", asked, min(NODE_CHECK_S, until - time.monotonic()))
            except ClusterError as error:
                if not error.process_failed or time.monotonic() > until:
                    raise
                await asyncio.sleep(RESTART_POLL_S)
            else:
                return int(process_id)

    @property
    def local_processes(self) -> dict[int, psutil.Process]:
        """The process of each rank that is on this node, once the workers were made."""
        return {rank: process for (rank, node_rank), process in self._local.items() if node_rank == 0}

    @property
    def nodes(self) -> set[int]:
        return {slot.node for slots in self._slots for slot in slots}

    @functools.cached_property
    def ranks(self) -> list[WorkerRank]:
        """What each rank knows about itself; the first use waits for the processes."""
        started = self._call_all_processes("start", lambda actor, *_: actor.process_id.remote())
        self._process_ids = [processes[0] for processes in started]
        self._local = {
            (rank, node): self._process(rank, process)
            for rank, processes in enumerate(started)
            for node, process in enumerate(processes)
            if self._resources.nodes[self._slots[rank][node].node].node_id == self._resources.this_node
        }
        address = self._resources.nodes[self._slots[0][0].node].address
        [port] = self._answers("hold_port", {0: self.actors[0].hold_port.remote(address)}).get()
        return [self._worker_rank(rank, 0, port) for rank in range(self.world_size)]

    def _process(self, rank: int, process_id: int) -> psutil.Process:
        follow(f"{self.role}-{rank}", process_id)
        try:
            return psutil.Process(process_id)
        except psutil.NoSuchProcess as error:
            raise self._context("start", rank).died(rank, "the process died as soon as it had started") from error

    def _worker_rank(self, rank: int, node_rank: int, port: int) -> WorkerRank:
        nodes, slot = self._resources.nodes, self._slots[rank][node_rank]
        further = tuple(zip((slot.node for slot in self._slots[rank][1:]), self._processes[rank][1:], strict=True))
        return WorkerRank(
            role=self.role,
            rank=rank,
            world_size=self.world_size,
            coordinates=self._workers.coordinates(rank),
            device=0,
            devices=slot.devices,
            node=slot.node,
            address=nodes[slot.node].address,
            master_address=nodes[self._slots[0][0].node].address,
            master_port=port,
            cores=self._resources.cores(slot),
            threads=self._resources.threads(slot),
            platform=self._resources.platform_name,
            nnodes=len(self._slots[rank]),
            node_rank=node_rank,
            further_nodes=() if node_rank else further,
        )

    def _build(self) -> None:
        if self._built:
            return
        port = self.ranks[0].master_port

        def build(actor: Any, rank: int, node_rank: int) -> Any:
            made = self._worker_cls.further_node_cls if node_rank else self._worker_cls
            known = self._worker_rank(rank, node_rank, port)
            return actor.build.remote(made, known.environment(), known, self.config, self._pipeline_config)

        self._call_all_processes("build", build)
        self._built = True

    def _call_all_processes(self, method: str, call: Callable[[Any, int, int], Any]) -> list[list[Any]]:
        """Calls the processes of all ranks on all their nodes; the answers by rank and by the rank's nodes."""
        refs = [
            [call(actor, rank, node) for node, actor in enumerate(actors)]
            for rank, actors in enumerate(self._processes)
        ]
        first = self._answers(method, {rank: row[0] for rank, row in enumerate(refs)})
        further = [[self._answers(method, {rank: ref}) for ref in row[1:]] for rank, row in enumerate(refs)]
        return [[own, *(each.get()[0] for each in row)] for own, row in zip(first.get(), further, strict=True)]

    def _answers(self, method: str, refs: Mapping[int, Any], timeout_s: float | None = None) -> RemoteCall[list[Any]]:
        """The answers of processes by rank, within `start_timeout_s` or less."""
        left_s = self._pipeline_config.start_timeout_s if timeout_s is None else timeout_s
        answers = [ref.future() for ref in refs.values()]
        return RemoteCall(self._context(method, *refs), answers, list, left_s)

    def _location(self, rank: int) -> str:
        slots = self._slots[rank]
        nodes, devices = spans([slot.node for slot in slots]), sorted(d for slot in slots for d in slot.devices)
        logs = [log_file(self._pipeline_config, self._name(rank, node)) for node in range(len(slots))]
        plural = "s" if len(slots) > 1 else ""
        return f"node{plural} {nodes}, devices {spans(devices)}, log{plural} {' and '.join(logs)}"

    def died(self, rank: int, text: str) -> ClusterError:
        """The error of a rank whose process was found dead, without a call that failed."""
        return self._context(WATCH, rank).died(rank, text)

    def client(self) -> ClusterClient[WorkerT]:
        """A client for other processes, whose calls succeed once `initialize` was called."""
        known = self.role, self.actors, self.layout, self.platform, self.locations, self.deadlines
        return ClusterClient(*known, batched=self._worker_cls.concurrent)

    def _call(self, *args: Any, **keywords: Any) -> RemoteCall[list[Any]]:
        self._build()
        return super()._call(*args, **keywords)

    def shutdown(self) -> None:
        """Closes the workers, ends their processes and child processes, and waits until they are gone."""
        if self._ended:
            return
        self._ended = True
        children = [child for process in self._local.values() for child in descendants(process)]
        actors = [actor for row in self._processes for actor in row]
        closing = [actor.call.remote("close", False) for actor in actors] if self._built else []
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        for actor in actors:
            ray.kill(actor)
        end(children)


def _deadlines(worker_cls: type[Worker], config: WorkerOptions) -> dict[str, float]:
    keys = {name: key for name, key in registered_methods(worker_cls).items() if hasattr(config, key)}
    return {name: float(getattr(config, key)) for name, key in keys.items()}


class _NoWorker:
    """Placeholder for the worker of a process that was started again, until `build`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __getattr__(self, method: str) -> Callable[..., Failure]:
        text = f"{method}: the process was started again, and has no worker yet"
        failure = Failure(self._rank, time.time(), PROCESS_DIED, text, text)
        return lambda *_, **__: failure


class WorkerActor:
    """The Ray actor that runs one worker in its own process; one call at a time, in the main thread."""

    def __init__(self, name: str, rank: int, cores: tuple[int, ...], log_file: str) -> None:
        """Pins the process to its cores and redirects its output to its log file.

        The arguments of `build` import the worker's modules; garbage is collected once that is done.
        """
        gc.disable()
        self._name, self._rank = name, rank
        self._worker: object = _NoWorker(rank)
        end_with_parent()
        pin(cores)
        print_to(log_file)

    def process_id(self) -> int:
        return os.getpid()

    def hold_port(self, address: str) -> int:
        """A TCP port of this node's `address`, held by this process until its worker's store serves on it."""
        return hold_port(address)

    def build(self, make: Callable[..., object], environment: dict[str, str], *args: Any) -> Failure | None:
        """Makes the worker with these environment variables set."""
        os.environ.update(environment)
        try:
            self._worker = make(*args)
        except Exception as error:
            return self._failure(error)
        gc_freeze()
        return None

    def call(self, method: str, keep: bool, *args: Any, **kwargs: Any) -> Any:
        """The worker's answer, None where `keep` is false, or a Failure where the method raised."""
        try:
            result = getattr(self._worker, method)(*args, **kwargs)
        except Exception as error:
            return self._failure(error)
        return result if keep else None

    def _failure(self, error: Exception) -> Failure:
        failure = failure_of(self._rank, error)
        print(f"{self._name} failed:\n{failure.traceback}", file=sys.stderr, flush=True)
        return failure


class ConcurrentWorkerActor(RpcActor, WorkerActor):
    """Runs one worker whose methods are coroutines, concurrently on one event loop; serves batched calls too."""

    def __init__(self, *args: Any) -> None:
        WorkerActor.__init__(self, *args)
        RpcActor.__init__(self, self.call)

    async def process_id(self) -> int:  # type: ignore[override]
        return os.getpid()

    async def call(self, method: str, keep: bool, *args: Any, **kwargs: Any) -> Any:
        """As in WorkerActor, awaiting the worker's coroutine."""
        try:
            result = getattr(self._worker, method)(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
        except Exception as error:
            return self._failure(error)
        return result if keep else None
