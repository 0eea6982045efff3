"""The training side of a broadcast: gathers a stage's tensors on its source and sends them to every engine rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from roll.distributed.ports import hold_port, release_port
from roll.distributed.weight_sync.groups import WeightsGroup, join_as_source
from roll.distributed.weight_sync.plan import Bucket
from roll.distributed.weight_sync.sender import Sent, StageMember
from roll.distributed.weight_sync.stage_tensors import Fault, SendError, StageTensors, damage

if TYPE_CHECKING:
    from roll.distributed.strategy.sglang_checksums import EngineChecksums


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
