"""Tensors offered to engines on the same node without a copy through a socket: shared memory, or CUDA IPC."""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing

FILE_SYSTEM = "file_system"
"""Torch's way to share memory by name; the other passes descriptors and needs both processes to share a secret."""


def share(named_tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """A handle by which an engine of this node opens the tensors; valid while the tensors live here.

    Tensors that are views of one buffer share one piece of memory, so a bucket costs one. A CPU tensor that is not yet
    in shared memory is moved there in place, so that a later change of it is seen by whoever opened it.
    """
    if not any(tensor.is_cuda for _, tensor in named_tensors):
        torch.multiprocessing.set_sharing_strategy(FILE_SYSTEM)
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump([(name, tensor.detach()) for name, tensor in named_tensors])
    return buffer.getvalue()
