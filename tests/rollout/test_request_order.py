"""Which requests of an engine start next."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.rollout.request_order import RequestOrder

ARRIVALS = st.lists(st.tuples(st.integers(-1, 4), st.booleans()), max_size=60)
"""Version of a request that arrives, and whether a running one ends then."""


ALL = 9
"""All versions are due."""


def order(running: int = 4, newer: int | None = 1, waiting: tuple[int, ...] = ()) -> RequestOrder[int]:
    """With requests of these versions waiting; each is named by its position."""
    made: RequestOrder[int] = RequestOrder(running, newer)
    for position, version in enumerate(waiting):
        made.add(version, position)
    return made


def test_older_requests_start_first_and_equal_ones_in_the_order_of_their_arrival() -> None:
    assert order(running=9, newer=None, waiting=(2, 1, 2, 1)).start(ALL) == [(1, 1), (1, 3), (2, 0), (2, 2)]


def test_no_more_than_the_limit_run() -> None:
    made = order(running=2, newer=None, waiting=(1, 1, 1))
    assert [len(made.start(ALL)), len(made.start(ALL))] == [2, 0]
    made.end(1)
    assert made.start(ALL) == [(1, 2)]


def test_few_newer_requests_start_beside_older_ones() -> None:
    made = order(running=8, newer=2, waiting=(1, 2, 2, 2, 3))
    assert made.start(ALL) == [(1, 0), (2, 1), (2, 2)]
    made.end(1)
    assert made.start(ALL) == [(2, 3), (3, 4)], "version 2 is the oldest now"


def test_no_newer_request_starts_beside_an_older_one_if_none_may() -> None:
    made = order(running=8, newer=0, waiting=(1, 2))
    assert made.start(ALL) == [(1, 0)]
    made.end(1)
    assert made.start(ALL) == [(2, 1)]


def test_an_older_request_starts_beside_any_number_of_newer_ones() -> None:
    made = order(running=8, newer=0, waiting=(2, 2, 2))
    assert len(made.start(ALL)) == 3
    made.add(1, 3)
    assert made.start(ALL) == [(1, 3)]


def test_any_number_of_newer_requests_start_beside_older_ones_that_are_not_due() -> None:
    made = order(running=4, newer=1, waiting=(1, 2, 2))
    assert made.start(due=0) == [(1, 0), (2, 1), (2, 2)]
    made.add(2, 3)
    assert made.start(due=1) == [], "version 1 is due now, and more than one is newer"
    made.end(1)
    assert made.start(due=1) == [(2, 3)]


@pytest.mark.parametrize(("running", "newer"), [(0, None), (1, -1)])
def test_limits_out_of_range_are_refused(running: int, newer: int | None) -> None:
    with pytest.raises(ValueError, match="is not at least"):
        order(running, newer)


def test_a_request_that_does_not_run_cannot_end() -> None:
    made = order(waiting=(1,))
    with pytest.raises(ValueError, match="version 1"):
        made.end(1)


@given(ARRIVALS, st.integers(1, 5), st.none() | st.integers(0, 3), st.integers(-2, 4))
def test_every_request_starts_once_within_the_limits(
    arrivals: list[tuple[int, bool]], limit: int, newer: int | None, due: int
) -> None:
    made, running, started = order(limit, newer), Counter[int](), []
    waiting: set[tuple[int, int]] = set()

    def start() -> None:
        for version, request in made.start(due):
            assert (version, request) == min(waiting), "the oldest, and of these the first to arrive"
            oldest = min((*running, version))
            limited = newer is not None and oldest < version and oldest <= due
            assert not limited or running.total() - running[oldest] < (newer or 0)
            waiting.remove((version, request))
            running[version] += 1
            started.append(request)
        assert running.total() <= limit

    def end_oldest() -> None:
        version = min(running)
        made.end(version)
        running[version] -= 1
        if not running[version]:
            del running[version]

    for request, (version, ends) in enumerate(arrivals):
        made.add(version, request)
        waiting.add((version, request))
        start()
        if ends and running:
            end_oldest()
            start()
    while running:
        end_oldest()
        start()
    assert sorted(started) == list(range(len(arrivals))), "none is left waiting where nothing runs"
