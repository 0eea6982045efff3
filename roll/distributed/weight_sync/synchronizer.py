"""Weight updates."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from roll.distributed.process_groups import WeightsGroup
from roll.distributed.remote_call import calls_end_by
from roll.distributed.weight_sync.plan import Bucket, check_stages, differences, make_buckets, spec_bytes
from roll.distributed.weight_sync.sender import Fault, Sent, SourceInfo

if TYPE_CHECKING:
    from roll.configs.pipeline import RLConfig
    from roll.distributed.cluster import Cluster

T = TypeVar("T")
logger = logging.getLogger(__name__)


class PublishError(RuntimeError):
    """The weights could not be published; once an update was opened, engines stay paused and serve nothing."""


class VerificationError(RuntimeError):
    """What an engine holds is not what was sent."""


@dataclass(frozen=True)
class Transfer:
    """What was moved: bytes, and the checksums of each tensor under the engine's name where they were asked for."""

    bytes: int
    checksums: dict[str, str]


@dataclass(frozen=True)
class PublishReport:
    """One publish.

    Attributes:
        version: of the weights.
        seconds: from the first pause to the last resume, retries included.
        pause_seconds: that engines stood still in the attempt that succeeded, from the end of their last step on.
        bytes: of weights sent, once for all engines.
        verified: whether names and checksums were compared.
        attempts: 1 when nothing failed.
    """

    version: int
    seconds: float
    pause_seconds: float
    bytes: int
    verified: bool
    attempts: int


GRACE_S = 1.0
"""What a step gets beyond the deadline of its calls, to say whom it waited for."""


class Transport(Protocol):
    """The steps of one publish, each for all engines."""

    async def connect(self) -> None:
        """Makes sure that sources and engines can reach each other; at once where they do already."""

    async def pause(self) -> None:
        """Stops generation."""

    async def begin(self, version: int) -> None:
        """Opens the update; engines are dirty from here on."""

    async def transfer(self, digest: bool) -> Transfer:
        """Moves every tensor; with `digest` takes the checksums of what is sent."""

    async def end(self, version: int) -> None:
        """Closes the update and names the version."""

    async def flush(self) -> None:
        """Forgets everything computed under older weights."""

    async def verify(self, checksums: dict[str, str]) -> None:
        """Compares with what the engines hold; raises VerificationError."""

    async def accept(self) -> None:
        """Declares the engines whole."""

    async def resume(self) -> None:
        """Lets generation go on."""

    async def abandon(self) -> None:
        """After a failure: frees whoever still waits for a peer; `connect` starts anew."""

    async def give_up(self) -> None:
        """After the last failure: refuses whoever waits for the weights."""


class Transaction:
    """Publishes through a transport with a deadline for each attempt and a bound on attempts.

    From `begin` to `accept` the state is dirty. Nothing leads from dirty to resumed but a complete attempt: after the
    last failed one the engines stay paused and refuse to serve.
    """

    def __init__(
        self,
        transport: Transport,
        timeout_s: float,
        retries: int,
        retry_delay_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Takes the bounds; `sleep` is replaced in tests."""
        self._transport = transport
        self._timeout_s, self._retries, self._delay_s = timeout_s, retries, retry_delay_s
        self._sleep = sleep
        self.dirty = False

    async def run(self, version: int, verify: bool) -> PublishReport:
        """One publish.

        Raises:
            PublishError: every attempt failed; the message names each cause.
        """
        start = time.perf_counter()
        causes: list[str] = []
        last: Exception | None = None
        for attempt in range(1, self._retries + 2):
            if attempt > 1:
                await self._sleep(self._delay_s)
            try:
                pause_seconds, sent = await self._attempt(version, verify)
                return PublishReport(version, time.perf_counter() - start, pause_seconds, sent.bytes, verify, attempt)
            except Exception as error:
                last = error
                causes.append(f"attempt {attempt}: {type(error).__name__}: {error}")
                logger.warning("publish of version %d failed, %s", version, causes[-1])
                await self._after_failure(self._transport.abandon(), "abandon", causes)
        await self._after_failure(self._transport.give_up(), "give up", causes)
        state = "the engines are paused and serve nothing" if self.dirty else "nothing was sent"
        raise PublishError(
            f"version {version} could not be published in {len(causes)} attempt(s) (max_sync_retries); {state}\n"
            + "\n".join(causes)
        ) from last

    async def _attempt(self, version: int, verify: bool) -> tuple[float, Transfer]:
        transport, until = self._transport, time.monotonic() + self._timeout_s
        await self._bounded(transport.connect(), "connect", until)
        await self._bounded(transport.pause(), "pause", until)
        self.dirty = True
        await self._bounded(transport.begin(version), "begin", until)
        paused = time.perf_counter()  # an engine answers once the step it was computing is done
        sent = await self._bounded(transport.transfer(verify), "transfer", until)
        await self._bounded(transport.end(version), "end", until)
        await self._bounded(transport.flush(), "flush", until)
        if verify:
            await self._bounded(transport.verify(sent.checksums), "verify", until)
        await self._bounded(transport.accept(), "accept", until)
        self.dirty = False
        await self._bounded(transport.resume(), "resume", until)
        return time.perf_counter() - paused, sent

    async def _after_failure(self, step: Awaitable[None], name: str, causes: list[str]) -> None:
        """Frees who waits; that this fails as well is one more cause, and the next attempt will tell."""
        try:
            await self._bounded(step, name, time.monotonic() + self._timeout_s)
        except Exception as error:
            causes[-1] += f"\nand then {name}: {type(error).__name__}: {error}"

    async def _bounded(self, step: Awaitable[T], name: str, until: float) -> T:
        try:
            with calls_end_by(until):
                return await asyncio.wait_for(step, max(0.0, until - time.monotonic()) + GRACE_S)
        except TimeoutError as error:
            raise PublishError(f"{name} was not done {self._timeout_s:g} s (sync_timeout_s) after the start") from error


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
