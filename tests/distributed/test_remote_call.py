"""Calls whose caller does not wait for the answer."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import Future
from typing import Any

import pytest

from roll.distributed import remote_call
from roll.distributed.remote_call import RemoteCall
from roll.distributed.remote_errors import CallContext


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
