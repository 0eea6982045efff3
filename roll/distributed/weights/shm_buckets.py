"""Buckets in shared memory: CPU memory that several processes of one node have open, and handles of GPU tensors."""

from __future__ import annotations

import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import psutil
import torch
from torch.multiprocessing import reductions  # its import teaches ForkingPickler about tensors

from roll.distributed.weights.plan import Bucket, WeightSpec, spec_bytes
from roll.platforms.cpu.shared_memory import SharedMemory, TensorLocation, make_handle

DEVICE_ARGUMENT = 6
"""Position of the GPU's number among the arguments from which torch rebuilds a CUDA tensor in another process."""

BUFFERS = 2
"""The engines load one bucket while the training ranks write the next."""


class SharedMemoryError(RuntimeError):
    """The node has too little memory for the buckets."""


class ShmBuckets:
    """Two buffers of CPU memory, used in turn by weight updates: mapping new pages costs more than writing them."""

    def __init__(self, buffers: list[SharedMemory]) -> None:
        self._buffers = buffers
        self.num_bytes = len(buffers[0].tensor)

    @classmethod
    def create(cls, num_bytes: int) -> ShmBuckets:
        """New memory for buckets of up to `num_bytes`.

        Raises:
            SharedMemoryError: the node has too little, with what to change.
        """
        free = psutil.virtual_memory().available
        if free < BUFFERS * num_bytes:
            raise SharedMemoryError(
                f"{free >> 20} MB of memory are free and {BUFFERS} buckets need {BUFFERS * num_bytes >> 20} MB; "
                "lower model_update_buffer_size_mb, or give the machine more memory"
            )
        return cls([SharedMemory.create(num_bytes) for _ in range(BUFFERS)])

    def addresses(self) -> list[str]:
        """The argument of `open` in another process of this node; valid while this process lives."""
        return [buffer.address for buffer in self._buffers]

    @classmethod
    def open(cls, addresses: list[str]) -> ShmBuckets:
        return cls([SharedMemory.open(address) for address in addresses])

    def bucket(self, index: int, bucket: Bucket) -> torch.Tensor:
        """Memory [bucket.bytes] uint8 of bucket number `index`; it overwrites bucket `index - BUFFERS`."""
        return self._buffers[index % BUFFERS].tensor[: bucket.bytes]

    def handle(self, index: int, bucket: Bucket) -> bytes:
        """Handle by which an engine opens the tensors of bucket number `index`."""
        return make_handle(self._buffers[index % BUFFERS], tensor_locations(bucket.specs))


def tensor_locations(specs: Sequence[WeightSpec]) -> list[TensorLocation]:
    """Locations of tensors that are stored one after the other."""
    locations, start = [], 0
    for spec in specs:
        locations.append(TensorLocation(spec.name, start, tuple(spec.shape), spec.dtype))
        start += spec_bytes(spec)
    return locations


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of the tensors one after the other, [bytes] uint8, as `views_of` and SGLang read it."""
    return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def views_of(flat: torch.Tensor, specs: Sequence[WeightSpec]) -> list[tuple[str, torch.Tensor]]:
    """Named views of tensors that are stored one after the other in `flat` [bytes] uint8."""
    views = []
    for location, spec in zip(tensor_locations(specs), specs, strict=True):
        dtype: torch.dtype = getattr(torch, location.dtype)
        part = flat[location.start : location.start + spec_bytes(spec)]
        views.append((location.name, part.view(dtype).view(location.shape)))
    return views


def cuda_ipc_handle(named_tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """A handle by which an engine of this node opens GPU tensors without a copy; valid while the tensors live here.

    Tensors that are views of one buffer share one IPC handle, so a bucket costs one. The GPU is named by its UUID,
    which SGLang looks up: torch's number is that of another GPU in a process that sees other GPUs.
    """
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer)
    pickler.dispatch_table[torch.Tensor] = _reduce_with_uuid
    pickler.dump([(name, tensor.detach()) for name, tensor in named_tensors])
    return buffer.getvalue()


def _reduce_with_uuid(tensor: torch.Tensor) -> tuple[Any, ...]:
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if tensor.device.type == "cuda":
        number = arguments[DEVICE_ARGUMENT]
        uuid = str(torch.cuda.get_device_properties(number).uuid)
        arguments = (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])
    return rebuild, arguments
