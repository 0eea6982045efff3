"""`roll rehearse` of one RLVR and one agentic recipe for 8 or more GPUs, through several engines, all of them real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def rehearse(recipe: str, out: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    """The report of a rehearsal, and what it printed."""
    process = subprocess.run(
        [sys.executable, "-m", "roll", "rehearse", str(ROOT / recipe), "--out", str(out), *overrides],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=580,
    )
    printed = process.stdout + process.stderr
    assert process.returncode == 0, printed
    return json.loads((out / "rehearsal.json").read_text()), printed


def test_a_7b_recipe_for_eight_gpus_runs_in_miniature(tmp_path: Path) -> None:
    report, printed = rehearse("examples/qwen2.5-7B-rlvr_megatron/rlvr_config.yaml", tmp_path / "out")
    exercised = {part["name"]: part["detail"] for part in report["exercised"]}
    assert report["passed"]
    assert exercised["actor_train"].startswith("Megatron TP2 PP1 DP2, sequence parallel")
    assert exercised["actor_infer"].startswith("2 SGLang engines")
    assert "resume" in exercised and "reward math_rule" in exercised and "validation" in exercised
    for text in ("Not told by a CPU", "One sample in full", "You are Qwen", "score"):
        assert text in printed


def test_a_recipe_of_agents_that_runs_ahead_runs_in_miniature(tmp_path: Path) -> None:
    recipe = "examples/qwen2.5-0.5B-agentic/agent_val_frozen_lake_async.yaml"
    report, printed = rehearse(recipe, tmp_path / "out")
    exercised = {part["name"]: part["detail"] for part in report["exercised"]}
    assert report["passed"]
    assert "async_generation_ratio 1" in exercised["schedule"]
    assert "turn 1  reward" in printed and "environment FrozenLake" in exercised
