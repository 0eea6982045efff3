"""The questions a platform answers."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch


class Platform(ABC):
    """One kind of machine: its devices, how ranks on it talk, and how engines are told about it."""

    name: ClassVar[str]
    """As in the YAML key `platform`."""
    device_type: ClassVar[str]
    """As in `torch.device`."""
    collective_backend: ClassVar[str]
    """As in `torch.distributed.init_process_group`."""

    @abstractmethod
    def device_count(self) -> int:
        """Devices of this node: cores the process may use, or visible GPUs."""

    @abstractmethod
    def torch_device(self, local_index: int) -> torch.device:
        """The device number `local_index` of those this process sees."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes: `used` and `peak` by this process on its device, `total` and `available` of the device."""

    @abstractmethod
    def engine_arguments(self) -> dict[str, Any]:
        """SGLang's ServerArgs that this platform forces."""

    @abstractmethod
    def prepare_megatron(self) -> None:
        """Makes Megatron-Core usable in this process; call it before importing Megatron-Core."""

    def setup_process(self, cores: Sequence[int], threads: int) -> None:
        """Pins this process to `cores` and sets torch's and OpenMP's thread count, together.

        More threads than cores in a pinned process spin against each other: 405 tokens/s instead of 9,630 for two
        OpenMP threads on one core.

        Args:
            cores: core numbers to run on; empty leaves the affinity alone.
            threads: threads of one operator; 0 takes the number of cores given, or leaves the count alone.

        Raises:
            ValueError: more threads than cores.
        """
        if cores and threads > len(cores):
            raise ValueError(f"threads: {threads} threads cannot run on {len(cores)} cores {list(cores)}")
        if cores:
            os.sched_setaffinity(0, cores)
        threads = threads or len(cores)
        if threads:
            import torch

            os.environ["OMP_NUM_THREADS"] = str(threads)
            torch.set_num_threads(threads)


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
