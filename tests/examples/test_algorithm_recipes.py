"""Every recipe of examples/algorithms plans as it is; together they have every algorithm for single turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.algorithms import compare
from roll.configs.advantages import ADV_ESTIMATORS, TEACHER_ESTIMATORS, TURN_ESTIMATORS
from roll.configs.hardware import prepare_run
from roll.configs.load import load_config
from roll.configs.pipeline import RLVRConfig
from roll.configs.policy import VARIANT_TRAITS, losses_of
from tests.configs.samples import LAPTOP, write

ALLOWED = ("vanilla does not correct for the age of samples",)
"""Warnings that say what the recipe is about."""


def load(name: str, folder: Path, model: Path, *overrides: str) -> RLVRConfig:
    data = write(folder, "{}", "problems.jsonl")
    files = [f"{role}.data_args.file_name={data}" for role in ("actor_train", "validation")]
    config = load_config(compare.HERE / f"{name}.yaml", [f"pretrain={model}", *files, *overrides])
    assert isinstance(config, RLVRConfig)
    return config


@pytest.mark.parametrize("name", compare.recipes())
@pytest.mark.parametrize("ratio", [0, 1])
def test_a_recipe_plans_without_a_surprise(name: str, ratio: int, tmp_path: Path, tiny_model_dir: Path):
    config = load(name, tmp_path, tiny_model_dir, f"async_generation_ratio={ratio}")
    warnings = prepare_run(config, LAPTOP)
    assert [warning for warning in warnings if not any(text in warning for text in ALLOWED)] == []
    assert config.exp_name == name and config.max_steps == 40 and config.output_dir.endswith(name)


def test_together_they_have_every_algorithm_for_single_turns(tmp_path: Path, tiny_model_dir: Path):
    configs = [load(name, tmp_path, tiny_model_dir) for name in compare.recipes()]
    assert {config.adv_estimator for config in configs} == set(ADV_ESTIMATORS) - {*TURN_ESTIMATORS, *TEACHER_ESTIMATORS}
    losses = [losses_of(config.actor_train.pg_variant) for config in configs]
    assert {name for each in losses for name in each} == set(VARIANT_TRAITS) and max(map(len, losses)) > 1


def test_every_recipe_is_on_the_page():
    page = (compare.HERE / "README.md").read_text()
    assert all(f"[`{name}`]({name}.yaml)" in page for name in compare.recipes())


def test_finished_runs_are_not_repeated_and_failed_ones_leave_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trials = [compare.Trial("rloo", 0.0, seed) for seed in (1, 2)]
    commands = []

    def finish(trial: compare.Trial, status: str) -> None:
        folder = trial.folder(tmp_path)
        folder.mkdir(parents=True)
        validation = {"20": {"val/score": 0.5}, "0": {"val/score": 0.25}, "40": {"val/score": 0.75}}
        (folder / "run.json").write_text(json.dumps({"summary": {"status": status, "validation": validation}}))

    def run_process(command: list[str], log: Path) -> int:
        commands.append(command)
        finish(trials[1], "failed")
        return 1

    finish(trials[0], "finished")
    monkeypatch.setattr("roll.tools.processes.run_process", run_process)
    monkeypatch.setattr(compare, "inputs_of", lambda start, seed: [f"seed={seed}"])
    compare.run_trials(trials, tmp_path, ["max_steps=1"])
    assert len(commands) == 1 and {"seed=2", "async_generation_ratio=0", "max_steps=1"} <= set(commands[0])
    assert (tmp_path / "results.md").read_text().splitlines() == [
        "| recipe | ratio 0, seed 1 | ratio 0, seed 2 |",
        "|---|---|---|",
        "| `rloo` | 0.25 -> 0.75 |  |",
    ]
    assert json.loads((tmp_path / "results.json").read_text())[0]["accuracy"] == [0.25, 0.5, 0.75]
