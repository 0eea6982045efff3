"""An agent of the OpenAI Agents SDK, as a program: `command: [PYTHON, openai_agents.py, "{task_file}"]`.

PYTHON is that of an environment with the package `openai-agents`; this project need not be in it.
"""

import json
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_default_openai_api("chat_completions")
set_tracing_disabled(True)


@function_tool  # type: ignore[untyped-decorator]
def multiply(left: int, right: int) -> int:
    """Multiplies two numbers."""
    return left * right


task = json.loads(Path(sys.argv[1]).read_text())
agent = Agent(name="Solver", instructions="Answer with the number alone.", tools=[multiply], model="policy")
result = Runner.run_sync(agent, task["question"], max_turns=5)
print(json.dumps({"reward": float(str(result.final_output).strip() == task["answer"])}))
