"""Assignment of environments to workers: in any order of events, no worker leaks and none is killed while in use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.base.events import EVENTS_FILE, EventLog
from roll.distributed.env_pool.types import EnvWorkerError
from roll.distributed.env_pool.workers import EnvWorkerPool
from roll.usercode.stopped import STOPPED_TOO_LONG
from tests.distributed.env_workers import JumpingLoop

EVENTS = ("start", "up", "up", "start_failed", "assign", "assign", "assign", "release", "hung", "died")
SEQUENCES = st.binary(min_size=60, max_size=60).map(lambda codes: [(EVENTS[code % 10], code // 10) for code in codes])
"""60 events, each with a number that picks one of the workers or environments it may concern; bytes are drawn fast."""
CAPACITY = 3


class Worker:
    """Starts, fails to start, or dies as the test requires."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.killed = self.joined = False

    async def ready(self) -> None:
        await self.started

    def call(self, method: str, *args: Any) -> asyncio.Future[Any]:
        assert method == "watch"
        return asyncio.get_running_loop().create_future()

    def exit_reason(self, error: BaseException) -> str | None:
        return str(error)

    def is_stopped(self) -> bool:
        return False

    def kill(self) -> None:
        assert not self.killed, "a worker is killed once"
        self.killed = True

    def join(self) -> None:
        assert self.killed
        self.joined = True


async def run_ready_tasks() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Model:
    """A worker pool, and lists of what its workers and environments must be."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.workers: list[Worker] = []
        self.pool = EnvWorkerPool(size, CAPACITY, 30.0, self.launch)
        self.starting: list[int] = []
        self.running: list[int] = []
        self.retired: list[int] = []
        self.envs: dict[int, int | None] = {}
        self.next_env = 0

    def launch(self) -> Worker:
        self.starting.append(len(self.workers))
        self.workers.append(Worker(len(self.workers)))
        return self.workers[-1]

    def envs_of(self, index: int) -> list[int]:
        return [env for env, worker in self.envs.items() if worker == index]

    async def apply(self, event: str, pick: int) -> None:
        indices = [*self.starting, *self.running, *self.retired]
        assigned = [env for env, worker in self.envs.items() if worker is not None]
        if event == "start":
            await self.start()
        elif event == "up" and self.starting:
            index = self.starting.pop(pick % len(self.starting))
            self.running.append(index)
            self.workers[index].started.set_result(None)
        elif event == "start_failed" and self.starting:
            index = self.starting.pop(pick % len(self.starting))
            self.workers[index].started.set_exception(RuntimeError("no"))
            await run_ready_tasks()
            assert self.workers[index].killed
        elif event == "assign":
            await self.assign()
        elif event in ("release", "hung") and assigned:
            self.remove(event, assigned[pick % len(assigned)])
        elif event == "died" and indices:
            self.die(indices[pick % len(indices)])
        await run_ready_tasks()

    async def start(self) -> None:
        task = asyncio.create_task(self.pool.start())
        await run_ready_tasks()
        assert len(self.starting) + len(self.running) == self.size
        assert task.done() == (not self.starting)
        task.cancel()

    async def assign(self) -> None:
        lengths = {index: len(self.envs_of(index)) for index in self.running}
        room = [index for index in self.running if lengths[index] < CAPACITY]
        assert self.pool.full == (bool(self.running) and not room)
        task = asyncio.create_task(self.pool.assign(self.next_env))
        await run_ready_tasks()
        found = self.pool.worker_of(self.next_env)
        if room:
            assert task.done() and found is not None and found[0] in room
            assert found[1] is self.workers[found[0]]
            assert lengths[found[0]] == min(lengths.values()), "assigned to a worker with the fewest"
            self.envs[self.next_env] = found[0]
            self.next_env += 1
        elif self.starting:
            assert not task.done() and found is None, "waits for a worker to start"
            task.cancel()
        else:
            with pytest.raises(EnvWorkerError, match="use more workers"):
                await task

    def remove(self, event: str, env: int) -> None:
        index = self.envs.pop(env)
        assert index is not None
        if event == "hung" and index in self.running:
            self.running.remove(index)
            self.retired.append(index)
        (self.pool.release if event == "release" else self.pool.retire_worker_of)(env)
        empty = index in self.retired and not self.envs_of(index)
        assert self.workers[index].killed == empty, "a retired worker is killed as soon as it is empty, not before"
        if empty:
            self.retired.remove(index)

    def die(self, index: int) -> None:
        for phase in (self.starting, self.running, self.retired):
            if index in phase:
                phase.remove(index)
        for env in self.envs_of(index):
            self.envs[env] = None
        self.pool.died(index, "killed by the test")
        assert self.workers[index].killed

    def check(self) -> None:
        present = {*self.starting, *self.running, *self.retired}
        assert {worker.index for worker in self.workers if not worker.killed} == present
        assert len(self.starting) + len(self.running) <= self.size
        assert all(self.envs_of(index) for index in self.retired)
        for env, index in self.envs.items():
            found = self.pool.worker_of(env)
            assert (found and found[0]) == index, "moved by the failure of another environment"


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(coroutine)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), SEQUENCES)
def test_any_order_of_events(size: int, events: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        model = Model(size)
        for event, pick in events:
            await model.apply(event, pick)
            model.check()
        model.pool.close()
        assert all(worker.joined for worker in model.workers)

    run(scenario())


def test_a_worker_with_a_hanging_call_is_retired_and_killed_when_its_other_environments_are_released() -> None:
    async def scenario() -> None:
        model = Model(1)
        await model.apply("start", 0)
        await model.apply("up", 0)
        await model.apply("assign", 0)
        await model.apply("assign", 0)
        model.pool.retire_worker_of(0)
        assert [worker.killed for worker in model.workers] == [False, False]
        waiting = asyncio.create_task(model.pool.assign(9))
        await run_ready_tasks()
        assert model.pool.worker_of(9) is None, "the retired worker takes no environment"
        model.workers[1].started.set_result(None)
        await waiting
        assert model.pool.worker_of(9) == (1, model.workers[1])
        model.pool.release(1)
        assert [worker.killed for worker in model.workers] == [True, False]
        model.pool.close()

    run(scenario())


def test_a_worker_that_fails_to_start_is_replaced_only_when_one_is_needed() -> None:
    async def scenario() -> None:
        model = Model(2)
        await model.apply("start", 0)
        await model.apply("start_failed", 0)
        assert [worker.killed for worker in model.workers] == [True, False]
        await model.apply("start", 0)
        assert len(model.workers) == 3
        model.pool.close()

    run(scenario())


def test_a_worker_that_died_or_hangs_and_is_replaced_is_an_event(tmp_path: Path) -> None:
    async def scenario() -> None:
        workers: list[Worker] = []

        def launch() -> Worker:
            workers.append(Worker(len(workers)))
            workers[-1].started.set_result(None)
            return workers[-1]

        now = iter((0.0, 100.0, 101.0))
        pool = EnvWorkerPool(1, CAPACITY, 30.0, launch, EventLog(tmp_path, clock=lambda: next(now)))
        await pool.assign(0)
        pool.retire_worker_of(0)
        await run_ready_tasks()
        pool.died(1, "gone")
        pool.died(2, STOPPED_TOO_LONG, "stopped")
        await run_ready_tasks()
        assert len(workers) == 4
        pool.close()

    asyncio.run(scenario())
    events = [json.loads(line) for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert [(event["component"], event["event"], event["message"]) for event in events] == [
        ("environment worker", "hung", "0 has a call that hangs; another one replaces it"),
        ("environment worker", "died", "1 died: gone; another one replaces it"),
        ("environment worker", "stopped", f"2 {STOPPED_TOO_LONG}; another one replaces it"),
    ]
