"""A CodeAgent of smolagents, as a program: `command: [PYTHON, -m, examples.tiny_smolagents.solver, "{seed}"]`.

PYTHON is that of an environment with the package `smolagents[openai]`. Reward 1 for the right product.
"""

import json
import os
import sys

from smolagents import ChatMessage, CodeAgent, LogLevel, MessageRole, OpenAIModel, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

from examples.tiny_agent import problems


@tool  # type: ignore[untyped-decorator]
def calculator(expression: str) -> str:
    """Multiplies two numbers.

    Args:
        expression: such as 12*34
    """
    return problems.calculator(expression)


class OneStep(CodeAgent):  # type: ignore[misc]
    """Without a request for an answer after a step that failed."""

    def provide_final_answer(self, task: str) -> ChatMessage:
        return ChatMessage(role=MessageRole.ASSISTANT, content="")


question, value = problems.problem(int(sys.argv[1]))
model = OpenAIModel(model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
templates = EMPTY_PROMPT_TEMPLATES  # its own instructions have 10,000 characters, each a token of the tiny model
agent = OneStep([calculator], model, templates, max_steps=1, verbosity_level=LogLevel.OFF)
print(json.dumps({"reward": float(str(agent.run(f"{question}=")) == value)}))
