"""A reward function that fails as the response requests; reward processes import it by name."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from roll.configs.rewards import RewardConfig

SELF_TEST = (("1", "1", True), ("2", "1", True))


class Panic(BaseException):
    """What an extension in Rust raises: not an Exception."""


def behave(response: str, ground_truth: str, config: RewardConfig) -> Any:
    """Fails as the response requests; a response that is a number is its own score."""
    if response == "hang":
        time.sleep(600)
    if response == "raise":
        raise RuntimeError("cannot judge this")
    if response == "panic":
        raise Panic("in an extension")
    if response == "exit":
        raise SystemExit(3)
    if response == "die":
        os._exit(7)
    odd = {"nan": float("nan"), "infinite": float("-inf"), "text": "good", "nothing": None, "two": [1.0, 0.0]}
    return odd[response] if response in odd else float(response)


def note_and_hang(response: str, ground_truth: str) -> float:
    """Writes the response to the file that the ground truth names, then hangs where the response says so."""
    with open(ground_truth, "a") as file:
        file.write(f"{response}\n")
    if response.startswith("hang"):
        time.sleep(600)
    return 1.0


def allocate(response: str) -> float:
    """Takes as many MiB of memory as the response says."""
    return float(len(bytearray(int(response) * 2**20)) > 0)


def rank(responses: list[str]) -> list[float]:
    """The rank of each response by its length."""
    return [float(sorted(responses, key=len).index(response)) for response in responses]


async def slow(response: str) -> dict[str, float]:
    """Waits as long as the response says."""
    await asyncio.sleep(float(response))
    return {"score": float(response), "loop": float(id(asyncio.get_running_loop()))}


NOT_A_FUNCTION = 3
