"""Llama 1 to 3: the dense decoder that other families vary."""

from __future__ import annotations

import re

from roll.models.families.chat_template import ChatTemplate, turns
from roll.models.families.decoder import LAYER
from roll.models.families.family import GgufNames, ModelFamily, RehearsalModel, SGLangClasses

TEMPLATE = ChatTemplate(
    "<|begin_of_text|>" + turns("<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>"),
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)

FAMILY = ModelFamily(
    name="llama",
    architecture="LlamaForCausalLM",
    layer=LAYER,
    rehearsal=RehearsalModel(re.compile("llama", re.I), template="llama3", end_of_turn="<|eot_id|>"),
    templates={"llama3": TEMPLATE},
    gguf=GgufNames("llama", rotary_pairs=True),
    sglang=SGLangClasses(
        decoder="sglang.srt.models.llama:LlamaModel",
        scorer="sglang.srt.models.llama_reward:LlamaForSequenceClassification",
    ),
)
