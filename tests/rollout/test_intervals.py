from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.rollout.timers import Busy


def test_overlapping_activities_count_once() -> None:
    busy = Busy(10.0)
    for now, event in ((11, busy.enter), (12, busy.enter), (13, busy.exit), (15, busy.exit), (16, busy.enter)):
        event(now)
    assert busy.busy(18) == 6.0
    assert busy.idle(18) == 2.0


def test_a_lap_in_the_middle_of_an_activity_splits_it() -> None:
    busy = Busy(0.0)
    busy.enter(1)
    first, second = busy.lap(4), busy.lap(6)
    assert (first.busy, first.idle, first.idle_share) == (3.0, 1.0, 0.25)
    assert (second.busy, second.idle_share) == (2.0, 0.0)
    assert busy.lap(6).idle_share == 0.0


def test_a_clock_that_runs_backwards_and_an_end_without_a_beginning_are_refused() -> None:
    busy = Busy(5.0)
    with pytest.raises(ValueError, match="backwards: from 5.0 to 4.0"):
        busy.enter(4.0)
    with pytest.raises(ValueError, match="exit without enter"):
        busy.exit(6.0)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=30), st.lists(st.integers(0, 80), max_size=9)
)
def test_laps_add_up_to_the_union_of_all_activities(spans: list[tuple[int, int]], laps: list[int]) -> None:
    busy = Busy(0)
    events = [(start, 1, busy.enter) for start, _ in spans] + [(start + n, 2, busy.exit) for start, n in spans]
    events += [(at, 0, busy.lap) for at in laps]
    made = [lap for at, _, event in sorted(events, key=lambda e: e[:2]) if (lap := event(at)) is not None]
    made.append(busy.lap(100))
    union = {second for start, length in spans for second in range(start, start + length)}
    assert sum(lap.busy for lap in made) == pytest.approx(len(union))
    assert sum(lap.idle for lap in made) == pytest.approx(100 - len(union))
