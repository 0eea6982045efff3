"""`roll.train`: what is refused before a process starts, and how a function reaches the processes of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import roll
from roll.api.train import REWARD_MODULE, _save_reward
from roll.base.errors import ConfigError, RunError


def test_keys_that_cannot_be_used_are_refused_before_anything_starts(tmp_path: Path) -> None:
    keys = {"pipeline": "rlvr", "output_dir": str(tmp_path / "run"), "max_step": 3}
    with pytest.raises(ConfigError, match="max_steps"):
        roll.train(keys)
    with pytest.raises(ConfigError, match="max_steps"):
        roll.train({"pipeline": "sft"}, "max_steps=0")
    assert not (tmp_path / "run").exists()


def test_a_reward_for_a_pipeline_without_rewards_is_refused(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    with pytest.raises(RunError, match="reward: a run with pipeline sft"):
        roll.train(root / "examples/tiny_math/sft_config.yaml", f"output_dir={tmp_path}", reward=len)


def test_a_function_defined_anywhere_is_a_module_of_the_run(tmp_path: Path) -> None:
    wanted = 3
    for function in (lambda response: float(len(response) == wanted), _shortest(wanted)):
        name = _save_reward(function, tmp_path)
        code = f"from {REWARD_MODULE} import {name} as f; print(f('abc'), f('abcd'))"
        process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert process.stdout.split() == ["1.0", "0.0"]
    assert name == "short"


def _shortest(limit: int):  # type: ignore[no-untyped-def]
    def short(response: str) -> float:
        return float(len(response) <= limit)

    return short
