"""An agent with the plain `openai` client: it multiplies with a calculator, which it calls as a tool."""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI

from examples.tiny_agent.problems import calculator, problem
from roll.agents import Agent, Result

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Multiplies two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "such as 12*34"}},
                "required": ["expression"],
            },
        },
    }
]

MOST_REQUESTS = 3


def run_tool(arguments: str) -> str:
    """What the tool answers to the arguments that the model wrote."""
    try:
        return calculator(str(json.loads(arguments)["expression"]))
    except (ValueError, KeyError, TypeError):
        return "error"


class Solver(Agent):
    """Reward 1 for the right product."""

    def run(self, task: dict[str, Any], seed: int) -> Result:
        """Asks for the product, and runs the tool as often as the model calls it."""
        question, value = problem(seed)
        client, calls = OpenAI(), 0
        messages: list[Any] = [{"role": "user", "content": f"{question}="}]
        for _ in range(MOST_REQUESTS):
            answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
            if not answer.tool_calls:
                return Result(float((answer.content or "").strip() == value), {"tool_calls": calls})
            calls += len(answer.tool_calls)
            messages.append(answer)
            for call in answer.tool_calls:
                result = run_tool(call.function.arguments)  # type: ignore[union-attr]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return Result(0.0, {"tool_calls": calls})
