"""Whole runs with a critic on real engines: it learns, resumes bit for bit, warms up alone, and sees turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import inputs_in, lines, recipe

from tests.integration.shared_runs import SharedRuns
from tests.integration.test_agentic_run import agentic

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

STEPS = 14
CRITIC: dict[str, Any] = {
    "model_args": {"dtype": "fp32"},
    "training_args": {"learning_rate": 3e-3},
    "strategy_args": {"strategy_config": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    "device_mapping": [0, 1],
}
GAE = {"adv_estimator": "gae", "lambd": 0.9, "whiten_advantages": True, "critic": CRITIC}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Any]:
    """The part of a recipe that says where model and problems are."""
    return inputs_in(tmp_path_factory.mktemp("problems"), tiny_model_dir)


def ppo(inputs: dict[str, Any], folder: Path, **keys: Any) -> Path:
    """A deterministic run in which critic and policy learn on the same devices."""
    defaults = {"eval_steps": 0, "max_steps": STEPS, "save_steps": STEPS - 2, "rollout_batch_size": 16}
    return recipe(inputs, folder, **defaults | {"value_clip": 0.5, "ppo_epochs": 2} | GAE | keys)


@pytest.fixture(scope="module")
def unbroken(shared_runs: SharedRuns, inputs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a deterministic run from start to end."""
    folder = tmp_path_factory.mktemp("unbroken")
    code, output = shared_runs.run(ppo(inputs, folder, save_hf_model=True))
    assert code == 0, output
    return folder


def test_the_critic_begins_at_0_and_learns_to_predict(unbroken):
    steps = lines(unbroken)
    assert len(steps) == STEPS
    assert steps[0]["critic/explained_variance"] == pytest.approx(0, abs=1e-6)
    early, late = ([line["critic/explained_variance"] for line in part] for part in (steps[:5], steps[-5:]))
    assert sum(late) / 5 > max(0.05, sum(early) / 5)
    for line in steps:
        assert line["critic/grad_norm"] > 0 and line["critic/lr"] == 3e-3
        assert 0 <= line["critic/clip_fraction"] <= 1
        assert line["actor/grad_norm"] > 0 and line["advantage/mean"] == pytest.approx(0, abs=1e-5)


def test_a_resumed_run_writes_what_the_unbroken_one_does(shared_runs, unbroken, inputs, tmp_path):
    checkpoint = unbroken / "run" / "checkpoints" / f"step-{STEPS - 2:06d}"
    code, output = shared_runs.run(ppo(inputs, tmp_path, resume_from_checkpoint=str(checkpoint)))
    assert code == 0, output
    assert lines(tmp_path) == lines(unbroken)[STEPS - 2 :]


def test_the_model_of_the_critic_is_written_too(unbroken):
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    exported = unbroken / "run" / "hf_model"
    critic = AutoModelForTokenClassification.from_pretrained(exported / "critic")
    assert critic.num_labels == 1 and critic.score.weight.abs().max() > 0
    assert AutoModelForCausalLM.from_pretrained(exported).num_parameters() > 0


def test_a_critic_on_its_own_device_warms_up_before_the_policy_learns_from_stale_samples(shared_runs, inputs, tmp_path):
    critic = CRITIC | {"device_mapping": [3], "strategy_args": {"strategy_config": {}}}
    keys = {"num_devices_per_node": 4, "critic": critic, "critic_warmup": 2, "async_generation_ratio": 1}
    keys |= {"actor_train__training_args__gradient_accumulation_steps": 8}
    config = ppo(inputs, tmp_path, deterministic=False, max_steps=4, ppo_epochs=1, **keys)
    code, output = shared_runs.run(config)
    assert code == 0, output
    steps = lines(tmp_path)
    assert ["actor/grad_norm" in line for line in steps] == [False, False, True, True]
    assert all(line["critic/grad_norm"] > 0 for line in steps)
    assert max(line["staleness/max"] for line in steps) == 1
    assert steps[2]["correction/no_op"] == steps[3]["correction/no_op"] == 0
    # Weights did not change during the warm-up, so older samples are on-policy when the policy first learns.
    assert steps[2]["actor/ratio_deviation_max"] < 1e-4 < steps[3]["actor/ratio_deviation_max"]


@pytest.mark.parametrize("sample_by", ["traj", "step"])
def test_the_turns_of_agents_have_values(shared_runs, tiny_model_dir, tmp_path, sample_by):
    config = agentic(
        {"pretrain": str(tiny_model_dir), "actor_train": {"data_args": {"template": "native"}}, "validation": {}},
        tmp_path,
        eval_steps=0,
        max_steps=2,
        sample_by=sample_by,
        save_checkpoint=False,
        save_steps=0,
        **GAE,
    )
    code, output = shared_runs.run(config)
    assert code == 0, output
    first, second = lines(tmp_path)
    assert first["critic/explained_variance"] == pytest.approx(0, abs=1e-6)
    assert second["critic/explained_variance"] != 0 and second["critic/loss"] > 0
