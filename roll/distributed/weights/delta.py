"""Deltas of an engine's parameters: the positions and the new values of what has changed.

A parameter is flat here, as an engine rank has it in memory, and encoded in pieces. The delta of a piece is the new
values and, before each of them, the number of values that stay as they are, in one byte or in two. Where more stay than
fit, values in between are sent that have not changed. A piece of which most has changed is sent whole. New values
replace old ones, so nothing is rounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import torch

from roll.distributed.weights.plan import PlanError

PIECE = 1 << 24
"""Most values of a piece, which bounds the memory of its positions, 8 bytes each."""

GAP_DTYPES = {1: torch.uint8, 2: torch.int16}
"""Dtype of the gaps by their bytes; gap 0 is the lowest number of the dtype."""

LOADER = f"{__name__}.load_delta"
"""SGLang's name of `load_delta`, for `custom_weight_loader` and `load_format`."""


class DeltaError(PlanError):
    """A delta does not fit the parameter that it is of, or is incomplete."""


@dataclass(frozen=True)
class ChangedPiece:
    """What a delta has of one piece of a parameter; in its data the gaps are first, then the values.

    Attributes:
        name: of the parameter, as the engine has it.
        size: values of the whole parameter on this rank.
        dtype: of the values, torch's name without the prefix.
        first: position of the piece in the parameter.
        count: values that are sent.
        gap_bytes: of each gap; 0 where all values of the piece are sent.
    """

    name: str
    size: int
    dtype: str
    first: int
    count: int
    gap_bytes: int

    @property
    def value_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def bytes(self) -> int:
        return self.count * (self.gap_bytes + self.value_dtype.itemsize)


@dataclass(frozen=True)
class RankDelta:
    """What changes in the parameters of one engine rank: `data` has the delta of each of `pieces`, in this order."""

    pieces: tuple[ChangedPiece, ...]
    data: bytes

    def named_tensor(self) -> tuple[str, torch.Tensor]:
        """The delta as SGLang carries weights: a name, which is the table of the pieces, and a tensor [bytes] uint8."""
        table = json.dumps([astuple(each) for each in self.pieces])
        data = torch.frombuffer(bytearray(self.data), dtype=torch.uint8) if self.data else torch.empty(0).byte()
        return table, data

    def check(self) -> None:
        """Checks that the data is complete and that every position is inside of its parameter.

        Raises:
            DeltaError: naming the parameter.
        """
        for each, gaps, _ in _decoded(*self.named_tensor()):
            end = each.first + each.count + (0 if gaps is None else int(gaps.sum()))
            if end > each.size:
                raise DeltaError(f"{each.name}: the delta ends at value {end} of {each.size}")


def encoded(name: str, old: torch.Tensor, new: torch.Tensor) -> Iterator[tuple[ChangedPiece, torch.Tensor]]:
    """The delta of a parameter, piece by piece as uint8 [bytes]; nothing for pieces whose bits are the same.

    Args:
        name: of the parameter.
        old: its values in the engine, [n] of 16 or 32 bits.
        new: its values now, [n] of the same dtype.
    """
    dtype = str(new.dtype).removeprefix("torch.")
    bits = torch.int16 if new.dtype.itemsize == 2 else torch.int32
    for first in range(0, len(new), PIECE):
        piece = new[first : first + PIECE]
        positions = (old[first : first + PIECE].view(bits) != piece.view(bits)).nonzero().view(-1)
        if len(positions):
            width, gaps, values = _encoded_piece(positions, piece)
            yield (
                ChangedPiece(name, len(new), dtype, first, len(values), width),
                torch.cat([gaps, values.view(torch.uint8)]),
            )


def _encoded_piece(positions: torch.Tensor, piece: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Bytes of a gap, the gaps as uint8, and the values; without gaps where these would cost more than all values."""
    between = positions.diff(prepend=positions.new_tensor([-1])) - 1
    counts = {width: between // (1 << 8 * width) + 1 for width in GAP_DTYPES}  # values to send for each gap
    costs = {width: (width + piece.dtype.itemsize) * int(count.sum()) for width, count in counts.items()}
    width = min(costs, key=lambda width: costs[width])
    if costs[width] >= piece.nbytes:
        return 0, piece.new_empty(0).view(torch.uint8), piece
    longest, ends = (1 << 8 * width) - 1, counts[width].cumsum(0)
    gaps = between.new_full((int(ends[-1]),), longest)
    gaps[ends - 1] = between % (longest + 1)
    dtype = GAP_DTYPES[width]
    return width, (gaps + torch.iinfo(dtype).min).to(dtype).view(torch.uint8), piece[(gaps + 1).cumsum(0) - 1]


def load_delta(model: torch.nn.Module, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Writes deltas into a model of SGLang, which calls this in an engine's process; `named` is of `named_tensor`.

    Raises:
        DeltaError: the model has no such parameter, or has it in another size, dtype or order.
    """
    parameters = dict(model.named_parameters())
    for table, data in named:
        for each, gaps, values in _decoded(table, data):
            found = parameters.get(each.name)
            if found is None or (found.numel(), found.dtype) != (each.size, each.value_dtype):
                raise DeltaError(f"{each.name}: the engine has no such parameter of {each.size} values in {each.dtype}")
            if not found.is_contiguous():
                raise DeltaError(f"{each.name}: the engine has its values in another order than they were sent")
            flat = found.data.view(-1)[each.first :]
            if gaps is None:
                flat[: each.count] = values
            else:
                flat[(gaps + 1).cumsum(0) - 1] = values


def _decoded(table: str, data: torch.Tensor) -> Iterator[tuple[ChangedPiece, torch.Tensor | None, torch.Tensor]]:
    """Each piece with its gaps as int64, None where all values are sent, and with its values."""
    pieces = [ChangedPiece(*row) for row in json.loads(table)]
    size, start = sum(each.bytes for each in pieces), 0
    if size != len(data):
        raise DeltaError(f"the delta has {len(data)} bytes instead of {size}")
    for each in pieces:
        between, end = start + each.count * each.gap_bytes, start + each.bytes
        gaps = None
        if each.gap_bytes:
            dtype = GAP_DTYPES[each.gap_bytes]
            gaps = data[start:between].clone().view(dtype).long() - torch.iinfo(dtype).min
        yield each, gaps, data[between:end].clone().view(each.value_dtype)  # a copy begins where any dtype may
        start = end
