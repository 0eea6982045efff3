"""Supervised fine-tuning end to end: it learns, resumes exactly, ends at its target, and exports its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import lines

from examples.tiny_math.problems import write_problems
from roll.hub.find import fetch_model
from tests.hub_server import go_online, serve_hub
from tests.integration.shared_runs import SharedRuns

pytestmark = pytest.mark.integration

STEPS = 6


def sft(shared_runs: SharedRuns, data: Path, model: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    """The summary of the tiny recipe, run below `folder` with a few steps that all validate."""
    train, validation = data / "train.jsonl", data / "val.jsonl"
    recipe, steps = "tiny_math/sft_config.yaml", f"max_steps={STEPS}"
    shared_runs.learn(recipe, model, folder, train, validation, steps, "eval_steps=1", *overrides)
    return json.loads((folder / "run" / "run.json").read_text())["summary"]


def inputs_by_name(model: Path, cache: Path) -> list[str]:
    """Overrides by which a run takes the model by name, from a cache that a hub has filled; runs ask no network."""
    with serve_hub() as hub, pytest.MonkeyPatch.context() as patch:
        go_online(hub, cache, patch)
        hub.add("models", "tiny/math", model)
        fetch_model("tiny/math")
    return ["pretrain=tiny/math", f"system_envs.HF_HOME={cache}"]


def test_a_run_learns_and_one_resumed_from_it_continues_exactly_to_its_target(shared_runs, tmp_path, tiny_model_dir):
    from transformers import AutoModelForCausalLM

    write_problems(tmp_path / "data", seed=3, train=40, val=16, levels=(1,))
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    by_name = inputs_by_name(tiny_model_dir, tmp_path / "cache")
    saving = ["save_checkpoint=true", "save_steps=2", "max_ckpt_to_keep=0", "target_loss=0.0001"]
    assert sft(shared_runs, tmp_path / "data", tiny_model_dir, whole, *saving, *by_name)["steps"] == STEPS
    steps = lines(whole)
    losses = [line["val/loss"] for line in steps]
    assert losses[-1] < losses[0] - 0.5
    assert losses == sorted(losses, reverse=True)

    between = (losses[3] + losses[4]) / 2
    checkpoint = f"resume_from_checkpoint={whole}/run/checkpoints/step-000002"
    summary = sft(shared_runs, tmp_path / "data", tiny_model_dir, resumed, checkpoint, f"target_loss={between}")
    assert (summary["status"], summary["steps"]) == ("finished", 4), "40 pairs in batches of 16 end in mid-batch"
    assert summary["resumed_at_step"] == 2
    assert lines(resumed) == steps[3:5]
    AutoModelForCausalLM.from_pretrained(resumed / "run" / "hf_model")
