"""Environments in real processes that raise, hang or die: failed calls, other calls, processes left behind."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from signal import SIGSTOP
from subprocess import PIPE, Popen
from sys import executable

import psutil
import pytest

from roll.distributed.processes import has_ended
from roll.envs import make_env
from roll.usercode.env_pool import EnvFailure, EnvHandle, EnvPool, EnvSpec
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.slow

TROUBLE = EnvSpec("tests.usercode.env_troubles:Trouble", {"max_steps": 100})
STEP_TIMEOUT_S = 10.0
"""Deadline of a call, long because an environment that spins slows down the others of its process."""


@asynccontextmanager
async def started(
    workers: int, log: Path | None = None, step_timeout_s: float = STEP_TIMEOUT_S
) -> AsyncIterator[EnvPool]:
    pool = EnvPool(workers, step_timeout_s, 60.0, log=str(log) if log else None, variables={"OMP_NUM_THREADS": "1"})
    try:
        yield pool
    finally:
        pool.close()


async def process_of(env: EnvHandle) -> int:
    return int((await env.step("process")).observation.split()[0])


async def ended(process: int) -> None:
    """Waits until the process has ended."""
    for _ in range(1200):
        if not psutil.pid_exists(process):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"process {process} still runs")


def test_an_episode_in_a_worker_process_equals_one_in_this_process() -> None:
    spec = EnvSpec("frozen_lake", {"size": 5})
    actions = ["<answer>Right</answer>", "no idea", "<answer>Down</answer>"]

    async def play() -> None:
        async with started(1) as pool:
            env, reset = await pool.open(spec, 3)
            direct = make_env(spec.env_type, spec.env_config)
            assert reset.observation == direct.reset(seed=3)[0]
            assert (reset.instruction, reset.metric_rules) == (direct.instruction, direct.METRICS)
            for action in actions:
                result = await env.step(action)
                observation, reward, terminated, truncated, info = direct.step(action)
                assert (result.observation, result.reward) == (observation, reward)
                assert (result.terminated, result.truncated) == (terminated, truncated)
                assert result.metrics == info["metrics"]

    asyncio.run(play())


def test_workers_have_one_compute_thread_and_no_torch_and_equal_numbers_of_environments() -> None:
    async def play() -> None:
        async with started(2) as pool:
            envs = [(await pool.open(TROUBLE, seed))[0] for seed in range(4)]
            observations = [(await env.step("process")).observation for env in envs]
            processes = [text.split()[0] for text in observations]
            assert [processes.count(process) for process in set(processes)] == [2, 2]
            assert {text.partition(" ")[2] for text in observations} == {"1 False"}

    asyncio.run(play())


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise", r"turn 2: .*env_troubles.py:\d+: KeyError: 'lost'"),
        ("leave", r"turn 2: .*env_troubles.py:\d+: SystemExit: 3"),
        ("number", "turn 2: .*Trouble.act: the observation is int, not text"),
        ("huge", r"turn 2: its result has \d+ bytes; return at most 268435456"),
    ],
)
def test_an_environment_that_raises_fails_alone(action: str, message: str, tmp_path: Path) -> None:
    log = tmp_path / "envs.log"

    async def play() -> None:
        async with started(1, log, 30.0) as pool:
            failing, other = [(await pool.open(TROUBLE, seed))[0] for seed in (8, 9)]
            process = await process_of(failing)
            with pytest.raises(EnvFailure, match=f"Trouble with seed 8, {message}") as caught:
                await failing.step(action)
            assert caught.value.reason == "env_raised"
            await failing.close()
            assert await process_of(other) == process
            assert pool.failures == {"env_raised": 1}

    asyncio.run(play())
    assert action == "huge" or "Traceback" in log.read_text()


@pytest.mark.parametrize("action", ["sleep 600", "spin"])
def test_an_environment_that_hangs_fails_alone_and_its_worker_is_killed_when_it_is_empty(action: str) -> None:
    async def play() -> None:
        async with started(1) as pool:
            failing, other = [(await pool.open(TROUBLE, seed))[0] for seed in range(2)]
            process = await process_of(other)
            call = asyncio.create_task(failing.step(action))
            await asyncio.sleep(0.2)
            await other.step("count")
            assert not call.done(), "delayed by the environment that hangs"
            with pytest.raises(EnvFailure, match="turn 1: no answer within env_step_timeout_s = 10") as caught:
                await call
            assert caught.value.reason == "env_hung"
            fresh, _ = await pool.open(TROUBLE, 3)
            assert await process_of(fresh) != process
            assert await process_of(other) == process
            await other.close()
            await ended(process)
            assert pool.failures == {"env_hung": 1}

    asyncio.run(play())


def test_when_a_process_dies_only_the_environment_that_ends_the_next_one_too_fails() -> None:
    async def play() -> None:
        async with started(1) as pool:
            failing, waiting, idle = [(await pool.open(TROUBLE, seed))[0] for seed in range(3)]
            irreproducible, _ = await pool.open(EnvSpec("tests.usercode.env_troubles:Irreproducible", {}), 3)
            other, _ = await pool.open(TROUBLE, 4)
            process = await process_of(other)
            await other.close()
            before = int((await idle.step("count")).observation)
            call = asyncio.create_task(waiting.step("sleep 0.5"))
            await asyncio.sleep(0.2)
            with pytest.raises(EnvFailure, match=r"its process \d+ died: exit code 3") as caught:
                await failing.step("exit")
            assert caught.value.reason == "env_died"
            await call
            result = await idle.step("count")
            assert int(result.observation) == before + 1 and result.metrics == {"count": 2.0}
            assert await process_of(idle) != process
            with pytest.raises(EnvFailure, match="the episode is not reproducible"):
                await irreproducible.step("count")
            await waiting.close()
            assert pool.failures == {"env_died": 2}

    asyncio.run(play())


def test_no_environment_fails_when_a_process_dies_between_calls() -> None:
    async def play() -> None:
        async with started(1) as pool:
            env, _ = await pool.open(TROUBLE, 1)
            before = int((await env.step("count")).observation)
            other, _ = await pool.open(TROUBLE, 2)
            process = await process_of(other)
            await other.close()
            psutil.Process(process).kill()
            await ended(process)
            await asyncio.sleep(1.0)
            assert int((await env.step("count")).observation) == before + 1
            assert not pool.failures

    asyncio.run(play())


def test_no_environment_fails_when_a_process_is_stopped_in_a_call_and_between_calls() -> None:
    async def play() -> None:
        async with started(1, step_timeout_s=120.0) as pool:
            stepping, idle = [(await pool.open(TROUBLE, seed))[0] for seed in range(2)]
            first, second = [int((await env.step("count")).observation) for env in (stepping, idle)]
            call = asyncio.create_task(stepping.step("sleep 1"))
            other, _ = await pool.open(TROUBLE, 4)
            process = await process_of(other)
            await other.close()
            psutil.Process(process).send_signal(SIGSTOP)
            assert int((await asyncio.wait_for(call, PATIENCE_S)).observation) == first + 1
            assert not psutil.pid_exists(process)
            assert int((await idle.step("count")).observation) == second + 1
            assert not pool.failures

    asyncio.run(play())


def test_close_ends_the_workers_and_the_processes_that_environments_started() -> None:
    async def play() -> list[psutil.Process]:
        async with started(2) as pool:
            envs = [(await pool.open(TROUBLE, seed))[0] for seed in range(3)]
            processes = [await process_of(env) for env in envs]
            child = int((await envs[0].step("child")).observation)
            found = [psutil.Process(process) for process in (*processes, child)]
            call = asyncio.create_task(envs[1].step("sleep 600"))
            await asyncio.sleep(0.2)
            pool.close()
            with pytest.raises(EnvFailure, match="the pool was closed"):
                await call
            return found

    assert all(has_ended(process) for process in asyncio.run(play()))


def test_programs_that_an_environment_started_end_when_its_worker_is_killed_or_ends_itself() -> None:
    async def play() -> None:
        async with started(1) as pool:
            for how in ("kill", "exit"):
                env, _ = await pool.open(TROUBLE, 1)
                process = await process_of(env)
                programs = [int(number) for number in (await env.step("children")).observation.split()]
                if how == "kill":
                    psutil.Process(process).kill()
                else:
                    with pytest.raises(EnvFailure):
                        await env.step("exit")
                for number in (process, *programs):
                    await ended(number)
                await env.close()

    asyncio.run(play())


DRIVER = """
import asyncio
import os
import time
from tests.usercode.test_env_processes import STEP_TIMEOUT_S, TROUBLE, EnvPool, process_of

async def main():
    pool = EnvPool(1, STEP_TIMEOUT_S, 60.0)
    env, _ = await pool.open(TROUBLE, 1)
    print(await process_of(env), (await env.step("children")).observation, flush=True)
    await env.step("ACTION")

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("action", ["spin", "hold the lock"])
def test_nothing_is_left_when_the_driver_is_killed(action: str, tmp_path: Path) -> None:
    """Also where a call holds the interpreter's lock, so that no thread of the process can notice it."""
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.replace("ACTION", action))
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    process = Popen([executable, str(driver)], stdout=PIPE, text=True, env=environment)
    assert process.stdout is not None
    started = [int(number) for number in process.stdout.readline().split()]
    assert len(started) == 4
    time.sleep(0.5)
    process.kill()
    process.wait()
    for number in started:
        asyncio.run(ended(number))
