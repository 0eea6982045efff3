"""Qwen2 and Qwen1.5, the mixtures of experts: one more expert, with a gate of its own, computes every token."""

from __future__ import annotations

import re

from roll.models.families.decoder import LAYER, ONLY, QKV_BIAS
from roll.models.families.family import ModelFamily, RehearsalModel, SGLangClasses
from roll.models.families.layouts import GatedPair, InputSplit, Replicated
from roll.models.families.mixture import QWEN_SIZES, QWEN_SMALL, SPARSE_LAYER, qwen_mixture, qwen_settings
from roll.models.families.weights import WeightRule

SHARED_EXPERT = (
    WeightRule(
        "mlp.shared_experts.linear_fc1.weight",
        ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        GatedPair(),
        ("shared_gate_and_up", "hidden"),
        engine="mlp.shared_expert.gate_up_proj.weight",
    ),
    WeightRule(
        "mlp.shared_experts.linear_fc2.weight",
        ("mlp.shared_expert.down_proj.weight",),
        InputSplit(),
        ("hidden", "shared_width"),
    ),
    WeightRule("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",), Replicated(), (1, "hidden")),
)

FAMILY = ModelFamily(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    layer=(*LAYER, QKV_BIAS),
    sparse_layer=(*SPARSE_LAYER, QKV_BIAS, *SHARED_EXPERT),
    settings=qwen_settings,
    mixture=qwen_mixture,
    sizes=(*QWEN_SIZES, "shared_expert_intermediate_size"),
    megatron={"add_qkv_bias": True},
    only=ONLY | {"qkv_bias": True},
    rehearsal=RehearsalModel(
        re.compile(r"qwen(1\.5|2)(.*-a\d|-?moe)", re.I),
        template="qwen2_5",
        tokenizer="Qwen2Tokenizer",
        shape=QWEN_SMALL | {"shared_expert_intermediate_size": 80},
    ),
    sglang=SGLangClasses(reads_head_dim=False),
)
