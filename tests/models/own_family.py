"""A model family as a user adds one, without a change of the package."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roll.models.families.decoder import EMBEDDING, FINAL_NORM, HEAD, LAYER
from roll.models.families.family import ModelFamily, RehearsalModel
from roll.models.families.registry import register_family
from roll.models.families.weights import WeightRule
from tests.models.renamed_llama import KEYS, renamed


def own_names(rule: WeightRule) -> WeightRule:
    return replace(rule, hf=tuple(map(renamed, rule.hf)), gguf=())


def settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {KEYS.get(key, key): value for key, value in raw.items()}


register_family(
    ModelFamily(
        name="renamed",
        architecture="RenamedForCausalLM",
        layer=tuple(map(own_names, LAYER)),
        rehearsal=RehearsalModel(re.compile("renamed", re.I)),
        embedding=own_names(EMBEDDING),
        final_norm=own_names(FINAL_NORM),
        head=own_names(HEAD),
        layer_prefix="transformer.h.{}.",
        settings=settings,
    )
)
