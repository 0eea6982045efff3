"""All workers of one role as one object, and single workers as other processes call them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, TypeVarTuple, overload

import psutil
import ray

from roll.configs.parallel_layout import ParallelLayout, spans
from roll.distributed.processes import descendants, end, log_file, process_environment
from roll.distributed.remote_call import (
    CallContext,
    ConcurrentWorkerActor,
    Failure,
    RemoteCall,
    WorkerActor,
    ray_failure,
    seconds_left,
)
from roll.distributed.resources import DeviceSlot
from roll.distributed.rpc_batching import RpcClient, rpc_client
from roll.distributed.worker import Worker, WorkerRank, registered_methods

if TYPE_CHECKING:
    from roll.configs.pipeline import BaseConfig
    from roll.configs.roles import RoleConfig
    from roll.distributed.resources import ResourceManager

WorkerT = TypeVar("WorkerT", bound=Worker, covariant=True)
P = ParamSpec("P")
Args = TypeVarTuple("Args")
ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")

CONCURRENT_CALLS = 1000
"""Calls of a cluster and batched messages that one concurrent worker holds at a time; its engine has its own queue."""
CLOSE_TIMEOUT_S = 20.0
"""Time a worker has to end its engine before it is killed."""


class Cluster(Generic[WorkerT]):
    """Workers of one role on the devices of its `device_mapping`.

    Methods of the worker class marked with `register` are called by reference, so that editors and mypy follow them:

        metrics = await actor.call_shards(TrainWorker.train_step, shards)

    `call_all` gives every rank the same arguments (ROLL's and verl's Dispatch.ONE_TO_ALL), `call_each` gives every rank
    its own (ALL_TO_ALL), `call_shards` gives every data-parallel rank its own (DP). Each returns a `RemoteCall` at
    once: `await` it or `.get()` it. Calls of one cluster reach each rank in the order they were made.

    Attributes:
        role: name of the cluster.
        config: the role's section of the configuration.
        layout: sizes of its parallel dimensions.
        world_size: workers; an engine that spans the tensor-parallel devices is one.
    """

    def __init__(
        self,
        role: str,
        worker_cls: type[WorkerT],
        config: RoleConfig,
        pipeline_config: BaseConfig,
        resources: ResourceManager,
        layout: ParallelLayout,
    ) -> None:
        """Starts the processes without waiting, so that clusters start concurrently; the first call waits for them.

        Raises:
            ValueError: the devices do not divide among the layout's ranks.
        """
        self.role, self.config, self.layout = role, config, layout
        self._workers = ParallelLayout(data=layout.data) if worker_cls.spans_tensor_parallel else layout
        self.world_size = self._workers.world_size
        self._worker_cls, self._pipeline_config, self._resources = worker_cls, pipeline_config, resources
        self._deadlines = {
            name: float(getattr(pipeline_config, key))
            for name, key in registered_methods(worker_cls).items()
            if hasattr(pipeline_config, key)
        }
        self._slots = resources.device_slots(role, self.world_size)
        self._logs = [log_file(pipeline_config, f"{role}-{rank}") for rank in range(self.world_size)]
        self._actors = [self._start(rank, slot) for rank, slot in enumerate(self._slots)]
        self._processes: list[psutil.Process] = []
        self._built = self._ended = False

    def _start(self, rank: int, slot: DeviceSlot) -> Any:
        cores, threads = self._resources.cores(slot), self._resources.threads(slot)
        concurrent = self._worker_cls.concurrent
        environment = {**process_environment(self._pipeline_config, threads), **self.config.system_envs}
        if self._resources.platform_name == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = self._resources.visible_devices(slot)
        if len(self._resources.nodes) == 1:
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        actor_cls: Any = ray.remote(ConcurrentWorkerActor if concurrent else WorkerActor)
        return actor_cls.options(
            num_cpus=0,
            max_concurrency=CONCURRENT_CALLS if concurrent else 1,
            scheduling_strategy=self._resources.scheduling(slot),
            runtime_env={"env_vars": environment},
        ).remote(f"{self.role}-{rank}", rank, cores, self._logs[rank])

    def initialize(self) -> RemoteCall[list[None]]:
        """Starts the engines of all workers."""
        return self._call("initialize", [()] * self.world_size, list(range(self.world_size)))

    @overload
    def call_all(
        self, method: Callable[Concatenate[WorkerT, P], Awaitable[ResultT]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RemoteCall[list[ResultT]]: ...
    @overload
    def call_all(
        self, method: Callable[Concatenate[WorkerT, P], ResultT], /, *args: P.args, **kwargs: P.kwargs
    ) -> RemoteCall[list[ResultT]]: ...
    def call_all(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RemoteCall[list[Any]]:
        """Calls every rank with the same arguments; the result is a list by rank."""
        return self._call(method.__name__, [args] * self.world_size, list(range(self.world_size)), kwargs)

    @overload
    def call_each(
        self, method: Callable[[WorkerT, ArgumentT], Awaitable[ResultT]], arguments: Sequence[ArgumentT]
    ) -> RemoteCall[list[ResultT]]: ...
    @overload
    def call_each(
        self, method: Callable[[WorkerT, ArgumentT], ResultT], arguments: Sequence[ArgumentT]
    ) -> RemoteCall[list[ResultT]]: ...
    def call_each(self, method: Callable[[Any, Any], Any], arguments: Sequence[Any]) -> RemoteCall[list[Any]]:
        """Calls rank r with `arguments[r]`; the result is a list by rank.

        Raises:
            ValueError: there is not one argument per rank.
        """
        self._check_length(method.__name__, arguments, self.world_size, "ranks")
        return self._call(method.__name__, [(each,) for each in arguments], list(range(self.world_size)))

    @overload
    def call_shards(
        self, method: Callable[[WorkerT, ArgumentT], Awaitable[ResultT]], shards: Sequence[ArgumentT]
    ) -> RemoteCall[list[ResultT]]: ...
    @overload
    def call_shards(
        self, method: Callable[[WorkerT, ArgumentT], ResultT], shards: Sequence[ArgumentT]
    ) -> RemoteCall[list[ResultT]]: ...
    def call_shards(self, method: Callable[[Any, Any], Any], shards: Sequence[Any]) -> RemoteCall[list[Any]]:
        """Calls every rank of data index d with `shards[d]`, which is put in the object store once.

        The result is a list by data index, from tensor rank 0 of the last pipeline stage.

        Raises:
            ValueError: there is not one shard per data-parallel rank.
        """
        layout = self._workers
        self._check_length(method.__name__, shards, layout.data, "data-parallel ranks")
        refs = [ray.put(shard) for shard in shards]
        arguments = [(refs[layout.coordinates(rank).data],) for rank in range(self.world_size)]
        answering = [layout.rank(0, index, layout.pipeline - 1) for index in range(layout.data)]
        return self._call(method.__name__, arguments, answering)

    def _check_length(self, name: str, arguments: Sequence[object], length: int, receivers: str) -> None:
        if len(arguments) != length:
            raise ValueError(
                f"{self.role}.{name}: needs a list with one entry for each of {length} {receivers}, "
                f"got {len(arguments)} entries"
            )

    def _call(
        self,
        name: str,
        arguments: Sequence[tuple[Any, ...]],
        answering: list[int],
        keywords: Mapping[str, Any] | None = None,
    ) -> RemoteCall[list[Any]]:
        """Calls method `name` on rank r with `arguments[r]` and returns the answers of the ranks in `answering`."""
        if name not in self._deadlines:
            raise AttributeError(f"{self.role} has no method {name!r}; its workers register {sorted(self._deadlines)}")
        self._build()
        refs = [
            actor.call.remote(name, rank in answering, *arguments[rank], **(keywords or {}))
            for rank, actor in enumerate(self._actors)
        ]
        return RemoteCall(
            self._context(name), refs, lambda answers: [answers[rank] for rank in answering], self._deadlines[name]
        )

    @property
    def platform(self) -> str:
        """Name of the platform its devices are on."""
        return self._resources.platform_name

    @property
    def nodes(self) -> set[int]:
        """Indices of the nodes its workers run on."""
        return {slot.node for slot in self._slots}

    @functools.cached_property
    def ranks(self) -> list[WorkerRank]:
        """What each rank knows about itself; the first use waits for the processes."""
        timeout_s = self._pipeline_config.start_timeout_s
        started = [actor.process_id.remote() for actor in self._actors]
        processes: list[int] = RemoteCall(self._context("start"), started, list, timeout_s).get()
        driver_node = ray.get_runtime_context().get_node_id()
        local = [self._resources.nodes[slot.node].node_id == driver_node for slot in self._slots]
        self._processes = [psutil.Process(process) for process, near in zip(processes, local, strict=True) if near]
        held = RemoteCall(self._context("hold_port", 0), [self._actors[0].hold_port.remote()], list, timeout_s)
        port: int = held.get()[0]
        nodes = self._resources.nodes
        return [
            WorkerRank(
                role=self.role,
                rank=rank,
                world_size=self.world_size,
                coordinates=self._workers.coordinates(rank),
                device=0,
                devices=slot.devices,
                node=slot.node,
                address=nodes[slot.node].address,
                master_address=nodes[self._slots[0].node].address,
                master_port=port,
                cores=self._resources.cores(slot),
                threads=self._resources.threads(slot),
                platform=self._resources.platform_name,
            )
            for rank, slot in enumerate(self._slots)
        ]

    def _build(self) -> None:
        """Makes the workers once, before the first call."""
        if self._built:
            return
        refs = [
            actor.build.remote(self._worker_cls, rank.environment(), rank, self.config, self._pipeline_config)
            for actor, rank in zip(self._actors, self.ranks, strict=True)
        ]
        RemoteCall(self._context("build"), refs, list, self._pipeline_config.start_timeout_s).get()
        self._built = True

    def _context(self, method: str, *ranks: int) -> CallContext:
        """Context of a call on these ranks, or on all ranks where none is given."""
        return CallContext(self.role, method, {rank: self._location(rank) for rank in ranks or range(self.world_size)})

    def _location(self, rank: int) -> str:
        slot = self._slots[rank]
        return f"node {slot.node}, devices {spans(sorted(slot.devices))}, log {self._logs[rank]}"

    def client(self) -> ClusterClient[WorkerT]:
        """A picklable client with which other processes call single ranks."""
        self._build()
        locations = tuple(self._location(rank) for rank in range(self.world_size))
        return ClusterClient(self.role, tuple(self._actors), locations, self._deadlines)

    def shutdown(self) -> None:
        """Closes the workers, ends their processes and child processes, and waits until they are gone."""
        if self._ended:
            return
        self._ended = True
        children = [child for process in self._processes for child in descendants(process)]
        closing = [actor.call.remote("close", False) for actor in self._actors] if self._built else []
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        for actor in self._actors:
            ray.kill(actor)
        end(children)


@dataclass(frozen=True)
class ClusterClient(Generic[WorkerT]):
    """Calls single ranks of a concurrent cluster from any process; `Cluster.client` makes it. For one event loop.

    Attributes:
        role: name of the cluster.
        actors: handle of each rank.
        locations: where each rank runs, for messages.
        deadlines: seconds by the method's name.
    """

    role: str
    actors: tuple[Any, ...]
    locations: tuple[str, ...]
    deadlines: Mapping[str, float]
    _clients: dict[int, RpcClient] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without calls in progress."""
        return ClusterClient, (self.role, self.actors, self.locations, self.deadlines)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.actors)

    async def call(self, rank: int, method: Callable[[WorkerT, *Args], Awaitable[ResultT]], *args: *Args) -> ResultT:
        """The answer of one rank. Concurrent calls are batched, see `roll.distributed.rpc_batching`.

        Raises:
            ClusterError: the rank raised, died, or did not answer in time.
        """
        name = method.__name__
        context = CallContext(self.role, name, {rank: self.locations[rank]})
        timeout_s = seconds_left(self.deadlines[name])
        if rank not in self._clients:
            self._clients[rank] = rpc_client(self.actors[rank])
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._clients[rank].call(name, *args)
        except TimeoutError:
            raise context.timed_out([rank], timeout_s) from None
        except ray.exceptions.RayError as error:
            answer = ray_failure(rank, error)
        if isinstance(answer, Failure):
            raise context.failed([answer])
        result: ResultT = answer
        return result
