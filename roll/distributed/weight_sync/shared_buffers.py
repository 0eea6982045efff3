"""Memory that engines on the same node can open: two buckets, used in turn."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import torch
import torch.multiprocessing

from roll.distributed.strategy.base import WeightSpec
from roll.distributed.weight_sync.stage_tensors import SendError

SLOTS = 2
"""One bucket is loaded while the next is filled."""
SHARED_MEMORY = "/dev/shm"


class SharedBuffers:
    """Bytes for buckets.

    On a CPU the same two pieces of shared memory serve every publish, since mapping new pages costs more than filling
    them. On a GPU every bucket is new: an engine answers before its copies have ended.
    """

    def __init__(self) -> None:
        """Holds nothing yet."""
        self._bytes = 0
        self._slots: list[torch.Tensor | None] = [None] * SLOTS

    def reserve(self, num_bytes: int) -> None:
        """Says how large the largest bucket of this publish is."""
        if num_bytes > self._bytes:
            self._bytes, self._slots = num_bytes, [None] * SLOTS

    def take(self, index: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Memory [num_bytes] uint8 for bucket `index`; on a CPU that of bucket `index - 2` again.

        Raises:
            SendError: the node's shared memory is too small.
        """
        if device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        slot = self._slots[index % SLOTS]
        if slot is None:
            slot = self._slots[index % SLOTS] = self._allocate()
        return slot[:num_bytes]

    def _allocate(self) -> torch.Tensor:
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < self._bytes:
            raise SendError(
                f"{SHARED_MEMORY} has {free >> 20} MB free and a bucket needs {self._bytes >> 20} MB; lower "
                "model_update_buffer_size_mb, or give the machine more shared memory"
            )
        torch.multiprocessing.set_sharing_strategy("file_system")
        return torch.empty(self._bytes, dtype=torch.uint8).share_memory_()


def views_of(flat: torch.Tensor, specs: Sequence[WeightSpec]) -> list[tuple[str, torch.Tensor]]:
    """Tensors that lie one after the other in `flat` [bytes] uint8."""
    views, start = [], 0
    for spec in specs:
        dtype = getattr(torch, spec.dtype)
        stop = start + torch.Size(spec.shape).numel() * dtype.itemsize
        views.append((spec.name, flat[start:stop].view(dtype).view(spec.shape)))
        start = stop
    return views
