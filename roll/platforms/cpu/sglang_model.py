"""Runs the decoder layers of SGLang's dense models as one C++ call on a CPU, for families with `sglang.decoder`.

In decode, and in extend, where requests with the same tokens, such as the samples of one prompt, are computed once:
their keys and values are copied. What the call does not take (half precision, tensor parallelism, LoRA, quantised
weights, sliding windows, other classes) runs in SGLang's form, with the kernels of `sglang_ops`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from roll.base.custom_modules import named_object
from roll.models.families.registry import families
from roll.platforms.cpu.decoder import CpuDecoder, DecoderSizes, DecoderTensors
from roll.platforms.cpu.kernels import CpuKernels

logger = logging.getLogger(__name__)


def fuse_decoder(model_runner: Any, kernels: CpuKernels) -> bool:
    """Replaces `forward` of the runner's decoder model where the call takes it; whether it does."""
    model: Any = getattr(model_runner.model, "model", None)
    if not _is_plain(model, model_runner):
        logger.info("%s runs operator by operator", type(model_runner.model).__name__)
        return False
    forward = FusedForward(model, model_runner, kernels)
    if not forward.tensors().fit(forward.decoder.sizes, kernels.head_dim):
        logger.info("%s runs operator by operator: its tensors do not fit", type(model_runner.model).__name__)
        return False
    model.forward = forward
    return True


class FusedForward:
    """`forward` of a decoder model of SGLang."""

    def __init__(self, model: Any, model_runner: Any, kernels: CpuKernels) -> None:
        """Of a plain model; see `fuse_decoder`."""
        first = model.layers[0]
        attention, heads = first.self_attn, getattr(first.self_attn, "q_norm", None)
        sizes = DecoderSizes(
            hidden=attention.hidden_size,
            heads=attention.num_heads,
            key_heads=attention.num_kv_heads,
            intermediate=first.mlp.down_proj.weight.shape[1],
            layers=len(model.layers),
        )
        head_epsilon = 0.0 if heads is None else heads.variance_epsilon
        self.decoder = CpuDecoder(kernels, sizes, model.norm.variance_epsilon, head_epsilon)
        self._original, self._model, self._kernels = model.forward, model, kernels
        self._pool, self._slot_table = model_runner.token_to_kv_pool, model_runner.req_to_token_pool
        self._scale = attention.scaling
        self._vocabulary = model.embed_tokens.org_vocab_size

    def tensors(self) -> DecoderTensors:
        """The weights and caches as they are now: an update may put others in their place."""
        model = self._model
        return DecoderTensors(
            embedding=_parameter(model.embed_tokens)[: self._vocabulary],
            angles=model.layers[0].self_attn.rotary_emb.cos_sin_cache,
            norm=_parameter(model.norm),
            layers=[_weights(layer) for layer in model.layers],
            keys=self._pool.k_buffer,
            values=self._pool.v_buffer,
        )

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """Hidden states [tokens, hidden] after the last norm."""
        hidden = None
        if input_embeds is None and pp_proxy_tensors is None and self._takes(forward_batch):
            hidden = self._run(input_ids, positions, forward_batch)
        if hidden is None:  # also of an id or position out of range, for SGLang's error
            return self._original(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        return hidden

    def _takes(self, batch: Any) -> bool:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        plain = batch.forward_mode in (ForwardMode.DECODE, ForwardMode.EXTEND) and batch.spec_info is None
        return plain and not self._model.layers_to_capture and len(batch.req_pool_indices) > 0

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor | None:
        table, rows, keys, slots = (
            self._slot_table.req_to_token, batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc
        )  # fmt: skip
        decoder, tensors = self.decoder, self.tensors()
        if batch.forward_mode.is_decode():
            requests = self._kernels.requests(table, rows, keys, None)
            return decoder.forward(tensors, ids, positions, slots, requests, self._scale)
        lengths = batch.extend_seq_lens
        first = first_with_same_tokens(ids, lengths.tolist(), (keys - lengths).tolist())
        if first == list(range(len(first))):
            requests = self._kernels.requests(table, rows, keys, lengths)
            return decoder.forward(tensors, ids, positions, slots, requests, self._scale)
        computed, source = tokens_once(first, lengths)
        chosen = torch.tensor(sorted(set(first)))
        requests = self._kernels.requests(table, rows[chosen], keys[chosen], lengths[chosen])
        hidden = decoder.forward(
            tensors, ids[computed], positions[computed], slots[computed], requests, self._scale
        )  # fmt: skip
        if hidden is None:
            return None
        origin = computed[source]
        copied = origin != torch.arange(len(origin))
        decoder.copy_tokens(tensors, slots[origin[copied]], slots[copied])
        return hidden[source]


def first_with_same_tokens(ids: torch.Tensor, lengths: Sequence[int], prefixes: Sequence[int]) -> list[int]:
    """For each request the index of the first one with the same tokens and without a cached prefix, or its own.

    Args:
        ids: [tokens] of all requests, one after the other.
        lengths: [B] tokens of each request.
        prefixes: [B] tokens of each request that the cache holds already.
    """
    seen: dict[bytes, int] = {}
    array, first = ids.numpy(), []
    for index, (end, length) in enumerate(zip(itertools.accumulate(lengths), lengths, strict=True)):
        known = prefixes[index] or not length
        first.append(index if known else seen.setdefault(array[end - length : end].tobytes(), index))
    return first


def tokens_once(first: Sequence[int], lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the requests that are their own first, and for each token of all requests its place among those.

    Args:
        first: [B], see `first_with_same_tokens`.
        lengths: [B] tokens of each request.
    """
    lengths = lengths.to(torch.int64)
    starts = torch.cumsum(lengths, 0) - lengths
    firsts = torch.tensor(first)
    own = firsts == torch.arange(len(first))
    computed = own.repeat_interleave(lengths).nonzero().view(-1)
    place = torch.cumsum(torch.where(own, lengths, 0), 0) - lengths  # of the first computed token
    offset = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
    return computed, place[firsts].repeat_interleave(lengths) + offset


def _is_plain(model: Any, runner: Any) -> bool:
    """Whether the model and its cache are of the kind that the call computes; its tensors are compared by `fit`."""
    from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    options = runner.server_args
    decoders = {named_object(family.sglang.decoder) for family in families() if family.sglang.decoder}
    if type(model) not in decoders or options.tp_size != 1 or options.pp_size != 1:
        return False
    if options.enable_lora or options.forward_hooks or options.debug_tensor_dump_output_folder:
        return False
    pool = runner.token_to_kv_pool
    if type(pool) is not MHATokenToKVPool or pool.dtype != torch.float32 or pool.store_dtype != torch.float32:
        return False
    linears = [
        linear
        for layer in model.layers
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    ]
    methods = {type(linear.quant_method) for linear in linears} | {type(model.embed_tokens.quant_method)}
    if not methods <= {UnquantizedLinearMethod, UnquantizedEmbeddingMethod}:
        return False
    return all(_is_plain_layer(layer, model) for layer in model.layers)


def _is_plain_layer(layer: Any, model: Any) -> bool:
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    attention, first = layer.self_attn, model.layers[0].self_attn
    head_norms = [norm for name in ("q_norm", "k_norm") if (norm := getattr(attention, name, None)) is not None]
    norms = [layer.input_layernorm, layer.post_attention_layernorm, model.norm]
    for group, epsilon in (
        (norms, model.norm.variance_epsilon),
        (head_norms, head_norms and first.q_norm.variance_epsilon),
    ):
        for norm in group:
            options = (norm.variance_size_override, norm.override_orig_dtype)
            if norm.variance_epsilon != epsilon or any(option is not None for option in options):
                return False
    rope, attend = attention.rotary_emb, attention.attn
    if not isinstance(rope, RotaryEmbedding) or type(rope).forward_native is not RotaryEmbedding.forward_native:
        return False
    rotates = rope.is_neox_style and rope.rotary_dim == rope.head_size == attention.head_dim
    same = rope.cos_sin_cache is first.rotary_emb.cos_sin_cache and attention.scaling == first.scaling
    window = attend.sliding_window_size is None or attend.sliding_window_size < 0
    causal = attend.logit_cap == 0 and attend.k_scale is None and not attend.is_cross_attention
    silu = type(layer.mlp.act_fn) is SiluAndMul and layer.mlp.down_proj.bias is None
    return rotates and same and window and causal and silu and layer.mlp.gate_up_proj.bias is None


def _parameter(module: Any, name: str = "weight") -> Any:
    """A module's parameter, a tenth of a microsecond instead of three."""
    return module.__dict__["_parameters"].get(name)


def _weights(layer: Any) -> list[torch.Tensor | None]:
    """LAYER_WEIGHTS of a layer of SGLang."""
    parts = layer.__dict__["_modules"]
    attention, mlp = parts["self_attn"].__dict__["_modules"], parts["mlp"].__dict__["_modules"]
    norms = [_parameter(attention[name]) if name in attention else None for name in ("q_norm", "k_norm")]
    return [
        _parameter(parts["input_layernorm"]),
        _parameter(attention["qkv_proj"]),
        _parameter(attention["qkv_proj"], "bias"),
        *norms,
        _parameter(attention["o_proj"]),
        _parameter(attention["o_proj"], "bias"),
        _parameter(parts["post_attention_layernorm"]),
        _parameter(mlp["gate_up_proj"]),
        _parameter(mlp["down_proj"]),
    ]
