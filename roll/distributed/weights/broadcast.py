"""Weights by broadcast: for engines on other nodes or other GPUs."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from roll.distributed.calls.remote_call import ALL
from roll.distributed.calls.remote_errors import ClusterError
from roll.distributed.infer.infer_worker import DOWN, InferWorker
from roll.distributed.process_groups import BroadcastGroup
from roll.distributed.train.train_worker import TrainWorker
from roll.distributed.weights.report import Transfer
from roll.distributed.weights.transport import Transport, on_cpu, register_transport, shares_devices, total

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster


@register_transport("broadcast")
class BroadcastTransport(Transport):
    """One broadcast group per pipeline stage: its source rank and every rank of every engine.

    The backend is NCCL between different GPUs. Two ranks on one GPU cannot be in one group of NCCL, so where the
    clusters share GPUs of several nodes it is gloo, as on CPUs; it copies GPU tensors through host memory.
    """

    _numbers = itertools.count()

    def __init__(
        self, train: Cluster[TrainWorker], infer: Cluster[InferWorker], timeout_s: float, bucket_bytes: int
    ) -> None:
        super().__init__(train, infer, timeout_s, bucket_bytes)
        self._groups: list[BroadcastGroup] = []
        self._members: list[int] = []

    async def connect(self) -> None:
        """Joins the groups, stage by stage in the same order on all engines; leaves groups of other engines."""
        if self._groups and self._members == self.engines:
            return
        if self._groups:
            await self.disconnect()
        self._members = self.engines
        world_size = 1 + len(self._members) * self._infer.layout.tensor
        backend = "gloo" if on_cpu(self._train) or shares_devices(self._train, self._infer) else "nccl"
        number = next(self._numbers)
        held = await self._train.call(ALL, TrainWorker.hold_broadcast_port)
        ports = [port for port in held if port is not None]
        self._groups = [
            BroadcastGroup(f"weights-{number}-stage-{source.stage}", source.address, port, world_size, backend)
            for source, port in zip(self.sources, ports, strict=True)
        ]
        await asyncio.gather(
            self._train.call(ALL, TrainWorker.join_broadcast_group, self._groups, self._timeout_s),
            *(
                self._infer.call([engine], InferWorker.join_broadcast_groups, self._groups, position)
                for position, engine in enumerate(self._members)
            ),
        )

    async def transfer(self, checksums: bool) -> Transfer:
        """Source ranks and engines process the same buckets in the same order."""
        buckets = self.buckets()
        ranks = self.checksum_ranks(checksums)
        sent, _ = await asyncio.gather(
            self._train.call(ALL, TrainWorker.broadcast_weights, buckets, ranks),
            self._infer.call(self._members, InferWorker.receive_broadcast, self._groups, buckets),
        )
        return total([result for result in sent if result is not None])

    async def disconnect(self) -> None:
        """Leaves the groups, source ranks first, which frees engines that wait for them; engines leave in any case."""
        groups, self._groups = self._groups, []
        try:
            await self._train.call(ALL, TrainWorker.leave_broadcast_group)
        finally:
            left = await asyncio.gather(
                *(self._leave(engine, groups) for engine in self._members), return_exceptions=True
            )
        for error in left:
            if error is not None:
                raise error

    async def _leave(self, engine: int, groups: list[BroadcastGroup]) -> None:
        try:
            await self._infer.call([engine], InferWorker.leave_broadcast_groups, groups)
        except ClusterError as error:
            if error.kind not in DOWN:
                raise
