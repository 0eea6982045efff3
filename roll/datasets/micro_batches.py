"""Assigns samples to data-parallel ranks and micro-batches, from their lengths.

Samples are sorted by length, so that a micro-batch needs little padding. Every rank has the same number of samples and
micro-batches, because ranks reduce gradients together. The longest samples come first, so that a step that does not fit
in memory fails at once. The sort is stable, so a plan depends only on its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerStepPlan:
    """One optimizer step or forward pass, split over data-parallel ranks.

    Attributes:
        indices: per rank, its shard: the positions of its samples in the batch, in order.
        micro_batches: per rank, its micro-batches as positions in its shard.
    """

    indices: list[list[int]]
    micro_batches: list[list[list[int]]]

    @property
    def permutation(self) -> list[int]:
        """Row i of the concatenated shards is row `permutation[i]` of the batch."""
        return [index for shard in self.indices for index in shard]

    @property
    def inverse(self) -> list[int]:
        """Positions in the concatenated shards, in the order of the batch.

        `concatenated[inverse]` restores the batch if the plan covers all of it, as that of `plan_forward` does.
        """
        order = self.permutation
        return sorted(range(len(order)), key=order.__getitem__)


def plan_optimizer_steps(
    lengths: Sequence[int],
    data_parallel: int,
    *,
    samples_per_step: int,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    round_to: int = 1,
    packed: bool = False,
) -> list[OptimizerStepPlan]:
    """Splits a batch into optimizer steps, each of `samples_per_step` consecutive samples.

    Args:
        lengths: length of each sample in tokens.
        data_parallel: number of ranks.
        samples_per_step: samples of an optimizer step over all ranks.
        micro_batch_size: maximum samples of a micro-batch; give either this or `max_tokens`.
        max_tokens: maximum padded tokens of a micro-batch: the length of its longest sample, rounded up to `round_to`,
            times its number of samples.
        round_to: sequence lengths are padded to multiples of this.
        packed: the samples of a micro-batch follow each other without padding, so its tokens are the sum of lengths.

    Raises:
        ValueError: the batch is not divisible by the step, or the step by the ranks; or a sample exceeds `max_tokens`.
    """
    if samples_per_step < 1 or len(lengths) % samples_per_step:
        raise ValueError(
            f"{len(lengths)} samples do not divide into optimizer steps of {samples_per_step}; "
            f"use {_nearest_divisors(len(lengths), samples_per_step)}"
        )
    if samples_per_step % data_parallel:
        raise ValueError(f"{samples_per_step} samples of an optimizer step do not divide over {data_parallel} ranks")
    split = _splitter(micro_batch_size, max_tokens, round_to, packed)
    steps = (range(first, first + samples_per_step) for first in range(0, len(lengths), samples_per_step))
    return [_plan(lengths, step, data_parallel, split) for step in steps]


def plan_forward(
    lengths: Sequence[int],
    data_parallel: int,
    *,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    round_to: int = 1,
    packed: bool = False,
) -> OptimizerStepPlan:
    """Splits a batch for a forward pass without gradients; arguments as `plan_optimizer_steps`.

    Ranks do not synchronize in such a pass. If the samples are not divisible by the ranks, some ranks have one sample
    less, and ranks may have different numbers of micro-batches.

    Raises:
        ValueError: there are fewer samples than ranks, or a single sample exceeds `max_tokens`.
    """
    if len(lengths) < data_parallel:
        raise ValueError(f"{len(lengths)} samples are fewer than {data_parallel} data-parallel ranks")
    split = _splitter(micro_batch_size, max_tokens, round_to, packed)
    return _plan(lengths, range(len(lengths)), data_parallel, split)


@dataclass(frozen=True)
class _Splitter:
    """Cuts the samples of a rank, longest first, into micro-batches."""

    micro_batch_size: int | None
    max_tokens: int | None
    round_to: int
    packed: bool

    def padded(self, length: int) -> int:
        return -(-length // self.round_to) * self.round_to

    def cut(self, shard: list[int], lengths: Sequence[int]) -> list[list[int]]:
        """The fewest consecutive micro-batches within the limit; the first sample of each is its longest."""
        micro_batches: list[list[int]] = []
        for position, index in enumerate(shard):
            if micro_batches and self._has_room(micro_batches[-1], position, shard, lengths):
                micro_batches[-1].append(position)
                continue
            if self.max_tokens is not None and self.padded(lengths[index]) > self.max_tokens:
                raise ValueError(
                    f"sample {index} has {lengths[index]} tokens ({self.padded(lengths[index])} padded), more than "
                    f"max_tokens {self.max_tokens} of a micro-batch; raise it to at least "
                    f"{self.padded(max(lengths))} or shorten sequence_length"
                )
            micro_batches.append([position])
        return micro_batches

    def _has_room(self, micro_batch: list[int], position: int, shard: list[int], lengths: Sequence[int]) -> bool:
        if self.max_tokens is None:
            return len(micro_batch) < (self.micro_batch_size or 1)
        if self.packed:
            return self.padded(sum(lengths[shard[at]] for at in [*micro_batch, position])) <= self.max_tokens
        return self.padded(lengths[shard[micro_batch[0]]]) * (len(micro_batch) + 1) <= self.max_tokens


def _splitter(micro_batch_size: int | None, max_tokens: int | None, round_to: int, packed: bool) -> _Splitter:
    if (micro_batch_size is None) == (max_tokens is None):
        raise ValueError(f"give either micro_batch_size ({micro_batch_size}) or max_tokens ({max_tokens})")
    for name, value in {"micro_batch_size": micro_batch_size, "max_tokens": max_tokens, "round_to": round_to}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}: {value} must be at least 1")
    return _Splitter(micro_batch_size, max_tokens, round_to, packed)


def _plan(lengths: Sequence[int], samples: range, data_parallel: int, split: _Splitter) -> OptimizerStepPlan:
    shards = _deal(sorted(samples, key=lambda index: -lengths[index]), data_parallel)
    micro_batches = [split.cut(shard, lengths) for shard in shards]
    count = max(len(rank) for rank in micro_batches)
    return OptimizerStepPlan(shards, [_split_until(rank, count) for rank in micro_batches])


def _deal(ordered: list[int], ranks: int) -> list[list[int]]:
    """Deals samples, longest first, to ranks in alternating direction, so that all have about the same work."""
    shards: list[list[int]] = [[] for _ in range(ranks)]
    for first in range(0, len(ordered), ranks):
        row = ordered[first : first + ranks]
        turn = range(ranks) if (first // ranks) % 2 == 0 else range(ranks - 1, -1, -1)
        for rank, index in zip(turn, row, strict=False):
            shards[rank].append(index)
    return shards


def _split_until(micro_batches: list[list[int]], count: int) -> list[list[int]]:
    """Halves the largest micro-batch until there are `count`; halves need no more padding than the whole."""
    result = list(micro_batches)
    while len(result) < count and max(map(len, result)) > 1:
        largest = max(range(len(result)), key=lambda at: len(result[at]))
        whole = result[largest]
        middle = (len(whole) + 1) // 2
        result[largest : largest + 1] = [whole[:middle], whole[middle:]]
    return result


def _nearest_divisors(total: int, wanted: int) -> str:
    divisors = [number for number in range(1, total + 1) if total % number == 0]
    below = [number for number in divisors if number < wanted][-1:]
    above = [number for number in divisors if number > wanted][:1]
    return " or ".join(str(number) for number in below + above) or "at least one sample"
