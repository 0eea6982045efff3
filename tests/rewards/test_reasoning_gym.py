"""The reward of questions that reasoning-gym generates."""

from __future__ import annotations

import json

import pytest
from reasoning_gym import create_dataset

from roll.configs.scoring.rewards import RewardConfig
from roll.rewards.reasoning_gym import reasoning_gym_reward

pytestmark = pytest.mark.slow  # reasoning-gym takes two seconds to import


@pytest.mark.parametrize("name", ["chain_sum", "gcd", "word_sorting", "countdown", "mini_sudoku", "simple_equations"])
def test_the_score_is_that_of_the_dataset(name: str) -> None:
    dataset = create_dataset(name, size=3, seed=5)
    for item in dataset:
        row = {"reasoning_gym": json.dumps(item)}
        for answer in (str(item["answer"]), "17", f"it is {item['answer']}", ""):
            expected = dataset.score_answer(answer, item)
            for response in (f"so <answer>{answer}</answer>.", f"<think>\\boxed{{3}}</think>{answer}"):
                assert reasoning_gym_reward(response, "", row, RewardConfig()) == pytest.approx(expected)


def test_scores_lie_between_those_of_a_wrong_and_a_right_answer() -> None:
    row = {"reasoning_gym": '{"answer": "5", "metadata": {"source_dataset": "chain_sum"}}'}
    config = RewardConfig(correct_score=2.0, wrong_score=-1.0)
    scores = [reasoning_gym_reward(text, "", row, config) for text in ("5", r"a \boxed{5}", "4", "= 5!!")]
    assert scores == pytest.approx([2.0, 2.0, -1.0, -0.4])


def test_rows_of_other_data_are_refused() -> None:
    with pytest.raises(ValueError, match="use file_name: reasoning_gym:NAME"):
        reasoning_gym_reward("5", "5", {"prompt": "2+3="}, RewardConfig())
