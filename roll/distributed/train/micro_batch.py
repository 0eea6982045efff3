"""The tensors of one micro-batch: samples cut and aligned or packed, and the tokens to score; needs no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tensordict import TensorDict

from roll.algorithms.distillation import TEACHER_TOP_IDS
from roll.datasets.collate import SAMPLING_MASK, SAMPLING_MASK_SIZES

SHARED_TOKENS = 0.05
"""Fraction of a micro-batch's tokens that shared prefixes must save: below it, copies for attention may cost more."""


@dataclass
class MicroBatch:
    """b samples, left-aligned and cut to the longest.

    `batch` keeps the caller's columns (T of them, trailing padding cut), `input_ids` [b, S] are right padded with S
    rounded up for sequence parallel. Token n to score is `targets`[n] at (`samples`[n], `columns`[n]) of the caller's
    columns, and the hidden state before it is row `hidden_rows`[n] of [S * b, H]. `kept`[n] are the ids that it was
    sampled from, [N, K] filled with -1, where the batch has sampling masks; -1 alone means all. `chosen`[n] are the
    ids of the teacher's most likely tokens, where the batch has them; the batch keeps them too.

    A packed one has b = 1 in `input_ids`: samples follow each other. `bounds` [samples + 1] int32 has the first token
    of each and the end of the last, which has the padding of S, `positions` [S] count within each sample, and
    `lengths` are on the host.

    With shared prefixes, `input_ids` has each distinct beginning of a sample once, see `_share_prefixes`. Attention
    reads E tokens, whole samples that follow each other, which `bounds` and `lengths` describe: token e of these is
    token `expand`[e] of S, and token s takes the result of place `collapse`[s].

    Under context parallelism it is one rank's part, see `local_part`: `input_ids`, `positions` and the tokens to score
    are those of the rank, `bounds` and `lengths` those of whole samples. The tokens of whole samples are the rows
    `whole` of all ranks' tokens in the order of ranks, and these are the rows `split` of those.

    `routing` [S * b, layers, k] has the experts of each token in Megatron's order, where they are recorded; `routed`
    [S * b] is false for padding and the last token of a sample, which have the first k experts.
    """

    batch: TensorDict
    input_ids: torch.Tensor
    targets: torch.Tensor
    samples: torch.Tensor
    columns: torch.Tensor
    hidden_rows: torch.Tensor
    kept: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    bounds: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    lengths: Sequence[int] = ()
    expand: torch.Tensor | None = None
    collapse: torch.Tensor | None = None
    whole: torch.Tensor | None = None
    split: torch.Tensor | None = None
    routing: torch.Tensor | None = None
    routed: torch.Tensor | None = None

    def to_columns(self, values: torch.Tensor) -> torch.Tensor:
        """Values [N, ...] of the scored tokens as [b, T, ...], 0 elsewhere; keeps the gradient."""
        shape = (self.batch.batch_size[0], self.batch["attention_mask"].shape[1], *values.shape[1:])
        return values.new_zeros(shape).index_put((self.samples, self.columns), values)


def make_micro_batch(
    batch: TensorDict,
    indices: Sequence[int],
    multiple: int = 1,
    device: torch.device | str = "cpu",
    packed: bool = False,
    shared: bool = False,
    context: tuple[int, int] = (0, 1),
    routing: Sequence[np.ndarray] = (),
) -> MicroBatch:
    """The micro-batch of samples `indices` of `batch`.

    Tokens to score are those of `response_mask` where the batch has one, else all of `attention_mask`; the first
    token of a sample has no predecessor and is never scored. Padding may be on either side: samples are moved so that
    it is on the right, where the causal mask hides it, and positions count from the first real token.

    Args:
        batch: `input_ids` and `attention_mask` [B, T], and the columns that the loss reads.
        indices: of the samples.
        multiple: S is a multiple of this (the tensor-parallel size under sequence parallel).
        device: of the tensors.
        packed: samples follow each other without padding, instead of one sample in each row.
        shared: tokens that samples of a packed micro-batch have in common at their beginning are computed once, where
            that saves SHARED_TOKENS of them, and the same experts computed them.
        context: rank and number of the ranks that samples are split over; samples then follow each other, `packed` or
            padded to the longest.
        routing: the experts of each of these samples, see `Routing`.

    Raises:
        ValueError: a sample is empty, or has padding between its tokens.
    """
    rows = torch.as_tensor(list(indices), dtype=torch.long)
    chosen, masks = batch[rows], None
    if SAMPLING_MASK in chosen.keys():
        masks = chosen[SAMPLING_MASK], chosen[SAMPLING_MASK_SIZES]
        chosen = chosen.exclude(SAMPLING_MASK, SAMPLING_MASK_SIZES)
    mask = chosen["attention_mask"].bool()
    first, lengths = mask.int().argmax(dim=1), mask.sum(dim=1)
    _check_padding(mask, first, lengths, rows)
    width = int((first + lengths).max())
    if width < mask.shape[1]:
        chosen, mask = _cut(chosen, mask.shape[1], width), mask[:, :width]
    scored = _scored(chosen, mask, first)
    samples, columns = scored.nonzero(as_tuple=True)
    targets = chosen["input_ids"][samples, columns]
    before = columns - first[samples] - 1
    kept = None if masks is None else _kept(*masks, samples, columns)
    chosen_ids = chosen[TEACHER_TOP_IDS][samples, columns] if TEACHER_TOP_IDS in chosen.keys() else None
    shared_prefixes = (
        _share_prefixes(chosen["input_ids"], first, lengths, multiple, routing) if packed and shared else None
    )
    packing: dict[str, Any] = {}
    if shared_prefixes is not None:
        ids, tokens, packing = shared_prefixes
        hidden_rows = tokens[samples, before]
    elif packed or context[1] > 1:
        if context[1] == 1:
            ids, bounds = _pack(chosen["input_ids"], mask, lengths, multiple)
        else:
            each = lengths if packed else lengths.amax().expand_as(lengths)
            ids, bounds = _pack_chunks(chosen["input_ids"], first, each, multiple, 2 * context[1])
        hidden_rows, packed_lengths = bounds[samples] + before, bounds.diff().tolist()
        positions = torch.cat([torch.arange(length) for length in packed_lengths])
        packing = {"bounds": bounds.int(), "positions": positions, "lengths": packed_lengths}
    else:
        ids = _compact(chosen["input_ids"], first, int(lengths.max()), multiple)
        hidden_rows = before * len(rows) + samples
    owners = packing.pop("owners", None)
    if len(routing):
        packing |= _rows_of(routing, *_owners(ids, owners, packing), ids.numel())
    micro = MicroBatch(chosen, ids, targets, samples, columns, hidden_rows, kept, chosen_ids, **packing)
    return _to(micro if context[1] == 1 else local_part(micro, *context), device)


def local_part(micro: MicroBatch, rank: int, ranks: int) -> MicroBatch:
    """The part of a micro-batch that one of several context ranks computes.

    Every sample of the micro-batch has 2 * ranks equal chunks. A rank has the chunks `rank` and 2 * ranks - 1 - `rank`
    of each: with a causal mask their attention costs the same on all ranks. A rank scores the tokens whose predecessor
    is in its part. Their targets are those of the whole samples.
    """
    assert micro.positions is not None
    lengths = torch.tensor(micro.lengths)
    chunks = micro.positions // (lengths // (2 * ranks)).repeat_interleave(lengths)
    owners = torch.minimum(chunks, 2 * ranks - 1 - chunks)
    split = owners.argsort(stable=True)
    whole, size = split.argsort(), len(split) // ranks
    own = split[rank * size : (rank + 1) * size]
    scored = owners[micro.hidden_rows] == rank
    by_token = {name: getattr(micro, name) for name in ("targets", "samples", "columns", "kept", "chosen")}
    return replace(
        micro,
        input_ids=micro.input_ids[:, own],
        positions=micro.positions[own],
        hidden_rows=whole[micro.hidden_rows[scored]] - rank * size,
        whole=whole,
        split=split,
        routing=None if micro.routing is None else micro.routing[own],
        routed=None if micro.routed is None else micro.routed[own],
        **{name: value[scored] for name, value in by_token.items() if value is not None},
    )


def _scored(batch: TensorDict, mask: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    scored = batch["response_mask"].bool() & mask if "response_mask" in batch.keys() else mask.clone()
    scored[torch.arange(len(first)), first] = False
    return scored


def _kept(ids: torch.Tensor, sizes: torch.Tensor, samples: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The ids of `sampling_masks` for N tokens, [N, K] filled with -1."""
    sizes = sizes.long()
    starts = (sizes.cumsum(1) - sizes)[samples, columns, None]
    own = sizes[samples, columns, None]
    places = torch.arange(int(own.max()) if len(own) else 0)
    found = ids[samples[:, None], (starts + places).clamp(max=ids.shape[1] - 1)]
    return torch.where(places < own, found, -1)


def _compact(ids: torch.Tensor, first: torch.Tensor, longest: int, multiple: int) -> torch.Tensor:
    """Each row from its first real token on, [b, S]; ids after a sample's end are arbitrary but valid."""
    width = -(-longest // multiple) * multiple
    columns = (first[:, None] + torch.arange(width)).clamp(max=ids.shape[1] - 1)
    return ids.gather(1, columns)


def _pack(
    ids: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor, multiple: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The real tokens of all rows in one, [1, S], and the bounds of samples; the last one has the padding."""
    packed = ids[mask]
    padding = -len(packed) % multiple
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    bounds[-1] += padding
    return F.pad(packed, (0, padding))[None], bounds


def _pack_chunks(
    ids: torch.Tensor, first: torch.Tensor, lengths: torch.Tensor, multiple: int, chunks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_pack`, each sample padded to equal chunks, the last one so that each chunk of all is such a `multiple`."""
    padded = (lengths + chunks - 1) // chunks * chunks
    padded[-1] += -padded.sum() % (multiple * chunks)
    widest = int(padded.max())
    packed = _compact(ids, first, widest, 1)[torch.arange(widest) < padded[:, None]]
    return packed[None], F.pad(padded.cumsum(0), (1, 0))


def _owners(
    ids: torch.Tensor, owners: torch.Tensor | None, packing: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample and position of each token in Megatron's order; of shared ones the sample is known."""
    if owners is not None:
        return owners, packing["positions"][: len(owners)]
    if "bounds" in packing:
        sizes = packing["bounds"].diff()
        return torch.arange(len(sizes)).repeat_interleave(sizes), packing["positions"]
    samples, width = ids.shape
    return torch.arange(samples).repeat(width), torch.arange(width).repeat_interleave(samples)


def _rows_of(
    routing: Sequence[np.ndarray], owners: torch.Tensor, positions: torch.Tensor, count: int
) -> dict[str, torch.Tensor]:
    """`routing` and `routed` of `count` tokens; of the first, samples [N] and positions in these [N] are given."""
    rows = torch.from_numpy(np.concatenate(routing))
    counts = torch.tensor([len(each) for each in routing])
    starts = counts.cumsum(0) - counts
    known = positions < counts[owners]
    routed = F.pad(known, (0, count - len(known)))
    found = torch.arange(rows.shape[2], dtype=rows.dtype).expand(count, *rows.shape[1:]).clone()
    found[routed] = rows[(starts[owners] + positions)[known]]
    return {"routing": found, "routed": routed}


def _equal_rows(routing: Sequence[np.ndarray], order: torch.Tensor) -> torch.Tensor:
    """Tokens at the beginning of each sample, from the second in `order` on, with the experts of the one before."""
    found = []
    for one, other in pairwise(order.tolist()):
        count = min(len(routing[one]), len(routing[other]))
        equal = (routing[one][:count] == routing[other][:count]).all((1, 2))
        found.append(count if equal.all() else int(equal.argmin()))
    return torch.tensor(found, dtype=torch.long)


def _share_prefixes(
    ids: torch.Tensor,
    first: torch.Tensor,
    lengths: torch.Tensor,
    multiple: int,
    routing: Sequence[np.ndarray] = (),
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]] | None:
    """The tokens of the samples in which beginnings that are equal occur once; None where that saves too few of them.

    A hidden state depends on the tokens up to its own, so samples with the same beginning, as the responses to one
    prompt, have the same hidden states there. Attention needs whole samples: it is given every sample that is
    no prefix of another, the longest first.

    Returns:
        The distinct tokens [1, S]; their indices [b, longest] at the positions of each sample, arbitrary behind its
        end; and the fields of `MicroBatch` that describe them.
    """
    longest = int(lengths.max())
    columns = torch.arange(longest)
    keys = torch.where(columns < lengths[:, None], _compact(ids, first, longest, 1) + 1, 0)
    as_bytes = [row.tobytes() for row in keys.int().numpy()]
    order = torch.tensor(sorted(range(len(keys)), key=as_bytes.__getitem__))
    keys, ends = keys[order], lengths[order]
    common = (keys[1:] == keys[:-1]).int().cumprod(1).sum(1)  # tokens shared with the sample before
    if len(routing):
        common = torch.minimum(common, _equal_rows(routing, order))
    distinct = (columns >= F.pad(common, (1, 0))[:, None]) & (columns < ends[:, None])
    count = int(distinct.sum())
    if count > (1 - SHARED_TOKENS) * int(lengths.sum()):
        return None
    numbers = distinct.flatten().cumsum(0).view_as(distinct) - 1
    tokens = torch.where(distinct, numbers, 0).cummax(0).values  # of the last sample before with a token of its own
    whole = torch.cat([common < ends[:-1], torch.ones(1, dtype=torch.bool)]).nonzero().squeeze(1)
    whole = whole[ends[whole].argsort(descending=True, stable=True)]
    expand = tokens[whole][columns < ends[whole, None]]
    collapse = expand.new_full((count,), len(expand)).scatter_reduce_(0, expand, torch.arange(len(expand)), "amin")
    owners = order[:, None].expand_as(distinct)[distinct]
    by_token = (keys[distinct] - 1, columns.expand_as(distinct)[distinct], collapse)
    packed, positions, collapse = (F.pad(each, (0, -count % multiple)) for each in by_token)
    packing = {
        "bounds": F.pad(ends[whole].cumsum(0), (1, 0)).int(),
        "positions": positions,
        "lengths": ends[whole].tolist(),
        "expand": expand,
        "collapse": collapse,
        "owners": owners,
    }
    return packed[None], tokens[order.argsort()], packing


def _check_padding(mask: torch.Tensor, first: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor) -> None:
    columns = torch.arange(mask.shape[1])
    expected = (columns >= first[:, None]) & (columns < (first + lengths)[:, None])
    bad = (lengths == 0) | (expected != mask).any(dim=1)
    if bad.any():
        sample = int(rows[bad.nonzero()[0, 0]])
        raise ValueError(f"attention_mask: sample {sample} is empty or has padding between its tokens")


def _cut(batch: TensorDict, old: int, new: int) -> TensorDict:
    """Columns of the token tensors cut to the first `new`."""
    tensors = {
        key: value[:, :new] if value.dim() > 1 and value.shape[1] == old else value for key, value in batch.items()
    }
    return TensorDict(tensors, batch_size=batch.batch_size)


def _to(micro: MicroBatch, device: torch.device | str) -> MicroBatch:
    if torch.device(device).type == "cpu":
        return micro
    values = {field.name: getattr(micro, field.name) for field in fields(micro)}
    tensors = {key: value.to(device, non_blocking=True) for key, value in values.items() if hasattr(value, "to")}
    return MicroBatch(**values | tensors)
