"""The interface of trackers and of user-defined metrics, and the registry of trackers for `track_with`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from roll.configs.trackers import TRACKER_OPTIONS, NoOptions, TrackerOptions


class Tracker(ABC):
    """Records the metrics of a run."""

    every_step = False
    """True to receive every step; other trackers receive one step in every `logging_steps`."""

    def resume(self, step: int) -> None:  # noqa: B027  (optional)
        """Called before the first `log` of a run resumed after `step`; removes what was logged for later steps."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of one step. Steps are logged once and in increasing order."""

    def stop(self) -> None:  # noqa: B027  (optional)
        """Called for every tracker before the first is closed, so that slow ones finish at the same time."""

    def close(self) -> None:  # noqa: B027  (optional)
        """Flushes and closes files; nothing is logged afterwards."""


@runtime_checkable
class Metrics(Protocol):
    """User-defined metrics: `async_training.metrics_class` names a class that is constructed with the run's config."""

    def step(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Metrics to add to those of a step; an existing name keeps its value."""


TrackerFactory = Callable[[TrackerOptions, Path, dict[str, Any]], Tracker]
"""f(the configuration of the run, its output folder, the tracker's `tracker_kwargs`) -> tracker."""

TRACKERS: dict[str, TrackerFactory] = {}
"""Name in `track_with` -> factory."""


def register_tracker(name: str, options: type = NoOptions) -> Callable[[TrackerFactory], TrackerFactory]:
    """Decorator that registers a factory in TRACKERS; `options` is the dataclass of `tracker_kwargs.<name>`."""

    def add(factory: TrackerFactory) -> TrackerFactory:
        if name in TRACKERS:
            raise ValueError(f"a tracker named {name!r} is registered already")
        TRACKERS[name] = factory
        TRACKER_OPTIONS.setdefault(name, options)
        return factory

    return add
