"""Preference training end to end: it learns which answers are right, resumes exactly, and exports its model."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import lines

from examples.tiny_dpo.demo import write_pairs
from examples.tiny_math.problems import write_problems
from tests.integration.shared_runs import SharedRuns

pytestmark = pytest.mark.integration

STEPS = 16


def dpo(shared_runs: SharedRuns, data: Path, model: Path, folder: Path, *overrides: str) -> None:
    pairs, steps = data / "pairs-train.jsonl", f"max_steps={STEPS}"
    shared_runs.learn("tiny_dpo/dpo_config.yaml", model, folder, pairs, pairs, steps, "eval_steps=16", *overrides)


def test_a_run_learns_which_answers_are_better_and_resumes_exactly(shared_runs, tmp_path, tiny_model_dir):
    from transformers import AutoModelForCausalLM

    write_problems(tmp_path / "data", seed=3, train=40, val=16, levels=(1,))
    write_pairs(tmp_path / "data" / "train.jsonl", tmp_path / "data" / "pairs-train.jsonl", seed=1)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    plain, saving = ["sft_loss_coef=0"], ["save_checkpoint=true", "save_steps=14", "max_ckpt_to_keep=0"]
    dpo(shared_runs, tmp_path / "data", tiny_model_dir, whole, *plain, *saving)
    steps = lines(whole)
    assert steps[0]["val/loss"] == pytest.approx(0.693147, abs=1e-5) and steps[0]["val/accuracy"] == 0
    assert steps[1]["actor/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert steps[1]["actor/margin"] == pytest.approx(0, abs=1e-6), "but for rounding, policy and reference agree"
    assert steps[-1]["val/accuracy"] > 0.75 and steps[-1]["val/loss"] < steps[0]["val/loss"]
    assert steps[-1]["actor/chosen_reward"] > steps[-1]["actor/rejected_reward"]
    assert AutoModelForCausalLM.from_pretrained(whole / "run" / "hf_model").num_parameters() > 0

    checkpoint = f"resume_from_checkpoint={whole}/run/checkpoints/step-000014"
    dpo(shared_runs, tmp_path / "data", tiny_model_dir, resumed, *plain, checkpoint)
    assert lines(resumed) == steps[-2:]


def test_pairs_are_split_over_pipeline_and_data_parallel_ranks(shared_runs, tmp_path, tiny_model_dir):
    """Steps give the metrics of one rank, whatever the layout, also where the loss has means over all pairs."""
    write_problems(tmp_path / "data", seed=3, train=32, val=16, levels=(1,))
    write_pairs(tmp_path / "data" / "train.jsonl", tmp_path / "data" / "pairs-train.jsonl", seed=1)
    options = "actor_train.strategy_args.strategy_config"
    sizes = f"{options}={{tensor_model_parallel_size: 1, sequence_parallel: false, pipeline_model_parallel_size: "
    common = ["max_steps=2", "eval_steps=0", "save_hf_model=false", "dpo_loss_type=kto_pair"]
    found = []
    for name, devices, stages, batch in (("one", "[0]", 1, 16), ("four", "[0,1,2,3]", 2, 4)):
        dpo(
            shared_runs,
            tmp_path / "data",
            tiny_model_dir,
            tmp_path / name,
            *common,
            "num_devices_per_node=4",
            f"actor_train.device_mapping={devices}",
            f"{sizes}{stages}}}",
            f"actor_train.training_args.per_device_train_batch_size={batch}",
            f"actor_train.training_args.gradient_accumulation_steps={16 // batch // (2 if name == 'four' else 1)}",
        )
        found.append(lines(tmp_path / name))
    for one, four in zip(*found, strict=True):
        for key in ("actor/loss", "actor/margin", "actor/accuracy", "actor/grad_norm"):
            assert four[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key
