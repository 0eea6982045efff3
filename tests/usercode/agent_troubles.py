"""An agent that does what the variable TROUBLE says; `task` has the folder for what it leaves."""

import asyncio
import os
import subprocess
import sys
import time
from typing import Any

from roll.agents import Agent, Result


def daemon() -> list[str]:
    """What `leaves_a_daemon` starts; these tests find it by its seconds, also beside other ones."""
    return ["sleep", f"36{os.environ['ROLL_TEST_SESSION']}"]


class Troubled(Agent):
    """Ends as it is told."""

    def run(self, task: dict[str, Any], seed: int) -> Any:
        return getattr(self, os.environ["TROUBLE"])(task, seed)

    def nothing(self, task: dict[str, Any], seed: int) -> Result:
        return Result(1.0, {"seed": seed, "key": float(os.environ["OPENAI_API_KEY"] == f"key-{seed}")})

    async def coroutine(self, task: dict[str, Any], seed: int) -> Result:
        await asyncio.sleep(0.01)
        return Result(0.5)

    def raises(self, task: dict[str, Any], seed: int) -> Result:
        raise KeyError("left")

    def exits(self, task: dict[str, Any], seed: int) -> Result:
        sys.exit(3)

    def dies(self, task: dict[str, Any], seed: int) -> Result:
        os.kill(os.getpid(), 9)
        return Result(0.0)

    def returns_a_number(self, task: dict[str, Any], seed: int) -> float:
        return 1.0

    def prints(self, task: dict[str, Any], seed: int) -> Result:
        for _ in range(50):
            print("x" * 2**20)
        return Result(1.0)

    def forks_without_end(self, task: dict[str, Any], seed: int) -> Result:
        for _ in range(1500):
            subprocess.Popen(["sleep", "3600"])
        time.sleep(3600)
        return Result(1.0)

    def leaves_a_daemon(self, task: dict[str, Any], seed: int) -> Result:
        os.system(f"setsid setsid {' '.join(daemon())} < /dev/null > /dev/null 2>&1 &")
        return Result(1.0)

    def starts_programs(self, task: dict[str, Any], seed: int) -> Result:
        while True:
            subprocess.Popen(daemon(), start_new_session=True)
            time.sleep(0.005)

    def hangs(self, task: dict[str, Any], seed: int) -> Result:
        self.leaves_a_daemon(task, seed)
        while True:
            time.sleep(60)
