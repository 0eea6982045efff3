"""Environments for whole runs: a FrozenLake in which some episodes fail in ways that only their seed decides."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from roll.envs.base import TextEnv, Turn
from roll.envs.frozen_lake import FrozenLake
from tests.integration.gateway_agents import reward_of

KINDS, RAISES, HANGS = 32, 9, 10
"""One of 32 seeds raises and one hangs, in the second action, so that the episode has begun."""

SLOW_S = 2.0
"""Seconds of the second action of every fourth seed: longer than a step of training, so that an update comes before."""


class ThinIce(FrozenLake):
    """FrozenLake, but for those seeds."""

    def reset(self, *, seed=None, options=None):
        """Remembers the seed."""
        self._kind = (seed or 0) % KINDS
        return super().reset(seed=seed, options=options)

    def act(self, text: str) -> Turn:
        """Raises or hangs in the second action for some seeds; texts with more distinct characters score higher.

        An untrained model hardly ever names a move, and groups of equal scores would teach it nothing.
        """
        if self.steps == 2 and self._kind == RAISES:
            raise RuntimeError("the ice broke")
        if self.steps == 2 and self._kind == HANGS:
            time.sleep(1000)
        if self.steps == 2 and self._kind % 4 == 0:
            time.sleep(SLOW_S)
        turn = super().act(text)
        return replace(turn, reward=turn.reward + 0.1 * len(set(text)))


class Room(TextEnv):
    """What `gateway_agents.Teller` says to the policy, as an environment of three turns."""

    def rules(self) -> str:
        return ""

    def reset(self, *, seed=None, options=None):
        """Remembers the seed."""
        self._asked = json.dumps(seed)
        return super().reset(seed=seed, options=options)

    def begin(self) -> str:
        self._said: list[str] = []
        return self._asked

    def act(self, text: str) -> Turn:
        self._said.append(text)
        over = len(self._said) == 3
        return Turn("More?", reward_of(self._said) if over else 0.0, over)
