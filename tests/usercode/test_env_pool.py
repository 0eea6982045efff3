"""Which environments fail when one fails, without processes; test_env_processes.py has real ones."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.base.events import EVENTS_FILE, EventLog
from roll.usercode.env_pool import EnvFailure, EnvHandle, EnvPool, EnvSpec
from roll.usercode.env_process import EnvServer, StepResult
from roll.usercode.pool import PoolBrokenError
from roll.usercode.process import ProcessEndedError
from roll.usercode.server import CallError
from tests.usercode.fake_processes import FakeProcess, JumpingLoop, Processes

STEP_TIMEOUT_S = 10.0
PLAIN = EnvSpec("plain", {})


def pool_of(processes: Processes, count: int, **options: Any) -> EnvPool:
    return EnvPool(count, STEP_TIMEOUT_S, 30.0, launch=processes.launch, **options)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(coroutine)


class TrackedEnv:
    """An environment with the failure that it must have."""

    def __init__(self, env: EnvHandle, seed: int) -> None:
        self.env, self.seed = env, seed
        self.steps = 0
        self.expected_failure: str | None = None
        self.deaths = 0
        self.call: asyncio.Task[StepResult] | None = None

    @property
    def idle(self) -> bool:
        return self.call is None and self.expected_failure is None

    async def finish(self) -> str | None:
        """Awaits the running call and returns the reason of its failure, which must be the expected one."""
        if self.call is None:
            return None
        call, self.call = self.call, None
        try:
            result = await call
        except EnvFailure as failure:
            assert failure.reason == self.expected_failure, str(failure)
            assert f"environment plain with seed {self.seed}, turn {self.steps + 1}: " in str(failure)
            return failure.reason
        assert self.expected_failure is None
        self.steps += 1
        assert result.observation.startswith(f"{self.seed} after {self.steps} with ")
        return None


class Script:
    """Applies drawn events to a pool and predicts the result of each environment."""

    def __init__(self, size: int) -> None:
        self.processes = Processes(before_exit=self.expect_death_of_calls_on)
        self.pool = pool_of(self.processes, size)
        self.envs: list[TrackedEnv] = []
        self.failures: Counter[str] = Counter()
        self.seeds = 0

    async def apply(self, event: str, pick: int) -> None:
        idle = [tracked for tracked in self.envs if tracked.idle]
        tracked = idle[pick % len(idle)] if idle else None
        if event == "open":
            self.seeds += 1
            env, reset = await self.pool.open(PLAIN, self.seeds)
            assert reset.observation == f"{self.seeds}"
            self.envs.append(TrackedEnv(env, self.seeds))
        elif event == "kill" and self.processes.alive:
            process = self.processes.alive[pick % len(self.processes.alive)]
            self.expect_death_of_calls_on(process)
            process.die()
            await self.run_ready_tasks()
        elif event == "finish_all":
            await self.finish_all()
        elif tracked is None:
            return
        elif event == "close":
            self.envs.remove(tracked)
            await tracked.env.close()
        else:
            await self.step(tracked, event)

    async def step(self, tracked: TrackedEnv, action: str) -> None:
        if action == "exit":  # it is repeated alone, after other repeated calls have ended
            self.processes.answer_waiting()
            await self.run_ready_tasks()
        tracked.call, tracked.deaths = asyncio.create_task(tracked.env.step(action)), 0
        tracked.expected_failure = {"raise": "env_raised", "hang": "env_hung", "exit": "env_died"}.get(action)
        if action in ("go", "raise", "exit"):
            await self.finish(tracked)
        self.processes.waits_end = False
        await self.run_ready_tasks()

    async def run_ready_tasks(self) -> None:
        """Runs tasks that are ready, without advancing the clock."""
        for _ in range(20):
            await asyncio.sleep(0)

    def expect_death_of_calls_on(self, process: FakeProcess) -> None:
        """Calls that run there are repeated once."""
        seeds = {env[0] for env in process.envs.values()}
        for tracked in self.envs:
            if tracked.seed in seeds and tracked.call is not None and not tracked.call.done():
                tracked.deaths += 1
                if tracked.deaths > 1:
                    tracked.expected_failure = "env_died"

    async def finish(self, tracked: TrackedEnv) -> None:
        reason = await tracked.finish()
        if reason is not None:
            self.failures[reason] += 1

    async def finish_all(self) -> None:
        """Answers calls that wait, lets hanging calls pass their deadline, and checks every result."""
        self.processes.answer_waiting()
        for tracked in self.envs:
            await self.finish(tracked)
        self.processes.waits_end = False
        self.envs = [tracked for tracked in self.envs if tracked.expected_failure is None]
        assert self.pool.failures == self.failures


@settings(max_examples=600, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(
            st.sampled_from(
                ["open", "open", "go", "go", "wait", "raise", "hang", "exit", "kill", "close", "finish_all"]
            ),
            st.integers(0, 50),
        ),
        max_size=50,
    ),
)
def test_an_environment_fails_alone_or_with_its_process(size: int, events: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        script = Script(size)
        for event, pick in events:
            await script.apply(event, pick)
        await script.finish_all()
        for tracked in script.envs:
            await tracked.env.step("go")
            await tracked.env.close()
        await script.run_ready_tasks()
        script.pool.processes.start()
        assert len(script.processes.alive) == size, "the retired are killed once empty, the dead are replaced"
        assert not any(process.envs for process in script.processes.alive)
        script.pool.close()
        assert all(process.killed for process in script.processes.all)

    run(scenario())


def test_resets_that_were_running_in_a_process_that_ended_are_repeated() -> None:
    async def scenario() -> None:
        processes = Processes()
        pool = pool_of(processes, 2)
        pool.processes.start()
        processes.all[0].ended = True
        opened = await asyncio.gather(*(pool.open(PLAIN, seed) for seed in range(6)))
        assert [reset.observation for _, reset in opened] == [str(seed) for seed in range(6)]
        assert not pool.failures
        pool.close()

    run(scenario())


@pytest.mark.parametrize(("step_timeout_s", "noticed_s"), [(60.0, 12.0), (4.0, 4.0)])
def test_no_environment_fails_when_a_worker_is_stopped_by_a_signal(step_timeout_s: float, noticed_s: float) -> None:
    """It is killed after 10 s, or at the first deadline, and its environments are replayed."""

    async def scenario() -> None:
        processes, clock = Processes(), asyncio.get_running_loop().time
        pool = EnvPool(1, step_timeout_s, 30.0, launch=processes.launch)
        (first, _), (second, _), (idle, _) = [await pool.open(PLAIN, seed) for seed in range(3)]
        await idle.step("go")
        processes.all[0].stopped, stopped_at = True, clock()
        stepped = await asyncio.gather(first.step("go"), second.step("go"))
        assert clock() - stopped_at <= noticed_s and processes.all[0].killed
        assert [result.observation for result in stepped] == ["0 after 1 with go", "1 after 1 with go"]
        assert (await idle.step("go")).observation == "2 after 2 with go"
        assert not pool.failures
        pool.close()

    run(scenario())


def test_a_worker_that_is_stopped_for_a_moment_keeps_its_environments() -> None:
    async def scenario() -> None:
        processes = Processes()
        pool = EnvPool(1, 60.0, 30.0, launch=processes.launch)
        env, _ = await pool.open(PLAIN, 1)
        for stopped in (True, False) * 3:
            processes.all[0].stopped = stopped
            await asyncio.sleep(8.0)
        await env.step("go")
        assert len(processes.all) == 1
        pool.close()

    run(scenario())


def test_an_episode_that_is_not_reproducible_fails_after_its_replay() -> None:
    async def scenario() -> None:
        processes = Processes()
        pool = pool_of(processes, 1)
        env, _ = await pool.open(EnvSpec("not_reproducible", {}), 5)
        processes.all[0].die()
        await asyncio.sleep(0)
        with pytest.raises(
            EnvFailure, match="the episode is not reproducible; reset returned .*5 on 1.* after .*5 on 0"
        ):
            await env.step("go")
        assert pool.failures == {"env_died": 1}
        assert not processes.all[1].envs
        with pytest.raises(RuntimeError, match="has failed"):
            await env.step("go")
        pool.close()

    run(scenario())


def test_a_reset_that_raises_or_hangs_fails_alone() -> None:
    async def scenario() -> None:
        processes = Processes()
        pool = pool_of(processes, 1)
        with pytest.raises(EnvFailure, match="seed 1, reset: env.py:1: ValueError: no"):
            await pool.open(EnvSpec("raise", {}), 1)
        with pytest.raises(
            EnvFailure, match="seed 2, reset: no answer within env_step_timeout_s = 10; its process 0 is replaced"
        ):
            await pool.open(EnvSpec("hang", {}), 2)
        await asyncio.sleep(0)
        assert processes.all[0].killed and len(processes.alive) == 1
        pool.close()

    run(scenario())


def test_a_step_is_one_call_of_the_worker() -> None:
    async def scenario() -> None:
        processes = Processes()
        pool = pool_of(processes, 1)
        env, _ = await pool.open(PLAIN, 1)
        before = processes.all[0].calls
        for _ in range(10):
            await env.step("go")
        assert processes.all[0].calls == before + 10
        pool.close()

    run(scenario())


def test_an_environment_can_be_closed_after_the_caller_of_a_step_was_cancelled() -> None:
    async def scenario() -> None:
        processes = Processes()
        pool = pool_of(processes, 1)
        env, _ = await pool.open(PLAIN, 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.step("hang"), 1.0)
        with pytest.raises(RuntimeError, match="still in a call"):
            await env.step("go")
        await env.close()
        await env.close()
        assert pool.failures == {"env_hung": 1}
        assert processes.all[0].killed
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.open(EnvSpec("wait", {}), 2), 1.0)
        processes.all[1].answer_waiting()
        await asyncio.sleep(1.0)
        assert not processes.all[1].envs and pool.failures == {"env_hung": 1}
        pool.close()

    run(scenario())


def test_a_full_pool_waits_until_an_environment_is_closed() -> None:
    async def scenario() -> None:
        pool = pool_of(Processes(), 2, capacity=1)
        (first, _), _ = [await pool.open(PLAIN, seed) for seed in range(2)]
        waiting = asyncio.create_task(pool.open(PLAIN, 3))
        await asyncio.sleep(100.0)
        assert not waiting.done()
        await first.close()
        await waiting
        pool.close()

    run(scenario())


def test_environments_are_spread_over_the_processes() -> None:
    async def scenario() -> None:
        processes = Processes()
        pool = pool_of(processes, 3)
        (closed, _), *_ = [await pool.open(PLAIN, seed) for seed in range(9)]
        assert [len(each.envs) for each in processes.all] == [3, 3, 3]
        await closed.close()
        await pool.open(PLAIN, 9)
        assert [len(each.envs) for each in processes.all] == [3, 3, 3]
        pool.close()

    run(scenario())


@pytest.mark.parametrize(
    ("ready", "message", "started"),
    [
        (None, "its process did not start within 30 s", 1),
        (ProcessEndedError(-9), "its processes died 4 times in a row: exit code -9", 4),
    ],
)
def test_processes_that_do_not_start_are_an_error(ready: Exception | None, message: str, started: int) -> None:
    processes = Processes()

    def launch() -> FakeProcess:
        process = processes.launch()
        process.ready = Future()
        if ready is not None:
            process.ready.set_exception(ready)
        return process

    async def scenario() -> None:
        pool = EnvPool(1, STEP_TIMEOUT_S, 30.0, launch=launch)
        with pytest.raises(PoolBrokenError, match=message):
            await pool.open(PLAIN, 1)
        assert [process.killed for process in processes.all] == [True] * started + [False], "the last replaces it"
        pool.close()

    run(scenario())


def test_a_process_that_is_replaced_is_an_event_with_the_cause(tmp_path: Path) -> None:
    async def scenario() -> None:
        now, processes = iter(range(0, 1000, 100)), Processes()
        pool = pool_of(processes, 1, events=EventLog(tmp_path, clock=lambda: next(now)))
        first, second = [(await pool.open(PLAIN, seed))[0] for seed in range(2)]
        with pytest.raises(EnvFailure):
            await first.step("hang")
        processes.all[0].die()
        await second.step("go")
        processes.all[1].die()
        await second.step("go")
        processes.all[2].stopped = True
        await second.step("go")
        pool.close()

    run(scenario())
    events = [json.loads(line) for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert {(event["component"], event["event"]) for event in events} == {("environments", "process replaced")}
    assert [event["message"].partition(": ")[2] for event in events] == [
        "environment plain with seed 0, turn 1: no answer within env_step_timeout_s = 10",
        "one of its processes died without a call; starting another one",
        "one of its processes was stopped by a signal until the deadline of its call",
    ]


def test_closing_the_pool_fails_running_calls_and_new_ones() -> None:
    async def scenario() -> None:
        pool = pool_of(Processes(), 1)
        env, _ = await pool.open(PLAIN, 1)
        call = asyncio.create_task(env.step("hang"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pool.close()
        pool.close()
        with pytest.raises(EnvFailure, match="the pool was closed"):
            await call
        await env.close()
        with pytest.raises(RuntimeError, match="is closed"):
            await pool.open(PLAIN, 2)
        assert not pool.failures

    run(scenario())


def test_a_reward_that_training_cannot_hold_fails_where_an_environment_has_a_step_of_its_own() -> None:
    server = EnvServer()
    server.open(0, "tests.envs.broken_envs:BadStep", {}, 0)
    with pytest.raises(CallError, match=r"BadStep.step: the reward is 1e\+39, it must be at most 1e\+18 in size"):
        server.step(0, "go")
    assert len(server) == 0
