"""Batched calls are answered once each; cancellations reach the actor; a broken transport fails its calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.distributed.calls.rpc_batching import Answer, Call, RpcActor, RpcClient, RpcError
from tests.processes import PATIENCE_S


class Actor:
    """Doubles a value after some turns of the event loop, and records the size of each message."""

    def __init__(self) -> None:
        self.server = RpcActor(self.run)
        self.begun: Counter[int] = Counter()
        self.cancelled: Counter[int] = Counter()
        self.messages: list[int] = []

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

    async def submit(self, client_id: str, calls: list[Call], cancelled: list[int]) -> None:
        """Delivers smaller messages later, so that only waiting for delivery keeps messages in order."""
        self.messages.append(len(calls))
        for _ in range(5 - min(4, len(calls))):
            await asyncio.sleep(0)
        await self.server.submit(client_id, calls, cancelled)

    def client(self) -> RpcClient:
        return RpcClient(self.submit, self.server.collect)


def test_concurrent_calls_are_one_message_and_each_gets_its_answer() -> None:
    async def scenario() -> tuple[list[int], Actor]:
        actor = Actor()
        client = actor.client()
        return await asyncio.gather(*(client.call("double", value, 20 - value) for value in range(20))), actor

    answers, actor = asyncio.run(scenario())
    assert answers == [2 * value for value in range(20)]
    assert actor.messages == [20]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from([0, 1])), max_size=30))
def test_every_call_runs_once_and_is_answered_once(plan: list[tuple[int, int, int]]) -> None:
    async def delayed(client: RpcClient, value: int, wait: int, turns: int) -> Any:
        for _ in range(wait):
            await asyncio.sleep(0)
        return await client.call("double", value, turns)

    async def scenario() -> tuple[list[int], Counter[int]]:
        actor = Actor()
        clients = [actor.client(), actor.client()]
        calls = [delayed(clients[which], value, wait, turns) for value, (wait, turns, which) in enumerate(plan)]
        return await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_S), actor.begun

    answers, begun = asyncio.run(scenario())
    assert answers == [2 * value for value in range(len(plan))]
    assert begun == Counter(range(len(plan)))


def test_an_exception_is_returned_as_text_for_its_call_only() -> None:
    async def scenario() -> list[Any]:
        client = Actor().client()
        return await asyncio.gather(
            client.call("halve", 3, 0), client.call("double", 4, 2), client.call("none"), return_exceptions=True
        )

    halved, doubled, none = asyncio.run(scenario())
    assert isinstance(halved, RpcError) and "ArithmeticError: halve of 3" in str(halved)
    assert doubled == 8
    assert isinstance(none, RpcError) and "TypeError" in str(none)


@given(st.integers(0, 12))
def test_a_cancelled_call_is_cancelled_in_the_actor_and_others_are_answered(after: int) -> None:
    async def scenario() -> tuple[int, Actor]:
        actor = Actor()
        client = actor.client()
        unwanted, wanted = client.call("double", 1, 10_000), client.call("double", 2, 30)
        for _ in range(after):
            await asyncio.sleep(0)
        unwanted.cancel()
        answer = await asyncio.wait_for(wanted, PATIENCE_S)
        assert await asyncio.wait_for(client.call("double", 5, 0), PATIENCE_S) == 10
        return answer, actor

    answer, actor = asyncio.run(scenario())
    assert answer == 4
    assert actor.begun[1] == actor.cancelled[1], "a started call was cancelled"


def test_the_calls_of_clients_that_died_are_cancelled() -> None:
    async def scenario() -> Counter[int]:
        actor = Actor()
        calls = [actor.client().call("double", value, 1000) for value in range(3)]
        while len(actor.begun) < len(calls):
            await asyncio.sleep(0)
        await actor.server.cancel_all()
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        return actor.cancelled

    assert asyncio.run(scenario()) == {0: 1, 1: 1, 2: 1}


def test_the_calls_of_a_client_whose_socket_is_lost_are_cancelled_and_those_of_others_are_not() -> None:
    async def scenario() -> tuple[Actor, int]:
        actor = Actor()
        for client_id, calls in (("started", 1), ("no turn of the loop yet", 0)):
            connection = actor.server.connection()
            connection._received((client_id, [Call(1, "double", (7, 1000))], []))
            for _ in range(5 * calls):
                await asyncio.sleep(0)
            connection.connection_lost(None)
        other = actor.client()
        answer = await asyncio.wait_for(other.call("double", 4, 50), PATIENCE_S)
        return actor, answer

    actor, answer = asyncio.run(scenario())
    assert answer == 8
    assert actor.begun == Counter({7: 1, 4: 1}) and actor.cancelled == Counter({7: 1})
    assert not actor.server._senders and len(actor.server._answers) == 1


def test_a_client_that_has_connected_again_gets_its_answers_on_the_new_socket() -> None:
    async def scenario() -> tuple[list[Any], list[Any], Actor]:
        actor, sent = Actor(), ([], [])
        old, new = actor.server.connection(), actor.server.connection()
        old.send, new.send = sent[0].extend, sent[1].extend  # type: ignore[assignment]
        old._received(("client", [Call(1, "double", (1, 1000))], []))
        await asyncio.sleep(0)
        new._received(("client", [Call(2, "double", (2, 5))], []))
        old.connection_lost(None)
        for _ in range(20):
            await asyncio.sleep(0)
        return *sent, actor

    old, new, actor = asyncio.run(scenario())
    assert old == [] and new == [Answer(2, 4)]
    assert actor.cancelled == Counter({1: 1})


def test_a_cancellation_does_not_overtake_its_call() -> None:
    async def scenario() -> Actor:
        actor = Actor()
        client = actor.client()
        many = [client.call("double", value, 200) for value in range(3)]
        await asyncio.sleep(0)
        for call in many:
            call.cancel()
        assert await asyncio.wait_for(client.call("double", 5, 0), PATIENCE_S) == 10
        return actor

    actor = asyncio.run(scenario())
    assert actor.begun == actor.cancelled + Counter([5])


@pytest.mark.parametrize("broken", ["submit", "collect"])
def test_a_broken_transport_fails_waiting_and_later_calls(broken: str) -> None:
    async def scenario() -> list[Any]:
        actor = Actor()

        async def submit(client_id: str, calls: list[Call], cancelled: list[int]) -> None:
            if broken == "submit":
                raise ConnectionError("submit")
            await actor.submit(client_id, calls, cancelled)

        async def collect(client_id: str) -> list[Answer]:
            if broken == "collect":
                raise ConnectionError("collect")
            return await actor.server.collect(client_id)

        client = RpcClient(submit, collect)
        first = await asyncio.gather(*(client.call("double", 1, 0) for _ in range(2)), return_exceptions=True)
        return first + await asyncio.gather(client.call("double", 1, 0), return_exceptions=True)

    assert [repr(error) for error in asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))] == [
        repr(ConnectionError(broken))
    ] * 3
