"""The summary of a recipe of several stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.stages import main, summarise
from roll.pipeline.summary import RunSummary


def run_summary(**validation: dict[str, float]) -> RunSummary:
    given: dict[str, Any] = {field: 0 for field in RunSummary.__dataclass_fields__}
    return RunSummary(**given | {"validation": validation, "peak_memory_bytes": 2**31})


@pytest.mark.parametrize(
    ("validation", "shown"),
    [
        ({"10": {"val/score": 0.75}, "0": {"val/score": 0.25}}, "accuracy 0.250 -> 0.750 on new problems"),
        ({}, "accuracy (not validated) on new problems"),
    ],
)
def test_the_first_and_last_validation_are_shown_if_there_are_any(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    validation: dict[str, dict[str, float]],
    shown: str,
) -> None:
    def demo(out: Path, seed: int, overrides: list[str]) -> dict[str, float]:
        return summarise(out, seed, 0.0, run_summary(), run_summary(**validation), "val/score")

    monkeypatch.setattr("sys.argv", ["demo", "--out", str(tmp_path)])
    main("A recipe.", "runs", "accuracy ... on new problems", demo)
    assert shown in capsys.readouterr().out
    written = json.loads((tmp_path / "summary.json").read_text())
    assert ("val_before" in written) == bool(validation) == ("val_after" in written)
