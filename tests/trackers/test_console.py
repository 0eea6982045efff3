"""Console output on a terminal and to a file."""

from __future__ import annotations

import io

from roll.trackers.console import ConsoleTracker, format_metrics


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_it_prints_one_line_per_step() -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker("demo", 3, stream)
    tracker.log(1, {"time/step": 2.04, "rollout/reward_mean": 0.5, "val/score": 0.25})
    tracker.log(2, {"time/step": 1.96, "rollout/reward_mean": 0.625})
    tracker.close()
    assert stream.getvalue().splitlines() == [
        "demo 1/3  step 2.0 s  reward 0.500  validation 0.250",
        "demo 2/3  step 2.0 s  reward 0.625  validation 0.250",
    ]


def test_a_terminal_shows_a_bar_with_the_last_validation(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    tracker = ConsoleTracker("demo", 3, stream)
    tracker.log(1, {"time/step": 2.0, "val/score": 0.25})
    tracker.log(2, {"time/step": 1.0})
    tracker.close()
    assert "━" in stream.getvalue() and "2/3" in stream.getvalue() and "0.250" in stream.getvalue()


def test_only_present_metrics_are_shown() -> None:
    assert format_metrics({"actor/loss": 0.5, "actor/lr": 1.0}) == "loss 0.5000"


def test_a_value_that_is_not_finite_is_shown_as_text() -> None:
    assert format_metrics({"actor/loss": float("nan")}) == "loss nan"
