"""SGLang's RMSNorm, rotary embedding and SwiGLU on a CPU engine, each as one call of a kernel in float32.

SGLang's own CPU forms are several torch operators each, whose overhead is most of a decode step of a small model. What
a kernel does not take (half precision, other options) runs in SGLang's form.
"""

from __future__ import annotations

from typing import Any

import torch

from roll.platforms.cpu.kernels import CpuKernels

PLATFORM_KEY = "native"
"""SGLang's name of operators of our platform; see `SglangCpuPlatform`, which inherits it."""


def register_kernels(kernels: CpuKernels) -> None:
    """Registers the kernels for all models of this process; call it before the first forward pass."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    def rms_norm(
        op: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
        quant_linear: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """SGLang passes the linear that follows as `quant_linear`, for kernels that also round its input to FP8."""
        tensors = (x, op.weight, x if residual is None else residual)
        plain = op.variance_size_override is None and op.override_orig_dtype is None
        plain = plain and x.shape[-1] == op.hidden_size and post_residual_addition is None
        if not plain or any(tensor.dtype != torch.float32 for tensor in tensors):
            native: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
            native = op.forward_native(x, residual, post_residual_addition, quant_linear)
            return native
        out, total = kernels.rms_norm(x, op.weight, op.variance_epsilon, residual)
        return out if total is None else (out, total)

    def rotate(
        op: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *further: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plain = op.is_neox_style and op.rotary_dim == op.head_size == kernels.head_dim
        plain = plain and positions.dtype == torch.int64 and positions.dim() == 1 and query.dim() == key.dim() == 2
        table = op.cos_sin_cache
        plain = plain and all(option is None for option in (*further, *options.values()))
        if not plain or {query.dtype, key.dtype, table.dtype} != {torch.float32}:
            native: tuple[torch.Tensor, torch.Tensor] = op.forward_native(positions, query, key, *further, **options)
            return native
        return kernels.rotate(query, positions, table), kernels.rotate(key, positions, table)

    def silu_multiply(op: Any, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            native: torch.Tensor = op.forward_native(x)
            return native
        return kernels.silu_multiply(x)

    for kind, function in ((RMSNorm, rms_norm), (RotaryEmbedding, rotate), (SiluAndMul, silu_multiply)):
        BaseFusedOp.register_oot_forward(kind, function, PLATFORM_KEY)
