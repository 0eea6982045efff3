"""Whole RLVR and SFT runs on real engines: reproducible, resumable after SIGKILL, and clear when something breaks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.datasets.math_problems import write_problems

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

MEASURED = ("time/", "memory/", "throughput/", "val/seconds", "rollout/tokens_per_second")
"""Metrics that are clock or memory readings, and so never the same twice."""

ROOT = Path(__file__).parents[2]
START_DEADLINE_S = 240


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Any]:
    """The part of a recipe that says where model and problems are."""
    data = tmp_path_factory.mktemp("problems")
    write_problems(data, seed=3, train=64, val=16, levels=(1,))
    return {
        "pretrain": str(tiny_model_dir),
        "actor_train": {"data_args": {"file_name": [f"{data}/train.jsonl"]}},
        "validation": {"data_args": {"file_name": [f"{data}/val.jsonl"]}},
    }


def recipe(inputs: dict[str, Any], folder: Path, **keys: Any) -> Path:
    """A small RLVR run, TP2 beside one engine, with dotted `keys` replaced."""
    tree: dict[str, Any] = {
        "pipeline": "rlvr",
        "platform": "cpu",
        "num_devices_per_node": 3,
        "deterministic": True,
        "output_dir": str(folder / "run"),
        "track_with": [],
        "max_steps": 4,
        "save_steps": 2,
        "eval_steps": 2,
        "rollout_batch_size": 4,
        "num_return_sequences_in_group": 4,
        "prompt_length": 24,
        "response_length": 6,
        "max_failure_rate": 0.0,
        "pretrain": inputs["pretrain"],
        "actor_train": {
            "model_args": {"dtype": "fp32"},
            "training_args": {
                "learning_rate": 1e-3,
                "per_device_train_batch_size": 8,
                "gradient_accumulation_steps": 2,
            },
            "data_args": inputs["actor_train"]["data_args"],
            "strategy_args": {"strategy_config": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
            "device_mapping": [0, 1],
        },
        "actor_infer": {
            "model_args": {"dtype": "fp32"},
            "strategy_args": {"strategy_name": "sglang", "strategy_config": {"load_format": "dummy"}},
            "device_mapping": [2],
        },
        "validation": inputs["validation"],
        "rewards": {"math_rule": {"function": "tests.integration.rewards:length_reward"}},
    }
    for path, value in keys.items():
        *parents, last = path.split("__")
        section = tree
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = value
    file = folder / "config.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(tree))
    return file


def start(config: Path, *overrides: str) -> subprocess.Popen[str]:
    """`roll run` in a process of its own, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "roll", "run", str(config), *overrides],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and output; a run past its deadline is killed and fails the test."""
    try:
        output, _ = process.communicate(timeout=START_DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"the run did not end within {START_DEADLINE_S} s:\n{output[-3000:]}")
    return process.returncode, output


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without clock readings."""
    text = (folder / "run" / "metrics.jsonl").read_text()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(MEASURED)}
        for line in text.splitlines()
    ]


def wait_for_line(folder: Path, step: int) -> None:
    """Until metrics.jsonl holds `step`."""
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        file = folder / "run" / "metrics.jsonl"
        if file.exists() and f'"step": {step},' in file.read_text():
            return
        time.sleep(0.05)
    pytest.fail(f"step {step} was not reached within {START_DEADLINE_S} s")


@pytest.fixture(scope="module")
def unbroken(inputs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A deterministic run from start to end: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("unbroken")
    code, output = finish(start(recipe(inputs, folder)))
    assert code == 0, output
    return folder, output


def test_a_run_writes_a_line_for_every_step_with_the_promised_measures(unbroken):
    steps = lines(unbroken[0])
    assert [line["step"] for line in steps] == [0, 1, 2, 3, 4]
    assert [("val/score" in line) for line in steps] == [True, False, True, False, True]
    assert steps[1]["actor/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert steps[1]["actor/policy_kl"] == pytest.approx(0, abs=1e-5)
    for line in steps[1:]:
        assert line["correction/log_prob_diff_max"] < 1e-4
        assert line["staleness/max"] == 0
        assert line["ledger/submitted"] == line["ledger/consumed"] == 4 * line["step"]


def test_the_weights_learn_something(unbroken):
    steps = lines(unbroken[0])
    assert all(line["actor/grad_norm"] > 0 for line in steps[1:])
    assert steps[-1]["actor/entropy"] != steps[1]["actor/entropy"]


def test_run_json_says_what_ran_and_how_it_ended(unbroken):
    record = json.loads((unbroken[0] / "run" / "run.json").read_text())
    assert record["summary"]["status"] == "finished"
    assert record["summary"]["steps"] == 4
    assert record["summary"]["peak_memory_bytes"] > 1e9
    assert record["config"]["rollout_batch_size"] == 4
    assert {"torch", "sglang", "megatron-core", "ray"} <= set(record["versions"])


def test_a_killed_and_resumed_run_writes_what_an_unbroken_one_does(unbroken, inputs, tmp_path):
    """The checkpoint is of step 2, after a validation at that step had filled the prefix cache."""
    config = recipe(inputs, tmp_path)
    first = start(config)
    wait_for_line(tmp_path, 3)
    os.kill(first.pid, signal.SIGKILL)
    finish(first)
    assert lines(tmp_path)[:3] == lines(unbroken[0])[:3], "two runs with one seed differ"
    code, output = finish(start(config, "resume_from_checkpoint=true"))
    assert code == 0, output
    assert lines(tmp_path) == lines(unbroken[0])


def test_pipeline_parallel_reference_and_token_budget_run_together(inputs, tmp_path):
    config = recipe(
        inputs,
        tmp_path,
        deterministic=False,
        max_steps=2,
        eval_steps=0,
        adv_estimator="reinforce",
        norm_mean_type="batch",
        use_kl_loss=True,
        kl_loss_coef=0.1,
        ppo_epochs=2,
        save_hf_model=True,
        actor_train__pg_variant="vanilla",
        actor_train__strategy_args={"strategy_config": {"pipeline_model_parallel_size": 2}},
        actor_train__use_dynamic_batching_in_train=True,
        actor_train__max_tokens_per_microbatch_in_train=128,
        reference={
            "model_args": {"dtype": "fp32"},
            "strategy_args": {"strategy_name": "megatron_infer"},
            "device_mapping": [0, 1],
        },
    )
    code, output = finish(start(config))
    assert code == 0, output
    first, second = lines(tmp_path)
    assert first["actor/kl_loss"] > 0 and second["actor/kl_loss"] > 0, "the policy left the reference"
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf_model").num_parameters() > 0


def test_a_reward_that_fails_ends_the_run_with_its_cause(inputs, tmp_path):
    reward = {"function": "tests.integration.rewards:broken_reward"}
    config = recipe(inputs, tmp_path, eval_steps=0, rewards__math_rule=reward)
    code, output = finish(start(config))
    assert code == 1
    text = " ".join(output.split())
    assert "reward_raised" in text and "max_failure_rate" in text
    assert "the dog ate it" in text
    assert json.loads((tmp_path / "run" / "run.json").read_text())["summary"]["status"] == "failed"
