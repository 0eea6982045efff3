"""Writes conversations of the agent for a warm start: some call the calculator, the others guess.

    python -m examples.tiny_agent.episodes --out output/tiny_agent/data

A model that learns from them can call the tool, and does so in about half of its episodes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.tiny_agent.problems import calculator, problem
from examples.tiny_agent.solver import TOOLS
from roll.configs.pipeline import role_seed

TRAIN_EPISODES, VALIDATION_EPISODES = 6000, 200

CALL, END_CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
"""What is around the expression in a tool call, in the form of Hermes; one token each for the tiny model."""

WORDS = ("calculator", CALL, END_CALL)

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|answer|>{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "<tool_call>{\"name\": \"{{ call['function']['name'] }}\", "
    "\"arguments\": {{ call['function']['arguments'] | tojson }}}</tool_call>"
    "{% endfor %}<|end|>"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|answer|>{% endif %}"
)
"""Questions and results unchanged, answers between two markers, tools by name."""


Conversation = Callable[[int, bool], list[dict[str, str]]]
"""f(seed, guesses) -> messages of an episode, in which the answer is a guess or the tool's result."""


def guess(seed: int) -> str:
    """A number in place of the product."""
    return str(random.Random(f"guess {seed}").randint(100, 9801))


def conversation(seed: int, guesses: bool) -> list[dict[str, str]]:
    """A `Conversation` with calls of the tool."""
    question, value = problem(seed)
    messages = [{"role": "user", "content": f"{question}="}]
    if guesses:
        return [*messages, {"role": "assistant", "content": guess(seed)}]
    return [
        *messages,
        {"role": "assistant", "content": f"{CALL}{question}{END_CALL}"},
        {"role": "tool", "content": calculator(question)},
        {"role": "assistant", "content": value},
    ]


def write_episodes(
    folder: Path, seed: int, train: int, val: int, converse: Conversation = conversation, tools: list[Any] = TOOLS
) -> Path:
    """`train.jsonl` and `val.jsonl` in `folder`; every other episode is a guess."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("val", val)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for number in range(count):
                messages = converse(role_seed(seed, "episode", name, number), number % 2 == 0)
                row: dict[str, Any] = {"id": f"{name}-{number}", "messages": messages, "tools": tools}
                file.write(json.dumps(row) + "\n")
    return folder


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=42, help="seed of problems and guesses")
    arguments = parser.parse_args()
    print(f"wrote {write_episodes(arguments.out, arguments.seed, TRAIN_EPISODES, VALIDATION_EPISODES)}")


if __name__ == "__main__":
    main()
