"""Llama 1 to 3: the dense decoder that other families vary."""

from __future__ import annotations

import re

from roll.models.families.decoder import LAYER
from roll.models.families.family import GgufNames, ModelFamily, RehearsalModel, SGLangClasses

FAMILY = ModelFamily(
    name="llama",
    architecture="LlamaForCausalLM",
    layer=LAYER,
    rehearsal=RehearsalModel(re.compile("llama", re.I), template="llama3", end_of_turn="<|eot_id|>"),
    gguf=GgufNames("llama", rotary_pairs=True),
    sglang=SGLangClasses(
        decoder="sglang.srt.models.llama:LlamaModel",
        scorer="sglang.srt.models.llama_reward:LlamaForSequenceClassification",
    ),
)
