from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from roll.configs.pipeline import RewardConfig
from roll.rewards.pool import RewardFunctionError, RewardPool, RewardSelfTestError
from roll.rewards.reward_process import load_reward_function

ODD = "tests.rewards.odd_rewards:behave"


def pool_processes(parent: int) -> list[psutil.Process]:
    """Descendants of a process, except Python's resource tracker, which ends with it."""
    children = psutil.Process(parent).children(recursive=True)
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def test_every_kind_of_failure_is_classified_and_affects_no_other_sample():
    behaviours = ["0.5", "raise", "hang", "nan", "1", "infinite", "text", "nothing", "two", "exit", "die", "0.25"]

    async def run():
        async with RewardPool(RewardConfig(function=ODD, timeout_s=0.5, world_size=2)) as pool:
            return await pool.score([(behaviour, "") for behaviour in behaviours])

    before = set(pool_processes(os.getpid()))
    outcomes = dict(zip(behaviours, asyncio.run(run()), strict=True))
    assert {name: outcome.score for name, outcome in outcomes.items() if outcome.reason is None} == {
        "0.5": 0.5,
        "1": 1.0,
        "0.25": 0.25,
    }
    assert {name: outcome.reason for name, outcome in outcomes.items() if outcome.reason} == {
        "raise": "raised",
        "exit": "raised",
        "die": "raised",
        "hang": "timeout",
        "nan": "not_finite",
        "infinite": "not_finite",
        "text": "wrong_type",
        "nothing": "wrong_type",
        "two": "wrong_type",
    }
    assert all(outcome.score is None for outcome in outcomes.values() if outcome.reason)
    assert "cannot judge this" in outcomes["raise"].detail
    assert "exit code 7" in outcomes["die"].detail
    assert "of length 2" in outcomes["two"].detail
    assert "timeout_s = 0.5" in outcomes["hang"].detail
    assert set(pool_processes(os.getpid())) == before


def test_the_math_rule_passes_its_self_test_and_scores_are_in_order():
    async def run():
        async with RewardPool(RewardConfig()) as pool:
            assert await pool.self_test() > 0
            assert await pool.score([]) == []
            items = [(f"{n}+{n}={2 * n}", str(2 * n + n % 2)) for n in range(2000)]
            return await pool.score(items)

    outcomes = asyncio.run(run())
    assert [outcome.score for outcome in outcomes] == [1.0, 0.0] * 1000


def test_a_failed_self_test_names_the_sample_and_close_cancels_running_calls():
    async def run():
        pool = RewardPool(RewardConfig(function=ODD, timeout_s=60))
        with pytest.raises(RewardSelfTestError, match=r"'2' against '1' should score 1.0, got 2.0"):
            await pool.self_test()
        waiting = asyncio.ensure_future(pool.score([("hang", "")]))
        await asyncio.sleep(0.2)
        pool.close()
        pool.close()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, 5)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("math_reward", "write module:function"),
        ("tests.rewards.nowhere:behave", "importing tests.rewards.nowhere failed"),
        ("tests.rewards.odd_rewards:behav", "has no function behav; it has .*behave"),
        ("tests.rewards.odd_rewards:NOT_A_FUNCTION", "has no function NOT_A_FUNCTION"),
    ],
)
def test_an_unknown_function_is_an_error_that_lists_the_functions(function, message):
    with pytest.raises(RewardFunctionError, match=message):
        load_reward_function(function)


def test_starting_the_pool_with_an_unknown_function_is_an_error():
    async def run():
        async with RewardPool(RewardConfig(function="tests.rewards.odd_rewards:behav")):
            pass

    with pytest.raises(RewardFunctionError, match="has no function behav"):
        asyncio.run(run())


DRIVER = f"""
import asyncio
from roll.configs.pipeline import RewardConfig
from roll.rewards.pool import RewardPool

async def main():
    async with RewardPool(RewardConfig(function={ODD!r}, timeout_s=600)) as pool:
        print("ready", flush=True)
        await pool.score([("hang", "")])

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_hanging_reward_process_ends_when_the_driver_is_killed(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert driver.stdout is not None and driver.stdout.readline() == "ready\n"
    left = pool_processes(driver.pid)
    assert left
    driver.send_signal(signal.SIGKILL)
    driver.communicate(timeout=10)
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive
