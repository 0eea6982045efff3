"""Reward functions that the runs under test name in their configuration."""

from __future__ import annotations

import zlib
from typing import Any


def length_reward(response: str, ground_truth: str, config: Any) -> float:
    """Something a random model varies in: the share of characters that are digits or lower-case letters."""
    return sum(character.isdigit() or character.islower() for character in response) / 6


def text_reward(response: str, ground_truth: str, config: Any) -> float:
    """A number in [0, 1) that tells texts apart."""
    return zlib.crc32(response.encode()) / 2**32


def few_reward(response: str, ground_truth: str, config: Any) -> float:
    """The opposite of `length_reward`."""
    return 1.0 - length_reward(response, ground_truth, config)
