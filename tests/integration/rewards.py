"""Reward functions that the runs under test name in their configuration."""

from __future__ import annotations

import zlib
from typing import Any

from roll.usercode.reward_pool import OTHER_ANSWER


def length_reward(response: str, ground_truth: str, config: Any) -> float:
    """Something a random model varies in: the share of characters that are digits or lower-case letters."""
    return sum(character.isdigit() or character.islower() for character in response) / 6


def text_reward(response: str, ground_truth: str, config: Any) -> float:
    """A number in [0, 1) that tells texts apart."""
    return zlib.crc32(response.encode()) / 2**32


def broken_reward(response: str, ground_truth: str, config: Any) -> float:
    """Passes the trial before a run and can score nothing else."""
    if response in (ground_truth, OTHER_ANSWER):
        return 0.0
    raise RuntimeError("the dog ate it")
