"""GDPO: each reward is normalised in its group, the weighted sum is whitened over the samples of the batch."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.advantages import AdvantageSettings, compute_advantages
from roll.algorithms.aggregation import EPSILON, whiten
from roll.configs.pipeline import RLVRConfig
from roll.configs.scoring.rewards import RewardConfig
from tests.algorithms.trajectories import single_turns

GDPO = AdvantageSettings(adv_estimator="gdpo", reward_weights=(1.0, 0.5))
GROUPS = torch.tensor([0, 0, 1, 1])
MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]])
RIGHT, FORMAT = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 1.0, 0.0])
PARTS = torch.stack([RIGHT, FORMAT], dim=1)
NAN = math.nan


def advantages(parts, groups=GROUPS, mask=MASK, config=GDPO, **more):
    """The result for scores that are the weighted sum of the parts."""
    scores = (parts.nan_to_num() * torch.tensor(config.reward_weights)).sum(-1)
    return compute_advantages(scores, groups, mask, config, reward_parts=parts, **more)


def per_sample(result):
    """The advantage of each sample's first response token."""
    return result.advantages[:, 1].tolist()


def test_a_return_is_the_sum_of_the_rewards():
    assert advantages(PARTS).returns[2].tolist() == [0, 1.5, 0, 0]


def test_responses_with_the_same_sum_of_other_rewards_have_other_advantages():
    """The example of the paper (its figure 2): grpo cannot tell one reward of two from two of two."""
    config = replace(GDPO, reward_weights=(1.0, 1.0))
    parts = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    grpo = compute_advantages(parts.sum(-1), GROUPS, MASK, AdvantageSettings())
    assert per_sample(grpo)[1] == pytest.approx(per_sample(grpo)[3], abs=1e-5)
    result = per_sample(advantages(parts, config=config))
    assert result[3] == pytest.approx(2 * result[1], abs=1e-5)


def test_equal_scores_everywhere_give_exactly_0():
    result = advantages(torch.tensor([[0.1, 0.7], [0.1, 0.7], [0.3, 0.2], [0.3, 0.2]]))
    assert (result.advantages == 0).all()
    assert result.metrics["advantage/zero_variance_groups"] == 2


def test_a_group_with_equal_sums_of_different_rewards_is_learned_from():
    parts = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [0.0, 0.0]])
    result = advantages(parts)
    assert result.metrics["advantage/zero_variance_groups"] == 0 and (result.advantages[:2, 1] != 0).all()
    unweighted = advantages(
        torch.tensor([[1.0, 0.0], [1.0, 2.0], [1.0, 1.0], [0.0, 0.0]]), config=replace(GDPO, reward_weights=(1.0, 0.0))
    )
    assert unweighted.metrics["advantage/zero_variance_groups"] == 1, "a reward of weight 0 is a metric"


def test_rows_without_a_token_do_not_count_in_the_whitening():
    padded = torch.cat([PARTS, torch.full((3, 2), NAN)])
    mask, groups = torch.cat([MASK, torch.zeros(3, 4)]), torch.tensor([0, 0, 1, 1, 2, 3, 4])
    plain = advantages(PARTS)
    for turns in (None, single_turns(torch.zeros(7), mask)):
        result = advantages(padded, groups, mask, turns=turns)
        torch.testing.assert_close(result.advantages[:4], plain.advantages)
        assert (result.advantages[4:] == 0).all()


def test_samples_left_out_of_the_loss_count_in_the_statistics():
    keep = torch.tensor([True, False, True, True])
    result = advantages(PARTS, learned=keep)
    assert per_sample(result)[1] == 0
    assert torch.equal(result.advantages[keep], advantages(PARTS).advantages[keep])


def test_penalties_keep_their_unit():
    """The KL of the tokens, and of length, minus the mean of the group; rewards have spread 2 ** -0.5 in a group."""
    parts = torch.tensor([[1.0, 0.5], [0.0, 0.5], [0.5, 0.5], [0.5, 0.5]])
    config = replace(GDPO, add_token_level_kl=True, kl_penalty="k1")
    given = {"log_probs": torch.zeros(4, 4), "ref_log_probs": torch.full((4, 4), -1.0)}
    result = per_sample(advantages(parts, config=config, kl_coef=0.1, **given))
    total = torch.tensor([2**-0.5 + 0.05, -(2**-0.5) - 0.05, 0.05, -0.05])
    assert result == pytest.approx(whiten(total, torch.ones(4)).tolist(), abs=1e-4)
    config = replace(GDPO, response_length=3, overlong_buffer_len=2, overlong_penalty_factor=0.4)
    lost = torch.tensor([0.2, 0.4, 0.0, 0.2])
    total = torch.tensor([2**-0.5, -(2**-0.5), 0.0, 0.0]) - lost + torch.tensor([0.3, 0.3, 0.1, 0.1])
    assert per_sample(advantages(parts, config=config)) == pytest.approx(
        whiten(total, torch.ones(4)).tolist(), abs=1e-4
    )


def test_scores_of_rewards_are_needed_one_for_each_weight():
    for parts, message in (
        (None, "the score of each reward, which"),
        (PARTS[:, :1], "of 2 rewards, and this batch has 1"),
    ):
        with pytest.raises(ValueError, match=f"gdpo needs .*{message}"):
            compute_advantages(RIGHT, GROUPS, MASK, GDPO, reward_parts=parts)


def test_weights_are_those_of_the_rewards_in_their_order():
    rewards = {"right": RewardConfig(weight=2.0), "format": RewardConfig(weight=0.25)}
    config = RLVRConfig(adv_estimator="gdpo", rewards=rewards)
    assert config.advantages.reward_weights == (2.0, 0.25)


def reference(rows, weights):
    """GDPO in plain Python: (group, tokens, scores or None) -> advantage of each row."""
    totals = []
    for group, _, scores in rows:
        total = 0.0
        for reward, weight in enumerate(weights):
            members = [each[2][reward] for each in rows if each[0] == group and each[2][reward] is not None]
            if scores[reward] is not None and len(set(members)) > 1:
                total += weight * (scores[reward] - mean(members)) / (stdev(members) + EPSILON)
        totals.append(total)
    sampled = [total for total, row in zip(totals, rows, strict=True) if row[1]]
    if len(sampled) < 2:
        return [0.0] * len(rows)
    return [
        (total - mean(sampled)) / (stdev(sampled) + EPSILON) if row[1] else 0.0
        for total, row in zip(totals, rows, strict=True)
    ]


SCORES = st.sampled_from([0.0, 0.25, 1.0, -2.0, None])
ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.lists(SCORES, min_size=3, max_size=3)), min_size=1, max_size=12
)
WEIGHTS = st.lists(st.sampled_from([1.0, 0.5, -0.25, 0.0]), min_size=3, max_size=3)


def tensors(rows):
    parts = torch.tensor([[NAN if score is None else score for score in scores] for _, _, scores in rows])
    mask = torch.tensor([[False] + [at < tokens for at in range(3)] for _, tokens, _ in rows])
    return parts, torch.tensor([group for group, _, _ in rows]), mask


@settings(deadline=None, max_examples=200)
@given(ROWS, WEIGHTS, st.randoms())
def test_advantages_are_those_of_plain_python_in_any_order(rows, weights, random):
    expected = reference(rows, weights)
    config = replace(GDPO, reward_weights=tuple(weights))
    result = advantages(*tensors(rows), config=config)
    assert torch.isfinite(result.advantages).all()
    assert per_sample(result) == pytest.approx(expected, abs=1e-5)
    order = list(range(len(rows)))
    random.shuffle(order)
    moved = advantages(*tensors([rows[number] for number in order]), config=config)
    assert per_sample(moved) == pytest.approx([per_sample(result)[number] for number in order], abs=1e-5)
