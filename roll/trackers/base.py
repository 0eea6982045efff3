"""What a tracker is, and the registry of those a config can name in `track_with`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from roll.configs.pipeline import BaseConfig


class Tracker(ABC):
    """A place metrics go to."""

    every_step = False
    """True for a tracker that keeps the full record; others get a line every `logging_steps`."""

    def resume(self, step: int) -> None:  # noqa: B027  (most trackers have nothing to undo)
        """Called before the first `log` of a run that goes on after `step`; whatever was logged later is undone."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of one step; a step is logged once, in increasing order."""

    def close(self) -> None:  # noqa: B027
        """Writes what is still held back and lets go of files; nothing is logged afterwards."""


@runtime_checkable
class Metrics(Protocol):
    """Metrics of one's own: `async_training.metrics_class` names a class that is made with the run's config."""

    def step(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """What to add to the metrics of a step; a name that is there already keeps its value."""


TrackerFactory = Callable[[BaseConfig, Path, dict[str, Any]], Tracker]
"""Makes a tracker from the run's config, its output folder and the tracker's own `tracker_kwargs`."""

TRACKERS: dict[str, TrackerFactory] = {}
"""Trackers by the name they have in `track_with`."""


def register_tracker(name: str) -> Callable[[TrackerFactory], TrackerFactory]:
    """Decorator that enters a factory into TRACKERS under `name`."""

    def enter(factory: TrackerFactory) -> TrackerFactory:
        if name in TRACKERS:
            raise ValueError(f"a tracker named {name!r} is registered already")
        TRACKERS[name] = factory
        return factory

    return enter
