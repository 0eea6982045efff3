"""Values that pass between rollouts, the pool of environments and its worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from roll.base.errors import RunError
from roll.envs.base import Aggregation

Reason = Literal["env_raised", "env_hung", "env_died"]
"""Why an environment failed: it raised an exception, a call passed its deadline, or its worker process ended."""


@dataclass(frozen=True)
class EnvSpec:
    """The arguments of `roll.envs.make_env`, from which any process makes the same environment."""

    env_type: str
    env_config: Mapping[str, Any]


@dataclass(frozen=True)
class ResetResult:
    """Result of a reset.

    Attributes:
        instruction: the rules of the environment.
        observation: the first observation.
        metric_rules: `TextEnv.METRICS`: how the values of a metric are aggregated over an episode.
    """

    instruction: str
    observation: str
    metric_rules: Mapping[str, Aggregation]


@dataclass(frozen=True)
class StepResult:
    """Result of a step; fields as `TextEnv.step` returns them. Comparison ignores the metrics."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    metrics: Mapping[str, float] = field(compare=False)


@dataclass(frozen=True)
class EnvError:
    """An exception raised in an environment, as a value that a worker process returns.

    Attributes:
        error: class and message.
        location: file, line and function that raised it.
    """

    error: str
    location: str


class EnvFailure(RuntimeError):
    """An environment failed and was removed, so its episode has no result. The message names environment and turn."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason

    def __reduce__(self) -> tuple[type[EnvFailure], tuple[Reason, str]]:
        return EnvFailure, (self.reason, str(self))


class EnvWorkerError(RunError):
    """No worker can take an environment: none started before the deadline, or all are full."""


class EnvWorker(Protocol):
    """A worker process as the pool sees it. Tests replace it by one without a process."""

    async def ready(self) -> None:
        """Returns once the process accepts calls."""

    def call(self, method: str, *args: Any) -> asyncio.Future[Any]:
        """Calls a method of `EnvServer`, or `watch`, which returns only with the exception of a process that ended."""

    def exit_reason(self, error: BaseException) -> str | None:
        """How the process ended if `error`, raised by a call, means that it ended; else None."""

    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process; False before `ready` has returned."""

    def kill(self) -> None:
        """Kills the process without waiting for its end; may be called twice."""

    def join(self) -> None:
        """Waits until a killed process has ended."""
