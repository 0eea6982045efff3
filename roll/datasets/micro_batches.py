"""Which samples form which micro-batch on which data-parallel rank: pure arithmetic over lengths.

Samples are sorted by length, so that those padded together are alike; every rank gets the same number of samples and
of micro-batches, because ranks reduce gradients together; the longest come first, so that a step that does not fit in
memory fails at once. Equal lengths keep their order, so a plan depends on its arguments alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerStepPlan:
    """One optimizer step, or one forward pass, split over data-parallel ranks.

    Attributes:
        indices: for each rank its samples, as positions in the batch: the rank's shard, in order.
        micro_batches: for each rank its micro-batches, as positions in that shard.
    """

    indices: list[list[int]]
    micro_batches: list[list[list[int]]]

    @property
    def permutation(self) -> list[int]:
        """Row i of the concatenated shards is row `permutation[i]` of the batch (of the step's samples)."""
        return [index for shard in self.indices for index in shard]

    @property
    def inverse(self) -> list[int]:
        """Where in the concatenated shards the samples of the batch are, in the batch's order.

        `concatenated[inverse]` is the batch again where the plan covers it all, as that of `plan_forward` does.
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
) -> list[OptimizerStepPlan]:
    """Splits a batch into optimizer steps, each of `samples_per_step` consecutive samples.

    Args:
        lengths: tokens of each sample.
        data_parallel: ranks that share the samples of a step.
        samples_per_step: samples of one optimizer step over all ranks.
        micro_batch_size: samples of a micro-batch; either this or `max_tokens`.
        max_tokens: padded tokens of a micro-batch: its longest sample, rounded up to `round_to`, times its samples.
        round_to: sequence lengths are padded to multiples of this.

    Raises:
        ValueError: the batch does not divide into steps, or a step over ranks; a sample alone exceeds `max_tokens`.
    """
    if samples_per_step < 1 or len(lengths) % samples_per_step:
        raise ValueError(
            f"{len(lengths)} samples do not divide into optimizer steps of {samples_per_step}; "
            f"use {_nearest_divisors(len(lengths), samples_per_step)}"
        )
    if samples_per_step % data_parallel:
        raise ValueError(f"{samples_per_step} samples of an optimizer step do not divide over {data_parallel} ranks")
    split = _splitter(micro_batch_size, max_tokens, round_to)
    steps = (range(first, first + samples_per_step) for first in range(0, len(lengths), samples_per_step))
    return [_plan(lengths, step, data_parallel, split) for step in steps]


def plan_forward(
    lengths: Sequence[int],
    data_parallel: int,
    *,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    round_to: int = 1,
) -> OptimizerStepPlan:
    """Splits a batch for a pass without gradients; arguments as `plan_optimizer_steps`.

    Ranks do not meet in such a pass, so where the samples do not divide some ranks have one less, and the ranks may
    have different numbers of micro-batches then.

    Raises:
        ValueError: there are fewer samples than ranks; a sample alone exceeds `max_tokens`.
    """
    if len(lengths) < data_parallel:
        raise ValueError(f"{len(lengths)} samples leave some of {data_parallel} data-parallel ranks without any")
    split = _splitter(micro_batch_size, max_tokens, round_to)
    return _plan(lengths, range(len(lengths)), data_parallel, split)


@dataclass(frozen=True)
class _Splitter:
    """Cuts one rank's samples, longest first, into micro-batches."""

    micro_batch_size: int | None
    max_tokens: int | None
    round_to: int

    def padded(self, length: int) -> int:
        return -(-length // self.round_to) * self.round_to

    def cut(self, shard: list[int], lengths: Sequence[int]) -> list[list[int]]:
        """As few consecutive micro-batches as the limit allows; the first sample of each is its longest."""
        micro_batches: list[list[int]] = []
        for position, index in enumerate(shard):
            if micro_batches and self._has_room(micro_batches[-1], shard, lengths):
                micro_batches[-1].append(position)
                continue
            if self.max_tokens is not None and self.padded(lengths[index]) > self.max_tokens:
                raise ValueError(
                    f"sample {index} has {lengths[index]} tokens ({self.padded(lengths[index])} padded), more than "
                    f"max_tokens {self.max_tokens} of a whole micro-batch; raise it to at least "
                    f"{self.padded(max(lengths))} or shorten sequence_length"
                )
            micro_batches.append([position])
        return micro_batches

    def _has_room(self, micro_batch: list[int], shard: list[int], lengths: Sequence[int]) -> bool:
        if self.max_tokens is None:
            return len(micro_batch) < (self.micro_batch_size or 1)
        return self.padded(lengths[shard[micro_batch[0]]]) * (len(micro_batch) + 1) <= self.max_tokens


def _splitter(micro_batch_size: int | None, max_tokens: int | None, round_to: int) -> _Splitter:
    if (micro_batch_size is None) == (max_tokens is None):
        raise ValueError(f"give either micro_batch_size ({micro_batch_size}) or max_tokens ({max_tokens})")
    for name, value in {"micro_batch_size": micro_batch_size, "max_tokens": max_tokens, "round_to": round_to}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}: {value} must be at least 1")
    return _Splitter(micro_batch_size, max_tokens, round_to)


def _plan(lengths: Sequence[int], samples: range, data_parallel: int, split: _Splitter) -> OptimizerStepPlan:
    shards = _deal(sorted(samples, key=lambda index: -lengths[index]), data_parallel)
    micro_batches = [split.cut(shard, lengths) for shard in shards]
    count = max(len(rank) for rank in micro_batches)
    return OptimizerStepPlan(shards, [_split_until(rank, count) for rank in micro_batches])


def _deal(ordered: list[int], ranks: int) -> list[list[int]]:
    """Deals samples, longest first, to ranks, turning back at each end, so that all have about the same work."""
    shards: list[list[int]] = [[] for _ in range(ranks)]
    for first in range(0, len(ordered), ranks):
        row = ordered[first : first + ranks]
        turn = range(ranks) if (first // ranks) % 2 == 0 else range(ranks - 1, -1, -1)
        for rank, index in zip(turn, row, strict=False):
            shards[rank].append(index)
    return shards


def _split_until(micro_batches: list[list[int]], count: int) -> list[list[int]]:
    """Halves the largest micro-batch until there are `count`; halves pad no more than the whole did."""
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
