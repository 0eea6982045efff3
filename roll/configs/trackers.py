"""Options of the trackers, as `tracker_kwargs` has them under each name."""

from __future__ import annotations

from dataclasses import dataclass

from roll.configs.fields import option


@dataclass
class TensorBoardOptions:
    """`tracker_kwargs.tensorboard`."""

    log_dir: str | None = option(None, "Folder of the event files; default: output_dir/tensorboard.")
    flush_secs: float = option(30.0, "Longest time a point stays in memory, in seconds.", above=0)


@dataclass
class NoOptions:
    """`tracker_kwargs` of a tracker that has none."""


TRACKER_OPTIONS: dict[str, type] = {"tensorboard": TensorBoardOptions, "stdout": NoOptions}
"""What each tracker of `track_with` can be told."""
