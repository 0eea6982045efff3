"""The distributed optimizer's state in a checkpoint that every layout can read, written without a gather or a copy.

Each rank holds a range of every parameter's flat state. A range of a row-major array is a few rectangles (part of a
row, whole rows, part of a row), and rectangles are what torch's distributed checkpoints consist of: a rank writes those
it holds, and at another layout reads those it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import (  # type: ignore[attr-defined]
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint import load as load_distributed  # type: ignore[attr-defined]
from torch.distributed.checkpoint import save as save_distributed  # type: ignore[attr-defined]
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from roll.distributed.train.checkpoint.safe_loading import check_metadata

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a rectangle, of any number of dimensions."""


def boxes(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """The rectangles that together are the elements `start` to `stop` (exclusive) of a row-major array, in order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        for offsets, sizes in boxes(start - last * row, stop - last * row, shape[1:]):
            yield (last, *offsets), (1, *sizes)
        return
    for offsets, sizes in boxes(start - (first - 1) * row, row, shape[1:]) if start % row else ():
        yield (first - 1, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    for offsets, sizes in boxes(0, stop - last * row, shape[1:]) if stop % row else ():
        yield (last, *offsets), (1, *sizes)


@dataclass(frozen=True)
class Piece:
    """A rectangle of the state of one parameter that this rank holds.

    Attributes:
        name: kind of state and name of the parameter, the same at every layout.
        offsets: of the rectangle in the whole parameter.
        sizes: of the rectangle.
        whole: shape of the whole parameter, over all ranks and layers.
        tensor: its elements, a view of the optimizer's.
        is_written: whether this rank is the one that writes it.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]
    tensor: torch.Tensor
    is_written: bool


HeldState = tuple[torch.Tensor, int, dict[str, torch.Tensor]]
"""A parameter of which this rank holds a part of the state, where that part begins, and its flat tensors by name."""


def pieces_of(held: Sequence[HeldState], model_state: dict[str, Any]) -> list[Piece]:
    """The rectangles that `held` consists of.

    Args:
        held: as from `held_states`.
        model_state: what the models' `sharded_state_dict` return, which places parameters in whole ones.
    """
    entries = nested_values(model_state)
    sharded = {
        id(entry.data): _parts(entry) for entry in entries if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }
    pieces: list[Piece] = []
    for parameter, start, states in held:
        for part in sharded[id(parameter)]:
            pieces += _pieces_of_part(parameter, part, start, states)
    return pieces


def held_states(optimizer: Any) -> Iterator[HeldState]:
    """What this rank holds of the state of Megatron's DistributedOptimizer, whose state is allocated.

    The fp32 weights of a parameter that is itself fp32 are left out: they are the model's.
    """
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    tensors = optimizer._get_main_param_and_optimizer_states(parameter)
                    if parameter.dtype == torch.float32:
                        tensors.pop("param", None)
                    flat = {name: tensor for name, tensor in tensors.items() if tensor.dim()}
                    yield parameter, ranges["param"].start, flat


def _parts(entry: Any) -> list[ShardedTensor]:
    """The parts of a parameter that have places of their own: gate and up of a fused layer, else the parameter."""
    if isinstance(entry, ShardedTensor):
        return [entry]
    return [part for part in nested_values(entry.build()) if isinstance(part, ShardedTensor)]


def _pieces_of_part(
    parameter: torch.Tensor, part: ShardedTensor, start: int, states: dict[str, torch.Tensor]
) -> Iterator[Piece]:
    data, layers = part.data, part.prepend_axis_num
    assert data.is_contiguous(), f"{part.key} is not contiguous"
    first = data.storage_offset() - parameter.storage_offset()
    for name, flat in states.items():
        low, high = max(start, first), min(start + flat.numel(), first + data.numel())
        at = low
        for offsets, sizes in boxes(low - first, high - first, tuple(data.shape)):
            count = math.prod(sizes)
            within = zip(part.global_offset[layers:], offsets, strict=True)
            yield Piece(
                name=f"{name}.{part.key}",
                offsets=(*part.global_offset[:layers], *(outer + inner for outer, inner in within)),
                sizes=(*(1 for _ in range(layers)), *sizes),
                whole=tuple(part.global_shape),
                tensor=flat[at - start : at - start + count].view(*(1 for _ in range(layers)), *sizes),
                is_written=not any(part.replica_id[:-1]),  # the last is the data rank, which has a range of its own
            )
            at += count


def save_pieces(folder: Path, pieces: Sequence[Piece], group: ProcessGroup | None = None) -> None:
    """Writes the pieces of all ranks; collective over `group`, by default over all ranks."""
    writer = FileSystemWriter(folder, thread_count=1, sync_files=False)  # the whole checkpoint is flushed at its end
    planner = _Saving([piece for piece in pieces if piece.is_written])
    save_distributed({}, storage_writer=writer, planner=planner, process_group=group)


def load_pieces(folder: Path, pieces: Sequence[Piece]) -> None:
    """Reads the elements of all pieces into their tensors; collective.

    Raises:
        ValueError: the checkpoint lacks one, or has another shape for it.
    """
    check_metadata(folder / ".metadata")
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    kinds = {name.partition(".")[0] for name in stored}
    wanted = []
    for piece in pieces:
        found = stored.get(piece.name)
        if piece.name.partition(".")[0] not in kinds:  # it was saved before the first step
            piece.tensor.zero_()
        elif not isinstance(found, TensorStorageMetadata) or tuple(found.size) != piece.whole:
            state = "is not in it" if found is None else f"has shape {tuple(getattr(found, 'size', ()))} there"
            raise ValueError(f"the optimizer's {piece.name} {state}; this run needs {piece.whole}")
        else:
            wanted.append(piece)
    load_distributed({}, storage_reader=FileSystemReader(folder), planner=_Loading(wanted))


class _Saving(SavePlanner):
    """Plans what this rank writes."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = {(piece.name, piece.offsets): piece for piece in pieces}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Does nothing: the constructor has the pieces."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(piece) for piece in self._pieces.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        offsets = write_item.index.offset
        assert offsets is not None
        return self._pieces[write_item.index.fqn, tuple(offsets)].tensor.detach()


def _write_item(piece: Piece) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(piece.name, torch.Size(piece.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)),
            properties=TensorProperties.create_from_tensor(piece.tensor),
            size=torch.Size(piece.whole),
        ),
    )


class _Loading(LoadPlanner):
    """Plans what this rank reads."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = {(piece.name, piece.offsets): piece for piece in pieces}
        self._metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items: list[ReadItem] = []
        for piece in self._pieces.values():
            stored = self._metadata.state_dict_metadata[piece.name]
            assert isinstance(stored, TensorStorageMetadata)
            wanted = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
            items += create_read_items_for_chunk_list(piece.name, stored, [wanted])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("the pieces are tensors")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        offsets = read_item.dest_index.offset
        assert offsets is not None
        tensor = self._pieces[read_item.dest_index.fqn, tuple(offsets)].tensor.detach()
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, offset, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Does nothing: `tensor` is the optimizer's own, so it is read in place."""
