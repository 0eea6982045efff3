"""Recipes of ROLL: what they may lack, what they leave out, and how layers of files in other spellings are merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from roll.base.errors import ConfigError
from roll.base.schema import value_at
from roll.compat.recipe import Recipe
from roll.compat.systems.roll import ROLL
from roll.configs.agentic import AgenticConfig
from roll.configs.check import check
from roll.configs.pipeline import BaseConfig, RLVRConfig
from roll.envs.registry import try_environment
from roll.loading.load import load_config
from roll.plan.check_inputs import check_environments
from roll.usercode.env_trial import Played
from tests.configs.samples import AGENTIC, READ_KEYS, RECIPES, REFUSED, RLVR, agentic, recipes, rlvr, write


def load(name: str, *overrides: str) -> BaseConfig:
    return load_config(RECIPES / f"{name}.yaml", overrides, try_environment=try_environment)


def notes(config: BaseConfig) -> str:
    return "\n".join(f"{path}: {message}" for path, message in config.source.notes)


@pytest.mark.parametrize("name", recipes(refused=True))
def test_a_recipe_that_cannot_run_is_refused_in_one_line(name: str) -> None:
    first = (RECIPES / f"{name}.yaml").read_text().splitlines()[0].removeprefix(REFUSED)
    with pytest.raises(ConfigError) as caught:
        load(name)
    assert [str(problem) for problem in caught.value.problems] == [
        f"this recipe needs what is not available here: {first}"
    ]


@pytest.mark.parametrize(
    ("recipe", "overrides", "paths", "message"),
    [
        ("rlvr_five_domains", "", [], ""),
        ("rlvr_five_domains", "base_url=http://judge:30000/v1", [], ""),
        (
            "rlvr_five_domains",
            "device_mapping=[]",
            ["rewards.llm_judge.base_url"],
            "a judge needs an",
        ),
    ],
)
def test_a_judge_needs_devices_or_an_endpoint_to_run(
    recipe: str, overrides: str, paths: list[str], message: str
) -> None:
    missing = check(load(recipe, *(f"rewards.llm_judge.{item}" for item in overrides.split()))).missing
    found = {problem.path: problem.message for problem in missing if problem.path.startswith("rewards.")}
    assert list(found) == paths and message in "".join(found.values())


def test_a_class_without_a_rule_here_stops_a_run_only() -> None:
    overrides = ["rewards.ifeval.worker_cls=mine.DetectionRewardWorker"]
    missing = {problem.path: problem.message for problem in check(load("rlvr_five_domains", *overrides)).missing}
    assert missing["rewards.ifeval.function"].startswith("no rule here does what DetectionRewardWorker does; write")
    config = load("rlvr_five_domains", *overrides, "rewards.ifeval.function=mine:score")
    assert "rewards.ifeval.function" not in {problem.path for problem in check(config).missing}


def test_an_environment_that_is_not_here_stops_a_run_only() -> None:
    config = load("agentic_shop")
    assert isinstance(config, AgenticConfig) and check_environments(config) == []
    assert [each.path for each in check(config).missing if "env_type" in each.path] == ["custom_envs.Shop.env_type"]


def test_a_game_of_gem_is_played_where_gem_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    config, played = load("agentic_game_steps"), dict[str, Played]()
    assert isinstance(config, AgenticConfig) and check_environments(config, played) == []
    assert "number between 1 and" in played["custom_envs.Guess"].observations[0]
    monkeypatch.setattr("roll.envs.external.GEM_PACKAGE", "no_gem_here")
    missing = [each.path for each in check(load("agentic_game_steps")).missing if "env_type" in each.path]
    assert missing == ["custom_envs.Guess.env_type"]


def test_a_variable_of_the_environment_that_is_not_set_stops_a_run_only() -> None:
    missing = [str(problem) for problem in check(load("rlvr_offpolicy")).missing]
    assert (
        "tracker_kwargs.api_key: the environment variable A_KEY_THAT_IS_NOT_SET is not set; "
        "export A_KEY_THAT_IS_NOT_SET=..."
    ) in missing


def test_keys_without_effect_for_one_reason_are_one_remark() -> None:
    (line,) = [line for line in notes(load("rlvr_five_domains")).splitlines() if "prompts are prepared in one" in line]
    assert line.startswith("actor_train.data_args.preprocessing_num_workers: has no effect")
    (line,) = [line for line in notes(load("rlvr_five_domains")).splitlines() if "a reward is a function" in line]
    assert "rewards.ifeval.model_args, rewards.ifeval.data_args" in line or "rewards.ifeval.data_args" in line


def test_keys_that_are_null_are_not_given(tmp_path: Path) -> None:
    text = (RECIPES / "rlvr_offpolicy.yaml").read_text()
    text = text.replace("resume_from_checkpoint: false", "resume_from_checkpoint: ~") + "reference: ~\n"
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    assert load_config(file).resume_from_checkpoint is False


PLACES = {
    "<role>.generating_args": "actor_infer.generating_args",
    "<role>": "actor_train",
    "<megatron_role>": "actor_train",
    "rewards.*": "rewards.math_rule",
    "custom_envs.*": "custom_envs.Guess",
    "*_env_manager": "train_env_manager",
    "*": "any",
}
"""Parts of patterns of the tables -> names that a recipe has."""


def null_keys(recipe: str) -> list[str]:
    """Paths of the tables of ROLL that a recipe does not give."""
    given = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())
    keys = [(item.pattern, item.pipelines) for item in ROLL.rules]
    keys += [(key, ("rlvr",)) for key in (*ROLL.rename, *ROLL.move, *READ_KEYS, "a_key_of_later")]
    paths = []
    for path, pipelines in keys:
        of_agents = "rlvr" not in pipelines or path.startswith(("custom_env", "*_env", "train_env", "val_env"))
        for part, name in PLACES.items():
            path = path.replace(part, name)
        if of_agents == ("train_env_manager" in given) and value_at(given, path) is None:
            paths.append(path)
    return paths


@pytest.mark.parametrize(("recipe", "least"), [("rlvr_offpolicy", 150), ("agentic_game_steps", 15)])
def test_keys_of_the_tables_that_are_null_change_nothing(recipe: str, least: int, tmp_path: Path) -> None:
    paths = null_keys(recipe)
    assert len(paths) > least
    nulls = Recipe({"defaults": [str(RECIPES / f"{recipe}.yaml")]})
    for path in sorted(paths, key=len, reverse=True):
        if nulls.get(path) is None:  # not a section that has null keys already
            nulls.put(path, None)
    assert load_config(write(tmp_path, yaml.safe_dump(nulls.tree))) == load(recipe)


@pytest.mark.parametrize(("base", "sample_by"), [("traj_envs", "traj"), ("step_envs", "step")])
def test_a_recipe_without_its_base_file_takes_the_environments_of_this_project(
    tmp_path: Path, base: str, sample_by: str
) -> None:
    tags = ["SimpleSokoban", "LargerSokoban", "SokobanDifferentGridVocab", "FrozenLake", "FrozenLakeThink"]
    text = (RECIPES / "agentic_frozen_lake_async.yaml").read_text()
    text = text.replace("config/traj_envs@_here_", f"../nowhere/{base}@_here_").replace("[Lake]", "[FrozenLake]")
    text = text.replace("[Boxes, BoxesInLetters, Lake]", "[SimpleSokoban, LargerSokoban, SokobanDifferentGridVocab]")
    head, _, own = text.partition("custom_envs:\n")
    entries = "".join(f"  {tag}: ${{custom_env.{tag}}}\n" for tag in tags)
    file = tmp_path / "recipe.yaml"
    file.write_text(f"{head}custom_envs:\n{entries}{own[own.index('  OwnLake') :]}")
    config = load_config(file)
    assert isinstance(config, AgenticConfig) and config.sample_by == sample_by
    assert config.custom_envs["FrozenLake"].max_tokens_per_step == 64
    assert f"{base}@_here_" not in notes(config)
    assert f"../nowhere/{base} does not exist; the environments of this project are used" in notes(config)


def test_the_remark_on_pg_clip_names_the_bounds_that_it_replaces(tmp_path: Path) -> None:
    file = write(tmp_path, f"defaults: [{RECIPES / 'rlvr_gspo_corrected.yaml'}]\npg_clip: 0.2\npg_clip_high: 0.3\n")
    message = "pg_clip_high: 0.2, instead of pg_clip_high 0.3; use_pg_clip_range: true would take those"
    assert message in notes(load_config(file))


def test_a_teacher_beside_scores_is_read(tmp_path: Path) -> None:
    text = (RECIPES / "distill_on_policy.yaml").read_text()
    file = tmp_path / "recipe.yaml"
    text = text.replace("student_train:", "actor_train:").replace("student_infer:", "actor_infer:")
    file.write_text(f"{text.replace('_in_group: 1', '_in_group: 4')}\nuse_opd: true\nadv_estimator: grpo\n")
    config = load_config(file)
    assert isinstance(config, RLVRConfig)
    assert (config.adv_estimator, config.use_opd, config.opd_kl_coef) == ("grpo", True, 0.5)


def test_the_model_of_a_teacher_may_be_given_at_the_top(tmp_path: Path) -> None:
    text = (RECIPES / "distill_on_policy.yaml").read_text()
    file = tmp_path / "recipe.yaml"
    file.write_text(text.replace(', model_name_or_path: "${teacher_pretrain}"', ""))
    config = load_config(file)
    assert isinstance(config, RLVRConfig)
    assert config.reference.model_args.model_name_or_path == "Qwen/Qwen2.5-7B-Instruct"


def test_options_of_the_users_environment_keep_their_spelling(tmp_path: Path) -> None:
    given = {"rpc_timeout": 3, "template": "base", "top_k": -1, "gpus": "${num_gpus_per_node}"}
    text = AGENTIC.replace("env_type: frozen_lake", "env_type: mine:Env")
    text = text.replace("{size: 4, is_slippery: false}", json.dumps(given))
    config = agentic(tmp_path, "num_gpus_per_node=8", text=text)
    assert config.custom_envs["Lake"].env_config == {**given, "gpus": 8, "max_steps": 6}


def test_an_override_wins_in_any_spelling(tmp_path: Path) -> None:
    text = RLVR + "buffer_size: 2\nasync_training: {sync_timeout: 5}\n"
    config = rlvr(tmp_path, "async_generation_ratio=0.5", "sync_timeout_s=7", text=text)
    assert (config.async_generation_ratio, config.sync_timeout_s) == (0.5, 7)
    assert rlvr(tmp_path, "buffer_size=1", text=RLVR + "async_generation_ratio: 3\n").async_generation_ratio == 1


def test_a_base_file_may_use_another_spelling(tmp_path: Path) -> None:
    write(tmp_path, RLVR + "buffer_size: 2\n", "base.yaml")
    assert rlvr(tmp_path, text="defaults: base\nasync_generation_ratio: 1\n").async_generation_ratio == 1
