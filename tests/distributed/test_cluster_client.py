"""Calls of single ranks: answers, and errors that name the rank, where it runs, and the cause."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
import time
from typing import Any

import pytest
import ray

from roll.distributed.remote_errors import ClusterError, Failure
from roll.distributed.rpc_batching import ClusterClient, RpcActor, RpcServer
from roll.distributed.worker import Worker


class Engine(RpcActor):
    """A rank in this process that answers, fails as rank 1, or never answers."""

    def __init__(self) -> None:
        self.cancelled = 0
        self._server = RpcServer(self.run)

    async def run(self, method: str, value: int) -> Any:
        if method == "fail" and value == 0:
            raise ValueError("no failure")
        if method == "fail":
            return Failure(1, time.time(), "ValueError", f"{value} is odd", f"Traceback ... ValueError: {value} is odd")
        try:
            await asyncio.sleep(0 if method == "double" else 1000)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return 2 * value


class Method:
    """A remote method of a Ray actor in this process."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def remote(self, *args: Any) -> Any:
        task, answer = asyncio.ensure_future(self.call(*args)), concurrent.futures.Future[Any]()

        def copy_result(done: asyncio.Future[Any]) -> None:
            if done.cancelled():
                return
            error = done.exception()
            if error is None:
                answer.set_result(done.result())
            else:
                answer.set_exception(error)

        task.add_done_callback(copy_result)
        return type("Ref", (), {"future": lambda self: answer})()


class Actor:
    def __init__(self, engine: Any) -> None:
        self.submit, self.collect, self.listen = Method(engine.submit), Method(engine.collect), Method(self._listen)

    async def _listen(self) -> tuple[str, str]:
        return "this node", ""  # no socket: messages are calls of the methods above


class Methods(Worker):
    """The methods that are called; `Engine.run` answers them."""

    async def double(self, value: int) -> int:
        raise NotImplementedError

    async def fail(self, value: int) -> int:
        raise NotImplementedError

    async def hang(self, value: int) -> int:
        raise NotImplementedError


def client(*engines: Any, timeout_s: float = 60.0) -> ClusterClient[Methods]:
    places = tuple(f"node 0, devices {rank}, log engine-{rank}.log" for rank in range(len(engines)))
    deadlines = dict.fromkeys(("double", "fail", "hang"), timeout_s)
    return ClusterClient("actor_infer", tuple(map(Actor, engines)), places, deadlines)


def test_a_call_is_answered_by_its_rank() -> None:
    async def scenario() -> list[int]:
        both = client(Engine(), Engine())
        return list(await asyncio.gather(*(both.call(rank, Methods.double, 10 + rank) for rank in (0, 1, 0))))

    assert asyncio.run(scenario()) == [20, 22, 20]


def test_a_failure_names_the_rank_and_its_log_and_the_next_call_is_answered() -> None:
    async def scenario() -> None:
        both = client(Engine(), Engine())
        with pytest.raises(ClusterError, match=r"actor_infer.fail failed on rank 1 .*engine-1.log") as caught:
            await both.call(1, Methods.fail, 3)
        assert caught.value.kind == "ValueError" and "3 is odd" in str(caught.value)
        assert await both.call(1, Methods.double, 3) == 6

    asyncio.run(scenario())


def test_an_exception_beside_the_method_is_a_cluster_error_with_its_last_line() -> None:
    async def scenario() -> None:
        with pytest.raises(ClusterError, match=r"actor_infer.fail failed on rank 0") as caught:
            await client(Engine()).call(0, Methods.fail, 0)
        assert caught.value.cause == "ValueError: no failure" and caught.value.kind == "CallError"

    asyncio.run(scenario())


def test_a_call_past_its_deadline_is_cancelled_in_the_actor() -> None:
    async def scenario() -> None:
        engine = Engine()
        late = client(engine, timeout_s=0.05)
        with pytest.raises(ClusterError, match=r"actor_infer.hang: no answer within 0.05 s from rank 0") as caught:
            await late.call(0, Methods.hang, 1)
        assert caught.value.kind == "Timeout"
        assert await client(engine).call(0, Methods.double, 1) == 2
        assert engine.cancelled == 1

    asyncio.run(scenario())


def test_a_dead_process_is_reported() -> None:
    class Dead(Engine):
        async def collect(self, client_id: str) -> Any:
            raise ray.exceptions.RayActorError

    async def scenario() -> None:
        dead = client(Dead())
        for _ in range(2):
            with pytest.raises(ClusterError) as caught:
                await dead.call(0, Methods.double, 1)
            assert caught.value.kind == "ProcessDied"

    asyncio.run(scenario())


def test_a_client_can_be_pickled_after_a_call() -> None:
    used = ClusterClient("actor_infer", ("an actor",), ("node 0",), {"double": 1.0})
    used._clients[0] = object()
    again = pickle.loads(pickle.dumps(used))
    assert again == used and again._clients == {}
