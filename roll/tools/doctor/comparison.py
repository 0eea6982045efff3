"""Which ranks exchange data with each other, and which ranks are slow compared with the median."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import median_high

from roll.configs.devices.parallel_layout import spans

MEASURES = {
    "matmul": "matmul TFLOP/s",
    "copy": "copy GB/s",
    "host_to_device": "host to device GB/s",
    "in_node": "in node GB/s",
    "across_nodes": "across nodes GB/s",
}
"""Names of speeds, and the heads of their columns."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class RankSpeeds:
    """Measured speeds of one rank.

    `speeds` are by name, as in MEASURES; a measure that does not apply to the rank is absent.
    """

    rank: int
    node: int
    address: str
    device: int
    speeds: Mapping[str, float]


def medians(ranks: Sequence[RankSpeeds]) -> dict[str, float]:
    """Median of each speed; of two middle values the higher, so that the slow one of two nodes is found."""
    found = {name: [rank.speeds[name] for rank in ranks if name in rank.speeds] for name in MEASURES}
    return {name: median_high(values) for name, values in found.items() if values}


def slow_speeds(ranks: Sequence[RankSpeeds], slower_than: float) -> dict[int, list[str]]:
    """Rank -> the speeds in which it is below `slower_than` x median; ranks that are nowhere slow are left out."""
    middle = medians(ranks)
    found = {
        rank.rank: [name for name, speed in rank.speeds.items() if speed < slower_than * middle[name]] for rank in ranks
    }
    return {rank: names for rank, names in found.items() if names}


def better_of(first: Sequence[RankSpeeds], second: Sequence[RankSpeeds]) -> list[RankSpeeds]:
    """The higher of two measurements of each speed: other work on a machine disturbs one, a slow device both."""
    return [
        replace(one, speeds={name: max(speed, other.speeds[name]) for name, speed in one.speeds.items()})
        for one, other in zip(first, second, strict=True)
    ]


def slow_nodes(ranks: Sequence[RankSpeeds], slow: Mapping[int, Sequence[str]]) -> dict[int, str]:
    """Node with slow ranks -> its address, and the ranks that are slow in each speed."""
    lines = {}
    for node in sorted({rank.node for rank in ranks if rank.rank in slow}):
        own = [rank for rank in ranks if rank.node == node]
        by_name = {name: [rank.rank for rank in own if name in slow.get(rank.rank, ())] for name in MEASURES}
        parts = [f"{name} of rank {spans(numbers)}" for name, numbers in by_name.items() if numbers]
        lines[node] = f"{own[0].address}: {', '.join(parts)}"
    return lines


def rounds_in_nodes(nodes: Sequence[int]) -> list[list[Pair]]:
    """Pairs of neighbouring ranks of each node; `nodes` is the node of each rank."""
    return _merge(_ring_rounds(ranks) for ranks in _ranks_by_node(nodes))


def rounds_across_nodes(nodes: Sequence[int]) -> list[list[Pair]]:
    """Pairs of ranks with the same position on neighbouring nodes."""
    positions = zip_longest(*_ranks_by_node(nodes))
    return _merge(_ring_rounds([rank for rank in ranks if rank is not None]) for ranks in positions)


def _ranks_by_node(nodes: Sequence[int]) -> list[list[int]]:
    return [[rank for rank, place in enumerate(nodes) if place == node] for node in sorted(set(nodes))]


def _ring_rounds(members: Sequence[int]) -> list[list[Pair]]:
    """Every pair of neighbours on a ring, in two or three rounds in which each member is in at most one pair.

    A member whose own link is slow is slow with both neighbours. Its neighbours are slow in only one of their pairs, so
    the better pair of a member gives its speed. Of two members the slow one cannot be determined.
    """
    count = len(members)
    if count < 3:
        return [[(members[0], members[1])]] if count == 2 else []
    rounds: list[list[Pair]] = [[], []] if count % 2 == 0 else [[], [], []]
    for index, member in enumerate(members):
        last_of_odd = count % 2 == 1 and index == count - 1
        rounds[2 if last_of_odd else index % 2].append((member, members[(index + 1) % count]))
    return rounds


def _merge(rings: Iterable[list[list[Pair]]]) -> list[list[Pair]]:
    """Rings share no member, so their first rounds run at the same time, then their second ones."""
    return [[pair for pairs in merged for pair in pairs] for merged in zip_longest(*rings, fillvalue=[])]
