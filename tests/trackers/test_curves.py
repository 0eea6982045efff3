"""The plot of a run."""

from __future__ import annotations

from pathlib import Path

from roll.trackers import curves
from roll.trackers.curves import draw_curves, series, smooth
from roll.trackers.files import JsonlTracker


def write(folder: Path, *lines: dict[str, float]) -> None:
    tracker = JsonlTracker(folder / "metrics.jsonl")
    for step, line in enumerate(lines):
        tracker.log(step, line)
    tracker.close()


def test_with_overlapped_generation_only_waiting_is_part_of_a_step(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    for generated, shown in ((0.5, {"generate", "train", "other"}), (1.8, {"wait for samples", "train", "other"})):
        line = {"step": 1, "time/step": 2.0, "time/train": 1.4, "time/wait_prev_gen": 0.5, "time/generate": generated}
        axes = Figure().add_subplot()
        curves._time(axes, [line, {**line, "step": 2}])
        labels = {text.get_text() for text in axes.get_legend().get_texts()}
        assert labels - {"generation, overlapped"} == shown
        assert ("generation, overlapped" in labels) == (generated > 1)


def test_a_run_without_rewards_plots_its_loss(tmp_path: Path) -> None:
    write(tmp_path, {"val/loss": 2.0}, {"actor/loss": 1.0}, {"actor/loss": 0.5, "val/loss": 1.0})
    assert draw_curves([tmp_path], tmp_path / "sft.png").stat().st_size > 0


def test_smoothing_keeps_the_length_and_the_ends() -> None:
    values = [float(step % 2) for step in range(40)]
    line = smooth(values)
    assert len(line) == 40 and line[0] == values[0] and line[-1] == values[-1]
    assert max(abs(value - 0.5) for value in line[5:-5]) < 0.1


def test_steps_without_a_value_are_skipped() -> None:
    rows = [{"step": 1, "val/loss": 1.0}, {"step": 2}, {"step": 3, "val/loss": None}, {"step": 4, "val/loss": 0.5}]
    assert series(rows, "val/loss") == ([1, 4], [1.0, 0.5])
