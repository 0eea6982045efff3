"""Phi-3 and Phi-4: folders have query, key and value in one tensor, and gate and up in another."""

from __future__ import annotations

import re

from roll.models.families.decoder import FUSED_MLP, FUSED_QKV, bounded_by_window, layer_with
from roll.models.families.family import ModelFamily, RehearsalModel, SGLangClasses

FAMILY = ModelFamily(
    name="phi3",
    architecture="Phi3ForCausalLM",
    layer=layer_with(FUSED_QKV, FUSED_MLP),
    settings=bounded_by_window,
    rehearsal=RehearsalModel(re.compile(r"phi-?[34]", re.I)),
    sglang=SGLangClasses(decoder="sglang.srt.models.llama:LlamaModel"),
)
