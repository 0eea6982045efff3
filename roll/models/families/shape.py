"""The numbers of a model: read from its config.json, and what follows from them for each device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.base.errors import unreachable
from roll.hub.names import CONFIG_NAME
from roll.models.families.family import LayerTraits, ModelFamily
from roll.models.families.hf_config import UnsupportedModel, read_model_config, rotary_values
from roll.models.families.layouts import GroupedQKV, Vocabulary, padded_vocabulary
from roll.models.families.mixture import Mixture
from roll.models.families.registry import family_of
from roll.models.families.weights import WeightRule

HEAD_CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Size of the fp32 logits of one chunk of tokens on one rank: the output head never has those of all tokens. Chunks
that fit into caches are fast on a CPU; larger ones keep a GPU busy and need fewer reductions over ranks."""

HEAD_KEPT_BYTES = 512 * 2**20
"""Logits up to this size are kept for the head's backward pass; larger ones are recomputed chunk by chunk."""


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
    share: float = 1.0
    """Of the channels of a head, the first ones, that are rotated."""


@dataclass(frozen=True)
class LocalAttention:
    """The layers that attend to the last `window` tokens alone, with a rotary embedding of this `base`."""

    layers: tuple[bool, ...]
    window: int
    base: float


@dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder with RMSNorm, grouped-query attention, rotary embedding and a gated MLP, or experts.

    Queries are multiplied by `query_scale`; None is 1 / root of `head_dim`.

    With a `value_head` its output is one value for each token instead of logits; that of a reward model has no
    `value_bias`.
    """

    family: ModelFamily
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    max_positions: int | None
    norm_epsilon: float = 1e-6
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    local: LocalAttention | None = None
    query_scale: float | None = None
    value_head: bool = False
    value_bias: bool = True
    mixture: Mixture | None = None

    @property
    def experts(self) -> int:
        """Experts of a sparse layer; 0 in a dense model."""
        return self.mixture.experts if self.mixture else 0

    @property
    def expert_width(self) -> int:
        return self.mixture.width if self.mixture else 0

    @property
    def expert_gate_and_up(self) -> int:
        return 2 * self.expert_width

    @property
    def shared_width(self) -> int:
        return self.mixture.shared_width if self.mixture else 0

    @property
    def shared_gate_and_up(self) -> int:
        return 2 * self.shared_width

    def layer_rules(self, layer: int) -> tuple[WeightRule, ...]:
        """Weights of layer number `layer`, without its prefix; those of an expert once for all experts."""
        sparse = self.mixture is not None and self.mixture.sparse[layer]
        return self.family.sparse_layer if sparse else self.family.layer

    def padded_vocabulary(self, tensor: int) -> int:
        """Rows of the trained embedding at a tensor-parallel size."""
        return padded_vocabulary(self.vocabulary, tensor)

    def query_width(self, tensor: int = 1) -> int:
        """Width of the query heads of one of `tensor` ranks."""
        return self.heads // tensor * self.head_dim

    def kv_width(self, tensor: int = 1) -> int:
        """Width of the key heads of one rank, which is that of its value heads; at least one head each."""
        return max(1, self.kv_heads // tensor) * self.head_dim

    @property
    def is_plain(self) -> bool:
        """Whether Transformer Engine's spec of a decoder layer computes it."""
        return self.family.traits == LayerTraits() and self.rotary.share == 1.0

    @property
    def qkv_rows(self) -> int:
        """Rows of the query, key and value matrix, which Megatron splits evenly, also within a head."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def gate_and_up(self) -> int:
        """Rows of the gate and up projections together."""
        return 2 * self.intermediate

    def fills_vocabulary(self, tensor: int) -> bool:
        """Whether every rank has tokens, where the padded vocabulary is split evenly."""
        return self.padded_vocabulary(tensor) // tensor * (tensor - 1) < self.vocabulary

    def layer_parameters(self, tensor: int = 1, repeats_kv: bool = False, layer: int = 0) -> int:
        """Parameters of one layer on one of `tensor` ranks, without experts: matrices are split, norms are not.

        With more ranks than key-value heads, an engine `repeats_kv` heads, and Megatron splits them.
        """
        rules = (rule for rule in self.layer_rules(layer) if not rule.is_expert)
        return sum(self.rank_parameters(rule, tensor, repeats_kv) for rule in rules)

    def expert_parameters(self, stage: int, stage_layers: Sequence[int], expert: int, expert_tensor: int) -> int:
        """Parameters of experts on one rank of one pipeline stage.

        The experts are split over `expert` ranks, each of them over `expert_tensor`.
        """
        rules = (rule for layer in _layers(stage, stage_layers) for rule in self.layer_rules(layer) if rule.is_expert)
        return sum(rule.count(self) // expert_tensor for rule in rules) * (self.experts // expert)

    def rank_parameters(self, rule: WeightRule, tensor: int, repeats_kv: bool = False) -> int:
        """Parameters of a weight on one of `tensor` ranks, with the rows that pad a vocabulary."""
        count = rule.count(self)
        if isinstance(rule.layout, Vocabulary):
            return self.padded_vocabulary(tensor) // tensor * (count // self.vocabulary)
        if not rule.layout.is_split:
            return count
        if repeats_kv and isinstance(getattr(rule.layout, "parts", rule.layout), GroupedQKV):
            return count // self.qkv_rows * (self.query_width(tensor) + 2 * self.kv_width(tensor))
        return count // tensor

    def stage_parameters(
        self,
        stage: int,
        stage_layers: Sequence[int],
        tensor: int,
        repeats_kv: bool = False,
    ) -> int:
        """Parameters of one rank of one pipeline stage without experts.

        With tied weights and several stages the last keeps a copy.
        """
        layers = _layers(stage, stage_layers)
        count = sum(self.layer_parameters(tensor, repeats_kv, layer) for layer in layers)
        table = self.padded_vocabulary(tensor) // tensor * self.hidden
        first, last = stage == 0, stage == len(stage_layers) - 1
        if first:
            count += table
        if last:
            head = self.hidden if self.value_head else 0 if self.tied and first else table
            count += self.hidden + head
        return count

    @property
    def matrices(self) -> int:
        """Weights of the matrices of all layers that compute one token, without embedding and head."""
        per_token = self.mixture.per_token if self.mixture else 0
        rules = (rule for layer in range(self.layers) for rule in self.layer_rules(layer) if len(rule.size) > 1)
        return sum(rule.count(self) * (per_token if rule.is_expert else 1) for rule in rules)

    def training_operations(self, tokens: float, squares: float, scored: float) -> float:
        """Floating point operations of the model in a forward and a backward pass, as MFU counts them.

        6 for each weight of a matrix and token, and 6 l q L^2 for causal attention over L tokens, of which the mask
        needs half (Chowdhery et al. 2022, PaLM, appendix B). Recomputation does not count, nor does the embedding.

        Args:
            tokens: of all samples.
            squares: sum of the squared lengths of all samples.
            scored: tokens whose logits are computed.
        """
        attention = self.layers * self.query_width() * squares
        return 6 * (self.matrices * tokens + attention + self.vocabulary * self.hidden * scored)

    def crossover_length(self) -> float:
        """Length in tokens of a sample whose attention takes as many operations as all matrices.

        With P parameters in matrices, l layers and query heads of width q together, the forward pass of L tokens takes
        2 P L operations for the matrices and 2 l q L^2 for the causal products of queries, keys and values. Both are
        equal at P / (l q). A `value_head` takes nothing.
        """
        head = 0 if self.value_head else self.hidden * self.vocabulary
        return (self.matrices + head) / (self.layers * self.query_width())


def _layers(stage: int, stage_layers: Sequence[int]) -> range:
    first = sum(stage_layers[:stage])
    return range(first, first + stage_layers[stage])


def read_model_shape(folder: str | Path, value_head: bool = False, value_bias: bool = True) -> ModelShape | None:
    """The shape of the model in `folder`, or None when there is no config.json to read.

    With `value_head`, for a critic, it may be a value model; without `value_bias` it is a reward model.

    Raises:
        UnsupportedModel: as `check_model_config`.
    """
    file = Path(folder) / CONFIG_NAME
    if not os.path.isfile(file) or unreachable(file):
        return None
    return model_shape(read_model_config(file, value_head), value_head, value_bias)


def known_model_shape(folder: str | Path, value_head: bool = False, value_bias: bool = True) -> ModelShape:
    """`read_model_shape` of a folder that a run needs.

    Raises:
        UnsupportedModel: also where there is no config.json.
    """
    shape = read_model_shape(folder, value_head, value_bias)
    if shape is None:
        file = Path(folder) / CONFIG_NAME
        raise UnsupportedModel(f"{file}: no such file; give the folder of a HF model (config.json, *.safetensors)")
    return shape


def model_shape(settings: Mapping[str, Any], value_head: bool = False, value_bias: bool = True) -> ModelShape:
    """The shape from settings that `check_model_config` has returned."""
    architecture = settings["architectures"][0]
    family = family_of(architecture)
    heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
    return ModelShape(
        family=family,
        architecture=architecture,
        layers=settings["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim") or hidden // heads,
        intermediate=settings["intermediate_size"],
        vocabulary=settings["vocab_size"],
        tied=settings.get("tie_word_embeddings", False) and not value_head,
        max_positions=settings.get("max_position_embeddings"),
        norm_epsilon=settings.get("rms_norm_eps", 1e-6),
        rotary=_rotary(settings),
        local=_local(settings) if family_of(architecture).traits.local_layers else None,
        query_scale=None if (scalar := settings.get("query_pre_attn_scalar")) is None else float(scalar) ** -0.5,
        value_head=value_head,
        value_bias=value_bias,
        mixture=family.mixture(settings) if family.mixture else None,
    )


def _rotary(settings: Mapping[str, Any]) -> RotaryConfig:
    values = rotary_values(settings)
    positions = values.get("original_max_position_embeddings") or settings.get("max_position_embeddings") or 8192
    return RotaryConfig(
        base=float(values.get("rope_theta", 10000.0)),
        kind=values.get("rope_type") or values.get("type") or "default",
        factor=float(values.get("factor", 1.0)),
        low_frequency_factor=float(values.get("low_freq_factor", 1.0)),
        high_frequency_factor=float(values.get("high_freq_factor", 4.0)),
        original_positions=int(positions),
        share=float(values.get("partial_rotary_factor", 1.0)),
    )


def _local(settings: Mapping[str, Any]) -> LocalAttention:
    local = tuple(kind == "sliding_attention" for kind in settings["layer_types"])
    return LocalAttention(local, settings["sliding_window"], float(settings["local_rope_theta"]))
