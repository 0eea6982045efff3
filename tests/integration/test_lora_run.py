"""Whole runs that train adapters: the model below is the reference, resumed runs continue exactly, exports agree."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runs import count_dropped, lines, recipe

from roll.trackers.sample_files import read_samples

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[2] / "docs/lora.md"

LORA: dict[str, Any] = {
    "actor_train__model_args": {"dtype": "fp32", "lora_target": "all-linear", "lora_rank": 4, "lora_alpha": 8},
    "actor_train__training_args__learning_rate": 1e-2,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "save_hf_model": True,
    "save_merged_hf_model": True,
    "eval_steps": 0,
    "max_steps": 3,
}


@pytest.fixture(scope="module")
def unbroken(shared_runs, inputs, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    shared_runs.succeed(recipe(inputs, folder, **LORA))
    return folder


def test_the_first_policy_is_the_reference_and_later_ones_are_not(unbroken):
    steps = lines(unbroken)[-3:]
    assert steps[0]["actor/kl_loss"] == 0.0
    assert all(step["actor/kl_loss"] > 0 for step in steps[1:])
    assert all(0 < step["lora/update_norm"] < 1 and step["lora/norm_b"] > 0 for step in steps)
    assert all(step["correction/log_prob_diff_max"] < 1e-4 for step in steps)


def test_the_kl_is_that_to_a_reference_with_devices_of_its_own(shared_runs, unbroken, inputs, tmp_path):
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    reference = {
        "model_args": {"dtype": "fp32"},
        "strategy_args": {"strategy_config": parallel},
        "device_mapping": [0, 1],
    }
    shared_runs.succeed(recipe(inputs, tmp_path, **LORA, reference=reference))
    own = [line["actor/kl_loss"] for line in lines(unbroken)]
    assert [line["actor/kl_loss"] for line in lines(tmp_path)] == pytest.approx(own, abs=1e-6)


def test_a_resumed_run_writes_what_an_unbroken_one_does(shared_runs, unbroken, inputs, tmp_path):
    config = recipe(inputs, tmp_path, **LORA)
    shared_runs.succeed(config, "max_steps=2", "save_hf_model=false", "save_merged_hf_model=false")
    shared_runs.succeed(config, "resume_from_checkpoint=true")
    assert lines(tmp_path) == lines(unbroken)


def test_both_exports_are_the_same_policy(unbroken, inputs):
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(inputs["pretrain"])
    ids = torch.arange(1, 25)[None]
    with torch.no_grad():
        before = base(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(unbroken / "run" / "merged_hf_model")(ids).logits
        adapted = importlib.import_module("peft").PeftModel.from_pretrained(base, unbroken / "run" / "hf_model")
        assert torch.allclose(adapted(ids).logits, merged, atol=1e-5)
    assert (merged - before).abs().max() > 1e-3


def test_adapters_are_sent_while_requests_run_and_every_prompt_is_accounted_for(shared_runs, inputs, tmp_path):
    """Responses that are longer than a step, at ratio 1; a response has one version, the newest when it started."""
    keys = {key: value for key, value in LORA.items() if not key.startswith(("save_", "use_kl", "kl_"))}
    keys |= {"async_generation_ratio": 1, "deterministic": False, "response_length": 40, "max_steps": 6}
    keys |= {"actor_train__lora_update": "adapter", "actor_infer__strategy_args__strategy_config": {}, "eval_steps": 4}
    keys |= {"rollout_dump_every": 1}
    config = recipe(inputs, tmp_path, **keys)
    shared_runs.succeed(config)
    steps = [line for line in lines(tmp_path) if line["step"]]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert max(line["staleness/max"] for line in steps) == 1, "no response began before an update and ended after it"
    for line in steps:
        assert count_dropped(line) == 0
        assert line["staleness/max"] <= 1 and line["lora/adapters_loaded"] <= 3
        assert line["correction/log_prob_diff_max"] < 1e-4 or line["staleness/token_max"]
        assert line["weight_update/verified"] == 1
    assert all(line["weight_update/bytes"] == steps[0]["weight_update/bytes"] for line in steps)
    for line in steps:
        rows = read_samples(tmp_path / "run" / "samples", line["step"])
        versions = [set(row["weight_version"]) for row in rows]
        assert all(len(each) == 1 for each in versions), "a response has one adapter"
        assert line["staleness/max"] == line["step"] - 1 - min(min(each) for each in versions)


def test_the_example_of_the_page_runs(shared_runs, inputs, tmp_path):
    example = yaml.safe_load(PAGE.read_text().split("```yaml")[1].split("```")[0])
    keys = {"max_steps": 2, "eval_steps": 0, "actor_train__model_args": {"dtype": "fp32"}}
    config = recipe(inputs, tmp_path, **keys)
    tree = yaml.safe_load(config.read_text())
    actor = example.pop("actor_train")
    tree["actor_train"]["model_args"] |= actor["model_args"]
    tree["actor_train"]["training_args"] |= actor["training_args"]
    config.write_text(yaml.safe_dump(tree | example))
    shared_runs.succeed(config)
    assert [line["actor/kl_loss"] for line in lines(tmp_path) if line["step"]][0] == 0.0
    exported = json.loads((tmp_path / "run/hf_model/adapter_config.json").read_text())
    assert (exported["r"], exported["lora_alpha"]) == (
        actor["model_args"]["lora_rank"],
        actor["model_args"]["lora_alpha"],
    )
