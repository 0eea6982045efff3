"""Patches torch so that Megatron-Core runs on a machine without CUDA.

Megatron-Core 0.16 calls `torch.cuda` unconditionally in places that also make sense on a CPU. `REPLACED` lists every
function that is replaced, with the place in Megatron-Core that needs it; nothing else is changed. The patch affects
the whole process, so only processes that run Megatron ranks apply it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")

REPLACED: dict[str, str] = {
    "torch.cuda.current_device": "transformer and tensor_parallel layers, rotary embedding, buffers: device=",
    "torch.cuda.current_stream": "pipeline_parallel/p2p_communication, distributed/param_and_grad_buffer",
    "torch.cuda.default_stream": "distributed/param_and_grad_buffer",
    "torch.cuda.Stream": "distributed/distributed_data_parallel, async_utils; moe/token_dispatcher: record_event",
    "torch.cuda.Event": "transformer/cuda_graphs at import, timers",
    "torch.cuda.stream": "distributed/param_and_grad_buffer",
    "torch.cuda.synchronize": "pipeline_parallel/p2p_communication, dist_checkpointing/strategies/filesystem_async",
    "torch.cuda.empty_cache": "dist_checkpointing/strategies/filesystem_async",
    "torch.cuda.set_device": "dist_checkpointing worker processes",
    "torch.cuda.nvtx.range_push": "utils.nvtx_range_push",
    "torch.cuda.nvtx.range_pop": "utils.nvtx_range_pop",
    "torch.cuda.memory_allocated": "optimizer and distributed logging",
    "torch.cuda.memory_reserved": "optimizer and distributed logging",
    "torch.cuda.FloatTensor": "optimizer/optimizer.py: tensor type lists",
    "torch.cuda.HalfTensor": "optimizer/optimizer.py: tensor type lists",
    "torch.cuda.BFloat16Tensor": "optimizer/optimizer.py: tensor type lists",
    "torch.cuda.manual_seed": "tensor_parallel/random.py: the tracker's seeds",
    "torch.cuda.get_rng_state": "tensor_parallel/random.py: the tracker's states",
    "torch.cuda.set_rng_state": "tensor_parallel/random.py: activation recomputation",
    "torch.cuda.random.get_rng_state": "tensor_parallel/random.py: _get_cuda_rng_state",
    "torch.cuda.random.set_rng_state": "tensor_parallel/random.py: activation recomputation",
    "torch.Tensor.cuda": "dist_checkpointing, optimizer/distrib_optimizer: moves of gathered state",
    "torch.nn.Module.cuda": "transformer modules that move themselves",
    "torch.Tensor.type": "optimizer: parameters are sorted by the text torch.cuda.FloatTensor",
    "torch.zeros": "pipeline_parallel/schedules, optimizer/clip_grads: device='cuda'",
    "torch.ones": "transformer/utils: device='cuda'",
    "torch.tensor": "optimizer/optimizer.py, rerun_state_machine, dist_checkpointing: device='cuda'",
    "torch.empty": "dist_checkpointing/exchange_utils: device='cuda'",
    "torch.empty_like": "dist_checkpointing/exchange_utils: device='cuda'",
    "megatron.core.tensor_parallel.random._get_cuda_rng_state": "the tracker's fork and recomputation",
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": "the tracker's fork and recomputation",
    "megatron.core.tensor_parallel.mappings._gather_along_first_dim": "moe/token_dispatcher: tensors of unequal sizes",
    "megatron.core.tensor_parallel.mappings._reduce_scatter_along_first_dim": "the same, in the other direction",
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": "moe_utils: read although only imported with an engine",
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": "split sizes as numpy, also of a CPU",
}
"""Full name of each replaced function or class -> the parts of Megatron-Core that need the replacement."""

_applied = False


class _NoOp:
    """In place of a CUDA stream or event: every method does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def patch_megatron_for_cpu() -> None:
    """Replaces everything in `REPLACED`; a second call does nothing. Call it before importing Megatron-Core."""
    global _applied
    if _applied:
        return
    _applied = True
    _replace_streams_and_devices(torch.cuda)
    _replace_random_state(torch.cuda)
    _replace_tensor_methods()
    # torch caches the set of factories that `with torch.device(...)` redirects when the set is first needed. The cache
    # must contain the original factories: with the replacements instead, `torch.device("meta")` as a context would not
    # affect the originals that the replacements call, and transformers would load models with uninitialized buffers.
    _device_constructors()
    for factory in ("zeros", "ones", "tensor", "empty", "empty_like"):
        setattr(torch, factory, _on_cpu(getattr(torch, factory)))
    import megatron.core.tensor_parallel.random as megatron_random

    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    _replace_in_dispatchers()


def _replace_streams_and_devices(cuda: Any) -> None:
    """Streams, events, synchronization and memory figures.

    Each name gets its own object: torch._dynamo fails if one object has two names.
    """
    cuda.current_device = lambda: CPU
    cuda.current_stream = lambda *args, **kwargs: _NoOp()
    cuda.default_stream = lambda *args, **kwargs: _NoOp()
    cuda.Stream = type("Stream", (_NoOp,), {"record_event": lambda self, *args: _NoOp()})
    cuda.Event = type("Event", (_NoOp,), {})
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.empty_cache = lambda *args, **kwargs: None
    cuda.set_device = lambda *args, **kwargs: None
    cuda.nvtx.range_push = lambda *args, **kwargs: None
    cuda.nvtx.range_pop = lambda *args, **kwargs: None
    cuda.memory_allocated = lambda *args, **kwargs: 0
    cuda.memory_reserved = lambda *args, **kwargs: 0


def _replace_in_dispatchers() -> None:
    """What the dispatchers of tokens to experts take for granted: Transformer Engine, and tensors on a GPU."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = moved
    mappings._gather_along_first_dim = _gather_uneven(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_uneven(mappings._reduce_scatter_along_first_dim)


def _gather_uneven(gather: Callable[..., Any]) -> Callable[..., Any]:
    """`gather`, also of tensors of different sizes, which gloo does not take."""

    def gathered(
        tensor: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(tensor, group, output_split_sizes, *args, **kwargs)
        most = max(output_split_sizes)
        parts = [tensor.new_empty(most, *tensor.shape[1:]) for _ in output_split_sizes]
        padding = tensor.new_zeros(most - len(tensor), *tensor.shape[1:])
        torch.distributed.all_gather(parts, torch.cat([tensor, padding]), group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    return gathered


def _reduce_scatter_uneven(scatter: Callable[..., Any]) -> Callable[..., Any]:
    """`scatter`, also into tensors of different sizes."""

    def scattered(
        tensor: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(tensor, group, input_split_sizes, *args, **kwargs)
        whole = tensor.clone()
        torch.distributed.all_reduce(whole, group=group)
        return whole.split(list(input_split_sizes))[group.rank()].clone()

    return scattered


def _replace_random_state(cuda: Any) -> None:
    """Replaces the random state of CUDA by that of torch's CPU generator."""
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _replace_tensor_methods() -> None:
    """Moves to CUDA do nothing, and `Tensor.type()` returns the CUDA name that Megatron's optimizers compare with."""
    cuda: Any = torch.cuda
    cuda.FloatTensor, cuda.HalfTensor, cuda.BFloat16Tensor = torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    original_type = tensor.type
    tensor.cuda = lambda self, *args, **kwargs: self
    module.cuda = lambda self, *args, **kwargs: self

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original_type(self, *args, **kwargs)
        return original_type(self).replace("torch.", "torch.cuda.")

    tensor.type = tensor_type


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`factory` with device="cuda" replaced by the CPU."""

    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    on_cpu.__name__ = factory.__name__
    return on_cpu
