"""The four asynchronous recipes load with keys of other frameworks and configure what these keys mean there."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from roll.compat.systems.async_trainers import ASYNC
from roll.configs.pipeline import RLVRConfig
from roll.loading.load import load_config
from roll.pipeline.extensions import load_extensions
from roll.plan.hardware import prepare_run
from roll.plan.plan import make_plan
from tests.configs.samples import LAPTOP, write

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = ["one_step_off", "rlvr_async", "fully_async", "offpolicy_buffer"]
NOTES = ("is read as", "engines always return log-probs", "engines keep their memory")
"""Notes that a correct recipe may have."""


def load(name: str, folder: Path, model: Path) -> RLVRConfig:
    data = write(folder, "{}", "problems.jsonl")
    overrides = [f"{role}.data_args.file_name={data}" for role in ("actor_train", "validation")]
    config = load_config(EXAMPLES / name / "rlvr_config.yaml", [f"pretrain={model}", *overrides])
    assert isinstance(config, RLVRConfig)
    return config


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_plans_with_expected_notes_only(name: str, tmp_path: Path, tiny_model_dir: Path):
    config = load(name, tmp_path, tiny_model_dir)
    plan = make_plan(config, LAPTOP)
    assert [warning for warning in plan.warnings if not any(note in warning for note in NOTES)] == []
    assert prepare_run(config, LAPTOP) == plan.warnings
    load_extensions(config)
    assert (plan.platform, plan.nodes) == ("cpu", 1)
    assert not set(config.actor_train.device_mapping) & set(config.actor_infer.device_mapping)


def test_one_step_off_recomputes_no_log_probs_and_is_one_version_stale(tmp_path: Path, tiny_model_dir: Path):
    config = load("one_step_off", tmp_path, tiny_model_dir)
    assert config.async_generation_ratio == 1
    assert (config.old_log_probs_source, config.pg_ratio_base) == ("behavior", "behavior")
    assert config.in_flight_policy == "drain"


def test_rlvr_async_interpolates_and_counts_prompts(tmp_path: Path, tiny_model_dir: Path):
    config = load("rlvr_async", tmp_path, tiny_model_dir)
    assert config.exp_name == "rlvr_async-tis"
    assert config.actor_infer.generating_args.max_new_tokens == config.response_length
    assert config.actor_infer.generating_args.num_return_sequences == 8


def test_fully_async_sets_every_key_of_its_block(tmp_path: Path, tiny_model_dir: Path):
    config = load("fully_async", tmp_path, tiny_model_dir)
    block = yaml.safe_load((EXAMPLES / "fully_async" / "rlvr_config.yaml").read_text())["async_training"]
    moved = {key for path in ASYNC.move for head, _, key in [path.rpartition(".")] if head == "async_training"}
    assert moved <= set(block)
    assert config.actor_infer.generation_timeout_s == config.sync_timeout_s == 30
    assert config.async_training.batch_generation_interval_s == 0.1
    made = load_extensions(config)
    assert made.metrics is not None
    step = made.metrics(config).step(1, {"time/step": 10.0, "time/val": 6.0})
    assert step == {"mine/samples_per_second": 32.0}


def test_offpolicy_buffer_sets_ratio_staleness_and_clipped_weights(tmp_path: Path, tiny_model_dir: Path):
    config = load("offpolicy_buffer", tmp_path, tiny_model_dir)
    assert (config.actor_infer.device_mapping, config.actor_train.device_mapping) == ([2], [0, 1])
    assert (config.async_generation_ratio, config.async_training.max_staleness_allowed) == (2, 3)
    weights = config.correction.weights
    assert (weights.level, weights.mode, weights.lower, weights.upper) == ("token", "clamp", 0.5, 2.0)
