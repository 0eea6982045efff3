from __future__ import annotations

from dataclasses import replace

import pytest

from roll.rewards.calling import RewardOutcome, RewardRequest
from roll.usercode.failed_calls import HUNG_CALLS, HUNG_S, HungCalls

REQUEST = RewardRequest(("1",), "5", row={"level": 1}, tag="math", id="data:1")
HUNG = RewardOutcome(None, "timeout", "too long")


@pytest.mark.parametrize(
    ("reads", "changed", "is_equal"),
    [
        ((), {"id": "data:2"}, True),
        (("id",), {"id": "data:2"}, False),
        ((), {"row": {"level": 2}}, True),
        (("row",), {"row": {"level": 2}}, False),
        (("row",), {"row": {"level": 1}}, True),
        (("tag",), {"tag": "code"}, False),
        ((), {"ground_truth": "6"}, False),
        ((), {"responses": ("2",)}, False),
    ],
)
def test_calls_are_equal_if_what_the_function_reads_is(reads, changed, is_equal):
    hung = HungCalls(frozenset(reads))
    hung.add((REQUEST, 0), HUNG)
    assert (hung.failure((replace(REQUEST, **changed), 0)) == HUNG) == is_equal


def test_the_oldest_of_many_hung_calls_is_forgotten():
    hung = HungCalls(frozenset({"id"}))
    calls = [(replace(REQUEST, id=str(number)), 0) for number in range(HUNG_CALLS + 1)]
    for call in calls:
        hung.add(call, HUNG)
    assert [hung.failure(calls[number]) for number in (0, 1, -1)] == [None, HUNG, HUNG]


def test_a_hung_call_is_forgotten_after_a_time():
    now = [100.0]
    hung = HungCalls(frozenset(), clock=lambda: now[0])
    hung.add((REQUEST, 0), HUNG)
    now[0] += HUNG_S - 1
    assert hung.failure((REQUEST, 0)) == HUNG
    now[0] += 1
    assert hung.failure((REQUEST, 0)) is None
