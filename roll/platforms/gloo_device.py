"""One network thread for the gloo groups of a process that have one rank.

torch gives each group a thread of its own, which wakes a hundred times a second. On one device, Megatron-Core makes 19
such groups in a training rank and SGLang 9 in an engine; their threads took 1.5 % and 0.8 % of a core.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed import distributed_c10d

from roll.platforms.platform import LOOPBACK

_ProcessGroupGloo: Any = distributed_c10d.ProcessGroupGloo
_original: Any = _ProcessGroupGloo.__init__


def share_gloo_device() -> None:
    """Lets the gloo groups of one rank that torch makes from now on in this process use one device.

    Such a group sends nothing. A group of several ranks keeps a device of its own, which is closed with the group: a
    rank that connects after the others timed out is refused.
    """
    _ProcessGroupGloo.__init__ = _initialize


def _initialize(group: Any, store: Any, rank: int, size: int, *options: Any, **named: Any) -> None:
    """As torch calls it: with a timeout by its name, or with nothing after the size."""
    if size == 1 and not options and named.keys() <= {"timeout"}:
        shared = _ProcessGroupGloo._Options()
        shared._devices = [_device()]
        if "timeout" in named:
            shared._timeout = named["timeout"]
        options, named = (shared,), {}
    _original(group, store, rank, size, *options, **named)


@functools.cache
def _device() -> Any:
    return _ProcessGroupGloo.create_device(hostname=LOOPBACK)
