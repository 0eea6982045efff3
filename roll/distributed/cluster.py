"""All workers of one role as one object: a call on it reaches every rank."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray

from roll.configs.parallel_layout import ParallelLayout, spans
from roll.distributed.actors import ConcurrentHost, Host
from roll.distributed.client import ClusterClient
from roll.distributed.dispatch import Registration, answering_ranks, arguments_by_rank, collect_answers, registrations
from roll.distributed.pending import CallSite, Pending
from roll.distributed.placement import Seat
from roll.distributed.worker import Worker, WorkerRank

if TYPE_CHECKING:
    from roll.configs.pipeline import BaseConfig
    from roll.configs.roles import RoleConfig
    from roll.distributed.resources import ResourceManager

CONCURRENT_CALLS = 1000
"""Calls of a cluster and letters that one concurrent worker holds at a time; its engine does its own queueing."""
CLOSE_TIMEOUT_S = 20.0
"""Time a worker has to end its engine before it is killed."""
END_TIMEOUT_S = 5.0
"""A killed process is gone within milliseconds; an engine's children notice within seconds."""


class Cluster:
    """Workers of one role on the devices of its `device_mapping`.

    Every method of `worker_cls` marked with `register` is a method here. It returns a `Pending` at once: `await` it
    or `.get()` it. Calls of one cluster reach each rank in the order they were made.

    Attributes:
        role: name of the cluster.
        config: the role's section of the configuration.
        layout: sizes of its parallel dimensions.
        world_size: workers; an engine that spans the tensor-parallel devices is one.
    """

    def __init__(
        self,
        role: str,
        worker_cls: type[Worker],
        config: RoleConfig,
        pipeline_config: BaseConfig,
        resources: ResourceManager,
        layout: ParallelLayout,
    ) -> None:
        """Starts the processes without waiting, so that clusters come up side by side; the first call waits for them.

        Raises:
            ValueError: the devices do not divide among the layout's ranks.
        """
        self.role, self.config, self.layout = role, config, layout
        self._workers = ParallelLayout(data=layout.data) if worker_cls.spans_tensor_parallel else layout
        self.world_size = self._workers.world_size
        self._worker_cls, self._pipeline_config, self._resources = worker_cls, pipeline_config, resources
        self._seats = resources.seats(role, self.world_size)
        self._logs = [log_file(pipeline_config, f"{role}-{rank}") for rank in range(self.world_size)]
        self._actors = [self._start(rank, seat) for rank, seat in enumerate(self._seats)]
        self._processes: list[psutil.Process] = []
        self._built = self._ended = False
        self._bind()

    def _start(self, rank: int, seat: Seat) -> Any:
        cores, threads = self._resources.cores(seat), self._resources.threads(seat)
        host = ConcurrentHost if self._worker_cls.concurrent else Host
        environment = {**process_environment(self._pipeline_config, threads), **self.config.system_envs}
        if self._resources.platform_name == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = self._resources.visible_devices(seat)
        if len(self._resources.nodes) == 1:
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return (
            ray.remote(host)
            .options(
                num_cpus=0,
                max_concurrency=CONCURRENT_CALLS if self._worker_cls.concurrent else 1,
                scheduling_strategy=self._resources.scheduling(seat),
                runtime_env={"env_vars": environment},
            )
            .remote(f"{self.role}-{rank}", rank, cores, self._logs[rank])
        )

    @property
    def platform(self) -> str:
        """Name of the platform its devices are on."""
        return self._resources.platform_name

    @property
    def nodes(self) -> set[int]:
        """Indices of the nodes its workers run on."""
        return {seat.node for seat in self._seats}

    @functools.cached_property
    def ranks(self) -> list[WorkerRank]:
        """What each rank knows about itself; the first use waits for the processes."""
        timeout_s = self._pipeline_config.start_timeout_s
        started = [actor.process.remote() for actor in self._actors]
        processes = Pending(self._site("start"), started, list, timeout_s).get()
        here = ray.get_runtime_context().get_node_id()
        local = [self._resources.nodes[seat.node].node_id == here for seat in self._seats]
        self._processes = [psutil.Process(process) for process, near in zip(processes, local, strict=True) if near]
        port = Pending(self._site("hold_port", 0), [self._actors[0].hold_port.remote()], list, timeout_s).get()[0]
        nodes = self._resources.nodes
        return [
            WorkerRank(
                role=self.role,
                rank=rank,
                world_size=self.world_size,
                coordinates=self._workers.coordinates(rank),
                device=0,
                devices=seat.devices,
                node=seat.node,
                address=nodes[seat.node].address,
                master_address=nodes[self._seats[0].node].address,
                master_port=port,
                cores=self._resources.cores(seat),
                threads=self._resources.threads(seat),
                platform=self._resources.platform_name,
            )
            for rank, seat in enumerate(self._seats)
        ]

    def _bind(self) -> None:
        for name, registration in registrations(self._worker_cls).items():
            setattr(self, name, functools.partial(self._call, name, registration))

    def __getattr__(self, name: str) -> Callable[..., Pending]:
        """Explains a method that no worker has registered."""
        known = sorted(registrations(self.__dict__.get("_worker_cls", Worker)))
        role = self.__dict__.get("role", "cluster")
        raise AttributeError(f"{role} has no method {name!r}; its workers register {known}")

    def _call(self, name: str, registration: Registration, *args: Any, **kwargs: Any) -> Pending:
        self._build()
        wanted = answering_ranks(registration.collect, self._workers)
        parts = arguments_by_rank(registration.dispatch, self._workers, f"{self.role}.{name}", args, kwargs)
        refs = [
            actor.call.remote(name, rank in wanted, *part, **named)
            for rank, (actor, (part, named)) in enumerate(zip(self._actors, parts, strict=True))
        ]
        collect = functools.partial(collect_answers, registration.collect, wanted)
        return Pending(self._site(name), refs, collect, getattr(self._pipeline_config, registration.deadline))

    def _build(self) -> None:
        """Makes the workers once, before the first call."""
        if self._built:
            return
        refs = [
            actor.build.remote(self._worker_cls, rank.environment(), rank, self.config, self._pipeline_config)
            for actor, rank in zip(self._actors, self.ranks, strict=True)
        ]
        Pending(self._site("build"), refs, list, self._pipeline_config.start_timeout_s).get()
        self._built = True

    def _site(self, method: str, *ranks: int) -> CallSite:
        """Where `method` runs: on these ranks, or on all when none are named."""
        return CallSite(self.role, method, {rank: self._place(rank) for rank in ranks or range(self.world_size)})

    def _place(self, rank: int) -> str:
        seat = self._seats[rank]
        return f"node {seat.node}, devices {spans(sorted(seat.devices))}, log {self._logs[rank]}"

    def client(self) -> ClusterClient:
        """What other processes need to call single ranks; it can be sent to them."""
        self._build()
        config = self._pipeline_config
        return ClusterClient(
            self.role,
            tuple(self._actors),
            tuple(self._place(rank) for rank in range(self.world_size)),
            {name: getattr(config, mark.deadline) for name, mark in registrations(self._worker_cls).items()},
        )

    def dump_stacks(self) -> None:
        """Asks every process on this machine to write the stack of each of its threads to its log."""
        for process in self._processes:
            if process.is_running():
                process.send_signal(signal.SIGUSR1)

    def shutdown(self) -> None:
        """Closes the workers, ends their processes and the processes these started, and waits until they are gone."""
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


def process_environment(config: BaseConfig, threads: int) -> dict[str, str]:
    """Variables of every process of a run that computes with `threads` threads."""
    return {**thread_environment(threads), **config.system_envs}


def thread_environment(threads: int) -> dict[str, str]:
    """Variables of a process that computes with `threads` threads and imports what the driver can."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


def log_file(config: BaseConfig, name: str) -> str:
    """Where a process of this name writes what it prints."""
    folder = Path(config.logging_dir or Path(config.output_dir) / "logs").absolute()
    return str(folder / f"{name}.log")


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """The process and all it started."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end(processes: list[psutil.Process]) -> None:
    """Waits for processes that are ending, and kills those that do not."""
    _, alive = psutil.wait_procs(processes, timeout=END_TIMEOUT_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=END_TIMEOUT_S)
