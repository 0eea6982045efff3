"""CPU memory shared between processes of a node, and handles of the tensors in it.

Torch's own shared CPU memory depends on a helper process and fails if that process is not scheduled within a second,
which crashes engines on a busy machine. The memory here is anonymous (memfd): its creator holds a file descriptor,
other processes open it through /proc, and the kernel frees it when no process has it open.
"""

from __future__ import annotations

import json
import mmap
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import torch

MAGIC = b"\0roll\n"
"""First bytes of a handle; neither a pickle nor base64 text begins with them."""

MAX_OPEN = 8
"""Number of memories a process keeps open, because mapping one again for every handle costs more than reading it."""


@dataclass(frozen=True)
class TensorLocation:
    """Where a tensor is in shared memory, from its first byte `start`; its dtype is without `torch.`."""

    name: str
    start: int
    shape: tuple[int, ...]
    dtype: str


class SharedMemory:
    """One block of shared memory.

    Attributes:
        tensor: all of it, [num_bytes] uint8.
        address: with it another process of the same user can `open` the memory while its creator is alive.
    """

    def __init__(self, descriptor: int, num_bytes: int, address: str) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.tensor = torch.frombuffer(mmap.mmap(descriptor, num_bytes, flags=flags), dtype=torch.uint8)
        self.address = address

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """New memory, filled with zeros."""
        token = f"roll-{uuid.uuid4().hex}"
        descriptor = os.memfd_create(token)
        os.ftruncate(descriptor, num_bytes)
        return cls(descriptor, num_bytes, f"/proc/{os.getpid()}/fd/{descriptor} {token}")

    @classmethod
    def open(cls, address: str) -> SharedMemory:
        """Memory that another process created; repeated calls return the same object.

        Raises:
            OSError: its creator has closed it.
        """
        if address not in _opened:
            path, _, token = address.partition(" ")
            if token not in os.readlink(path):
                raise FileNotFoundError(f"{path} is no longer {token}: its owner closed it")
            descriptor = os.open(path, os.O_RDWR)
            try:
                memory = cls(descriptor, os.fstat(descriptor).st_size, address)
            finally:
                os.close(descriptor)
            while len(_opened) >= MAX_OPEN:
                del _opened[next(iter(_opened))]
            _opened[address] = memory
        return _opened[address]

    def view(self, location: TensorLocation) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, location.dtype)
        size = torch.Size(location.shape).numel() * dtype.itemsize
        return self.tensor[location.start : location.start + size].view(dtype).view(location.shape)


_opened: dict[str, SharedMemory] = {}


def make_handle(memory: SharedMemory, tensors: Iterable[TensorLocation]) -> bytes:
    """Serialized handle of these tensors, for `open_handle` in another process."""
    locations = [[item.name, item.start, list(item.shape), item.dtype] for item in tensors]
    return MAGIC + json.dumps({"address": memory.address, "tensors": locations}).encode()


def is_handle(data: bytes) -> bool:
    return data.startswith(MAGIC)


def open_handle(data: bytes) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors of a handle; the tensors are views of the memory, not copies.

    Raises:
        OSError: the creator of the memory has closed it.
    """
    content = json.loads(data[len(MAGIC) :])
    memory = SharedMemory.open(content["address"])
    return [
        (name, memory.view(TensorLocation(name, start, tuple(shape), dtype)))
        for name, start, shape, dtype in content["tensors"]
    ]
