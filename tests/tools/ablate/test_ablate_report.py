"""Lines of metrics become rows, rows become means over seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.tools.ablate.grid import Cell
from roll.tools.ablate.report import Row, aggregate, area_under, band, draw_ablation, make_row, markdown, spread
from tests.tools.ablate.conftest import lines


def row(seed: int, *scores: float | None, variant: str = "tis", target: float | None = None, **every: float) -> Row:
    return make_row(Cell(variant, 2.0, seed), "finished", lines(*scores, **every), target)


def test_a_row_says_how_the_run_went():
    made = row(1, 0.2, None, 0.6, 0.5, target=0.5, **{"staleness/mean": 1.5, "correction/ess": 0.8})
    assert made.curve == [(0, 0.2), (2, 0.6), (3, 0.5)]
    assert (made.final_score, made.best_score, made.steps_to_target) == (0.5, 0.6, 2)
    assert (made.staleness, made.ess, made.wall_s) == (1.5, pytest.approx(0.8), 8.0)


def test_what_was_not_logged_is_none():
    made = make_row(Cell("tis", 0, 1), "open", [], target=0.5)
    assert (made.final_score, made.area_under_curve, made.ess, made.wall_s, made.steps_to_target) == (None,) * 5
    assert row(1, 0.1, 0.2, target=0.9).steps_to_target is None


def test_a_null_in_a_line_is_no_value():
    assert make_row(Cell("tis", 0, 1), "finished", [{"step": 1, "correction/ess": None}]).ess is None


@pytest.mark.parametrize(
    ("curve", "area"),
    [([], None), ([(5, 0.3)], 0.3), ([(0, 0.0), (10, 1.0)], 0.5), ([(0, 1.0), (1, 1), (4, 0)], 0.625)],
)
def test_the_area_under_a_curve_is_its_mean_height(curve, area):
    assert area_under(curve) == area


def test_the_spread_of_seeds():
    assert spread([1.0, 3.0, None]).mean == 2.0
    assert spread([1.0, 3.0]).deviation == pytest.approx(2**0.5)
    assert spread([1.0]).deviation is None
    assert spread([None]) is None


def test_only_finished_runs_count():
    failed = make_row(Cell("tis", 2.0, 3), "failed", lines(0.9), cause="exit code 1\nout of memory")
    (line,) = aggregate([row(1, 0.2), row(2, 0.4), failed])
    assert (line.finished, line.seeds) == (2, 3)
    assert line.measures["final_score"].mean == pytest.approx(0.3)


def test_the_page_shows_means_deviations_and_causes():
    failed = make_row(Cell("topr", 2.0, 1), "failed", [], cause="exit code 1\nout of memory")
    page = markdown([row(1, 0.2, 0.5, target=0.5), row(2, 0.4, target=0.5), failed], "mine.yaml", 0.5)
    head, _, tis, topr = page.splitlines()[2:6]
    assert head.startswith(
        "| variant | ratio | seeds | final score | best score | area under curve | steps to target |"
    )
    assert tis.startswith("| tis | 2 | 2 | 0.450 ± 0.071 | 0.450 ± 0.071 |")
    assert "| 1.0 (1 of 2) |" in tis
    assert topr.startswith("| topr | 2 | 0 of 1 | - |")
    assert "## Failed: topr, ratio 2, seed 1\n\n```\nexit code 1\nout of memory\n```" in page


def test_without_a_target_there_is_no_column_for_it():
    assert "target" not in markdown([row(1, 0.2)], "mine.yaml", None)
    assert "| never |" in markdown([row(1, 0.2, target=0.5)], "mine.yaml", 0.5)


def test_a_band_spans_the_steps_all_seeds_have():
    assert band([row(1, 0.2, 0.4, 0.9), row(2, 0.4, 0.8)]) == (
        [0, 1],
        [0.2, 0.4],
        pytest.approx([0.3, 0.6]),
        [0.4, 0.8],
    )


def test_the_picture_is_a_png_and_none_without_curves(tmp_path: Path):
    rows = [row(seed, 0.1, 0.2 * seed, variant=variant) for seed in (1, 2) for variant in ("tis", "topr")]
    rows.append(make_row(Cell("tis", 0.0, 1), "finished", lines(0.3, 0.4)))
    picture = draw_ablation(rows, tmp_path / "ablation.png")
    assert picture is not None and picture.read_bytes().startswith(b"\x89PNG")
    assert draw_ablation([make_row(Cell("tis", 0, 1), "failed", [])], tmp_path / "none.png") is None
