"""The two names that an agent of the user needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """How an episode ended.

    Attributes:
        reward: of the whole episode.
        metrics: other numbers about it; a run reports the mean of each as `env/<tag>/<name>`.
    """

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Agent(ABC):
    """An agent that calls a model with any client of the OpenAI API.

    Each episode has a process of its own, in which OPENAI_BASE_URL and OPENAI_API_KEY are those of the episode. So a
    client without arguments, such as `OpenAI()`, calls the model `policy`. An exception drops the episode.
    """

    @abstractmethod
    def run(self, task: dict[str, Any], seed: int) -> Result:
        """Plays one episode; it may be a coroutine function.

        Args:
            task: a row of `tasks`; `{"seed": seed}` where the entry has no task file.
            seed: of the task, the same for all episodes that are compared with each other.
        """
