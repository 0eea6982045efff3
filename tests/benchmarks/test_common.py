"""Checks, report, and table of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.__main__ import run, table_of
from benchmarks.common import at_least, at_most, median, write_report


@pytest.mark.parametrize(("value", "ok"), [(2.9, False), (3.0, True), (3.1, True)])
def test_at_least_passes_from_the_target_on(value: float, ok: bool) -> None:
    assert at_least("speed-up", value, 3.0)["ok"] is ok


@pytest.mark.parametrize(("value", "ok"), [(0.04, True), (0.05, True), (0.06, False)])
def test_at_most_passes_up_to_the_target(value: float, ok: bool) -> None:
    assert at_most("overhead", value, 0.05)["ok"] is ok


def test_report_has_raw_figures_machine_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench" / "report.json"
    write_report(path, {"seconds": [1.0, 3.0, 2.0]}, [at_least("median", median([1.0, 3.0, 2.0]), 3.0)])
    report = json.loads(path.read_text())
    assert report["seconds"] == [1.0, 3.0, 2.0] and report["machine"]["cores"] >= 1
    assert report["checks"] == [{"name": "median", "value": 2.0, "target": 3.0, "ok": False}]
    assert "MISSED" in capsys.readouterr().out


def test_failed_benchmark_is_a_failed_check(tmp_path: Path) -> None:
    checks, _ = run("no_such_benchmark", tmp_path / "report.json")
    assert not checks[0]["ok"] and checks[0]["name"] == "no_such_benchmark failed with exit code 1"


def test_table_shows_every_check() -> None:
    console = Console(record=True, width=120)
    console.print(table_of({"generate": ([dict(at_least("128 requests", 3.6, 3.0))], 12.0)}))
    text = console.export_text()
    assert "128 requests" in text and "3.6" in text and "ok" in text
