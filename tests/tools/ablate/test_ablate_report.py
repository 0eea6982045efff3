"""Measures of a trial, means over seeds, the Markdown table and the plot."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.tools.ablate.grid import Trial
from roll.tools.ablate.report import (
    TrialResult,
    area_under_curve,
    markdown_report,
    measure_cell,
    plot_curves,
    seed_band,
    summarize_trial,
)
from tests.tools.ablate.conftest import metric_lines


def result(
    seed: int, *scores: float | None, variant: str = "tis", target: float | None = None, **metrics: float
) -> TrialResult:
    return summarize_trial(Trial(variant, 2.0, seed), "finished", metric_lines(*scores, **metrics), target)


def test_measures_of_a_trial():
    made = result(1, 0.2, None, 0.6, 0.5, target=0.5, **{"staleness/mean": 1.5, "correction/ess": 0.8})
    assert made.curve == [(0, 0.2), (2, 0.6), (3, 0.5)]
    assert (made.final_score, made.best_score, made.steps_to_target) == (0.5, 0.6, 2)
    assert (made.staleness, made.ess, made.wall_s) == (1.5, pytest.approx(0.8), 8.0)


def test_measures_without_metrics_are_none():
    made = summarize_trial(Trial("tis", 0, 1), "unfinished", [], target=0.5)
    assert (made.final_score, made.area_under_curve, made.ess, made.wall_s, made.steps_to_target) == (None,) * 5
    assert result(1, 0.1, 0.2, target=0.9).steps_to_target is None


def test_null_in_a_line_is_ignored():
    assert summarize_trial(Trial("tis", 0, 1), "finished", [{"step": 1, "correction/ess": None}]).ess is None


@pytest.mark.parametrize(
    ("curve", "area"),
    [([], None), ([(5, 0.3)], 0.3), ([(0, 0.0), (10, 1.0)], 0.5), ([(0, 1.0), (1, 1), (4, 0)], 0.625)],
)
def test_area_under_curve_is_its_mean_height(curve, area):
    assert area_under_curve(curve) == area


def test_mean_and_deviation_over_seeds():
    assert measure_cell("ess", [1.0, 3.0, None]) == "2.000 ± 1.414"
    assert measure_cell("ess", [1.0]) == "1.000" and measure_cell("ess", [None]) == "-"


def test_report_has_means_deviations_and_causes_and_only_finished_trials_count():
    failed = summarize_trial(Trial("topr", 2.0, 1), "failed", [], cause="exit code 1\nout of memory")
    lost = summarize_trial(Trial("tis", 2.0, 3), "failed", metric_lines(0.9), cause="killed")
    results = [result(1, 0.2, 0.5, target=0.5), result(2, 0.4, target=0.5), failed, lost]
    page = markdown_report(results, "mine.yaml", 0.5)
    head, _, tis, topr = page.splitlines()[2:6]
    assert head.startswith(
        "| variant | ratio | seeds | final score | best score | area under curve | steps to target |"
    )
    assert tis.startswith("| tis | 2 | 2 of 3 | 0.450 ± 0.071 | 0.450 ± 0.071 |")
    assert "| 1.0 (1 of 2) |" in tis
    assert topr.startswith("| topr | 2 | 0 of 1 | - |")
    assert "## Failed: topr, ratio 2, seed 1\n\n```\nexit code 1\nout of memory\n```" in page


def test_target_column_appears_only_with_a_target():
    assert "target" not in markdown_report([result(1, 0.2)], "mine.yaml", None)
    assert "| never |" in markdown_report([result(1, 0.2, target=0.5)], "mine.yaml", 0.5)


def test_seed_band_covers_the_steps_of_all_seeds():
    assert seed_band([result(1, 0.2, 0.4, 0.9), result(2, 0.4, 0.8)]) == (
        [0, 1],
        [0.2, 0.4],
        pytest.approx([0.3, 0.6]),
        [0.4, 0.8],
    )


def test_plot_is_a_png_and_is_omitted_without_curves(tmp_path: Path):
    results = [result(seed, 0.1, 0.2 * seed, variant=variant) for seed in (1, 2) for variant in ("tis", "topr")]
    results.append(summarize_trial(Trial("tis", 0.0, 1), "finished", metric_lines(0.3, 0.4)))
    picture = plot_curves(results, tmp_path / "ablation.png")
    assert picture is not None and picture.read_bytes().startswith(b"\x89PNG")
    assert plot_curves([summarize_trial(Trial("tis", 0, 1), "failed", [])], tmp_path / "none.png") is None
