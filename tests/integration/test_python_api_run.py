"""`roll.train` on the real engines, with a reward that is defined in the caller."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from runs import inputs_in, recipe

import roll

pytestmark = pytest.mark.integration


def test_a_run_from_python_is_scored_by_the_function_it_is_given(tiny_model_dir: Path, tmp_path: Path) -> None:
    keys = yaml.safe_load(recipe(inputs_in(tmp_path / "data", tiny_model_dir), tmp_path, max_steps=2).read_text())
    scale = 0.25

    def constant(response: str, ground_truth: str) -> float:
        return scale + 0.0 * len(response + ground_truth)

    run = roll.train(keys, "eval_steps=0", reward=constant)
    assert not run.interrupted
    assert [line["step"] for line in run.metrics if line["step"]] == [1, 2]
    assert all(line["rollout/reward_mean"] == pytest.approx(scale) for line in run.metrics if line["step"])
    assert run.report().read_text(encoding="utf-8").lower().startswith("<!doctype html>")
