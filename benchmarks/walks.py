"""An environment for measurements: episodes of a length that only the seed decides, most short and a few long."""

from __future__ import annotations

from roll.envs import TextEnv, Turn

END = 0.2
"""Chance that an action is the last, so an episode has 5 on average, and up to `max_steps`."""


class Walk(TextEnv):
    """Says where one is; every answer is a step."""

    def rules(self) -> str:
        """Nothing to know."""
        return "Walk."

    def begin(self) -> str:
        """At the start."""
        return "You are at 0. Where do you go?"

    def act(self, text: str) -> Turn:
        """One step on, or the end."""
        return Turn(f"You are at {self.steps}. Where do you go?", float(len(text)), self.np_random.random() < END)
