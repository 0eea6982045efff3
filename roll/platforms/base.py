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
