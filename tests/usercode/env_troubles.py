"""Environments that raise, hang or exit when the action requests it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

from roll.envs import TextEnv, Turn


class Trouble(TextEnv):
    """Counts steps and does what the action says."""

    METRICS = {"count": "last"}

    def rules(self) -> str:
        return "count"

    def begin(self) -> str:
        self.start = int(self.np_random.integers(1000))
        return f"{self.start}"

    def act(self, text: str) -> Turn:
        if text == "raise":
            raise KeyError("lost")
        if text == "leave":
            sys.exit(3)
        if text == "exit":
            os._exit(3)
        while text == "spin":
            pass
        if text == "hold the lock":
            re.match("(a+)+b", "a" * 64)
        if text == "huge":
            return self.turn("x" * (2**28 + 1))
        if text == "child":
            return self.turn(str(subprocess.Popen(["sleep", "600"]).pid))
        if text == "children":  # of this process, of a session of its own, and of a parent that has ended
            programs = [
                subprocess.Popen(["sleep", "1000"]).pid,
                subprocess.Popen(["sleep", "1000"], start_new_session=True).pid,
                int(subprocess.check_output(["/bin/sh", "-c", "sleep 1000 >/dev/null & echo $!"])),
            ]
            return self.turn(" ".join(map(str, programs)))
        if text.startswith("sleep"):
            time.sleep(float(text.split()[1]))
        if text == "number":
            return Turn(7, 0.0, metrics={"count": 0.0})  # type: ignore[arg-type]
        if text == "process":
            return self.turn(f"{os.getpid()} {os.environ.get('OMP_NUM_THREADS')} {'torch' in sys.modules}")
        return self.turn(f"{self.start + self.steps}")

    def turn(self, observation: str) -> Turn:
        return Turn(observation, 0.5, metrics={"count": float(self.steps)})


class Irreproducible(Trouble):
    """An environment whose first observation is the process id."""

    def begin(self) -> str:
        return f"{os.getpid()}"
