"""The mapping between HF tensors and Megatron parameters: names, and how each tensor is split over ranks.

Weight updates, import, export and tests all use this mapping. A rule names one Megatron parameter, the HF tensors it
is made of, and its layout. A layout has inverse directions, exact to the bit: `shard` reads the slices that one
tensor-parallel rank owns; `merge` joins the shards of all ranks into the HF tensors, and `write` copies one rank's part
into HF tensors that all ranks fill together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from roll.configs.model_config import padded_vocabulary
from roll.models.hf_config import DecoderConfig

if TYPE_CHECKING:
    import torch

Source = Any
"""A torch.Tensor, or the safetensors slice object of a tensor in a file; both accept row and column slices."""


class Layout(Protocol):
    """How one Megatron parameter is split over tensor-parallel ranks."""

    is_split: ClassVar[bool]
    """False if every rank holds the same tensor."""

    def shard(self, sources: Sequence[Source], config: DecoderConfig, rank: int, ranks: int) -> torch.Tensor:
        """The part of `rank`, contiguous, without padding rows."""
        ...

    def merge(self, shards: Sequence[torch.Tensor], config: DecoderConfig) -> list[torch.Tensor]:
        """The HF tensors, from the shards of all ranks in rank order (including padding rows)."""
        ...

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, config: DecoderConfig, rank: int) -> None:
        """Copies the part of `rank` into HF tensor number `part`, which is complete after every rank has done this."""
        ...

    def hf_shapes(self, shape: Sequence[int], ranks: int, config: DecoderConfig) -> list[tuple[int, ...]]:
        """Shapes of the tensors that `merge` returns, from the shape of one shard."""
        ...


def _rows(source: Source, start: int, stop: int) -> torch.Tensor:
    rows: torch.Tensor = source[start:stop]
    return rows


def _shape(source: Source) -> Sequence[int]:
    shape: Sequence[int] = source.get_shape() if hasattr(source, "get_shape") else source.shape
    return shape


def _joined(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    import torch  # here, so that a plan can read the names

    return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole tensor."""

    is_split: ClassVar[bool] = False

    def shard(self, sources: Sequence[Source], config: DecoderConfig, rank: int, ranks: int) -> torch.Tensor:
        whole: torch.Tensor = sources[0][:]
        return whole

    def merge(self, shards: Sequence[torch.Tensor], config: DecoderConfig) -> list[torch.Tensor]:
        return [shards[0]]

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, config: DecoderConfig, rank: int) -> None:
        """Only rank 0 writes."""
        if rank == 0:
            target.copy_(shard)

    def hf_shapes(self, shape: Sequence[int], ranks: int, config: DecoderConfig) -> list[tuple[int, ...]]:
        return [tuple(shape)]


@dataclass(frozen=True)
class InputSplit:
    """A row-parallel linear [out, in]: the columns are split."""

    is_split: ClassVar[bool] = True

    def shard(self, sources: Sequence[Source], config: DecoderConfig, rank: int, ranks: int) -> torch.Tensor:
        width = _shape(sources[0])[1] // ranks
        columns: torch.Tensor = sources[0][:, rank * width : (rank + 1) * width]
        return columns.contiguous()

    def merge(self, shards: Sequence[torch.Tensor], config: DecoderConfig) -> list[torch.Tensor]:
        return [_joined(shards, dim=1)]

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, config: DecoderConfig, rank: int) -> None:
        width = shard.shape[1]
        target[:, rank * width : (rank + 1) * width].copy_(shard)

    def hf_shapes(self, shape: Sequence[int], ranks: int, config: DecoderConfig) -> list[tuple[int, ...]]:
        return [(shape[0], shape[1] * ranks)]


@dataclass(frozen=True)
class Vocabulary:
    """Rows are token ids: padded to `padded_vocabulary`, then split."""

    is_split: ClassVar[bool] = True

    def shard(self, sources: Sequence[Source], config: DecoderConfig, rank: int, ranks: int) -> torch.Tensor:
        """The rank's rows without padding rows, which the caller sets to zero."""
        height = padded_vocabulary(config.vocabulary, ranks) // ranks
        start = min(rank * height, config.vocabulary)
        return _rows(sources[0], start, min((rank + 1) * height, config.vocabulary))

    def merge(self, shards: Sequence[torch.Tensor], config: DecoderConfig) -> list[torch.Tensor]:
        return [_joined(shards)[: config.vocabulary]]

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, config: DecoderConfig, rank: int) -> None:
        """Writes the rank's rows without padding rows."""
        own = target[rank * len(shard) : (rank + 1) * len(shard)]
        own.copy_(shard[: len(own)])

    def hf_shapes(self, shape: Sequence[int], ranks: int, config: DecoderConfig) -> list[tuple[int, ...]]:
        return [(config.vocabulary, shape[1])]


@dataclass(frozen=True)
class GatedPair:
    """Gate and up projections of the MLP: each rank holds [gate_i; up_i]."""

    is_split: ClassVar[bool] = True

    def shard(self, sources: Sequence[Source], config: DecoderConfig, rank: int, ranks: int) -> torch.Tensor:
        height = _shape(sources[0])[0] // ranks
        return _joined([_rows(source, rank * height, (rank + 1) * height) for source in sources])

    def merge(self, shards: Sequence[torch.Tensor], config: DecoderConfig) -> list[torch.Tensor]:
        """The gate rows of all ranks, and the up rows of all ranks."""
        halves = [shard.chunk(2) for shard in shards]
        return [_joined([half[part] for half in halves]) for part in range(2)]

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, config: DecoderConfig, rank: int) -> None:
        half = shard.chunk(2)[part]
        target[rank * len(half) : (rank + 1) * len(half)].copy_(half)

    def hf_shapes(self, shape: Sequence[int], ranks: int, config: DecoderConfig) -> list[tuple[int, ...]]:
        return [(shape[0] * ranks // 2, *shape[1:])] * 2


@dataclass(frozen=True)
class GroupedQKV:
    """Query, key and value rows interleaved by query group: [q.. k v] of group 0, then of group 1, and so on.

    The interleaved rows are split into equal blocks, one per rank. If the ranks divide the groups, a block consists of
    whole groups, and `shard` reads only its slices.
    """

    is_split: ClassVar[bool] = True

    def shard(self, sources: Sequence[Source], config: DecoderConfig, rank: int, ranks: int) -> torch.Tensor:
        """The rank's block of the interleaved rows, of weights or biases."""
        groups = config.kv_heads
        if groups % ranks == 0:
            own = groups // ranks
            heights = [_shape(source)[0] // groups * own for source in sources]
            parts = [_rows(s, rank * height, (rank + 1) * height) for s, height in zip(sources, heights, strict=True)]
            return self._interleave(parts, own)
        whole = self._interleave([source[:] for source in sources], groups)
        return whole.chunk(ranks)[rank].contiguous()

    def merge(self, shards: Sequence[torch.Tensor], config: DecoderConfig) -> list[torch.Tensor]:
        """The query, key and value rows, each in group order."""
        whole = _joined(shards)
        per_group = config.heads // config.kv_heads
        grouped = whole.view(config.kv_heads, per_group + 2, config.head_size, *whole.shape[1:])
        parts = grouped.split([per_group, 1, 1], dim=1)
        return [part.reshape(-1, *whole.shape[1:]) for part in parts]

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, config: DecoderConfig, rank: int) -> None:
        """Writes the rank's rows of query (part 0), key (1) or value (2) heads; it may have a part of a head."""
        size, per_group = config.head_size, config.heads // config.kv_heads
        first, end = rank * len(shard), (rank + 1) * len(shard)
        for index in range(first // size, -(-end // size)):
            group, offset = divmod(index, per_group + 2)
            if max(0, offset - per_group + 1) == part:
                low, high = max(first, index * size), min(end, (index + 1) * size)
                row = (group * per_group + offset if part == 0 else group) * size + low - index * size
                target[row : row + high - low].copy_(shard[low - first : high - first])

    def hf_shapes(self, shape: Sequence[int], ranks: int, config: DecoderConfig) -> list[tuple[int, ...]]:
        heights = (config.heads, config.kv_heads, config.kv_heads)
        return [(height * config.head_size, *shape[1:]) for height in heights]

    @staticmethod
    def _interleave(parts: Sequence[torch.Tensor], groups: int) -> torch.Tensor:
        tail = parts[0].shape[1:]
        grouped = [part.reshape(groups, -1, *tail) for part in parts]
        return _joined(grouped, dim=1).reshape(-1, *tail)


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter, the HF tensors it is made of, and its layout."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout


EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocabulary())
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated())
HEAD = Rule("output_layer.weight", ("lm_head.weight",), Vocabulary())
TIED_HEAD = Rule("output_layer.weight", ("model.embed_tokens.weight",), Vocabulary())
"""The last pipeline stage's copy of tied embeddings: imported, but not part of weight updates."""

VALUE_HEAD = (
    Rule("value_head.weight", ("score.weight",), Replicated()),
    Rule("value_head.bias", ("score.bias",), Replicated()),
)
"""The output of a critic, under the names of HF's `...ForTokenClassification`; a reward model has no bias."""

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

LAYER = (
    Rule("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), Replicated()),
    Rule("self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in _QKV), GroupedQKV()),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), InputSplit()),
    Rule("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",), Replicated()),
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GatedPair()),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), InputSplit()),
)
"""Rules of one llama layer; the other families add to them."""

QKV_BIAS = (Rule("self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in _QKV), GroupedQKV()),)

QK_NORM = (
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), Replicated()),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), Replicated()),
)


def layer_rules(config: DecoderConfig) -> tuple[Rule, ...]:
    """Rules of one layer of a model; see `stage_rules` for the full names."""
    return LAYER + (QKV_BIAS if config.qkv_bias else ()) + (QK_NORM if config.qk_norm else ())


def stage_rules(config: DecoderConfig, first_layer: int, layers: int, first: bool, last: bool) -> list[Rule]:
    """Rules of one pipeline stage in the order of a weight update, with full names.

    HF names contain the layer's index in the model, Megatron names its index in the pipeline stage.

    Args:
        config: the model.
        first_layer: global index of the stage's first layer.
        layers: layers of the stage.
        first: the stage holds the embedding.
        last: the stage holds the final norm and the head, or the value head.
    """
    rules = [EMBEDDING] if first else []
    for index in range(layers):
        for rule in layer_rules(config):
            hf = tuple(f"model.layers.{first_layer + index}.{name}" for name in rule.hf)
            rules.append(Rule(f"decoder.layers.{index}.{rule.megatron}", hf, rule.layout))
    if last:
        rules.append(FINAL_NORM)
        if config.value_head:
            rules += VALUE_HEAD if config.value_bias else VALUE_HEAD[:1]
        elif not config.tied_embeddings:
            rules.append(HEAD)
        elif not first:
            rules.append(TIED_HEAD)
    return rules
