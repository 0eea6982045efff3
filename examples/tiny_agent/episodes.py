"""Writes conversations of the agent for a warm start: some call the calculator, the others guess.

    python -m examples.tiny_agent.episodes --out output/tiny_agent/data

A model that learns from them can call the tool, and does so in about half of its episodes.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from examples.tiny_agent.solver import TOOLS, calculator, problem
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


def conversation(seed: int, guesses: bool) -> list[dict[str, str]]:
    """One episode as chat messages, in which the answer is a guess or the tool's result."""
    question, value = problem(seed)
    messages = [{"role": "user", "content": f"{question}="}]
    if guesses:
        guess = random.Random(f"guess {seed}").randint(100, 9801)
        return [*messages, {"role": "assistant", "content": str(guess)}]
    return [
        *messages,
        {"role": "assistant", "content": f"{CALL}{question}{END_CALL}"},
        {"role": "tool", "content": calculator(question)},
        {"role": "assistant", "content": value},
    ]


def write_episodes(folder: Path, seed: int, train: int, val: int) -> Path:
    """`train.jsonl` and `val.jsonl` in `folder`; every other episode is a guess."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("val", val)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for number in range(count):
                messages = conversation(role_seed(seed, "episode", name, number), guesses=number % 2 == 0)
                row: dict[str, Any] = {"id": f"{name}-{number}", "messages": messages, "tools": TOOLS}
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
