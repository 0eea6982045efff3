"""Process groups between one training rank and the engines, beside the training ranks' own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from roll.distributed.ports import serve_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class WeightsGroup:
    """A broadcast group: the source of one pipeline stage is rank 0, the engines' ranks follow.

    Attributes:
        name: unique in a run, also after a retry.
        address: of the source's node.
        port: held by the source.
        world_size: 1 + the ranks of all engines.
        backend: gloo or nccl.
    """

    name: str
    address: str
    port: int
    world_size: int
    backend: str


def join_as_source(group: WeightsGroup, timeout_s: float) -> ProcessGroup:
    """Joins as rank 0 and waits for the engines.

    The engines join through SGLang, which builds a group from the same store and name; torch has no public call for a
    group whose members are not all in the default group.

    Raises:
        torch.distributed.DistStoreError: not all came within `timeout_s`.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    timeout = timedelta(seconds=timeout_s)
    store = serve_store(group.address, group.port, group.world_size, timeout)
    joined, _ = c10d._new_process_group_helper(
        group.world_size,
        0,
        [],
        c10d.Backend(group.backend),
        dist.PrefixStore(group.name, store),
        group_name=c10d.GroupName(group.name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[joined] = {rank: rank for rank in range(group.world_size)}
    return joined
