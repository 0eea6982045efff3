"""A machine without accelerators: devices are CPU slots and ranks talk over gloo."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from roll.platforms.base import Platform

if TYPE_CHECKING:
    import torch


class CpuPlatform(Platform):
    """Real engines on torch's CPU operators."""

    name: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"
    collective_backend: ClassVar[str] = "gloo"

    def device_count(self) -> int:
        """Cores this process may run on."""
        return len(os.sched_getaffinity(0))

    def torch_device(self, local_index: int) -> torch.device:
        """The CPU, whichever slot is asked for."""
        import torch

        return torch.device("cpu")

    def memory(self) -> dict[str, int]:
        """Resident bytes of this process now and at its peak, and the node's total and available bytes."""
        import resource

        import psutil

        node = psutil.virtual_memory()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        used = psutil.Process().memory_info().rss
        return {"used": used, "peak": max(used, peak), "total": node.total, "available": node.available}

    def engine_arguments(self) -> dict[str, Any]:
        """SGLang on torch operators, without CUDA graphs; an idle engine sleeps instead of holding a core."""
        return {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "sleep_on_idle": True,
        }

    def prepare_megatron(self) -> None:
        """Applies the CPU layer, once per process."""
        from roll.platforms.megatron_cpu import put_megatron_on_cpu

        put_megatron_on_cpu()
