"""Every recipe of examples/algorithms plans as it is; together they have every algorithm for single turns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from examples.algorithms import compare
from roll.algorithms.estimators import ADV_ESTIMATORS
from roll.algorithms.options.policy_options import losses_of
from roll.algorithms.policy_loss import POLICY_LOSSES
from roll.configs.pipeline import BaseConfig, RLConfig, RLVRConfig
from roll.plan.hardware import prepare_run
from tests.configs.samples import LAPTOP, write

ALLOWED = ("vanilla does not correct for the age of samples",)
"""Warnings that say what the recipe is about."""

PAIR = json.dumps({"prompt": "1+1=", "chosen": "2", "rejected": "3"})


def load(name: str, folder: Path, model: Path, *overrides: str) -> BaseConfig:
    given, loaded = [f"pretrain={model}"], compare.load(name)
    if loaded.pipeline != "agentic":
        data = write(folder, PAIR if loaded.pipeline == "dpo" else "{}", "problems.jsonl")
        given += [f"{role}.data_args.file_name={data}" for role in ("actor_train", "validation")]
    if isinstance(loaded, RLConfig) and loaded.uses_teacher:
        teacher = shutil.copytree(model, folder / "teacher")
        given.append(f"reference.model_args.model_name_or_path={teacher}")
    return compare.load(name, [*given, *overrides])


@pytest.mark.parametrize("name", compare.recipes())
@pytest.mark.parametrize("ratio", [0, 1])
def test_a_recipe_plans_without_a_surprise(name: str, ratio: int, tmp_path: Path, tiny_model_dir: Path):
    generates = isinstance(compare.load(name), RLConfig)
    config = load(name, tmp_path, tiny_model_dir, *([f"async_generation_ratio={ratio}"] if generates else []))
    warnings = prepare_run(config, LAPTOP)
    assert [warning for warning in warnings if not any(text in warning for text in ALLOWED)] == []
    assert config.exp_name == name and config.max_steps == 40 and config.output_dir.endswith(name)


def test_together_they_have_every_algorithm_for_single_turns(tmp_path: Path, tiny_model_dir: Path):
    loaded = [load(name, tmp_path, tiny_model_dir) for name in compare.recipes()]
    configs = [config for config in loaded if isinstance(config, RLVRConfig)]
    of_responses = {name for name, each in ADV_ESTIMATORS.items() if each.needs != "turns"}
    assert {config.adv_estimator for config in configs} == of_responses
    losses = [losses_of(config.actor_train.pg_variant) for config in configs]
    assert {name for each in losses for name in each} == set(POLICY_LOSSES) and max(map(len, losses)) > 1
    corrections = [config.correction for config in configs]
    assert any(correction.m2_threshold for correction in corrections)
    assert any(correction.opsm_delta for correction in corrections)


def test_every_recipe_has_a_row_and_a_link_to_its_page():
    text = (compare.HERE / "README.md").read_text()
    assert all(f"[`{name}`]({name}.yaml)" in text for name in compare.recipes())
    assert all(f"(../../docs/recipes/{name}.md)" in text for name in compare.recipes())


def finish(trial: compare.Trial, out: Path, status: str, metric: str = "val/score") -> None:
    folder = trial.folder(out)
    folder.mkdir(parents=True)
    validation = {"20": {metric: 0.5}, "0": {metric: 0.25}, "40": {metric: 0.75}}
    (folder / "run.json").write_text(json.dumps({"summary": {"status": status, "validation": validation}}))


def test_finished_runs_are_not_repeated_and_failed_ones_leave_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trials = [compare.Trial("rloo", 0.0, seed) for seed in (1, 2)]
    commands = []

    def run_process(command: list[str], log: Path) -> int:
        commands.append(command)
        finish(trials[1], tmp_path, "failed")
        return 1

    finish(trials[0], tmp_path, "finished")
    monkeypatch.setattr("roll.tools.processes.run_process", run_process)
    monkeypatch.setattr(compare, "inputs_of", lambda recipe, out, seed: [f"seed={seed}"])
    compare.run_trials(trials, tmp_path, ["max_steps=1"])
    assert len(commands) == 1 and {"seed=2", "async_generation_ratio=0", "max_steps=1"} <= set(commands[0])
    assert (tmp_path / "results.md").read_text().splitlines() == [
        "| recipe | ratio 0, seed 1 | ratio 0, seed 2 |",
        "|---|---|---|",
        "| `rloo` | 0.25 -> 0.75 |  |",
    ]
    assert json.loads((tmp_path / "results.json").read_text())[0]["accuracy"] == [0.25, 0.5, 0.75]


def test_a_recipe_that_generates_nothing_has_no_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trial, commands = compare.Trial("dpo", None, 1), []

    def run_process(command: list[str], log: Path) -> int:
        commands.append(" ".join(command))
        finish(trial, tmp_path, "finished", "val/accuracy")
        return 0

    monkeypatch.setattr("roll.tools.processes.run_process", run_process)
    monkeypatch.setattr(compare, "inputs_of", lambda recipe, out, seed: [])
    compare.run_trials([trial], tmp_path, [])
    assert "async_generation_ratio" not in commands[0] and f"output_dir={tmp_path}/runs/dpo-seed1" in commands[0]
    assert (tmp_path / "results.md").read_text().splitlines()[0] == "| recipe | seed 1 |"


@pytest.mark.parametrize(
    ("name", "made", "expected"),
    [
        ("grpo", "warm-start-seed3", ["actor_train.data_args.file_name=[{start}/data/train.jsonl]"]),
        ("opd", "warm-start-seed3", ["reference.model_args.model_name_or_path={start}/teacher/hf_model"]),
        ("dpo", "warm-start-seed3", ["actor_train.data_args.file_name=[{start}/data/pairs-train.jsonl]"]),
        ("segment", "lake-warm-start-seed3", []),
    ],
)
def test_a_recipe_begins_with_the_warm_start_of_its_task(
    name: str, made: str, expected: list[str], tmp_path: Path, tiny_model_dir: Path
):
    start = tmp_path / made
    for folder in ("sft", "teacher"):
        shutil.copytree(tiny_model_dir, start / folder / "hf_model")
    (start / "data").mkdir()
    for split in ("train", "val"):
        problem = {"id": "0", "prompt": "1+1=", "ground_truth": "2"}
        (start / "data" / f"{split}.jsonl").write_text(json.dumps(problem) + "\n")
    inputs = compare.inputs_of(name, tmp_path, 3)
    assert {f"pretrain={start}/sft/hf_model", "seed=3", *(each.format(start=start) for each in expected)} <= set(inputs)
    compare.load(name, inputs)
