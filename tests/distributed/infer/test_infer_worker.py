"""Requests that reach an engine during and after a weight update."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from roll.base.events import EVENTS_FILE
from roll.configs.pipeline import RLVRConfig
from roll.configs.roles import ActorInferConfig
from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.infer.sglang_engine import Engine, EngineError, EngineNotRunningError
from roll.distributed.infer.sglang_generation import Generation
from roll.distributed.infer.weight_receiver import StaleWeightsError
from roll.distributed.worker import WorkerRank
from roll.rollout.types import GenerateRequest, SamplingParams


class Echo:
    """Answers every request at once."""

    async def generate(self, requests: list[Any]) -> list[Any]:
        return requests


class EngineWithoutProcesses(InferWorker):
    """An engine whose start and update session cannot fail."""

    async def initialize(self) -> None:
        self._engine = self._engine or Engine(self.rank.name, {}, {}, "actor_infer-0.log")
        self._engine._death = asyncio.get_running_loop().create_future()
        echo: Any = Echo()
        self._generation = echo
        self.receiver._open_session = opened  # type: ignore[method-assign]


async def opened() -> None: ...


REQUESTS = [GenerateRequest("request", [1], SamplingParams(max_new_tokens=1))]


async def worker() -> InferWorker:
    unused: Any = None
    made = EngineWithoutProcesses(WorkerRank("actor_infer"), unused, unused)
    await made.initialize()
    return made


async def turns() -> None:
    """Lets every task go on until it waits."""
    for _ in range(100):
        await asyncio.sleep(0)


def test_requests_that_arrive_during_an_update_wait_for_its_end() -> None:
    async def run() -> None:
        engine, requests = await worker(), REQUESTS
        await engine.begin_update(3)
        answer = asyncio.create_task(engine.generate(requests))
        await turns()
        assert not answer.done()
        await engine.commit_update()
        assert await answer == requests

    asyncio.run(run())


def test_requests_are_refused_after_an_aborted_update() -> None:
    async def run() -> None:
        engine, requests = await worker(), REQUESTS
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
        engine, requests = await worker(), REQUESTS
        await engine.begin_update(3)
        answer = asyncio.create_task(engine.generate(requests))
        await turns()
        await engine.start_again(needs_weights=True)
        with pytest.raises((EngineNotRunningError, StaleWeightsError)):
            await answer
        with pytest.raises(EngineError, match="actor_infer-0: it was restarted within the weight update"):
            await engine.commit_update()
        with pytest.raises(StaleWeightsError, match="it was restarted"):
            await engine.generate(requests)
        await engine.begin_update(4)
        await engine.commit_update()
        assert await engine.generate(requests) == requests

    asyncio.run(run())


def test_a_cancelled_call_cancels_its_requests() -> None:
    class Endless:
        async def generate(self, requests: list[Any]) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(requests)

    ended: list[list[Any]] = []

    async def run() -> None:
        engine, endless = await worker(), cast(Any, Endless())
        engine._generation = endless
        answer = asyncio.create_task(engine.generate(REQUESTS))
        await turns()
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        await asyncio.sleep(0)
        assert ended == [REQUESTS]

    asyncio.run(run())


def test_an_engine_orders_requests_by_the_ratio_and_limit_of_the_configuration() -> None:
    class Started(InferWorker):
        async def _start(self, *_: Any) -> None: ...

        async def probe(self, engine: Engine) -> None: ...

        async def flush_cache(self) -> None: ...

    async def run() -> None:
        role = ActorInferConfig(max_newer_requests=3)
        made = Started(WorkerRank("actor_infer"), role, RLVRConfig(async_generation_ratio=1.5))
        await made._start_and_probe(Engine("actor_infer-0", {}, {}, "actor_infer-0.log"), 0)
        assert (made.generation._ahead, made.generation._order._newer) == (2, 3)

    asyncio.run(run())


@pytest.mark.parametrize("cause", ["death", "restart"])
def test_requests_that_wait_in_a_paused_engine_fail_with_it(cause: str) -> None:
    """Whether they are queued, between two parts of a response, or before their first."""

    async def run() -> None:
        engine = await worker()
        engine._generation = Generation(engine.engine, 60, False, running=1, newer=None, ahead=0, version=lambda: 0)
        engine._generation._not_paused.clear()
        answers = [asyncio.create_task(engine.generate(REQUESTS * 3)) for _ in range(2)]
        await turns()
        if cause == "death":
            engine.engine.died("process 7 of the engine died")
        else:
            await engine.start_again(needs_weights=True)
        for answer in answers:
            with pytest.raises(EngineNotRunningError):
                await answer

    asyncio.run(run())


@pytest.mark.parametrize("cause", ["stop", "death"])
def test_only_an_engine_that_was_not_stopped_on_purpose_fails_its_health_check(cause: str) -> None:
    async def run() -> None:
        engine = await worker()
        check = asyncio.create_task(engine.check_health(None, 60))
        await turns()
        if cause == "death":
            engine.engine.died("process 7 of the engine died")
            with pytest.raises(EngineNotRunningError, match="process 7"):
                await check
        else:
            engine.close()
            await check

    asyncio.run(run())


def test_a_restarted_engine_without_weight_updates_serves_once_it_has_started() -> None:
    class Starting(EngineWithoutProcesses):
        async def initialize(self) -> None:
            await super().initialize()
            served.append(await self.is_serving())

    served: list[bool] = []

    async def run() -> None:
        unused: Any = None
        engine = Starting(WorkerRank("judge"), unused, unused)
        await engine.initialize()
        await engine.start_again(needs_weights=False)
        assert await engine.generate(REQUESTS) == REQUESTS
        assert served == [True, False] and await engine.is_serving()

    asyncio.run(run())


KILLED = "killed by SIGKILL"


@pytest.mark.parametrize(
    ("ends", "starts", "error"),
    [([KILLED], 2, None), ([KILLED, KILLED], 2, "start 2"), ([KILLED, ""], 2, "start 2"), ([""], 1, "start 1")],
)
def test_an_engine_is_started_once_more_where_a_signal_ended_its_processes(
    ends: list[str], starts: int, error: str | None, tmp_path: Path
) -> None:
    """Both starts have one deadline; every other failure is an error at once."""

    class Started(Engine):
        @property
        def manager(self) -> Any:
            return SimpleNamespace(freeze_gc=lambda: asyncio.sleep(0))

    class Failing(InferWorker):
        async def _start_and_probe(self, engine: Engine, until: float) -> None:
            deadlines.append(until)
            if len(deadlines) <= len(ends):
                engine.killed = ends[len(deadlines) - 1]
                raise EngineError(f"actor_infer-0: start {len(deadlines)}")

    deadlines: list[float] = []

    async def run() -> None:
        made = Failing(WorkerRank("actor_infer"), ActorInferConfig(), RLVRConfig(output_dir=str(tmp_path)))
        made._engine = Started("actor_infer-0", {}, {}, "actor_infer-0.log")
        if error is None:
            await made.initialize()
        else:
            with pytest.raises(EngineError, match=error):
                await made.initialize()

    asyncio.run(run())
    assert len(deadlines) == starts and len({*deadlines}) == 1
    file = tmp_path / EVENTS_FILE
    events = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    expected = [("actor_infer-0", "start failed", "is started once more: start 1")][: starts - 1]
    assert [(each["component"], each["event"], each["message"]) for each in events] == expected
