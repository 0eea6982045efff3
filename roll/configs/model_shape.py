"""The shape of a model from its config.json, and how many parameters each device holds; no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import lcm
from pathlib import Path

from roll.configs.model_config import CONFIG_NAME, read_model_config
from roll.configs.paths import unreachable

VOCABULARY_MULTIPLE = 16
"""The trained vocabulary is padded to a multiple of this and of the tensor-parallel size."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder with grouped-query attention and a gated MLP."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    max_positions: int | None

    def padded_vocabulary(self, tensor: int) -> int:
        """Rows of the trained embedding at a tensor-parallel size."""
        unit = lcm(VOCABULARY_MULTIPLE, tensor)
        return -(-self.vocabulary // unit) * unit

    def query_width(self, tensor: int = 1) -> int:
        """Width of the query heads of one of `tensor` ranks."""
        return self.heads // tensor * self.head_dim

    def kv_width(self, tensor: int = 1) -> int:
        """Width of the key heads of one rank, which is that of its value heads; at least one head each."""
        return max(1, self.kv_heads // tensor) * self.head_dim

    def layer_parameters(self, tensor: int = 1) -> int:
        """Parameters of one layer on one of `tensor` ranks: matrices are split, norms are not."""
        query, qkv = self.query_width(tensor), self.query_width(tensor) + 2 * self.kv_width(tensor)
        matrices = self.hidden * (qkv + query) + 3 * self.hidden * self.intermediate // tensor
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return matrices + norms + (qkv if self.qkv_bias else 0)

    def total_parameters(self) -> int:
        """Parameters of the model as published: no padding, tied weights once."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * self.layer_parameters() + self.hidden

    def stage_parameters(self, stage: int, stages: int, tensor: int) -> int:
        """Parameters of one rank of one pipeline stage; with tied weights and several stages the last keeps a copy."""
        count = self.layers // stages * self.layer_parameters(tensor)
        table = self.padded_vocabulary(tensor) // tensor * self.hidden
        first, last = stage == 0, stage == stages - 1
        if first:
            count += table
        if last:
            count += self.hidden + (0 if self.tied and first else table)
        return count


def read_model_shape(folder: str | Path) -> ModelShape | None:
    """The shape of the model in `folder`, or None when there is no config.json to read.

    Raises:
        UnsupportedModel: as `check_model_config`.
    """
    file = Path(folder) / CONFIG_NAME
    if not os.path.isfile(file) or unreachable(file):
        return None
    config = read_model_config(file)
    architecture = config["architectures"][0]
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return ModelShape(
        architecture=architecture,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        max_positions=config.get("max_position_embeddings"),
    )
