"""Qwen3, the mixtures of experts: Qwen3 with experts in place of the MLP."""

from __future__ import annotations

import re

from roll.models.families.decoder import HEAD_NORMS, LAYER
from roll.models.families.family import ModelFamily, RehearsalModel
from roll.models.families.mixture import QWEN_SIZES, QWEN_SMALL, SPARSE_LAYER, qwen_mixture, qwen_settings

FAMILY = ModelFamily(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    layer=(*LAYER, *HEAD_NORMS),
    sparse_layer=(*SPARSE_LAYER, *HEAD_NORMS),
    settings=qwen_settings,
    mixture=qwen_mixture,
    sizes=QWEN_SIZES,
    megatron={"qk_layernorm": True},
    rehearsal=RehearsalModel(
        re.compile(r"qwen-?3(.*-a\d+b|moe)", re.I), template="qwen3", tokenizer="Qwen2Tokenizer", shape=QWEN_SMALL
    ),
)
