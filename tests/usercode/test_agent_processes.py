"""Agents in real processes that raise, hang, die or leave something: failures, other agents, processes left behind."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from roll.agents import Result
from roll.usercode.agents.pool import AgentFailure, AgentPool, AgentSpec
from tests.processes import PATIENCE_S
from tests.usercode.agent_troubles import daemon

pytestmark = pytest.mark.slow

TROUBLED = AgentSpec("Troubled", "tests.usercode.agent_troubles:Troubled")


@asynccontextmanager
async def started(log: Path | None = None) -> AsyncIterator[AgentPool]:
    pool = AgentPool(1, 60.0, log=str(log) if log else None, variables={"OMP_NUM_THREADS": "1"})
    try:
        yield pool
    finally:
        pool.close()


async def play(pool: AgentPool, trouble: str, seed: int = 0, timeout_s: float = math.inf) -> Result:
    return await pool.run(TROUBLED, seed, {"TROUBLE": trouble, "OPENAI_API_KEY": f"key-{seed}"}, timeout_s)


async def no_daemon() -> None:
    """Waits until what `leaves_a_daemon` starts has ended."""
    until = time.monotonic() + PATIENCE_S
    while daemon_runs():
        assert time.monotonic() < until, "the daemon still runs"
        await asyncio.sleep(0.1)


def daemon_runs() -> bool:
    return any(process.info["cmdline"] == daemon() for process in psutil.process_iter(["cmdline"]))


def test_every_agent_has_variables_of_its_own_and_a_class_may_have_a_coroutine() -> None:
    async def run() -> None:
        async with started() as pool:
            results = await asyncio.gather(*(play(pool, "nothing", seed) for seed in range(20)))
            assert results == [Result(1.0, {"seed": float(seed), "key": 1.0}) for seed in range(20)]
            assert await play(pool, "coroutine") == Result(0.5)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("trouble", "reason", "message"),
    [
        (
            "raises",
            "agent_raised",
            r"agent_troubles.py:\d+: KeyError: 'left' \(agent .*Troubled with seed 7\)\n    raise",
        ),
        ("exits", "agent_raised", r"agent_troubles.py:\d+: SystemExit: 3"),
        ("returns_a_number", "agent_raised", r"agent_troubles.py:\d+: run returned a float; return Result"),
        ("missing", "agent_raised", r"agent_troubles.py:\d+: AttributeError"),
        ("dies", "agent_died", "exit code -9, without a result"),
        ("forks_without_end", "agent_died", "it started more than 1000 processes"),
    ],
)
def test_an_agent_that_fails_has_no_result_and_the_next_one_runs(trouble: str, reason: str, message: str) -> None:
    async def run() -> None:
        async with started() as pool:
            with pytest.raises(AgentFailure, match=message) as caught:
                await play(pool, trouble, 7)
            assert (caught.value.reason, pool.failures) == (reason, {reason: 1})
            assert (await play(pool, "nothing", 8)).metrics == {"seed": 8.0, "key": 1.0}

    asyncio.run(run())


def test_an_agent_that_hangs_is_killed_at_its_deadline_with_what_it_started_and_others_go_on() -> None:
    async def run() -> None:
        async with started() as pool:
            await play(pool, "nothing")
            hangs = asyncio.create_task(play(pool, "hangs", 7, 5.0))
            assert (await play(pool, "nothing", 8)).reward == 1.0
            with pytest.raises(AgentFailure, match=r"agent_troubles.py:\d+: it was not over after 5 s") as caught:
                await hangs
            assert caught.value.reason == "agent_hung"
            await no_daemon()

    asyncio.run(run())


@pytest.mark.parametrize("how", ["returns", "cancelled", "pool closed", "process killed"])
def test_what_an_agent_started_ends_with_it(how: str) -> None:
    async def run() -> None:
        async with started() as pool:
            if how == "returns":
                await play(pool, "leaves_a_daemon")
            else:
                hangs = asyncio.create_task(play(pool, "hangs"))
                while not daemon_runs():
                    await asyncio.sleep(0.05)
                if how == "cancelled":
                    hangs.cancel()
                elif how == "pool closed":
                    pool.close()
                else:
                    await asyncio.sleep(4)  # the watchdogs look once a second
                    psutil.Process(pool.processes.processes[0].pid).kill()
                failed = asyncio.CancelledError if how == "cancelled" else AgentFailure
                with pytest.raises(failed):
                    await hangs
            await no_daemon()
            if how != "pool closed":
                assert (await play(pool, "nothing")).reward == 1.0

    asyncio.run(run())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_agents_that_start_programs_while_their_parent_is_killed_leave_none(number: signal.Signals) -> None:
    async def run() -> None:
        async with started() as pool:
            agents = [asyncio.create_task(play(pool, "starts_programs", seed)) for seed in range(4)]
            while not daemon_runs():
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.5)  # a watchdog that looks once a second knows the agents then
            psutil.Process(pool.processes.processes[0].pid).send_signal(number)
            assert all(isinstance(end, AgentFailure) for end in await asyncio.gather(*agents, return_exceptions=True))
            await no_daemon()

    asyncio.run(run())


def test_output_without_end_fills_no_log(tmp_path: Path) -> None:
    async def run() -> None:
        async with started(tmp_path / "agents.log") as pool:
            assert (await play(pool, "prints")).reward == 1.0

    asyncio.run(run())
    assert 2**15 < (tmp_path / "agents.log").stat().st_size < 2**17


PROGRAM = """
import json, os, subprocess, sys
task = json.load(open(sys.argv[1]))
subprocess.Popen(["sleep", "36" + os.environ["ROLL_TEST_SESSION"]])  # which holds the output open
print("working on", task["question"], os.environ["OPENAI_API_KEY"])
if task["question"] == "bad":
    sys.exit("no such thing")
print(json.dumps({"reward": len(task["question"]), "metrics": {"seed": int(sys.argv[2])}}))
print()
"""


def test_a_program_gets_its_task_and_its_last_line_is_the_result(tmp_path: Path) -> None:
    (tmp_path / "solve.py").write_text(PROGRAM)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"question": text}) + "\n" for text in ("four", "bad")))
    command = (sys.executable, str(tmp_path / "solve.py"), "{task_file}", "{seed}")
    spec = AgentSpec("Program", None, command, (str(tmp_path / "tasks.jsonl"),))

    async def run() -> None:
        async with started(tmp_path / "log") as pool:
            assert await pool.run(spec, 2, {"OPENAI_API_KEY": "k"}) == Result(4.0, {"seed": 2.0})
            with pytest.raises(AgentFailure, match="ended with exit code 1; it printed: no such thing"):
                await pool.run(spec, 3, {"OPENAI_API_KEY": "k"})
            await no_daemon()

    asyncio.run(run())
    assert "working on four k" in (tmp_path / "log").read_text()
