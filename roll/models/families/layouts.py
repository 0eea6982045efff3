"""How a parameter is made of the tensors of a Hugging Face folder, and how it is split over ranks.

A layout has inverse directions, exact to the bit: `shard` reads the slices that one tensor-parallel rank owns; `merge`
joins the shards of all ranks into the HF tensors, and `write` copies one rank's part into HF tensors that all ranks
fill together. `engine_slice` is what a rank of an SGLang engine holds of a HF tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from roll.models.families.shape import ModelShape

Source = Any
"""A torch.Tensor, or the safetensors slice object of a tensor in a file; both accept row and column slices."""

TRAINED_VOCABULARY_MULTIPLE = 16
"""Same padded size for every power-of-two layout up to 16 ranks, so that checkpoints can change layout."""

ENGINE_VOCABULARY_MULTIPLE = 64
"""SGLang pads the vocabulary with rows of zeros to a multiple of this."""


def padded_vocabulary(vocabulary: int, ranks: int) -> int:
    """Rows of the embedding on all ranks together: the vocabulary rounded up to a multiple of `ranks` and of 16."""
    multiple = math.lcm(TRAINED_VOCABULARY_MULTIPLE, ranks)
    return -(-vocabulary // multiple) * multiple


class Layout(Protocol):
    """How one Megatron parameter is split over tensor-parallel ranks."""

    is_split: ClassVar[bool]
    """False if every rank holds the same tensor."""

    def shard(self, sources: Sequence[Source], model: ModelShape, rank: int, ranks: int) -> torch.Tensor:
        """The part of `rank`, contiguous, without padding rows."""
        ...

    def merge(self, shards: Sequence[torch.Tensor], model: ModelShape) -> list[torch.Tensor]:
        """The HF tensors, from the shards of all ranks in rank order (including padding rows)."""
        ...

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, model: ModelShape, rank: int) -> None:
        """Copies the part of `rank` into HF tensor number `part`, which is complete after every rank has done this."""
        ...

    def hf_shapes(self, shape: Sequence[int], ranks: int, model: ModelShape) -> list[tuple[int, ...]]:
        """Shapes of the tensors that `merge` returns, from the shape of one shard."""
        ...

    def engine_slice(self, tensor: torch.Tensor, part: int, model: ModelShape, rank: int, ranks: int) -> torch.Tensor:
        """What rank `rank` of an engine has of the whole HF tensor number `part`."""
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

    def shard(self, sources: Sequence[Source], model: ModelShape, rank: int, ranks: int) -> torch.Tensor:
        whole: torch.Tensor = sources[0][:]
        return whole

    def merge(self, shards: Sequence[torch.Tensor], model: ModelShape) -> list[torch.Tensor]:
        return [shards[0]]

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, model: ModelShape, rank: int) -> None:
        """Only rank 0 writes."""
        if rank == 0:
            target.copy_(shard)

    def hf_shapes(self, shape: Sequence[int], ranks: int, model: ModelShape) -> list[tuple[int, ...]]:
        return [tuple(shape)]

    def engine_slice(self, tensor: torch.Tensor, part: int, model: ModelShape, rank: int, ranks: int) -> torch.Tensor:
        return tensor


@dataclass(frozen=True)
class InputSplit:
    """A row-parallel linear [out, in]: the columns are split."""

    is_split: ClassVar[bool] = True

    def shard(self, sources: Sequence[Source], model: ModelShape, rank: int, ranks: int) -> torch.Tensor:
        width = _shape(sources[0])[1] // ranks
        columns: torch.Tensor = sources[0][:, rank * width : (rank + 1) * width]
        return columns.contiguous()

    def merge(self, shards: Sequence[torch.Tensor], model: ModelShape) -> list[torch.Tensor]:
        return [_joined(shards, dim=1)]

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, model: ModelShape, rank: int) -> None:
        width = shard.shape[1]
        target[:, rank * width : (rank + 1) * width].copy_(shard)

    def hf_shapes(self, shape: Sequence[int], ranks: int, model: ModelShape) -> list[tuple[int, ...]]:
        return [(shape[0], shape[1] * ranks)]

    def engine_slice(self, tensor: torch.Tensor, part: int, model: ModelShape, rank: int, ranks: int) -> torch.Tensor:
        return tensor.chunk(ranks, 1)[rank]


@dataclass(frozen=True)
class Vocabulary:
    """Rows are token ids: padded to `padded_vocabulary`, then split."""

    is_split: ClassVar[bool] = True

    def shard(self, sources: Sequence[Source], model: ModelShape, rank: int, ranks: int) -> torch.Tensor:
        """The rank's rows without padding rows, which the caller sets to zero."""
        height = padded_vocabulary(model.vocabulary, ranks) // ranks
        start = min(rank * height, model.vocabulary)
        return _rows(sources[0], start, min((rank + 1) * height, model.vocabulary))

    def merge(self, shards: Sequence[torch.Tensor], model: ModelShape) -> list[torch.Tensor]:
        return [_joined(shards)[: model.vocabulary]]

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, model: ModelShape, rank: int) -> None:
        """Writes the rank's rows without padding rows."""
        own = target[rank * len(shard) : (rank + 1) * len(shard)]
        own.copy_(shard[: len(own)])

    def hf_shapes(self, shape: Sequence[int], ranks: int, model: ModelShape) -> list[tuple[int, ...]]:
        return [(model.vocabulary, shape[1])]

    def engine_slice(self, tensor: torch.Tensor, part: int, model: ModelShape, rank: int, ranks: int) -> torch.Tensor:
        """The rank's rows, with zeros where the padded vocabulary has no token."""
        rows = -(-len(tensor) // ENGINE_VOCABULARY_MULTIPLE) * ENGINE_VOCABULARY_MULTIPLE // ranks
        held = tensor[rank * rows : (rank + 1) * rows]
        return held if len(held) == rows else _joined([held, held.new_zeros(rows - len(held), *tensor.shape[1:])])


@dataclass(frozen=True)
class EngineWholeVocabulary(Vocabulary):
    """As `Vocabulary`; every rank of an engine holds all rows, without padding."""

    def engine_slice(self, tensor: torch.Tensor, part: int, model: ModelShape, rank: int, ranks: int) -> torch.Tensor:
        return tensor


@dataclass(frozen=True)
class GatedPair:
    """Gate and up projections of the MLP: each rank holds [gate_i; up_i]."""

    is_split: ClassVar[bool] = True

    def shard(self, sources: Sequence[Source], model: ModelShape, rank: int, ranks: int) -> torch.Tensor:
        height = _shape(sources[0])[0] // ranks
        return _joined([_rows(source, rank * height, (rank + 1) * height) for source in sources])

    def merge(self, shards: Sequence[torch.Tensor], model: ModelShape) -> list[torch.Tensor]:
        """The gate rows of all ranks, and the up rows of all ranks."""
        halves = [shard.chunk(2) for shard in shards]
        return [_joined([half[part] for half in halves]) for part in range(2)]

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, model: ModelShape, rank: int) -> None:
        half = shard.chunk(2)[part]
        target[rank * len(half) : (rank + 1) * len(half)].copy_(half)

    def hf_shapes(self, shape: Sequence[int], ranks: int, model: ModelShape) -> list[tuple[int, ...]]:
        return [(shape[0] * ranks // 2, *shape[1:])] * 2

    def engine_slice(self, tensor: torch.Tensor, part: int, model: ModelShape, rank: int, ranks: int) -> torch.Tensor:
        return tensor.chunk(ranks)[rank]


@dataclass(frozen=True)
class GroupedQKV:
    """Query, key and value rows interleaved by query group: [q.. k v] of group 0, then of group 1, and so on.

    The interleaved rows are split into equal blocks, one per rank. If the ranks divide the groups, a block consists of
    whole groups, and `shard` reads only its slices.
    """

    is_split: ClassVar[bool] = True

    def shard(self, sources: Sequence[Source], model: ModelShape, rank: int, ranks: int) -> torch.Tensor:
        """The rank's block of the interleaved rows, of weights or biases."""
        groups = model.kv_heads
        if groups % ranks == 0:
            own = groups // ranks
            heights = [_shape(source)[0] // groups * own for source in sources]
            parts = [_rows(s, rank * height, (rank + 1) * height) for s, height in zip(sources, heights, strict=True)]
            return self._interleave(parts, own)
        whole = self._interleave([source[:] for source in sources], groups)
        return whole.chunk(ranks)[rank].contiguous()

    def merge(self, shards: Sequence[torch.Tensor], model: ModelShape) -> list[torch.Tensor]:
        """The query, key and value rows, each in group order."""
        whole = _joined(shards)
        per_group = model.heads // model.kv_heads
        grouped = whole.view(model.kv_heads, per_group + 2, model.head_dim, *whole.shape[1:])
        parts = grouped.split([per_group, 1, 1], dim=1)
        return [part.reshape(-1, *whole.shape[1:]) for part in parts]

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, model: ModelShape, rank: int) -> None:
        """Writes the rank's rows of query (part 0), key (1) or value (2) heads; it may have a part of a head."""
        size, per_group = model.head_dim, model.heads // model.kv_heads
        first, end = rank * len(shard), (rank + 1) * len(shard)
        for index in range(first // size, -(-end // size)):
            group, offset = divmod(index, per_group + 2)
            if max(0, offset - per_group + 1) == part:
                low, high = max(first, index * size), min(end, (index + 1) * size)
                row = (group * per_group + offset if part == 0 else group) * size + low - index * size
                target[row : row + high - low].copy_(shard[low - first : high - first])

    def hf_shapes(self, shape: Sequence[int], ranks: int, model: ModelShape) -> list[tuple[int, ...]]:
        heights = (model.heads, model.kv_heads, model.kv_heads)
        return [(height * model.head_dim, *shape[1:]) for height in heights]

    def engine_slice(self, tensor: torch.Tensor, part: int, model: ModelShape, rank: int, ranks: int) -> torch.Tensor:
        """Its heads; with more ranks than key-value heads, several ranks have the same key-value head."""
        copies = 1 if part == 0 else max(1, ranks // model.kv_heads)
        return tensor.chunk(ranks // copies)[rank // copies]

    @staticmethod
    def _interleave(parts: Sequence[torch.Tensor], groups: int) -> torch.Tensor:
        tail = parts[0].shape[1:]
        grouped = [part.reshape(groups, -1, *tail) for part in parts]
        return _joined(grouped, dim=1).reshape(-1, *tail)


@dataclass(frozen=True)
class Stacked:
    """One tensor with the rows of all those of another layout, one below the other.

    Attributes:
        parts: the layout of the tensors that are stacked, GroupedQKV or GatedPair.
    """

    parts: Layout
    is_split: ClassVar[bool] = True

    def shard(self, sources: Sequence[Source], model: ModelShape, rank: int, ranks: int) -> torch.Tensor:
        bounds = self._bounds(_shape(sources[0]), model)
        return self.parts.shard([_RowRange(sources[0], *each) for each in bounds], model, rank, ranks)

    def merge(self, shards: Sequence[torch.Tensor], model: ModelShape) -> list[torch.Tensor]:
        return [_joined(self.parts.merge(shards, model))]

    def write(self, shard: torch.Tensor, target: torch.Tensor, part: int, model: ModelShape, rank: int) -> None:
        for number, (start, stop) in enumerate(self._bounds(target.shape, model)):
            self.parts.write(shard, target[start:stop], number, model, rank)

    def hf_shapes(self, shape: Sequence[int], ranks: int, model: ModelShape) -> list[tuple[int, ...]]:
        return [(shape[0] * ranks, *shape[1:])]

    def engine_slice(self, tensor: torch.Tensor, part: int, model: ModelShape, rank: int, ranks: int) -> torch.Tensor:
        """The rank's rows of each stacked tensor, one below the other."""
        bounds = enumerate(self._bounds(tensor.shape, model))
        return _joined([self.parts.engine_slice(tensor[a:b], number, model, rank, ranks) for number, (a, b) in bounds])

    def _bounds(self, whole: Sequence[int], model: ModelShape) -> list[tuple[int, int]]:
        """First row of each stacked tensor, and the row after its last."""
        ends = list(accumulate(shape[0] for shape in self.parts.hf_shapes(whole, 1, model)))
        return list(pairwise([0, *ends]))


@dataclass(frozen=True)
class _RowRange:
    """Rows `start` to `stop` of a source, as a source."""

    source: Source
    start: int
    stop: int

    @property
    def shape(self) -> Sequence[int]:
        return (self.stop - self.start, *_shape(self.source)[1:])

    def __getitem__(self, rows: slice) -> torch.Tensor:
        start, stop, _ = rows.indices(self.stop - self.start)
        return _rows(self.source, self.start + start, self.start + stop)
