"""Over random runs, every invariant of admission holds after every event."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.admission_driver import Driver

pytestmark = pytest.mark.slow

RATIOS = ["0", "0.5", "1", "2", "3", "2.7", "0.3"]
EVENTS_PER_RUN = 700
EVENTS = 100_000
"""Events of all ratios together that change something; every ratio runs until it has its share."""


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(RATIOS), st.randoms(use_true_random=False), st.integers(0, 60))
def test_every_invariant_holds_in_short_runs(ratio: str, draw: random.Random, events: int) -> None:
    Driver(ratio, draw).run(events)


@pytest.mark.parametrize("ratio", RATIOS)
def test_every_invariant_holds_after_every_event(ratio: str) -> None:
    played: Counter[str] = Counter()
    runs = batches = 0
    while played.total() * len(RATIOS) < EVENTS:
        seed, runs = runs, runs + 1
        driver = Driver(ratio, random.Random(f"{ratio}/{seed}"))
        try:
            driver.run(EVENTS_PER_RUN)
        except Exception as error:
            raise AssertionError(f"ratio {ratio}, seed {seed}, after {dict(driver.events)}: {error!r}") from error
        played.update(driver.events)
        batches += driver.model.batches
    assert min(played.values()) >= 50, f"every kind of event happens: {played}"
    assert batches > 10 * runs, "the runs made progress"
