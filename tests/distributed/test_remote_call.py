"""Calls of ranks, through Ray or batched: answers, and errors that name the rank, where it runs, and the cause."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import pickle
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.distributed.calls.remote_call import ALL, ClusterClient, RemoteCall
from roll.distributed.calls.remote_errors import PROCESS_DIED, CallContext, ClusterError, Failure, ray_failure
from roll.distributed.calls.rpc_batching import RpcActor
from roll.distributed.worker import Worker

BOTH = pytest.mark.parametrize("batched", [False, True], ids=["ray", "batched"])


class Engine(RpcActor):
    """A rank in this process that answers, fails as rank 1, or never answers."""

    def __init__(self) -> None:
        super().__init__(self.call)
        self.cancelled = 0

    async def call(self, method: str, keep: bool, value: int) -> Any:
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

    async def listen(self) -> tuple[str, str]:
        return "this node", ""  # no socket: messages are calls of the methods above


class Dead(Engine):
    """A rank whose process is gone."""

    async def call(self, method: str, keep: bool, value: int) -> Any:
        raise ray.exceptions.RayActorError(error_msg="gone")

    async def submit(self, *_: Any) -> None:
        raise ray.exceptions.RayActorError(error_msg="gone")

    async def collect(self, client_id: str) -> Any:
        raise ray.exceptions.RayActorError(error_msg="gone")


class Actor:
    """The Ray actor of a rank: every method has `remote`, whose reference has a future."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._reference(method, *args))

    def _reference(self, method: str, *args: Any) -> Any:
        task, answer = (
            asyncio.ensure_future(getattr(self._engine, method)(*args)),
            concurrent.futures.Future[Any](),
        )

        def copy_result(done: asyncio.Future[Any]) -> None:
            if done.cancelled():
                return
            error = done.exception()
            if error is None:
                answer.set_result(done.result())
            else:
                answer.set_exception(error)

        task.add_done_callback(copy_result)
        return SimpleNamespace(future=lambda: answer)


class Methods(Worker):
    """The methods that are called; `Engine.call` answers them."""

    async def double(self, value: int) -> int:
        raise NotImplementedError

    async def fail(self, value: int) -> int:
        raise NotImplementedError

    async def hang(self, value: int) -> int:
        raise NotImplementedError


def client(batched: bool, *engines: Any, timeout_s: float = 60.0) -> ClusterClient[Methods]:
    places = tuple(f"node 0, devices {rank}, log engine-{rank}.log" for rank in range(len(engines)))
    deadlines = dict.fromkeys(("double", "fail", "hang"), timeout_s)
    layout = ParallelLayout(data=len(engines))
    return ClusterClient("actor_infer", tuple(map(Actor, engines)), layout, "cpu", places, deadlines, batched)


@BOTH
def test_a_call_is_answered_by_the_ranks_that_it_names(batched: bool) -> None:
    async def scenario() -> list[list[int]]:
        both = client(batched, Engine(), Engine())
        calls = [both.call([rank], Methods.double, 10 + rank) for rank in (0, 1, 0)]
        return [*[await call for call in calls], await both.call(ALL, Methods.double, 1)]

    assert asyncio.run(scenario()) == [[20], [22], [20], [2, 2]]


@BOTH
def test_a_failure_names_the_rank_and_its_log_and_the_next_call_is_answered(batched: bool) -> None:
    async def scenario() -> None:
        both = client(batched, Engine(), Engine())
        with pytest.raises(ClusterError, match=r"actor_infer.fail failed on rank 1 .*engine-1.log") as caught:
            await both.call([1], Methods.fail, 3)
        assert caught.value.kind == "ValueError" and "3 is odd" in str(caught.value)
        assert await both.call([1], Methods.double, 3) == [6]

    asyncio.run(scenario())


def test_an_exception_outside_the_worker_is_a_cluster_error_with_its_last_line() -> None:
    async def scenario() -> None:
        with pytest.raises(ClusterError, match=r"actor_infer.fail failed on rank 0") as caught:
            await client(True, Engine()).call([0], Methods.fail, 0)
        assert caught.value.cause == "ValueError: no failure" and caught.value.kind == "RpcError"

    asyncio.run(scenario())


@BOTH
def test_a_call_past_its_deadline_names_the_rank_and_a_batched_one_is_cancelled_in_the_actor(batched: bool) -> None:
    async def scenario() -> None:
        engine = Engine()
        late = client(batched, engine, timeout_s=0.3)
        with pytest.raises(ClusterError, match=r"actor_infer.hang: no answer within 0.3 s from rank 0") as caught:
            await late.call([0], Methods.hang, 1)
        assert caught.value.kind == "Timeout"
        assert await client(batched, engine).call([0], Methods.double, 1) == [2]
        assert engine.cancelled == batched

    asyncio.run(scenario())


@BOTH
def test_a_dead_process_is_reported_by_every_call(batched: bool) -> None:
    async def scenario() -> None:
        dead = client(batched, Dead())
        for _ in range(2):
            with pytest.raises(ClusterError) as caught:
                await dead.call([0], Methods.double, 1)
            assert caught.value.kind == PROCESS_DIED

    asyncio.run(scenario())


def test_a_dead_rank_is_the_cause_where_another_rank_failed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    failed, died = concurrent.futures.Future[Any](), concurrent.futures.Future[Any]()
    failed.set_result(Failure(0, time.time(), "RuntimeError", "peer closed", "peer closed"))

    async def scenario() -> None:
        call = RemoteCall(CallContext("actor_train", "train_step", {0: "here", 1: "there"}), [failed, died], list, 60.0)
        asyncio.get_running_loop().call_later(0.01, died.set_exception, ray.exceptions.RayActorError(error_msg="gone"))
        with pytest.raises(ClusterError) as caught:
            await call
        assert (caught.value.rank, caught.value.kind) == (1, PROCESS_DIED)

    asyncio.run(scenario())


def test_a_client_can_be_pickled_after_a_call() -> None:
    used: ClusterClient[Methods] = ClusterClient(
        "actor_infer", ("an actor",), ParallelLayout(), "cpu", ("node 0",), {"double": 1.0}, batched=True
    )
    used._clients[0] = object()  # type: ignore[assignment]
    again = pickle.loads(pickle.dumps(used))
    assert vars(again) == vars(used) | {"_clients": {}}


def test_the_error_of_a_cancelled_call_is_not_logged_by_asyncio() -> None:
    async def run() -> list[dict[str, Any]]:
        logged: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        call: RemoteCall[Any] = RemoteCall(CallContext("engine", "ask", {0: "here"}), [answer], list, 60.0)
        asking = asyncio.ensure_future(_answer(call))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        answer.set_exception(RuntimeError("the actor was killed"))
        for _ in range(5):
            await asyncio.sleep(0)
        del asking, call, answer
        gc.collect()
        return logged

    gc.collect()  # clients that other tests have left open would otherwise be closed, and fail, in this loop
    assert asyncio.run(run()) == []


async def _answer(call: RemoteCall[Any]) -> Any:
    return await call


def test_the_death_of_a_process_is_reported_without_the_causes_that_ray_guesses() -> None:
    known = "The worker died unexpectedly before finishing this task.\nWorker exit type: SYSTEM_ERROR."
    for guesses in ("There are some potential root causes. (1) ...", "Some common causes include: (1) ..."):
        failure = ray_failure(2, ray.exceptions.RayActorError(error_msg=f"{known} {guesses}"))
        assert (failure.rank, failure.kind, failure.traceback) == (2, PROCESS_DIED, known)
        assert failure.message == "The worker died unexpectedly before finishing this task."


def test_an_error_of_ray_without_a_text_is_reported_by_its_class() -> None:
    failure = ray_failure(0, RuntimeError())
    assert (failure.kind, failure.message, failure.traceback) == ("RuntimeError",) * 3
