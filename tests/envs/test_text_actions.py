from __future__ import annotations

import pytest

from roll.envs.base import episode_metrics
from roll.envs.grid_games import MOVES
from roll.envs.text_actions import ANSWER, ActionPattern

THINK = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<answer>Right</answer>", "Right"),
        ("I go <ANSWER>\n rIGHT \n</Answer> now", "Right"),
        ("<answer>Up</answer><answer>Down</answer>", "Up"),
        ("<answer>North</answer><answer>Down</answer>", None),
        ("<answer>Right, Up</answer>", None),
        ("<answer>2</answer>", None),
        ("<answer>Right", None),
        ("Right", None),
        ("", None),
    ],
)
def test_the_first_answer_is_read(text, action):
    assert ActionPattern(ANSWER, MOVES).read(text) == action


def test_the_last_group_holds_the_action():
    assert ActionPattern(THINK, MOVES).read("<think>Left?\nNo.</think> <answer>Up</answer>") == "Up"
    assert ActionPattern(THINK, MOVES).read("<answer>Up</answer>") is None


@pytest.mark.parametrize(
    ("pattern", "example"),
    [
        (ANSWER, "<answer>Up</answer>"),
        (THINK, "<think>...</think><answer>Up</answer>"),
        ("^(.*)$", "Up"),
        (r"(\w+)!", None),
        (r"\[(.*?)\]", None),
    ],
)
def test_an_example_is_read_as_its_action_or_is_none(pattern, example):
    assert ActionPattern(pattern, MOVES).example("Up") == example


def test_episode_metrics_are_aggregated_by_their_rules():
    steps = [{"valid": 1.0, "won": 1.0, "calls": 2.0}, {"valid": 0.0, "won": 0.0, "calls": 3.0}]
    rules = {"valid": "mean", "won": "last", "calls": "sum"}
    assert episode_metrics(rules, steps) == {"valid": 0.5, "won": 0.0, "calls": 5.0}
    with pytest.raises(ValueError, match="without an action"):
        episode_metrics(rules, [])
