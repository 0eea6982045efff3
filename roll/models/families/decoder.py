"""What the families of dense decoders share: the names of their weights, and the options that none of them computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.models.families.layouts import GatedPair, GroupedQKV, InputSplit, Replicated, Stacked, Vocabulary
from roll.models.families.weights import WeightRule

ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "quantization_config": None,
}
"""Options that change the computation, and the one supported value of each, which is also the default."""

EMBEDDING = WeightRule(
    "embedding.word_embeddings.weight",
    ("model.embed_tokens.weight",),
    Vocabulary(),
    ("vocabulary", "hidden"),
    gguf=("token_embd.weight",),
)
FINAL_NORM = WeightRule(
    "decoder.final_layernorm.weight", ("model.norm.weight",), Replicated(), ("hidden",), gguf=("output_norm.weight",)
)
HEAD = WeightRule(
    "output_layer.weight", ("lm_head.weight",), Vocabulary(), ("vocabulary", "hidden"), gguf=("output.weight",)
)

QKV_BIAS = WeightRule(
    "self_attention.linear_qkv.bias",
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    GroupedQKV(),
    ("qkv_rows",),
    engine="self_attn.qkv_proj.bias",
    gguf=("attn_q.bias", "attn_k.bias", "attn_v.bias"),
)
HEAD_NORMS = tuple(
    WeightRule(
        f"self_attention.{name}_layernorm.weight",
        (f"self_attn.{name}_norm.weight",),
        Replicated(),
        ("head_dim",),
        gguf=(f"attn_{name}_norm.weight",),
    )
    for name in "qk"
)

FUSED_QKV = WeightRule(
    "self_attention.linear_qkv.weight",
    ("self_attn.qkv_proj.weight",),
    Stacked(GroupedQKV()),
    ("qkv_rows", "hidden"),
    gguf=("attn_qkv.weight",),
)
"""Query, key and value in one tensor of a folder, which SGLang has under the same name."""

FUSED_MLP = WeightRule(
    "mlp.linear_fc1.weight",
    ("mlp.gate_up_proj.weight",),
    Stacked(GatedPair()),
    ("gate_and_up", "hidden"),
    gguf=("ffn_up.weight",),
)
"""Gate and up in one tensor of a folder."""

LAYER = (
    WeightRule(
        "self_attention.linear_qkv.layer_norm_weight",
        ("input_layernorm.weight",),
        Replicated(),
        ("hidden",),
        gguf=("attn_norm.weight",),
    ),
    WeightRule(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        GroupedQKV(),
        ("qkv_rows", "hidden"),
        engine="self_attn.qkv_proj.weight",
        gguf=("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    ),
    WeightRule(
        "self_attention.linear_proj.weight",
        ("self_attn.o_proj.weight",),
        InputSplit(),
        ("hidden", "attention_width"),
        gguf=("attn_output.weight",),
    ),
    WeightRule(
        "mlp.linear_fc1.layer_norm_weight",
        ("post_attention_layernorm.weight",),
        Replicated(),
        ("hidden",),
        gguf=("ffn_norm.weight",),
    ),
    WeightRule(
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        GatedPair(),
        ("gate_and_up", "hidden"),
        engine="mlp.gate_up_proj.weight",
        gguf=("ffn_gate.weight", "ffn_up.weight"),
    ),
    WeightRule(
        "mlp.linear_fc2.weight",
        ("mlp.down_proj.weight",),
        InputSplit(),
        ("hidden", "intermediate"),
        gguf=("ffn_down.weight",),
    ),
)
"""Weights of a layer of llama; other families add to them."""


def output_norms(attention: str, mlp: str) -> tuple[WeightRule, ...]:
    """The weights of `LayerTraits.output_norms`, by their names in a folder."""
    return (
        WeightRule(
            "self_attention.linear_proj.output_norm_weight",
            (f"{attention}.weight",),
            Replicated(),
            ("hidden",),
            gguf=("post_attention_norm.weight",),
        ),
        WeightRule(
            "mlp.linear_fc2.output_norm_weight",
            (f"{mlp}.weight",),
            Replicated(),
            ("hidden",),
            gguf=("post_ffw_norm.weight",),
        ),
    )


def layer_with(*rules: WeightRule) -> tuple[WeightRule, ...]:
    """LAYER with other rules for the same parameters of Megatron."""
    others = {rule.megatron: rule for rule in rules}
    return tuple(others.get(rule.megatron, rule) for rule in LAYER)


def bounded_by_window(raw: Mapping[str, Any], default: int | None = None) -> dict[str, Any]:
    """A config.json whose positions end with its sliding window, within which attention is causal attention.

    SGLang computes no window for these families, so longer sequences are refused as those beyond the positions are.
    `default` is the window where the file has none.
    """
    window = raw.get("sliding_window", default)
    positions = raw.get("max_position_embeddings")
    if not isinstance(window, int) or (isinstance(positions, int) and positions <= window):
        return dict(raw)
    return {**raw, "max_position_embeddings": window}
