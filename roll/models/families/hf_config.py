"""Checks a model's config.json: which models can be trained, and which options of theirs."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.base.errors import git_lfs_pointer
from roll.hub.names import CONFIG_NAME
from roll.models.families.family import ModelFamily
from roll.models.families.mixture import Mixture
from roll.models.families.registry import architectures, family_of, value_architectures

SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
"""Required whole numbers."""

OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
"""Whole numbers that may be null or missing."""

MOST_LAYERS, LARGEST_SIZE = 10_000, 2**27
"""Bounds of a size, far above those of any model; a plan of a larger one would not end."""

ROPE_TYPES = ("default", "linear", "llama3")

ROPE_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

LONGEST_SHOWN = 80
"""Characters of a value in a message."""


class UnsupportedModel(ValueError):
    """The folder is not a HF model, or a model that is not supported; the message names what is supported."""


def read_model_config(file: Path, value_head: bool = False) -> dict[str, Any]:
    """The checked contents of a model's config.json, with the keys of llama; with `value_head` also of a value model.

    Raises:
        UnsupportedModel: it cannot be read; or as `check_model_config`.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedModel(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        problem = git_lfs_pointer(file) or f"is not a model configuration: not JSON: {error}"
        raise UnsupportedModel(f"{file}: {problem}") from None
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{file}: is not a model configuration: it contains a {type(raw).__name__}")
    return check_model_config(raw, str(file), value_head)


def check_model_config(raw: Mapping[str, Any], source: str = CONFIG_NAME, value_head: bool = False) -> dict[str, Any]:
    """The settings of a model, with the keys of llama, once it is checked that the model can be trained.

    Args:
        raw: contents of its config.json.
        source: name of the file in errors.
        value_head: whether it is the model of a critic, which can be a value model.

    Raises:
        UnsupportedModel: an unknown architecture, a missing or invalid size, or an option that changes the computation
            in a way that is not implemented.
    """
    try:
        family = _family(raw, value_head)
        settings = family.settings(raw)
        _check_sizes(settings, family.sizes)
        _check_options(settings, family.only)
        if family.mixture is not None:
            _check_mixture(family.mixture(settings))
        _check_rotary(settings, family)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{source}: {error}") from None
    return settings


def rotary_values(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings in one mapping: `rope_parameters` of transformers 5, or the keys of older files.

    Raises:
        UnsupportedModel: a section is not a mapping.
    """
    values = {key: raw[key] for key in ("rope_theta", "partial_rotary_factor") if key in raw}
    for key in ("rope_scaling", "rope_parameters"):
        section = raw.get(key) or {}
        if not isinstance(section, dict):
            raise UnsupportedModel(f"{key}: {_shown(section)} is not an object")
        values |= section
    return values


def _family(raw: Mapping[str, Any], value_head: bool) -> ModelFamily:
    allowed = (*architectures(), *value_architectures()) if value_head else architectures()
    named = raw.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    known = ", ".join(allowed)
    if not isinstance(name, str):
        raise UnsupportedModel(f"architectures: {_shown(named)} is not a list with a name; known: {known}")
    if name not in allowed:
        near = difflib.get_close_matches(name, allowed, n=1)
        hint = f"; nearest is {near[0]}" if near else ""
        raise UnsupportedModel(f"architectures: {name} is not supported; known: {known}{hint}")
    labels = raw.get("id2label", raw.get("num_labels", 2))
    count = len(labels) if isinstance(labels, dict | list) else labels
    if name in value_architectures() and count != 1:
        raise UnsupportedModel(f"num_labels: {_shown(count)} (2 if absent); a value model has 1")
    return family_of(name)


def _check_mixture(mixture: Mixture) -> None:
    count = mixture.per_token
    if count > mixture.experts:
        raise UnsupportedModel(f"num_experts_per_tok: {count} is more than the {mixture.experts} experts")
    if count == 1 and mixture.normalised:
        raise UnsupportedModel("num_experts_per_tok: 1 of weight 1 trains no router; allowed: 2 or more")
    if not any(mixture.sparse):
        raise UnsupportedModel("decoder_sparse_step and mlp_only_layers: leave no layer with experts")


def _check_sizes(raw: Mapping[str, Any], more: Sequence[str]) -> None:
    for key in (*SIZES, *more, *OPTIONAL_SIZES):
        value = raw.get(key)
        if value is None and key in OPTIONAL_SIZES:
            continue
        if key not in raw:
            raise UnsupportedModel(f"has no {key}; give a whole number above 0")
        if type(value) is not int or value < 1:
            raise UnsupportedModel(f"{key}: {_shown(value)} is not a whole number above 0")
        if value > (most := MOST_LAYERS if key == "num_hidden_layers" else LARGEST_SIZE):
            raise UnsupportedModel(f"{key}: {value:,} is more than {most:,}")
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    if raw.get("head_dim") is None and hidden % heads:
        raise UnsupportedModel(f"num_attention_heads: {heads} does not divide hidden_size {hidden}; give head_dim")
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UnsupportedModel(f"num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}")


def _check_options(raw: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    for key, only in supported.items():
        value = raw.get(key, only)
        if (value != only) if only else value:
            raise UnsupportedModel(f"{key}: {_shown(value)} is not supported; allowed: {_shown(only)}")
    if not isinstance(raw.get("tie_word_embeddings", False), bool):
        raise UnsupportedModel(f"tie_word_embeddings: {_shown(raw['tie_word_embeddings'])} is not true or false")
    _check_number(raw, "rms_norm_eps")


def _check_rotary(raw: Mapping[str, Any], family: ModelFamily) -> None:
    values = rotary_values(raw)
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"rope_type: {_shown(kind)} is not supported; known: {', '.join(ROPE_TYPES)}")
    share = values.get("partial_rotary_factor", 1.0)
    if share != 1.0 and not family.traits.partial_rotary:
        raise UnsupportedModel(f"partial_rotary_factor: {_shown(share)}; allowed: 1.0")
    _check_number(values, "partial_rotary_factor")
    head = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    if share > 1.0 or int(head * share) % 2:
        raise UnsupportedModel(f"partial_rotary_factor: {_shown(share)} of {head} channels is no even number of them")
    for key in ROPE_NUMBERS:
        _check_number(values, key)


def _check_number(values: Mapping[str, Any], key: str) -> None:
    value = values.get(key, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedModel(f"{key}: {_shown(value)} is not a number above 0")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def read_positions(folder: str | Path) -> int | None:
    """`max_position_embeddings` of any HF model, also of one that cannot be trained; None where it is not known."""
    file = Path(folder) / CONFIG_NAME
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    sections = [raw, raw.get("text_config")] if isinstance(raw, dict) else []
    found = (section.get("max_position_embeddings") for section in sections if isinstance(section, dict))
    return next((number for number in found if isinstance(number, int) and number > 0), None)
