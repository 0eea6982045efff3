"""Agentic configurations: defaults, derived values and spellings of other recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.configs.agentic import AgenticConfig
from roll.configs.check import check
from roll.configs.pipeline import RLVRConfig
from roll.loading.load import build_config, load_config, read_pipeline
from tests.configs.samples import AGENTIC, DATA, MODEL, agentic, refusal, write

RECIPE = DATA / "recipes" / "agent_val_frozen_lake_async.yaml"
LEAST = f"""
pretrain: {MODEL}
sequence_length: 1024
max_tokens_per_step: 32
val_batch_size: 64
actor_train: {{device_mapping: [0]}}
actor_infer: {{device_mapping: [1]}}
"""


def recipe(folder: Path) -> AgenticConfig:
    """The published recipe with the SGLang section of the error about vllm."""
    text = RECIPE.read_text()
    engine = text.index("strategy_name: vllm")
    block = "strategy_name: sglang\n    strategy_config:\n      mem_fraction_static: 0.8\n      page_size: 16\n"
    devices = text.index("  device_mapping: list(range(4,8))")
    config = load_config(write(folder, text[:engine] + block + text[devices:]))
    assert isinstance(config, AgenticConfig)
    return config


def test_published_recipe_loads(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    lake = config.custom_envs["FrozenLake"]
    assert list(config.custom_envs) == ["FrozenLake"]
    assert (lake.env_type, lake.max_steps, lake.max_tokens_per_step) == ("frozen_lake", 10, 128)
    assert lake.env_config == {"size": 4, "p": 0.8, "is_slippery": False, "format_penalty": -0.01, "max_steps": 10}
    train, validation = config.train_env_manager, config.val_env_manager
    assert (train.num_env_groups, train.group_size, train.num_groups_partition) == (256, 8, [256])
    assert (validation.num_env_groups, validation.group_size, config.val_batch_size) == (1024, 1, 1024)
    assert (config.sample_by, config.samples_per_batch, config.groups_per_batch) == ("traj", 1024, 128)
    assert config.num_return_sequences_in_group == 8
    message = [str(warning) for warning in check(config).warnings]
    assert not any("truncated distribution" in text for text in message), "the kept tokens are replayed"
    assert any(text.startswith("reward_pretrain: has no effect") for text in message)


def test_defaults_of_a_minimal_file(tmp_path: Path) -> None:
    config = agentic(tmp_path, text=LEAST)
    defaults = AgenticConfig()
    assert (defaults.env_step_timeout_s, defaults.trajectory_timeout_s, defaults.max_actions_per_traj) == (60, 3600, 10)
    assert defaults.batch_adjust_mode == "pad"
    assert (config.train_env_manager.group_size, config.val_env_manager.group_size) == (8, 1)
    assert (config.train_env_manager.num_env_groups, config.train_env_manager.processes) == (8, 4)
    assert (config.response_length, config.prompt_length, config.sequence_length) == (32, 992, 1024)
    for role in (config.actor_infer, config.validation):
        assert (role.generating_args.max_new_tokens, role.generating_args.num_return_sequences) == (32, 1)
    assert config.custom_envs["FrozenLake"].env_manager_cls == "traj"


@pytest.mark.parametrize(
    ("text", "pipeline"),
    [
        ("custom_envs: {}", "agentic"),
        ("train_env_manager: {}", "agentic"),
        ("val_batch_size: 8", "agentic"),
        ("max_tokens_per_step: 8", "agentic"),
        ("val_batch_size: 8\nrewards: {}", "rlvr"),
        ("val_batch_size: 8\nactor_train: {data_args: {file_name: a.jsonl}}", "rlvr"),
        ("pipeline: rlvr\ncustom_envs: {}", "rlvr"),
        ("prompt_length: 8", "rlvr"),
    ],
)
def test_pipeline_is_inferred_from_keys(tmp_path: Path, text: str, pipeline: str) -> None:
    assert read_pipeline(write(tmp_path, text)) == pipeline


def test_val_batch_size_has_no_effect_in_rlvr(tmp_path: Path) -> None:
    config = build_config(
        {
            "rewards": {"math_rule": {}},
            "val_batch_size": 8,
            "pretrain": MODEL,
            "response_length": 8,
            "num_return_sequences_in_group": 8,
            "actor_train": {"device_mapping": [0], "data_args": {"file_name": "a.jsonl"}},
            "actor_infer": {"device_mapping": [1]},
        }
    )
    assert isinstance(config, RLVRConfig)
    assert ("val_batch_size", "has no effect: validation runs over the whole validation set") in config.source.notes


def test_agentic_keys_are_refused_in_rlvr(tmp_path: Path) -> None:
    message = refusal(tmp_path, "custom_envs={}", "pipeline=rlvr")
    assert "custom_envs: unknown key; it belongs to pipeline agentic, and this is rlvr" in message


def test_max_steps_comes_from_entry_options_or_pipeline(tmp_path: Path) -> None:
    config = agentic(tmp_path, "max_actions_per_traj=9")
    assert [entry.max_steps for entry in config.custom_envs.values()] == [6, 9]
    assert [entry.env_config["max_steps"] for entry in config.custom_envs.values()] == [6, 9]
    assert agentic(tmp_path, "custom_envs.Room.env_config={max_steps: 7}").custom_envs["Room"].max_steps == 7
    assert config.turns == 9


def test_max_tokens_per_step_comes_from_entry_pipeline_or_sampling(tmp_path: Path) -> None:
    config = agentic(tmp_path, "custom_envs.Room.max_tokens_per_step=100")
    assert [entry.max_tokens_per_step for entry in config.custom_envs.values()] == [64, 100]
    assert config.actor_infer.generating_args.max_new_tokens == config.response_length == 100
    text = LEAST.replace("max_tokens_per_step: 32\n", "")
    own = agentic(tmp_path, "custom_envs={Room: {env_type: sokoban, max_tokens_per_step: 30}}", text=text)
    assert own.actor_infer.generating_args.max_new_tokens == 30
    nothing = agentic(tmp_path, "validation.generating_args.max_new_tokens=null")
    assert nothing.validation.generating_args.max_new_tokens == 64
    sampled = agentic(tmp_path, "actor_infer.generating_args.max_new_tokens=20", text=text)
    assert (sampled.max_tokens_per_step, sampled.validation.generating_args.max_new_tokens) == (20, 20)


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("sample_by=step", "step"),
        ("custom_envs.Room.env_manager_cls=step", "step"),
        ("custom_envs.Room.env_manager_cls=roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager", "step"),
        ("custom_envs.Room.env_manager_cls=roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager", "traj"),
    ],
)
def test_samples_are_trajectories_or_turns(tmp_path: Path, override: str, kind: str) -> None:
    config = agentic(tmp_path, override)
    assert config.sample_by == kind
    assert {entry.env_manager_cls for entry in config.custom_envs.values()} == {kind}
    assert config.samples_per_batch == (64 if kind == "traj" else 64 * 10)


def test_number_of_groups_follows_from_batch_or_partition(tmp_path: Path) -> None:
    manager = agentic(tmp_path, "train_env_manager={group_size: 8}", text=LEAST).train_env_manager
    assert (manager.num_env_groups, manager.tags, manager.num_groups_partition) == (8, ["FrozenLake"], [8])
    text = AGENTIC.replace("  num_env_groups: 8\n", "")
    assert agentic(tmp_path, text=text).train_env_manager.num_env_groups == 8


@pytest.mark.parametrize(("ratio", "groups"), [(0, 8), (0.3, 10), (2, 24), (50, 32)])
def test_environments_of_as_many_batches_run_as_generation_may_be_ahead(
    tmp_path: Path, ratio: float, groups: int
) -> None:
    config = agentic(tmp_path, f"async_generation_ratio={ratio}", text=LEAST)
    manager = config.train_env_manager
    assert (manager.num_env_groups, manager.num_groups_partition) == (groups, [groups])
    assert not [warning for warning in check(config).warnings if "num_env_groups" in str(warning)]
    four = "custom_envs={A: {env_type: sokoban}, B: {env_type: sokoban}, C: {}, D: {}}"
    several = agentic(tmp_path, f"async_generation_ratio={ratio}", four, text=LEAST)
    assert several.train_env_manager.num_groups_partition == [groups // 4] * 4


@pytest.mark.parametrize(("per_process", "processes"), [(16, 3), (40, 1), (39, 2), (0, 1)])
def test_number_of_environment_processes(tmp_path: Path, per_process: int, processes: int) -> None:
    manager = agentic(tmp_path, f"train_env_manager.max_env_num_per_worker={per_process}").train_env_manager
    assert (manager.environments, manager.processes) == (8 * (4 + 1), processes)


def test_env_monitor_is_read_as_a_deadline(tmp_path: Path) -> None:
    config = agentic(tmp_path, "env_monitor={enable: true, monitor_interval: 30, hung_timeout: 900}")
    assert config.trajectory_timeout_s == 900
    notes = dict(config.source.notes)
    assert notes["env_monitor.hung_timeout"] == "is read as trajectory_timeout_s"
    assert notes["env_monitor"].startswith("has no effect: every wait has a deadline")


def test_unknown_environment_option_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, "custom_envs.Lake.env_config.history_length=3", text=AGENTIC)
    assert "custom_envs.Lake.env_config.history_length: unknown key; known: " in message
