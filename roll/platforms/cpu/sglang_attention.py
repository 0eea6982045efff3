"""Attention of SGLang's CPU engine: a C++ kernel over the true lengths, or one padded call for many requests.

SGLang's torch backend loops over requests in Python, which takes most of a decode step of a small model. The kernel
reads the keys of each request where they are in the cache, in decode and in extend. Padded calls serve machines without
a C++ compiler: requests of similar length share one masked `scaled_dot_product_attention`. Query heads that share a key
head become additional queries, so keys and values are gathered once and not repeated per head.

For most models `sglang_model` runs all layers in one call, and this backend is not asked.

Sliding windows, cross attention, encoders and non-causal layers use SGLang's loop.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

from roll.platforms.cpu import matmul, sglang_model, sglang_ops, sglang_sampling
from roll.platforms.cpu.kernels import CpuKernels, Requests
from roll.platforms.cpu.library import BuildError
from roll.platforms.cpu.sglang_batches import MASK_ELEMENTS, AttentionBatch, build_batch, group_by_length

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class BatchedTorchAttention(TorchNativeAttnBackend):  # type: ignore[misc]  # SGLang is not typed
    """SGLang's torch attention backend with batched decode and extend; results are equal up to rounding."""

    def __init__(self, model_runner: Any, kernels: CpuKernels | None = None) -> None:
        """Attends with `kernels`, if there are any."""
        super().__init__(model_runner)
        self._kernels = kernels
        self._requests: Requests | None = None
        self._plan: list[AttentionBatch | int] | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Resets requests and plan; the first layer of a forward pass makes new ones, which its other layers reuse."""
        super().init_forward_metadata(forward_batch)
        self._plan, self._requests = None, None

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        """One query per request. query, output [B, Hq, D]; caches [slots, Hkv, D]; seq_lens [B]."""
        if encoder_lens is not None or is_cross_attn or sliding_window_size is not None:
            stock: torch.Tensor = super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
                scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
            return stock
        if self._attend_true_lengths(
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, None, scaling
        ):
            return output
        if self._plan is None:
            self._plan = _plan(torch.ones_like(seq_lens), seq_lens, req_to_token, req_pool_indices, query, k_cache)
        for batch in self._plan:
            assert isinstance(batch, AttentionBatch), "a single query's mask is never too large"
            _attend(batch, query, output, k_cache, v_cache, scaling)
        return output

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        """New tokens after a cached prefix. query, output [tokens, Hq, D]; caches [slots, Hkv, D]; lengths [B]."""
        if encoder_lens is not None or is_cross_attn or sliding_window_size is not None or not causal:
            stock: torch.Tensor = super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
                extend_seq_lens, encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
            return stock
        if self._attend_true_lengths(
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_seq_lens, scaling
        ):
            return output
        if self._plan is None:
            self._plan = _plan(extend_seq_lens, seq_lens, req_to_token, req_pool_indices, query, k_cache)
        for batch in self._plan:
            if isinstance(batch, AttentionBatch):
                _attend(batch, query, output, k_cache, v_cache, scaling)
                continue
            one, end = [batch], int(extend_seq_lens[: batch + 1].sum())
            span = slice(end - int(extend_seq_lens[batch]), end)
            super()._run_sdpa_forward_extend(
                query[span], output[span], k_cache, v_cache, req_to_token, req_pool_indices[one], seq_lens[one],
                extend_prefix_lens[one], extend_seq_lens[one], None, scaling, enable_gqa, causal,
            )  # fmt: skip
        return output

    def _attend_true_lengths(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_table: torch.Tensor,
        rows: torch.Tensor,
        key_lengths: torch.Tensor,
        query_lengths: torch.Tensor | None,
        scaling: float | None,
    ) -> bool:
        """Writes `output` with the kernel; False without one, and for shapes and types that it does not take."""
        if self._kernels is None or not self._kernels.attends(query, k_cache, v_cache):
            return False
        if self._requests is None:
            self._requests = self._kernels.requests(slot_table, rows, key_lengths, query_lengths)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        self._kernels.attend(query, output, k_cache, v_cache, self._requests, scale)
        return True


def attention_backend(model_runner: Any) -> BatchedTorchAttention:
    """The backend with kernels, and the model's other kernels installed; without them where they cannot be built."""
    try:
        kernels = CpuKernels(model_runner.model_config.head_dim)
    except BuildError as error:
        logger.warning("decoding runs on plain torch operators, at half the speed or less: %s", error)
        return BatchedTorchAttention(model_runner)
    matmul.use_fast_matmul(kernels.linear)
    sglang_ops.register_kernels(kernels)
    sglang_model.fuse_decoder(model_runner, kernels)
    sglang_sampling.use_kernel(kernels)
    return BatchedTorchAttention(model_runner, kernels)


def _plan(
    queries: torch.Tensor,
    keys: torch.Tensor,
    slot_table: torch.Tensor,
    rows: torch.Tensor,
    query: torch.Tensor,
    k_cache: torch.Tensor,
) -> list[AttentionBatch | int]:
    """Batches for all layers of one forward pass; a request with too large a mask is left as its index."""
    heads_per_key = query.shape[1] // k_cache.shape[1]
    lengths, widths = queries.tolist(), keys.tolist()
    present = [index for index, length in enumerate(lengths) if length > 0]
    groups = group_by_length([lengths[i] for i in present], [widths[i] for i in present], heads_per_key)
    starts = torch.cumsum(queries, 0) - queries
    slots = slot_table[rows, : max(widths)]
    plan: list[AttentionBatch | int] = []
    for group in groups:
        requests = [present[i] for i in group]
        first = requests[0]
        if len(requests) == 1 and lengths[first] * widths[first] * heads_per_key > MASK_ELEMENTS:
            plan.append(first)
        else:
            plan.append(build_batch(requests, starts, queries, keys, slots, heads_per_key, query.dtype))
    return plan


def _attend(
    batch: AttentionBatch,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scaling: float | None,
) -> None:
    """Writes the attention of one group into `output`; query heads that share a key head are additional queries."""
    requests, longest = len(batch.requests), batch.bias.shape[-1]
    heads, key_heads = query.shape[1], k_cache.shape[1]
    queries = query.index_select(0, batch.queries).view(requests, -1, key_heads, heads // key_heads, query.shape[2])
    queries = queries.permute(0, 2, 3, 1, 4).flatten(2, 3)
    keys, values = (
        cache.flatten(1)
        .index_select(0, batch.keys)
        .view(requests, longest, key_heads, -1)
        .transpose(1, 2)
        .to(query.dtype)
        for cache in (k_cache, v_cache)
    )
    result = scaled_dot_product_attention(queries, keys, values, attn_mask=batch.bias, scale=scaling)
    result = result.view(requests, key_heads, heads // key_heads, -1, values.shape[3]).permute(0, 3, 1, 2, 4)
    result = result.reshape(-1, heads, values.shape[3])
    output.index_copy_(0, batch.targets, result.index_select(0, batch.filled).to(output.dtype))
