"""Sums over the tokens that follow, against loops over tokens, and advantages from a critic's values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.advantages import AdvantageSettings, compute_advantages
from roll.algorithms.returns import BLOCK, discounted_sum, generalized_advantages
from tests.algorithms.trajectories import Trajectory, make_batch

GAE = AdvantageSettings(adv_estimator="gae", gamma=0.9, lambd=0.8)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_loop(rewards, values, gamma, lambd):
    """GAE of one sequence of numbers, by its definition."""
    advantages, following, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + gamma * next_value - value + gamma * lambd * following
        next_value = value
        advantages.append(following)
    return advantages[::-1]


@pytest.mark.parametrize("factor", [0.0, 0.3, 0.95, 0.999, 1.0])
@pytest.mark.parametrize("length", [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, BLOCK * BLOCK + 5])
def test_discounted_sums_are_those_of_a_loop(factor, length):
    values = draw(2, length)
    expected, following = torch.zeros_like(values), torch.zeros(2, dtype=torch.float64)
    for at in range(length - 1, -1, -1):
        following = values[:, at] + factor * following
        expected[:, at] = following
    torch.testing.assert_close(discounted_sum(values, factor), expected, atol=1e-10, rtol=1e-10)
    single = discounted_sum(values.float(), factor).double()
    torch.testing.assert_close(
        single, expected, atol=2e-5 * max(1.0, expected.abs().max().item() if length else 1), rtol=0
    )


@settings(max_examples=200, deadline=None)
@given(
    mask=st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=4),
    gamma=st.sampled_from([0.0, 0.5, 0.97, 1.0]),
    lambd=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 1000),
)
def test_advantages_are_those_of_a_loop_over_the_tokens_of_the_response(mask, gamma, lambd, seed):
    mask = torch.tensor(mask)
    rewards, values = draw(*mask.shape, seed=seed), draw(*mask.shape, seed=seed + 1)
    found = generalized_advantages(rewards, values, mask, gamma, lambd)
    assert (found[~mask] == 0).all()
    for row, kept in enumerate(mask):
        expected = by_loop(rewards[row][kept].tolist(), values[row][kept].tolist(), gamma, lambd)
        assert found[row][kept].tolist() == pytest.approx(expected)


def test_the_returns_are_advantages_and_values_before_whitening():
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1]])
    values = draw(2, 4).float()
    scores = torch.tensor([1.0, 0.0])
    plain = compute_advantages(scores, torch.zeros(2, dtype=torch.int64), mask, GAE, values=values)
    white = compute_advantages(
        scores,
        torch.zeros(2, dtype=torch.int64),
        mask,
        AdvantageSettings(adv_estimator="gae", gamma=0.9, lambd=0.8, whiten_advantages=True),
        values=values,
    )
    torch.testing.assert_close(plain.returns, (plain.advantages + values) * mask)
    assert torch.equal(white.returns, plain.returns)
    assert white.metrics["advantage/mean"] == pytest.approx(0, abs=1e-6)


def test_without_values_the_estimator_says_what_it_needs():
    with pytest.raises(ValueError, match="adv_estimator gae needs the values of a critic"):
        compute_advantages(torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.ones(1, 2), GAE)


def test_the_turns_of_a_trajectory_are_one_sequence_whether_they_are_one_sample_or_several():
    trajectories = [
        Trajectory(0, [0.5, 0.0, 1.0], [1, 2, 3], [2, 1, 3]),
        Trajectory(0, [-1.0], [1], [2]),
        Trajectory(1, [0.0, 2.0], [1, 2], [1, 1]),
    ]
    tokens = {
        (number, turn): one.lengths[turn] for number, one in enumerate(trajectories) for turn in range(len(one.rewards))
    }
    value_of = {key: draw(count, seed=7 * key[0] + key[1]).float() for key, count in tokens.items()}

    def advantages(steps, padding):
        batch = make_batch(trajectories, steps=steps, padding=padding)
        values = torch.full(batch.tensors["response_mask"].shape, 55.0)
        places = [
            (row, batch.tensors["turn_index"][row] == position, (line["number"], turn))
            for row, line in enumerate(batch.rows)
            for position, turn in enumerate(line["turns"])
        ]
        for row, own, key in places:
            values[row][own] = value_of[key]
        found = batch.advantages(GAE, values=values).advantages
        return {key: found[row][own].tolist() for row, own, key in places}

    whole, split = advantages(False, 0), advantages(True, 2)
    for number, one in enumerate(trajectories):
        keys = [(number, turn) for turn in range(len(one.rewards))]
        rewards = [
            one.rewards[turn] if at == tokens[number, turn] - 1 else 0.0
            for _, turn in keys
            for at in range(tokens[number, turn])
        ]
        values = [value for key in keys for value in value_of[key].tolist()]
        expected = by_loop(rewards, values, 0.9, 0.8)
        for found in (whole, split):
            assert [x for key in keys for x in found[key]] == pytest.approx(expected, abs=1e-5)


def test_what_a_score_has_beyond_its_turns_is_on_the_last_token():
    config = AdvantageSettings(adv_estimator="gae", gamma=1.0, lambd=1.0, reward_clip=1.0)
    batch = make_batch([Trajectory(0, [1.0, 2.0], [1, 2], [1, 2])])
    found = batch.advantages(config, values=torch.zeros_like(batch.tensors["response_mask"], dtype=torch.float32))
    kept = found.advantages[0][batch.tensors["response_mask"][0]]
    assert kept.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("split", [[[0, 1], [2, 3]], [[3], [0, 2], [1]]])
def test_no_advantage_depends_on_the_other_samples(split):
    mask = torch.arange(9) < torch.tensor([[3], [9], [1], [0]])
    scores, values, groups = draw(4).float(), draw(4, 9).float(), torch.arange(4)
    whole = compute_advantages(scores, groups, mask, GAE, values=values).advantages
    for rows in split:
        part = compute_advantages(scores[rows], groups[rows], mask[rows], GAE, values=values[rows]).advantages
        torch.testing.assert_close(part, whole[rows])
