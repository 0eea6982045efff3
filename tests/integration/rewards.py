"""Reward functions that the runs under test name in their configuration."""

from __future__ import annotations

from typing import Any


def length_reward(response: str, ground_truth: str, config: Any) -> float:
    """Something a random model varies in: the share of characters that are digits or lower-case letters."""
    return sum(character.isdigit() or character.islower() for character in response) / 6


def broken_reward(response: str, ground_truth: str, config: Any) -> float:
    """Cannot score anything."""
    raise RuntimeError("the dog ate it")
