"""The examples of docs/environments.md run, and its tables are complete."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from gymnasium.utils.env_checker import check_env

from roll.base.schema import declared
from roll.configs.check import check
from roll.envs import make_env
from roll.envs.registry import BUILT_IN_ENVS
from roll.loading.load import load_config

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def guess(tmp_path, monkeypatch):
    """The environment of the example, made from its file and its YAML."""
    (code,) = blocks("python")
    (tmp_path / "guess_env.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("guess_env", None)  # a reader may have one of this name
    yield make_env(**yaml.safe_load(blocks("yaml")[1]))
    sys.modules.pop("guess_env", None)


def test_the_example_is_one_short_file():
    (code,) = blocks("python")
    assert len(code.splitlines()) < 40


def test_the_example_can_be_won(guess):
    check_env(guess, skip_render_check=True)
    for seed in range(20):
        low, high, observation = 1, 20, guess.reset(seed=seed)[0]
        while observation != "Right.":
            middle = (low + high) // 2
            observation, reward, terminated, truncated, info = guess.step(f"<answer>{middle}</answer>")
            low, high = (middle + 1, high) if observation == "Higher." else (low, middle - 1)
        assert (reward, terminated, truncated, info["metrics"]["success"]) == (1.0, True, False, 1.0)


def test_the_first_entry_of_the_page_is_valid():
    env = make_env(**yaml.safe_load(blocks("yaml")[0]))
    assert env.config.max_steps == 10 and "slippery" not in env.instruction


def test_the_complete_file_is_accepted_without_remarks(tmp_path):
    file = tmp_path / "guess.yaml"
    file.write_text(blocks("yaml")[-1], encoding="utf-8")
    config = load_config(file)
    assert config.custom_envs["Guess"].env_type == yaml.safe_load(blocks("yaml")[1])["env_type"]
    assert check(config).errors == check(config).warnings == []


def test_the_tables_name_every_environment_option_and_metric():
    envs = [make_env(name) for name in BUILT_IN_ENVS]
    options = {key for env in envs for key in declared(env.config_class)}
    metrics = {metric for env in envs for metric in env.METRICS}
    ids = {built_in.id for built_in in BUILT_IN_ENVS.values()}
    missing = {name for name in {*BUILT_IN_ENVS, *ids, *options, *metrics} if f"`{name}`" not in PAGE}
    assert not missing
