"""Plans of agents against numbers worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from roll.configs.agentic import AgenticConfig
from roll.loading.load import load_config
from roll.plan.plan import make_plan
from roll.plan.show import print_plan
from tests.configs.samples import AGENTIC, DATA, LAPTOP, SERVER, agentic, write
from tests.configs.test_agentic import recipe
from tests.configs.test_plan import EXAMPLES, bytes_of, lines

FOLDER = EXAMPLES / "qwen2.5-0.5B-agentic"


def test_batch_arithmetic_of_trajectories(tmp_path: Path) -> None:
    config = agentic(tmp_path, "eval_steps=0", "max_steps=50", "actor_train.infer_batch_size=8")
    assert lines(make_plan(config, SERVER)) == {
        "trajectories per step": 64,
        "groups per step": 16,
        "environments at a time": 40,
        "environment processes": 3,
        "turns per trajectory, at most": 10,
        "tokens per turn, at most": 64,
        "tokens per trajectory, at most": 2048,
        "samples per step": 64,
        "requests at a time on one engine": 20,
        "samples per optimizer step": 64,
        "samples per rank and optimizer step": 16,
        "micro-batches per rank and optimizer step": 8,
        "optimizer steps per batch": 1,
        "forward micro-batches per rank (log-probs)": 2,
        "tokens per step, at most": 64 * 2048,
        "learning-rate schedule": "50 steps",
        "warm-up": "0 steps",
        "weight update": "14.19 GiB",
    }


def test_batch_arithmetic_of_turns(tmp_path: Path) -> None:
    found = lines(make_plan(agentic(tmp_path, "sample_by=step", "rollout_batch_size=68"), SERVER))
    assert found["samples per step, at most"] == 680
    assert found["optimizer steps per batch"] == 11
    assert found["tokens per step, at most"] == 680 * 2048


def test_validation_has_its_own_environments(tmp_path: Path) -> None:
    config = agentic(tmp_path, "val_batch_size=30", "val_env_manager={num_env_groups: 10, tags: [Room]}")
    found = lines(make_plan(config, SERVER))
    assert found["trajectories of a validation"] == 30
    assert found["environments at a time of a validation"] == 10
    assert found["environment processes of a validation"] == 1


def test_the_engine_keeps_one_sequence_for_each_environment(tmp_path: Path) -> None:
    plan = make_plan(agentic(tmp_path), SERVER)
    per_token = 2 * 28 * 4 * 128 * 2
    assert bytes_of(plan, "actor_infer", "KV cache") == 20 * 2048 * per_token


def test_a_plan_for_agents_is_json_and_text(tmp_path: Path) -> None:
    plan = make_plan(agentic(tmp_path), SERVER)
    read = json.loads(json.dumps(plan.as_dict()))
    assert read["pipeline"] == "agentic"
    (line,) = [line for line in read["batch"] if line["name"] == "environments at a time"]
    assert line["formula"] == "8 num_env_groups (6 Lake, 2 Room) x (4 group_size + 1 group_size_redundancy)"
    text = StringIO()
    print_plan(plan, text)
    assert "max_steps of Lake (6), Room (10)" in text.getvalue()


def test_the_published_agentic_recipe_plans_with_sglang(tmp_path: Path) -> None:
    plan = make_plan(recipe(tmp_path), LAPTOP)
    found = lines(plan)
    assert found["trajectories per step"] == found["samples per optimizer step"] == 1024
    assert (found["groups per step"], found["environments at a time"], found["environment processes"]) == (
        128,
        2048,
        128,
    )
    assert found["learning-rate schedule"] == "1024 steps"
    assert (plan.platform, plan.nodes, plan.devices_per_node) == ("cuda", 1, 8)


@pytest.mark.parametrize(("name", "ratio"), [("agent_val_frozen_lake", 0), ("agent_val_frozen_lake_async", 1)])
def test_agentic_examples_plan(name: str, ratio: float) -> None:
    config = load_config(FOLDER / f"{name}.yaml", [f"pretrain={DATA / 'models' / 'qwen2.5-0.5B'}"], "agentic")
    plan = make_plan(config, SERVER)
    assert isinstance(config, AgenticConfig) and config.async_generation_ratio == ratio
    unused = "actor_train.infer_batch_size: has no effect: the old log-probs are those of the engine"
    assert [warning for warning in plan.warnings if not warning.startswith(unused)] == []
    assert len(plan.warnings) == ratio
    assert lines(plan)["samples per step"] == 1024
    assert [role.devices for role in plan.roles] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(item.total < 70 * 2**30 for item in plan.memory)


def test_planning_agents_imports_no_engine(tmp_path: Path) -> None:
    path = write(tmp_path, AGENTIC)
    code = (
        "import sys, roll.loading.load, roll.envs.registry, roll.plan.plan\n"
        f"config = roll.loading.load.load_config({str(path)!r}, try_environment=roll.envs.registry.try_environment)\n"
        "roll.plan.plan.make_plan(config)\n"
        "names = ('roll.envs', 'torch', 'ray', 'sglang', 'megatron', 'transformers')\n"
        "print([name for name in names if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['roll.envs']"
