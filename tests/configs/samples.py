"""Small correct configurations for tests to modify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from roll.base.errors import ConfigError
from roll.configs.agentic import AgenticConfig
from roll.configs.pipeline import RLVRConfig, SFTConfig
from roll.envs.registry import try_environment
from roll.loading.load import load_config
from roll.plan.hardware import Hardware
from roll.plan.memory import MemoryPlan
from roll.plan.plan import Plan

DATA = Path(__file__).parents[1] / "data"
MODEL = str(DATA / "models" / "qwen2.5-7B")
"""config.json alone: 28 heads, 4 key-value heads, 28 layers."""

QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""config.json of Qwen3-30B-A3B."""

RECIPES = DATA / "recipes"
"""Recipes with ROLL's keys; a first line `# refused: ...` says what is missing to run one."""

REFUSED = "# refused: "

READ_KEYS = (
    "global_template",
    "dataset_dir",
    "eval_steps",
    "enable_old_logprobs_recompute",
    "force_disable_old_logprobs_recompute",
    "use_pg_clip_range",
    "pg_clip",
    "train_infer_correction",
    "reward_norm",
    "reward_shift",
    "reward_scale",
    "is_pure_opd",
    "pure_opd_pipeline_type",
    "teacher_pretrain",
    "rl_loss_coef",
    "positive_loss_coef",
    "use_topr_neg_loss_coef",
)
"""Keys of ROLL that functions read, and no table has."""

DPO_KEYS = ("chosen_key", "rejected_key", "ipo", "train_batch_size")
"""The same for preferences."""

LAPTOP = Hardware(gpus=0, cores=2)
SERVER = Hardware(gpus=8, cores=64)

RLVR = f"""
pretrain: {MODEL}
rollout_batch_size: 64
num_return_sequences_in_group: 8
prompt_length: 2048
response_length: 1024
actor_train:
  training_args:
    gradient_accumulation_steps: 64
  data_args:
    file_name: train.jsonl
  strategy_args:
    strategy_config:
      tensor_model_parallel_size: 2
  device_mapping: 0-15
actor_infer:
  device_mapping: 16-23
"""

SFT = f"""
pipeline: sft
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


AGENTIC = f"""
pipeline: agentic
pretrain: {MODEL}
rollout_batch_size: 64
sequence_length: 2048
max_tokens_per_step: 64
eval_steps: 5
custom_envs:
  Lake:
    env_type: frozen_lake
    env_config: {{size: 4, is_slippery: false}}
    max_steps: 6
  Room:
    env_type: sokoban
train_env_manager:
  num_env_groups: 8
  group_size: 4
  group_size_redundancy: 1
  tags: [Lake, Room]
  num_groups_partition: [6, 2]
actor_train:
  training_args:
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 8
  device_mapping: 0-3
actor_infer:
  device_mapping: 4-5
"""

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


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    """The text as a file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def rlvr(folder: Path, *overrides: str, text: str = RLVR) -> RLVRConfig:
    """The RLVR sample with overrides."""
    config = load_config(write(folder, text), overrides)
    assert isinstance(config, RLVRConfig)
    return config


def sft(folder: Path, *overrides: str) -> SFTConfig:
    """The SFT sample with overrides."""
    config = load_config(write(folder, SFT), overrides)
    assert isinstance(config, SFTConfig)
    return config


def agentic(folder: Path, *overrides: str, text: str = AGENTIC) -> AgenticConfig:
    """The agentic sample with overrides."""
    config = load_config(write(folder, text), overrides, try_environment=try_environment)
    assert isinstance(config, AgenticConfig)
    return config


def refusal(folder: Path, *overrides: str, text: str = RLVR) -> str:
    """The error of a configuration that must not load."""
    try:
        load_config(write(folder, text), overrides, try_environment=try_environment)
    except ConfigError as error:
        return str(error)
    raise AssertionError("this configuration loads")


def memory(plan: Plan, role: str) -> MemoryPlan:
    """The memory of a role on its fullest device."""
    return next(item for item in plan.memory if item.role == role)


def bytes_of(plan: Plan, role: str, name: str) -> int:
    """One line of it."""
    return next(line.bytes for line in memory(plan, role).lines if line.name == name)


def override(path: str, value: Any) -> str:
    """`path=value` with the value in YAML on one line."""
    return f"{path}={yaml.safe_dump(value, default_flow_style=True).strip().removesuffix('...').strip()}"


def recipes(refused: bool) -> list[str]:
    """Names of the recipes that are refused, or of the others."""
    files = sorted(RECIPES.glob("*.yaml"))
    return [file.stem for file in files if file.read_text().startswith(REFUSED) == refused]
