"""A model's config.json: which models can be trained, their shape and the parameters of each device; no torch."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.base.errors import git_lfs_pointer, unreachable
from roll.hub.names import CONFIG_NAME


@dataclass(frozen=True)
class ModelFamily:
    """How the layers of a family of dense decoders differ from those of llama.

    Attributes:
        name: of the family.
        qkv_bias: the projections of query, key and value have a bias.
        qk_norm: the heads of query and key are normalised.
    """

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {
    "LlamaForCausalLM": ModelFamily("llama"),
    "Qwen2ForCausalLM": ModelFamily("qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": ModelFamily("qwen3", qk_norm=True),
}
"""The models that can be trained, by `architectures` in config.json. To add a family of dense decoders:

1. its entry here; a flag in `ModelFamily` for what no other family has, and with it a field of `ModelShape` below,
   which counts parameters, and of `DecoderConfig` in `roll/models/hf_config.py`; options of its config.json in `ONLY`;
2. `roll/models/weight_mapping.py`: the rules of its tensors, in `layer_rules`;
3. `roll/models/factory.py` (settings of Megatron) and `roll/models/local_spec.py` (its layers in plain torch);
4. `roll/distributed/infer/sglang_checksums.py`: how an engine fuses and splits tensors of new names;
5. `roll/models/tiny.py`: sizes that its config class needs beside `TINY_SHAPE`;
6. `roll/tools/rehearse/model.py`: `FAMILY_NAMES`, `NATIVE_TEMPLATE` (a chat template of `BUILT_IN` in
   `roll/datasets/templates.py`), and `END_OF_TURN` where it is not that of ChatML;
7. its case in `FAMILIES` of `tests/integration/test_megatron_strategy.py`, which compares it with transformers;
8. for reward models on SGLang engines a class in `roll/distributed/infer/sglang_models/value_models.py`;
9. its name in README.md; a chat template of its own also in `TEMPLATES` of `roll/configs/roles.py`.

`tests/models/test_families.py` compares this table with 2, 4, 5 and 6."""

ARCHITECTURES = tuple(FAMILIES)

VALUE_ARCHITECTURES = tuple(
    name.removesuffix("ForCausalLM") + suffix
    for suffix in ("ForTokenClassification", "ForSequenceClassification")
    for name in FAMILIES
)
"""Models of the same families whose output is a value, such as reward models: a critic can start from one."""


def family_of(architecture: str) -> ModelFamily:
    return FAMILIES[architecture.partition("For")[0] + "ForCausalLM"]


TRAINED_VOCABULARY_MULTIPLE = 16
"""Same padded size for every power-of-two layout up to 16 ranks, so that checkpoints can change layout."""

ADAPTER_CONFIG = "adapter_config.json"
"""In the folder of a LoRA adapter."""

SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
"""Required whole numbers."""

OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
"""Whole numbers that may be null or missing."""

MOST_LAYERS, LARGEST_SIZE = 10_000, 2**27
"""Bounds of a size, far above those of any model; a plan of a larger one would not end."""

ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "quantization_config": None,
}
"""Options that change the computation, and the one supported value of each, which is also the default."""

ROPE_TYPES = ("default", "linear", "llama3")

ROPE_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

LONGEST_SHOWN = 80
"""Characters of a value in a message."""


class UnsupportedModel(ValueError):
    """The folder is not a HF model, or a model that is not supported; the message names what is supported."""


def read_model_config(file: Path, value_head: bool = False) -> dict[str, Any]:
    """The checked contents of a model's config.json; with `value_head` it may be one of VALUE_ARCHITECTURES.

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
    check_model_config(raw, str(file), value_head)
    return raw


def check_model_config(raw: Mapping[str, Any], source: str = CONFIG_NAME, value_head: bool = False) -> None:
    """Checks that a model can be trained, with `value_head` as a critic; `source` names the file in errors.

    Raises:
        UnsupportedModel: an unknown architecture, a missing or invalid size, or an option that changes the computation
            in a way that is not implemented.
    """
    try:
        _check_architecture(raw, (*ARCHITECTURES, *VALUE_ARCHITECTURES) if value_head else ARCHITECTURES)
        _check_sizes(raw)
        _check_options(raw)
        _check_rotary(raw)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{source}: {error}") from None


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


def _check_architecture(raw: Mapping[str, Any], allowed: Sequence[str]) -> None:
    named = raw.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if name in allowed:
        labels = raw.get("id2label", raw.get("num_labels", 2))
        count = len(labels) if isinstance(labels, dict | list) else labels
        if name in VALUE_ARCHITECTURES and count != 1:
            raise UnsupportedModel(f"num_labels: {_shown(count)} (2 if absent); a value model has 1")
        return
    known = ", ".join(allowed)
    if not isinstance(name, str):
        raise UnsupportedModel(f"architectures: {_shown(named)} is not a list with a name; known: {known}")
    near = difflib.get_close_matches(name, allowed, n=1)
    hint = f"; nearest is {near[0]}" if near else ""
    raise UnsupportedModel(f"architectures: {name} is not supported; known: {known}{hint}")


def _check_sizes(raw: Mapping[str, Any]) -> None:
    for key in (*SIZES, *OPTIONAL_SIZES):
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


def _check_options(raw: Mapping[str, Any]) -> None:
    for key, only in ONLY.items():
        value = raw.get(key, only)
        if (value != only) if only else value:
            raise UnsupportedModel(f"{key}: {_shown(value)} is not supported; allowed: {_shown(only)}")
    if not isinstance(raw.get("tie_word_embeddings", False), bool):
        raise UnsupportedModel(f"tie_word_embeddings: {_shown(raw['tie_word_embeddings'])} is not true or false")
    _check_number(raw, "rms_norm_eps")


def _check_rotary(raw: Mapping[str, Any]) -> None:
    values = rotary_values(raw)
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"rope_type: {_shown(kind)} is not supported; known: {', '.join(ROPE_TYPES)}")
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor: {_shown(values['partial_rotary_factor'])}; allowed: 1.0")
    for key in ROPE_NUMBERS:
        _check_number(values, key)


def _check_number(values: Mapping[str, Any], key: str) -> None:
    value = values.get(key, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedModel(f"{key}: {_shown(value)} is not a number above 0")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def padded_vocabulary(vocabulary: int, ranks: int) -> int:
    """Rows of the embedding on all ranks together: the vocabulary rounded up to a multiple of `ranks` and of 16."""
    multiple = math.lcm(TRAINED_VOCABULARY_MULTIPLE, ranks)
    return -(-vocabulary // multiple) * multiple


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
        return padded_vocabulary(self.vocabulary, tensor)

    def query_width(self, tensor: int = 1) -> int:
        """Width of the query heads of one of `tensor` ranks."""
        return self.heads // tensor * self.head_dim

    def kv_width(self, tensor: int = 1) -> int:
        """Width of the key heads of one rank, which is that of its value heads; at least one head each."""
        return max(1, self.kv_heads // tensor) * self.head_dim

    @property
    def qkv_rows(self) -> int:
        """Rows of the query, key and value matrix, which Megatron splits evenly, also within a head."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def fills_vocabulary(self, tensor: int) -> bool:
        """Whether every rank has tokens, where the padded vocabulary is split evenly."""
        return self.padded_vocabulary(tensor) // tensor * (tensor - 1) < self.vocabulary

    def layer_parameters(self, tensor: int = 1, repeats_kv: bool = False) -> int:
        """Parameters of one layer on one of `tensor` ranks: matrices are split, norms are not.

        With more ranks than key-value heads, an engine `repeats_kv` heads, and Megatron splits them.
        """
        query = self.query_width(tensor)
        qkv = query + 2 * self.kv_width(tensor) if repeats_kv else self.qkv_rows // tensor
        matrices = self.hidden * (qkv + query) + 3 * self.hidden * self.intermediate // tensor
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return matrices + norms + (qkv if self.qkv_bias else 0)

    def stage_parameters(
        self,
        stage: int,
        stage_layers: Sequence[int],
        tensor: int,
        repeats_kv: bool = False,
        value_head: bool = False,
    ) -> int:
        """Parameters of one rank of one pipeline stage; with tied weights and several stages the last keeps a copy.

        With a `value_head` the output is one number instead of the vocabulary.
        """
        count = stage_layers[stage] * self.layer_parameters(tensor, repeats_kv)
        table = self.padded_vocabulary(tensor) // tensor * self.hidden
        first, last = stage == 0, stage == len(stage_layers) - 1
        if first:
            count += table
        if last:
            head = self.hidden if value_head else 0 if self.tied and first else table
            count += self.hidden + head
        return count

    @property
    def matrices(self) -> int:
        """Weights of the matrices of all layers, without embedding and head."""
        return self.layers * self.hidden * (self.qkv_rows + self.query_width() + 3 * self.intermediate)

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

    def crossover_length(self, value_head: bool = False) -> float:
        """Length in tokens of a sample whose attention takes as many operations as all matrices.

        With P parameters in matrices, l layers and query heads of width q together, the forward pass of L tokens takes
        2 P L operations for the matrices and 2 l q L^2 for the causal products of queries, keys and values. Both are
        equal at P / (l q). A `value_head` takes nothing.
        """
        head = 0 if value_head else self.hidden * self.vocabulary
        return (self.matrices + head) / (self.layers * self.query_width())


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


def read_model_shape(folder: str | Path, value_head: bool = False) -> ModelShape | None:
    """The shape of the model in `folder`, or None when there is no config.json to read.

    With `value_head`, for a critic, it may be one of VALUE_ARCHITECTURES.

    Raises:
        UnsupportedModel: as `check_model_config`.
    """
    file = Path(folder) / CONFIG_NAME
    if not os.path.isfile(file) or unreachable(file):
        return None
    config = read_model_config(file, value_head)
    architecture = config["architectures"][0]
    family = family_of(architecture)
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
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        max_positions=config.get("max_position_embeddings"),
    )
