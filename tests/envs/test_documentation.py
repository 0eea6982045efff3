"""The examples of docs/environments.md and docs/environments run, and its tables are complete."""

from __future__ import annotations

import json
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
from tests.pages import blocks, text_of

PAGE = text_of("environments")


def block(language: str, *parts: str) -> str:
    """The block with these texts."""
    (found,) = (each for each in blocks(PAGE, language) if all(part in each for part in parts))
    return found


@pytest.fixture
def guess(tmp_path, monkeypatch):
    """The environment of the example, made from its file and its YAML."""
    code = block("python", "class Guess(")
    (tmp_path / "guess_env.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("guess_env", None)  # a reader may have one of this name
    yield make_env(**yaml.safe_load(block("yaml", "env_type: guess_env:Guess\nenv_config")))
    sys.modules.pop("guess_env", None)


def test_the_example_is_one_short_file():
    code = block("python", "class Guess(")
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
    env = make_env(**yaml.safe_load(blocks(PAGE, "yaml")[0]))
    assert env.config.max_steps == 10 and "slippery" not in env.instruction


def test_the_complete_file_is_accepted_without_remarks(tmp_path):
    file = tmp_path / "guess.yaml"
    file.write_text(block("yaml", "pipeline: agentic", "guess_env"), encoding="utf-8")
    config = load_config(file)
    assert (
        config.custom_envs["Guess"].env_type
        == yaml.safe_load(block("yaml", "env_type: guess_env:Guess\nenv_config"))["env_type"]
    )
    assert check(config).errors == check(config).warnings == []


def test_the_tables_name_every_environment_option_and_metric():
    envs = [make_env(name) for name in BUILT_IN_ENVS]
    options = {key for env in envs for key in declared(env.config_class)}
    metrics = {metric for env in envs for metric in env.METRICS}
    ids = {built_in.id for built_in in BUILT_IN_ENVS.values()}
    missing = {name for name in {*BUILT_IN_ENVS, *ids, *options, *metrics} if f"`{name}`" not in PAGE}
    assert not missing


def test_an_environment_of_gem_is_made_from_its_entry():
    assert "between 1 and 30" in make_env(**yaml.safe_load(block("yaml", "game:"))).reset(seed=1)[0]


def test_the_entries_with_tools_are_valid(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    env = make_env(**yaml.safe_load(block("yaml", "python: {timeout_s")))
    env.reset(seed=1)
    called = '<tool_call>{"name": "search", "arguments": {"query": "agents trajectories"}}</tool_call>'
    assert "[2] " in env.step(called)[0]
    make_env(**yaml.safe_load(block("yaml", "clock_server.py")))


@pytest.mark.parametrize("estimator", ["gigpo", "step_reinforce"])
def test_the_recipe_with_a_search_tool_is_accepted_and_played(estimator, monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(str(root / "examples" / "search_notes"))
    overrides = [f"adv_estimator={estimator}", *(["sample_by=step"] if estimator == "step_reinforce" else [])]
    config = load_config(root / "examples" / "search_notes" / "questions.yaml", overrides)
    assert check(config).errors == check(config).warnings == []
    assert (config.adv_estimator, config.async_generation_ratio, config.eval_steps) == (estimator, 1, 20)
    entry = config.custom_envs["Questions"]
    env = make_env(entry.env_type, entry.env_config)
    question = env.reset(seed=1)[0]
    rows = (root / "examples" / "search_notes" / "questions.jsonl").read_text().splitlines()
    (answer,) = (row["answer"] for row in map(json.loads, rows) if row["question"] == question)
    call = json.dumps({"name": "search", "arguments": {"query": question}})
    found = env.step(f"<tool_call>{call}</tool_call>")
    assert answer.lower() in found[0].lower() and not found[2], "the notes answer the question"
    assert env.step(f"<answer>{answer}</answer>")[1:3] == (1.0, True)


@pytest.mark.parametrize(("language", "name"), [("python", "questions_env.py"), ("yaml", "questions.yaml")])
def test_the_page_shows_the_files_of_the_recipe(language, name):
    file = Path(__file__).parents[2] / "examples" / "search_notes" / name
    assert file.read_text() in [f"{each.rstrip()}\n" for each in blocks(PAGE, language)]
