"""What an engine does with requests that arrive around a publish."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from roll.distributed.infer_worker import DirtyEngineError, InferWorker


class Echo:
    """An engine in which nothing can go wrong."""

    async def begin_update(self) -> None: ...

    async def generate(self, requests: list[Any]) -> list[Any]:
        return requests


class Rank:
    name = "actor_infer-0"


def worker() -> Any:
    made: Any = InferWorker(Rank(), None, None)  # type: ignore[arg-type]
    made._strategy = Echo()
    return made


def test_requests_that_arrive_during_a_publish_wait_for_its_end() -> None:
    async def run() -> None:
        engine = worker()
        await engine.begin_update(3)
        asked = asyncio.create_task(engine.generate(["request"]))
        await asyncio.sleep(0.01)
        assert not asked.done()
        await engine.accept_update()
        assert await asked == ["request"]

    asyncio.run(run())


def test_requests_are_refused_once_a_publish_was_given_up() -> None:
    async def run() -> None:
        engine = worker()
        await engine.begin_update(3)
        asked = asyncio.create_task(engine.generate(["request"]))
        await engine.give_up_update()
        with pytest.raises(DirtyEngineError, match="serves nothing: the publish of version 3 did not complete"):
            await asked
        await engine.begin_update(4)
        await engine.accept_update()
        assert await engine.generate(["request"]) == ["request"]

    asyncio.run(run())
