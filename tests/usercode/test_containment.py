"""What hostile reward functions leave behind, and what the sound ones beside them get."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll.configs.scoring.rewards import RewardConfig
from roll.rewards.calling import RewardOutcome, RewardRequest
from roll.usercode.containment import COUNT_INTERVAL_S, takes_more_than
from roll.usercode.reward_pool import RewardPool
from tests.processes import PATIENCE_S, command_of
from tests.usercode.hostile_rewards import foreign

pytestmark = pytest.mark.slow

FUNCTION = "tests.usercode.hostile_rewards:score"
ASYNC_FUNCTION = "tests.usercode.hostile_rewards:score_async"
SOUND = "0.5"

FAILURES = {
    "raise": "raised",
    "raise a BaseException": "raised",
    "raise a KeyboardInterrupt": "raised",
    "raise an error without text": "raised",
    "exit": "raised",
    "exit at once": "raised",
    "kill itself": "raised",
    "abort": "raised",
    "crash": "raised",
    "recurse": "raised",
    "too much memory at once": "raised",
    "sleep": "timeout",
    "loop": "timeout",
    "stop itself": "raised",
    "ignore signals and loop": "timeout",
    "wait for a thread": "timeout",
    "wait for a lock": "timeout",
    "fork and hang": "timeout",
    "start a program and hang": "timeout",
    "daemon and hang": "timeout",
    "start a program and die": "raised",
    "fork and be killed": "raised",
    "nan": "not_finite",
    "infinity": "not_finite",
    "a huge number": "not_finite",
    "text": "wrong_type",
    "none": "wrong_type",
    "a list": "wrong_type",
    "a complex number": "wrong_type",
    "a dictionary without a score": "wrong_type",
    "a score that is a text": "wrong_type",
    "an object": "wrong_type",
}
"""Response -> the reason why it has no score; hostile_rewards.py does what it says."""

ASYNC_FAILURES = (
    "exit",
    "raise a KeyboardInterrupt",
    "exit in a task",
    "raise a KeyboardInterrupt in a task",
    "exit in a callback",
    "stop the loop",
    "cancel every task",
    "return an unreadable number",
    "return a locked dictionary",
    "leave a task that exits",
)
"""Responses to which a coroutine function raises, or ends the loop of all calls."""

SCORED = ("flood stdout", "flood stderr", "leave a child", "leave a daemon", "leave threads", "change the folder")
"""Responses whose score is 1, whatever else is done."""


DRIVER = f"""
import asyncio
from roll.configs.scoring.rewards import RewardConfig
from roll.rewards.calling import RewardRequest
from roll.usercode.reward_pool import RewardPool

async def main():
    async with RewardPool(RewardConfig(function={FUNCTION!r}, timeout_s=600)) as pool:
        print("ready", flush=True)
        await pool.score([RewardRequest((RESPONSE,), "")])

if __name__ == "__main__":
    asyncio.run(main())
"""


ORPHAN = """
import os, time
from roll.usercode.containment import contain

driver = os.getpid()
if os.fork() == 0:
    while os.getppid() == driver:
        time.sleep(0.01)
    contain(driver=driver)
    time.sleep(3600)
"""


async def scored(*responses: str, processes: int = 1, **keys: Any) -> list[RewardOutcome]:
    """Outcomes in a pool that is closed before they are returned."""
    config = RewardConfig(**{"function": FUNCTION, "timeout_s": 30.0, "world_size": processes} | keys)
    async with RewardPool(config) as pool:
        outcomes = await pool.score([RewardRequest((response,), "") for response in responses])
    return [outcome for (outcome,) in outcomes]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After a test, processes that say where they belong are gone."""
    monkeypatch.setenv("HOSTILE_TEST", str(tmp_path))
    return lambda: assert_gone(f"HOSTILE_TEST={tmp_path}".encode())


def assert_gone(mark: bytes) -> None:
    until = time.monotonic() + PATIENCE_S
    while left := processes_with(mark):
        assert time.monotonic() < until, left
        time.sleep(0.02)


def processes_with(mark: bytes) -> list[tuple[int, str]]:
    """Ids and commands of living processes, but not of this one and Python's resource tracker."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            command = " ".join(process.cmdline())
        except (OSError, psutil.Error):
            continue
        if mark in environment and "resource_tracker" not in command:
            found.append((process.pid, command))
    return found


def test_every_kind_of_hostile_code_fails_alone(nothing_is_left: Callable[[], None]) -> None:
    hangs = [response for response, reason in FAILURES.items() if reason == "timeout" or response == "stop itself"]
    others = [response for response in FAILURES if response not in hangs]
    late = asyncio.run(scored(*hangs, processes=4, timeout_s=0.4))
    *failed, sound = asyncio.run(scored(*others, SOUND, processes=4))
    outcomes = dict(zip([*hangs, *others], [*late, *failed], strict=True))
    assert {response: outcome.reason for response, outcome in outcomes.items()} == FAILURES
    assert all(outcome.score is None and outcome.detail for outcome in outcomes.values())
    assert sound == RewardOutcome(0.5)
    nothing_is_left()


@pytest.mark.parametrize("response", ["daemon without an environment and die", "daemon by a double fork and die"])
def test_a_daemon_ends_with_its_process(response: str, nothing_is_left: Callable[[], None]) -> None:
    daemon = foreign()
    (outcome,) = asyncio.run(scored(response))
    assert outcome.reason == "raised"
    until = time.monotonic() + PATIENCE_S
    while left := [each.pid for each in psutil.process_iter() if command_of(each).split() == daemon]:
        assert time.monotonic() < until, left
        time.sleep(0.05)
    nothing_is_left()


@pytest.mark.parametrize("response", ASYNC_FAILURES)
def test_what_ends_the_loop_of_coroutines_fails_alone(response: str, nothing_is_left: Callable[[], None]) -> None:
    async def run() -> list[RewardOutcome]:
        async with RewardPool(RewardConfig(function=ASYNC_FUNCTION, timeout_s=30.0)) as pool:
            together = await pool.score([RewardRequest((each,), "") for each in (SOUND, response, SOUND)])
            later = await pool.score([RewardRequest((SOUND,), "")])
        return [outcome for (outcome,) in [*together, *later]]

    first, hostile, *others = asyncio.run(run())
    assert hostile.reason == "raised" and hostile.detail.startswith("tests/usercode/hostile_rewards.py:")
    assert [each.score for each in (first, *others)] == [0.5] * 3
    nothing_is_left()


def test_a_task_that_ends_the_loop_later_costs_no_other_sample() -> None:
    causes: list[str] = []

    async def run() -> list[RewardOutcome]:
        async with RewardPool(RewardConfig(function=ASYNC_FUNCTION, timeout_s=30.0), causes.append) as pool:
            responses = ("leave a task that exits later", "wait", SOUND)
            return [(await pool.score([RewardRequest((response,), "")]))[0][0] for response in responses]

    assert [outcome.score for outcome in asyncio.run(run())] == [1.0, 1.0, 0.5]
    [cause] = causes
    assert "SystemExit: 3\n    sys.exit(3)" in cause


def test_a_function_that_starts_too_many_processes_fails_with_the_limit(nothing_is_left: Callable[[], None]) -> None:
    many, sound = asyncio.run(scored("fork without end", SOUND, timeout_s=60, child_process_limit=20))
    assert many.reason == "raised" and "started more than child_process_limit = 20 processes" in (many.detail or "")
    assert sound == RewardOutcome(0.5)
    nothing_is_left()


def test_code_that_ignores_the_signal_is_killed(nothing_is_left: Callable[[], None]) -> None:
    response = "ignore signals and fork without end"
    many, sound = asyncio.run(scored(response, SOUND, timeout_s=60, child_process_limit=20))
    assert many.reason == "raised" and many.detail and sound == RewardOutcome(0.5)
    nothing_is_left()


def test_a_daemon_does_not_outlive_a_process_that_was_killed(nothing_is_left: Callable[[], None]) -> None:
    [killed] = asyncio.run(scored("daemon, wait and be killed"))
    assert killed.reason == "raised" and "exit code -9" in (killed.detail or "")
    nothing_is_left()


def test_a_process_ends_whose_driver_ended_before_it_was_contained(nothing_is_left: Callable[[], None]) -> None:
    subprocess.run([sys.executable, "-c", ORPHAN], check=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
    nothing_is_left()


def test_memory_that_processes_share_counts_once() -> None:
    held = b"x" * (256 * 2**20)
    limit = psutil.Process().memory_full_info().uss + len(held) // 2
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        assert not takes_more_than([os.getpid(), child], limit)
        assert takes_more_than([os.getpid(), child], len(held) // 2)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_as_many_processes_as_are_allowed_may_run(tmp_path: Path, nothing_is_left: Callable[[], None]) -> None:
    async def run() -> list[RewardOutcome]:
        outcomes = []
        async with RewardPool(RewardConfig(function=FUNCTION, timeout_s=60, child_process_limit=1)) as pool:
            for response in ("leave a child", SOUND):
                [[outcome]] = await pool.score([RewardRequest((response,), "")])
                outcomes.append(outcome)
                await asyncio.sleep(3 * COUNT_INTERVAL_S)
                running.append(len(processes_with(f"HOSTILE_TEST={tmp_path}".encode())))
        return outcomes

    running: list[int] = []
    assert asyncio.run(run()) == [RewardOutcome(1.0), RewardOutcome(0.5)]
    assert running[0] == running[1] >= 3, "the child, the reward process and its watchdog"
    nothing_is_left()


@pytest.mark.parametrize("response", SCORED)
def test_what_a_reward_leaves_behind_ends_with_its_process(response: str, nothing_is_left: Callable[[], None]) -> None:
    first, second = asyncio.run(scored(response, SOUND))
    assert (first.score, second.score) == (1.0, 0.5)
    nothing_is_left()


@pytest.mark.parametrize("response", ["fork and hang", "start a program and hang", "daemon and hang"])
def test_nothing_outlives_a_driver_that_was_killed(
    tmp_path: Path, response: str, nothing_is_left: Callable[[], None]
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.replace("RESPONSE", repr(response)))
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert driver.stdout is not None and driver.stdout.readline() == "ready\n"
    until = time.monotonic() + PATIENCE_S
    while len(psutil.Process(driver.pid).children(recursive=True)) < 3:  # reward process, watchdog, its child
        assert time.monotonic() < until
        time.sleep(0.02)
    driver.kill()
    driver.communicate()
    nothing_is_left()


def test_a_domain_that_hangs_delays_no_other(nothing_is_left: Callable[[], None]) -> None:
    async def run() -> tuple[bool, float]:
        hanging = asyncio.ensure_future(scored(*["sleep"] * 4, timeout_s=PATIENCE_S))
        config = RewardConfig(function=FUNCTION, timeout_s=60)
        async with RewardPool(config) as pool:
            [[outcome]] = await pool.score([RewardRequest((SOUND,), "")])
            waited = hanging.done()
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        return waited, outcome.score or 0.0

    assert asyncio.run(run()) == (False, 0.5)
    nothing_is_left()
