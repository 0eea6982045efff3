"""What this machine has, without importing torch or running a tool."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """Accelerators and usable cores of one machine."""

    gpus: int
    cores: int


def this_machine() -> Machine:
    """The GPUs this process may see (CUDA_VISIBLE_DEVICES respected) and the cores it may run on."""
    nodes = sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        nodes = min(nodes, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
    return Machine(gpus=nodes, cores=len(os.sched_getaffinity(0)))
