"""The recipes for many GPUs plan without one, and differ from each other as their names say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.configs.pipeline import RLVRConfig
from roll.loading.load import load_config
from roll.plan.memory import STATE_LINES
from roll.plan.plan import Plan, make_plan
from tests.configs.samples import DATA, LAPTOP, QWEN3_30B, memory

EXAMPLES = Path(__file__).parents[2] / "examples"
OFF_POLICY = sorted((EXAMPLES / "qwen2.5-7B-rlvr-offpolicy").glob("*.yaml"))
MIXTURE = EXAMPLES / "qwen3-30B-A3B-rlvr" / "rlvr_config.yaml"
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


def mixture_plan(folder: Path, **sizes: int) -> Plan:
    """The plan of the recipe of a mixture, with these sizes in `strategy_config`."""
    (folder / "config.json").write_text(json.dumps(QWEN3_30B))
    options = [f"actor_train.strategy_args.strategy_config.{key}={value}" for key, value in sizes.items()]
    return make_plan(load_config(MIXTURE, [f"pretrain={folder}", *options]), LAPTOP)


def test_the_recipe_of_a_mixture_fits_its_gpus(tmp_path: Path) -> None:
    plan = mixture_plan(tmp_path)
    taking_turns = "weights are sent through host memory"
    assert [text for text in plan.warnings if not any(known in text for known in (*EXPECTED, taking_turns))] == []
    [trainer] = (role for role in plan.roles if role.role == "actor_train")
    assert (plan.nodes, plan.devices_per_node, trainer.experts) == (2, 8, "etp1 ep8 edp2")
    assert all(each.total < 80 * 2**30 for each in plan.memory)


@pytest.mark.parametrize(("ranks", "tensor"), [(8, 1), (1, 2)], ids=["the recipe", "experts split as the rest"])
def test_the_states_of_a_mixture_are_what_megatron_counts(tmp_path: Path, ranks: int, tensor: int) -> None:
    """theoretical_memory_usage.py of Megatron-LM: 6 + 12 / (data ranks) B for each parameter of a rank.

    It splits experts as the other weights; where they are on other ranks, these replace the tensor and data ranks.
    """
    hidden, layers, columns = 2048, 48, 2048 * 2
    attention = 2 * hidden * hidden * (1 + 4 / 32) * 32 * 128 / hidden
    dense = layers * (attention + 2 * hidden) + hidden + 152_064 * columns
    experts = layers * 2 * hidden * 768 * 128 * 3 / 2
    expected = dense / 2 * (6 + 12 / 8) + experts / (ranks * tensor) * (6 + 12 / (16 / (ranks * tensor)))
    plan = mixture_plan(tmp_path, expert_model_parallel_size=ranks, expert_tensor_parallel_size=tensor)
    found = {line.name: line.bytes for line in memory(plan, "actor_train").lines}
    assert sum(found[name] for name in STATE_LINES) == pytest.approx(expected, rel=0.01)
