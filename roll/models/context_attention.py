"""Causal attention of packed samples that are split over context-parallel ranks.

Rank r of C has the queries, keys and values of chunks r and 2C - 1 - r of each sample, out of 2C. It gathers the keys
and values of all ranks, and each of its chunks of queries attends to the keys up to its own end. On a CPU the backward
pass gathers them again instead of keeping them, so that a rank keeps 1 / C of the activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch.distributed import ProcessGroup
from torch.nn.attention.bias import causal_lower_right


@dataclass(frozen=True)
class ContextSplit:
    """How the samples of a packed micro-batch are split over the ranks of `group`.

    The tokens of whole samples, which have these `lengths`, are the rows `whole` of all ranks' tokens in the order of
    ranks, and those are the rows `split` of these.
    """

    group: ProcessGroup
    lengths: Sequence[int]
    whole: torch.Tensor
    split: torch.Tensor

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """The rows [T, ...] of whole samples of the rows [T / C, ...] of each rank, with a gradient."""
        gathered: torch.Tensor = tensor_parallel.gather_from_sequence_parallel_region(own, group=self.group)
        return gathered.index_select(0, self.whole)

    def chunks(self) -> Iterator[Chunk]:
        """The chunks of this rank, of all samples of a run of equally long ones at once."""
        rank, count, own, first = self.group.rank(), 2 * self.group.size(), 0, 0
        for length, same in groupby(self.lengths):
            samples, width = len(list(same)), length // count
            for half, number in enumerate((rank, count - 1 - rank)):
                yield Chunk(samples, width, slice(own, own + 2 * samples * width), half, first, length, number * width)
            own, first = own + 2 * samples * width, first + samples * length


@dataclass(frozen=True)
class Chunk:
    """Chunks of `samples` samples of `length` tokens, which begin at token `start` of each.

    `own` are the rank's tokens of these samples, two chunks of each, and this is number `half` of the two; `first` is
    the first token of the samples among those of all.
    """

    samples: int
    width: int
    own: slice
    half: int
    first: int
    length: int
    start: int

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """A view [samples, heads, width, ...] of the rank's [heads, S, ...]."""
        halves: torch.Tensor = x[:, self.own].unflatten(1, (self.samples, 2, self.width))
        return halves[:, :, self.half].transpose(0, 1)

    def keys(self, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, bool]]:
        """Keys before the chunk, all of which its queries see, and its own, which are causal; with their values.

        They are views [samples, groups, n, D] of the keys and values of whole samples [T, groups, 2 D].
        """
        end = self.start + self.width
        rows = x[self.first : self.first + self.samples * self.length].unflatten(0, (self.samples, -1)).transpose(1, 2)
        parts = [(rows[:, :, : self.start], False), (rows[:, :, self.start : end], True)]
        return [(*part.chunk(2, dim=-1), causal) for part, causal in parts if part.shape[2]]


def context_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, split: ContextSplit, scale: float | None
) -> torch.Tensor:
    """[S, 1, heads * D] of rotated queries [1, heads, S, D] and keys [1, groups, S, D], and values [S, groups, D]."""
    own = torch.cat([key[0].transpose(0, 1), value], dim=-1)
    attend = _OnCPU.apply if query.device.type == "cpu" else _by_kernel
    context: torch.Tensor = attend(query[0], own, split, scale)
    return context.transpose(0, 1).flatten(1)[:, None]


def _by_kernel(query: torch.Tensor, own: torch.Tensor, split: ContextSplit, scale: float | None) -> torch.Tensor:
    """[heads, S, D] by torch's kernels, which align a causal mask with the last key."""
    keys, context = split.gather(own), torch.empty_like(query)
    for chunk in split.chunks():
        queries, end = chunk.queries(query), chunk.start + chunk.width
        rows = keys[chunk.first : chunk.first + chunk.samples * chunk.length].unflatten(0, (chunk.samples, -1))
        key, value = rows[:, :end].transpose(1, 2).chunk(2, dim=-1)
        mask, grouped = causal_lower_right(chunk.width, end), query.shape[0] != own.shape[1]
        chunk.queries(context)[:] = F.scaled_dot_product_attention(
            queries, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
    return context


_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _OnCPU(torch.autograd.Function):
    """Attention in fp32 by torch's flash attention of CPUs, whose causal mask begins at the first key.

    So the results for the keys before a chunk and for its own are merged, by the log of the sum of their exp(score).
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, own: torch.Tensor, split: ContextSplit, scale: float | None
    ) -> torch.Tensor:
        ctx.split, ctx.scale = split, scale
        keys, queries = split.gather(own).float(), query.float()
        context, log_sums = torch.empty_like(queries), queries.new_empty(queries.shape[:2])
        for chunk in split.chunks():
            parts = [_flash(chunk.queries(queries), *part, scale) for part in chunk.keys(keys)]
            merged = parts[0][1] if len(parts) == 1 else torch.logaddexp(parts[0][1], parts[1][1])
            chunk.queries(context)[:] = sum(each * (sums - merged).exp()[..., None] for each, sums in parts)
            chunk.queries(log_sums)[:] = merged
        ctx.save_for_backward(query, own, context, log_sums)
        return context.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The gradient of each part, given what its scores sum up to with those of the other."""
        query, own, context, log_sums = ctx.saved_tensors
        split: ContextSplit = ctx.split
        keys, queries, gradient = split.gather(own).float(), query.float(), gradient.float()
        of_queries, of_keys = torch.zeros_like(queries), torch.zeros_like(keys)
        for chunk in split.chunks():
            upstream, own_queries, result, sums = (
                chunk.queries(each) for each in (gradient, queries, context, log_sums)
            )
            parts = zip(chunk.keys(keys), chunk.keys(of_keys), strict=True)
            for (key, value, causal), (of_key, of_value, _) in parts:
                found = _flash_backward(upstream, own_queries, key, value, result, sums, 0.0, causal, scale=ctx.scale)
                for total, part in zip((chunk.queries(of_queries), of_key, of_value), found, strict=True):
                    total += part
        in_order = of_keys.index_select(0, split.split).to(own.dtype)
        of_own = tensor_parallel.reduce_scatter_to_sequence_parallel_region(in_order, group=split.group)
        return of_queries.to(query.dtype), of_own, None, None


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [samples, heads, width, D], and the log-sum-exp of the scores [samples, heads, width]."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    context, log_sums = operator(query, key, value, 0.0, causal, scale=scale)
    return context, log_sums
