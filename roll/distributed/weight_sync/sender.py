"""What both ways of publishing share on the training side: who sends what, and what is reported of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist

from roll.distributed.process_groups import WeightsGroup, hold_port, join_as_source, release_port
from roll.distributed.strategy.base import TrainStrategy
from roll.distributed.weight_sync.plan import Bucket, WeightSpec
from roll.distributed.weight_sync.shm_buckets import SharedSlots, views_of

if TYPE_CHECKING:
    from roll.configs.layout import ParallelLayout
    from roll.distributed.strategy.sglang_checksums import EngineChecksums


@dataclass(frozen=True)
class SourceInfo:
    """What the source of a pipeline stage tells the driver."""

    stage: int
    specs: list[WeightSpec]
    address: str


@dataclass(frozen=True)
class Sent:
    """What a source has sent.

    Attributes:
        num_bytes: that went out.
        checksums: by the engine's names, of what was meant to go out; empty unless asked for.
        handles: of a shared bucket, one for each engine rank in the order of engines; empty for a broadcast.
    """

    num_bytes: int
    checksums: dict[str, str] = field(default_factory=dict)
    handles: tuple[bytes, ...] = ()


class StageMember:
    """One training rank's part in publishing. Ranks of data index 0 take part; tensor rank 0 of them is the source.

    Attributes:
        stage: pipeline stage of this rank.
        takes_part: whether its slices are published.
        is_source: whether it sends.
    """

    def __init__(self, strategy: TrainStrategy, layout: ParallelLayout, rank: int, model_folder: Path) -> None:
        """Takes the strategy that holds the weights and the HF folder whose config.json says how engines cut them."""
        here = layout.coordinates(rank)
        self.strategy = strategy
        self.stage = here.pipeline
        self.takes_part = here.data == 0
        self.is_source = self.takes_part and here.tensor == 0
        self._folder = model_folder

    def new_checksums(self, ranks: int) -> EngineChecksums | None:
        """Empty sums for engines of `ranks` tensor-parallel ranks; None where none are wanted or this is no source."""
        if not ranks or not self.is_source:
            return None
        from roll.distributed.strategy.sglang_checksums import EngineChecksums

        return EngineChecksums(self._folder, ranks)


T = TypeVar("T")

HANG_S = 6.0
"""Seconds that a fault of kind `hang` takes."""


@dataclass(frozen=True)
class Fault:
    """Damage done on purpose to one publish, so that tests can see it detected; it is never read from a config.

    Attributes:
        kind: `corrupt` changes one element after the checksum was taken, as a broken wire would; `drop` leaves the
            tensor out of the plan, as a mapping with a hole would; `fail` raises when the tensor's turn comes; `hang`
            lets `HANG_S` pass first.
        name: HF name of the tensor.
    """

    kind: Literal["corrupt", "drop", "fail", "hang"]
    name: str


class StageTensors(Generic[T]):
    """Takes what the strategy yields and sees that it is what was planned, no less and no more."""

    def __init__(self, named: Iterator[tuple[str, T]], fault: Fault | None) -> None:
        """Takes names in publishing order, each with the tensor or with what writes it."""
        self._named, self._fault = named, fault

    def take(self, spec: WeightSpec) -> T:
        """What belongs to the next planned tensor.

        Raises:
            SendError: the model yields another, or none.
        """
        name, value = self._next()
        if self._fault == Fault("drop", name):
            name, value = self._next()
        if self._fault == Fault("fail", name):
            raise SendError(f"{name}: told to fail")
        if self._fault == Fault("hang", name):
            time.sleep(HANG_S)
        if name != spec.name or (isinstance(value, torch.Tensor) and tuple(value.shape) != tuple(spec.shape)):
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ""
            raise SendError(f"planned {spec.name} {tuple(spec.shape)}, but the model yields {name} {shape}")
        return value

    def check_end(self) -> None:
        """Sees that the plan covers all.

        Raises:
            SendError: a tensor is left.
        """
        left = next(self._named, None)
        if left is not None and self._fault != Fault("drop", left[0]):
            raise SendError(f"the model yields {left[0]}, which is not in the plan")

    def drain(self) -> None:
        """Sees a gather through without using what comes."""
        for _ in self._named:
            pass

    def _next(self) -> tuple[str, T]:
        found = next(self._named, None)
        if found is None:
            raise SendError("the model yields fewer tensors than planned")
        return found


def damage(tensor: torch.Tensor) -> None:
    """Changes one element, as a broken wire would."""
    tensor.view(-1)[0] += 1


class BroadcastSender:
    """Sends one pipeline stage in a group of its source and the engines."""

    def __init__(self, member: StageMember) -> None:
        """Joins nothing yet."""
        self._member = member
        self._group: Any = None
        self._port: int | None = None

    def hold_port(self) -> int | None:
        """A port for a new group, held until the group is left; None on ranks that do not send."""
        self._port = hold_port() if self._member.is_source else None
        return self._port

    def join(self, groups: list[WeightsGroup], timeout_s: float) -> None:
        """Joins the group of this stage; a collective in it takes at most `timeout_s`."""
        if self._member.is_source:
            self._group = join_as_source(groups[self._member.stage], timeout_s)

    def leave(self) -> None:
        """Leaves the group, which frees an engine that waits in it; nothing happens outside of one."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        if self._port is not None:
            release_port(self._port)
            self._port = None

    def broadcast(self, stages: list[list[Bucket]], digest_ranks: int, fault: Fault | None) -> Sent | None:
        """Sends this stage's tensors, gathering those of the next bucket while those of one are under way.

        Args:
            stages: buckets of every stage.
            digest_ranks: tensor-parallel ranks of the engines whose checksums are wanted; 0 takes none.
            fault: damage done on purpose.

        Returns:
            What was sent, on the source; None elsewhere.

        Raises:
            SendError: the model yields other tensors than planned, or no group was joined.
        """
        member = self._member
        if not member.takes_part:
            return None
        if member.is_source and self._group is None:
            raise SendError("there is no group to broadcast in; join comes first")
        checksums = member.new_checksums(digest_ranks)
        tensors = StageTensors(member.strategy.source_weights(), fault)
        try:
            sent = self._send_all(stages[member.stage], tensors, checksums, fault)
        finally:
            tensors.drain()
        return Sent(sent, checksums.result() if checksums else {}) if member.is_source else None

    def _send_all(
        self,
        buckets: list[Bucket],
        tensors: StageTensors[torch.Tensor | None],
        checksums: EngineChecksums | None,
        fault: Fault | None,
    ) -> int:
        sent = 0
        under_way: list[tuple[Any, torch.Tensor]] = []
        for bucket in buckets:
            before, under_way = under_way, []
            for spec in bucket.specs:
                tensor = tensors.take(spec)
                if tensor is None:
                    continue
                if checksums is not None:
                    checksums.add(spec.name, tensor)
                if fault == Fault("corrupt", spec.name):
                    tensor = tensor.clone()
                    damage(tensor)
                under_way.append(self._send(tensor))
                sent += tensor.nbytes
            _finish(before)
        _finish(under_way)
        tensors.check_end()
        return sent

    def _send(self, tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """A broadcast under way, with the tensor that must live as long."""
        tensor = tensor.detach().contiguous()
        return dist.broadcast(tensor, src=0, group=self._group, async_op=True), tensor


def _finish(broadcasts: list[tuple[Any, torch.Tensor]]) -> None:
    """Waits until all have gone out."""
    for work, _ in broadcasts:
        work.wait()


class SharedSender:
    """Offers one pipeline stage bucket by bucket: `fill` on every rank, then `inspect` where checksums are wanted.

    On a CPU all tensor-parallel ranks write their slices into the same memory, so nothing is gathered. On a GPU the
    source gathers into memory of its own.
    """

    def __init__(self, member: StageMember) -> None:
        """Holds no memory yet."""
        self._member = member
        self._slots: SharedSlots | None = None
        self._tensors: StageTensors[Any] | None = None
        self._checksums: EngineChecksums | None = None
        self._kept: list[torch.Tensor] = []

    def reserve(self, num_bytes: list[int]) -> list[str] | None:
        """Makes room on a CPU for the largest bucket of each stage.

        Returns:
            What `attach` takes on the other ranks of the stage, from its source; None elsewhere.

        Raises:
            SendError: the node's shared memory is too small.
        """
        if not self._member.is_source:
            return None
        if self._slots is None or self._slots.num_bytes < num_bytes[self._member.stage]:
            self._slots = SharedSlots.create(num_bytes[self._member.stage])
        return self._slots.handle()

    def attach(self, handles: list[list[str]]) -> None:
        """Opens the memory of the stage's source; `handles` has one for each stage."""
        if self._member.takes_part and not self._member.is_source:
            self._slots = SharedSlots.open(handles[self._member.stage])

    def fill(self, stages: list[list[Bucket]], index: int, receivers: int, fault: Fault | None) -> Sent | None:
        """Writes what this rank has of bucket `index`, called with 0, 1, 2 and so on; too high an index does nothing.

        The bucket before stays valid meanwhile, so that an engine loads one while the next is written.

        Returns:
            On the source, handles of the bucket for `receivers` engine ranks, each to be opened once all ranks have
            filled it; None elsewhere and after the last.

        Raises:
            SendError: the model yields other tensors than planned.
        """
        buckets = stages[self._member.stage]
        if not self._member.takes_part or index >= len(buckets):
            return None
        if index == 0:
            self._start(fault)
        assert self._tensors is not None
        if self._slots is not None:
            self._write(self._slots.bucket(index, buckets[index]), buckets[index], self._tensors)
        else:
            self._gather(buckets[index], self._tensors)
        if index == len(buckets) - 1:
            self._tensors.check_end()
        if not self._member.is_source:
            return None
        return Sent(buckets[index].bytes, {}, self._handles(index, buckets[index], receivers))

    def inspect(
        self, stages: list[list[Bucket]], index: int, digest_ranks: int, fault: Fault | None
    ) -> dict[str, str] | None:
        """Takes the checksums of bucket `index` once all ranks have filled it, then does the damage that is asked for.

        Returns:
            On the source: with the last bucket the checksums of all, before that none. None elsewhere and after it.
        """
        buckets = stages[self._member.stage]
        if not self._member.is_source or index >= len(buckets):
            return None
        if index == 0:
            self._checksums = self._member.new_checksums(digest_ranks)
        for name, tensor in views_of(self._bucket(index, buckets[index]), buckets[index].specs):
            if self._checksums is not None:
                self._checksums.add(name, tensor)
            if fault == Fault("corrupt", name):
                damage(tensor)
        is_last = index == len(buckets) - 1
        return self._checksums.result() if self._checksums is not None and is_last else {}

    def _bucket(self, index: int, bucket: Bucket) -> torch.Tensor:
        """Its memory [bucket.bytes] uint8."""
        return self._kept[-1] if self._slots is None else self._slots.bucket(index, bucket)

    def _handles(self, index: int, bucket: Bucket, receivers: int) -> tuple[bytes, ...]:
        if self._slots is not None:
            return (self._slots.offer(index, bucket),) * receivers
        from roll.distributed.weight_sync.shm_buckets import share

        named = views_of(self._bucket(index, bucket), bucket.specs)
        return tuple(share(named) for _ in range(receivers))

    def release(self) -> None:
        """Ends a publish, also one left half way: sees a gather through and lets go of memory that is not kept."""
        if self._tensors is not None:
            self._tensors.drain()
        self._tensors, self._checksums, self._kept = None, None, []

    def _start(self, fault: Fault | None) -> None:
        self.release()
        strategy = self._member.strategy
        named = strategy.source_weights() if self._slots is None else strategy.weight_slices()
        self._tensors = StageTensors(iter(named), fault)

    def _write(self, flat: torch.Tensor, bucket: Bucket, writers: StageTensors[Callable[[torch.Tensor], None]]) -> None:
        for spec, (_, target) in zip(bucket.specs, views_of(flat, bucket.specs), strict=True):
            writers.take(spec)(target)

    def _gather(self, bucket: Bucket, tensors: StageTensors[torch.Tensor | None]) -> None:
        gathered = [tensors.take(spec) for spec in bucket.specs]
        if not self._member.is_source:
            return
        parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in gathered if tensor is not None]
        if len(parts) != len(gathered):
            raise SendError(f"the source did not get every tensor of the bucket that starts at {bucket.specs[0].name}")
        self._kept = [*self._kept[-1:], torch.cat(parts)]
