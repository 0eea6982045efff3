"""Requests that reach an engine during and after a weight update."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from roll.distributed.infer_worker import InferWorker
from roll.distributed.strategy.sglang_engine import EngineError
from roll.distributed.weight_sync.receiver import StaleWeightsError
from roll.distributed.worker import WorkerRank


class Echo:
    """Answers every request at once."""

    async def generate(self, requests: list[Any]) -> list[Any]:
        return requests


class EngineWithoutProcesses(InferWorker):
    """An engine whose start and update session cannot fail."""

    async def initialize(self) -> None: ...

    async def _open_session(self) -> None: ...


REQUESTS: Any = ["request"]


def worker() -> InferWorker:
    unused: Any = None
    made = EngineWithoutProcesses(WorkerRank.single("actor_infer"), unused, unused)
    echo: Any = Echo()
    made._generation = echo
    return made


def test_requests_that_arrive_during_an_update_wait_for_its_end() -> None:
    async def run() -> None:
        engine, requests = worker(), REQUESTS
        await engine.begin_update(3)
        answer = asyncio.create_task(engine.generate(requests))
        await asyncio.sleep(0.01)
        assert not answer.done()
        await engine.commit_update()
        assert await answer == requests

    asyncio.run(run())


def test_requests_are_refused_after_an_aborted_update() -> None:
    async def run() -> None:
        engine, requests = worker(), REQUESTS
        await engine.begin_update(3)
        answer = asyncio.create_task(engine.generate(requests))
        await engine.abort_update()
        with pytest.raises(StaleWeightsError, match="actor_infer-0 is not serving: weight update v3 incomplete"):
            await answer
        await engine.begin_update(4)
        await engine.commit_update()
        assert await engine.generate(requests) == requests

    asyncio.run(run())


def test_the_end_of_an_update_that_began_before_a_restart_does_not_make_the_engine_serve() -> None:
    async def run() -> None:
        engine, requests = worker(), REQUESTS
        await engine.begin_update(3)
        answer = asyncio.create_task(engine.generate(requests))
        await asyncio.sleep(0.01)
        await engine.start_again(needs_weights=True)
        with pytest.raises(StaleWeightsError, match="actor_infer-0 is not serving: it was restarted"):
            await answer
        with pytest.raises(EngineError, match="actor_infer-0: it was restarted within the weight update"):
            await engine.commit_update()
        with pytest.raises(StaleWeightsError, match="it was restarted"):
            await engine.generate(requests)
        await engine.begin_update(4)
        await engine.commit_update()
        assert await engine.generate(requests) == requests

    asyncio.run(run())


def test_a_restarted_engine_without_weight_updates_serves_at_once() -> None:
    async def run() -> None:
        engine = worker()
        await engine.start_again(needs_weights=False)
        assert await engine.generate(REQUESTS) == REQUESTS

    asyncio.run(run())
