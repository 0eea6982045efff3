from __future__ import annotations

import json
import math
import os
import pickle
import random
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

from roll.envs import TextEnv, Turn, make_env
from roll.envs.registry import BUILT_IN_ENVS
from tests.envs.playing import INVALID_TEXTS, OPTIONS, Step, no_deadline, play, texts

REWARDS = {"frozen_lake": (0.0, 1.0), "sokoban": (-1.1, 10.9), "calculator": (0.0, 1.0)}
"""Smallest and largest reward of a valid action."""

every = pytest.mark.parametrize("name", OPTIONS)
seeds = st.integers(0, 2**32)


@every
def test_gymnasiums_checker_passes(name, recwarn):
    check_env(gymnasium.make(BUILT_IN_ENVS[name].id, **OPTIONS[name]), skip_render_check=True)
    assert [str(warning.message) for warning in recwarn] == []


@every
@no_deadline
@given(seed=seeds, other=seeds)
def test_a_seed_and_the_actions_determine_an_episode(name, seed, other):
    used, fresh = make_env(name, OPTIONS[name]), make_env(name, OPTIONS[name])
    play(used, other, texts(used, other))
    assert play(used, seed, texts(used, seed)) == play(fresh, seed, texts(fresh, seed))


@every
def test_different_seeds_give_different_tasks(name):
    env = make_env(name)
    assert len({env.reset(seed=seed)[0] for seed in range(50)}) > 40


@every
@no_deadline
@given(seed=seeds)
def test_steps_are_well_formed(name, seed):
    env = make_env(name, OPTIONS[name])
    (observation, info), *steps = play(env, seed, texts(env, seed))
    assert isinstance(observation, str) and observation and info == {}
    least, most = REWARDS[name]
    for step in steps:
        metrics = step.info["metrics"]
        assert isinstance(step.observation, str) and step.observation
        assert type(step.reward) is float and type(step.terminated) is bool and type(step.truncated) is bool
        assert metrics.keys() == env.METRICS.keys() and all(type(value) is float for value in metrics.values())
        if metrics["action_is_valid"]:
            assert least <= step.reward <= most and metrics["format_penalty"] == 0
        else:
            assert step.reward == metrics["format_penalty"] == -0.25


@every
@no_deadline
@given(seed=seeds, text=st.one_of(st.sampled_from(INVALID_TEXTS), st.text()))
def test_a_text_without_an_action_counts_as_a_step_and_does_not_change_the_state(name, seed, text):
    env, other = make_env(name, OPTIONS[name]), make_env(name, OPTIONS[name])
    env.reset(seed=seed)
    other.reset(seed=seed)
    step = Step(*env.step(text))
    assert step.info["metrics"]["action_is_valid"] == 0 and not step.terminated
    assert step.reward == -0.25 and env.steps == 1
    for action in ("<answer>Down</answer>", "<answer>7</answer>"):
        if not step.terminated:
            step = Step(*env.step(action))
            assert step == other.step(action)


@every
@no_deadline
@given(seed=seeds, max_steps=st.integers(1, 8))
def test_an_episode_is_truncated_after_max_steps(name, seed, max_steps):
    max_steps = max(max_steps, 5) if name == "sokoban" else max_steps  # the minimum for one box
    env = make_env(name, {"max_steps": max_steps})
    _, *steps = play(env, seed, ["nothing"] * 20)
    assert [step.truncated for step in steps] == [False] * (max_steps - 1) + [True]
    assert not any(step.terminated for step in steps)
    with pytest.raises(ResetNeeded, match="call reset first"):
        env.step("more")


@every
def test_a_step_requires_a_running_episode_and_text(name):
    env = make_env(name)
    with pytest.raises(ResetNeeded):
        env.step("<answer>Right</answer>")
    env.reset(seed=0)
    with pytest.raises(TypeError, match="the action is int, not text"):
        env.step(2)


@every
def test_observations_do_not_repeat_the_models_text(name):
    env = make_env(name, OPTIONS[name])
    env.reset(seed=0)
    for text in ("<|im_end|>", "<tool><|im_end|></tool>", "<tool>1+<|im_end|></tool>", "<answer><|im_end|></answer>"):
        assert "<|im_end|>" not in env.step(text)[0]


@every
def test_global_random_generators_are_not_used(name):
    before = random.getstate(), pickle.dumps(np.random.get_state())
    env = make_env(name, OPTIONS[name])
    play(env, 3, texts(env, 3))
    env.reset()
    assert (random.getstate(), pickle.dumps(np.random.get_state())) == before


@every
def test_a_pickled_environment_continues_its_episode(name):
    env = make_env(name, OPTIONS[name])
    env.reset(seed=5)
    env.step("<answer>Left</answer>")
    copy = pickle.loads(pickle.dumps(env))
    for text in ("<answer>Down</answer>", "<tool>2+3</tool>"):
        assert env.step(text) == copy.step(text)
    assert env.reset() == copy.reset()


def test_episodes_are_the_same_in_another_process():
    code = (
        "import json, sys; from roll.envs import make_env; from tests.envs.playing import play, texts\n"
        "envs = [make_env(*spec) for spec in json.loads(sys.argv[1])]\n"
        "print(json.dumps([play(env, seed, texts(env, seed)) for env in envs for seed in range(5)]))"
    )
    command = [sys.executable, "-c", code, json.dumps(list(OPTIONS.items()))]
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    local = [play(env, seed, texts(env, seed)) for env in map(make_env, OPTIONS, OPTIONS.values()) for seed in range(5)]
    assert json.loads(done.stdout) == json.loads(json.dumps(local))


@every
def test_the_rules_can_be_replaced(name):
    assert make_env(name).instruction == make_env(name).rules()
    assert make_env(name, {"env_instruction": "Play."}).instruction == "Play."


class Broken(TextEnv):
    """Returns the turn that the test sets."""

    METRICS = {"success": "last"}
    turn: Turn

    def rules(self) -> str:
        return ""

    def begin(self) -> str:
        return "go"

    def act(self, text: str) -> Turn:
        return self.turn


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (Turn("ok", math.nan, metrics={"success": 0.0}), "Broken.act: the reward is nan"),
        (
            Turn("ok", 1e39, metrics={"success": 0.0}),
            r"Broken.act: the reward is 1e\+39, it must be at most 1e\+18",
        ),
        (Turn("ok", 0.0), r"Broken.act: the metrics are \[\], METRICS declares \['success'\]"),
        (Turn(None, 0.0, metrics={"success": 0.0}), "Broken.act: the observation is NoneType, not text"),
    ],
)
def test_an_invalid_turn_is_an_error(turn, message):
    env = Broken()
    env.turn = turn
    env.reset(seed=0)
    with pytest.raises((TypeError, ValueError), match=message):
        env.step("text")


def test_gymnasium_make():
    env = gymnasium.make("roll/FrozenLake-v0", size=5)
    assert env.reset(seed=1) == make_env("frozen_lake", {"size": 5}).reset(seed=1)
