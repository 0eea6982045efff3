from __future__ import annotations

import asyncio
import linecache
import os
import re
import signal
import subprocess
import sys
from types import ModuleType

import psutil
import pytest

from roll.configs.scoring.built_in_rewards import BUILT_IN
from roll.configs.scoring.rewards import RewardConfig
from roll.configs.user_code import UserCodeError
from roll.rewards.calling import RewardFunctionError, RewardRequest
from roll.usercode import reward_process
from roll.usercode.pool import DIED_IDLE
from roll.usercode.reward_pool import RewardPool, RewardSelfTestError
from roll.usercode.reward_process import load_reward_function, self_test_of
from roll.usercode.stopped import StopTimes
from tests.processes import PATIENCE_S, command_of
from tests.usercode import odd_rewards

pytestmark = pytest.mark.slow

ODD = "tests.usercode.odd_rewards:behave"


def pool_processes(parent: int) -> list[psutil.Process]:
    """Descendants of a process, except Python's resource tracker, which ends with it."""
    children = psutil.Process(parent).children(recursive=True)
    return [child for child in children if (command := command_of(child)) and "resource_tracker" not in command]


def test_every_kind_of_failure_is_classified_and_affects_no_other_sample():
    behaviours = [
        "0.5",
        "raise",
        "hang",
        "nan",
        "1",
        "infinite",
        "text",
        "nothing",
        "two",
        "exit",
        "panic",
        "die",
        "0.25",
    ]

    async def run():
        async with RewardPool(RewardConfig(function=ODD, timeout_s=5.0, world_size=2)) as pool:
            return await pool.score([RewardRequest((behaviour,), "") for behaviour in behaviours])

    before = set(pool_processes(os.getpid()))
    outcomes = {behaviour: outcome for behaviour, [outcome] in zip(behaviours, asyncio.run(run()), strict=True)}
    assert {name: outcome.score for name, outcome in outcomes.items() if outcome.reason is None} == {
        "0.5": 0.5,
        "1": 1.0,
        "0.25": 0.25,
    }
    assert {name: outcome.reason for name, outcome in outcomes.items() if outcome.reason} == {
        "raise": "raised",
        "exit": "raised",
        "panic": "raised",
        "die": "raised",
        "hang": "timeout",
        "nan": "not_finite",
        "infinite": "not_finite",
        "text": "wrong_type",
        "nothing": "wrong_type",
        "two": "wrong_type",
    }
    assert all(outcome.score is None for outcome in outcomes.values() if outcome.reason)
    assert re.match(
        r"tests/usercode/odd_rewards.py:\d+: RuntimeError: cannot judge this\n    raise", outcomes["raise"].detail
    )
    assert "exit code 7" in outcomes["die"].detail
    assert "of length 2" in outcomes["two"].detail
    assert "timeout_s = 5" in outcomes["hang"].detail
    assert set(pool_processes(os.getpid())) == before


def test_the_math_rule_passes_its_self_test_and_scores_are_in_order():
    async def run():
        async with RewardPool(RewardConfig()) as pool:
            assert await pool.self_test() > 0
            assert await pool.score([]) == []
            groups = [RewardRequest((f"{n}+{n}={2 * n}", "no"), str(2 * n + n % 2)) for n in range(2000)]
            return await pool.score(groups)

    scores = [[outcome.score for outcome in outcomes] for outcomes in asyncio.run(run())]
    assert scores == [[1.0, 0.0], [0.0, 0.0]] * 1000


def test_a_failed_self_test_names_the_sample_and_close_cancels_running_calls():
    async def run():
        pool = RewardPool(RewardConfig(function=ODD, timeout_s=60))
        with pytest.raises(RewardSelfTestError, match=r"'2' against '1' should score 1.0, got 2.0"):
            await pool.self_test()
        waiting = asyncio.ensure_future(pool.score([RewardRequest(("hang",), "")]))
        await asyncio.sleep(0.2)
        pool.close()
        pool.close()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, PATIENCE_S)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("math_reward", "'math_reward': write module:name"),
        ("tests.rewards.nowhere:behave", "there is no module tests.rewards.nowhere"),
        ("tests.usercode.odd_rewards:behav", "the module has no behav; did you mean behave"),
        ("tests.usercode.odd_rewards:NOT_A_FUNCTION", "has NOT_A_FUNCTION, which is a int"),
    ],
)
def test_an_unknown_function_is_an_error_that_lists_the_functions(function, message):
    with pytest.raises(UserCodeError, match=message):
        load_reward_function(RewardConfig(function=function))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (5, "SELF_TEST is a int; write a list of (response, ground truth, whether the response is right)"),
        ([("1", "1", True), ("1", "1")], "SELF_TEST: item 2 is ('1', '1'); write (response, ground truth, "),
        ({"1": "1"}, "SELF_TEST is a dict; write a list of"),
    ],
)
def test_a_malformed_self_test_is_an_error(samples, message):
    module = ModuleType("mine")
    module.SELF_TEST = samples
    with pytest.raises(RewardFunctionError, match=f"^mine: {re.escape(message)}"):
        self_test_of(module, RewardConfig())


def test_starting_the_pool_with_an_unknown_function_is_an_error():
    async def run():
        async with RewardPool(RewardConfig(function="tests.usercode.odd_rewards:behav")):
            pass

    with pytest.raises(RewardFunctionError, match="the module has no behav"):
        asyncio.run(run())


def test_a_group_function_scores_all_responses_in_one_call():
    async def run():
        async with RewardPool(RewardConfig(function="tests.usercode.odd_rewards:rank", world_size=2)) as pool:
            return await pool.score([RewardRequest(("aa", "b", "cccc"), ""), RewardRequest(("dd", "e"), "")])

    outcomes = asyncio.run(run())
    assert [[outcome.score for outcome in of_group] for of_group in outcomes] == [[1.0, 0.0, 2.0], [1.0, 0.0]]


def test_coroutines_run_at_the_same_time_in_one_loop_and_have_their_own_deadlines():
    async def run():
        async with RewardPool(RewardConfig(function="tests.usercode.odd_rewards:slow", timeout_s=5)) as pool:
            [first] = await pool.score([RewardRequest(("0.5",) * 19 + ("3000",), "")])
            return first, await pool.score([RewardRequest(("0",), "")])

    first, second = asyncio.run(run())
    assert [outcome.score for outcome in first[:19]] == [0.5] * 19 and first[19].reason == "timeout"
    assert max(outcome.metrics["running"] for outcome in first[:19]) >= 19
    line = linecache.getlines(odd_rewards.__file__).index("    await asyncio.sleep(float(response))\n") + 1
    assert first[19].detail.startswith(
        f"tests/usercode/odd_rewards.py:{line}: the call, which waited here, took longer"
    )
    assert second[0][0].score == 0
    assert {outcome.metrics["loop"] for outcome in first[:19]} == {second[0][0].metrics["loop"]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("divide", r"^tests/usercode/odd_rewards.py:\d+: ZeroDivisionError: .*\n    return 1 / 0"),
        ("forget", r"^tests/usercode/odd_rewards.py:\d+: forget returned None; return one number"),
        (
            "sleep",
            r"^tests/usercode/odd_rewards.py:\d+: a call of the function that begins here took longer than timeout",
        ),
        ("ask", r"asks for reference, which is neither a column of the data \(level\) nor one of response, "),
        ("short", r"^tests/usercode/odd_rewards.py:\d+: short returned 1 scores for 2 responses; return one for each"),
    ],
)
def test_a_trial_on_the_first_prompt_reports_file_and_line_first(name, message):
    async def run():
        timeout_s = 0.5 if name == "sleep" else 30.0
        config = RewardConfig(function=f"tests.usercode.broken_rewards:{name}", timeout_s=timeout_s)
        async with RewardPool(config) as pool:
            await pool.self_test([RewardRequest((), "5", row={"level": 1}, id="data:1")])

    with pytest.raises(RewardSelfTestError, match=message.replace("odd_rewards", "broken_rewards")) as caught:
        asyncio.run(run())
    assert "for the first prompt of its data (data:1)" in str(caught.value)


DRIVER = f"""
import asyncio
from roll.configs.scoring.rewards import RewardConfig
from roll.configs.scoring.built_in_rewards import BUILT_IN
from roll.rewards.calling import RewardRequest
from roll.usercode.reward_pool import RewardPool

async def main():
    async with RewardPool(RewardConfig(function={ODD!r}, timeout_s=600)) as pool:
        print("ready", flush=True)
        await pool.score([RewardRequest(("hang",), "")])

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
    driver.communicate()
    _, alive = psutil.wait_procs(left, timeout=120)
    assert not alive


async def kill_workers(pool: RewardPool) -> None:
    """Kills the idle processes, and waits until the pool knows that they ended."""
    workers = pool._pool.processes
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
    for worker in workers:
        worker.join()


def test_idle_processes_that_are_killed_are_replaced():
    async def run():
        async with RewardPool(RewardConfig(function=ODD, timeout_s=60.0, world_size=2)) as pool:
            scores = []
            for _ in range(2):
                await kill_workers(pool)
                outcomes = await pool.score([RewardRequest(("0.5",), ""), RewardRequest(("0.25",), "")])
                scores.append([outcome.score for [outcome] in outcomes])
            return scores

    assert asyncio.run(run()) == [[0.5, 0.25]] * 2


def test_every_process_that_is_replaced_is_reported_with_the_cause():
    """One hangs, one dies in a call, which is made twice, and one without a call."""
    causes: list[str] = []

    async def run():
        async with RewardPool(RewardConfig(function=ODD, timeout_s=5.0), causes.append) as pool:
            await pool.score([RewardRequest(("hang",), "")])
            await pool.score([RewardRequest(("die",), "")])
            await pool.score([RewardRequest(("0.5",), "")])
            await kill_workers(pool)
            await pool.score([RewardRequest(("0.5",), "")])

    asyncio.run(run())
    assert "a call of the function that begins here took longer than timeout_s = 5" in causes[0]
    assert all("died with exit code 7" in cause for cause in causes[1:3])
    assert causes[3:] == [DIED_IDLE]


def test_calls_that_wait_while_all_processes_die_are_made_again():
    async def run():
        async with RewardPool(RewardConfig(function=ODD, timeout_s=60.0, world_size=1)) as pool:
            for worker in pool._pool.processes:
                os.kill(worker.pid, signal.SIGKILL)
            outcomes = await pool.score([RewardRequest(("0.5",), "")] * 3)
            return [outcome.score for [outcome] in outcomes]

    assert asyncio.run(run()) == [0.5] * 3


def test_processes_that_die_again_and_again_are_an_error(monkeypatch):
    async def run():
        async with RewardPool(RewardConfig(function=ODD, timeout_s=60.0, world_size=1)) as pool:
            await kill_workers(pool)
            monkeypatch.setattr(reward_process, "start", odd_rewards.die)
            await pool.score([RewardRequest(("0.5",), "")])

    with pytest.raises(RewardFunctionError, match=r"behave': its processes died 4 times in a row"):
        asyncio.run(run())


def test_a_response_that_hangs_is_tried_once_more_however_often_it_occurs(tmp_path):
    """Each process tries it with a chunk and then alone, once for all groups and for later calls of the pool."""
    notes = tmp_path / "notes"
    config = RewardConfig(function="tests.usercode.odd_rewards:note_and_hang", timeout_s=2.0, world_size=2)

    async def run():
        async with RewardPool(config) as pool:
            requests = [RewardRequest(("hang",) * 4, str(notes), id=f"prompt {number}") for number in range(8)]
            groups = await pool.score([*requests, RewardRequest(("fine",), str(notes))])
            later = await asyncio.gather(*(pool.score([request]) for request in requests))
            return [*(group for [group] in later), *groups]

    *hanging, [fine] = asyncio.run(run())
    assert [outcome.reason for group in hanging for outcome in group] == ["timeout"] * 64 and fine.score == 1.0
    assert notes.read_text().splitlines().count("hang") <= 2 * config.world_size


def test_a_response_that_hangs_is_tried_once_more_in_calls_made_at_the_same_time(tmp_path):
    notes = tmp_path / "notes"
    config = RewardConfig(function="tests.usercode.odd_rewards:note_and_hang", timeout_s=2.0, world_size=1)

    async def run():
        async with RewardPool(config) as pool:
            requests = [RewardRequest(("hang",) * 4, str(notes), id=f"prompt {number}") for number in range(4)]
            requests.append(RewardRequest(("fine",), str(notes)))
            return await asyncio.gather(*(pool.score([request]) for request in requests))

    *hanging, [[fine]] = asyncio.run(run())
    assert {outcome.reason for [group] in hanging for outcome in group} == {"timeout"} and fine.score == 1.0
    assert notes.read_text().splitlines().count("hang") == 2


def test_the_rest_of_a_group_with_a_failed_response_is_not_scored(tmp_path):
    notes = tmp_path / "notes"
    config = RewardConfig(function="tests.usercode.odd_rewards:note_and_hang", timeout_s=2.0, world_size=1)

    async def run():
        async with RewardPool(config) as pool:
            lost = RewardRequest(tuple(f"hang {number}" for number in range(12)), str(notes))
            return await pool.score([lost, RewardRequest(("a", "b"), str(notes))])

    lost, others = asyncio.run(run())
    assert {outcome.reason for outcome in lost} == {"timeout"} and [each.score for each in others] == [1.0, 1.0]
    alone = notes.read_text().splitlines()
    assert len([line for line in alone if line.startswith("hang")]) <= 4, "its other responses were tried one by one"


def test_the_rendered_prompt_and_ids_reach_a_function_that_reads_them():
    request = RewardRequest(("a", "bb"), "", prompt_ids=(7, 8), response_ids=((1,), (2, 3)))

    async def run():
        config = RewardConfig(function="tests.usercode.odd_rewards:count_ids")
        async with RewardPool(config, decode=lambda ids: "x" * sum(ids)) as pool:
            return await pool.score([request])

    ((first, second),) = asyncio.run(run())
    assert (first.score, second.score) == (15 + 2 + 1, 15 + 2 + 2)


def test_a_response_that_takes_a_built_in_comparison_too_long_is_wrong_and_the_rest_of_its_group_is_scored():
    config = RewardConfig(function=BUILT_IN["regex"].function, pattern="(a+)+$", timeout_s=1.0, wrong_score=-1.0)

    async def run():
        async with RewardPool(config) as pool:
            first = await pool.score([RewardRequest(("a" * 60 + "b", "aa", "b"), "aa")])
            return first + await pool.score([RewardRequest(("a" * 60 + "b", "aa"), "aa")])

    first, again = asyncio.run(run())
    assert [(each.score, each.metrics["too_long_to_compare"]) for each in first] == [(-1, 1), (1, 0), (-1, 0)]
    assert [(each.score, each.metrics["too_long_to_compare"]) for each in again] == [(-1, 1), (1, 0)]


def test_a_call_beyond_the_memory_limit_fails_and_the_next_one_is_scored():
    config = RewardConfig(function="tests.usercode.odd_rewards:allocate", process_memory_limit_mb=512)

    async def run():
        async with RewardPool(config) as pool:
            return await pool.score([RewardRequest((text,), "") for text in ("1", "2000", "2")])

    [[first], [large], [last]] = asyncio.run(run())
    assert (first.score, last.score) == (1.0, 1.0)
    assert large.reason == "raised" and "MemoryError" in str(large.detail)


def test_a_call_whose_process_is_killed_is_made_again(tmp_path):
    async def run():
        async with RewardPool(RewardConfig(function="tests.usercode.odd_rewards:be_killed_once")) as pool:
            return await pool.score([RewardRequest(("1",), str(tmp_path / "called"))])

    [[outcome]] = asyncio.run(run())
    assert outcome.score == 1.0


@pytest.mark.parametrize(
    ("function", "timeout_s"),
    [("be_stopped_once", 60.0), ("be_stopped_once", 3.0), ("be_stopped_for_a_moment_once", 1.0)],
)
def test_a_call_whose_process_is_stopped_by_a_signal_is_made_again(function, timeout_s, tmp_path, monkeypatch):
    """Where the deadline is after the end of the grace, before it, and within the process."""
    monkeypatch.setattr("roll.usercode.pool.StopTimes", lambda is_stopped: StopTimes(is_stopped, 4.0))
    causes: list[str] = []

    async def run():
        config = RewardConfig(function=f"tests.usercode.odd_rewards:{function}", timeout_s=timeout_s)
        async with RewardPool(config, causes.append) as pool:
            return await pool.score([RewardRequest(("1",), str(tmp_path / "called"))])

    [[outcome]] = asyncio.run(run())
    assert outcome.score == 1.0, outcome
    assert all("stopped by a signal" in cause for cause in causes)
    assert len(causes) == (function == "be_stopped_once")


@pytest.mark.parametrize("processes", [1, 2])
def test_idle_processes_that_are_stopped_by_a_signal_are_killed_and_delay_no_call_for_long(processes, monkeypatch):
    monkeypatch.setattr("roll.usercode.pool.StopTimes", lambda is_stopped: StopTimes(is_stopped, 2.0))
    causes: list[str] = []

    async def run():
        config = RewardConfig(function=ODD, timeout_s=60.0, world_size=processes)
        async with RewardPool(config, causes.append) as pool:
            await pool.score([RewardRequest(("0.5",), "")] * 8)
            for worker in pool._pool.processes:
                os.kill(worker.pid, signal.SIGSTOP)
            outcomes = await pool.score([RewardRequest(("0.25",), "")] * 3)
            return [outcome.score for [outcome] in outcomes]

    assert asyncio.run(run()) == [0.25] * 3
    assert causes[0] == "one of its processes was stopped by a signal for 10 s, and was killed"


def test_shared_memory_and_that_of_children_count_for_the_limit():
    config = RewardConfig(
        function="tests.usercode.odd_rewards:take_memory", process_memory_limit_mb=256, timeout_s=30, world_size=2
    )

    async def run():
        async with RewardPool(config) as pool:
            return await pool.score([RewardRequest((text,), "") for text in ("shared", "in children", "limit")])

    [[shared], [in_children], [limit]] = asyncio.run(run())
    text = "with what it has started, more than process_memory_limit_mb = 256 MiB"
    for outcome in (shared, in_children):
        assert outcome.reason == "raised" and text in outcome.detail
    assert limit.score == 256, "the hard limit is the soft one"


def test_an_exception_that_escapes_in_a_process_fails_its_calls(monkeypatch):
    monkeypatch.setattr("roll.usercode.reward_pool.score_chunk", odd_rewards.leak)

    async def run():
        async with RewardPool(RewardConfig(function=ODD)) as pool:
            [outcomes] = await pool.score([RewardRequest(("0.5", "1"), "")])
            return outcomes

    place = r"tests/usercode/odd_rewards\.py:\d+: SystemExit"
    assert [(each.reason, bool(re.match(place, each.detail))) for each in asyncio.run(run())] == [("raised", True)] * 2
