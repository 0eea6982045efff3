"""Configurations of the pipelines that learn from pairs: keys, plan and memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.configs.check import check
from roll.configs.pipeline import PreferenceConfig, RewardModelConfig
from roll.hub.names import CONFIG_NAME
from roll.loading.load import load_config
from roll.plan.plan import Plan, make_plan
from tests.configs.samples import DPO, MODEL, REWARD_MODEL, SERVER, bytes_of, memory, refusal, write


def load(folder: Path, *overrides: str, text: str = REWARD_MODEL) -> PreferenceConfig:
    config = load_config(write(folder, text), overrides)
    assert isinstance(config, PreferenceConfig)
    return config


def lines(plan: Plan) -> dict[str, int | float | str]:
    return {line.name: line.value for line in plan.batch}


@pytest.mark.parametrize("text", [REWARD_MODEL, DPO], ids=["reward_model", "dpo"])
def test_batches_are_counted_in_pairs_of_two_sequences(tmp_path: Path, text: str) -> None:
    found = lines(make_plan(load(tmp_path, text=text), SERVER))
    assert found["pairs per optimizer step"] == 16 and found["optimizer steps per batch"] == 1
    assert found["tokens per step, at most"] == 16 * 2 * 32


def test_a_reward_model_has_a_value_head_and_no_reference(tmp_path: Path) -> None:
    plan = make_plan(load(tmp_path), SERVER)
    assert [role.role for role in plan.roles] == ["actor_train"]
    assert bytes_of(plan, "actor_train", "value head") == 2 * 4 * 2 * 32 * 3584 * 4
    names = {line.name for line in memory(plan, "actor_train").lines}
    assert not names & {"output head", "head gradient"}
    policy = bytes_of(make_plan(load(tmp_path, text=DPO), SERVER), "actor_train", "weights")
    assert bytes_of(plan, "actor_train", "weights") < policy, "without the output projection"


def test_a_reward_model_can_start_from_one(tmp_path: Path) -> None:
    raw = json.loads((Path(MODEL) / CONFIG_NAME).read_text())
    raw |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "reward"}}
    (tmp_path / CONFIG_NAME).write_text(json.dumps(raw))
    assert check(load(tmp_path, f"pretrain={tmp_path}")).errors == []
    assert "Qwen2ForSequenceClassification is not supported" in refusal(tmp_path, f"pretrain={tmp_path}", text=DPO)


def test_rewards_are_centered_if_asked_for(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert isinstance(config, RewardModelConfig) and config.center_rewards_coefficient is None
    config = load(tmp_path, "center_rewards_coefficient=0.01")
    assert isinstance(config, RewardModelConfig) and config.center_rewards_coefficient == 0.01
