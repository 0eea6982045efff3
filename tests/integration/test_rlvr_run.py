"""Whole RLVR runs on real engines: reproducible, resumable after SIGKILL, and clear when something breaks."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import finish, lines, recipe, start, wait_for_line

from roll.datasets.tokenizer import response_text
from roll.lab.rehearse.model import add_score_head
from roll.trackers.sample_files import read_samples
from tests.integration.rewards import text_reward
from tests.integration.shared_runs import SharedRuns

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def unbroken(shared_runs: SharedRuns, inputs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a deterministic run from start to end."""
    folder = tmp_path_factory.mktemp("unbroken")
    shared_runs.succeed(recipe(inputs, folder, async_training__rollouter="inline"))
    return folder


def test_a_run_writes_a_line_for_every_step_with_the_promised_measures(unbroken):
    steps = lines(unbroken)
    assert [line["step"] for line in steps] == [0, 1, 2, 3, 4]
    assert [("val/score" in line) for line in steps] == [True, False, True, False, True]
    assert steps[1]["actor/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert steps[1]["actor/policy_kl"] == pytest.approx(0, abs=1e-5)
    for line in steps[1:]:
        assert line["correction/log_prob_diff_max"] < 1e-4
        assert line["staleness/max"] == 0
        assert line["ledger/submitted"] == line["ledger/consumed"] == 4 * line["step"]


def test_run_json_says_what_ran_and_how_it_ended(unbroken):
    record = json.loads((unbroken / "run" / "run.json").read_text())
    assert record["summary"]["status"] == "finished"
    assert record["summary"]["steps"] == 4
    assert record["summary"]["peak_memory_bytes"] > 1e9
    assert record["config"]["rollout_batch_size"] == 4
    assert {"torch", "sglang", "megatron-core", "ray"} <= set(record["versions"])


def test_a_killed_and_resumed_run_with_another_process_for_rollouts_writes_what_an_unbroken_one_does(
    shared_runs, unbroken, inputs, tmp_path
):
    """The checkpoint is of step 2, after a validation at that step had filled the prefix cache."""
    config = recipe(inputs, tmp_path, async_training__rollouter="actor")
    first = start(config)
    wait_for_line(first, tmp_path, 3)
    os.kill(first.pid, signal.SIGKILL)
    finish(first)
    assert lines(tmp_path)[:3] == lines(unbroken)[:3], "two runs with one seed differ"
    shared_runs.succeed(config, "resume_from_checkpoint=true")
    assert lines(tmp_path) == lines(unbroken)


def test_an_engine_that_computes_another_model_ends_the_run_before_its_first_batch(shared_runs, inputs, tmp_path):
    model = shutil.copytree(inputs["pretrain"], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] /= 10
    (model / "config.json").write_text(json.dumps(config))
    engine = {"dtype": "fp32", "model_name_or_path": str(model)}
    code, output = shared_runs.run(recipe(inputs, tmp_path, actor_infer__model_args=engine))
    assert code == 1
    assert "engine 0 and trainer disagree about the log-probs of sampled tokens by" in output
    assert "mean_logprob_mismatch" in output and "config.json" in output
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not lines(tmp_path)
    assert not list((tmp_path / "run").glob("samples/*"))


def test_pipeline_parallel_reference_token_budget_greedy_responses_and_reward_model_run_together(
    shared_runs, inputs, tmp_path
):
    scores = score_model(inputs["pretrain"], tmp_path / "scores")
    config = recipe(
        inputs,
        tmp_path,
        deterministic=False,
        max_steps=2,
        eval_steps=0,
        adv_estimator="remax",
        rewards={
            "math_rule": {"function": "tests.integration.rewards:text_reward", "tag_included": ["math_rule"]},
            "reward_model": {"tag_included": ["math_rule"], "weight": 0},
        },
        reward=reward_role(scores, tensor_model_parallel_size=2, sequence_parallel=True),
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
    shared_runs.succeed(config)
    first, second = lines(tmp_path)
    assert first["actor/kl_loss"] > 0 and second["actor/kl_loss"] > 0, "the policy left the reference"
    assert first["rollout/greedy_reward_mean"] != first["rollout/reward_mean"]
    assert second["ledger/submitted"] == second["ledger/consumed"] == 8
    assert first["reward/math_rule/reward_model"] != 0 != second["reward/math_rule/reward_model"]
    check_baselines(tmp_path / "run" / "samples", inputs["pretrain"])
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf_model").num_parameters() > 0


def score_model(model: str, folder: Path) -> Path:
    """A reward model with the layers of a language model and a random head."""
    shutil.copytree(model, folder)
    add_score_head(folder)
    return folder


def reward_role(model: Path, **options: Any) -> dict[str, Any]:
    """The role `reward` on the trainer's devices."""
    return {
        "model_args": {"dtype": "fp32", "model_name_or_path": str(model)},
        "strategy_args": {"strategy_name": "megatron_infer", "strategy_config": options},
        "device_mapping": [0, 1],
    }


def check_baselines(samples: Path, model: str) -> None:
    """In the first step every advantage is the score minus that of the model's most probable response."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    rows, moved = read_samples(samples, 1), 0
    assert len(rows) == 16
    for row in rows:
        ids = list(row["prompt_ids"])
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(policy(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
        greedy = response_text(tokenizer, ids[len(row["prompt_ids"]) :])
        advantage = row["score"] - text_reward(greedy, "", None)
        assert row["advantages"] == pytest.approx([advantage] * len(row["response_ids"]), abs=1e-6)
        moved += row["advantages"][0] != 0
    assert moved > 0, "every sample is the greedy response"


def distill(shared_runs, inputs, tmp_path, **keys):
    """Runs it on samples one version old; returns the teacher, which is the student with sharper probabilities."""
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(inputs["pretrain"])
    with torch.no_grad():
        teacher.get_output_embeddings().weight.mul_(2.0)
    folder = tmp_path / "teacher"
    shutil.copytree(inputs["pretrain"], folder)
    teacher.save_pretrained(folder)
    config = recipe(
        inputs,
        tmp_path,
        deterministic=False,
        async_generation_ratio=1,
        max_steps=3,
        eval_steps=0,
        adv_estimator="opd",
        opd_kl_coef=0.5,
        rollout_batch_size=16,
        num_return_sequences_in_group=1,
        reference={
            "model_args": {"dtype": "fp32", "model_name_or_path": str(folder)},
            "strategy_args": {"strategy_name": "megatron_infer"},
            "device_mapping": [0, 1],
        },
        **keys,
    )
    shared_runs.succeed(config)
    return teacher


def test_a_student_learns_from_the_most_likely_tokens_of_a_teacher(shared_runs, inputs, tmp_path):
    distill(shared_runs, inputs, tmp_path, opd_top_k=8)
    steps = lines(tmp_path)
    assert len(steps) == 3 and all(step["actor/pg_loss"] == 0 and step["actor/grad_norm"] > 0 for step in steps)
    assert all(0 < step["actor/teacher_top_k_mass"] < 1 for step in steps)
    assert steps[0]["actor/loss"] == pytest.approx(0.5 * steps[0]["actor/opd_loss"], rel=1e-5)


def test_advantages_of_a_student_are_its_log_ratios_to_a_teacher_of_another_layout(shared_runs, inputs, tmp_path):
    teacher = distill(shared_runs, inputs, tmp_path, whiten_advantages=True)
    ratios, advantages = [], []
    for row in read_samples(tmp_path / "run" / "samples", 3):
        ids, start = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]]), len(row["prompt_ids"]) - 1
        with torch.no_grad():
            log_probs = teacher(ids).logits[0, start:-1].log_softmax(-1)
        chosen = log_probs[torch.arange(len(row["response_ids"])), ids[0, start + 1 :]]
        assert row["ref_log_probs"] == pytest.approx(chosen.tolist(), abs=1e-4)
        ratios += (chosen - torch.tensor(row["old_log_probs"])).tolist()
        advantages += row["advantages"]
    assert len(ratios) > 20
    assert torch.corrcoef(torch.tensor([ratios, advantages]))[0, 1] > 0.9999, "whitening moves and scales all alike"


def scored(shared_runs, inputs, tmp_path, **keys):
    """The samples of the second step of a run one step off, whose validations score too."""
    config = recipe(inputs, tmp_path, deterministic=False, async_generation_ratio=1, max_steps=2, eval_steps=2, **keys)
    shared_runs.succeed(config)
    assert ["val/score" in line for line in lines(tmp_path)] == [True, False, True]
    rows = read_samples(tmp_path / "run" / "samples", 2)
    assert len(rows) == 16 and len({row["score"] for row in rows}) > 4
    return rows


def score_of(folder: Path) -> Callable[[dict[str, Any]], float]:
    """The value that transformers gives for a sample after prompt, response and end token."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    scorer = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def score(row: dict[str, Any]) -> float:
        text = response_text(tokenizer, row["response_ids"])
        ids = [*row["prompt_ids"], *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        with torch.no_grad():
            return float(scorer.score(scorer.model(torch.tensor([ids])).last_hidden_state[0, -1]))

    return score


def test_scores_of_a_reward_model_are_those_of_transformers(shared_runs, inputs, tmp_path):
    """The model has two data-parallel ranks on the trainer's devices; the rollouter calls it from its own process."""
    folder = score_model(inputs["pretrain"], tmp_path / "scores")
    rows = scored(shared_runs, inputs, tmp_path, rewards={"reward_model": {"weight": 2.0}}, reward=reward_role(folder))
    score = score_of(folder)
    for row in rows:
        assert row["score"] == pytest.approx(2.0 * score(row), abs=1e-4)


def judge_model(model: str, folder: Path) -> Path:
    """A language model that answers with a digit: their embeddings, which are its output head too, are longer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shutil.copytree(model, folder)
    judge, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        judge.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids(list("0123456789"))] *= 6
    judge.save_pretrained(folder)
    return folder


def test_scores_and_grades_of_engines_of_the_run_are_those_of_transformers(shared_runs, inputs, tmp_path):
    """The rollouter asks the engines of a reward model and a judge, while the policy's engine generates ahead."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    scores = score_model(inputs["pretrain"], tmp_path / "scores")
    folder = judge_model(inputs["pretrain"], tmp_path / "judge")
    on_engine = {"strategy_args": {"strategy_name": "sglang"}, "device_mapping": [3]}
    rows = scored(
        shared_runs,
        inputs,
        tmp_path,
        num_devices_per_node=5,
        rewards={
            "math_rule": {"function": "tests.integration.rewards:text_reward", "tag_included": ["math_rule"]},
            "reward_model": {"tag_included": ["math_rule"], "weight": 2.0},
            "llm_judge": {
                "tag_included": ["math_rule"],
                "weight": 2.0,
                "prompt_template": "{prompt}~{response}",
                "grade_pattern": "([0-9])",
                "max_grade": 9,
                "judge_max_tokens": 1,
            },
        },
        reward=reward_role(scores) | on_engine | {"max_running_requests": 16, "sequence_length": 256},
        judge={"model_args": {"model_name_or_path": str(folder), "dtype": "fp32"}, "device_mapping": [4]},
    )
    judge, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    grades, score = set(), score_of(scores)
    for row in rows:
        prompt = tokenizer.decode(row["prompt_ids"], skip_special_tokens=True)
        text = response_text(tokenizer, row["response_ids"])
        question = [{"role": "user", "content": f"{prompt}~{text}"}]
        ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            grade = int(tokenizer.decode(int(judge(torch.tensor([ids])).logits[0, -1].argmax())))
        total = text_reward(text, "", None) + 2.0 * score(row) + 2.0 * grade / 9
        assert row["score"] == pytest.approx(total, abs=1e-4)
        grades.add(grade)
    assert len(grades) > 1
    last = lines(tmp_path)[-1]
    assert 0 < last["val/math_rule/llm_judge"] < 1 and last["reward/math_rule/llm_judge/retries"] == 0
