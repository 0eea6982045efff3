"""Environments of other packages by their ids: those of gymnasium with text spaces, and GEM's."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Text

from roll.base.errors import ConfigError
from roll.configs.check import check
from roll.envs import make_env
from roll.envs.registry import try_environment
from roll.usercode.env_trial import EnvTrial, Played, play, try_environments
from tests.configs.samples import agentic

GUESS, QUESTION = "game:GuessTheNumber-v0", "rg:letter_counting"

SOURCE = """
import string

import gymnasium
from gymnasium.spaces import Text

class Echo(gymnasium.Env):
    def __init__(self, word="hello", turns=3):
        self.observation_space = self.action_space = Text(99, charset=string.printable)
        self.word, self.turns = word, turns

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.turns
        self.secret = f"{self.word} {self.np_random.integers(1000)}"
        return f"Say {self.secret}", {}

    def step(self, action):
        self.left -= 1
        right = action == self.secret
        return "Thanks" if right else "Again", float(right), right, self.left == 0, {}

gymnasium.register("Echo-v0", "echo_games:Echo", kwargs={"turns": 4})
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module of the user that registers an environment."""
    (tmp_path / "echo_games.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "echo_games:Echo-v0"
    sys.modules.pop("echo_games", None)
    gymnasium.registry.pop("Echo-v0", None)


def test_an_environment_of_gymnasium_is_played_with_its_own_limits_and_arguments(echo: str):
    env = make_env(echo, {"word": "bye", "max_steps": 9, "options": {"turns": 2}})
    observation, _ = env.reset(seed=4)
    assert observation.startswith("Say bye ") and observation == env.reset(seed=4)[0] != env.reset(seed=5)[0]
    assert env.step("what")[:4] == ("Again", 0.0, False, False)
    assert env.step("what")[:4] == ("Again", 0.0, False, True), "its own limit truncates the episode"
    secret = env.reset(seed=4)[0].removeprefix("Say ")
    assert env.step(secret)[:4] == ("Thanks", 1.0, True, False)
    assert make_env("Echo-v0").other.get_wrapper_attr("turns") == 4, "once its module is imported"
    env.close()


def test_ours_ends_it_too(echo: str):
    env = make_env(echo, {"max_steps": 1})
    env.reset(seed=1)
    assert env.step("what")[2:4] == (False, True)


def test_it_is_tried_in_a_process_of_its_own_before_a_run(echo: str):
    played: dict[str, Played] = {}
    trials = [EnvTrial("custom_envs.A", echo, {}), EnvTrial("custom_envs.B", echo, {"wrod": "x"})]
    [problem] = try_environments(trials, 30.0, played)
    assert "got an unexpected keyword argument 'wrod'" in problem and "custom_envs.B was tried" in problem
    assert [*played] == ["custom_envs.A"] and played["custom_envs.A"].observations[0].startswith("Say hello")


def test_one_whose_package_is_not_installed_stops_a_run_and_not_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("roll.envs.external.GEM_PACKAGE", "no_gem_here")
    for env_type, text in (
        (GUESS, f"{GUESS} is an environment of GEM; pip install --no-deps gem-llm"),
        (
            "ale_nowhere:ALE/Pong-v5",
            "ale_nowhere:ALE/Pong-v5 needs the module ale_nowhere; install the package that has",
        ),
    ):
        report = check(agentic(tmp_path, f"custom_envs.Lake.env_type={env_type}"))
        [problem] = [each for each in report.missing if each.path == "custom_envs.Lake.env_type"]
        assert not report.errors and problem.message.startswith(text)
        with pytest.raises(ConfigError, match=f"custom_envs.A.env_type: {text}"):
            make_env(env_type, {}, "custom_envs.A")


def test_an_installed_one_is_no_problem_of_the_configuration():
    assert list(try_environment("custom_envs.A", GUESS, {"max_turns": 3})) == []


def test_a_game_of_gem_is_won():
    env = make_env(GUESS, {"max_number": 64, "max_turns": 9})
    rewards, secrets = [], set()
    for seed in range(12):
        observation, _ = env.reset(seed=seed)
        assert "number between 1 and 64" in observation
        low, high, terminated = 1, 64, False
        while not terminated:
            middle = (low + high) // 2
            observation, reward, terminated, truncated, _ = env.step(rf"I say \boxed{{{middle}}}")
            low, high = (middle + 1, high) if "is higher than" in observation else (low, middle - 1)
            assert not truncated
        rewards.append(reward)
        secrets.add(middle)
    assert rewards == [1.0] * 12 and len(secrets) > 6


def test_seeds_determine_the_episodes_of_gem_whatever_others_of_the_process_draw():
    def episode(seed: int, between: Any) -> list[Any]:
        env = make_env(QUESTION, {"size": 50})
        first = env.reset(seed=seed)
        between()
        return [first, env.step(r"\boxed{3}")]

    def others() -> None:
        random.random(), np.random.random()
        other = make_env(GUESS)
        other.reset(seed=99)
        other.step("x")

    assert [episode(seed, others) for seed in range(5)] == [episode(seed, lambda: None) for seed in range(5)]
    assert len({episode(seed, others)[0][0] for seed in range(9)}) > 4
    state = random.getstate(), np.random.get_state()[1].tolist()
    others_env = make_env(GUESS)
    others_env.reset(seed=1)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state, "the process draws on as before"


def test_an_unknown_id_or_argument_of_gem_is_found_in_the_trial():
    assert "Environment game:Nothing-v0 not found" in str(play(make_env("game:Nothing-v0")))
    found = play(make_env(GUESS))
    assert isinstance(found, Played) and found.observations[0].startswith("You are playing Guess The Number")


def test_spaces_that_are_not_text_are_named():
    assert Text(3) != gymnasium.spaces.Discrete(2)
    with pytest.raises(
        ConfigError, match=r"'CartPole-v1' is not a text environment.*\(its spaces are Box and Discrete"
    ):
        make_env("CartPole-v1", {}, "custom_envs.Lake")
