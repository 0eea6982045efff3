"""SGLang's view of a machine without an accelerator, with its portable torch operators in place of compiled kernels.

`ROLL_CPU_ATTENTION=stock` in the environment of an engine takes SGLang's own loop over requests instead of the
batched attention; `batched` is the default. It exists to compare the two (benchmarks/generate.py).
"""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from roll.platforms import shared_memory

ATTENTION_VARIABLE = "ROLL_CPU_ATTENTION"
ATTENTION_CHOICES = ("batched", "stock")


def _nothing_to_wait_for(device: Any = None) -> None:
    """Operators on a CPU are done when they return."""


def _unpadded(model_config: Any, attribute: str, multiple: int) -> Any:
    return model_config


def _accept_offers() -> None:
    """Lets `update_weights_from_tensor` take offers of shared memory beside SGLang's own handles."""
    from sglang.srt.utils import MultiprocessingSerializer

    own = MultiprocessingSerializer.deserialize

    def deserialize(data: Any) -> Any:
        if isinstance(data, bytes) and shared_memory.is_offer(data):
            return shared_memory.accept(data)
        return own(data)

    MultiprocessingSerializer.deserialize = staticmethod(deserialize)


class SglangCpuPlatform(SRTPlatform):
    """The `cpu` device for SGLang; one NUMA node's memory is shared by all engines on it."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def init_backend(self) -> None:
        """Puts the batched attention, the seeded sampler and shared memory in place, in an engine's processes.

        Two functions of SGLang do not suit torch operators and are replaced. Its weight checksums call
        `torch.cuda.synchronize` whatever the device: that becomes a no-op. On a CPU it pads the intermediate size of
        a model to what its compiled kernels want: that is left as it is, so that parameters keep their shapes.

        Raises:
            ValueError: `ROLL_CPU_ATTENTION` is neither `batched` nor `stock`.
        """
        from sglang.srt.configs import update_config

        from roll.platforms import sglang_cpu_sampling

        torch.cuda.synchronize = _nothing_to_wait_for
        update_config.update_intermediate_size = _unpadded
        sglang_cpu_sampling.install()
        _accept_offers()
        choice = os.environ.get(ATTENTION_VARIABLE, ATTENTION_CHOICES[0])
        if choice not in ATTENTION_CHOICES:
            raise ValueError(f"{ATTENTION_VARIABLE}={choice!r}: use one of {', '.join(ATTENTION_CHOICES)}")
        if choice == "batched":
            from sglang.srt.layers.attention.attention_registry import register_attention_backend

            from roll.platforms.sglang_cpu_attention import BatchedTorchAttention

            register_attention_backend("torch_native")(BatchedTorchAttention)

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes of main memory."""
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        """Bytes of main memory in use by anything."""
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        """Free and total bytes of main memory."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device(self, device_id: int = 0) -> torch.device:
        """The one CPU device."""
        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None:
        """Nothing to choose."""

    def get_device_name(self, device_id: int = 0) -> str:
        """`cpu`."""
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        """`cpu`: there is only one."""
        return "cpu"

    def get_device_capability(self, device_id: int = 0) -> None:
        """No compute capability."""
        return None

    def get_default_attention_backend(self) -> str:
        """SGLang's portable attention, which `init_backend` replaces by the batched one."""
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        """SGLang's own pool works on CPU tensors."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        """SGLang's token allocator behind the signature of a paged one; the page size is 1."""
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

        class TokenAllocator(TokenToKVPoolAllocator):
            def __init__(
                self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool
            ) -> None:
                if page_size != 1:
                    raise ValueError(f"strategy_config.page_size: {page_size} is not possible on cpu; use 1")
                super().__init__(size, dtype, device, kvcache, need_sort)

        return TokenAllocator
