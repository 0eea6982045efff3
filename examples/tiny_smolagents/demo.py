"""An agent of smolagents learns to use its tool: the recipe of `tiny_agent` with an agent that writes code.

    python -m examples.tiny_smolagents.demo --out output/demo-smolagents

Installs smolagents in an environment of its own below the output folder, where it also writes what the demo of
`tiny_agent` writes.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from examples import stages
from examples.tiny_agent import episodes
from examples.tiny_agent.demo import train, warm_inputs
from examples.tiny_agent.model import make_model
from examples.tiny_agent.problems import problem

PACKAGES = "smolagents[openai]==1.26.0"

CALL, END_CALL = '<code>final_answer(calculator("', '"))</code>'
GUESS, END_GUESS = "<code>final_answer(", ")</code>"
"""What is around the expression or the guess in the code of the agent; one token each for the tiny model."""

WARM = ["target_loss=0.75", "prompt_length=24"]
"""The warm start: it knows most of the form, and the prompt is longer than that of `tiny_agent`."""


def conversation(seed: int, guesses: bool) -> list[dict[str, str]]:
    """An episode of the agent: its code has a guess, or calls the calculator."""
    question, _ = problem(seed)
    code = f"{GUESS}{episodes.guess(seed)}{END_GUESS}" if guesses else f"{CALL}{question}{END_CALL}"
    return [{"role": "user", "content": f"New task:\n{question}="}, {"role": "assistant", "content": code}]


def demo(out: Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """Runs every stage below `out` and returns the summary."""
    python, start = stages.environment(out / "environment", PACKAGES), time.perf_counter()
    stages.heading("[bold]An agent of smolagents learns to use its tool")
    base = make_model(out / "base", seed, (CALL, END_CALL, GUESS, END_GUESS))
    data = episodes.write_episodes(
        out / "data", seed, episodes.TRAIN_EPISODES, episodes.VALIDATION_EPISODES, conversation, []
    )
    command = json.dumps([str(python), "-m", "examples.tiny_smolagents.solver", "{seed}"])
    file = Path(__file__).parent / "agent_config.yaml"
    warm = [*warm_inputs(base, data), *WARM]
    return train(out, seed, start, warm, file, [f"custom_envs.Solver.command={command}", *overrides])


if __name__ == "__main__":
    stages.main(__doc__ or "", "output/demo-smolagents", "right answers ... to 64 new problems", demo)
