"""The table of metrics and the page made from it."""

from __future__ import annotations

from pathlib import Path

from roll.trackers.metrics import markdown, sections, undocumented


def test_no_metric_is_named_twice() -> None:
    names = [metric.name for metrics in sections().values() for metric in metrics]
    assert len(names) == len(set(names))


def test_documented_names_and_families_are_known() -> None:
    assert undocumented(["time/step", "val/addition/score", "ledger/dropped_timeout", "memory/actor_train_peak"]) == []


def test_an_unknown_name_is_found() -> None:
    assert undocumented(["time/step", "time/stp", "val/a/b/score"]) == ["time/stp", "val/a/b/score"]


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == markdown(), "run `make docs`"
