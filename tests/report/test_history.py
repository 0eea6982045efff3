"""Lanes, histograms and drops are those of the recorded spans and groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.report.history import MOST_BINS, MOST_COLUMNS, drop_reasons, histograms, lanes
from roll.report.read import read_run
from tests.report.runs import group_line, spans_of, write_run


def test_lanes_are_in_order_and_their_times_those_of_the_spans(tmp_path: Path) -> None:
    events = [{"time": 1002.5, "component": "actor_infer-1", "message": "died"}, {"message": "without a time"}]
    found = lanes(read_run(write_run(tmp_path, spans=spans_of(3, engines=11), events=events)))
    assert [lane["who"] for lane in found["lanes"]] == ["trainer", "rollout", *(f"engine {n}" for n in range(11))]
    assert found["steps"] == [(1, 1000), (2, 2000), (3, 3000)] and found["marks"] == [[1500, "actor_infer-1 died"]]
    trained = [span for span in found["lanes"][0]["spans"] if found["what"][span[0]] == "train"]
    assert [span[1:] for span in trained] == [[100, 700, 1], [1100, 700, 2], [2100, 700, 3]]


def test_a_run_without_spans_and_groups_has_none(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    assert lanes(run) == {} and histograms(run) == [] and drop_reasons(run) == []


def test_histograms_are_shares_of_the_samples_that_were_trained_on(tmp_path: Path) -> None:
    groups = [group_line(1, 3), group_line(2, 4, version=3), group_line(3, 4, dropped="stale", lengths=[900])]
    ages, lengths, scores = histograms(read_run(write_run(tmp_path, groups=groups)))
    assert (ages["x"], ages["y"], ages["v"]) == ([3, 4], ["0", "1", "2"], [[0, 0, 1], [1, 0, 0]])
    assert lengths["y"][0] == "4–5" and sum(lengths["v"][0]) == pytest.approx(1, abs=0.01)
    assert scores["bars"] == [["4–5", 1.0, 2], ["20–21", 0.0, 2]]


def test_a_long_run_has_few_columns(tmp_path: Path) -> None:
    groups = [group_line(step, step, lengths=[step % 777]) for step in range(1, 1001)]
    for made in histograms(read_run(write_run(tmp_path, groups=groups)))[:2]:
        assert len(made["x"]) <= MOST_COLUMNS and len(made["y"]) <= MOST_BINS


def test_reasons_of_drops_come_with_their_number_and_an_example(tmp_path: Path) -> None:
    groups = [group_line(1, 3, dropped="stale"), group_line(2, 3, dropped="generation_failed", failure="out of memory")]
    groups += [group_line(3, 4, dropped="generation_failed", failure="engine 1 died")]
    (first, count, example), second = drop_reasons(read_run(write_run(tmp_path, groups=groups)))
    assert (first, count, second[0]) == ("generation_failed", 2, "stale")
    assert example.in_language(0) == "last p3, step 4: engine 1 died"
