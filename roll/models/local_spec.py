"""Building blocks of a transformer layer on plain torch operators, with Transformer Engine's parameter names.

With the same names one weight mapping and one checkpoint serve both: `linear_qkv.layer_norm_weight` is the norm in
front of the linear, wherever the model runs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from roll.models.operators import RotaryTable, rms_norm, swiglu


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension; its weight's gradient is summed under sequence parallel."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        """Weights start at one."""
        super().__init__()
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] to the same shape."""
        return rms_norm(x, self.weight, self.eps)


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then a linear whose rows are split over tensor-parallel ranks."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        """As Megatron's column-parallel linear."""
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(config, input_size)
        self.eps = config.layernorm_epsilon

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sequence-parallel input stays split until after the norm."""
        return super().forward(rms_norm(x, self.layer_norm_weight, self.eps), *args, **kwargs)


class CausalAttention(torch.nn.Module):
    """Rotary embedding, then causal attention by `scaled_dot_product_attention`: no scores, no mask.

    Sequences are right padded, so causality alone keeps padding out of every valid token. The rotation is here and
    not in Megatron's attention because here it can write queries and keys in the order that attention reads.
    """

    def __init__(
        self, config: TransformerConfig, rotary: RotaryTable, softmax_scale: float | None = None, **_: Any
    ) -> None:
        """`softmax_scale` None is 1 / sqrt(head size)."""
        super().__init__()
        self.rotary = rotary
        self.scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, **_: Any
    ) -> torch.Tensor:
        """Query [S, B, heads, D], key and value [S, B, groups, D] to [S, B, heads * D]."""
        context = F.scaled_dot_product_attention(
            self.rotary.rotate(query),
            self.rotary.rotate(key),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return context.permute(2, 0, 1, 3).flatten(2)


class SwiGLU(torch.nn.Module):
    """The MLP's activation on the fused gate and up projections."""

    def __init__(self, config: TransformerConfig) -> None:
        """Has no weights."""
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[S, B, 2F] to [S, B, F]."""
        return swiglu(x)

    def sharded_state_dict(self, *args: object, **kwargs: object) -> dict[str, object]:
        """Nothing: Megatron asks every part of the MLP what a checkpoint must hold of it."""
        return {}


class PortableSpecProvider(LocalSpecProvider):
    """Which module stands for which part of a layer."""

    def __init__(self, rotary: RotaryTable) -> None:
        """`rotary` is shared by all layers."""
        self.rotary = rotary

    def fuse_layernorm_and_linear(self) -> bool:
        """The norm belongs to the linear behind it."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """Norm and linear in one."""
        return NormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """Norms that stand alone: final, query and key."""
        return RMSNorm

    def core_attention(self) -> Any:
        """Attention without materialised scores."""
        return partial(CausalAttention, rotary=self.rotary)

    def activation_func(self) -> type:
        """The gated activation."""
        return SwiGLU


def portable_layer_spec(qk_norm: bool, rotary: RotaryTable) -> ModuleSpec:
    """A dense decoder layer of these parts."""
    backend = PortableSpecProvider(rotary)
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
            pre_mlp_layernorm=IdentityOp,
            mlp=get_mlp_module_spec_for_backend(backend=backend, use_te_activation_func=True),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device()))
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight
