"""`roll rehearse` of recipes for several GPUs: one trains in processes of its own, two run in those of other tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll.cli import main
from roll.lab.rehearse import runs
from tests.integration.runs import ROOT
from tests.integration.shared_runs import SharedRuns

pytestmark = pytest.mark.integration

EXAMPLES = ROOT / "examples"


def exercised(out: Path) -> dict[str, str]:
    """What a report says was seen, by part; nothing is missing."""
    report = json.loads((out / "rehearsal.json").read_text())
    assert report["passed"]
    parts: dict[str, str] = {part["name"]: part["detail"] for part in report["exercised"]}
    assert "resume" in parts and "checkpoint" in parts
    return parts


def test_a_recipe_is_run_and_resumed_in_processes_of_its_own(tmp_path: Path) -> None:
    recipe = EXAMPLES / "tiny_math" / "sft_config.yaml"
    process = subprocess.run(
        [sys.executable, "-m", "roll", "rehearse", str(recipe), "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "Not told by a CPU" in process.stdout
    assert exercised(tmp_path / "out")["actor_train"].startswith("Megatron TP2 PP1 DP1, sequence parallel")


@pytest.fixture
def rehearse(
    shared_runs: SharedRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[[str], tuple[dict[str, str], str]]:
    """Rehearses a recipe of examples/ in shared processes: what was exercised, and what was printed."""

    def run_shared(command: list[str], log: Path, poll: Callable[[], None], **_: Any) -> int:
        config, *overrides = command[command.index("run") + 1 :]
        code, output = shared_runs.run(Path(config), *overrides)
        with log.open("a") as file:
            file.write(output)
        poll()
        return code

    def rehearse(recipe: str) -> tuple[dict[str, str], str]:
        monkeypatch.setattr(runs, "run_process", run_shared)
        code, printed = main(["rehearse", str(EXAMPLES / recipe), "--out", f"{tmp_path}/out"]), capsys.readouterr()
        assert code == 0, printed.out + printed.err
        return exercised(tmp_path / "out"), printed.out

    return rehearse


def test_a_7b_recipe_for_eight_gpus_runs_in_miniature(rehearse: Callable[[str], tuple[dict[str, str], str]]) -> None:
    parts, printed = rehearse("qwen2.5-7B-rlvr_megatron/rlvr_config.yaml")
    assert parts["actor_train"].startswith("Megatron TP2 PP1 DP2, sequence parallel")
    assert parts["actor_infer"].startswith("2 SGLang engines")
    assert "reward math_rule" in parts and "validation" in parts
    for text in ("Not told by a CPU", "One sample in full", "You are Qwen", "score"):
        assert text in printed


def test_a_recipe_of_agents_that_runs_ahead_runs_in_miniature(
    rehearse: Callable[[str], tuple[dict[str, str], str]],
) -> None:
    parts, printed = rehearse("qwen2.5-0.5B-agentic/agent_val_frozen_lake_async.yaml")
    assert "async_generation_ratio 1" in parts["schedule"] and "environment FrozenLake" in parts
    assert "turn 1  reward" in printed
