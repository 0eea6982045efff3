"""TCP ports that belong to this process from the moment they are chosen.

A port that is only looked up, and bound later, may meanwhile be taken by any outgoing connection on the machine. These
are bound at once, and the listening socket itself is handed to the store that serves on it.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, TCPStore

_held: dict[int, socket.socket] = {}


def open_port() -> socket.socket:
    """A socket that listens on a free port of every interface."""
    dual = socket.has_dualstack_ipv6()
    return socket.create_server(("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual)


def hold_port(listener: socket.socket | None = None) -> int:
    """Keeps a port for a store of this process, a fresh one or that of a socket which listens; returns its number."""
    listener = listener or open_port()
    port = int(listener.getsockname()[1])
    _held[port] = listener
    return port


def release_port(port: int) -> None:
    """Gives a held port back; nothing happens where it was used or never held."""
    listener = _held.pop(port, None)
    if listener is not None:
        listener.close()


def serve_store(address: str, port: int, world_size: int, timeout: timedelta) -> TCPStore:
    """The store that others reach at `address`:`port`, on this process's own socket where it holds that port.

    Raises:
        torch.distributed.DistNetworkError: the port is not held here and another process has it.
        torch.distributed.DistStoreError: not all of `world_size` came within `timeout`.
    """
    from torch.distributed import TCPStore

    listener = _held.pop(port, None)
    descriptor = None if listener is None else listener.detach()
    return TCPStore(address, port, world_size, is_master=True, timeout=timeout, master_listen_fd=descriptor)


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
