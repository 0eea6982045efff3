"""The text environment: gymnasium's interface with text observations and actions, checked options, and metrics."""

from __future__ import annotations

import math
import string
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args

import gymnasium
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Text

from roll.base.errors import ConfigError, Problem
from roll.base.schema import Converter, declared, option
from roll.base.text import nearest
from roll.configs.scoring.rewards import LARGEST_REWARD, is_trainable
from roll.configs.user_code import definition_of
from roll.loading.suggestions import unknown

Aggregation = Literal["mean", "sum", "last"]
"""How the values of a metric over an episode are combined: mean or sum over its actions, or that of the last action."""

RESERVED_METRICS = ("score", "num_actions")
"""Metrics that a run reports for every episode; an environment cannot use these names."""

SAMPLE_LENGTH = 64
"""Longest text that `FreeText` samples; membership has no limit."""


@dataclass
class EnvConfig:
    """Options of every environment. Environments with more options subclass it; every field has a default."""

    max_steps: int = option(20, "Actions after which an episode that has not ended is truncated.", ge=1)
    env_instruction: str | None = option(None, "Text that replaces the built-in rules; null uses the built-in rules.")

    def check(self) -> Iterable[Problem]:
        """Problems between options whose values are each valid; the path of a problem is the name of an option."""
        return ()


@dataclass(frozen=True)
class Turn:
    """Result of one action.

    Attributes:
        observation: text that the model reads next. It never repeats the model's text, which may hold control tokens.
        reward: of this action alone; finite. It and the sum over an episode are at most LARGEST_REWARD in size.
        terminated: the episode ended by its rules. Truncation after `max_steps` is not decided here.
        metrics: a value for each name in the environment's METRICS.
    """

    observation: str
    reward: float
    terminated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class TextEnv(gymnasium.Env[str, str]):
    """An environment whose observations and actions are text.

    Subclasses implement `rules`, `begin` and `act`. This class handles seeding, the step limit and the order of calls.
    All randomness comes from `self.np_random`, so the seed and the actions determine an episode in any process, and no
    other random generator is used. An environment can be pickled at any point of an episode; to make a new one in
    another process, send `env_type` and `env_config`.

    Attributes:
        config_class: dataclass of the options, a subclass of `EnvConfig`.
        METRICS: name of each metric of an action, and how its values over an episode are aggregated.
        config: the options of this environment.
        steps: actions taken in this episode.
    """

    config_class: ClassVar[type[EnvConfig]] = EnvConfig
    METRICS: ClassVar[Mapping[str, Aggregation]] = {}
    metadata: dict[str, Any] = {"render_modes": []}
    config: EnvConfig

    def __init__(self, **env_config: Any) -> None:
        """Args are the options of `config_class`, by name. The task is drawn in `reset`.

        Raises:
            ConfigError: an option is unknown, of the wrong type, out of bounds, or conflicts with another.
        """
        self.config = read_config(self.config_class, env_config)
        self.observation_space = FreeText()
        self.action_space = FreeText()
        self.steps = 0
        self._episode_reward_sum = 0.0
        self._running = False

    @abstractmethod
    def rules(self) -> str:
        """Text that the model reads once, before the first observation: task, symbols, format of an answer."""

    @abstractmethod
    def begin(self) -> str:
        """Draws a task from `self.np_random` and returns the first observation."""

    @abstractmethod
    def act(self, text: str) -> Turn:
        """Executes the action in the model's text. A text without a valid action must not change the state."""

    @property
    def instruction(self) -> str:
        return self.rules() if self.config.env_instruction is None else self.config.env_instruction

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode.

        Args:
            seed: determines the task; None continues with the random generator of the last episode.
            options: part of gymnasium's interface; ignored.

        Returns:
            The first observation and an empty info.
        """
        super().reset(seed=seed)
        self.steps = 0
        self._episode_reward_sum = 0.0
        self._running = True
        return self.begin(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Executes the text that the model wrote.

        Returns:
            Observation, reward, terminated, truncated (the episode reached `max_steps` without terminating), and an
            info whose "metrics" has a value for each name in METRICS.

        Raises:
            ResetNeeded: no episode has started, or the last one has ended.
            TypeError: the action is not text.
        """
        if not self._running:
            raise ResetNeeded(f"{type(self).__name__}.step: no episode is running; call reset first")
        if not isinstance(action, str):
            raise TypeError(f"{type(self).__name__}.step: the action is {type(action).__name__}, not text")
        self.steps += 1
        turn = self._checked(self.act(action))
        self._episode_reward_sum += float(turn.reward)
        truncated = not turn.terminated and self.steps >= self.config.max_steps
        self._running = not (turn.terminated or truncated)
        return turn.observation, float(turn.reward), bool(turn.terminated), truncated, {"metrics": dict(turn.metrics)}

    def _checked(self, turn: Turn) -> Turn:
        """Raises if `act` broke its contract, because the policy would otherwise be trained on the result."""
        if not isinstance(turn, Turn):
            kind = "None" if turn is None else f"a {type(turn).__name__}"
            raise TypeError(self._blamed(f"returned {kind}; return Turn(observation, reward)"))
        if not isinstance(turn.observation, str):
            raise TypeError(self._blamed(f"the observation is {type(turn.observation).__name__}, not text"))
        if not isinstance(turn.reward, Real):
            raise TypeError(self._blamed(f"the reward is {type(turn.reward).__name__}, not a number"))
        if not math.isfinite(turn.reward):
            raise ValueError(self._blamed(f"the reward is {turn.reward}, it must be finite"))
        for what, value in (
            ("reward is", turn.reward),
            ("rewards of the episode add up to", self._episode_reward_sum + turn.reward),
        ):
            if not is_trainable(value):
                problem = f"the {what} {float(value):g}, it must be at most {LARGEST_REWARD:g} in size"
                raise ValueError(self._blamed(problem))
        if turn.metrics.keys() != self.METRICS.keys():
            declared_names = sorted(self.METRICS)
            raise ValueError(self._blamed(f"the metrics are {sorted(turn.metrics)}, METRICS declares {declared_names}"))
        return turn

    def _blamed(self, problem: str) -> str:
        """The problem after the file and line of the method that caused it, which is no longer on the stack."""
        return f"{definition_of(type(self).act)}: {type(self).__name__}.act: {problem}"


class FreeText(Text):
    """The gymnasium space of all strings, including the empty one; samples are short printable ASCII.

    Every environment makes its own, because a space holds the random generator of its samples.
    """

    def __init__(self) -> None:
        super().__init__(SAMPLE_LENGTH, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __repr__(self) -> str:
        return "FreeText()"  # gymnasium's own lists every character


def metrics_problem(rules: Any) -> str | None:
    """Describes what is wrong with the METRICS of an environment; None if they are valid."""
    aggregations = ", ".join(get_args(Aggregation))
    if not isinstance(rules, Mapping):
        return f"METRICS is {type(rules).__name__}; it maps names to {aggregations}"
    for name, rule in rules.items():
        if not isinstance(name, str) or rule not in get_args(Aggregation):
            return f"METRICS has {name!r}: {rule!r}; it maps names to {aggregations}"
        if name in RESERVED_METRICS:
            return f"METRICS has {name!r}, which a run reports for every episode; use another name"
    return None


def episode_metrics(rules: Mapping[str, Aggregation], steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of an episode, in the order of `rules`, from the info["metrics"] of each of its steps.

    Raises:
        ValueError: there is no step; see `metrics_without_action`.
    """
    if not steps:
        raise ValueError("episode_metrics: an episode without an action has no metrics")
    return {name: _aggregated(rule, [step[name] for step in steps]) for name, rule in rules.items()}


def metrics_without_action(rules: Mapping[str, Aggregation]) -> dict[str, float]:
    """Metrics of an episode that was truncated before its first action.

    Metrics aggregated by `last`, such as `success`, are 0. Means and sums over no action are left out.
    """
    return {name: 0.0 for name, rule in rules.items() if rule == "last"}


def _aggregated(rule: Aggregation, values: list[float]) -> float:
    if rule == "last":
        return values[-1]
    return sum(values) / (len(values) if rule == "mean" else 1)


class Checkable(Protocol):
    """A dataclass of options with a check between them."""

    def check(self) -> Iterable[Problem]:
        """See `EnvConfig.check`."""


Options = TypeVar("Options", bound=Checkable)


def read_config(config_class: type[Options], env_config: Mapping[str, Any], path: str = "") -> Options:
    """Options of an environment: the values of `env_config`, and defaults for the rest.

    Errors name `path`, that of the section in the file. Every field of `config_class` has a default.

    Raises:
        ConfigError: lists every unknown option, wrong type and value out of bounds with its path; if there are none,
            the problems between options.
    """
    converter = Converter(_unknown_option)
    config = converter.overlay(env_config, config_class(), path)
    problems = converter.problems
    if not problems:
        prefix = f"{path}." if path else ""
        problems = [Problem(prefix + problem.path, problem.message) for problem in config.check()]
    if problems:
        raise ConfigError(problems)
    return config


def choices(name: str, known: Iterable[str]) -> str:
    """Text for an error about a name that is not in `known`: the nearest name, and all of them."""
    names = list(known)
    like = nearest(name, names)
    return f"{f'did you mean {like}? ' if like else ''}known: {', '.join(names)}"


def _unknown_option(path: str, section: type, value: Any) -> list[Problem]:
    return [unknown(path, choices(path.rpartition(".")[2], declared(section)))]
