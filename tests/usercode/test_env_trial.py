"""Environments are tried before a run: errors begin with the user's file and line, and nothing can hang the driver."""

from __future__ import annotations

import re
import time

import pytest

from roll.usercode import env_trial
from roll.usercode.env_trial import EnvTrial, Played, play, try_environments
from tests.envs import broken_envs

MODULE = "tests.envs.broken_envs"


def trial(name: str) -> EnvTrial:
    return EnvTrial(f"custom_envs.{name}", f"{MODULE}:{name}", {})


def test_every_mistake_is_reported_with_file_and_line_and_the_others_are_tried_too() -> None:
    names = [
        "Good",
        "Raises",
        "ReturnsNothing",
        "BadReward",
        "NoText",
        "WantsSeed",
        "LacksRules",
        "BadInit",
        "Dies",
        "Good",
    ]
    built_in = EnvTrial("custom_envs.Lake", "frozen_lake", {"is_slippery": False})
    problems = try_environments([built_in, *map(trial, names)], 30)
    expected = [
        ("Raises", "ZeroDivisionError: division by zero\n    return Turn('x', 1 / 0)"),
        ("ReturnsNothing", "ReturnsNothing.act: returned None; return Turn(observation, reward)"),
        ("BadReward", "BadReward.act: the reward is str, not a number"),
        ("NoText", "begin returned a int, not text"),
        ("WantsSeed", "TypeError: WantsSeed.begin() missing 1 required positional argument: 'seed'"),
        ("LacksRules", "LacksRules has to define rules"),
        ("BadInit", "KeyError: 'size'"),
        ("Dies", "ended its process with exit code 7"),
    ]
    assert len(problems) == len(expected), problems
    for problem, (name, message) in zip(problems, expected, strict=True):
        assert message.replace("'x'", '"x"') in problem and problem.endswith(
            f"custom_envs.{name} was tried before the run"
        )
        assert problem.splitlines()[0].count("tests/envs/broken_envs.py:") == (name != "Dies")


def test_a_hanging_environment_is_reported_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_trial, "PLAY_S", 0.1)
    start = time.monotonic()
    [problem] = try_environments([trial("Hangs")], 0.5)
    assert "a reset or step of tests.envs.broken_envs:Hangs took longer than 0.5 s (env_step_timeout_s 0.5)" in problem
    assert time.monotonic() - start < 300, "the environment hangs for 600 s"


@pytest.mark.parametrize(("name", "turn"), [("LateError", 3), ("NeedsWord", 1)])
def test_episodes_are_played_to_their_end_with_empty_texts(name: str, turn: int) -> None:
    problem = play(getattr(broken_envs, name)(max_steps=5))
    assert isinstance(problem, str) and problem.startswith("tests/envs/broken_envs.py:")
    assert f"in turn {turn} of an episode" in problem


def test_episodes_are_played_with_the_actions_of_the_rules() -> None:
    problem = play(broken_envs.WrongAnswer(max_steps=50))
    assert isinstance(problem, str) and "KeyError: '<answer>left</answer>'" in problem


def test_a_failure_in_some_episodes_is_no_problem_but_is_kept_with_its_file_and_line() -> None:
    played = play(broken_envs.SecondFails(max_steps=5))
    assert isinstance(played, Played) and played.observations == ("Go.",)
    assert re.match(r"tests/envs/broken_envs.py:\d+: ConnectionError: lost\n", played.failure)


def test_a_slow_environment_plays_a_part_of_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_trial, "PLAY_S", 0.1)
    played = play(broken_envs.Slow(max_steps=1000))
    assert isinstance(played, Played) and 2 <= len(played.observations) < 20
    assert (played.instruction, played.observations[0]) == ("Wait.", "Go.")


def test_the_first_observation_of_the_slowest_environment_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_trial, "PLAY_S", 0.0)
    played = play(broken_envs.Slow(max_steps=1000))
    assert isinstance(played, Played) and played.observations == ("Go.",)
