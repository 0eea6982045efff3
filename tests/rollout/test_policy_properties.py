"""Over random runs, every law of the policy holds after every event."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.rollout.policy_driver import Driver

RATIOS = ["0", "0.5", "1", "2", "3", "2.7", "0.3"]
EVENTS_PER_RUN = 500
RUNS_PER_RATIO = 34


@pytest.mark.parametrize("ratio", RATIOS)
def test_every_law_holds_after_every_event(ratio: str) -> None:
    played: Counter[str] = Counter()
    batches = 0
    for seed in range(RUNS_PER_RATIO):
        driver = Driver(ratio, seed)
        try:
            driver.play(EVENTS_PER_RUN)
        except Exception as error:
            raise AssertionError(f"ratio {ratio}, seed {seed}, after {dict(driver.events)}: {error!r}") from error
        played.update(driver.events)
        batches += driver.model.batches
    assert played.total() * len(RATIOS) >= 100_000
    assert min(played.values()) >= 50, f"every kind of event happens: {played}"
    assert batches > 10 * RUNS_PER_RATIO, "the runs got somewhere"
