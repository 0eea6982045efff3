"""The text environment: gymnasium's interface with text observations and actions, checked options, and metrics."""

from __future__ import annotations

import math
import string
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Literal, get_args

import gymnasium
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Text

from roll.base.errors import Problem
from roll.base.schema import option
from roll.configs.scoring.rewards import LARGEST_REWARD, is_trainable
from roll.configs.user_code import definition_of
from roll.envs.options import read_config
from roll.envs.tools.toolbox import Toolbox, ToolResults

Aggregation = Literal["mean", "sum", "last"]
"""How the values of a metric over an episode are combined: mean or sum over its actions, or that of the last action."""

RESERVED_METRICS = ("score", "num_actions")
"""Metrics that a run reports for every episode; an environment cannot use these names."""

TOOL_METRICS: Mapping[str, Aggregation] = {"tool_calls": "sum", "tool_errors": "sum"}
"""Metrics of every environment with tools, in all of its turns."""

SAMPLE_LENGTH = 64
"""Longest text that `FreeText` samples; membership has no limit."""


@dataclass
class EnvConfig:
    """Options of every environment. Environments with more options subclass it; every field has a default."""

    max_steps: int = option(20, "Actions after which an episode that has not ended is truncated.", ge=1)
    env_instruction: str | None = option(None, "Text that replaces the built-in rules; null uses the built-in rules.")
    tools: dict[str, Any] = option(
        factory=dict, help="Tools that the model may call: python, search, and MCP servers by name under mcp."
    )

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
        truncated: the episode ended by another limit of its own.
    """

    observation: str
    reward: float
    terminated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False


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
        tools = self.config.tools if has_tools(self.config_class) else {}
        self._tools = Toolbox(tools) if tools else None
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
        rules = self.rules() if self.config.env_instruction is None else self.config.env_instruction
        return f"{rules}\n\n{self._tools.instruction}" if self._tools else rules

    @property
    def metric_rules(self) -> Mapping[str, Aggregation]:
        """METRICS, and those of tools if there are any."""
        return {**TOOL_METRICS, **self.METRICS} if self._tools else self.METRICS

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
            info whose "metrics" has a value for each name in METRICS; after tool calls, which never reach `act`, those
            of tools only.

        Raises:
            ResetNeeded: no episode has started, or the last one has ended.
            TypeError: the action is not text.
        """
        if not self._running:
            raise ResetNeeded(f"{type(self).__name__}.step: no episode is running; call reset first")
        if not isinstance(action, str):
            raise TypeError(f"{type(self).__name__}.step: the action is {type(action).__name__}, not text")
        self.steps += 1
        results = self._tools.answer(action) if self._tools else None
        turn = self._checked(self.act(action)) if results is None else Turn(results.text, 0.0)
        self._episode_reward_sum += float(turn.reward)
        truncated = not turn.terminated and (turn.truncated or self.steps >= self.config.max_steps)
        self._running = not (turn.terminated or truncated)
        metrics = {**self._tool_metrics(results), **turn.metrics}
        return turn.observation, float(turn.reward), bool(turn.terminated), truncated, {"metrics": metrics}

    def close(self) -> None:
        """Ends what the tools have started."""
        if self._tools:
            self._tools.close()
        super().close()

    def _tool_metrics(self, results: ToolResults | None) -> dict[str, float]:
        if not self._tools:
            return {}
        calls, errors = (results.calls, results.errors) if results else (0, 0)
        return {"tool_calls": float(calls), "tool_errors": float(errors)}

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


def has_tools(config_class: type[EnvConfig]) -> bool:
    """Whether `tools` of an environment are those of `EnvConfig`, and not an option of its own with this name."""
    return config_class.__dataclass_fields__["tools"] is EnvConfig.__dataclass_fields__["tools"]


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

    A step with tool calls has no values of other metrics; where no step has any, see `metrics_without_action`.

    Raises:
        ValueError: there is no step; see `metrics_without_action`.
    """
    if not steps:
        raise ValueError("episode_metrics: an episode without an action has no metrics")
    values = {name: [step[name] for step in steps if name in step] for name in rules}
    found = {name: _aggregated(rule, values[name]) for name, rule in rules.items() if values[name]}
    return found | metrics_without_action({name: rule for name, rule in rules.items() if not values[name]})


def metrics_without_action(rules: Mapping[str, Aggregation]) -> dict[str, float]:
    """Metrics of an episode that was truncated before its first action.

    Metrics aggregated by `last`, such as `success`, are 0. Means and sums over no action are left out.
    """
    return {name: 0.0 for name, rule in rules.items() if rule == "last"}


def _aggregated(rule: Aggregation, values: list[float]) -> float:
    if rule == "last":
        return values[-1]
    return sum(values) / (len(values) if rule == "mean" else 1)
