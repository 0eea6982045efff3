"""Assigns samples to data-parallel ranks and micro-batches, so that ranks finish together.

Ranks reduce gradients together, so a step takes as long as its slowest rank. Samples are dealt to ranks by cost, which
grows faster than length where attention matters (`sample_cost`), the most expensive first, each to the rank with the
least cost so far (Graham 1969, longest processing time first). Where micro-batches are formed by tokens, ranks may have
different numbers of samples: one may have a few long ones and another many short ones. A training step has the same
number of micro-batches on every rank in any case.

Where packed samples share the tokens at their beginning (`prefixes`), the samples of a group cost less in one
micro-batch than in several, so whole groups are dealt in the same way too, and the cheaper plan is taken. Token limits
count every sample in full.

Packed micro-batches of a rank are balanced by cost too, which keeps the stages of a pipeline busy. Samples that are
padded are sorted by length instead, so that a micro-batch needs little padding. The largest micro-batch comes first, so
that a step that does not fit in memory fails at once. A plan depends only on its arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

Prefix = tuple[Hashable, int]
"""(group of a sample, number of tokens that all samples of the group have in common at their beginning)."""


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
    prefixes: Sequence[Prefix | None] | None = None,
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
        prefixes: what each sample shares with others of the same packed micro-batch, where such tokens are computed
            once; None for a sample that shares nothing. Costs are then in tokens, as those of `sample_cost`.

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
    planner = _planner(lengths, costs, micro_batch_size, max_tokens, round_to, packed, prefixes, equal_counts=True)
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
    prefixes: Sequence[Prefix | None] | None = None,
) -> OptimizerStepPlan:
    """Splits a batch for a forward pass without gradients; arguments as `plan_optimizer_steps`.

    Ranks do not synchronize in such a pass. If the samples are not divisible by the ranks, some ranks have one sample
    less, and ranks may have different numbers of micro-batches.

    Raises:
        ValueError: there are fewer samples than ranks, or a single sample exceeds `max_tokens`.
    """
    if len(lengths) < data_parallel:
        raise ValueError(f"{len(lengths)} samples are fewer than {data_parallel} data-parallel ranks")
    planner = _planner(lengths, costs, micro_batch_size, max_tokens, round_to, packed, prefixes, equal_counts=False)
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
    prefixes: Sequence[Prefix | None]
    equal_counts: bool  # a training step needs as many micro-batches on every rank

    def plan(self, samples: range, data_parallel: int) -> OptimizerStepPlan:
        """The plan whose slowest rank costs least, among a few; where `equal_counts`, of those with equal counts.

        Consecutive samples for each rank are one of them.
        """
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
            for units in self._units(samples):
                if self.max_tokens is not None and len(units) >= ranks:
                    shards = self._deal(units, [len(samples)] * ranks)
                    if self._tokens_planned_for(shards, max(counts)):
                        yield shards
                yield self._deal(units, counts)
        starts = [sum(counts[:rank]) for rank in range(ranks)]
        yield [[*samples[start : start + count]] for start, count in zip(starts, counts, strict=True)]

    def _units(self, samples: Sequence[int]) -> list[list[list[int]]]:
        """What to deal, the most expensive first: whole groups, where samples share prefixes; and single samples."""
        by_cost = sorted(samples, key=lambda index: -self.costs[index])
        groups: dict[Hashable, list[int]] = {}
        for index in by_cost:
            prefix = self.prefixes[index]
            groups.setdefault(index if prefix is None else (prefix[0],), []).append(index)
        singles = [[index] for index in by_cost]
        if len(groups) == len(singles):
            return [singles]
        return [sorted(groups.values(), key=lambda group: -self._cost(group)), singles]

    def _deal(self, units: list[list[int]], counts: list[int]) -> list[list[int]]:
        """Gives each unit to the rank of least cost that has fewer samples than its count, the rest to the next one."""
        shards: list[list[int]] = [[] for _ in counts]
        loads = [(0.0, rank) for rank in range(len(counts))]
        for left in units:
            while left:
                cost, rank = heapq.heappop(loads)
                room = counts[rank] - len(shards[rank])
                part, left = left[:room], left[room:]
                shards[rank] += part
                if len(part) < room:
                    heapq.heappush(loads, (cost + self._cost(part), rank))
        return shards

    def _tokens_planned_for(self, shards: list[list[int]], count: int) -> bool:
        """Whether no rank has more tokens than `count` of the longest sample, which memory is planned for."""
        most = count * max(self.lengths[index] for shard in shards for index in shard)
        return all(sum(self.lengths[index] for index in shard) <= most for shard in shards)

    def _preference(self, ranks: list[MicroBatches]) -> tuple[int, float, int, int]:
        """Smaller is better: equal counts where needed, cost of the slowest rank, distinct tokens, micro-batches."""
        counts = [len(rank) for rank in ranks]
        unequal = max(counts) - min(counts) if self.equal_counts else 0
        slowest = max(sum(self._cost(micro) for micro in rank) for rank in ranks)
        shared = sum(self._shared(micro) for rank in ranks for micro in rank)
        return unequal, slowest, -shared, max(counts)

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
                if self._has_room(micro_batches[at], tokens[at] + self.lengths[index]):
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
        ways = self._units([index for micro in micro_batches for index in micro])
        spread = [self._spread([part for unit in units for part in self._fewest(unit)], count) for units in ways]
        found = [self._split_until(way, count) for way in spread if way] or [self._split_until(micro_batches, count)]
        result = min(found, key=lambda way: sum(map(self._cost, way)))
        return sorted(result, key=lambda micro: -sum(self.lengths[index] for index in micro))

    def _spread(self, units: list[list[int]], count: int) -> MicroBatches | None:
        """Gives each unit to the micro-batch with the least cost that has room, in halves where none has.

        Returns:
            At most `count` micro-batches; None where one sample finds no room.
        """
        micro_batches: MicroBatches = [[] for _ in range(count)]
        loads = [(0.0, 0, at) for at in range(count)]  # cost, tokens, micro-batch
        waiting = units[::-1]
        while waiting:
            unit, full = waiting.pop(), []
            more = sum(self.lengths[index] for index in unit)
            while loads and not self._has_room(micro_batches[loads[0][2]], loads[0][1] + more, len(unit)):
                full.append(heapq.heappop(loads))
            if loads:
                cost, tokens, at = loads[0]
                micro_batches[at] += unit
                heapq.heapreplace(loads, (cost + self._cost(unit), tokens + more, at))
            elif len(unit) == 1:
                return None
            else:
                middle = (len(unit) + 1) // 2
                waiting += [unit[middle:], unit[:middle]]
            for each in full:
                heapq.heappush(loads, each)
        return [micro for micro in micro_batches if micro]

    def _split_until(self, micro_batches: MicroBatches, count: int) -> MicroBatches:
        """Halves the micro-batch of most samples until there are `count`; halves need no more padding than it."""
        result = list(micro_batches)
        while len(result) < count:
            largest = max(range(len(result)), key=lambda at: len(result[at]))
            whole = result[largest]
            middle = (len(whole) + 1) // 2
            result[largest : largest + 1] = [whole[:middle], whole[middle:]]
        return result

    def _has_room(self, micro_batch: list[int], tokens: int, more: int = 1) -> bool:
        """Whether a micro-batch has room for so many more samples, no longer than its first, and `tokens` with them."""
        if self.max_tokens is None:
            return len(micro_batch) + more <= (self.micro_batch_size or 1)
        if self.packed:
            return self._padded(tokens) <= self.max_tokens
        return self._padded(self.lengths[micro_batch[0]]) * (len(micro_batch) + more) <= self.max_tokens

    def _cost(self, micro_batch: list[int]) -> float:
        costs = [self.costs[index] for index in micro_batch]
        return sum(costs) - self._shared(micro_batch) if self.packed else max(costs) * len(costs)

    def _shared(self, micro_batch: list[int]) -> int:
        """Tokens that are not computed, because another sample of the micro-batch has the same prefix."""
        prefixes = [prefix for index in micro_batch if (prefix := self.prefixes[index])]
        return sum(tokens for _, tokens in prefixes) - sum(dict(prefixes).values())

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
    prefixes: Sequence[Prefix | None] | None,
    equal_counts: bool,
) -> _Planner:
    if (micro_batch_size is None) == (max_tokens is None):
        raise ValueError(f"give either micro_batch_size ({micro_batch_size}) or max_tokens ({max_tokens})")
    for name, value in {"micro_batch_size": micro_batch_size, "max_tokens": max_tokens, "round_to": round_to}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}: {value} must be at least 1")
    costs = lengths if costs is None else costs
    if len(costs) != len(lengths) or min(costs, default=1) <= 0:
        raise ValueError(f"costs: {len(costs)} of {len(lengths)} samples; give one above 0 for each")
    prefixes = [None] * len(lengths) if prefixes is None else prefixes
    if len(prefixes) != len(lengths):
        raise ValueError(f"prefixes: {len(prefixes)} of {len(lengths)} samples; give one or None for each")
    if not packed and any(prefixes):
        raise ValueError("prefixes: only samples of packed micro-batches share tokens")
    return _Planner(lengths, costs, micro_batch_size, max_tokens, round_to, packed, prefixes, equal_counts)


def _positions(micro_batches: MicroBatches) -> MicroBatches:
    """The positions of micro-batches that follow each other in a shard."""
    starts = [sum(len(micro) for micro in micro_batches[:at]) for at in range(len(micro_batches))]
    return [[*range(start, start + len(micro))] for start, micro in zip(starts, micro_batches, strict=True)]


def _nearest_divisors(total: int, wanted: int) -> str:
    divisors = [number for number in range(1, total + 1) if total % number == 0]
    below = [number for number in divisors if number < wanted][-1:]
    above = [number for number in divisors if number > wanted][:1]
    return " or ".join(str(number) for number in below + above) or "at least one sample"
