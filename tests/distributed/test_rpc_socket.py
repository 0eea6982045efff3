"""Messages over a Unix socket arrive in order, whatever their size; other users and unreadable messages are refused."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.distributed.calls.rpc_socket import Connection, MessageError
from tests.processes import PATIENCE_S

SIZES = st.one_of(st.integers(0, 100), st.integers(60_000, 70_000), st.just(500_000))


class End:
    """One end of a connection, and what came out of it."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.unread: list[MessageError] = []
        self.lost = asyncio.Event()
        self.connection = Connection(self.received.append, self.unread.append, self.lost.set)

    async def has(self, count: int) -> None:
        while len(self.received) + len(self.unread) < count:
            await asyncio.sleep(0.001)


class Unreadable:
    """Can be pickled, and raises when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


async def connected() -> tuple[End, End]:
    """Two ends over an address of their own."""
    loop, server_end, client_end = asyncio.get_running_loop(), End(), End()
    address = f"\0roll-test-{os.getpid()}-{id(server_end)}"
    server = await loop.create_unix_server(lambda: server_end.connection, address)
    await loop.create_unix_connection(lambda: client_end.connection, address)
    while not server_end.connection.is_open and not server_end.lost.is_set():
        await asyncio.sleep(0)
    server.close()
    return server_end, client_end


@settings(max_examples=15, deadline=None)
@given(st.lists(SIZES, max_size=6), st.lists(SIZES, max_size=6))
def test_messages_arrive_whole_and_in_order_in_both_directions(there: list[int], back: list[int]) -> None:
    async def scenario() -> tuple[list[Any], list[Any]]:
        server, client = await connected()
        for size in there:
            client.connection.send((size, b"x" * size))
        for size in back:
            server.connection.send((size, b"y" * size))
        await asyncio.gather(server.has(len(there)), client.has(len(back)))
        return server.received, client.received

    at_server, at_client = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert at_server == [(size, b"x" * size) for size in there]
    assert at_client == [(size, b"y" * size) for size in back]


def test_a_message_that_cannot_be_read_is_an_error_and_later_ones_arrive() -> None:
    async def scenario() -> End:
        server, client = await connected()
        client.connection.send(Unreadable())
        client.connection.send("next")
        await server.has(2)
        return server

    server = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert server.received == ["next"]
    [error] = server.unread
    assert "invalid literal for int() with base 10: 'no number'" in str(error)


def test_the_process_of_another_user_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> tuple[End, End]:
        another = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: another)
        server, client = await connected()
        client.connection.send("hello")
        await asyncio.gather(server.lost.wait(), client.lost.wait())
        return server, client

    server, client = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert server.received == [] and not server.connection.is_open and not client.connection.is_open
