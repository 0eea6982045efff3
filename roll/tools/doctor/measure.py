"""Measures every device and link: the worker on each device, and the order of the measurements."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from roll.base.errors import RunError
from roll.configs.arguments import TORCH_DTYPES
from roll.configs.devices.parallel_layout import ParallelLayout
from roll.configs.pipeline import BaseConfig
from roll.configs.roles import RoleConfig
from roll.distributed.calls.remote_call import ALL
from roll.distributed.calls.remote_errors import ClusterError, deadline_scope
from roll.distributed.cluster import Cluster
from roll.distributed.process_groups import join_all_ranks
from roll.distributed.ray_session import RayStartError, start_ray, stop_ray
from roll.distributed.resources import ResourceError, ResourceManager
from roll.distributed.worker import Worker, register
from roll.platforms import get_platform
from roll.tools.doctor.comparison import Pair, RankSpeeds, better_of, rounds_across_nodes, rounds_in_nodes, slow_speeds

MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}
"""Rows and columns; large enough that a device is busy."""
COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Larger than the caches."""
TRANSFER_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
"""Large enough that the bandwidth counts and not the latency."""
WARM_UP_REPEATS, REPEATS = 2, 10
"""Repeats of one measurement that are not counted, and the fewest that are."""
MEASUREMENT_TIMEOUT_S = 120.0
"""Longest time of one measurement beyond the seconds that were asked for; a link that takes longer is broken."""


class SpeedWorker(Worker):
    """Measures one device, and its links to other ranks."""

    @register(deadline="start_timeout_s")
    def initialize(self) -> None:
        """Joins the group of all ranks, and fills the tensors of the measurements."""
        own, platform = self.rank, get_platform(self.rank.platform)
        platform.setup_process(own.cores, own.threads)
        timeout_s = self.pipeline_config.start_timeout_s
        join_all_ranks(platform, own.rank, own.world_size, timeout_s, timeout_s)
        self._device = platform.torch_device(0)
        dtype = getattr(torch, TORCH_DTYPES[self.config.model_args.dtype])
        size = MATRIX_SIZE[own.platform]
        self._matrix = torch.randn(size, size, device=self._device).to(dtype)
        self._product = torch.empty_like(self._matrix)
        self._sent, self._received = (self._bytes(TRANSFER_BYTES[own.platform]) for _ in range(2))

    @register()
    def matmul(self, seconds: float) -> float:
        """TFLOP/s of a matrix product."""
        return 2 * len(self._matrix) ** 3 / self._median_s(self.multiply, seconds) / 1e12

    @register()
    def copy(self, seconds: float) -> float:
        """Bytes read and written per second, in GB/s, by copies within the memory of the device."""
        source, target = (self._bytes(COPY_BYTES[self.rank.platform]) for _ in range(2))
        return 2 * source.nbytes / self._median_s(lambda: target.copy_(source), seconds) / 1e9

    @register()
    def host_to_device(self, seconds: float) -> float:
        """Bandwidth from pinned memory of the host; 0 where the device is the host."""
        if self._device.type == "cpu":
            return 0.0
        target = self._bytes(COPY_BYTES[self.rank.platform])
        source = torch.ones_like(target, device="cpu").pin_memory()
        return source.nbytes / self._median_s(lambda: target.copy_(source), seconds) / 1e9

    @register()
    def all_reduce(self) -> float:
        """Bus bandwidth over all ranks: what each rank sends per second in a ring."""
        sent = 2 * (self.rank.world_size - 1) / self.rank.world_size * self._sent.nbytes
        return sent / self._median_s(lambda: dist.all_reduce(self._sent)) / 1e9

    @register()
    def exchange(self, partners: Sequence[int | None]) -> float:
        """Bandwidth in each direction while this rank and `partners[rank]` send to each other; 0 without a partner."""
        partner = partners[self.rank.rank]
        if partner is None:
            return 0.0

        def send_and_receive() -> None:
            calls = [dist.P2POp(dist.isend, self._sent, partner), dist.P2POp(dist.irecv, self._received, partner)]
            for work in dist.batch_isend_irecv(calls):
                work.wait()

        return self._sent.nbytes / self._median_s(send_and_receive) / 1e9

    def multiply(self) -> None:
        torch.mm(self._matrix, self._matrix, out=self._product)

    def _bytes(self, count: int) -> torch.Tensor:
        """Ones, because the pages of zeros that nothing has written are all the same page."""
        return torch.ones(count, dtype=torch.uint8, device=self._device)

    def _median_s(self, operation: Callable[[], object], seconds: float = 0.0) -> float:
        """Median time of an operation, without warm-up; what several ranks do together is repeated equally often."""
        times: list[float] = []
        end = time.monotonic() + seconds
        while len(times) < WARM_UP_REPEATS + REPEATS or time.monotonic() < end:
            start = time.perf_counter()
            operation()
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return median(times[WARM_UP_REPEATS:])


def measure(config: BaseConfig, seconds: float, slower_than: float) -> tuple[list[RankSpeeds], float]:
    """Measures every device that a role of the run owns, all at the same time; once more if one seems slow.

    Matrix products have the dtype of actor_train on every device, so that they can be compared.

    Returns:
        Speeds by rank, and the bus bandwidth of an all-reduce over all ranks in GB/s (0 for one rank).

    Raises:
        RunError: Ray or a process did not start, or a measurement failed or did not end.
    """
    devices = sorted({device for role in config.device_roles().values() for device in role.device_mapping})
    trained, platform = config.actor_train, get_platform(config.platform)
    role = RoleConfig(trained.model_args, device_mapping=devices, system_envs=trained.system_envs)
    per_node = config.num_devices_per_node or platform.device_count()
    try:
        with contextlib.ExitStack() as ends:
            start_ray(config, platform.name, per_node)
            ends.callback(stop_ray)
            resources = ResourceManager(platform.name, per_node, {"doctor": devices})
            ends.callback(resources.release)
            cluster = Cluster("doctor", SpeedWorker, role, config, resources, ParallelLayout(data=len(devices)))
            ends.callback(cluster.shutdown)
            cluster.initialize().get()
            ranks, all_reduce = _measure(cluster, seconds)
            if slow_speeds(ranks, slower_than):
                again, once_more = _measure(cluster, seconds)
                ranks, all_reduce = better_of(ranks, again), max(all_reduce, once_more)
            return ranks, all_reduce
    except (RayStartError, ResourceError, ClusterError) as error:
        raise RunError(str(error)) from error


def _measure(cluster: Cluster[SpeedWorker], seconds: float) -> tuple[list[RankSpeeds], float]:
    """Every measurement starts on all ranks at the same time, so a slow rank does not shift those of others."""
    found: dict[str, list[float]] = {}
    for method in (SpeedWorker.matmul, SpeedWorker.copy, SpeedWorker.host_to_device):
        with deadline_scope(time.monotonic() + MEASUREMENT_TIMEOUT_S + seconds):
            found[method.__name__] = cluster.call(ALL, method, seconds).get()
    with deadline_scope(time.monotonic() + MEASUREMENT_TIMEOUT_S):
        bandwidth = min(cluster.call(ALL, SpeedWorker.all_reduce).get())
    nodes = [rank.node for rank in cluster.ranks]
    found["in_node"] = _best_exchanges(cluster, rounds_in_nodes(nodes))
    found["across_nodes"] = _best_exchanges(cluster, rounds_across_nodes(nodes))
    rows = []
    for rank in cluster.ranks:
        speeds = {name: values[rank.rank] for name, values in found.items() if values[rank.rank] > 0}
        rows.append(RankSpeeds(rank.rank, rank.node, rank.address, rank.devices[0], speeds))
    return rows, bandwidth


def _best_exchanges(cluster: Cluster[SpeedWorker], rounds: Sequence[Sequence[Pair]]) -> list[float]:
    """Bandwidth of each rank with its better partner; 0 where it has none."""
    best = [0.0] * cluster.world_size
    for pairs in rounds:
        partner = {first: second for first, second in pairs} | {second: first for first, second in pairs}
        partners = [partner.get(rank) for rank in range(cluster.world_size)]
        with deadline_scope(time.monotonic() + MEASUREMENT_TIMEOUT_S):
            best = list(map(max, best, cluster.call(ALL, SpeedWorker.exchange, partners).get()))
    return best
