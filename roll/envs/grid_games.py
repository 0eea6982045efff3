"""The base class of grid games whose actions are four moves, and its options."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from roll.base.errors import Problem
from roll.base.schema import option
from roll.envs.base import Aggregation, EnvConfig, TextEnv, Turn
from roll.envs.text_actions import ANSWER, ActionPattern

MOVES = ("Left", "Down", "Right", "Up")
"""In the order of gymnasium's FrozenLake, whose actions are 0 to 3."""

MOVE_CHOICES = ", ".join(MOVES[:-1]) + f" or {MOVES[-1]}"
"""MOVES as a rules text lists them."""


@dataclass
class MoveConfig(EnvConfig):
    """Options of a grid game."""

    action_pattern: str = option(ANSWER, "Regular expression whose last group holds the action.")
    format_penalty: float = option(0.0, "Reward of a text without a valid action; zero or below.", le=0)

    def check(self) -> Iterable[Problem]:
        """The pattern is valid, and the built-in rules can show an answer in its format."""
        try:
            pattern = ActionPattern(self.action_pattern, MOVES)
        except ValueError as error:
            yield Problem("action_pattern", str(error))
            return
        if self.env_instruction is None and pattern.example("Right") is None:
            needed = "the built-in rules cannot show an example of an answer; set env_instruction"
            yield Problem("action_pattern", f"{self.action_pattern!r}: {needed}")


class MoveEnv(TextEnv):
    """A grid game in which each action is one of MOVES. The observation is a drawing of the whole state.

    A text without a valid move has the reward `format_penalty`, counts as a step and does not change the state.
    """

    config_class = MoveConfig
    config: MoveConfig
    METRICS: ClassVar[Mapping[str, Aggregation]] = {
        "action_is_valid": "mean",
        "action_is_effective": "mean",
        "success": "last",
        "format_penalty": "mean",
    }

    def __init__(self, **env_config: Any) -> None:
        super().__init__(**env_config)
        self._pattern = ActionPattern(self.config.action_pattern, MOVES)

    @abstractmethod
    def draw(self) -> str:
        """The state as text: one character per cell, one line per row."""

    @abstractmethod
    def move(self, move: str) -> tuple[float, bool]:
        """Executes one of MOVES; returns the reward and whether the game has ended."""

    @property
    @abstractmethod
    def won(self) -> bool:
        """Whether the goal of the game is reached."""

    def act(self, text: str) -> Turn:
        """Executes one move. It is effective if the drawing changed."""
        move, before = self._pattern.read(text), self.draw()
        penalty = self.config.format_penalty if move is None else 0.0
        reward, terminated = (penalty, False) if move is None else self.move(move)
        after = self.draw()
        metrics = {
            "action_is_valid": float(move is not None),
            "action_is_effective": float(after != before),
            "success": float(self.won),
            "format_penalty": penalty,
        }
        return Turn(after, reward, terminated, metrics)

    def answer_format(self) -> str:
        """The sentence of the rules that shows an answer in the format of `action_pattern`."""
        return f"Answer with one of {', '.join(MOVES)}, written like this: {self._pattern.example('Right')}"
