"""Calls to Ray actors through their sockets: answers, errors, and what happens when the actor or its socket ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from typing import Any

import pytest
import ray

from roll.distributed.calls import rpc_socket
from roll.distributed.calls.rpc_batching import RpcActor, RpcClient, RpcError, rpc_client
from roll.distributed.calls.rpc_socket import MessageError

pytestmark = pytest.mark.integration

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not see this folder


class Actor(RpcActor):
    """Serves the methods below by name, and keeps its ends of connections."""

    def __init__(self) -> None:
        super().__init__(lambda method, *args: getattr(self, method)(*args))
        self.ends: list[Any] = []

    def connection(self) -> Any:
        self.ends.append(super().connection())
        return self.ends[-1]

    async def double(self, value: Any) -> Any:
        return 2 * value

    async def lock(self) -> Any:
        return threading.Lock()

    async def sockets(self) -> int:
        return sum(connection.is_open for connection in self.ends)

    async def process_id(self) -> int:
        return os.getpid()

    async def close_sockets(self) -> None:
        for connection in self.ends:
            connection.close()
        await self.hang()

    async def hang(self) -> None:
        await asyncio.sleep(3600)


class ElsewhereActor(Actor):
    """Says that it is on another node."""

    async def listen(self) -> tuple[str, str]:
        return "another node", (await super().listen())[1]


class CountingActor(Actor):
    """Tells which calls run."""

    async def tasks(self) -> list[Any]:
        await asyncio.sleep(0.1)  # a cancelled call ends at its next turn
        return list(self._tasks)


class Unreadable:
    """Can be pickled, and raises when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def run(scenario: Any, actor_class: type[Actor] = Actor, restarts: int = 0) -> Any:
    """What the scenario returns for a new actor and a client of it."""

    async def with_client() -> Any:
        actor_cls: Any = ray.remote(actor_class)
        actor = actor_cls.options(num_cpus=0, max_restarts=restarts).remote()
        return await scenario(actor, rpc_client(actor))

    return asyncio.run(with_client())


def test_concurrent_calls_from_several_clients_are_answered_over_sockets(on_ray: None) -> None:
    async def scenario(actor: Any, client: RpcClient) -> Any:
        clients = [client, *(rpc_client(actor) for _ in range(3))]
        answers = await asyncio.gather(*(each.call("double", value) for each in clients for value in range(100)))
        return answers, len(await client.call("double", b"z" * 5_000_000)), await client.call("sockets")

    answers, large, sockets = run(scenario)
    assert answers == [2 * value for value in range(100)] * 4
    assert large == 10_000_000 and sockets == 4


def test_an_actor_whose_event_loop_is_uvloop_calls_another_one_over_a_socket(on_ray: None) -> None:
    class Caller:
        async def call(self, actor: Any) -> tuple[str, int, int]:
            client = rpc_client(actor)
            loop = type(asyncio.get_running_loop()).__module__
            return loop, await client.call("double", 4), await client.call("sockets")

    async def scenario(actor: Any, client: RpcClient) -> Any:
        caller: Any = ray.remote(Caller)
        return await caller.options(num_cpus=0).remote().call.remote(actor)

    assert run(scenario) == ("uvloop", 8, 1)


def test_the_messages_to_an_actor_on_another_node_are_ray_calls(on_ray: None) -> None:
    async def scenario(actor: Any, client: RpcClient) -> Any:
        return await client.call("double", 4), await client.call("sockets")

    assert run(scenario, ElsewhereActor) == (8, 0)


def test_an_answer_that_cannot_be_pickled_fails_its_call_only(on_ray: None) -> None:
    async def scenario(actor: Any, client: RpcClient) -> Any:
        return await asyncio.gather(client.call("lock"), client.call("double", 1), return_exceptions=True)

    error, answer = run(scenario)
    assert isinstance(error, RpcError) and "cannot pickle '_thread.lock' object" in str(error)
    assert answer == 2


def test_an_argument_that_cannot_be_read_is_an_error_and_later_calls_are_answered(on_ray: None) -> None:
    async def scenario(actor: Any, client: RpcClient) -> Any:
        with pytest.raises(MessageError, match="invalid literal for int"):
            await client.call("double", Unreadable())
        return await client.call("double", 3)

    assert run(scenario) == 6


def test_the_death_of_the_actor_fails_waiting_and_later_calls_as_ray_reports_it(on_ray: None) -> None:
    async def scenario(actor: Any, client: RpcClient) -> None:
        process = await client.call("process_id")
        assert await client.call("sockets") == 1
        waiting = client.call("hang")
        await asyncio.sleep(0.2)
        os.kill(process, signal.SIGKILL)
        for _ in range(3):
            with pytest.raises(ray.exceptions.RayActorError) as error:
                await waiting
            assert "its socket was closed" not in str(error.value)
            waiting = client.call("double", 2)
        waiting.cancel()

    run(scenario)


@pytest.mark.parametrize("waits", [True, False])
def test_an_actor_that_ray_starts_again_is_reached_over_its_new_socket(on_ray: None, waits: bool) -> None:
    async def scenario(actor: Any, client: RpcClient) -> Any:
        process = await client.call("process_id")
        waiting = client.call("close_sockets") if waits else None
        await asyncio.sleep(0 if waits else 0.2)
        os.kill(process, signal.SIGKILL)
        if waiting is not None:
            with pytest.raises(ray.exceptions.RayActorError):
                await waiting
        again = process
        while again == process:
            with contextlib.suppress(ray.exceptions.RayActorError):
                again = await actor.process_id.remote()
            await asyncio.sleep(0.1)
        return await client.call("process_id") == again, await client.call("sockets")

    assert run(scenario, restarts=-1) == (True, 1)


def test_a_call_whose_message_is_lost_with_the_socket_is_an_error(
    on_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_socket, "LOSS_GRACE_S", 0.1)

    async def scenario(actor: Any, client: RpcClient) -> Any:
        await client.call("double", 1)
        transport = client._submit.__self__  # type: ignore[attr-defined]
        call = client.call("double", 1)
        transport._linking.result().connection.close()
        with pytest.raises(ray.exceptions.ActorUnavailableError, match="its socket was closed"):
            await call
        return await client.call("double", 2)

    assert run(scenario) == 4


def test_a_socket_that_closes_while_the_actor_lives_fails_its_calls_and_the_next_one_connects_again(
    on_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_socket, "LOSS_GRACE_S", 0.1)

    async def scenario(actor: Any, client: RpcClient) -> Any:
        with pytest.raises(ray.exceptions.ActorUnavailableError, match="its socket was closed"):
            await client.call("close_sockets")
        answers = await asyncio.gather(*(client.call("double", value) for value in range(50)))
        return answers, await client.call("sockets"), len(await actor.tasks.remote())

    assert run(scenario, CountingActor) == ([2 * value for value in range(50)], 1, 0)
