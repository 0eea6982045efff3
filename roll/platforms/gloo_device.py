"""One network thread for all gloo groups of a process.

torch gives each group a device of its own, whose thread wakes a hundred times a second. Megatron-Core makes 19 groups
in a training rank and SGLang 9 in an engine, also where each of them has one rank; their threads took 1.5 % and 0.8 %
of a core, and the caches of those that compute.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_c10d: Any = distributed_c10d
_ProcessGroupGloo: Any = _c10d.ProcessGroupGloo


def share_gloo_device() -> None:
    """Lets all gloo groups that this process makes from now on use one device, on the network that torch would choose.

    The network is that of `GLOO_SOCKET_IFNAME`; without it, the one that the name of this machine leads to. Where the
    variable names several, each group keeps devices of its own.
    """
    if "," not in os.environ.get("GLOO_SOCKET_IFNAME", ""):
        _c10d.ProcessGroupGloo = _SharedDeviceGloo


class _SharedDeviceGloo(_ProcessGroupGloo):  # type: ignore[misc]  # torch gives it no type
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta = dist.default_pg_timeout) -> None:
        options = _ProcessGroupGloo._Options()
        options._devices, options._timeout = [_device()], timeout
        super().__init__(store, rank, size, options)


@functools.cache
def _device() -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interface:
        return _ProcessGroupGloo.create_device(interface=interface)
    return _ProcessGroupGloo.create_default_device()
