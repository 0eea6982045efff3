"""Whole runs of two policies on one base and one engine: both learn, are accounted for, resume and are exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import inputs_in, lines, recipe
from safetensors.torch import load_file

from roll.report.explain import explain
from roll.report.read import read_run

pytestmark = pytest.mark.integration

STEPS = 12
POLICIES = {"many": {"tags": ["many"], "lora_rank": 8}, "few": {"tags": ["few"], "lora_rank": 4}}
"""Rewarded for digits and letters, and for the lack of them."""

KEYS: dict[str, Any] = {
    "policies": POLICIES,
    "actor_train__model_args": {"dtype": "fp32", "lora_target": "all-linear", "lora_alpha": 16},
    "actor_train__training_args__learning_rate": 5e-2,
    "actor_train__training_args__per_device_train_batch_size": 16,
    "actor_infer__strategy_args__strategy_config": {},
    "actor_train__training_args__gradient_accumulation_steps": 4,
    "rollout_batch_size": 8,
    "num_return_sequences_in_group": 8,
    "save_hf_model": True,
    "eval_steps": 0,
    "save_steps": STEPS // 2,
    "max_steps": STEPS,
    "rewards": {
        "many": {"function": "tests.integration.rewards:length_reward", "tag_included": ["many"]},
        "few": {"function": "tests.integration.rewards:few_reward", "tag_included": ["few"]},
    },
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Any]:
    """Problems whose tags are those of the policies in turn."""
    folder = tmp_path_factory.mktemp("problems")
    found = inputs_in(folder, tiny_model_dir)
    for file in folder.glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        tagged = [row | {"tag": ("many", "few")[number % 2]} for number, row in enumerate(rows)]
        file.write_text("".join(json.dumps(row) + "\n" for row in tagged))
    return found


@pytest.fixture(scope="module")
def unbroken(shared_runs: Any, inputs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    shared_runs.succeed(recipe(inputs, folder, **KEYS))
    return folder


def test_both_policies_learn_opposite_things(unbroken: Path) -> None:
    """The share of digits and letters doubles with one policy and halves with the other, or nearly."""
    steps = [line for line in lines(unbroken) if line["step"]]
    assert len(steps) == STEPS
    shares = {name: [step[f"{name}/rollout/reward_mean"] for step in steps] for name in POLICIES}
    shares["few"] = [1 - reward for reward in shares["few"]]
    grown = {name: sum(share[-3:]) / sum(share[:3]) for name, share in shares.items()}
    assert grown["many"] > 1.5 and grown["few"] < 0.7
    for step in steps:
        for name in POLICIES:
            assert step[f"{name}/correction/log_prob_diff_max"] < 1e-4
            assert step[f"{name}/lora/update_norm"] > 0


def test_the_losses_of_both_are_explained(unbroken: Path) -> None:
    policies = read_run(unbroken / "run").policies
    assert {each.policy for each in policies} == {*POLICIES}
    for policy in policies:
        found = explain(policy, policy.dumped[-1])
        assert found.rows and found.differences == {} and found.unchecked == ""


def test_versions_and_prompts_of_policies_are_accounted_for(unbroken: Path) -> None:
    trained = dict.fromkeys(POLICIES, 0)
    for step in [line for line in lines(unbroken) if line["step"]]:
        assert step["version"] == step["step"]
        for name in POLICIES:
            trained[name] += f"{name}/actor/loss" in step
            assert step[f"{name}/version"] == trained[name]
            assert step.get(f"{name}/staleness/max", 0.0) == 0
        for count in ("submitted", "consumed", "buffered", "in_flight"):
            assert sum(step[f"{name}/ledger/{count}"] for name in POLICIES) == step[f"ledger/{count}"]
    assert json.loads((unbroken / "run/run.json").read_text())["config"]["policies"].keys() == POLICIES.keys()


def test_a_resumed_run_writes_what_an_unbroken_one_does(
    shared_runs: Any, unbroken: Path, inputs: dict[str, Any], tmp_path: Path
) -> None:
    config = recipe(inputs, tmp_path, **KEYS)
    for overrides in ([f"max_steps={STEPS // 2}", "save_hf_model=false"], ["resume_from_checkpoint=true"]):
        shared_runs.succeed(config, *overrides)
    assert lines(tmp_path) == lines(unbroken)
    for name, policy in POLICIES.items():
        one, other = (
            load_file(each / "run/hf_model" / name / "adapter_model.safetensors") for each in (unbroken, tmp_path)
        )
        assert {tensor.shape[0] for key, tensor in one.items() if ".lora_A." in key} == {policy["lora_rank"]}
        assert all(bool((one[key] == other[key]).all()) for key in one)
