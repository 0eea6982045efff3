"""What passes between an episode's owner, the pool of environments and its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from roll.envs.base import Aggregation

Reason = Literal["env_raised", "env_hung", "env_died"]
"""Why an environment failed: its own exception, a call past the deadline, or the end of its process."""


@dataclass(frozen=True)
class EnvSpec:
    """What an environment is made from, in any process: the arguments of `roll.envs.make_env`."""

    env_type: str
    env_config: Mapping[str, Any]


@dataclass(frozen=True)
class Opened:
    """What a reset gave: the rules, the first observation, and how each metric's values become an episode's."""

    instruction: str
    observation: str
    metric_rules: Mapping[str, Aggregation]


@dataclass(frozen=True)
class Stepped:
    """What one action led to; the fields are those of `TextEnv.step`. Equal where all but the metrics are."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    metrics: Mapping[str, float] = field(compare=False)


@dataclass(frozen=True)
class Raised:
    """An exception of an environment, as a value: its class and text; file, line and function that raised it."""

    error: str
    frame: str


class EnvFailure(RuntimeError):
    """An environment failed and is gone; its episode has no result. The message says which, when and what happened."""

    def __init__(self, reason: Reason, message: str) -> None:
        """Says why."""
        super().__init__(message)
        self.reason: Reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles with its reason."""
        return EnvFailure, (self.reason, str(self))


class EnvWorkerError(RuntimeError):
    """There is no worker for an environment: none started in time, or all are full."""


class EnvWorker(Protocol):
    """A process that hosts environments, seen from the pool. `call` reaches a method of `EnvHost`."""

    async def ready(self) -> None:
        """Returns once the process takes calls."""

    def call(self, method: str, *args: Any) -> asyncio.Future[Any]:
        """The answer, or an exception of which `death` tells whether the process has ended."""

    def death(self, error: BaseException) -> str | None:
        """How the process ended if that is what this error of a call means, else None."""

    def kill(self) -> None:
        """Tells the process to end, without waiting; may be called twice."""

    def join(self) -> None:
        """Waits until a killed process is gone."""
