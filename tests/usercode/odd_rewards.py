"""A reward function that fails as the response requests; reward processes import it by name."""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import signal
import subprocess
import time
from typing import Any

from roll.configs.scoring.rewards import RewardConfig

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


def count_ids(response: str, prompt_text: str, prompt_ids: list[int], response_ids: list[int]) -> float:
    """How much it gets of a prompt and a response."""
    return float(len(prompt_text) + len(prompt_ids) + len(response_ids))


def allocate(response: str) -> float:
    """Takes as many MiB of memory as the response says."""
    return float(len(bytearray(int(response) * 2**20)) > 0)


def take_memory(response: str) -> float:
    """Takes memory that RLIMIT_DATA does not count, until it is killed; or the hard limit in MiB."""
    if response == "limit":
        return resource.getrlimit(resource.RLIMIT_DATA)[1] / 2**20
    if response == "shared":
        fill(320)
    elif response == "in children":
        for _ in range(4):
            if os.fork() == 0:
                fill(80)
                time.sleep(60)
    time.sleep(60)
    return 0.0


def fill(mebibytes: int) -> None:
    """Writes to every page of a shared mapping, which stays."""
    mapped = mmap.mmap(-1, mebibytes * 2**20)
    for offset in range(0, len(mapped), mmap.PAGESIZE):
        mapped[offset] = 1
    kept.append(mapped)


kept: list[mmap.mmap] = []


def be_stopped_once(response: str, ground_truth: str) -> float:
    """Is stopped by a signal in its first call; the ground truth names a file that the first call makes."""
    if not os.path.exists(ground_truth):
        open(ground_truth, "w").close()
        os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


async def be_stopped_for_a_moment_once(response: str, ground_truth: str) -> float:
    """As `be_stopped_once`, but goes on after 2 s."""
    if not os.path.exists(ground_truth):
        subprocess.Popen(["/bin/sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"])
    be_stopped_once(response, ground_truth)
    await asyncio.sleep(0.1)
    return 1.0


def be_killed_once(response: str, ground_truth: str) -> float:
    """Is killed by its first call; the ground truth names a file that the first call makes."""
    if not os.path.exists(ground_truth):
        open(ground_truth, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def rank(responses: list[str]) -> list[float]:
    """The rank of each response by its length."""
    return [float(sorted(responses, key=len).index(response)) for response in responses]


running: list[str] = []
"""Calls of `slow` that have begun and have not ended."""


async def slow(response: str) -> dict[str, float]:
    """Waits as long as the response says."""
    running.append(response)
    count = len(running)
    await asyncio.sleep(float(response))
    running.remove(response)
    return {"score": float(response), "loop": float(id(asyncio.get_running_loop())), "running": float(count)}


def leak(calls: Any) -> None:
    """In place of `score_chunk`: lets an exception out of the reward process."""
    raise SystemExit("beyond the calls")


NOT_A_FUNCTION = 3


def die(config: object) -> None:
    """Ends the process that is to import a reward."""
    os._exit(3)
