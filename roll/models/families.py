"""The one mapping between HF tensor names and Megatron parameter names.

Publishing weights, importing, exporting and tests all use it. Names under `decoder.layers.{}` carry the layer's
global index on the HF side and its index within the pipeline stage on Megatron's.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll.models.hf_config import DecoderConfig
from roll.models.layouts import GatedPair, GroupedQKV, InputSplit, Layout, Replicated, Vocabulary


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter, the HF tensors it is made of, and how."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout


EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocabulary())
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated())
HEAD = Rule("output_layer.weight", ("lm_head.weight",), Vocabulary())
TIED_HEAD = Rule("output_layer.weight", ("model.embed_tokens.weight",), Vocabulary())
"""The last stage's copy of tied embeddings: imported, never published."""

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

LAYER = (
    Rule("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), Replicated()),
    Rule("self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in _QKV), GroupedQKV()),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), InputSplit()),
    Rule("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",), Replicated()),
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GatedPair()),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), InputSplit()),
)
"""A layer of llama; the other families add to it."""

QKV_BIAS = (Rule("self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in _QKV), GroupedQKV()),)

QK_NORM = (
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), Replicated()),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), Replicated()),
)

FAMILIES: dict[str, tuple[Rule, ...]] = {
    "llama": LAYER,
    "qwen2": LAYER + QKV_BIAS,
    "qwen3": LAYER + QK_NORM,
}
"""Rules of one layer by family."""


def stage_rules(config: DecoderConfig, first_layer: int, layers: int, first: bool, last: bool) -> list[Rule]:
    """Rules of one pipeline stage in publishing order, with full names on both sides.

    Args:
        config: the model.
        first_layer: global index of the stage's first layer.
        layers: layers of the stage.
        first: the stage holds the embedding.
        last: the stage holds the final norm and the head.
    """
    rules = [EMBEDDING] if first else []
    for index in range(layers):
        for rule in FAMILIES[config.family]:
            hf = tuple(f"model.layers.{first_layer + index}.{name}" for name in rule.hf)
            rules.append(Rule(f"decoder.layers.{index}.{rule.megatron}", hf, rule.layout))
    if last:
        rules.append(FINAL_NORM)
        if not config.tied_embeddings:
            rules.append(HEAD)
        elif not first:
            rules.append(TIED_HEAD)
    return rules
