"""Console output on a terminal and to a file."""

from __future__ import annotations

import io
import re

import pytest

from roll.trackers.console import ConsoleTracker, shown_values

METRICS = {"time/step": 2.04, "rollout/reward_mean": 0.5, "actor/loss": 0.0123, "rollout/response_length_mean": 20.5}


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
        "demo 1/3  reward 0.500  step 2.0 s  validation 0.250",
        "demo 2/3  reward 0.625  step 2.0 s",
    ]


@pytest.mark.parametrize(("width", "values"), [(60, "reward"), (80, "reward loss"), (120, "reward loss step length")])
def test_a_terminal_shows_a_bar_with_what_fits_and_keeps_validations_as_lines(
    monkeypatch: pytest.MonkeyPatch, width: int, values: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    tracker = ConsoleTracker("a run with a name of many words", 1000, stream)
    tracker.log(499, METRICS | {"val/score": 0.25})
    tracker.log(500, METRICS)
    tracker.close()
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).strip())
    assert "a run with a name of many words 499/1000  validation 0.250" in [line.rstrip() for line in lines]
    assert re.fullmatch(r"a run with a na… ━+.* 500/1000 \S+ .+", lines[-1])
    assert all(len(line) <= max(width, 60) for line in lines)
    assert re.findall("reward|loss|step|length", lines[-1]) == values.split()


def test_only_present_metrics_are_shown_and_numbers_that_are_not_finite_as_text() -> None:
    assert shown_values({"actor/loss": 0.5, "actor/lr": 1.0}) == ["loss 0.5000"]
    assert shown_values({"actor/loss": float("nan")}) == ["loss nan"]
