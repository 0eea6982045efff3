"""Writes small HF models with random weights, for tests, benchmarks and scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll.base.custom_modules import named_object
from roll.models.families.registry import family_named

TINY_SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.2,
}
"""Heads times head size differs from the hidden size and the vocabulary is odd, so that size mix-ups show."""


def write_tiny_model(folder: str | Path, family: str, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """Writes a HF folder (config and safetensors, no tokenizer) with random weights, norms and biases included.

    `overrides` are keys of the HF config that override `TINY_SHAPE`, such as `tie_word_embeddings=True`.
    """
    import torch

    known = family_named(family)
    model_class = named_object(known.transformers_class or f"transformers:{known.architecture}")
    defaults = {"tie_word_embeddings": False, "pad_token_id": None} | dict(known.rehearsal.shape)
    config = model_class.config_class(**TINY_SHAPE | defaults | overrides)
    if "eos_token_id" not in overrides and not isinstance(config.eos_token_id, int | None):
        config.eos_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(getattr(torch, dtype))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
    path = Path(folder)
    model.save_pretrained(path)
    return path
