"""CPU memory that several processes of a node have open, and offers of tensors that lie in it.

Torch shares CPU memory by a name that a helper process keeps, and gives up when that process is not scheduled within a
second; an engine that is told of such memory on a busy machine then dies. Here memory has no name: who made it holds a
descriptor, others open that through /proc, and the kernel frees it when nobody has it open any more.
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
"""What an offer begins with; neither a pickle nor base64 does."""

KEPT = 8
"""Memories a process keeps open: mapping one anew for every offer would cost more than reading it."""


@dataclass(frozen=True)
class Placed:
    """Where a tensor lies in a memory: its first byte, its shape, and its dtype without `torch.`."""

    name: str
    start: int
    shape: tuple[int, ...]
    dtype: str


class SharedMemory:
    """Memory of this node.

    Attributes:
        tensor: all of it, [num_bytes] uint8.
        address: by which another process of the same user opens it, as long as the one that made it lives.
    """

    def __init__(self, descriptor: int, num_bytes: int, address: str) -> None:
        """Maps what the descriptor stands for."""
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.tensor = torch.frombuffer(mmap.mmap(descriptor, num_bytes, flags=flags), dtype=torch.uint8)
        self.address = address

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """New memory, all zeros."""
        token = f"roll-{uuid.uuid4().hex}"
        descriptor = os.memfd_create(token)
        os.ftruncate(descriptor, num_bytes)
        return cls(descriptor, num_bytes, f"/proc/{os.getpid()}/fd/{descriptor} {token}")

    @classmethod
    def open(cls, address: str) -> SharedMemory:
        """Memory that another process made; opened once, however often it is asked for.

        Raises:
            OSError: it is gone.
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
            while len(_opened) >= KEPT:
                del _opened[next(iter(_opened))]
            _opened[address] = memory
        return _opened[address]

    def view(self, placed: Placed) -> torch.Tensor:
        """The tensor that lies there."""
        dtype: torch.dtype = getattr(torch, placed.dtype)
        size = torch.Size(placed.shape).numel() * dtype.itemsize
        return self.tensor[placed.start : placed.start + size].view(dtype).view(placed.shape)


_opened: dict[str, SharedMemory] = {}


def offer(memory: SharedMemory, tensors: Iterable[Placed]) -> bytes:
    """What tells another process of these tensors; see `accept`."""
    placed = [[item.name, item.start, list(item.shape), item.dtype] for item in tensors]
    return MAGIC + json.dumps({"address": memory.address, "tensors": placed}).encode()


def is_offer(data: bytes) -> bool:
    """Whether `offer` made it."""
    return data.startswith(MAGIC)


def accept(data: bytes) -> list[tuple[str, torch.Tensor]]:
    """The tensors of an offer by name: views of the memory, not copies.

    Raises:
        OSError: the memory is gone.
    """
    content = json.loads(data[len(MAGIC) :])
    memory = SharedMemory.open(content["address"])
    return [
        (name, memory.view(Placed(name, start, tuple(shape), dtype)))
        for name, start, shape, dtype in content["tensors"]
    ]
