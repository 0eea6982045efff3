"""Two buckets of CPU memory that several processes of a node have open, used in turn."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Sequence

import torch
import torch.multiprocessing

from roll.distributed.strategy.base import WeightSpec
from roll.distributed.weight_sync.plan import Bucket
from roll.distributed.weight_sync.stage_tensors import SendError

SLOTS = 2
"""One bucket is loaded while the next is written."""
SHARED_MEMORY = "/dev/shm"


class SharedSlots:
    """The same pages serve every publish, since mapping new ones costs more than writing them."""

    def __init__(self, slots: list[torch.Tensor]) -> None:
        """Takes tensors [num_bytes] uint8 in shared memory."""
        self._slots = slots
        self.num_bytes = len(slots[0])

    @classmethod
    def create(cls, num_bytes: int) -> SharedSlots:
        """New memory for buckets of up to `num_bytes`.

        Raises:
            SendError: the node has too little, with what to change.
        """
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < SLOTS * num_bytes:
            raise SendError(
                f"{SHARED_MEMORY} has {free >> 20} MB free and {SLOTS} buckets need {SLOTS * num_bytes >> 20} MB; "
                "lower model_update_buffer_size_mb, or give the machine more shared memory"
            )
        torch.multiprocessing.set_sharing_strategy("file_system")
        return cls([torch.empty(num_bytes, dtype=torch.uint8).share_memory_() for _ in range(SLOTS)])

    def handle(self) -> bytes:
        """What `open` takes in another process of this node; valid while this object lives."""
        from roll.distributed.strategy.sglang_handles import share

        return share([(str(index), slot) for index, slot in enumerate(self._slots)])

    @classmethod
    def open(cls, handle: bytes) -> SharedSlots:
        """The memory another process created."""
        return cls([slot for _, slot in pickle.loads(handle)])

    def bucket(self, index: int, bucket: Bucket) -> torch.Tensor:
        """Memory [bucket.bytes] uint8 for bucket number `index`: that of bucket `index - SLOTS` again."""
        return self._slots[index % SLOTS][: bucket.bytes]


def views_of(flat: torch.Tensor, specs: Sequence[WeightSpec]) -> list[tuple[str, torch.Tensor]]:
    """Tensors that lie one after the other in `flat` [bytes] uint8."""
    views, start = [], 0
    for spec in specs:
        dtype = getattr(torch, spec.dtype)
        stop = start + torch.Size(spec.shape).numel() * dtype.itemsize
        views.append((spec.name, flat[start:stop].view(dtype).view(spec.shape)))
        start = stop
    return views
