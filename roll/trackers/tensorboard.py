"""TensorBoard output: scalars with the same names as in metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.configs.trackers import TensorBoardOptions, TrackerOptions
from roll.trackers.base import Tracker, register_tracker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker(Tracker):
    """Writes event files; on resume, TensorBoard itself purges points after the resumed step."""

    def __init__(self, log_dir: Path, flush_secs: float = TensorBoardOptions.flush_secs) -> None:
        self._log_dir = log_dir
        self._flush_secs = flush_secs
        self._purge_step: int | None = None
        self._writer: SummaryWriter | None = None

    def resume(self, step: int) -> None:
        self._purge_step = step + 1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one point to every curve; values that are not finite are skipped."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(
                str(self._log_dir), purge_step=self._purge_step, flush_secs=int(self._flush_secs)
            )
        for name, value in metrics.items():
            if name != "step" and math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


@register_tracker("tensorboard")
def _make(config: TrackerOptions, output_dir: Path, options: dict[str, Any]) -> Tracker:
    given = TensorBoardOptions(**options)
    return TensorBoardTracker(Path(given.log_dir or output_dir / "tensorboard"), given.flush_secs)
