"""Training of a reward model end to end: it learns which answers are right, and is exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import lines

from examples.tiny_math.problems import write_problems
from examples.tiny_reward_model.demo import write_pairs
from roll.configs.arguments import DataArguments
from roll.datasets.preferences import encode_preferences, load_preferences
from tests.integration.shared_runs import SharedRuns

pytestmark = pytest.mark.integration

STEPS = 20


def test_a_run_learns_which_answers_are_right_and_is_exported(
    shared_runs: SharedRuns, tmp_path: Path, tiny_model_dir: Path
) -> None:
    write_problems(tmp_path / "data", seed=3, train=16, val=16, levels=(1,))
    pairs = tmp_path / "pairs.jsonl"
    write_pairs(tmp_path / "data" / "train.jsonl", pairs, seed=1)
    keys = "actor_train.training_args.learning_rate=0.005", f"max_steps={STEPS}", f"eval_steps={STEPS}"
    recipe = "tiny_reward_model/reward_model_config.yaml"
    shared_runs.learn(recipe, tiny_model_dir, tmp_path, pairs, pairs, *keys)
    steps = lines(tmp_path)
    assert steps[0]["val/loss"] == pytest.approx(0.693147, abs=1e-5) and steps[0]["val/accuracy"] == 0
    assert steps[1]["actor/loss"] == pytest.approx(0.693147, abs=1e-5) and steps[1]["actor/margin"] == 0
    assert steps[-1]["val/accuracy"] > 0.75 and steps[-1]["val/loss"] < steps[0]["val/loss"]
    assert steps[-1]["actor/chosen_reward"] > steps[-1]["actor/rejected_reward"]
    assert accuracy(tmp_path / "run" / "hf_model", pairs) == pytest.approx(steps[-1]["val/accuracy"])


def accuracy(folder: Path, pairs: Path) -> float:
    """The share of pairs that transformers ranks right with an exported model."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    preferences = load_preferences(str(pairs), DataArguments())
    encoded, _ = encode_preferences(preferences, tokenizer, "native", 1000, 1000)
    both = [[*one.prompt_ids, *one.response_ids] for pair in encoded for one in (pair.chosen, pair.rejected)]
    batch = tokenizer.pad({"input_ids": both}, return_tensors="pt", padding_side="right")
    with torch.no_grad():
        rewards = model(**batch).logits.view(-1, 2)
    return float((rewards[:, 0] > rewards[:, 1]).float().mean())
