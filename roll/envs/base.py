"""What a text environment is: gymnasium's conventions, with text for observations and actions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import gymnasium
from gymnasium.error import ResetNeeded

from roll.configs.errors import Problem
from roll.configs.schema import option
from roll.envs.metrics import Aggregation
from roll.envs.options import read_config
from roll.envs.spaces import FreeText


@dataclass
class EnvConfig:
    """Options that every environment has. An environment with more subclasses it; every field has a default."""

    max_steps: int = option(20, "Actions after which an episode that goes on is cut off.", ge=1)
    env_instruction: str | None = option(None, "The rules in words of your own; null takes the built-in ones.")

    def check(self) -> Iterable[Problem]:
        """What is wrong between options, each of which is allowed by itself; a problem's path is the option's name."""
        return ()


@dataclass(frozen=True)
class Turn:
    """What one action led to.

    Attributes:
        observation: what the model reads next. It never repeats what the model wrote, which may hold control tokens.
        reward: of this action alone, finite.
        terminated: the episode is over by its own rules; that it is cut off is not for the environment to say.
        metrics: a value for each of the environment's METRICS.
    """

    observation: str
    reward: float
    terminated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class TextEnv(gymnasium.Env[str, str]):
    """An environment whose observations and actions are text.

    Subclasses write `rules`, `begin` and `act`. Seeding, the step limit and the order of calls are taken care of here,
    alike for all. All randomness comes from `self.np_random`, so a seed decides an episode as far as the actions do, in
    any process, and no generator outside is touched. An environment pickles, also in mid-episode; what travels best is
    what it is made from, `env_type` and `env_config`.

    Attributes:
        config_class: dataclass of the options, a subclass of `EnvConfig`.
        METRICS: name of every metric of an action, and how an episode's values become one.
        config: the options of this environment.
        steps: actions taken in this episode.
    """

    config_class: ClassVar[type[EnvConfig]] = EnvConfig
    METRICS: ClassVar[Mapping[str, Aggregation]] = {}
    metadata: dict[str, Any] = {"render_modes": []}
    config: EnvConfig

    def __init__(self, **env_config: Any) -> None:
        """Takes the options of `config_class` by name; draws nothing before `reset`.

        Raises:
            ConfigError: an option is unknown, of the wrong type or out of bounds, or two do not go together.
        """
        self.config = read_config(self.config_class, env_config)
        self.observation_space = FreeText()
        self.action_space = FreeText()
        self.steps = 0
        self._running = False

    @abstractmethod
    def rules(self) -> str:
        """What the model is told once, before the first observation: the task, the symbols, how to answer."""

    @abstractmethod
    def begin(self) -> str:
        """Draws a task from `self.np_random` and returns the first observation."""

    @abstractmethod
    def act(self, text: str) -> Turn:
        """Does what the text says; text that cannot be understood leaves the state as it is."""

    @property
    def instruction(self) -> str:
        """`env_instruction` where it is given, else the rules."""
        return self.rules() if self.config.env_instruction is None else self.config.env_instruction

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode.

        Args:
            seed: decides the episode; None goes on with the generator of the last one.
            options: gymnasium's; nothing here reads them.

        Returns:
            The first observation, and an empty info.
        """
        super().reset(seed=seed)
        self.steps = 0
        self._running = True
        return self.begin(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes what the model wrote.

        Returns:
            Observation, reward, whether the episode is over, whether it is cut off after `max_steps` actions without
            being over, and an info whose "metrics" has a value for each of METRICS.

        Raises:
            ResetNeeded: no episode has begun, or the last one has ended.
            TypeError: the action is not text.
        """
        if not self._running:
            raise ResetNeeded(f"{type(self).__name__}.step: no episode is running; call reset first")
        if not isinstance(action, str):
            raise TypeError(f"{type(self).__name__}.step: the action is text, not {type(action).__name__}")
        self.steps += 1
        turn = self._checked(self.act(action))
        truncated = not turn.terminated and self.steps >= self.config.max_steps
        self._running = not (turn.terminated or truncated)
        return turn.observation, float(turn.reward), bool(turn.terminated), truncated, {"metrics": dict(turn.metrics)}

    def _checked(self, turn: Turn) -> Turn:
        """The turn, if it keeps what its class promises: a mistake here would otherwise be trained on."""
        name = f"{type(self).__name__}.act"
        if not isinstance(turn.observation, str):
            raise TypeError(f"{name}: the observation is {type(turn.observation).__name__}, not text")
        if not math.isfinite(turn.reward):
            raise ValueError(f"{name}: the reward is {turn.reward}")
        if turn.metrics.keys() != self.METRICS.keys():
            raise ValueError(f"{name}: metrics {sorted(turn.metrics)} are not those of METRICS, {sorted(self.METRICS)}")
        return turn
