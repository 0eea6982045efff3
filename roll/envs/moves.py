"""What games on a grid share: one named move per turn, the same options and the same metrics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from roll.configs.errors import Problem
from roll.configs.schema import option
from roll.envs.actions import ANSWER, ActionPattern
from roll.envs.base import EnvConfig, TextEnv, Turn
from roll.envs.metrics import Aggregation

MOVES = ("Left", "Down", "Right", "Up")
"""In the order of gymnasium's FrozenLake, whose actions are 0 to 3."""


@dataclass
class MoveConfig(EnvConfig):
    """Options of a game on a grid."""

    action_pattern: str = option(ANSWER, "Regular expression whose last group holds the action.")
    format_penalty: float = option(0.0, "Reward of a text that holds no action; zero or below.", le=0)

    def check(self) -> Iterable[Problem]:
        """The pattern can be used, and the rules can show how to answer."""
        try:
            pattern = ActionPattern(self.action_pattern, MOVES)
        except ValueError as error:
            yield Problem("action_pattern", str(error))
            return
        if self.env_instruction is None and pattern.example("Right") is None:
            needed = "the built-in rules cannot show how to answer so; say it in env_instruction"
            yield Problem("action_pattern", f"{self.action_pattern!r}: {needed}")


class MoveEnv(TextEnv):
    """A game in which every turn is one of MOVES. The drawing shows the whole state, and is the observation.

    A text without a move costs `format_penalty` and a step, and changes nothing.
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
        """As `TextEnv`."""
        super().__init__(**env_config)
        self._pattern = ActionPattern(self.config.action_pattern, MOVES)

    @abstractmethod
    def draw(self) -> str:
        """The state as text: rows joined by line breaks, one character a cell."""

    @abstractmethod
    def move(self, move: str) -> tuple[float, bool]:
        """Moves, and returns the reward and whether the game is over."""

    @property
    @abstractmethod
    def won(self) -> bool:
        """Whether the state is the one to reach."""

    def act(self, text: str) -> Turn:
        """One move. It is effective when the drawing changed."""
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

    def how_to_answer(self) -> str:
        """The sentence of the rules that shows an answer as `action_pattern` wants it."""
        return f"Answer with one of {', '.join(MOVES)}, written like this: {self._pattern.example('Right')}"
