"""The invariant of the ledger holds over any order of events, and a lost prompt is an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.rollout.ledger import Ledger, LedgerError

EVENTS = st.lists(st.tuples(st.sampled_from(["submit", "finish", "drop", "consume"]), st.integers(1, 5)), max_size=200)


def apply(events: list[tuple[str, int]]) -> Ledger:
    """Applies every event that is possible when it comes."""
    ledger = Ledger()
    for name, count in events:
        if name == "submit":
            ledger.submit(count)
        elif name == "finish" and ledger.in_flight >= count:
            ledger.finish(count)
        elif name == "drop" and ledger.in_flight >= count:
            ledger.drop("reward_timeout" if count % 2 else "generation_failed", count)
        elif name == "consume" and ledger.buffered >= count:
            ledger.consume(count)
    return ledger


@given(EVENTS)
def test_every_prompt_is_accounted_for(events):
    ledger = apply(events)
    accounted = ledger.consumed + sum(ledger.dropped.values()) + ledger.buffered + ledger.in_flight
    assert ledger.submitted == accounted


@pytest.mark.parametrize("event", ["finish", "consume"])
def test_a_prompt_that_was_never_submitted_is_refused(event):
    ledger = Ledger()
    with pytest.raises(LedgerError, match="submitted 0 prompts"):
        getattr(ledger, event)()


def test_metrics_count_each_reason_apart():
    ledger = Ledger()
    ledger.submit(4)
    ledger.finish(2)
    ledger.drop("reward_raised")
    assert ledger.metrics() == {
        "ledger/submitted": 4.0,
        "ledger/consumed": 0.0,
        "ledger/buffered": 2.0,
        "ledger/in_flight": 1.0,
        "ledger/dropped_reward_raised": 1.0,
    }


def test_counts_in_samples_and_prompts_that_failed():
    ledger = Ledger()
    ledger.submit(20)
    ledger.drop("generation_failed", 3)
    ledger.finish(13)
    ledger.discard("stale")
    ledger.consume(8)
    assert ledger.sample_metrics(samples_per_prompt=8) == {
        "queue/size": 4.0 * 8,
        "queue/total_produced": 12.0 * 8,
        "queue/total_consumed": 8.0 * 8,
        "queue/dropped_samples": 4.0 * 8,
        "total_generated_samples": (20.0 - 4 - 3) * 8,
        "dropped_stale_samples": 8.0,
        "dropped_expired_samples": 0.0,
        "generation_errors": 3.0,
    }
