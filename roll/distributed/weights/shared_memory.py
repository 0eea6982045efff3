"""Weights through memory that training ranks and engines of one node share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from roll.distributed.calls.remote_call import ALL
from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.train.train_worker import TrainWorker
from roll.distributed.train.weight_sender import SendResult
from roll.distributed.weights.plan import handle_sources
from roll.distributed.weights.report import Transfer
from roll.distributed.weights.transport import Transport, register_transport, total

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster


@register_transport("shared_memory")
class SharedMemoryTransport(Transport):
    """Both clusters on one node: engines open the memory into which training ranks write buckets."""

    def __init__(
        self, train: Cluster[TrainWorker], infer: Cluster[InferWorker], timeout_s: float, bucket_bytes: int
    ) -> None:
        super().__init__(train, infer, timeout_s, bucket_bytes)
        self._connected = train.platform != "cpu"  # GPU buckets are new memory in every update
        devices = train.config.device_mapping, infer.config.device_mapping
        self.handle_sources = handle_sources(train.layout, *devices, train.platform)
        self._loading: asyncio.Future[None] | None = None

    async def connect(self) -> None:
        """On a CPU, opens the same memory on all ranks of a stage."""
        if self._connected:
            return
        plans = zip(self.buckets(whole=True), self.buckets(whole=False), strict=True)
        largest = [max(bucket.bytes for bucket in [*whole, *changed]) for whole, changed in plans]
        created = await self._train.call(ALL, TrainWorker.create_shm, largest)
        addresses = [address for address in created if address is not None]
        await self._train.call(ALL, TrainWorker.open_shm, addresses)
        self._connected = True

    async def transfer(self, checksums: bool) -> Transfer:
        """Engines load one bucket while training ranks write the next."""
        buckets, ranks = self.buckets(), self.checksum_ranks(checksums)
        sent: list[SendResult] = []
        found: dict[str, str] = {}
        for index in range(max(map(len, buckets))):
            filled = await self._train.call(ALL, TrainWorker.fill_bucket, buckets, index, self.handle_sources)
            results = [result for result in filled if result is not None]
            if checksums:
                for stage in await self._train.call(ALL, TrainWorker.checksum_bucket, buckets, index, ranks):
                    found |= stage or {}
            await self._loaded()
            self._loading = asyncio.ensure_future(self._load(results))
            sent += results
        await self._loaded()
        await self._train.call(ALL, TrainWorker.release_buckets)
        return Transfer(total(sent).bytes, found)

    async def disconnect(self) -> None:
        """Ends the update on every training rank, once no engine reads what the next attempt overwrites."""
        with contextlib.suppress(Exception):  # it is already among the causes
            await self._loaded()
        await self._train.call(ALL, TrainWorker.release_buckets)

    async def _loaded(self) -> None:
        loading, self._loading = self._loading, None
        if loading is not None:
            await loading

    async def _load(self, results: Sequence[SendResult]) -> None:
        size = self._infer.layout.tensor
        by_rank: list[list[bytes]] = [[] for _ in range(self._infer.world_size * size)]
        for result in results:
            for rank, handle in result.handles.items():
                by_rank[rank].append(handle)
        for stage in zip(*by_rank, strict=True):  # every engine rank has one handle for each stage that sends this time
            handles = [stage[engine * size : (engine + 1) * size] for engine in range(self._infer.world_size)]
            await self._infer.call(self.engines, InferWorker.receive_shared, handles)
