"""The training side of a publish: gathers a stage's tensors bucket by bucket and hands them to the engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from roll.distributed.actors import free_port
from roll.distributed.strategy.base import TrainStrategy, WeightSpec
from roll.distributed.weight_sync.groups import WeightsGroup, join_as_source
from roll.distributed.weight_sync.plan import Bucket

if TYPE_CHECKING:
    from roll.configs.layout import ParallelLayout
    from roll.distributed.worker import WorkerRank


class SendError(RuntimeError):
    """What the model yields is not what the plan says."""


@dataclass(frozen=True)
class Fault:
    """Damage done on purpose to one publish, so that tests can see it detected; it is never read from a config.

    Attributes:
        kind: `corrupt` changes one element after the checksum was taken, as a broken wire would; `drop` leaves the
            tensor out of the plan, as a mapping with a hole would; `fail` raises when the tensor's turn comes.
        name: HF name of the tensor.
    """

    kind: Literal["corrupt", "drop", "fail"]
    name: str


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
        self._tensors: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._checksums: Any = None
        self._kept: list[torch.Tensor] = []

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
        """Lets go of tensors kept for engines; their handles are void."""
        self._tensors = iter(())
        self._kept = []

    def broadcast(self, stages: list[list[Bucket]], digest_ranks: int, fault: Fault | None) -> Sent | None:
        """Sends this stage's buckets, gathering the next while one is under way.

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
        self._start(digest_ranks)
        sent = 0
        works: list[Any] = []
        for bucket in stages[self._stage]:
            flat = self._fill(bucket, fault)
            if flat is None:
                continue
            for work in works:
                work.wait()
            works = [dist.broadcast(flat, src=0, group=self._group, async_op=True)]
            self._kept = [*self._kept[-1:], flat]
            sent += flat.nbytes
        for work in works:
            work.wait()
        self._check_end()
        self.release()
        return Sent(sent, self._result()) if self._is_source else None

    def share(
        self, stages: list[list[Bucket]], index: int, receivers: int, digest_ranks: int, fault: Fault | None
    ) -> Sent | None:
        """Offers bucket `index` of this stage in memory that engines on this node open; call with 0, 1, 2 and so on.

        The bucket before stays valid meanwhile, so that an engine loads one while the next is gathered; `release` frees
        what is left.

        Returns:
            Handles for `receivers` engine ranks on the source, each to be opened once, with the checksums of all
            buckets on the last; None elsewhere and after the last.

        Raises:
            SendError: the model yields other tensors than planned.
        """
        buckets = stages[self._stage]
        if not self._gathers or index >= len(buckets):
            return None
        if index == 0:
            self._start(digest_ranks)
        flat = self._fill(buckets[index], fault)
        if index == len(buckets) - 1:
            self._check_end()
        if flat is None:
            return None
        from roll.distributed.strategy.sglang_handles import share

        self._kept = [*self._kept[-1:], flat]
        views = _views(flat, buckets[index])
        handles = tuple(share(views) for _ in range(receivers))
        return Sent(flat.nbytes, self._result() if index == len(buckets) - 1 else {}, handles)

    def _start(self, digest_ranks: int) -> None:
        from roll.distributed.strategy.sglang_checksums import EngineChecksums

        self._tensors = self._strategy.weights()
        self._checksums = EngineChecksums(self._folder, digest_ranks) if digest_ranks and self._is_source else None

    def _fill(self, bucket: Bucket, fault: Fault | None) -> torch.Tensor | None:
        """The bucket's tensors one after the other as bytes [bucket.bytes] uint8; None on ranks that only gather."""
        flat: torch.Tensor | None = None
        start = 0
        for spec in bucket.specs:
            tensor = self._next(spec, fault)
            if not self._is_source:
                continue
            if flat is None:
                flat = torch.empty(bucket.bytes, dtype=torch.uint8, device=tensor.device)
            if self._checksums is not None:
                self._checksums.add(spec.name, tensor)
            stop = start + tensor.nbytes
            view = flat[start:stop].view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor)
            if fault == Fault("corrupt", spec.name):
                view.view(-1)[0] += 1
            start = stop
        return flat

    def _next(self, spec: WeightSpec, fault: Fault | None) -> torch.Tensor:
        name, tensor = next(self._tensors, ("nothing", None))
        if fault == Fault("drop", name):
            name, tensor = next(self._tensors, ("nothing", None))
        if fault == Fault("fail", name):
            raise SendError(f"{name}: told to fail")
        if tensor is None or name != spec.name or tuple(tensor.shape) != tuple(spec.shape):
            shape = () if tensor is None else tuple(tensor.shape)
            raise SendError(f"planned {spec.name} {tuple(spec.shape)}, but the model yields {name} {shape}")
        return tensor

    def _check_end(self) -> None:
        left = next(self._tensors, None)
        if left is not None:
            raise SendError(f"the model yields {left[0]}, which is not in the plan")

    def _result(self) -> dict[str, str]:
        return {} if self._checksums is None else self._checksums.result()


def _views(flat: torch.Tensor, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
    """The bucket's tensors as views of its bytes."""
    views, start = [], 0
    for spec in bucket.specs:
        dtype = getattr(torch, spec.dtype)
        count = torch.Size(spec.shape).numel() * dtype.itemsize
        views.append((spec.name, flat[start : start + count].view(dtype).view(spec.shape)))
        start += count
    return views
