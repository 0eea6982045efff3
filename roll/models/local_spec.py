"""Layer spec of a decoder on plain torch operators, with the parameter names of Transformer Engine's spec.

Equal names allow one weight mapping and one checkpoint format for both specs: for example
`linear_qkv.layer_norm_weight` is the weight of the norm before the linear in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from roll.models.context_attention import ContextSplit, context_attention
from roll.models.families.family import LayerTraits
from roll.models.operators import RotaryTable, rms_norm, swiglu, take_rows


class RMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension; under sequence parallel Megatron sums the weight's gradient over ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps, self.centred = eps, config.layernorm_zero_centered_gamma
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] to the same shape."""
        return _normed(x, self.weight, self.eps, self.centred)


AddedOutput = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Input and output of a linear to the output with that of an adapter."""


class NormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]  # Megatron is not typed
    """RMSNorm followed by a linear whose rows are split over tensor-parallel ranks."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(config, input_size)
        self.eps, self.centred = config.layernorm_epsilon, config.layernorm_zero_centered_gamma
        self.adapter: AddedOutput | None = None

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Normalizes [S, B, H] before the linear gathers a sequence-parallel input."""
        normed = _normed(x, self.layer_norm_weight, self.eps, self.centred)
        result, bias = super().forward(normed, *args, **kwargs)
        return result if self.adapter is None else self.adapter(normed, result), bias


class NormedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """A linear whose columns are split over tensor-parallel ranks, followed by RMSNorm of their sum."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.output_norm_weight = _norm_weight(config, output_size)
        self.eps, self.centred = config.layernorm_epsilon, config.layernorm_zero_centered_gamma
        self.adapter: AddedOutput | None = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[S, B, H / T] to [S, B, H], or to this rank's part of the sequence."""
        output, bias = super().forward(x)
        output = output if self.adapter is None else self.adapter(x, output)
        return _normed(output, self.output_norm_weight, self.eps, self.centred), bias


@dataclass
class PackedSamples(PackedSeqParams):  # type: ignore[misc]  # Megatron is not typed
    """A packed micro-batch: tokens of each sample on the host, and the position [S] of each token in its sample.

    With shared prefixes, attention reads E tokens of whole samples: token e is token `expand`[e] of S, and token s
    takes the result of place `collapse`[s].
    """

    lengths: Sequence[int] = ()
    positions: torch.Tensor | None = None
    expand: torch.Tensor | None = None
    collapse: torch.Tensor | None = None
    context: ContextSplit | None = None
    """Under context parallelism: `positions` are those of this rank's tokens, everything else of whole samples."""


class LayerRotary(NamedTuple):
    """The rotary embedding of a layer, and the last tokens that it attends to; None: all."""

    table: RotaryTable
    window: int | None = None


class CausalAttention(torch.nn.Module):
    """Rotary embedding and causal attention, without materialized scores or masks.

    By `scaled_dot_product_attention`; of packed samples by torch's `varlen_attn`, one call for all, where it computes.

    Sequences are padded on the right, so the causal mask also hides padding from every valid token. The rotation is
    done here and not in Megatron's attention because it can then write queries and keys in the memory order that
    attention reads.

    Args:
        config: not used, but Megatron passes it.
        rotary: of each layer of the model.
        layer_number: of this layer, from 1.
        softmax_scale: None is 1 / sqrt(head size).
    """

    def __init__(
        self,
        config: TransformerConfig,
        rotary: Sequence[LayerRotary],
        layer_number: int,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.rotary, self.window = rotary[layer_number - 1]
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedSamples | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Query [S, B, heads, D], key and value [S, B, groups, D] to [S, B, heads * D]; packed samples have no B."""
        if packed_seq_params is None:
            context = self._attend(self.rotary.rotate(query), self.rotary.rotate(key), value.permute(1, 2, 0, 3))
            return context.permute(2, 0, 1, 3).flatten(2)
        positions, expand, collapse = (getattr(packed_seq_params, name) for name in ("positions", "expand", "collapse"))
        if expand is not None:
            query, key, value = (take_rows(x, expand) for x in (query, key, value))
            positions = positions[expand]
        longest = packed_seq_params.max_seqlen_q
        rotated = [self.rotary.rotate(x[:, None], positions, longest) for x in (query, key)]
        if packed_seq_params.context is not None:
            return context_attention(rotated[0], rotated[1], value, packed_seq_params.context, self.scale)
        if takes_varlen(query):
            context = self._attend_packed(packed_seq_params, rotated[0], rotated[1], value)
        else:
            runs = [(length, len(list(same))) for length, same in groupby(packed_seq_params.lengths)]
            tensors = (*rotated, value[:, None].permute(1, 2, 0, 3))
            parts = [x.split([length * count for length, count in runs], dim=2) for x in tensors]
            contexts = [self._attend_run(count, *run) for (_, count), *run in zip(runs, *parts, strict=True)]
            context = torch.cat(contexts, dim=2).permute(2, 0, 1, 3).flatten(2)
        return context if collapse is None else take_rows(context, collapse)

    def _attend_packed(
        self, packed: PackedSamples, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """[S, 1, heads * D] of rotated queries and keys [1, heads, S, D] and values [S, heads, D], in one call."""
        attend = varlen_attention()
        assert attend is not None
        samples = [packed.cu_seqlens_q] * 2 + [packed.max_seqlen_q] * 2
        window = (-1 if self.window is None else self.window - 1, 0)
        options = {"scale": self.scale, "window_size": window, "enable_gqa": query.shape[1] != key.shape[1]}
        context: torch.Tensor = attend(query[0].transpose(0, 1), key[0].transpose(0, 1), value, *samples, **options)
        return context.flatten(1)[:, None]

    def _attend_run(self, count: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[1, heads, count * S, D] of `count` samples of S tokens that follow each other, in one call."""
        if count == 1:
            return self._attend(query, key, value)
        samples = (x[0].unflatten(1, (count, -1)).transpose(0, 1) for x in (query, key, value))
        return self._attend(*samples).transpose(0, 1).flatten(1, 2)[None]

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[B, heads, S, D] of rotated queries and keys; in fp32 on a CPU, where half precision takes twice as long."""
        dtype, grouped = query.dtype, query.shape[1] != key.shape[1]
        if query.device.type == "cpu":
            query, key, value = query.float(), key.float(), value.float()
        length, near = query.shape[2], None
        if self.window is not None and length > self.window:
            near = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_().triu_(1 - self.window)
        context = F.scaled_dot_product_attention(
            query, key, value, attn_mask=near, is_causal=near is None, scale=self.scale, enable_gqa=grouped
        )  # fmt: skip
        return context.to(dtype)


@cache
def varlen_attention() -> Callable[..., Any] | None:
    """Torch's attention over packed samples; None where torch has none, or one without these options."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= signature(varlen_attn).parameters.keys() else None


def takes_varlen(query: torch.Tensor) -> bool:
    """Whether `varlen_attention` takes queries [S, heads, D]: its kernel needs half precision on Ampere or later."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and varlen_attention() is not None
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


class SwiGLU(torch.nn.Module):
    """The MLP's activation on the fused gate and up projections; has no weights."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[S, B, 2F] to [S, B, F]."""
        return swiglu(x)

    def sharded_state_dict(self, *args: object, **kwargs: object) -> dict[str, object]:
        """Empty; Megatron calls this on every submodule of the MLP."""
        return {}


class GeGLU(SwiGLU):
    """The same with GELU in its tanh form in place of SiLU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[S, B, 2F] to [S, B, F]."""
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up


class TorchSpecProvider(LocalSpecProvider):  # type: ignore[misc]
    """The module for each part of a layer; `rotary` has that of every layer."""

    def __init__(self, rotary: Sequence[LayerRotary], traits: LayerTraits) -> None:
        self.rotary, self.traits = rotary, traits

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """The last linear of attention and MLP."""
        return NormedRowParallelLinear if self.traits.output_norms else RowParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """Norms that are not fused with a linear: final, query and key."""
        return RMSNorm

    def core_attention(self) -> Any:
        return partial(CausalAttention, rotary=self.rotary)

    def activation_func(self) -> type:
        return GeGLU if self.traits.gelu else SwiGLU


def local_layer_spec(
    experts: int | None, qk_norm: bool, rotary: Sequence[LayerRotary], traits: LayerTraits
) -> ModuleSpec:
    """Spec of a decoder layer with these modules: dense, or with `experts`, computed one after the other."""
    backend = TorchSpecProvider(rotary, traits)
    head_norm = backend.layer_norm(for_qk=True) if qk_norm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_layer_norm_linear(),
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if experts is None else backend.layer_norm(),
            mlp=get_mlp_module_spec_for_backend(backend=backend, num_experts=experts, use_te_activation_func=True),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, centred: bool) -> torch.Tensor:
    """RMSNorm with `weight`, or in fp32 with 1 + `weight`, which half precision would round."""
    if not centred:
        return rms_norm(x, weight, eps)
    return rms_norm(x.float(), 1.0 + weight.float(), eps).to(x.dtype)


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device()))
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight
