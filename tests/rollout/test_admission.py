"""Admission, case by case: how many prompts, deadlines, batches, pauses, restore."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from roll.configs.asynchronous import exact_ratio
from roll.rollout.admission import Admission, AdmissionError, AdmissionSettings, admission_bound
from tests.rollout.admission_driver import Driver


def admission(ratio: float, batch_size: int = 4, **settings: Any) -> Admission[str]:
    return Admission(AdmissionSettings(batch_size, ratio, **settings))


def finish(made: Admission[str], numbers: list[int] | range) -> None:
    for number in numbers:
        made.finish(number, f"item {number}", made.version)


def numbers(requests: list) -> list[int]:
    return [getattr(request, "request", request).number for request in requests]


@pytest.mark.parametrize(
    ("ratio", "batch_size", "bounds"),
    [
        (0.0, 4, [4, 8, 12]),
        (0.5, 4, [6, 10, 14]),
        (1.0, 4, [8, 12, 16]),
        (2.7, 10, [37, 47, 57]),
        (0.29, 100, [129, 229, 329]),
        (0.1 * 3, 10, [13, 23, 33]),
        (0.1 * 3 + 0.7, 1, [2, 3, 4]),
    ],
)
def test_admission_is_exact_where_floats_are_not(ratio: float, batch_size: int, bounds: list[int]) -> None:
    assert [admission_bound(v, exact_ratio(ratio), batch_size) for v in range(3)] == bounds


def test_ratio_0_is_synchronous_training() -> None:
    made = admission(0)
    for step in range(3):
        made.submit(made.admissible())
        finish(made, range(4 * step, 4 * step + 4))
        assert made.admissible() == 0
        assert numbers(made.take()) == list(range(4 * step, 4 * step + 4))
        assert made.admissible() == 0
        made.advance(step + 1)


def test_ratio_1_generates_the_next_batch_while_one_is_trained_on() -> None:
    made = admission(1)
    assert [request.deadline for request in made.submit(8)] == [1] * 8
    finish(made, [7, 1, 2, 5])
    assert numbers(made.take()) == [1, 2, 5, 7]
    assert made.admissible() == 0 and made.ledger.in_flight == 4
    made.advance(1)
    assert made.admissible() == 4


def test_a_batch_waits_for_a_running_prompt_that_is_due_and_for_no_other() -> None:
    made = admission(1)
    made.submit(8)
    finish(made, range(4))
    made.take()
    made.advance(1)
    made.submit(4)
    finish(made, [4, 5, 6, 8, 9])
    assert not made.ready() and numbers(made.blocking()) == [7]
    finish(made, [7])
    assert made.blocking() == [] and numbers(made.take()) == [4, 5, 6, 7]


def test_a_batch_also_waits_where_a_later_deadline_could_no_longer_be_met() -> None:
    made = admission(2)
    made.submit(12)
    finish(made, range(4))
    made.take()
    made.advance(1)
    made.submit(4)
    finish(made, range(12, 16))
    assert not made.ready(), "without one of 4 to 11 in this batch, the next would have to hold 8 prompts"
    assert numbers(made.blocking()) == list(range(4, 12))
    finish(made, range(4, 8))
    assert numbers(made.take()) == [4, 5, 6, 7]


def test_all_prompts_in_flight_block_while_too_few_are_ready() -> None:
    made = admission(0.5)
    made.submit(6)
    finish(made, [0, 3])
    assert numbers(made.blocking()) == [1, 2, 4, 5]


def test_a_dropped_prompt_is_replaced_by_one_with_its_own_number_and_deadline() -> None:
    made = admission(0)
    made.submit(4)
    finish(made, [0, 1, 2])
    made.drop(3, "generation_failed")
    assert made.admissible() == 1
    assert numbers(made.submit(1)) == [4]
    finish(made, [4])
    assert numbers(made.take()) == [0, 1, 2, 4]
    assert made.ledger.dropped == {"generation_failed": 1}


def test_pauses_nest_by_reason() -> None:
    made = admission(0)
    for reason in ("validation", "validation", "closing"):
        made.pause(reason)
    assert made.admissible() == 0
    for reason in ("validation", "closing"):
        made.resume(reason)
    assert made.admissible() == 0 and made.pause_reasons == ["validation"]
    made.resume("validation")
    assert made.admissible() == 4
    with pytest.raises(AdmissionError, match="submission is not paused for 'validation'"):
        made.resume("validation")


def test_a_full_queue_blocks_submission_and_evicts_nothing() -> None:
    made = admission(2, max_queue=5)
    made.submit(5)
    finish(made, range(5))
    assert made.admissible() == 0 and made.ledger.buffered == 5
    made.take()
    assert made.admissible() == 4


def test_no_more_is_admitted_than_the_run_consumes() -> None:
    made = admission(3, total=8)
    assert made.admissible() == 8
    made.submit(8)
    made.drop(7, "reward_timeout")
    assert made.admissible() == 1
    made.submit(1)
    finish(made, [0, 1, 2, 3, 4, 5, 6, 8])
    made.take()
    made.take()
    assert not made.ready() and made.blocking() == [] and made.admissible() == 0


def test_min_batches_holds_the_first_batch_back_and_not_the_last() -> None:
    made = admission(1, min_batches=2, total=12)
    made.submit(8)
    finish(made, range(4))
    assert not made.ready()
    finish(made, range(4, 8))
    made.take()
    made.advance(1)
    finish(made, [request.number for request in made.submit(4)])
    made.take()
    made.advance(2)
    assert made.ready(), "four prompts are all that is left of the run"


def test_max_staleness_drops_groups_that_are_too_old_and_frees_their_slots() -> None:
    made = admission(1)
    made.submit(8)
    finish(made, range(4))
    made.finish(4, "sampled by weights from before the run", -1)
    made.take()
    assert made.ledger.dropped == {"stale": 1} and made.admissible() == 1
    made.finish(5, "too old on arrival", -1)
    assert made.ledger.dropped == {"stale": 2}


def test_groups_that_are_too_old_by_time_are_dropped_when_a_batch_is_taken_and_replaced() -> None:
    made, clock = admission(1, max_age_s=60.0), 1000.0
    made.submit(4, clock)
    clock += 50
    made.submit(4, clock)
    finish(made, range(8))
    clock += 10
    assert made.expire(clock) == 0, "60 s are not more than 60 s"
    clock += 1
    assert made.ready() and made.expire(clock) == 4
    assert made.ledger.dropped == {"expired": 4} and made.ledger.buffered == 4
    assert made.admissible() == 4
    assert numbers(made.take()) == [4, 5, 6, 7]
    assert made.ledger.sample_metrics(8)["dropped_expired_samples"] == 32
    assert made.ledger.sample_metrics(8)["dropped_stale_samples"] == 0


def test_a_batch_waits_for_replacements_of_groups_that_are_too_old() -> None:
    made = admission(0.5, max_age_s=60.0)
    made.submit(6, 1000.0)
    finish(made, range(4))
    assert made.expire(1061.0) == 4 and not made.ready()
    assert numbers(made.submit(made.admissible(), 1061.0)) == [6, 7, 8, 9]
    finish(made, range(4, 10))
    assert made.expire(1062.0) == 2, "the two that were running"
    assert numbers(made.take()) == [6, 7, 8, 9]


def test_without_a_limit_nothing_is_too_old_by_time() -> None:
    made = admission(0)
    made.submit(4, 0.0)
    finish(made, range(4))
    assert made.expire(1e9) == 0 and made.ready()


def test_age_goes_on_over_a_restart_for_ready_groups_and_begins_again_for_running_ones() -> None:
    made = admission(0.5, max_age_s=60.0)
    made.submit(6, 1000.0)
    finish(made, [0, 1, 2, 3])
    back = Admission.restore(made.settings, json.loads(json.dumps(made.state_dict(str))), str)
    assert [request.submitted_at_s for request in back.resubmit(1050.0)] == [1050.0, 1050.0]
    assert back.expire(1061.0) == 4
    finish(back, [4, 5])
    assert back.expire(1110.0) == 0 and back.expire(1111.0) == 2


def test_versions_follow_the_batches() -> None:
    made = admission(1)
    with pytest.raises(AdmissionError, match="version 1 cannot follow version 0"):
        made.advance(1)
    made.submit(8)
    finish(made, range(8))
    made.take()
    made.advance(1)
    with pytest.raises(AdmissionError, match="version 0 cannot follow version 1"):
        made.advance(0)


@pytest.mark.parametrize(
    "event", [lambda p: p.finish(9, "", 0), lambda p: p.drop(9, "lost"), lambda p: p.finish(0, "", 0)]
)
def test_a_prompt_that_is_not_in_flight_neither_finishes_nor_drops(event) -> None:
    made = admission(1)
    made.submit(3)
    finish(made, [0])
    with pytest.raises(AdmissionError, match="is not in flight; 2 others are"):
        event(made)


def test_errors_name_what_is_allowed() -> None:
    made = admission(0)
    with pytest.raises(AdmissionError, match="5 prompts may not be submitted at version 0, only 4"):
        made.submit(5)
    made.pause("validation")
    with pytest.raises(AdmissionError, match="only 0; submission is paused for validation"):
        made.submit(1)
    with pytest.raises(
        AdmissionError, match="batch for version 0 is not ready: 0 of 4 prompts are ready, 0 are in flight"
    ):
        made.take()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": -1}, "async_generation_ratio: -1 is not a finite number"),
        ({"ratio": float("inf")}, "async_generation_ratio: inf is not a finite number"),
        ({"batch_size": 0}, "batch_size: 0 is not at least 1"),
        ({"ratio": 2.5, "max_staleness": 2}, "max_staleness: 2 would drop samples .* use at least 3"),
        ({"ratio": 1.5, "min_batches": 3}, "min_batches: 3 is not within 1 to 2"),
        ({"ratio": 1, "min_batches": 2, "max_queue": 7}, "max_queue: 7 prompts hold less .* use at least 8"),
        ({"max_age_s": 0.0}, "max_age_s: 0.0 is not above 0"),
        ({"total": 6}, "total: 6 is not a whole number of batches of 4"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdmissionSettings(**{"batch_size": 4, "ratio": 0, **settings})


def test_a_restored_admission_continues_where_it_stopped() -> None:
    made = admission(1)
    made.submit(8)
    finish(made, [0, 1, 2, 3, 6])
    made.take()
    made.drop(5, "reward_raised")
    made.advance(1)
    made.submit(made.admissible())
    state = json.loads(json.dumps(made.state_dict(str.upper)))
    back = Admission.restore(made.settings, state, str.lower)
    assert back.state_dict(str.upper) == state
    assert numbers(back.resubmit()) == [4, 7, 8, 9, 10, 11, 12]
    assert back.resubmit() == []
    assert back.admissible() == 0
    finish(back, [4, 7, 8])
    assert [taken.group for taken in back.take()] == ["item 4", "item 6", "item 7", "item 8"]


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_a_run_that_is_resumed_with_a_smaller_ratio_drops_what_is_too_old_for_it(ratio: int) -> None:
    found = sum(_dropped_by_a_resumed_run(random.Random(seed), ratio) for seed in range(20))
    assert found >= 10


def _dropped_by_a_resumed_run(draw: random.Random, ratio: int) -> int:
    """Plays a run of ratio 3, resumes it with a smaller one, and returns how many groups that drops."""
    driver = Driver("3", draw)
    driver.play(100)
    state, model = driver.admission.state_dict(lambda item: item["number"]), driver.model
    discarded: list[tuple[int, str]] = []
    back = Admission.restore(
        AdmissionSettings(driver.batch_size, ratio), state, int, lambda group, why: discarded.append((group.group, why))
    )
    old = {number for number, (_, oldest) in model.buffered.items() if model.batches - oldest > ratio}
    assert sorted(discarded) == [(number, "stale") for number in sorted(old)]
    assert [each["group"] for each in back.state_dict(int)["buffered"]] == sorted(model.buffered.keys() - old)
    assert back.ledger.dropped == Counter([*model.dropped.values(), *["stale"] * len(old)])
    assert (back.ledger.buffered, back.ledger.submitted) == (len(model.buffered) - len(old), model.submitted)
    back.ledger.check()
    return len(old)


def test_a_checkpoint_of_another_batch_size_is_refused() -> None:
    state = admission(1).state_dict(str)
    with pytest.raises(ValueError, match="rollout_batch_size: batches of 5 prompts cannot .* of 4; use that size"):
        Admission.restore(AdmissionSettings(5, 1), state, str)
