"""How one Megatron parameter is made of HF tensors, and how it is cut over tensor-parallel ranks.

A layout has two directions. `shard` reads only the slices that a rank owns; `merge` takes the shards of all ranks in
order and returns the HF tensors, and `write` puts one rank's part into HF tensors that all ranks fill together. They
are inverse to each other, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from roll.models.hf_config import DecoderConfig

Source = Any
"""What a tensor is read from: a torch.Tensor or safetensors' slice of a file; both take row and column slices."""


class Layout(Protocol):
    """One way to cut and join."""

    is_split: ClassVar[bool]
    """False where every rank holds the same."""

    def shard(self, sources: Sequence[Source], config: DecoderConfig, rank: int, ranks: int) -> torch.Tensor:
        """The rank's part, contiguous, without padding rows."""
        ...

    def merge(self, shards: Sequence[torch.Tensor], config: DecoderConfig) -> list[torch.Tensor]:
        """The HF tensors, from the shards of all ranks in order (padding rows included)."""
        ...

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, config: DecoderConfig, rank: int) -> None:
        """Copies what `rank` holds of HF tensor number `part` into that tensor, whole once every rank has done so."""
        ...

    def hf_shapes(self, shape: Sequence[int], ranks: int, config: DecoderConfig) -> list[tuple[int, ...]]:
        """Shapes of what `merge` returns, from the shape of one shard."""
        ...


def padded_vocabulary(vocabulary: int, ranks: int) -> int:
    """Rows of the embedding on all ranks together: the vocabulary rounded up to a multiple of `ranks` and of 16."""
    import math

    multiple = math.lcm(VOCABULARY_MULTIPLE, ranks)
    return -(-vocabulary // multiple) * multiple


VOCABULARY_MULTIPLE = 16
"""Same padded size for every power-of-two layout up to 16 ranks, so that checkpoints can change layout."""


def _rows(source: Source, start: int, stop: int) -> torch.Tensor:
    return source[start:stop]


def _size(source: Source) -> int:
    shape = source.shape if isinstance(source, torch.Tensor) else source.get_shape()
    return int(shape[0])


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole tensor."""

    is_split: ClassVar[bool] = False

    def shard(self, sources: Sequence[Source], config: DecoderConfig, rank: int, ranks: int) -> torch.Tensor:
        """The whole tensor."""
        return sources[0][:]

    def merge(self, shards: Sequence[torch.Tensor], config: DecoderConfig) -> list[torch.Tensor]:
        """Any rank's tensor: the first."""
        return [shards[0]]

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, config: DecoderConfig, rank: int) -> None:
        """The whole, by rank 0."""
        if rank == 0:
            target.copy_(shard)

    def hf_shapes(self, shape: Sequence[int], ranks: int, config: DecoderConfig) -> list[tuple[int, ...]]:
        """The shard's own."""
        return [tuple(shape)]


@dataclass(frozen=True)
class InputSplit:
    """Columns [out, in] are split: a row-parallel linear."""

    is_split: ClassVar[bool] = True

    def shard(self, sources: Sequence[Source], config: DecoderConfig, rank: int, ranks: int) -> torch.Tensor:
        """Columns of this rank."""
        source = sources[0]
        columns = source.shape[1] if isinstance(source, torch.Tensor) else source.get_shape()[1]
        width = columns // ranks
        return source[:, rank * width : (rank + 1) * width].contiguous()

    def merge(self, shards: Sequence[torch.Tensor], config: DecoderConfig) -> list[torch.Tensor]:
        """Columns side by side."""
        return [torch.cat(list(shards), dim=1) if len(shards) > 1 else shards[0]]

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, config: DecoderConfig, rank: int) -> None:
        """Columns of this rank."""
        width = shard.shape[1]
        target[:, rank * width : (rank + 1) * width].copy_(shard)

    def hf_shapes(self, shape: Sequence[int], ranks: int, config: DecoderConfig) -> list[tuple[int, ...]]:
        """Columns times ranks."""
        return [(shape[0], shape[1] * ranks)]


@dataclass(frozen=True)
class Vocabulary:
    """Rows are tokens: padded to `padded_vocabulary`, then split."""

    is_split: ClassVar[bool] = True

    def shard(self, sources: Sequence[Source], config: DecoderConfig, rank: int, ranks: int) -> torch.Tensor:
        """Token rows of this rank that exist; the caller leaves the rest zero."""
        height = padded_vocabulary(config.vocabulary, ranks) // ranks
        start = min(rank * height, config.vocabulary)
        return _rows(sources[0], start, min((rank + 1) * height, config.vocabulary))

    def merge(self, shards: Sequence[torch.Tensor], config: DecoderConfig) -> list[torch.Tensor]:
        """Token rows in order, padding dropped."""
        whole = torch.cat(list(shards)) if len(shards) > 1 else shards[0]
        return [whole[: config.vocabulary]]

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, config: DecoderConfig, rank: int) -> None:
        """Token rows of this rank that exist."""
        own = target[rank * len(shard) : (rank + 1) * len(shard)]
        own.copy_(shard[: len(own)])

    def hf_shapes(self, shape: Sequence[int], ranks: int, config: DecoderConfig) -> list[tuple[int, ...]]:
        """The vocabulary without padding."""
        return [(config.vocabulary, shape[1])]


@dataclass(frozen=True)
class GatedPair:
    """Gate and up projections: each rank holds [gate_i; up_i]."""

    is_split: ClassVar[bool] = True

    def shard(self, sources: Sequence[Source], config: DecoderConfig, rank: int, ranks: int) -> torch.Tensor:
        """Gate rows of this rank above its up rows."""
        height = _size(sources[0]) // ranks
        return torch.cat([_rows(source, rank * height, (rank + 1) * height) for source in sources])

    def merge(self, shards: Sequence[torch.Tensor], config: DecoderConfig) -> list[torch.Tensor]:
        """All gates, then all ups."""
        halves = [shard.chunk(2) for shard in shards]
        if len(halves) == 1:
            return list(halves[0])
        return [torch.cat([half[part] for half in halves]) for part in range(2)]

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, config: DecoderConfig, rank: int) -> None:
        """Gate rows of this rank, or its up rows."""
        half = shard.chunk(2)[part]
        target[rank * len(half) : (rank + 1) * len(half)].copy_(half)

    def hf_shapes(self, shape: Sequence[int], ranks: int, config: DecoderConfig) -> list[tuple[int, ...]]:
        """Half a shard's rows, times ranks, twice."""
        return [(shape[0] * ranks // 2, *shape[1:])] * 2


@dataclass(frozen=True)
class GroupedQKV:
    """Query, key and value rows interleaved by query group: [q.. k v] of group 0, then of group 1, and so on.

    The whole is then cut into equal row blocks. With at least as many groups as ranks a block holds whole groups and
    only its slices are read.
    """

    is_split: ClassVar[bool] = True

    def shard(self, sources: Sequence[Source], config: DecoderConfig, rank: int, ranks: int) -> torch.Tensor:
        """This rank's block of the interleaved rows (works on weights and on biases)."""
        groups = config.kv_heads
        if groups % ranks == 0:
            own = groups // ranks
            heights = [_size(source) // groups * own for source in sources]
            parts = [_rows(s, rank * height, (rank + 1) * height) for s, height in zip(sources, heights, strict=True)]
            return self._interleave(parts, own)
        whole = self._interleave([source[:] for source in sources], groups)
        return whole.chunk(ranks)[rank].contiguous()

    def merge(self, shards: Sequence[torch.Tensor], config: DecoderConfig) -> list[torch.Tensor]:
        """Query, key and value rows, each with its groups in order."""
        whole = torch.cat(list(shards)) if len(shards) > 1 else shards[0]
        per_group = config.heads // config.kv_heads
        grouped = whole.view(config.kv_heads, per_group + 2, config.head_size, *whole.shape[1:])
        parts = grouped.split([per_group, 1, 1], dim=1)
        return [part.reshape(-1, *whole.shape[1:]) for part in parts]

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, config: DecoderConfig, rank: int) -> None:
        """This rank's query, key or value heads, each where its group has it."""
        size, per_group = config.head_size, config.heads // config.kv_heads
        heads = shard.view(-1, size, *shard.shape[1:])
        for index, head in enumerate(heads, start=rank * len(heads)):
            group, place = divmod(index, per_group + 2)
            if max(0, place - per_group + 1) == part:
                row = (group * per_group + place if part == 0 else group) * size
                target[row : row + size].copy_(head)

    def hf_shapes(self, shape: Sequence[int], ranks: int, config: DecoderConfig) -> list[tuple[int, ...]]:
        """Query rows, key rows, value rows."""
        heights = (config.heads, config.kv_heads, config.kv_heads)
        return [(height * config.head_size, *shape[1:]) for height in heights]

    @staticmethod
    def _interleave(parts: Sequence[torch.Tensor], groups: int) -> torch.Tensor:
        tail = parts[0].shape[1:]
        grouped = [part.reshape(groups, -1, *tail) for part in parts]
        return torch.cat(grouped, dim=1).reshape(-1, *tail)


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter, the HF tensors it is made of, and how."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout


EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocabulary())
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated())
HEAD = Rule("output_layer.weight", ("lm_head.weight",), Vocabulary())
TIED_HEAD = Rule("output_layer.weight", ("model.embed_tokens.weight",), Vocabulary())
"""The last stage's copy of tied embeddings: imported, never published."""

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

LAYER = (
    Rule("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), Replicated()),
    Rule("self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in _QKV), GroupedQKV()),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), InputSplit()),
    Rule("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",), Replicated()),
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GatedPair()),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), InputSplit()),
)
"""A layer of llama; the other families add to it."""

QKV_BIAS = (Rule("self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in _QKV), GroupedQKV()),)

QK_NORM = (
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), Replicated()),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), Replicated()),
)

FAMILIES: dict[str, tuple[Rule, ...]] = {
    "llama": LAYER,
    "qwen2": LAYER + QKV_BIAS,
    "qwen3": LAYER + QK_NORM,
}
"""Rules of one layer by family."""


def stage_rules(config: DecoderConfig, first_layer: int, layers: int, first: bool, last: bool) -> list[Rule]:
    """Rules of one pipeline stage in publishing order, with full names on both sides.

    Args:
        config: the model.
        first_layer: global index of the stage's first layer.
        layers: layers of the stage.
        first: the stage holds the embedding.
        last: the stage holds the final norm and the head.
    """
    rules = [EMBEDDING] if first else []
    for index in range(layers):
        for rule in FAMILIES[config.family]:
            hf = tuple(f"model.layers.{first_layer + index}.{name}" for name in rule.hf)
            rules.append(Rule(f"decoder.layers.{index}.{rule.megatron}", hf, rule.layout))
    if last:
        rules.append(FINAL_NORM)
        if not config.tied_embeddings:
            rules.append(HEAD)
        elif not first:
            rules.append(TIED_HEAD)
    return rules
