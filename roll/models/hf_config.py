"""The shape of a dense decoder, read from a HF config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.configs.model_config import UnsupportedModel, family_of, read_model_config, rotary_values
from roll.hub.names import CONFIG_NAME


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
    """Shape of a dense decoder with RMSNorm, SwiGLU and rotary embedding.

    With a `value_head` its output is one value for each token instead of logits; that of a reward model has no
    `value_bias`.
    """

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
    value_head: bool = False
    value_bias: bool = True


def read_hf_config(folder: str | Path, value_head: bool = False, value_bias: bool = True) -> DecoderConfig:
    """Reads `folder`/config.json; with `value_head` it is the model of a critic, without `value_bias` a reward model.

    Raises:
        UnsupportedModel: the file is missing, or `check_model_config` rejects it.
    """
    path = Path(folder) / CONFIG_NAME
    if not path.is_file():
        raise UnsupportedModel(f"{path}: no such file; give the folder of a HF model (config.json, *.safetensors)")
    return decoder_config(read_model_config(path, value_head), value_head, value_bias)


def decoder_config(raw: dict[str, Any], value_head: bool = False, value_bias: bool = True) -> DecoderConfig:
    """The shape from a parsed config.json that `check_model_config` has accepted."""
    architecture = raw["architectures"][0]
    family = family_of(architecture)
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    return DecoderConfig(
        family=family.name,
        architecture=architecture,
        layers=raw["num_hidden_layers"],
        hidden_size=hidden,
        ffn_size=raw["intermediate_size"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_size=raw.get("head_dim") or hidden // heads,
        vocabulary=raw["vocab_size"],
        norm_epsilon=raw.get("rms_norm_eps", 1e-6),
        max_positions=raw.get("max_position_embeddings") or 2048,
        tied_embeddings=raw.get("tie_word_embeddings", False) and not value_head,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        rotary=_rotary(raw),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
        value_head=value_head,
        value_bias=value_bias,
    )


def _rotary(raw: dict[str, Any]) -> RotaryConfig:
    values = rotary_values(raw)
    positions = values.get("original_max_position_embeddings") or raw.get("max_position_embeddings") or 8192
    return RotaryConfig(
        base=float(values.get("rope_theta", 10000.0)),
        kind=values.get("rope_type") or values.get("type") or "default",
        factor=float(values.get("factor", 1.0)),
        low_frequency_factor=float(values.get("low_freq_factor", 1.0)),
        high_frequency_factor=float(values.get("high_freq_factor", 4.0)),
        original_positions=int(positions),
    )
