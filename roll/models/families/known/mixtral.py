"""Mixtral: every layer has experts, which are as wide as its MLP would be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roll.models.families.decoder import LAYER, ONLY
from roll.models.families.family import ModelFamily, RehearsalModel, SGLangClasses
from roll.models.families.mixture import ATTENTION, EXPERT, NORM, ROUTER, Mixture
from roll.models.families.weights import WeightRule

NAMES = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Parts of the names of Qwen's mixtures, and those of Mixtral."""


def _renamed(rule: WeightRule) -> WeightRule:
    def named(text: str) -> str:
        for ours, theirs in NAMES.items():
            text = text.replace(ours, theirs)
        return text

    return replace(rule, hf=tuple(map(named, rule.hf)), engine=named(rule.engine))


def _mixture(settings: Mapping[str, Any]) -> Mixture:
    return Mixture(
        experts=settings["num_local_experts"],
        per_token=settings["num_experts_per_tok"],
        width=settings["intermediate_size"],
        sparse=(True,) * settings["num_hidden_layers"],
    )


FAMILY = ModelFamily(
    name="mixtral",
    architecture="MixtralForCausalLM",
    layer=LAYER,
    sparse_layer=(*ATTENTION, NORM, *map(_renamed, (ROUTER, *EXPERT))),
    mixture=_mixture,
    sizes=("num_local_experts", "num_experts_per_tok"),
    only=ONLY | {"router_jitter_noise": 0.0, "sliding_window": None},
    rehearsal=RehearsalModel(re.compile("mixtral", re.I), shape={"num_local_experts": 4, "num_experts_per_tok": 2}),
    sglang=SGLangClasses(reads_head_dim=False),
)
