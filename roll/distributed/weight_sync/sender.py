"""The training side of a publish: gathers a stage's tensors bucket by bucket and hands them to the engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from roll.distributed.actors import free_port
from roll.distributed.strategy.base import TrainStrategy, WeightSpec
from roll.distributed.weight_sync.groups import WeightsGroup, join_as_source
from roll.distributed.weight_sync.plan import Bucket
from roll.distributed.weight_sync.shared_buffers import SharedBuffers, views_of
from roll.distributed.weight_sync.stage_tensors import Fault, SendError, StageTensors

if TYPE_CHECKING:
    from roll.configs.layout import ParallelLayout
    from roll.distributed.worker import WorkerRank


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


class WeightSender:
    """Publishes one pipeline stage. Ranks of data index 0 take part in the gather; tensor rank 0 of them sends."""

    def __init__(self, strategy: TrainStrategy, rank: WorkerRank, layout: ParallelLayout, model_folder: Path) -> None:
        """Joins nothing yet.

        Args:
            strategy: holds the weights.
            rank: of this process.
            layout: of the training role.
            model_folder: HF folder whose config.json says how engines fuse and split tensors.
        """
        self._strategy = strategy
        self._rank = rank
        here = layout.coordinates(rank.rank)
        self._stage = here.pipeline
        self._gathers = here.data == 0
        self._is_source = self._gathers and here.tensor == 0
        self._folder = model_folder
        self._group: Any = None
        self._tensors: StageTensors | None = None
        self._buffers = SharedBuffers()

    def source_info(self) -> SourceInfo | None:
        """What this stage publishes and where engines find it; None on ranks that do not send."""
        if not self._is_source:
            return None
        return SourceInfo(self._stage, self._strategy.weight_specs(), self._rank.address)

    def free_port(self) -> int | None:
        """A port for a new group; None on ranks that do not send."""
        return free_port() if self._is_source else None

    def join(self, groups: list[WeightsGroup], timeout_s: float) -> None:
        """Joins the group of this stage; a collective in it takes at most `timeout_s`."""
        if self._is_source:
            self._group = join_as_source(groups[self._stage], timeout_s)

    def leave(self) -> None:
        """Leaves the group, which frees an engine that waits in it; nothing happens outside of one."""
        self.release()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def release(self) -> None:
        """Ends a publish that was left half way: sees the gather through, so that no rank waits in it."""
        if self._tensors is not None:
            self._tensors.drain()
            self._tensors = None

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
        if not self._gathers:
            return None
        if self._is_source and self._group is None:
            raise SendError("there is no group to broadcast in; join comes first")
        tensors = self._start(digest_ranks, fault)
        try:
            sent = self._broadcast(stages[self._stage], tensors)
        finally:
            self.release()
        return Sent(sent, tensors.checksums()) if self._is_source else None

    def _broadcast(self, buckets: list[Bucket], tensors: StageTensors) -> int:
        sent = 0
        under_way: list[tuple[Any, torch.Tensor]] = []
        for bucket in buckets:
            before, under_way = under_way, []
            for spec in bucket.specs:
                tensor = tensors.take(spec)
                if tensor is not None:
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

    def share(
        self, stages: list[list[Bucket]], index: int, receivers: int, digest_ranks: int, fault: Fault | None
    ) -> Sent | None:
        """Offers bucket `index` of this stage in memory that engines on this node open; call with 0, 1, 2 and so on.

        The bucket before stays valid meanwhile, so that an engine loads one while the next is gathered.

        Returns:
            Handles for `receivers` engine ranks on the source, each to be opened once, with the checksums of all
            buckets on the last; None elsewhere and after the last.

        Raises:
            SendError: the model yields other tensors than planned, or shared memory is too small for two buckets.
        """
        buckets = stages[self._stage]
        if not self._gathers or index >= len(buckets):
            return None
        if index == 0 or self._tensors is None:
            self._buffers.reserve(max(bucket.bytes for bucket in buckets))
            self._start(digest_ranks, fault)
        assert self._tensors is not None
        tensors, is_last = self._tensors, index == len(buckets) - 1
        flat = self._fill(buckets[index], index, tensors)
        if is_last:
            tensors.check_end()
        if flat is None:
            return None
        from roll.distributed.strategy.sglang_handles import share

        named = views_of(flat, buckets[index].specs)
        handles = tuple(share(named) for _ in range(receivers))
        return Sent(flat.nbytes, tensors.checksums() if is_last else {}, handles)

    def _fill(self, bucket: Bucket, index: int, tensors: StageTensors) -> torch.Tensor | None:
        """The bucket as bytes [bucket.bytes] uint8; None on ranks that only gather."""
        flat: torch.Tensor | None = None
        views: dict[str, torch.Tensor] = {}
        for spec in bucket.specs:
            tensor = tensors.take(spec)
            if tensor is None:
                continue
            if flat is None:
                flat = self._buffers.take(index, bucket.bytes, tensor.device)
                views = dict(views_of(flat, bucket.specs))
            views[spec.name].copy_(tensor)
        return flat

    def _start(self, digest_ranks: int, fault: Fault | None) -> StageTensors:
        self.release()
        checksums = None
        if digest_ranks and self._is_source:
            from roll.distributed.strategy.sglang_checksums import EngineChecksums

            checksums = EngineChecksums(self._folder, digest_ranks)
        self._tensors = StageTensors(self._strategy.source_weights(), checksums, fault)
        return self._tensors


def _finish(broadcasts: list[tuple[Any, torch.Tensor]]) -> None:
    """Waits until all have gone out."""
    for work, _ in broadcasts:
        work.wait()
