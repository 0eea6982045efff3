"""What a HF config.json says about a dense decoder, checked and in one vocabulary."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""HF architecture name and the family whose mapping it uses."""

ROPE_TYPES = ("default", "linear", "llama3")


class UnsupportedModel(ValueError):
    """The folder is not a HF model, or one this framework cannot run; the message says what would work."""


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary position embedding.

    `base` is rope_theta. `linear` divides every frequency by `factor`; `llama3` divides the low frequencies by it and
    blends between `high_frequency_factor` and `low_frequency_factor` turns over `original_positions` tokens.
    """

    base: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a dense decoder with RMSNorm, SwiGLU and rotary embedding."""

    family: str
    architecture: str
    layers: int
    hidden_size: int
    ffn_size: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    norm_epsilon: float
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rotary: RotaryConfig
    dtype: str

    @property
    def parameters(self) -> int:
        """Weights of the whole model, tied embeddings counted once."""
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = self.hidden_size * (2 * query + 2 * key)
        attention += (query + 2 * key) * self.qkv_bias + 2 * self.head_size * self.qk_norm
        layer = attention + 3 * self.hidden_size * self.ffn_size + 2 * self.hidden_size
        embeddings = self.vocabulary * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.layers * layer + embeddings + self.hidden_size


def read_hf_config(folder: str | Path) -> DecoderConfig:
    """Reads `folder`/config.json.

    Raises:
        UnsupportedModel: no such file, an unknown architecture, or an option that changes the arithmetic and that
            the mapping does not know.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UnsupportedModel(f"{path}: no such file; give the folder of a HF model (config.json, *.safetensors)")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UnsupportedModel(f"{path}: not JSON: {error}") from error
    return decoder_config(raw, str(path))


def decoder_config(raw: dict[str, Any], source: str = "config.json") -> DecoderConfig:
    """The same from a parsed config.json; `source` names it in errors."""
    architecture = _architecture(raw, source)
    family = ARCHITECTURES[architecture]
    _refuse_unknown_arithmetic(raw, family, source)
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    return DecoderConfig(
        family=family,
        architecture=architecture,
        layers=raw["num_hidden_layers"],
        hidden_size=hidden,
        ffn_size=raw["intermediate_size"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_size=raw.get("head_dim") or hidden // heads,
        vocabulary=raw["vocab_size"],
        norm_epsilon=raw.get("rms_norm_eps", 1e-6),
        max_positions=raw.get("max_position_embeddings", 2048),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rotary=_rotary(raw, source),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
    )


def _architecture(raw: dict[str, Any], source: str) -> str:
    """The one architecture named in the file, if it is known."""
    named = (raw.get("architectures") or ["(none)"])[0]
    if named in ARCHITECTURES:
        return named
    near = difflib.get_close_matches(named, ARCHITECTURES, n=1)
    hint = f"; nearest is {near[0]}" if near else ""
    raise UnsupportedModel(f"{source}: architecture {named} is not supported; known: {', '.join(ARCHITECTURES)}{hint}")


def _refuse_unknown_arithmetic(raw: dict[str, Any], family: str, source: str) -> None:
    """Options that the families' mapping does not express."""
    refused = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "attention_bias": bool(raw.get("attention_bias", False)),
        "use_sliding_window": bool(raw.get("use_sliding_window", False)),
    }
    for key, is_refused in refused.items():
        if is_refused:
            raise UnsupportedModel(f"{source}: {key}: {raw[key]!r} is not supported for {family}")


def _rotary(raw: dict[str, Any], source: str) -> RotaryConfig:
    """Rotary settings: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of older files."""
    values = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"{source}: rope type {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}")
    if values.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel(f"{source}: partial_rotary_factor other than 1 is not supported")
    return RotaryConfig(
        base=float(values.get("rope_theta", raw.get("rope_theta", 10000.0))),
        kind=kind,
        factor=float(values.get("factor", 1.0)),
        low_frequency_factor=float(values.get("low_freq_factor", 1.0)),
        high_frequency_factor=float(values.get("high_freq_factor", 4.0)),
        original_positions=int(
            values.get("original_max_position_embeddings", raw.get("max_position_embeddings", 8192))
        ),
    )
