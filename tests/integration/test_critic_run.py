"""Whole runs with a critic: it learns to predict and is written, and one of its own device warms up alone.

A critic that sees turns and one of a resumed run are in test_agentic_run.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import GAE, lines, recipe

from tests.integration.shared_runs import SharedRuns

pytestmark = pytest.mark.integration

STEPS = 14
CRITIC: dict[str, Any] = GAE["critic"] | {"training_args": {"learning_rate": 3e-3}}


def ppo(inputs: dict[str, Any], folder: Path, **keys: Any) -> Path:
    """A run with a critic and without checkpoints."""
    defaults = {"eval_steps": 0, "save_steps": 0, "rollout_batch_size": 16, "value_clip": 0.5, "critic": CRITIC}
    return recipe(inputs, folder, **GAE | defaults | keys)


@pytest.fixture(scope="module")
def unbroken(shared_runs: SharedRuns, inputs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a deterministic run in which critic and policy learn on the same devices."""
    folder = tmp_path_factory.mktemp("unbroken")
    shared_runs.succeed(ppo(inputs, folder, max_steps=STEPS, ppo_epochs=2, save_hf_model=True))
    return folder


def test_the_critic_begins_at_0_and_learns_to_predict(unbroken):
    steps = lines(unbroken)
    assert len(steps) == STEPS
    assert steps[0]["critic/explained_variance"] == pytest.approx(0, abs=1e-6)
    early, late = (max(line["critic/explained_variance"] for line in part) for part in (steps[:5], steps[-5:]))
    assert late > max(0.05, early), "the best of five steps, since the policy moves on between them"
    for line in steps:
        assert line["critic/grad_norm"] > 0 and line["critic/lr"] == 3e-3
        assert 0 <= line["critic/clip_fraction"] <= 1
        assert line["actor/grad_norm"] > 0 and line["advantage/mean"] == pytest.approx(0, abs=1e-5)


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
    shared_runs.succeed(ppo(inputs, tmp_path, deterministic=False, max_steps=4, **keys))
    steps = lines(tmp_path)
    assert ["actor/grad_norm" in line for line in steps] == [False, False, True, True]
    assert all(line["critic/grad_norm"] > 0 for line in steps)
    assert max(line["staleness/max"] for line in steps) == 1
    assert steps[2]["correction/no_op"] == steps[3]["correction/no_op"] == 0
    # Weights did not change during the warm-up, so older samples are on-policy when the policy first learns.
    assert steps[2]["actor/ratio_deviation_max"] < 1e-4 < steps[3]["actor/ratio_deviation_max"]
