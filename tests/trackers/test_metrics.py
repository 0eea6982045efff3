"""The table of metrics, its aliases, and the page generated from it."""

from __future__ import annotations

from pathlib import Path

from roll.algorithms import correction
from roll.trackers.metrics import ALIASES, CORRECTION, SECTIONS, markdown, undocumented, with_aliases

NAMES = [metric.name for metrics in SECTIONS.values() for metric in metrics]


def test_no_metric_is_described_twice() -> None:
    assert len(NAMES) == len(set(NAMES)) and not set(NAMES) & set(ALIASES)


def test_documented_names_and_families_are_known() -> None:
    assert undocumented(["time/step", "val/addition/score", "ledger/dropped_timeout", "memory/actor_train_peak"]) == []


def test_an_unknown_name_is_found() -> None:
    assert undocumented(["time/step", "time/stp", "val/a/b/score"]) == ["time/stp", "val/a/b/score"]


def test_every_metric_of_the_correction_is_described() -> None:
    reported = {
        value for value in vars(correction).values() if isinstance(value, str) and value.startswith("correction/")
    }
    assert {metric.name for metric in CORRECTION} == reported - {correction.WEIGHT_SQUARE_MEAN}


def test_an_alias_has_the_value_of_its_metric() -> None:
    assert set(ALIASES.values()) <= set(NAMES)
    assert with_aliases({"queue/size": 3.0, "time/step": 1.0}) == {
        "queue_size": 3.0,
        "queue/size": 3.0,
        "time/step": 1.0,
    }


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == markdown(), "run `make docs`"
