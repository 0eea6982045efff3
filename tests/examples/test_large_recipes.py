"""The recipes for many GPUs plan without one, and differ from each other as their names say."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.configs.pipeline import RLVRConfig
from roll.loading.load import load_config
from roll.plan.plan import make_plan
from tests.configs.samples import DATA, LAPTOP

EXAMPLES = Path(__file__).parents[2] / "examples"
OFF_POLICY = sorted((EXAMPLES / "qwen2.5-7B-rlvr-offpolicy").glob("*.yaml"))
ASYNC = EXAMPLES / "qwen2.5-7B-rlvr_megatron" / "rlvr_config_async.yaml"
EXPECTED = (
    "is not a file on this machine",
    "vanilla does not correct for the age of samples",
    "this machine has no GPU",
)


def load(file: Path) -> RLVRConfig:
    config = load_config(file, [f"pretrain={DATA / 'models' / 'qwen2.5-7B'}"])
    assert isinstance(config, RLVRConfig)
    return config


@pytest.mark.parametrize("file", [ASYNC, *OFF_POLICY], ids=lambda file: file.stem)
def test_a_recipe_plans_with_expected_warnings_only(file: Path) -> None:
    plan = make_plan(load(file), LAPTOP)
    assert [text for text in plan.warnings if not any(expected in text for expected in EXPECTED)] == []
    assert (plan.nodes, plan.devices_per_node) == (3, 8)
    assert all(memory.total < 80 * 2**30 for memory in plan.memory)


def test_there_is_one_recipe_for_each_off_policy_loss() -> None:
    variants = {file.stem.removeprefix("rlvr_config").lstrip("_") or "ppo": load(file) for file in OFF_POLICY}
    assert variants.keys() == {"ppo", "topr", "tis", "cispo", "kimi15", "vanilla"}
    for name, config in variants.items():
        assert config.actor_train.pg_variant == name
        assert config.output_dir.endswith(f"/{name}")
        assert config.optimizer_steps_per_batch == 2
