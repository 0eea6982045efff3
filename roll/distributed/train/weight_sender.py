"""The training side of a weight update: each pipeline stage sends its weights to the engines under their HF names.

Tensor rank 0 of data index 0 of each stage is its source rank. The ranks that together have the weights of the stage
take part: those of data index 0, and those with experts that the others lack. Weights are sent in buckets, either by a
broadcast to all engines or through memory that training ranks and engines of one node share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import save

from roll.configs.learning.lora import peft_config
from roll.distributed.infer.sglang_checksums import EngineChecksums, engine_places
from roll.distributed.process_groups import BroadcastGroup, hold_port, join_as_source, leave_group, release_port
from roll.distributed.weights.plan import Bucket, WeightSpec
from roll.distributed.weights.shm_buckets import ShmBuckets, cuda_ipc_handle, flattened, views_of
from roll.distributed.worker import WorkerRank
from roll.models.families.shape import known_model_shape
from roll.platforms import get_platform

if TYPE_CHECKING:
    from roll.distributed.train.megatron_optimizer import TrainedPolicy
    from roll.distributed.train.megatron_strategy import MegatronTrainStrategy

T = TypeVar("T")


class SendError(RuntimeError):
    """The model yields other tensors than planned, or the sender is not ready."""


@dataclass(frozen=True)
class StageSource:
    """What one pipeline stage sends, the address of its source rank, and the names of the whole model's weights."""

    stage: int
    specs: list[WeightSpec]
    address: str
    names: frozenset[str]
    frozen: frozenset[str] = frozenset()
    """Names of weights that training does not change."""
    frozen_parameters: frozenset[str] = frozenset()
    """Names of the engine's parameters that consist of these."""


@dataclass(frozen=True)
class SendResult:
    """What a rank has sent.

    Attributes:
        num_bytes: sent; 0 from a rank that only exports handles to engine ranks on its device.
        checksums: by the engine's names, of the tensors as they should arrive; empty unless requested.
        handles: of a bucket in shared memory, by engine rank in the order of engines; empty for a broadcast.
    """

    num_bytes: int
    checksums: dict[str, str] = field(default_factory=dict)
    handles: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class StageAdapters:
    """The adapters of one stage.

    Attributes:
        stage: number of it.
        data: A and B by their names in a PEFT folder, in the format of safetensors.
        checksum: SHA-256 of `data`.
        own: names of what it has.
        names: of the whole model's adapters.
        config: the adapter_config.json of the whole model's adapters.
        policy: that they are of; empty for the only one.
    """

    stage: int
    data: bytes
    checksum: str
    own: frozenset[str]
    names: frozenset[str]
    config: dict[str, Any]
    policy: str = ""


class StageWeights(Generic[T]):
    """Takes a stage's weights one by one and checks that they are exactly the planned ones."""

    def __init__(self, named: Iterator[tuple[str, T]]) -> None:
        """`named` yields HF names in sending order, each with the tensor or with a function that writes it."""
        self._named = named

    def take(self, spec: WeightSpec) -> T:
        """The weight of the next planned tensor.

        Raises:
            SendError: the model yields another tensor, or none.
        """
        found = next(self._named, None)
        if found is None:
            raise SendError(f"planned {spec.name}, but the model yields fewer tensors than planned")
        name, value = found
        if name != spec.name or (isinstance(value, torch.Tensor) and tuple(value.shape) != tuple(spec.shape)):
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ""
            raise SendError(f"planned {spec.name} {tuple(spec.shape)}, but the model yields {name} {shape}")
        return value

    def check_end(self) -> None:
        """Checks that no weight is left.

        Raises:
            SendError: the model yields a tensor that is not in the plan.
        """
        left = next(self._named, None)
        if left is not None:
            raise SendError(f"the model yields {left[0]}, which is not in the plan")

    def drain(self) -> None:
        """Runs the remaining collectives, so that no rank is left waiting in one, and discards their results."""
        for _ in self._named:
            pass


class WeightSender:
    """The part of a training rank in weight updates.

    `stages` is the plan of all pipeline stages: the buckets of each. A rank reads the buckets of its own stage.
    """

    def __init__(self, rank: WorkerRank, strategy: MegatronTrainStrategy, timeout_s: float) -> None:
        """A device may take `timeout_s` for what was sent from it."""
        self.rank, self.weights, self._states = rank, strategy.weights, strategy.states
        self._strategy = strategy
        self._timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = None
        self._port: int | None = None
        self._shm: ShmBuckets | None = None
        self._tensors: StageWeights[torch.Tensor | None] | None = None
        self._writers: StageWeights[Callable[[torch.Tensor], None]] | None = None
        self._gathered: list[torch.Tensor] = []
        self._left_out = frozenset[str]()
        self._checksums: EngineChecksums | None = None

    @property
    def stage(self) -> int:
        return self.rank.coordinates.pipeline

    @property
    def takes_part(self) -> bool:
        """Whether this rank's weights are sent; others hold the same weights."""
        return self.weights.takes_part([self.weights.source])

    @property
    def is_source(self) -> bool:
        return self.rank.rank == self.weights.source

    def require_parameters(self) -> None:
        """Raises a RuntimeError where the weights are in host memory."""
        self._states.require("parameters")

    def describe_weights(self) -> StageSource | None:
        """What this rank's stage sends, on its source rank; None elsewhere."""
        if not self.is_source:
            return None
        specs, frozen, held = self.weights.specs(), self.weights.frozen(), frozenset[str]()
        if frozen:
            places = engine_places(known_model_shape(self.weights.folder))
            parameters = {spec.name: places[spec.name].parameter for spec in specs if spec.name in places}
            changed = {parameter for name, parameter in parameters.items() if name not in frozen}
            held = frozenset(parameters.values()) - changed
        return StageSource(self.stage, specs, self.rank.address, self.weights.names_of_model(), frozen, held)

    def pack_adapters(self) -> list[StageAdapters]:
        """The adapters of this stage, of every policy, on its source rank; none elsewhere.

        Raises:
            SendError: none are trained.
        """
        if not self._strategy.adapters:
            raise SendError(f"{self.rank.name} trains no adapters")
        if not self.takes_part:
            return []
        self._states.require("parameters")
        packed = [self._pack(name, policy) for name, policy in self._strategy.policies.items()]
        return [each for each in packed if each is not None]

    def _pack(self, name: str, policy: TrainedPolicy) -> StageAdapters | None:
        weights, targets = policy.weights, policy.model.lora_target
        gathered = weights.adapter_tensors([weights.source])
        tensors = {tensor_name: tensor.cpu().contiguous() for tensor_name, tensor in gathered}
        if not self.is_source:
            return None
        tensors |= weights.absent_adapters()
        data, names = save(tensors), weights.names_of_adapters(targets)
        config = peft_config(policy.model, {each.split(".")[-3] for each in names}, str(weights.folder))
        return StageAdapters(self.stage, data, sha256(data).hexdigest(), frozenset(tensors), names, config, name)

    def _unsent(self, buckets: Sequence[Bucket]) -> frozenset[str]:
        """Names of frozen weights that the plan leaves out, since the engines have them."""
        return self.weights.frozen() - {spec.name for bucket in buckets for spec in bucket.specs}

    # Broadcast: one group per stage, of its source rank and all engine ranks.

    def hold_broadcast_port(self) -> int | None:
        """A port for a new broadcast group, held until the group is left; None on ranks that are no source."""
        self._port = hold_port(self.rank.address) if self.is_source else None
        return self._port

    def join_broadcast_group(self, groups: list[BroadcastGroup], timeout_s: float) -> None:
        """Joins the group of this stage as its source rank; a collective in it takes at most `timeout_s`."""
        if self.is_source:
            self._group = join_as_source(groups[self.stage], timeout_s)

    def leave_broadcast_group(self) -> None:
        """Leaves the group, which frees engines that wait in it; does nothing outside of a group."""
        if self._group is not None:
            leave_group(self._group)
            self._group = None
        if self._port is not None:
            release_port(self._port)
            self._port = None

    def broadcast_weights(self, stages: list[list[Bucket]], checksum_ranks: int) -> SendResult | None:
        """Broadcasts this stage's weights; gathers the tensors of the next bucket while one is being sent.

        Args:
            stages: buckets of every stage.
            checksum_ranks: tensor-parallel ranks of the engines whose checksums are computed; 0 computes none.

        Returns:
            What was sent, on the source rank; None elsewhere.

        Raises:
            SendError: the model yields other tensors than planned, no group was joined, or an engine does not receive.
        """
        if not self.takes_part:
            return None
        self._states.require("parameters")
        if self.is_source and self._group is None:
            raise SendError(f"{self.rank.name} is in no broadcast group; join_broadcast_group comes first")
        checksums = None
        if checksum_ranks and self.is_source:
            checksums = EngineChecksums.of_model(self.weights.folder, checksum_ranks)
        tensors = StageWeights(self.weights.gathered([self.weights.source], self._unsent(stages[self.stage])))
        sent = 0
        previous: tuple[dist.Work | None, torch.Tensor] | None = None
        try:
            for bucket in stages[self.stage]:
                gathered = [(spec.name, tensors.take(spec)) for spec in bucket.specs]
                named = [(name, tensor) for name, tensor in gathered if tensor is not None]
                if checksums is not None:
                    for name, tensor in named:
                        checksums.add(name, tensor)
                sending = self._broadcast(named) if named else None
                sent += 0 if sending is None else sending[1].nbytes
                _finish(previous)
                if checksums is not None:  # they wait for the GPU, without a limit
                    self._wait_for_device()
                previous = sending
            _finish(previous)
            tensors.check_end()
            self._wait_for_device()
        finally:
            tensors.drain()
        return SendResult(sent, checksums.result() if checksums else {}) if self.is_source else None

    def _wait_for_device(self) -> None:
        """Waits for what was started on a GPU: only then the weights are sent, and a time that is reported is theirs.

        Raises:
            SendError: it took longer than `sync_timeout_s`; this process can leave the group and try again.
        """
        try:
            get_platform(self.rank.platform).wait_for_device(self._timeout_s)
        except TimeoutError as error:
            raise SendError(f"{self.rank.name}: the engines have not received the weights: {error}") from None

    def _broadcast(self, named: list[tuple[str, torch.Tensor]]) -> tuple[dist.Work | None, torch.Tensor]:
        """Starts the broadcast of a bucket, in one call; the flat tensor must live until it is finished."""
        flat = flattened([tensor for _, tensor in named])
        return dist.broadcast(flat, src=0, group=self._group, async_op=True), flat

    # Shared memory, bucket by bucket: `fill_bucket` on every rank, then `checksum_bucket` when verifying. On a CPU all
    # tensor-parallel ranks write their slices to the same memory; on a GPU every rank that exports handles gathers.

    def create_shm(self, num_bytes: list[int]) -> list[str] | None:
        """Makes CPU memory for the largest bucket of this stage; `num_bytes` has its size for each stage.

        Returns:
            Addresses for `open_shm` on the other ranks of the stage, from its source rank; None elsewhere.

        Raises:
            SharedMemoryError: the node has too little memory.
        """
        if not self.is_source:
            return None
        if self._shm is None or self._shm.num_bytes < num_bytes[self.stage]:
            self._shm = ShmBuckets.create(num_bytes[self.stage])
        return self._shm.addresses()

    def open_shm(self, addresses: list[list[str]]) -> None:
        """Opens the memory of the stage's source rank; `addresses` has those of each stage."""
        if self.takes_part and not self.is_source:
            self._shm = ShmBuckets.open(addresses[self.stage])

    def fill_bucket(self, stages: list[list[Bucket]], index: int, sources: list[list[int]]) -> SendResult | None:
        """Writes this rank's part of bucket `index`; call it with 0, 1, 2, ...; does nothing beyond the last bucket.

        The previous bucket stays valid, so that engines load one while the next is written.

        Args:
            stages: buckets of every stage.
            index: of the bucket.
            sources: as `handle_sources` returns them.

        Returns:
            On the source rank, and on others that export handles: those of the bucket, valid once all ranks have filled
            it. None elsewhere and beyond the last bucket.

        Raises:
            SendError: the model yields other tensors than planned.
        """
        receiving = {*sources[self.stage], self.weights.source}
        if not self.weights.takes_part(receiving) or index >= len(stages[self.stage]):
            return None
        self._states.require("parameters")
        bucket, is_last = stages[self.stage][index], index == len(stages[self.stage]) - 1
        if index == 0:
            self._left_out = self._unsent(stages[self.stage])
        receivers = [engine for engine, rank in enumerate(sources[self.stage]) if rank == self.rank.rank]
        if self._shm is not None:
            handle = self._write_slices(self._shm, index, bucket, is_last)
            handles = dict.fromkeys(receivers, handle)
        else:
            named = self._gather(index, bucket, is_last, receiving)
            handles = {engine: cuda_ipc_handle(named) for engine in receivers}
        if self.is_source or receivers:
            return SendResult(bucket.bytes if self.is_source else 0, {}, handles)
        return None

    def _write_slices(self, shm: ShmBuckets, index: int, bucket: Bucket, is_last: bool) -> bytes:
        if index == 0:
            self.release_buckets()
            self._writers = StageWeights(self.weights.slice_writers(self._left_out))
        assert self._writers is not None, "bucket 0 comes first"
        for spec, (_, target) in zip(bucket.specs, views_of(shm.bucket(index, bucket), bucket.specs), strict=True):
            self._writers.take(spec)(target)
        if is_last:
            self._writers.check_end()
        return shm.handle(index, bucket)

    def _gather(self, index: int, bucket: Bucket, is_last: bool, receiving: set[int]) -> list[tuple[str, torch.Tensor]]:
        """Views of the bucket's tensors on the ranks `receiving`."""
        if index == 0:
            self.release_buckets()
            self._tensors = StageWeights(self.weights.gathered(receiving, self._left_out))
        assert self._tensors is not None, "bucket 0 comes first"
        gathered = [self._tensors.take(spec) for spec in bucket.specs]
        if is_last:
            self._tensors.check_end()
        if self.rank.rank not in receiving:
            return []
        whole = [tensor for tensor in gathered if tensor is not None]
        if len(whole) != len(gathered):
            raise SendError(f"{self.rank.name} lacks tensors of the bucket that starts at {bucket.specs[0].name}")
        self._gathered = [*self._gathered[-1:], flattened(whole)]
        return views_of(self._gathered[-1], bucket.specs)

    def checksum_bucket(self, stages: list[list[Bucket]], index: int, checksum_ranks: int) -> dict[str, str] | None:
        """Adds bucket `index` to the checksums, once all ranks have filled it.

        Returns:
            On the source rank: the checksums of all buckets with the last one, nothing before. None elsewhere.
        """
        buckets = stages[self.stage]
        if not self.is_source or index >= len(buckets):
            return None
        if self._checksums is None:
            self._checksums = EngineChecksums.of_model(self.weights.folder, checksum_ranks)
        for name, tensor in self.filled_tensors(index, buckets[index]):
            self._checksums.add(name, tensor)
        return self._checksums.result() if index == len(buckets) - 1 else {}

    def filled_tensors(self, index: int, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
        """Views of the tensors of the bucket that was filled last."""
        flat = self._gathered[-1] if self._shm is None else self._shm.bucket(index, bucket)
        return views_of(flat, bucket.specs)

    def release_buckets(self) -> None:
        """Ends a weight update, also one that failed half way: finishes started gathers and frees gathered buckets."""
        if self._tensors is not None:
            self._tensors.drain()
        self._tensors, self._writers, self._checksums, self._gathered = None, None, None, []


def _finish(broadcast: tuple[dist.Work | None, torch.Tensor] | None) -> None:
    if broadcast is not None and broadcast[0] is not None:
        broadcast[0].wait()
