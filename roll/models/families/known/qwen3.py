"""Qwen3, the dense models: the heads of query and key are normalised."""

from __future__ import annotations

import re

from roll.models.families.chat_template import CHATML
from roll.models.families.decoder import HEAD_NORMS, LAYER
from roll.models.families.family import GgufNames, ModelFamily, RehearsalModel, SGLangClasses

FAMILY = ModelFamily(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    layer=(*LAYER, *HEAD_NORMS),
    megatron={"qk_layernorm": True},
    rehearsal=RehearsalModel(re.compile("qwen-?3", re.I), template="qwen3", tokenizer="Qwen2Tokenizer"),
    templates={"qwen3": CHATML},
    gguf=GgufNames("qwen3"),
    sglang=SGLangClasses(
        decoder="sglang.srt.models.qwen3:Qwen3Model",
        scorer="sglang.srt.models.qwen3_classification:Qwen3ForSequenceClassification",
    ),
)
