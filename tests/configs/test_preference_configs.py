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
from tests.configs.samples import MODEL, SERVER, bytes_of, memory, refusal, write

REWARD_MODEL = f"""
pipeline: reward_model
pretrain: {MODEL}
prompt_length: 24
response_length: 8
actor_train:
  training_args:
    per_device_train_batch_size: 4
    gradient_accumulation_steps: 2
  data_args:
    file_name: [train.jsonl]
  device_mapping: [0, 1]
"""
DPO = REWARD_MODEL.replace("reward_model", "dpo") + "reference: {device_mapping: [0, 1]}"

TP = "actor_train.strategy_args.strategy_config.tensor_model_parallel_size"


def load(folder: Path, *overrides: str, text: str = REWARD_MODEL) -> PreferenceConfig:
    config = load_config(write(folder, text), overrides)
    assert isinstance(config, PreferenceConfig)
    return config


def lines(plan: Plan) -> dict[str, int | float | str]:
    return {line.name: line.value for line in plan.batch}


def test_label_smoothing_leaves_a_preference(tmp_path: Path) -> None:
    message = "label_smoothing: 0.5 takes half of all pairs for swapped, so no preference is learned; use less"
    assert message in refusal(tmp_path, "label_smoothing=0.5", text=DPO)
    assert check(load(tmp_path, "label_smoothing=0.4", text=DPO)).errors == []


def test_kto_pair_with_one_pair_in_a_step_is_warned_of(tmp_path: Path) -> None:
    training = "actor_train.training_args"
    one = [f"{training}.per_device_train_batch_size=1", f"{training}.gradient_accumulation_steps=1"]
    devices = ["actor_train.device_mapping=[0]", "reference.device_mapping=[0]"]
    config = load(tmp_path, "dpo_loss_type=kto_pair", *one, *devices, text=DPO)
    assert "kto_pair compares a response with the mean over the pairs" in str(check(config).warnings)
    assert check(load(tmp_path, "dpo_loss_type=kto_pair", text=DPO)).warnings == []


@pytest.mark.parametrize("text", [REWARD_MODEL, DPO], ids=["reward_model", "dpo"])
def test_batches_are_counted_in_pairs_of_two_sequences(tmp_path: Path, text: str) -> None:
    found = lines(make_plan(load(tmp_path, text=text), SERVER))
    assert found["pairs per optimizer step"] == 16 and found["optimizer steps per batch"] == 1
    assert found["tokens per step, at most"] == 16 * 2 * 32


@pytest.mark.parametrize("text", [REWARD_MODEL, DPO], ids=["reward_model", "dpo"])
@pytest.mark.parametrize(
    ("sizes", "least", "rounded"),
    [
        ([], 64, ""),
        ([f"{TP}=2"], 64, ""),
        (
            [f"{TP}=2", "response_length=9", "actor_train.use_sequence_packing=false"],
            68,
            ", rounded up to 68 for tensor parallel 2",
        ),
        ([f"{TP}=2", "response_length=9", "actor_train.use_sequence_packing=true"], 66, ""),
    ],
)
def test_a_micro_batch_holds_both_rows_of_a_pair(
    tmp_path: Path, text: str, sizes: list[str], least: int, rounded: str
) -> None:
    limit = "actor_train.max_tokens_per_microbatch_in_train"
    dynamic = [*sizes, "actor_train.use_dynamic_batching_in_train=true"]
    assert check(load(tmp_path, *dynamic, f"{limit}={least}", text=text)).errors == []
    length = 33 if "response_length=9" in sizes else 32
    message = f"cannot hold a pair of 2 x sequence_length {length} = {2 * length}{rounded}; use at least that"
    for short in (length, least - 1):
        assert f"{limit}: {short} {message}" in refusal(tmp_path, *dynamic, f"{limit}={short}", text=text)


@pytest.mark.parametrize("text", [REWARD_MODEL, DPO], ids=["reward_model", "dpo"])
def test_a_forward_micro_batch_holds_one_row_of_a_pair(tmp_path: Path, text: str) -> None:
    limit = "actor_train.max_tokens_per_microbatch_in_infer"
    validated = ["eval_steps=1", "validation.data_args.file_name=val.jsonl"]
    validated.append("actor_train.use_dynamic_batching_in_infer=true")
    assert check(load(tmp_path, *validated, f"{limit}=32", text=text)).errors == []
    message = f"{limit}: 31 cannot hold one sample of sequence_length 32; use at least that"
    assert message in refusal(tmp_path, *validated, f"{limit}=31", text=text)


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
    assert "center_rewards_coefficient" in refusal(tmp_path, "center_rewards_coefficient=-1", text=REWARD_MODEL)
    assert "it belongs to pipeline reward_model" in refusal(tmp_path, "center_rewards_coefficient=1", text=DPO)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dpo_loss_type=ipo", "dpo_loss_type: unknown key; it belongs to pipeline dpo, and this is reward_model"),
        ("actor_train.pg_variant=tis", "this pipeline has no policy loss"),
        ("response_length=null", "response_length: is not given"),
    ],
)
def test_keys_of_other_pipelines_are_errors(tmp_path: Path, override: str, message: str) -> None:
    assert message in refusal(tmp_path, override, text=REWARD_MODEL)


def test_forward_sizes_have_no_effect_without_validation(tmp_path: Path) -> None:
    warnings = [str(warning) for warning in check(load(tmp_path, "actor_train.infer_batch_size=64")).warnings]
    assert any("actor_train.infer_batch_size: has no effect: eval_steps is 0" in warning for warning in warnings)
    validated = ["eval_steps=1", "validation.data_args.file_name=val.jsonl", "actor_train.infer_batch_size=64"]
    assert not any("infer_batch_size" in str(warning) for warning in check(load(tmp_path, *validated)).warnings)
