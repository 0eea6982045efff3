"""The training side of a publish within one node: buckets in memory that engines open."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from roll.distributed.weight_sync.plan import Bucket
from roll.distributed.weight_sync.sender import Sent, StageMember
from roll.distributed.weight_sync.shared_memory import SharedSlots, views_of
from roll.distributed.weight_sync.stage_tensors import Fault, SendError, StageTensors, damage

if TYPE_CHECKING:
    from roll.distributed.strategy.sglang_checksums import EngineChecksums


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
        from roll.distributed.strategy.sglang_handles import share

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
