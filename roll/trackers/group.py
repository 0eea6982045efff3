"""All trackers of a run behind one interface."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from roll.configs.trackers import METRICS_FILE, TrackerOptions
from roll.trackers import console, external, tensorboard  # noqa: F401  (registers them)
from roll.trackers.base import TRACKERS, Metrics, Tracker
from roll.trackers.files import JsonlTracker, find_origin, write_run_json
from roll.trackers.metrics import undocumented, with_aliases

logger = logging.getLogger(__name__)


class TrackerGroup:
    """Passes every step to all trackers, and writes run.json at the start and at the end of the run."""

    def __init__(
        self, config: TrackerOptions, trackers: list[Tracker], plan: Any = None, metrics: Metrics | None = None
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._trackers = trackers
        self._plan = plan
        self._origin = find_origin(Path(config.source.file).parent)
        self._warned: set[str] = set()
        self._write_run_json(summary=None)

    def resume(self, step: int) -> None:
        """Removes what was logged after `step`, where the run resumes. Call it before the first `log`."""
        for tracker in self._trackers:
            tracker.resume(step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records one step and its aliases; trackers without `every_step` get one in `logging_steps` and the last."""
        for name in set(undocumented(metrics)) - self._warned:
            logger.warning("metric %r is not described in roll/trackers/metrics.py", name)
            self._warned.add(name)
        metrics = with_aliases(metrics)
        if self._metrics is not None:
            metrics = {**self._metrics.step(step, metrics), **metrics}
        due = step % self._config.logging_steps == 0 or step == self._config.max_steps
        for tracker in self._trackers:
            if due or tracker.every_step:
                tracker.log(step, metrics)

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Closes all trackers and adds `summary` to run.json; a failure does not keep the rest from being done."""
        with ExitStack() as ends:
            ends.callback(self._write_run_json, summary)
            for tracker in reversed(self._trackers):
                ends.callback(tracker.close)
            for tracker in reversed(self._trackers):
                ends.callback(tracker.stop)

    def _write_run_json(self, summary: Mapping[str, Any] | None) -> None:
        folder = Path(self._config.output_dir)
        write_run_json(folder, self._config, self._plan, summary=summary, origin=self._origin)


def make_trackers(config: TrackerOptions, plan: Any = None, metrics: Metrics | None = None) -> TrackerGroup:
    """The trackers of a run: metrics.jsonl and run.json in `output_dir`, and those named in `track_with`.

    `plan` is for run.json; user-defined `metrics` are added to those of every step.
    """
    output_dir = Path(config.output_dir)
    trackers: list[Tracker] = [JsonlTracker(output_dir / METRICS_FILE)]
    trackers += [TRACKERS[name](config, output_dir, config.tracker_kwargs.get(name, {})) for name in config.track_with]
    return TrackerGroup(config, trackers, plan, metrics)
