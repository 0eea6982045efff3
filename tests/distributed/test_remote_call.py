"""Calls whose caller does not wait for the answer, and errors of Ray."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import Future
from typing import Any

import pytest
import ray

from roll.distributed import remote_call
from roll.distributed.remote_call import RemoteCall
from roll.distributed.remote_errors import PROCESS_DIED, CallContext, ray_failure


def test_the_error_of_a_cancelled_call_is_not_logged_by_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Future[Any]] = [Future()]  # nothing else keeps it, so that it can be collected
    monkeypatch.setattr(remote_call, "_future", lambda _: answers[0])

    async def run() -> list[dict[str, Any]]:
        logged: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        reference: Any = object()
        call: RemoteCall[Any] = RemoteCall(CallContext("engine", "ask", {0: "here"}), [reference], list, 60.0)
        asking = asyncio.ensure_future(_answer(call))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        answers.pop().set_exception(RuntimeError("the actor was killed"))
        for _ in range(5):
            await asyncio.sleep(0)
        del asking, call
        gc.collect()
        return logged

    assert asyncio.run(run()) == []


async def _answer(call: RemoteCall[Any]) -> Any:
    return await call


def test_the_death_of_a_process_is_told_without_the_causes_that_ray_guesses() -> None:
    known = "The worker died unexpectedly before finishing this task.\nWorker exit type: SYSTEM_ERROR."
    for guesses in ("There are some potential root causes. (1) ...", "Some common causes include: (1) ..."):
        failure = ray_failure(2, ray.exceptions.RayActorError(error_msg=f"{known} {guesses}"))
        assert (failure.rank, failure.kind, failure.traceback) == (2, PROCESS_DIED, known)
        assert failure.message == "The worker died unexpectedly before finishing this task."


def test_an_error_of_ray_without_a_text_is_told_by_its_class() -> None:
    failure = ray_failure(0, RuntimeError())
    assert (failure.kind, failure.message, failure.traceback) == ("RuntimeError",) * 3
