"""What a text environment is: gymnasium's conventions, with text for observations and actions."""

from __future__ import annotations

import math
import string
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args

import gymnasium
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Text

from roll.configs.convert import Converter
from roll.configs.errors import ConfigError, Problem
from roll.configs.fields import option
from roll.configs.schema import declared
from roll.configs.suggestions import nearest, unknown


@dataclass
class EnvConfig:
    """Options that every environment has. An environment with more subclasses it; every field has a default."""

    max_steps: int = option(20, "Actions after which an episode that goes on is cut off.", minimum=1)
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


class Checkable(Protocol):
    """Options that know what does not go together."""

    def check(self) -> Iterable[Problem]:
        """Problems whose path is an option's name."""


Options = TypeVar("Options", bound=Checkable)


def read_config(config_class: type[Options], env_config: Mapping[str, Any], path: str = "") -> Options:
    """Options of an environment, from what the YAML says and defaults for the rest.

    Args:
        config_class: the dataclass of the options; all fields have defaults.
        env_config: option names and values; not changed.
        path: where the section stands, for errors, such as `custom_envs.Lake.env_config`.

    Raises:
        ConfigError: every unknown option, wrong type and value out of bounds, with the path; when there is none, what
            does not go together.
    """
    converter = Converter(_suggest)
    config = converter.overlay(env_config, config_class(), path)
    problems = converter.problems
    if not problems:
        prefix = f"{path}." if path else ""
        problems = [Problem(prefix + problem.path, problem.message) for problem in config.check()]
    if problems:
        raise ConfigError(problems)
    return config


def choices(name: str, known: Iterable[str]) -> str:
    """What could have been meant by a name that is none of `known`, and all that is known."""
    names = list(known)
    like = nearest(name, names)
    return f"{f'did you mean {like}? ' if like else ''}known: {', '.join(names)}"


def _suggest(path: str, section: type, value: Any) -> list[Problem]:
    return [unknown(path, choices(path.rpartition(".")[2], declared(section)))]


SAMPLE_LENGTH = 64
"""Most characters of a sample: enough for tools that try a space out; membership has no bound."""


class FreeText(Text):
    """Every string, the empty one too, in whatever script; samples are short and of printable ASCII."""

    def __init__(self) -> None:
        """Each environment makes its own, because a space carries the generator of its samples."""
        super().__init__(SAMPLE_LENGTH, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        """Whether it is text at all."""
        return isinstance(x, str)

    def __repr__(self) -> str:
        """Without the list of characters, which says nothing about what is allowed."""
        return "FreeText()"


Aggregation = Literal["mean", "sum", "last"]
"""How the values of an episode's actions become one: their mean over all actions, their sum, or the last action's."""

RESERVED = ("score", "num_actions")
"""What a run tells of every episode under these names."""


def rules_fault(rules: Any) -> str | None:
    """What is wrong with an environment's METRICS, in words; None where nothing is."""
    if not isinstance(rules, Mapping):
        return f"METRICS is {type(rules).__name__}; it maps names to {', '.join(get_args(Aggregation))}"
    for name, rule in rules.items():
        if not isinstance(name, str) or rule not in get_args(Aggregation):
            return f"METRICS has {name!r}: {rule!r}; it maps names to {', '.join(get_args(Aggregation))}"
        if name in RESERVED:
            return f"METRICS has {name!r}, which a run tells of every episode; call it by another name"
    return None


def episode_metrics(rules: Mapping[str, Aggregation], steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One value for each metric of an environment, in the order of `rules`.

    Args:
        rules: an environment's `METRICS`.
        steps: info["metrics"] of every step of one episode, in order.

    Raises:
        ValueError: no steps; see `metrics_without_action`.
    """
    if not steps:
        raise ValueError("episode_metrics: an episode without an action has no metrics")
    return {name: _aggregated(rule, [step[name] for step in steps]) for name, rule in rules.items()}


def metrics_without_action(rules: Mapping[str, Aggregation]) -> dict[str, float]:
    """Of an episode cut off before its first action: what a last action leaves, such as `success`, is 0.

    The others are left out, for nothing was done that could have been well or badly done.
    """
    return {name: 0.0 for name, rule in rules.items() if rule == "last"}


def _aggregated(rule: Aggregation, values: list[float]) -> float:
    if rule == "last":
        return values[-1]
    return sum(values) / (len(values) if rule == "mean" else 1)
