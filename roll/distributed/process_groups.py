"""Ports and stores of process groups, and the groups in which training ranks broadcast weights to engines.

A port that is looked up first and bound later may meanwhile be taken by any outgoing connection on the machine. Here a
port is bound when it is chosen, and its listening socket is handed to the store that serves on it. Imports torch inside
functions: worker processes hold ports before they are ready to import torch.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from roll.platforms.platform import LOOPBACK

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]

    from roll.platforms.platform import Platform

_held: dict[int, socket.socket] = {}


def open_port(address: str = "") -> socket.socket:
    """A socket that listens on a free port: of the loopback address where that is `address`, else of all interfaces."""
    if address == LOOPBACK:
        return socket.create_server((LOOPBACK, 0))
    dual = socket.has_dualstack_ipv6()
    return socket.create_server(("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual)


def hold_port(address: str = "", listener: socket.socket | None = None) -> int:
    """Holds a port for a store that serves at `address`: that of `listener`, or else a free one. Returns its number."""
    listener = listener or open_port(address)
    port = int(listener.getsockname()[1])
    _held[port] = listener
    return port


def release_port(port: int) -> None:
    """Closes a held port; does nothing where the port was used by a store or never held."""
    listener = _held.pop(port, None)
    if listener is not None:
        listener.close()


def serve_store(address: str, port: int, world_size: int, timeout: timedelta) -> TCPStore:
    """Serves the store at `address`:`port`, on the listening socket if this process holds that port.

    Raises:
        torch.distributed.DistNetworkError: this process does not hold the port and another process has bound it.
        torch.distributed.DistStoreError: fewer than `world_size` ranks joined within `timeout`.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = _held.pop(port, None)
    descriptor = None if listener is None else listener.detach()
    return TCPStore(address, port, world_size, is_master=True, timeout=timeout, master_listen_fd=descriptor)


def bind_to_device(device: torch.device, world_size: int) -> None:
    """Lets the group of all ranks communicate once, which binds it to this rank's device.

    NCCL would otherwise guess the device of the first barrier from the rank, and every rank sees its own device as
    device 0. `init_process_group(device_id=...)` is not an alternative: groups made later would be split from this one,
    and the engines, which join the groups of weight updates, have none to split.

    Raises:
        RuntimeError: not every rank took part.
    """
    import torch

    ranks = torch.ones(1, device=device)
    torch.distributed.all_reduce(ranks)
    if ranks.item() != world_size:
        raise RuntimeError(f"{ranks.item():g} of {world_size} ranks answered")


def join_all_ranks(
    platform: Platform, rank: int, world_size: int, start_timeout_s: float, collective_timeout_s: float
) -> None:
    """Joins the default group of all ranks at MASTER_ADDR:MASTER_PORT; rank 0 serves its store.

    `start_timeout_s` bounds the wait for all ranks, `collective_timeout_s` each later collective.

    Raises:
        RuntimeError: the environment lacks the address, or ranks did not start in time.
    """
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from roll.platforms.gloo_device import share_gloo_device

    if platform.collective_backend == "gloo":
        share_gloo_device()
    address, port = _master()
    timeout = timedelta(seconds=start_timeout_s)
    if rank == 0:
        store = serve_store(address, port, world_size, timeout)
    else:
        store = TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    dist.init_process_group(
        platform.collective_backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=collective_timeout_s),
    )
    bind_to_device(platform.torch_device(0), world_size)


def _master() -> tuple[str, int]:
    try:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except KeyError as missing:
        raise RuntimeError(f"environment variable {missing} is not set, so ranks cannot find each other") from None


@dataclass(frozen=True)
class BroadcastGroup:
    """The group of one pipeline stage: its source rank is rank 0, the ranks of all engines follow.

    Attributes:
        name: unique in a run, retries included.
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


NCCL_TIMEOUT_FACTOR = 10
"""NCCL's watchdog ends the process of a collective that takes too long; the deadline of an update has to come first."""


def join_as_source(group: BroadcastGroup, timeout_s: float) -> ProcessGroup:
    """Joins as rank 0 and waits for the engines.

    The engines join through SGLang, which builds a group from the same store and name; torch has no public function
    for a group of processes that share no default group.

    Raises:
        torch.distributed.DistStoreError: not all engines joined within `timeout_s`.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed import distributed_c10d as c10d

    timeout = timedelta(seconds=timeout_s)
    store = serve_store(group.address, group.port, group.world_size, timeout)
    of_collectives = timeout * (NCCL_TIMEOUT_FACTOR if group.backend == "nccl" else 1)
    joined, _ = c10d._new_process_group_helper(
        group.world_size,
        0,
        [],
        c10d.Backend(group.backend),
        PrefixStore(group.name, store),
        group_name=c10d.GroupName(group.name),
        timeout=of_collectives,
    )
    c10d._world.pg_group_ranks[joined] = {rank: rank for rank in range(group.world_size)}
    source: ProcessGroup = joined
    return source


def leave_group(group: ProcessGroup) -> None:
    """Leaves a group in which a collective may not have ended.

    `destroy_process_group` of NCCL waits for kernels that may wait for the other side, so its communicator is aborted.
    """
    from torch.distributed import distributed_c10d as c10d

    if c10d.get_backend(group) == "nccl":
        c10d._abort_process_group(group)
    else:
        c10d.destroy_process_group(group)
