"""Two buckets of CPU memory that several processes of a node have open, used in turn."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch

from roll.distributed.strategy.base import WeightSpec
from roll.distributed.weight_sync.plan import Bucket
from roll.distributed.weight_sync.stage_tensors import SendError
from roll.platforms.shared_memory import SharedMemory, TensorLocation, make_handle

SLOTS = 2
"""One bucket is loaded while the next is written."""


class SharedSlots:
    """The same pages serve every publish, since mapping new ones costs more than writing them."""

    def __init__(self, slots: list[SharedMemory]) -> None:
        """Takes memories of one size."""
        self._slots = slots
        self.num_bytes = len(slots[0].tensor)

    @classmethod
    def create(cls, num_bytes: int) -> SharedSlots:
        """New memory for buckets of up to `num_bytes`.

        Raises:
            SendError: the node has too little, with what to change.
        """
        free = psutil.virtual_memory().available
        if free < SLOTS * num_bytes:
            raise SendError(
                f"{free >> 20} MB of memory are free and {SLOTS} buckets need {SLOTS * num_bytes >> 20} MB; "
                "lower model_update_buffer_size_mb, or give the machine more memory"
            )
        return cls([SharedMemory.create(num_bytes) for _ in range(SLOTS)])

    def handle(self) -> list[str]:
        """What `open` takes in another process of this node; valid while this process lives."""
        return [slot.address for slot in self._slots]

    @classmethod
    def open(cls, handle: list[str]) -> SharedSlots:
        """The memory another process created."""
        return cls([SharedMemory.open(address) for address in handle])

    def bucket(self, index: int, bucket: Bucket) -> torch.Tensor:
        """Memory [bucket.bytes] uint8 for bucket number `index`: that of bucket `index - SLOTS` again."""
        return self._slots[index % SLOTS].tensor[: bucket.bytes]

    def offer(self, index: int, bucket: Bucket) -> bytes:
        """What tells an engine of the tensors of bucket number `index`."""
        return make_handle(self._slots[index % SLOTS], placed(bucket.specs))


def placed(specs: Sequence[WeightSpec]) -> list[TensorLocation]:
    """Places of tensors that lie one after the other."""
    places, start = [], 0
    for spec in specs:
        places.append(TensorLocation(spec.name, start, tuple(spec.shape), spec.dtype))
        start += torch.Size(spec.shape).numel() * getattr(torch, spec.dtype).itemsize
    return places


def views_of(flat: torch.Tensor, specs: Sequence[WeightSpec]) -> list[tuple[str, torch.Tensor]]:
    """Tensors that lie one after the other in `flat` [bytes] uint8."""
    views = []
    for place in placed(specs):
        dtype = getattr(torch, place.dtype)
        stop = place.start + torch.Size(place.shape).numel() * dtype.itemsize
        views.append((place.name, flat[place.start : stop].view(dtype).view(place.shape)))
    return views
