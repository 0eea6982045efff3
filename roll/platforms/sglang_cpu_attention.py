"""Attention of SGLang's CPU engine: one padded call for many requests, in decode and in extend.

The stock torch backend loops over requests in Python, which is most of the time of a decode step on a small model.
Here requests of similar length share one masked `scaled_dot_product_attention`. Query heads that share a key head
stand as further queries, so keys and values are gathered once and never repeated.

What this does not do it leaves to the stock loop: sliding windows, cross attention, encoders, non-causal layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

from roll.platforms.sglang_cpu_batches import MASK_ELEMENTS, AttentionBatch, build_batch, group_by_length

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class BatchedTorchAttention(TorchNativeAttnBackend):
    """The torch attention backend with batched decode and extend; results equal the stock ones to rounding."""

    def __init__(self, model_runner: Any) -> None:
        """Takes the pools of `model_runner`, as the stock backend does."""
        super().__init__(model_runner)
        self._plan: list[AttentionBatch] | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Forgets the plan of the last forward pass; the first layer makes the next, and all layers share it."""
        super().init_forward_metadata(forward_batch)
        self._plan = None

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
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
                scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        if self._plan is None:
            self._plan = _plan(torch.ones_like(seq_lens), seq_lens, req_to_token, req_pool_indices, query, k_cache)
        for batch in self._plan:
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
            return super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
                extend_seq_lens, encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        if self._plan is None:
            self._plan = _plan(extend_seq_lens, seq_lens, req_to_token, req_pool_indices, query, k_cache)
        for batch in self._plan:
            if _mask_elements(batch, query, k_cache) <= MASK_ELEMENTS:
                _attend(batch, query, output, k_cache, v_cache, scaling)
                continue
            one, rows = batch.requests, batch.tokens[0][batch.filled[0]]
            span = slice(int(rows[0]), int(rows[-1]) + 1)
            super()._run_sdpa_forward_extend(
                query[span], output[span], k_cache, v_cache, req_to_token, req_pool_indices[one], seq_lens[one],
                extend_prefix_lens[one], extend_seq_lens[one], None, scaling, enable_gqa, causal,
            )  # fmt: skip
        return output


def _plan(
    queries: torch.Tensor,
    keys: torch.Tensor,
    slot_table: torch.Tensor,
    rows: torch.Tensor,
    query: torch.Tensor,
    k_cache: torch.Tensor,
) -> list[AttentionBatch]:
    starts = torch.cumsum(queries, 0) - queries
    present = [index for index, count in enumerate(queries.tolist()) if count > 0]
    lengths, widths = queries.tolist(), keys.tolist()
    groups = group_by_length(
        [lengths[i] for i in present], [widths[i] for i in present], query.shape[1] // k_cache.shape[1]
    )
    return [build_batch([present[i] for i in group], starts, queries, keys, slot_table, rows) for group in groups]


def _mask_elements(batch: AttentionBatch, query: torch.Tensor, k_cache: torch.Tensor) -> int:
    return batch.mask.numel() * (query.shape[1] // k_cache.shape[1])


def _attend(
    batch: AttentionBatch,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scaling: float | None,
) -> None:
    """Writes the attention of one group into `output`; heads that share a key head stand as further queries."""
    requests, steps = batch.tokens.shape
    key_heads, heads_per_key = k_cache.shape[1], query.shape[1] // k_cache.shape[1]
    queries = query[batch.tokens].view(requests, steps, key_heads, heads_per_key, -1)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(requests, key_heads, heads_per_key * steps, -1)
    keys = k_cache[batch.slots].transpose(1, 2).to(query.dtype)
    values = v_cache[batch.slots].transpose(1, 2).to(query.dtype)
    mask = batch.mask[:, None, None].expand(-1, -1, heads_per_key, -1, -1).flatten(2, 3)
    result = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
    result = result.view(requests, key_heads, heads_per_key, steps, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)
    output[batch.tokens[batch.filled]] = result[batch.filled].to(output.dtype)
