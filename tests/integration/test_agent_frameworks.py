"""Agents of frameworks as they are, each in an environment with packages of its own, through `command`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from roll.plan.agent_trial import Script, play_script
from roll.usercode.agents.pool import AgentPool, AgentSpec

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples" / "agent_frameworks"


@pytest.mark.parametrize(
    ("program", "packages", "script", "requests"),
    [
        ("openai_agents", "openai-agents==0.24.0", Script(1, "391"), 2),
        ("langgraph_graph", "langgraph==1.2.24 langchain-openai==1.7.4", Script(1, "391"), 2),
        ("verifiers_env", "verifiers==0.1.14", Script(1, "391"), 2),
        ("smolagents_code", "smolagents[openai]==1.26.0",
         Script(0, "Thought: I compute it.\n<code>\nfinal_answer(17 * 23)\n</code>"), 1),
    ],
)  # fmt: skip
def test_an_agent_of_a_framework_plays_an_episode(
    program: str, packages: str, script: Script, requests: int, tmp_path: Path
) -> None:
    python = str(tmp_path / "environment" / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "environment")], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages.split()], check=True)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"question": "What is 17 * 23?", "answer": "391"}) + "\n")
    spec = AgentSpec(program, None, (python, str(EXAMPLES / f"{program}.py"), "{task_file}"), (str(tasks),))

    async def play() -> None:
        pool = AgentPool(1, 60.0)
        try:
            result, failure, end = await play_script(pool, spec, script, 10, 120.0)
        finally:
            pool.close()
        assert not failure and result is not None and result.reward == 1.0
        assert (end.metrics["requests"], end.metrics["branches"], end.warnings) == (requests, 1, {})

    asyncio.run(play())
    assert len((EXAMPLES / f"{program}.py").read_text().splitlines()) <= 60
