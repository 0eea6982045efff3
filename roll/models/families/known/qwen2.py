"""Qwen2 and Qwen2.5: the projections of query, key and value have a bias."""

from __future__ import annotations

import re

from roll.models.families.chat_template import CHATML, ChatTemplate, turns
from roll.models.families.decoder import LAYER, QKV_BIAS
from roll.models.families.family import GgufNames, ModelFamily, RehearsalModel, SGLangClasses

SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
"""Begins every conversation that has no message of the system."""

TEMPLATE = ChatTemplate(
    "{% if messages[0].role != 'system' and not tools %}<|im_start|>system\n"
    + SYSTEM
    + "<|im_end|>\n{% endif %}"
    + turns("<|im_start|>ROLE\n", "<|im_end|>\n", SYSTEM),
    CHATML.markers,
)

FAMILY = ModelFamily(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    layer=(*LAYER, QKV_BIAS),
    megatron={"add_qkv_bias": True},
    rehearsal=RehearsalModel(re.compile("qwen|qwq", re.I), template="qwen2_5", tokenizer="Qwen2Tokenizer"),
    templates={"qwen2_5": TEMPLATE},
    gguf=GgufNames("qwen2"),
    sglang=SGLangClasses(
        decoder="sglang.srt.models.qwen2:Qwen2Model",
        scorer="sglang.srt.models.qwen2_classification:Qwen2ForSequenceClassification",
        reads_head_dim=False,
    ),
)
