"""GPU tensors offered to engines on the same node without a copy: handles of CUDA IPC."""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing  # its import teaches ForkingPickler about tensors


def share(named_tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """A handle by which an engine of this node opens GPU tensors; valid while the tensors live here.

    Tensors that are views of one buffer share one piece of memory, so a bucket costs one. Memory of a CPU is offered by
    `roll.platforms.shared_memory`.
    """
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump([(name, tensor.detach()) for name, tensor in named_tensors])
    return buffer.getvalue()
