"""A machine with NVIDIA GPUs: one device per rank, NCCL between them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from roll.platforms.base import Platform

if TYPE_CHECKING:
    import torch


class CudaPlatform(Platform):
    """Engines on their own kernels."""

    name: ClassVar[str] = "cuda"
    device_type: ClassVar[str] = "cuda"
    collective_backend: ClassVar[str] = "nccl"

    def device_count(self) -> int:
        """Visible GPUs."""
        import torch

        return torch.cuda.device_count()

    def torch_device(self, local_index: int) -> torch.device:
        """The visible GPU of that index."""
        import torch

        return torch.device("cuda", local_index)

    def memory(self) -> dict[str, int]:
        """Bytes torch has allocated on the current GPU now and at its peak, and what the GPU has and has left."""
        import torch

        available, total = torch.cuda.mem_get_info()
        return {
            "used": torch.cuda.memory_allocated(),
            "peak": torch.cuda.max_memory_allocated(),
            "total": total,
            "available": available,
        }

    def engine_arguments(self) -> dict[str, Any]:
        """Nothing is forced: SGLang chooses by the GPU."""
        return {}

    def prepare_megatron(self) -> None:
        """One hardware queue, so that collectives start before the matrix products that hide them."""
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
