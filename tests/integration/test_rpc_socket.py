"""Calls to Ray actors through their sockets: answers, errors, and what happens when the actor or its socket ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from roll.configs.pipeline import BaseConfig
from roll.distributed import rpc_socket
from roll.distributed.resources import start_ray, stop_ray
from roll.distributed.rpc_batching import CallError, RpcActor, RpcClient, RpcServer, rpc_client
from roll.distributed.rpc_socket import MessageError

pytestmark = pytest.mark.integration

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not see this folder


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    start_ray(BaseConfig(output_dir=str(tmp_path_factory.mktemp("run"))), "cpu", num_devices=1)
    yield
    stop_ray()


class Actor(RpcActor):
    """Serves the methods below by name."""

    def __init__(self) -> None:
        self._server = RpcServer(lambda method, *args: getattr(self, method)(*args))
        self._connections: list[Any] = []

    def _connected(self) -> Any:
        self._connections.append(super()._connected())
        return self._connections[-1]

    async def double(self, value: Any) -> Any:
        return 2 * value

    async def lock(self) -> Any:
        return threading.Lock()

    async def messages_by_socket(self) -> bool:
        return any(connection.is_open for connection in self._connections)

    async def process_id(self) -> int:
        return os.getpid()

    async def close_sockets(self) -> None:
        for connection in self._connections:
            connection._transport.abort()
        await asyncio.sleep(60)


class ElsewhereActor(Actor):
    """Says that it is on another node."""

    async def listen(self) -> tuple[str, str]:
        return "another node", (await super().listen())[1]


class Unreadable:
    """Can be pickled, and raises when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def run(scenario: Any, actor_class: type[Actor] = Actor) -> Any:
    """What the scenario returns for a client of a new actor."""

    async def with_client() -> Any:
        actor: Any = ray.remote(actor_class)
        client = rpc_client(actor.options(num_cpus=0).remote())
        return await asyncio.wait_for(scenario(client), 60)

    return asyncio.run(with_client())


def test_concurrent_calls_from_several_clients_are_answered_over_sockets(on_ray: None) -> None:
    async def scenario(client: RpcClient) -> Any:
        clients = [client, *(RpcClient(other.submit, other.collect) for other in others(client, 3))]
        answers = await asyncio.gather(*(each.call("double", value) for each in clients for value in range(100)))
        large = await client.call("double", b"z" * 5_000_000)
        return answers, len(large), await client.call("messages_by_socket")

    answers, large, by_socket = run(scenario)
    assert answers == [2 * value for value in range(100)] * 4
    assert large == 10_000_000 and by_socket


def others(client: RpcClient, count: int) -> list[rpc_socket.ActorTransport]:
    """Transports of further clients of the same actor."""
    transport = client._submit.__self__  # type: ignore[attr-defined]
    return [rpc_socket.ActorTransport(transport._actor) for _ in range(count)]


def test_the_messages_to_an_actor_on_another_node_are_ray_calls(on_ray: None) -> None:
    async def scenario(client: RpcClient) -> Any:
        return await client.call("double", 4), await client.call("messages_by_socket")

    assert run(scenario, ElsewhereActor) == (8, False)


def test_an_answer_that_cannot_be_pickled_fails_its_call_only(on_ray: None) -> None:
    async def scenario(client: RpcClient) -> Any:
        return await asyncio.gather(client.call("lock"), client.call("double", 1), return_exceptions=True)

    error, answer = run(scenario)
    assert isinstance(error, CallError) and "cannot pickle '_thread.lock' object" in str(error)
    assert answer == 2


def test_an_argument_that_cannot_be_read_is_an_error_and_later_calls_are_answered(on_ray: None) -> None:
    async def scenario(client: RpcClient) -> Any:
        with pytest.raises(MessageError, match="invalid literal for int"):
            await client.call("double", Unreadable())
        return await client.call("double", 3)

    assert run(scenario) == 6


def test_the_death_of_the_actor_fails_waiting_and_later_calls_as_ray_reports_it(on_ray: None) -> None:
    async def scenario(client: RpcClient) -> None:
        process = await client.call("process_id")
        os.kill(process, signal.SIGSTOP)
        waiting = client.call("double", 1)
        await asyncio.sleep(0.2)
        os.kill(process, signal.SIGKILL)
        for call in [waiting, client.call("double", 2), client.call("double", 3)]:
            with pytest.raises(ray.exceptions.RayActorError):
                await call

    run(scenario)


def test_a_socket_that_closes_while_the_actor_lives_fails_its_calls_and_the_next_one_connects_again(
    on_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_socket, "LOSS_GRACE_S", 0.1)

    async def scenario(client: RpcClient) -> Any:
        with pytest.raises(ConnectionError, match="the socket of an actor that lives was closed"):
            await client.call("close_sockets")
        return await client.call("double", 5), await client.call("messages_by_socket")

    assert run(scenario) == (10, True)
