"""Agents for whole runs: they talk to the policy in several conversations, and some fail in ways their seed decides."""

from __future__ import annotations

import asyncio
import json
import os
import time

from openai import AsyncOpenAI, OpenAI

from roll.agents import Agent, Result

KINDS, RAISES, HANGS, DIES, HOARDS = 16, 5, 6, 7, 8
"""One of 16 seeds raises, one hangs, one is killed and one asks too often, after the first answer."""

SLOW_S = 2.0
"""Pause of every fourth seed between answers: longer than a step of training, so that an update comes before."""


def reward_of(texts: list[str]) -> float:
    return 0.1 * len({character for text in texts for character in text})


class Talker(Agent):
    """Three answers in one conversation that it sends back edited, and one of another conversation in between."""

    def run(self, task: dict, seed: int) -> Result:
        policy, kind = OpenAI(timeout=120), seed % KINDS
        messages, said = [{"role": "user", "content": f"Say {seed % 10}."}], []
        for turn in range(3):
            answer = policy.chat.completions.create(model="policy", messages=messages, temperature=0.3).choices[0]
            said.append(answer.message.content)
            messages += [{**answer.message.model_dump(), "content": answer.message.content.strip()}]
            messages += [{"role": "user", "content": "More?"}]
            if turn == 0:
                self.fail(kind, policy, messages)
                helper = [{"role": "user", "content": f"Check: {turn}"}]
                said.append(asyncio.run(self.streamed(helper)))
            if kind % 4 == 0:
                time.sleep(SLOW_S)
        return Result(reward_of(said), {"letters": float(len("".join(said)))})

    async def streamed(self, messages: list[dict]) -> str:
        chunks = await AsyncOpenAI().chat.completions.create(model="policy", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    def fail(self, kind: int, policy: OpenAI, messages: list[dict]) -> None:
        if kind == RAISES:
            raise RuntimeError("the agent broke")
        if kind == HANGS:
            time.sleep(1000)
        if kind == DIES:
            os.kill(os.getpid(), 9)
        while kind == HOARDS:
            policy.chat.completions.create(model="policy", messages=messages, max_tokens=1)


class Teller(Agent):
    """One conversation of three answers, as `Room` plays it."""

    def run(self, task: dict, seed: int) -> Result:
        policy, said = OpenAI(), []
        messages = [{"role": "user", "content": json.dumps(seed)}]
        for _ in range(3):
            answer = policy.chat.completions.create(model="policy", messages=messages).choices[0].message
            said.append(answer.content)
            messages += [answer, {"role": "user", "content": "More?"}]
        return Result(reward_of(said))
