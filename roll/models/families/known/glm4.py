"""GLM-4 of April 2025 (0414), the dense models: norms after attention and MLP, and half of each head is rotated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roll.models.families.decoder import FUSED_MLP, ONLY, QKV_BIAS, layer_with, output_norms
from roll.models.families.family import LayerTraits, ModelFamily, RehearsalModel


def _settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of transformers for what a folder may leave out."""
    return {"partial_rotary_factor": 0.5, "attention_bias": True, "num_key_value_heads": 2, "head_dim": 128, **raw}


FAMILY = ModelFamily(
    name="glm4",
    architecture="Glm4ForCausalLM",
    layer=(
        *layer_with(FUSED_MLP),
        QKV_BIAS,
        *output_norms("post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    megatron={"add_qkv_bias": True},
    traits=LayerTraits(output_norms=True, rotary_pairs=True, partial_rotary=True),
    settings=_settings,
    only={**ONLY, "attention_bias": True},
    rehearsal=RehearsalModel(re.compile(r"glm-?4", re.I)),
)
