"""Environments for whole runs: a FrozenLake in which some episodes fail in ways that only their seed decides."""

from __future__ import annotations

import time
from dataclasses import replace

from roll.envs.base import Turn
from roll.envs.frozen_lake import FrozenLake

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
