"""Mistral: the layers of llama, and in the first version a sliding window."""

from __future__ import annotations

import re
from functools import partial

from roll.models.families.decoder import LAYER, bounded_by_window
from roll.models.families.family import ModelFamily, RehearsalModel, SGLangClasses

FAMILY = ModelFamily(
    name="mistral",
    architecture="MistralForCausalLM",
    layer=LAYER,
    settings=partial(bounded_by_window, default=4096),
    rehearsal=RehearsalModel(re.compile("mistral|ministral|mathstral", re.I)),
    sglang=SGLangClasses(decoder="sglang.srt.models.llama:LlamaModel"),
)
