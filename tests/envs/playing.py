"""Ways to play an environment, shared by the tests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import settings

from roll.envs.base import TextEnv
from roll.envs.text_actions import MOVES

patient = settings(deadline=None)
"""For properties: how long a draw takes says nothing about it, and machines are busy."""

OURS = {
    "frozen_lake": {"format_penalty": -0.25},
    "sokoban": {"num_boxes": 2, "format_penalty": -0.25},
    "calculator": {"format_penalty": -0.25},
}
"""Every environment of the project, with options that the tests can tell from defaults."""

INVALID = [
    "",
    "Right",
    "<answer>Right",
    "<answer>Sideways</answer>",
    "<answer></answer>",
    "<tool>",
    "\x00√\n<|im_end|>",
]
"""Texts that are no action anywhere."""


class Step(NamedTuple):
    """What `step` returns."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict


def texts(env: TextEnv, seed: int) -> list[str]:
    """Twenty texts that mean something to some environment, and some that do to none."""
    moves = [f"<answer>{move}</answer>" for move in MOVES]
    choices = [*moves, *moves, "<tool>12*(3+4)</tool>", "<tool>1/0</tool>", *INVALID]
    return [choices[index] for index in np.random.default_rng(seed).integers(len(choices), size=20)]


def play(env: TextEnv, seed: int, actions: list[str]) -> list:
    """First observation, then every step until the episode ends."""
    episode: list = [env.reset(seed=seed)]
    for text in actions:
        step = Step(*env.step(text))
        episode.append(step)
        if step.terminated or step.truncated:
            break
    return episode
