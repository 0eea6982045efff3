"""Calls that travel together: each gets its own answer, once; what is given up is cancelled; a broken way is told."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.distributed.rpc_batching import Answer, Call, CallError, Inbox, Outbox


class Actor:
    """What is on the other side: doubles what it is given after so many turns of the loop, and counts letters."""

    def __init__(self) -> None:
        self.inbox = Inbox(self.run)
        self.begun: Counter[int] = Counter()
        self.cancelled: Counter[int] = Counter()
        self.letters: list[int] = []

    async def run(self, method: str, value: int, turns: int) -> int:
        self.begun[value] += 1
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled[value] += 1
            raise
        if method != "double":
            raise ArithmeticError(f"{method} of {value}")
        return 2 * value

    async def submit(self, box: str, calls: list[Call], given_up: list[int]) -> None:
        """Takes turns on the way, the more the fewer calls there are: nothing but waiting keeps letters in order."""
        self.letters.append(len(calls))
        for _ in range(5 - min(4, len(calls))):
            await asyncio.sleep(0)
        self.inbox.submit(box, calls, given_up)

    def outbox(self) -> Outbox:
        return Outbox(self.submit, self.inbox.collect)


def test_calls_made_together_travel_together_and_each_gets_its_answer() -> None:
    async def scenario() -> tuple[list[int], Actor]:
        actor = Actor()
        outbox = actor.outbox()
        return await asyncio.gather(*(outbox.call("double", value, 20 - value) for value in range(20))), actor

    answers, actor = asyncio.run(scenario())
    assert answers == [2 * value for value in range(20)]
    assert actor.letters == [20]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from([0, 1])), max_size=30))
def test_every_call_is_run_once_and_answered_once_whoever_asks_when(plan: list[tuple[int, int, int]]) -> None:
    async def ask(outbox: Outbox, value: int, wait: int, turns: int) -> Any:
        for _ in range(wait):
            await asyncio.sleep(0)
        return await outbox.call("double", value, turns)

    async def scenario() -> tuple[list[int], Counter[int]]:
        actor = Actor()
        boxes = [actor.outbox(), actor.outbox()]
        asks = [ask(boxes[which], value, wait, turns) for value, (wait, turns, which) in enumerate(plan)]
        return await asyncio.wait_for(asyncio.gather(*asks), 10), actor.begun

    answers, begun = asyncio.run(scenario())
    assert answers == [2 * value for value in range(len(plan))]
    assert begun == Counter(range(len(plan)))


def test_an_exception_comes_back_in_words_and_alone() -> None:
    async def scenario() -> list[Any]:
        outbox = Actor().outbox()
        return await asyncio.gather(
            outbox.call("halve", 3, 0), outbox.call("double", 4, 2), outbox.call("none"), return_exceptions=True
        )

    halved, doubled, none = asyncio.run(scenario())
    assert isinstance(halved, CallError) and "ArithmeticError: halve of 3" in str(halved)
    assert doubled == 8
    assert isinstance(none, CallError) and "TypeError" in str(none)


@given(st.integers(0, 12))
def test_what_is_given_up_is_cancelled_there_and_the_others_are_answered(after: int) -> None:
    async def scenario() -> tuple[int, Actor]:
        actor = Actor()
        outbox = actor.outbox()
        unwanted, wanted = outbox.call("double", 1, 10_000), outbox.call("double", 2, 30)
        for _ in range(after):
            await asyncio.sleep(0)
        unwanted.cancel()
        answer = await asyncio.wait_for(wanted, 10)
        assert await asyncio.wait_for(outbox.call("double", 5, 0), 10) == 10
        return answer, actor

    answer, actor = asyncio.run(scenario())
    assert answer == 4
    assert actor.begun[1] == actor.cancelled[1], "where it had begun, it was cancelled"


def test_a_cancellation_does_not_overtake_its_call() -> None:
    async def scenario() -> Actor:
        actor = Actor()
        outbox = actor.outbox()
        many = [outbox.call("double", value, 200) for value in range(3)]
        await asyncio.sleep(0)
        for call in many:
            call.cancel()
        assert await asyncio.wait_for(outbox.call("double", 5, 0), 10) == 10
        return actor

    actor = asyncio.run(scenario())
    assert actor.begun == actor.cancelled + Counter([5])


@pytest.mark.parametrize("broken", ["submit", "collect"])
def test_a_broken_way_fails_all_who_wait_and_those_who_ask_later(broken: str) -> None:
    async def scenario() -> list[Any]:
        actor = Actor()

        async def submit(box: str, calls: list[Call], given_up: list[int]) -> None:
            if broken == "submit":
                raise ConnectionError("submit")
            await actor.submit(box, calls, given_up)

        async def collect(box: str) -> list[Answer]:
            if broken == "collect":
                raise ConnectionError("collect")
            return await actor.inbox.collect(box)

        outbox = Outbox(submit, collect)
        first = await asyncio.gather(*(outbox.call("double", 1, 0) for _ in range(2)), return_exceptions=True)
        return first + await asyncio.gather(outbox.call("double", 1, 0), return_exceptions=True)

    assert [repr(error) for error in asyncio.run(asyncio.wait_for(scenario(), 10))] == [
        repr(ConnectionError(broken))
    ] * 3
