"""Reward of questions that reasoning-gym generates: the dataset's own scorer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from roll.configs.scoring.rewards import RewardConfig
from roll.rewards.calling import SelfTest, without_reasoning
from roll.rewards.math_rule import boxed

COLUMN = "reasoning_gym"
"""Column of a row with the whole item as JSON."""

_SUM = {COLUMN: '{"answer": "5", "metadata": {"source_dataset": "chain_sum"}}'}
SELF_TEST: SelfTest = (("<answer> 5 </answer>", _SUM, True), (r"\boxed{6}", _SUM, False))


def reasoning_gym_reward(response: str, ground_truth: str, row: Mapping[str, Any], config: RewardConfig) -> float:
    r"""The score of the dataset for the answer of a response, from `wrong_score` (its 0) to `correct_score` (its 1).

    The answer is the content of the last `<answer>` or else of the last `\boxed{}`, or the whole response without
    either. What precedes `</think>` does not count. Some datasets give a part of the score for an answer among other
    words.

    Args:
        response: the decoded response.
        ground_truth: the item as JSON, with `answer` and `metadata`. Unused if the row has the column `reasoning_gym`.
        row: the column `reasoning_gym`, which rows of `file_name: reasoning_gym:NAME` have.
        config: `correct_score` and `wrong_score` are used.

    Raises:
        ValueError: the row is not from reasoning-gym.
    """
    try:
        item = json.loads(row.get(COLUMN, ground_truth))
        name = item["metadata"]["source_dataset"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"the row has no item in column {COLUMN}; use file_name: reasoning_gym:NAME") from None
    score = _scorer(name)(answer_of(response), item)
    return config.share_score(float(score))


def warm_up() -> None:
    _scorer("chain_sum")


def answer_of(response: str) -> str:
    """The answer that a response gives; see `reasoning_gym_reward`."""
    text = without_reasoning(response)
    before, found, tagged = text.rpartition("<answer>")
    if found:
        return tagged.partition("</answer>")[0].strip()
    in_box = boxed(text)
    return (text if in_box is None else in_box).strip()


@cache
def _scorer(name: str) -> Any:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(name)
