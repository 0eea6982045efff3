"""`roll.train`: what is refused before a process starts, and how a function reaches the processes of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import roll
from roll.api.train import _save_reward
from roll.base.errors import ConfigError, RunError


def test_keys_that_cannot_be_used_are_refused_before_anything_starts(tmp_path: Path) -> None:
    keys = {"pipeline": "rlvr", "output_dir": str(tmp_path / "run"), "max_step": 3}
    with pytest.raises(ConfigError, match="max_steps"):
        roll.train(keys)
    with pytest.raises(ConfigError, match="max_steps"):
        roll.train({"pipeline": "sft"}, "max_steps=0")
    assert not (tmp_path / "run").exists()


def test_a_file_is_read_as_by_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("pipeline: rlvr\nno_such_key: 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no_such_key"):
        roll.train(file)


def test_a_reward_for_a_pipeline_without_rewards_is_refused(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    with pytest.raises(RunError, match="reward: a run with pipeline sft"):
        roll.train(root / "examples/tiny_math/sft_config.yaml", f"output_dir={tmp_path}", reward=len)


def test_a_function_defined_anywhere_is_a_module_of_the_run(tmp_path: Path) -> None:
    wanted = 3
    for function in (lambda response: float(len(response) == wanted), _shortest(wanted)):
        module, name = _save_reward(function, tmp_path)
        code = f"from {module} import {name} as f; print(f('abc'), f('abcd'))"
        process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert process.stdout.split() == ["1.0", "0.0"]
    assert name == "short"


def _shortest(limit: int):  # type: ignore[no-untyped-def]
    def short(response: str) -> float:
        return float(len(response) <= limit)

    return short
