"""SGLang's platform class for a machine without GPUs, with torch operators instead of compiled kernels.

`ROLL_CPU_ATTENTION` in the environment of an engine selects its operators: `kernel`, the default, those in C++, for
attention over the true lengths and, for most models, all layers and sampling in one call each; `batched`, attention by
padded torch operators; `stock`, SGLang as it is, which loops over requests. benchmarks/generate.py compares them.
"""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from roll.platforms.cpu import shared_memory

ATTENTION_VARIABLE = "ROLL_CPU_ATTENTION"
ATTENTION_CHOICES = ("kernel", "batched", "stock")


def _synchronize(device: Any = None) -> None:
    """Replaces torch.cuda.synchronize; operators on a CPU are synchronous."""


def _keep_intermediate_size(model_config: Any, attribute: str, multiple: int) -> Any:
    return model_config


def _accept_shared_memory_handles() -> None:
    """Makes `update_weights_from_tensor` accept handles of shared memory in addition to SGLang's own."""
    from sglang.srt.utils import MultiprocessingSerializer

    original = MultiprocessingSerializer.deserialize

    def deserialize(data: Any) -> Any:
        if isinstance(data, bytes) and shared_memory.is_handle(data):
            return shared_memory.open_handle(data)
        return original(data)

    MultiprocessingSerializer.deserialize = staticmethod(deserialize)


def _allocate_plain_memory() -> None:
    """Lets an engine record experts in memory of its own: SGLang would pin it for a device."""
    from sglang.srt.mem_cache.pool_host import common

    def allocate(dims: Any, dtype: torch.dtype, device: str, pin_memory: bool, allocator: Any) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


class _UnpinnedTorch:
    """torch, whose factories ignore `pin_memory`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.tensor(*arguments, **options)

    def zeros(self, *arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.zeros(*arguments, **options)


def _use_plain_memory_for_adapters() -> None:
    """Lets adapters be in memory that is not pinned, which torch refuses where there is no accelerator."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    layers.torch = torch_backend.torch = _UnpinnedTorch()
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


class SglangCpuPlatform(SRTPlatform):  # type: ignore[misc]  # SGLang is not typed
    """The `cpu` device for SGLang. All engines of a node share its main memory."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def init_backend(self) -> None:
        """Installs the chosen attention, the seeded sampler and handles of shared memory in an engine's process.

        Two functions are replaced because they assume CUDA or compiled kernels: SGLang's weight checksums call
        `torch.cuda.synchronize` on every device, which becomes a no-op; and on a CPU SGLang pads the intermediate size
        of a model for its compiled kernels, which is turned off so that parameters keep their shapes.

        Raises:
            ValueError: `ROLL_CPU_ATTENTION` is none of ATTENTION_CHOICES.
        """
        from sglang.srt.configs import update_config

        from roll.platforms.cpu import sglang_sampling

        torch.cuda.synchronize = _synchronize
        update_config.update_intermediate_size = _keep_intermediate_size
        sglang_sampling.use_sampling_seeds()
        _accept_shared_memory_handles()
        _allocate_plain_memory()
        _use_plain_memory_for_adapters()
        choice = os.environ.get(ATTENTION_VARIABLE, ATTENTION_CHOICES[0])
        if choice not in ATTENTION_CHOICES:
            raise ValueError(f"{ATTENTION_VARIABLE}={choice!r}: use one of {', '.join(ATTENTION_CHOICES)}")
        if choice != "stock":
            os.environ.setdefault("SGLANG_EAGER_INPUT_NO_COPY", "1")  # a copy of each batch is for CUDA graphs
            from sglang.srt.layers.attention.attention_registry import register_attention_backend

            from roll.platforms.cpu.sglang_attention import BatchedTorchAttention, attention_backend

            register_attention_backend("torch_native")(
                attention_backend if choice == "kernel" else BatchedTorchAttention
            )

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device(self, device_id: int = 0) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None:
        """Does nothing: there is one device."""

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_capability(self, device_id: int = 0) -> None:
        return None

    def get_default_attention_backend(self) -> str:
        """SGLang's torch attention; `init_backend` registers another one under the same name."""
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        """SGLang's default pool, which works on CPU tensors."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        pool: type = MHATokenToKVPool
        return pool

    def get_paged_allocator_cls(self) -> type:
        """SGLang's token allocator with the signature of a paged one; the page size must be 1."""
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

        class TokenAllocator(TokenToKVPoolAllocator):  # type: ignore[misc]
            def __init__(
                self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool
            ) -> None:
                if page_size != 1:
                    raise ValueError(f"strategy_config.page_size: {page_size} is not possible on cpu; use 1")
                super().__init__(size, dtype, device, kvcache, need_sort)

        return TokenAllocator
