"""TensorBoard event files, read back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from roll.trackers.tensorboard import TensorBoardTracker


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


def test_a_curve_has_one_point_per_step_and_gaps_where_a_value_is_not_finite(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    for step, loss in ((1, 0.5), (2, float("nan")), (3, 0.25)):
        tracker.log(step, {"step": step, "actor/loss": loss})
    tracker.close()
    assert points(tmp_path, "actor/loss") == [(1, 0.5), (3, 0.25)]


def test_a_resumed_run_replaces_what_was_logged_after_the_checkpoint(tmp_path: Path) -> None:
    first = TensorBoardTracker(tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"actor/loss": 1.0})
    first.close()
    second = TensorBoardTracker(tmp_path)
    second.resume(1)
    second.log(2, {"actor/loss": 2.0})
    second.close()
    assert points(tmp_path, "actor/loss") == [(1, 1.0), (2, 2.0)]
