from __future__ import annotations

import asyncio
import subprocess
import time

from roll.configs.scoring.rewards import RewardConfig
from roll.rewards.calling import RewardRequest
from roll.usercode.output import LIMIT_BYTES, LIMIT_WINDOW_S, OutputLimit, RewardOutput
from roll.usercode.reward_pool import RewardPool
from tests.processes import PATIENCE_S

FUNCTION = "tests.usercode.hostile_rewards:score"


def test_a_window_of_time_has_a_limit_and_the_next_one_another():
    limit = OutputLimit()
    assert limit.admit(LIMIT_BYTES - 1, now=1000.0) == LIMIT_BYTES - 1
    assert limit.admit(10, now=1001.0) == 1
    assert limit.admit(10, now=999.0 + LIMIT_WINDOW_S) == 0
    assert limit.admit(10, now=1000.0 + LIMIT_WINDOW_S) == 10


def test_what_a_reward_prints_is_shown_up_to_a_limit_with_one_warning(capfd, caplog):
    async def run():
        async with RewardPool(RewardConfig(function=FUNCTION, timeout_s=30)) as pool:
            return [
                await pool.score([RewardRequest((response,), "")])
                for response in ("say hello", "flood stdout", "flood stderr")
            ]

    assert [outcome.score for [[outcome]] in asyncio.run(run())] == [1.0, 1.0, 1.0]
    printed = capfd.readouterr().err
    assert printed.startswith("hello\n") and len(printed) == LIMIT_BYTES
    [warning] = [record.getMessage() for record in caplog.records if "not shown" in record.getMessage()]
    assert FUNCTION in warning and f"{LIMIT_BYTES // 2**10} KiB" in warning


def test_a_process_that_has_the_pipe_keeps_nothing_open(capfd):
    output = RewardOutput("mine:score")
    output.start()
    child = subprocess.Popen(["sh", "-c", "echo hello; exec sleep 10000"], stdout=output.writer.fileno())
    try:
        until = time.monotonic() + PATIENCE_S
        while "hello" not in capfd.readouterr().err:
            assert child.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        output.close()
        output.close()
        output._thread.join(PATIENCE_S)
        assert not output._thread.is_alive()
    finally:
        child.kill()
        child.wait()
