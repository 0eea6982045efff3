"""Assigns samples to data-parallel ranks and micro-batches, so that ranks finish together.

Ranks reduce gradients together, so a step takes as long as its slowest rank. Samples are dealt to ranks by cost, which
grows faster than length where attention matters (`sample_cost`), the most expensive first, each to the rank with the
least cost so far (Graham 1969, longest processing time first). Where micro-batches are formed by tokens, ranks may have
different numbers of samples: one may have a few long ones and another many short ones. A training step has the same
number of micro-batches on every rank in any case.

Packed micro-batches of a rank are balanced by cost too, which keeps the stages of a pipeline busy. Samples that are
padded are sorted by length instead, so that a micro-batch needs little padding. The largest micro-batch comes first, so
that a step that does not fit in memory fails at once. A plan depends only on its arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerStepPlan:
    """One optimizer step or forward pass, split over data-parallel ranks.

    Attributes:
        indices: per rank, its shard: the positions of its samples in the batch, in order.
        micro_batches: per rank, its micro-batches as positions in its shard; each continues the one before.
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


def sample_cost(length: int, crossover_length: float) -> float:
    """Time to compute a sample, in tokens of a sample so short that attention costs nothing.

    Matrices take time in proportion to the tokens, attention in proportion to their square.

    Args:
        length: tokens of the sample.
        crossover_length: length at which both take the same time, see `ModelShape.crossover_length`; infinite where
            the model is not known.
    """
    return length + length**2 / crossover_length


def plan_optimizer_steps(
    lengths: Sequence[int],
    data_parallel: int,
    *,
    samples_per_step: int,
    costs: Sequence[float] | None = None,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    round_to: int = 1,
    packed: bool = False,
) -> list[OptimizerStepPlan]:
    """Splits a batch into optimizer steps, each of `samples_per_step` consecutive samples.

    Every rank has the same number of micro-batches in a step and, with `micro_batch_size`, of samples.

    Args:
        lengths: length of each sample in tokens.
        data_parallel: number of ranks.
        samples_per_step: samples of an optimizer step over all ranks.
        costs: time of each sample, in any unit; by default its length.
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
    planner = _planner(lengths, costs, micro_batch_size, max_tokens, round_to, packed)
    steps = (range(first, first + samples_per_step) for first in range(0, len(lengths), samples_per_step))
    return [planner.plan(step, data_parallel) for step in steps]


def plan_forward(
    lengths: Sequence[int],
    data_parallel: int,
    *,
    costs: Sequence[float] | None = None,
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
    planner = _planner(lengths, costs, micro_batch_size, max_tokens, round_to, packed)
    return planner.plan(range(len(lengths)), data_parallel)


MicroBatches = list[list[int]]
"""The micro-batches of one rank, as positions in the batch."""


@dataclass(frozen=True)
class _Planner:
    """Divides samples of a batch; each method takes and returns their positions in the batch."""

    lengths: Sequence[int]
    costs: Sequence[float]
    micro_batch_size: int | None
    max_tokens: int | None
    round_to: int
    packed: bool

    def plan(self, samples: range, data_parallel: int) -> OptimizerStepPlan:
        """The plan whose slowest rank costs least, among a few; none costs more than the order of the batch."""
        self._check_lengths(samples)
        ranks = min(
            (self._micro_batches(shards) for shards in self._deals(samples, data_parallel)), key=self._preference
        )
        shards = [[index for micro in rank for index in micro] for rank in ranks]
        return OptimizerStepPlan(shards, [_positions(rank) for rank in ranks])

    def _deals(self, samples: range, ranks: int) -> Iterator[list[list[int]]]:
        """Ways to divide samples over ranks, the most promising first."""
        each, more = divmod(len(samples), ranks)
        counts = [each + (rank >= ranks - more) for rank in range(ranks)]
        if ranks > 1:
            by_cost = sorted(samples, key=lambda index: -self.costs[index])
            if self.max_tokens is not None:
                shards = self._deal(by_cost, [len(samples)] * ranks)
                if self._tokens_planned_for(shards, max(counts)):
                    yield shards
            yield self._deal(by_cost, counts)
        starts = [sum(counts[:rank]) for rank in range(ranks)]
        yield [[*samples[start : start + count]] for start, count in zip(starts, counts, strict=True)]

    def _deal(self, by_cost: list[int], counts: list[int]) -> list[list[int]]:
        """Gives each sample to the rank with the least cost that has fewer than its count."""
        shards: list[list[int]] = [[] for _ in counts]
        loads = [(0.0, rank) for rank in range(len(counts))]
        for index in by_cost:
            cost, rank = heapq.heappop(loads)
            shards[rank].append(index)
            if len(shards[rank]) < counts[rank]:
                heapq.heappush(loads, (cost + self.costs[index], rank))
        return shards

    def _tokens_planned_for(self, shards: list[list[int]], count: int) -> bool:
        """Whether no rank has more tokens than `count` of the longest sample, which memory is planned for."""
        most = count * max(self.lengths[index] for shard in shards for index in shard)
        return all(sum(self.lengths[index] for index in shard) <= most for shard in shards)

    def _preference(self, ranks: list[MicroBatches]) -> tuple[int, float, int]:
        """Smaller is better: equal numbers of micro-batches, then cost of the slowest rank, then few micro-batches."""
        counts = [len(rank) for rank in ranks]
        slowest = max(sum(self._cost(micro) for micro in rank) for rank in ranks)
        return max(counts) - min(counts), slowest, max(counts)

    def _micro_batches(self, shards: list[list[int]]) -> list[MicroBatches]:
        """Equally many for each rank, the fewest possible; a rank with fewer samples than that has one for each."""
        fewest = [self._fewest(sorted(shard, key=lambda index: -self.lengths[index])) for shard in shards]
        count = max(map(len, fewest))
        return [self._balanced(rank, min(count, sum(map(len, rank)))) for rank in fewest]

    def _fewest(self, longest_first: list[int]) -> MicroBatches:
        """Each sample goes into the first micro-batch with room (first-fit decreasing, Johnson 1973)."""
        micro_batches: MicroBatches = []
        tokens: list[int] = []
        for index in longest_first:
            for at in range(len(tokens)):
                if self._has_room(micro_batches[at], tokens[at], index):
                    break
            else:
                at = len(tokens)
                micro_batches.append([])
                tokens.append(0)
            micro_batches[at].append(index)
            tokens[at] += self.lengths[index]
        return micro_batches

    def _balanced(self, micro_batches: MicroBatches, count: int) -> MicroBatches:
        """`count` micro-batches of the same samples, balanced by cost where they are packed, the largest first."""
        if not self.packed:
            return self._split_until(micro_batches, count)
        result = self._spread([index for micro in micro_batches for index in micro], count)
        result = result or self._split_until(micro_batches, count)
        return sorted(result, key=lambda micro: -sum(self.lengths[index] for index in micro))

    def _spread(self, samples: list[int], count: int) -> MicroBatches | None:
        """Gives each sample to the micro-batch with the least cost that has room; None where none has."""
        micro_batches: MicroBatches = [[] for _ in range(count)]
        loads = [(0.0, 0, at) for at in range(count)]  # cost, tokens, micro-batch
        for index in sorted(samples, key=lambda index: -self.costs[index]):
            full = []
            while loads and not self._has_room(micro_batches[loads[0][2]], loads[0][1], index):
                full.append(heapq.heappop(loads))
            if not loads:
                return None
            cost, tokens, at = loads[0]
            micro_batches[at].append(index)
            heapq.heapreplace(loads, (cost + self.costs[index], tokens + self.lengths[index], at))
            for each in full:
                heapq.heappush(loads, each)
        return micro_batches

    def _split_until(self, micro_batches: MicroBatches, count: int) -> MicroBatches:
        """Halves the micro-batch of most samples until there are `count`; halves need no more padding than it."""
        result = list(micro_batches)
        while len(result) < count:
            largest = max(range(len(result)), key=lambda at: len(result[at]))
            whole = result[largest]
            middle = (len(whole) + 1) // 2
            result[largest : largest + 1] = [whole[:middle], whole[middle:]]
        return result

    def _has_room(self, micro_batch: list[int], tokens: int, index: int) -> bool:
        """Whether a micro-batch of so many tokens has room for a sample that is no longer than its first."""
        if self.max_tokens is None:
            return len(micro_batch) < (self.micro_batch_size or 1)
        if self.packed:
            return self._padded(tokens + self.lengths[index]) <= self.max_tokens
        return self._padded(self.lengths[micro_batch[0]]) * (len(micro_batch) + 1) <= self.max_tokens

    def _cost(self, micro_batch: list[int]) -> float:
        costs = [self.costs[index] for index in micro_batch]
        return sum(costs) if self.packed else max(costs) * len(costs)

    def _padded(self, length: int) -> int:
        return -(-length // self.round_to) * self.round_to

    def _check_lengths(self, samples: range) -> None:
        index = max(samples, key=self.lengths.__getitem__)
        tokens = self._padded(self.lengths[index])
        if self.max_tokens is not None and tokens > self.max_tokens:
            raise ValueError(
                f"sample {index} has {self.lengths[index]} tokens ({tokens} padded), more than "
                f"max_tokens {self.max_tokens} of a micro-batch; raise it to at least "
                f"{self._padded(max(self.lengths))} or shorten sequence_length"
            )


def _planner(
    lengths: Sequence[int],
    costs: Sequence[float] | None,
    micro_batch_size: int | None,
    max_tokens: int | None,
    round_to: int,
    packed: bool,
) -> _Planner:
    if (micro_batch_size is None) == (max_tokens is None):
        raise ValueError(f"give either micro_batch_size ({micro_batch_size}) or max_tokens ({max_tokens})")
    for name, value in {"micro_batch_size": micro_batch_size, "max_tokens": max_tokens, "round_to": round_to}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}: {value} must be at least 1")
    costs = lengths if costs is None else costs
    if len(costs) != len(lengths) or min(costs, default=1) <= 0:
        raise ValueError(f"costs: {len(costs)} of {len(lengths)} samples; give one above 0 for each")
    return _Planner(lengths, costs, micro_batch_size, max_tokens, round_to, packed)


def _positions(micro_batches: MicroBatches) -> MicroBatches:
    """The positions of micro-batches that follow each other in a shard."""
    starts = [sum(len(micro) for micro in micro_batches[:at]) for at in range(len(micro_batches))]
    return [[*range(start, start + len(micro))] for start, micro in zip(starts, micro_batches, strict=True)]


def _nearest_divisors(total: int, wanted: int) -> str:
    divisors = [number for number in range(1, total + 1) if total % number == 0]
    below = [number for number in divisors if number < wanted][-1:]
    above = [number for number in divisors if number > wanted][:1]
    return " or ".join(str(number) for number in below + above) or "at least one sample"
