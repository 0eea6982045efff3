from __future__ import annotations

import re

import gymnasium
import pytest

from roll.base.errors import ConfigError
from roll.envs import TextEnv, Turn, make_env
from roll.envs.frozen_lake import FrozenLake
from roll.envs.registry import BUILT_IN_ENVS
from tests.envs.playing import OPTIONS


def message(env_type, env_config=None, path="custom_envs.Lake") -> str:
    with pytest.raises(ConfigError) as error:
        make_env(env_type, env_config, path)
    return str(error.value)


@pytest.mark.parametrize("env_type", ["frozen_lake", "roll/FrozenLake-v0", "roll.envs.frozen_lake:FrozenLake"])
def test_a_name_an_id_and_a_class_make_the_same_environment(env_type):
    env = make_env(env_type, {"size": 6, "is_slippery": False})
    assert type(env) is FrozenLake and env.config.size == 6 and not env.config.is_slippery


def test_every_name_is_registered():
    assert all(make_env(built_in.id).reset(seed=0) for built_in in BUILT_IN_ENVS.values())
    assert all(make_env(name).reset(seed=0) for name in BUILT_IN_ENVS)


def test_every_built_in_environment_is_played_by_the_tests_of_the_base_class():
    assert OPTIONS.keys() == BUILT_IN_ENVS.keys()


def test_options_of_a_registration_can_be_overridden():
    gymnasium.register("tests/BigLake-v0", "roll.envs.frozen_lake:FrozenLake", kwargs={"size": 9, "p": 0.9})
    try:
        env = make_env("tests/BigLake-v0", {"p": 0.7})
        assert (env.config.size, env.config.p) == (9, 0.7)
    finally:
        del gymnasium.registry["tests/BigLake-v0"]


@pytest.mark.parametrize(
    ("env_type", "expected"),
    [
        ("frozn_lake", "'frozn_lake' is not an environment; did you mean frozen_lake? known: frozen_lake, sokoban"),
        ("CartPole-v1", "'CartPole-v1' is not a text environment; subclass roll.envs.TextEnv"),
        ("nowhere:Env", "'nowhere:Env': there is no module nowhere"),
        ("roll.envs.sokoban:Sokobn", "the module has no Sokobn; did you mean Sokoban?"),
        (7, "7 is not text; known: frozen_lake"),
    ],
)
def test_an_unknown_environment_is_an_error_with_the_nearest_name(env_type, expected):
    text = message(env_type)
    assert text.startswith("custom_envs.Lake.env_type: ") and expected in text


@pytest.mark.parametrize(
    ("env_config", "expected"),
    [
        (
            {"sise": 3},
            "env_config.sise: unknown key; did you mean size? known: max_steps, env_instruction, tools, action_pattern",
        ),
        ({"size": 1}, "env_config.size: 1 is too small; the least allowed is 2"),
        ({"p": "often"}, "env_config.p: 'often' is not a number"),
        ({"is_slippery": 1}, "env_config.is_slippery: 1 is not true or false"),
        ({"format_penalty": 0.5}, "env_config.format_penalty: 0.5 is too large; the most allowed is 0"),
        ({"action_pattern": "(["}, "env_config.action_pattern: '([' is not a regular expression"),
        ({"action_pattern": "x"}, "env_config.action_pattern: 'x' has no group to hold the action"),
        (
            {"action_pattern": r"(\w+)!"},
            r"env_config.action_pattern: '(\\w+)!': the built-in rules cannot show an example of an answer; set",
        ),
        (["size"], "env_config: ['size'] is not a section"),
    ],
)
def test_an_invalid_option_is_an_error_with_path_and_value(env_config, expected):
    assert f"custom_envs.Lake.{expected}" in message("frozen_lake", env_config)


def test_all_problems_are_reported_together():
    text = message("frozen_lake", {"size": 1, "p": 2, "depth": 3}, path="")
    assert [line.partition(":")[0] for line in text.splitlines()] == [
        "env_config.size",
        "env_config.p",
        "env_config.depth",
    ]


def test_options_of_the_constructor_are_checked():
    with pytest.raises(ConfigError, match="^size: 1 is too small"):
        FrozenLake(size=1)


class Walk(TextEnv):
    """An environment whose METRICS the test sets."""

    def rules(self) -> str:
        return "Walk."

    def begin(self) -> str:
        return "here"

    def act(self, text: str) -> Turn:
        return Turn("there", 0.0)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"steps": "max"}, "METRICS has 'steps': 'max'; it maps names to mean, sum, last"),
        ({3: "sum"}, "METRICS has 3: 'sum'"),
        ({"score": "last"}, "METRICS has 'score', which a run reports for every episode; use another name"),
        (["steps"], "METRICS is list; it maps names to mean, sum, last"),
    ],
)
def test_invalid_metrics_are_an_error(monkeypatch, metrics, expected):
    monkeypatch.setattr(Walk, "METRICS", metrics)
    with pytest.raises(ConfigError) as caught:
        make_env(f"{__name__}:Walk", {}, "custom_envs.Walk")
    assert expected in str(caught.value) and "custom_envs.Walk.env_type" in str(caught.value)


def test_an_unknown_option_of_a_class_without_options_says_where_they_are_declared():
    assert (
        "env_config.width: unknown key; known: max_steps, env_instruction, tools; options of your own are fields"
        in (message(f"{__name__}:Walk", {"width": 8}))
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SkipsInit", "__init__ has to call super().__init__(**options)"),
        ("OddConfig", "config_class of OddConfig has to be a subclass of EnvConfig"),
    ],
)
def test_a_class_that_is_not_set_up_is_an_error_with_its_line(name, expected):
    with pytest.raises(ConfigError) as caught:
        make_env(f"tests.envs.broken_envs:{name}", {})
    [problem] = caught.value.problems
    assert re.fullmatch(rf"tests/envs/broken_envs.py:\d+: {re.escape(expected)}", problem.message)
