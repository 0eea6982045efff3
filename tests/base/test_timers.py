from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.base.timers import MOST_SPANS, BusyTimer


def test_overlapping_activities_count_once() -> None:
    busy = BusyTimer(10.0)
    for now, event in ((11, busy.enter), (12, busy.enter), (13, busy.exit), (15, busy.exit), (16, busy.enter)):
        event(now)
    interval = busy.interval(18)
    assert (interval.busy, interval.idle) == (6.0, 2.0)


def test_an_interval_that_ends_in_the_middle_of_an_activity_splits_it() -> None:
    busy = BusyTimer(0.0)
    busy.enter(1)
    first, second = busy.interval(4), busy.interval(6)
    assert (first.busy, first.idle, first.idle_share) == (3.0, 1.0, 0.25)
    assert (second.busy, second.idle_share) == (2.0, 0.0)
    assert busy.interval(6).idle_share == 0.0


def test_a_clock_that_runs_backwards_and_an_end_without_a_beginning_are_refused() -> None:
    busy = BusyTimer(5.0)
    with pytest.raises(ValueError, match="backwards: from 5.0 to 4.0"):
        busy.enter(4.0)
    with pytest.raises(ValueError, match="exit without enter"):
        busy.exit(6.0)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=30), st.lists(st.integers(0, 80), max_size=9)
)
def test_intervals_add_up_to_the_union_of_all_activities(spans: list[tuple[int, int]], intervals: list[int]) -> None:
    busy = BusyTimer(0)
    events = [(start, 1, busy.enter) for start, _ in spans] + [(start + n, 2, busy.exit) for start, n in spans]
    events += [(at, 0, busy.interval) for at in intervals]
    made = [interval for at, _, event in sorted(events, key=lambda e: e[:2]) if (interval := event(at)) is not None]
    made.append(busy.interval(100))
    union = {second for start, length in spans for second in range(start, start + length)}
    assert sum(interval.busy for interval in made) == pytest.approx(len(union))
    assert sum(interval.idle for interval in made) == pytest.approx(100 - len(union))


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(1e-3, 20)), max_size=300), st.floats(0, 100))
def test_spans_cover_all_busy_time_and_are_few(spans: list[tuple[float, float]], cut: float) -> None:
    busy = BusyTimer(0)
    events = [(start, 1, busy.enter) for start, _ in spans] + [(start + n, 2, busy.exit) for start, n in spans]
    made: list[tuple[float, float]] = []
    for at, _, event in sorted([*events, (cut, 0, busy.spans)], key=lambda each: each[:2]):
        found = event(at)
        if found is not None:
            assert len(found) <= MOST_SPANS
            made += found
    made += busy.spans(200)
    assert all(start <= end for start, end in made)
    assert all(one[1] <= other[0] for one, other in pairwise(made))
    for start, length in spans:
        assert sum(max(0, min(end, start + length) - max(begin, start)) for begin, end in made) == pytest.approx(length)
