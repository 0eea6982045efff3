"""The table of metrics, its aliases, and the page generated from it."""

from __future__ import annotations

from pathlib import Path

from roll.algorithms import correction
from roll.trackers.metrics import ALIASES, CORRECTION, SECTIONS, alias_metrics, markdown, undocumented

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


def test_aliases_belong_to_metrics() -> None:
    assert set(ALIASES.values()) <= set(NAMES)


def test_aliases_have_the_values_of_the_step() -> None:
    ledger = {
        "submitted": 20.0,
        "consumed": 8.0,
        "in_flight": 4.0,
        "dropped_generation_failed": 3.0,
        "dropped_stale": 1.0,
    }
    line = {f"ledger/{name}": value for name, value in ledger.items()}
    line |= {"step": 2, "version": 2, "queue/total_consumed": 64.0, "staleness/max": 1.0, "sync_failures": 1.0}
    assert alias_metrics(line, samples_per_prompt=8) == {
        "global_steps": 2.0,
        "current_param_version": 2.0,
        "processed_samples": 64.0,
        "total_consumed": 64.0,
        "generation_errors": 3.0,
        "max_sample_age": 1.0,
        "total_generated_samples": (20 - 4 - 3) * 8,
        "dropped_stale_samples": 8.0,
        "param_sync_count": 3.0,
        "param_sync_requests": 4.0,
    }


def test_a_run_without_generation_has_no_aliases_of_generation() -> None:
    assert alias_metrics({"step": 1, "version": 1}, 1) == {"global_steps": 1.0, "current_param_version": 1.0}


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == markdown(), "run `make docs`"
