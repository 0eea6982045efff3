"""Rewards per second: 10,000 math rewards in two processes against a fresh process each; what a hanging one delays.

    python -m benchmarks.rewards --json FILE

A fresh process imports the rule, scores one response and ends, two at a time; a few of them are measured. The processes
of the pool are started and have scored once before the clock starts, as in a run. The second figure is the time of a
domain whose rewards are sound, beside a domain whose every response hangs until its deadline, over its time alone.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.common import Measurement, at_least, at_most, main
from roll.configs.scoring.built_in_rewards import BUILT_IN
from roll.configs.scoring.rewards import RewardConfig
from roll.rewards.calling import RewardRequest
from roll.usercode.reward_pool import RewardPool

REWARDS = 10_000
FEWER = 2_400
"""Samples of the domain that runs beside one that hangs."""

PROCESSES = 2
FRESH = 20
GROUP = 8
"""Responses to one prompt."""

HANG_S = 3.0
"""Deadline of the domain that hangs; the sound one needs less."""

CODE = """
import sys
from roll.configs.scoring.rewards import RewardConfig
from roll.rewards.math_rule import math_reward
print(math_reward(sys.argv[1], sys.argv[2], RewardConfig()))
"""


def hang(response: str) -> float:
    """A reward that never ends."""
    time.sleep(3600)
    return 0.0


def requests(count: int) -> list[RewardRequest]:
    """Groups of responses, half of them right."""
    return [
        RewardRequest(tuple(f"so it is \\boxed{{{number + index % 2}}}" for index in range(GROUP)), str(number))
        for number in range(count // GROUP)
    ]


async def pool_seconds(count: int) -> float:
    """Seconds of math rewards in a pool that runs."""
    config = RewardConfig(function=BUILT_IN["math_rule"].function, world_size=PROCESSES)
    async with RewardPool(config) as pool:
        await pool.score(requests(64 * PROCESSES))
        start = time.perf_counter()
        outcomes = await pool.score(requests(count))
        seconds = time.perf_counter() - start
    scores = [outcome.score for group in outcomes for outcome in group]
    assert scores == [1.0, 0.0] * (count // 2)
    return seconds


def fresh_seconds(count: int) -> float:
    """Seconds of one math reward in a process of its own, with PROCESSES of them at a time."""

    def score(number: int) -> str:
        command = [sys.executable, "-c", CODE, f"so it is \\boxed{{{number}}}", str(number)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    with ThreadPoolExecutor(PROCESSES) as threads:
        list(threads.map(score, range(PROCESSES)))
        start = time.perf_counter()
        scores = list(threads.map(score, range(count)))
        seconds = time.perf_counter() - start
    assert scores == ["1.0\n"] * count
    return seconds / count


async def beside_a_hanging_domain(count: int) -> float:
    """Seconds of math rewards while every response of another domain hangs."""
    config = RewardConfig(function="benchmarks.rewards:hang", world_size=PROCESSES, timeout_s=HANG_S)
    async with RewardPool(config) as hanging:
        running = asyncio.ensure_future(hanging.score(requests(4 * GROUP)))
        await asyncio.sleep(0.1)
        seconds = await pool_seconds(count)
        assert not running.done(), "the other domain hangs all the time"
        running.cancel()
    return seconds


def measure() -> Measurement:
    """Seconds and their ratios."""
    pool, fresh = asyncio.run(pool_seconds(REWARDS)), fresh_seconds(FRESH)
    alone = asyncio.run(pool_seconds(FEWER))
    beside = asyncio.run(beside_a_hanging_domain(FEWER))
    raw = {
        "rewards_per_second": REWARDS / pool,
        "fresh_processes_per_second": 1 / fresh,
        "seconds_alone": alone,
        "seconds_beside_a_hanging_domain": beside,
    }
    return raw, [
        at_least("rewards: math rewards, pool over a fresh process each", fresh * REWARDS / pool, 5.0),
        at_most("rewards: time beside a domain that hangs over time alone", beside / alone, 1.2),
    ]


if __name__ == "__main__":
    main(measure, __doc__ or "")
