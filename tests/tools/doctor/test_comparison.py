"""Which ranks are slow, and which ranks exchange data to find a slow link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.tools.doctor.comparison import (
    RankSpeeds,
    better_of,
    medians,
    rounds_across_nodes,
    rounds_in_nodes,
    slow_nodes,
    slow_speeds,
)

SPEEDS = st.lists(st.floats(0.1, 1000), min_size=1, max_size=20)


def ranks_with(speeds: Sequence[float], per_node: int = 2, name: str = "matmul") -> list[RankSpeeds]:
    return [
        RankSpeeds(rank, rank // per_node, f"10.0.0.{rank // per_node}", rank, {name: speed})
        for rank, speed in enumerate(speeds)
    ]


def test_a_slow_rank_and_its_node_are_named() -> None:
    ranks = ranks_with([100, 98, 102, 60])
    slow = slow_speeds(ranks, 0.8)
    assert slow == {3: ["matmul"]}
    assert slow_nodes(ranks, slow) == {1: "10.0.0.1: matmul of rank 3"}


def test_one_of_two_nodes_is_found() -> None:
    assert set(slow_speeds(ranks_with([100, 99, 60, 61]), 0.8)) == {2, 3}


def test_a_speed_that_only_some_ranks_have_is_compared_among_those() -> None:
    ranks = [*ranks_with([100, 100]), RankSpeeds(2, 1, "b", 2, {"matmul": 100, "copy": 5})]
    assert slow_speeds(ranks, 0.8) == {} and medians(ranks) == {"matmul": 100, "copy": 5}


def test_what_was_slow_once_is_not_slow() -> None:
    assert slow_speeds(better_of(ranks_with([100, 50, 100, 50]), ranks_with([100, 100, 100, 50])), 0.8) == {
        3: ["matmul"]
    }


@settings(deadline=None)
@given(SPEEDS, st.floats(0.01, 1), st.integers(-8, 8))
def test_the_fastest_is_never_slow_and_units_do_not_matter(
    speeds: list[float], slower_than: float, exponent: int
) -> None:
    slow = set(slow_speeds(ranks_with(speeds), slower_than))
    assert speeds.index(max(speeds)) not in slow
    assert slow == set(slow_speeds(ranks_with([speed * 2.0**exponent for speed in speeds]), slower_than))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.99), st.floats(0.99, 1)), min_size=1, max_size=12), st.floats(0.5, 0.9))
def test_up_to_half_of_the_ranks_are_found_however_slow_they_are(
    factors: list[tuple[float, float]], slower_than: float
) -> None:
    """As many slow ranks as fast ones, or one less."""
    slow = [0.98 * slower_than * factor for factor, _ in factors]
    fast = [factor for _, factor in factors]
    count = len(factors)
    assert set(slow_speeds(ranks_with([*slow, *fast]), slower_than)) == set(range(count))
    assert set(slow_speeds(ranks_with([*slow[1:], *fast]), slower_than)) == set(range(count - 1))


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=24))
def test_every_rank_meets_its_neighbours_and_one_at_a_time(nodes: list[int]) -> None:
    sizes = Counter(nodes)
    for rounds, joined in ((rounds_in_nodes(nodes), True), (rounds_across_nodes(nodes), False)):
        assert len(rounds) <= 3
        for pairs in rounds:
            members = [rank for pair in pairs for rank in pair]
            assert len(set(members)) == len(members)
        every = [frozenset(pair) for pairs in rounds for pair in pairs]
        assert len(set(every)) == len(every)
        assert all((nodes[first] == nodes[second]) is joined for first, second in every)
        if joined:
            met = Counter(rank for pair in every for rank in pair)
            assert met == {r: min(2, sizes[node] - 1) for r, node in enumerate(nodes) if sizes[node] > 1}


@pytest.mark.parametrize("nodes", range(3, 9))
def test_a_slow_link_is_slow_with_both_neighbours_and_its_neighbours_are_not(nodes: int) -> None:
    broken, best = 1, [0.0] * nodes
    for first, second in [pair for pairs in rounds_across_nodes(range(nodes)) for pair in pairs]:
        bandwidth = 10.0 if broken in (first, second) else 100.0
        best[first], best[second] = max(best[first], bandwidth), max(best[second], bandwidth)
    assert set(slow_speeds(ranks_with(best, 1, "across_nodes"), 0.8)) == {broken}
