"""Gemma 3 for text: layers with a window between layers without, norms of 1 + weight before and after, a tied head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roll.models.families.decoder import EMBEDDING, HEAD_NORMS, LAYER, ONLY, layer_with, output_norms
from roll.models.families.family import LayerTraits, ModelFamily, RehearsalModel
from roll.models.families.layouts import EngineWholeVocabulary

DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
"""Of transformers, for what a folder leaves out."""


def _settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """With the rotary settings of the layers without a window, and `local_rope_theta` of the others."""
    nested = raw.get("rope_parameters") or {}
    whole, local = ({**(nested.get(f"{kind}_attention") or {})} for kind in ("full", "sliding"))
    scaling = raw.get("rope_scaling")
    if whole.get("rope_type", "default") != "default":
        scaling = whole
    layers, pattern = raw.get("num_hidden_layers"), raw.get("sliding_window_pattern", 6)
    kinds = raw.get("layer_types")
    if kinds is None and isinstance(layers, int):
        kinds = [f"{'sliding' if (i + 1) % pattern else 'full'}_attention" for i in range(layers)]
    return {
        **DEFAULTS,
        **{key: value for key, value in raw.items() if key != "rope_parameters"},
        "rope_theta": whole.get("rope_theta", raw.get("rope_theta", 1e6)),
        "local_rope_theta": local.get("rope_theta", raw.get("rope_local_base_freq", 1e4)),
        "rope_scaling": scaling,
        "layer_types": kinds,
    }


FAMILY = ModelFamily(
    name="gemma3",
    architecture="Gemma3ForCausalLM",
    layer=(
        *layer_with(
            *(
                replace(rule, hf=("pre_feedforward_layernorm.weight",))
                for rule in LAYER
                if rule.megatron == "mlp.linear_fc1.layer_norm_weight"
            )
        ),
        *HEAD_NORMS,
        *output_norms("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    embedding=replace(EMBEDDING, layout=EngineWholeVocabulary()),
    megatron={"qk_layernorm": True, "layernorm_zero_centered_gamma": True},
    traits=LayerTraits(output_norms=True, local_layers=True, centred_norms=True, scaled_embedding=True, gelu=True),
    settings=_settings,
    only={
        **{key: value for key, value in ONLY.items() if key != "hidden_act"},
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rope_scaling": None,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    rehearsal=RehearsalModel(re.compile(r"gemma-?3", re.I)),
)
