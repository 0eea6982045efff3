"""An agent of which every other session does what it must not, by chance of its key, and then goes on if it still can.

The variable FAULTY_AGENTS names a file to which each adds what it does.
"""

import os
import random
import subprocess
import time
from typing import Any

from openai import APIStatusError, OpenAI

from roll.agents import Agent, Result

SENT_BYTES = 50 * 2**20
TROUBLES = ("raises", "hangs", "forks", "is killed", "sends 1000 requests", "sends 50 MB", "uses another key")


class Faulty(Agent):
    """Two answers, and in between what a session must not do."""

    def run(self, task: dict[str, Any], seed: int) -> Result:
        chance = random.Random(os.environ["OPENAI_API_KEY"])
        policy = OpenAI(max_retries=0)
        messages: list[Any] = [{"role": "user", "content": f"Say {seed % 10}."}]
        said = [self.ask(policy, messages)]
        if seed and chance.random() < 0.5:  # 0 is the seed of the trial before a run
            self.misbehave(chance.choice(TROUBLES), messages)
        said.append(self.ask(policy, [*messages, {"role": "user", "content": "More?"}]))
        return Result(0.1 * len(set("".join(said))))

    def ask(self, policy: OpenAI, messages: list[Any]) -> str:
        answer = policy.chat.completions.create(model="policy", messages=messages)
        return answer.choices[0].message.content or ""

    def misbehave(self, trouble: str, messages: list[Any]) -> None:
        with open(os.environ["FAULTY_AGENTS"], "a") as file:
            file.write(f"{trouble}\n")
        if trouble == "raises":
            raise RuntimeError("the agent broke")
        if trouble == "hangs":
            time.sleep(1000)
        if trouble == "forks":
            for _ in range(20):
                subprocess.Popen(["setsid", "sleep", "3600"])
        if trouble == "is killed":
            os.kill(os.getpid(), 9)
        if trouble == "sends 1000 requests":
            for _ in range(1000):
                self.refused(OpenAI(max_retries=0), messages, 400, often=True)
        if trouble == "sends 50 MB":
            self.refused(OpenAI(max_retries=0), [{"role": "user", "content": "x" * SENT_BYTES}], 413)
        if trouble == "uses another key":
            self.refused(OpenAI(api_key="sk-of-another-session", max_retries=0), messages, 401)

    def refused(self, policy: OpenAI, messages: list[Any], status: int, often: bool = False) -> None:
        try:
            self.ask(policy, messages)
        except APIStatusError as error:
            assert error.status_code == status, error
        else:
            assert often, f"no error {status}"
