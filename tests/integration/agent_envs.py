"""Environments for whole runs: a lake on which some episodes go wrong in ways that only their seed decides."""

from __future__ import annotations

import os
import time

from roll.envs.base import Turn
from roll.envs.frozen_lake import FrozenLake

KINDS = 16
"""One seed in so many raises, one hangs, one ends its process; in the second action, so that a part was played."""


class ThinIce(FrozenLake):
    """FrozenLake, but for those seeds."""

    def reset(self, *, seed=None, options=None):
        """Remembers the seed."""
        self._kind = (seed or 0) % KINDS
        return super().reset(seed=seed, options=options)

    def act(self, text: str) -> Turn:
        """Goes wrong in the second action where the seed says so."""
        if self.steps == 2 and self._kind == 0:
            raise RuntimeError("the ice broke")
        if self.steps == 2 and self._kind == 1:
            time.sleep(1000)
        if self.steps == 2 and self._kind == 2:
            os._exit(3)
        return super().act(text)
