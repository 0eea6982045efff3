"""Publishing from the driver: which ranks send to which engines, by which way, inside one transaction."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from roll.distributed.weight_sync.groups import WeightsGroup
from roll.distributed.weight_sync.plan import Bucket, check_stages, differences, make_buckets, spec_bytes
from roll.distributed.weight_sync.sender import Sent, SourceInfo
from roll.distributed.weight_sync.stage_tensors import Fault
from roll.distributed.weight_sync.transaction import PublishReport, Transaction, Transfer, VerificationError

if TYPE_CHECKING:
    from roll.configs.pipeline import RLConfig
    from roll.distributed.cluster import Cluster

SHOWN_DIFFERENCES = 5
"""Tensors named in the message of a failed verification."""
MEGABYTE = 1 << 20


class WeightPublisher:
    """Publishes the weights of a training cluster to the engines of an inference cluster.

    Within one node buckets are shared in memory: always on CPU, and by CUDA IPC where both own the same GPUs. Otherwise
    each pipeline stage broadcasts to all engines in a group of its own (NCCL or gloo).
    """

    def __init__(
        self, train: Cluster, infer: Cluster, config: RLConfig, way: type[ClusterTransport] | None = None
    ) -> None:
        """Joins nothing yet; the `way` is chosen by the device mappings where none is given."""
        self._config = config
        self._transport = (way or choose_way(train, infer))(train, infer, config)
        self._transaction = Transaction(
            self._transport, config.sync_timeout_s, config.max_sync_retries, config.sync_retry_delay_s
        )
        self._verified = False

    async def setup(self) -> None:
        """Learns what every stage publishes, checks it, and joins the groups.

        Raises:
            PlanError: a tensor is published twice.
            ClusterError: a group does not form.
        """
        await self._transport.setup()
        await self._transport.connect()

    async def publish(self, version: int, fault: Fault | None = None) -> PublishReport:
        """Brings the weights of `version` to all engines; verified on the first success, and as `verify_weights` says.

        Args:
            version: integer that tokens sampled from then on carry.
            fault: damage done on purpose, in tests.

        Raises:
            PublishError: no attempt succeeded; the engines serve nothing.
        """
        self._transport.fault = fault
        verify = not self._verified or self._config.verify_weights == "always"
        report = await self._transaction.run(version, verify)
        self._verified = True
        return report


def choose_way(train: Cluster, infer: Cluster) -> type[ClusterTransport]:
    """Shared memory where both own the same GPUs of one node, or any CPU slots of one; else broadcast.

    Raises:
        ValueError: GPUs are shared over several nodes, where neither memory nor NCCL can be.
    """
    one_node = len(train.nodes | infer.nodes) == 1
    colocated = train.config.device_mapping == infer.config.device_mapping
    if one_node and (colocated or train.platform == "cpu"):
        return SharedTransport
    if colocated and train.platform != "cpu":
        raise ValueError(
            f"{train.role} and {infer.role} share GPUs on {len(train.nodes)} nodes; weights can be shared within one "
            "node only: give them disjoint device_mapping, or one node"
        )
    return BroadcastTransport


class ClusterTransport:
    """What both ways share: the engines' side of the transaction."""

    def __init__(self, train: Cluster, infer: Cluster, config: RLConfig) -> None:
        """Takes the two clusters."""
        self._train, self._infer, self._config = train, infer, config
        self._sources: list[SourceInfo] = []
        self.fault: Fault | None = None

    async def setup(self) -> None:
        """Asks every rank what it publishes, and checks it."""
        answers = await self._train.prepare_publishing()
        self._sources = sorted((a for a in answers if a is not None), key=lambda source: source.stage)
        check_stages([source.specs for source in self._sources])

    def buckets(self) -> list[list[Bucket]]:
        """Buckets of each stage."""
        size = self._config.model_update_buffer_size_mb * MEGABYTE
        dropped = self.fault.name if self.fault is not None and self.fault.kind == "drop" else None
        return [make_buckets([spec for spec in source.specs if spec.name != dropped], size) for source in self._sources]

    def _digest_ranks(self, digest: bool) -> int:
        return self._infer.layout.tensor if digest else 0

    async def pause(self) -> None:
        """Stops generation; what becomes of running requests is the run's `in_flight_policy`."""
        await self._infer.pause(self._config.in_flight_policy)

    async def begin(self, version: int) -> None:
        """Opens the update on every engine."""
        await self._infer.begin_update(version)

    async def end(self, version: int) -> None:
        """Closes it and names the version."""
        await self._infer.end_update(version)

    async def flush(self) -> None:
        """Empties the prefix caches; in place they are in use, and kept apart by version instead."""
        if self._config.in_flight_policy != "in_place":
            await self._infer.flush_cache()

    async def accept(self) -> None:
        """Declares the engines whole."""
        await self._infer.accept_update()

    async def give_up(self) -> None:
        """Engines refuse what waits for the weights."""
        await self._infer.give_up_update()

    async def resume(self) -> None:
        """Lets generation go on."""
        await self._infer.resume()

    async def verify(self, checksums: dict[str, str]) -> None:
        """Compares names and checksums of every engine with what was sent."""
        for engine, found in enumerate(await self._infer.checksums()):
            wrong = differences(checksums, found)
            if wrong:
                more = f"; and {len(wrong) - SHOWN_DIFFERENCES} more" if len(wrong) > SHOWN_DIFFERENCES else ""
                raise VerificationError(f"engine {engine}: {'; '.join(wrong[:SHOWN_DIFFERENCES])}{more}")

    async def transfer(self, digest: bool) -> Transfer:
        """Moves every tensor."""
        raise NotImplementedError

    async def connect(self) -> None:
        """Prepares the way."""
        raise NotImplementedError

    async def abandon(self) -> None:
        """Frees whoever waits."""
        raise NotImplementedError


class BroadcastTransport(ClusterTransport):
    """One broadcast group per pipeline stage: its source, and every rank of every engine."""

    _numbers = itertools.count()

    def __init__(self, train: Cluster, infer: Cluster, config: RLConfig) -> None:
        """Takes the two clusters."""
        super().__init__(train, infer, config)
        self._groups: list[WeightsGroup] = []

    async def connect(self) -> None:
        """Joins the groups, stage by stage in the same order everywhere."""
        if self._groups:
            return
        world_size = 1 + self._infer.world_size * self._infer.layout.tensor
        backend = "nccl" if self._train.platform == "cuda" else "gloo"
        number = next(self._numbers)
        ports = await self._train.hold_weights_port()
        self._groups = [
            WeightsGroup(f"weights-{number}-stage-{source.stage}", source.address, port, world_size, backend)
            for source, port in zip(self._sources, [port for port in ports if port is not None], strict=True)
        ]
        await asyncio.gather(
            self._train.join_weights_groups(self._groups, self._config.sync_timeout_s),
            self._infer.join_weights_groups(self._groups),
        )

    async def transfer(self, digest: bool) -> Transfer:
        """Sources and engines walk through the same buckets; the driver only waits."""
        buckets = self.buckets()
        sending = self._train.broadcast_weights(buckets, self._digest_ranks(digest), self.fault)
        receiving = self._infer.receive_broadcast(self._groups, buckets)
        sent, _ = await asyncio.gather(sending, receiving)
        return _total(sent)

    async def abandon(self) -> None:
        """Leaves the groups, sources first, which frees engines that wait for them."""
        await self._train.leave_weights_groups()
        groups, self._groups = self._groups, []
        await self._infer.leave_weights_groups(groups)


class SharedTransport(ClusterTransport):
    """Both clusters on one node: engines open the memory that sources share."""

    _reserved = False
    _loading: asyncio.Future[None] | None = None

    async def connect(self) -> None:
        """On a CPU, gives all ranks of a stage the same memory to write to."""
        if self._reserved or self._train.platform != "cpu":
            return
        size = self._config.model_update_buffer_size_mb * MEGABYTE
        largest = [
            min(sum(sizes), max(size, *sizes))
            for sizes in ([spec_bytes(spec) for spec in source.specs] for source in self._sources)
        ]
        handles = await self._train.reserve_shared_weights(largest)
        await self._train.attach_shared_weights([handle for handle in handles if handle is not None])
        self._reserved = True

    async def transfer(self, digest: bool) -> Transfer:
        """Engines load one bucket while training ranks write the next."""
        buckets = self.buckets()
        receivers = self._infer.world_size * self._infer.layout.tensor
        sent: list[Sent] = []
        checksums: dict[str, str] = {}
        for index in range(max(map(len, buckets))):
            answers = await self._train.fill_shared_weights(buckets, index, receivers, self.fault)
            offered = [answer for answer in answers if answer is not None]
            if digest or self.fault is not None:
                ranks = self._digest_ranks(digest)
                for found in await self._train.inspect_shared_weights(buckets, index, ranks, self.fault):
                    checksums |= found or {}
            await self._loaded()
            self._loading = asyncio.ensure_future(self._load(offered))
            sent += offered
        await self._loaded()
        await self._train.release_shared_weights()
        return Transfer(_total(sent).bytes, checksums)

    async def abandon(self) -> None:
        """Ends the publish on every training rank, once no engine reads what the next attempt will overwrite."""
        with contextlib.suppress(Exception):  # it is among the causes, or came after them
            await self._loaded()
        await self._train.release_shared_weights()

    async def _loaded(self) -> None:
        """Waits until the engines have loaded what they were offered last."""
        loading, self._loading = self._loading, None
        if loading is not None:
            await loading

    async def _load(self, offered: list[Sent]) -> None:
        ranks = self._infer.layout.tensor
        for bucket in offered:
            starts = range(0, len(bucket.handles), ranks)
            await self._infer.receive_shared([list(bucket.handles[start : start + ranks]) for start in starts])


def _total(sent: Sequence[Sent | None]) -> Transfer:
    """Bytes and checksums of all sources together."""
    parts = [part for part in sent if part is not None]
    return Transfer(
        sum(p.num_bytes for p in parts), {name: value for p in parts for name, value in p.checksums.items()}
    )
