"""Helpers that play environments."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import settings

from roll.envs.base import TextEnv
from roll.envs.grid_games import MOVES

no_deadline = settings(deadline=None)
"""For property tests, which may be slow on a busy machine."""

OPTIONS = {
    "frozen_lake": {"format_penalty": -0.25},
    "sokoban": {"num_boxes": 2, "format_penalty": -0.25},
    "calculator": {"format_penalty": -0.25},
}
"""Options of each built-in environment, different from the defaults."""

INVALID_TEXTS = [
    "",
    "Right",
    "<answer>Right",
    "<answer>Sideways</answer>",
    "<answer></answer>",
    "<tool>",
    "\x00√\n<|im_end|>",
]
"""Texts that hold no valid action in any environment."""


class Step(NamedTuple):
    """The return value of `step`."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict


def texts(env: TextEnv, seed: int) -> list[str]:
    """Twenty random texts, with valid actions of each environment and invalid ones."""
    moves = [f"<answer>{move}</answer>" for move in MOVES]
    choices = [*moves, *moves, "<tool>12*(3+4)</tool>", "<tool>1/0</tool>", *INVALID_TEXTS]
    return [choices[index] for index in np.random.default_rng(seed).integers(len(choices), size=20)]


def play(env: TextEnv, seed: int, actions: list[str]) -> list:
    """The result of `reset`, then each step until the episode ends."""
    episode: list = [env.reset(seed=seed)]
    for text in actions:
        step = Step(*env.step(text))
        episode.append(step)
        if step.terminated or step.truncated:
            break
    return episode
