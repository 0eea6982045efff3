from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from roll.algorithms.advantages import (
    AdvantageSettings,
    GreedyResponses,
    compute_advantages,
    learned_samples,
    read_greedy,
)
from roll.algorithms.estimators import ADV_ESTIMATORS
from roll.algorithms.options.shaping_options import SampleMaskOptions
from roll.algorithms.returns import return_to_go, token_rewards
from roll.algorithms.shaping import overlong_penalty
from roll.configs.agentic import AgenticConfig
from roll.configs.pipeline import RLVRConfig
from tests.algorithms.trajectories import RESPONSE_ESTIMATORS, single_turns

MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]])
GROUPS = torch.tensor([0, 0, 1, 1])
SCORES = torch.tensor([1.0, 0.0, 2.0, 6.0])
VALUES = torch.arange(16.0).reshape(4, 4) / 8
GREEDY = GreedyResponses(torch.tensor([0.5, 0.5, 3.0, 3.0]), torch.tensor([1, 1, 9, 9]))
GRPO = AdvantageSettings(reward_weights=(1.0, 0.5))
POLICY, TEACHER = torch.linspace(-2, -1, 16).view(4, 4), torch.linspace(-1, -3, 16).view(4, 4)
"""Log-probs of the policy and of a teacher."""
PARTS = torch.stack([SCORES, torch.tensor([0.0, 1.0, 1.0, 0.0])], dim=1)
"""Scores of two rewards."""
SQUARES = torch.linspace(0.2, 0.6, 16).view(4, 4)
"""Sums of squared probabilities."""
GIVEN = {
    "values": VALUES,
    "greedy": GREEDY,
    "log_probs": POLICY,
    "ref_log_probs": TEACHER,
    "reward_parts": PARTS,
    "sum_pi_squared": SQUARES,
}
REMAX = AdvantageSettings(adv_estimator="remax")
REINFORCE = AdvantageSettings(adv_estimator="reinforce", gamma=0.5)


def per_sample(result):
    """The advantage of each sample's first response token."""
    return result.advantages[:, 1].tolist()


def test_grpo_without_the_std_only_subtracts_the_mean():
    result = compute_advantages(SCORES, GROUPS, MASK, replace(GRPO, grpo_norm_by_std=False))
    assert per_sample(result) == [0.5, -0.5, -2.0, 2.0]


def test_groups_with_zero_variance_have_no_advantage_and_are_counted():
    scores, groups = torch.tensor([0.1, 0.1, 0.1, 5.0]), torch.tensor([0, 0, 0, 1])
    result = compute_advantages(scores, groups, MASK, GRPO)
    assert (result.advantages == 0).all()
    assert result.metrics["advantage/zero_variance_groups"] == 2
    assert result.metrics["advantage/zero_variance_group_fraction"] == 1.0


def test_a_group_with_zero_variance_after_clipping_is_counted():
    scores, groups = torch.tensor([2.0, 3.0, 0.1, 0.5]), torch.tensor([0, 0, 1, 1])
    result = compute_advantages(scores, groups, MASK, replace(GRPO, reward_clip=1.0))
    assert (result.advantages[:2] == 0).all() and (result.advantages[2:] != 0).any()
    assert result.metrics["advantage/zero_variance_groups"] == 1


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        (None, None, [1.0, 0.0, 2.0, 6.0]),
        ("batch", None, [-1.25, -2.25, -0.25, 3.75]),
        ("group", None, [0.5, -0.5, -2.0, 2.0]),
        ("batch", "batch", [-0.4753, -0.8555, -0.0951, 1.4259]),
        (None, "batch", [0.3802, 0.0, 0.7605, 2.2814]),
        ("batch", "group", [-1.7678, -3.1820, -0.0884, 1.3258]),
    ],
)
def test_reinforce_normalizes_scores_over_batch_or_group(mean, std, expected):
    config = replace(REINFORCE, gamma=1.0, norm_mean_type=mean, norm_std_type=std)
    assert per_sample(compute_advantages(SCORES, GROUPS, MASK, config)) == pytest.approx(expected, abs=1e-4)


def estimate(name, **settings):
    config = replace(GRPO, adv_estimator=name, **settings)
    return compute_advantages(SCORES, GROUPS, MASK, config, **GIVEN)


@pytest.mark.parametrize("name", ["grpo", "rloo", "remax", "reinforce_plus_plus"])
def test_a_return_has_no_baseline(name):
    assert estimate(name).returns[0].tolist() == [0, 1, 1, 0]


def test_remax_of_one_response_to_each_prompt_has_a_gradient():
    alone = compute_advantages(SCORES, torch.arange(4), MASK, REMAX, greedy=GREEDY)
    assert alone.advantages.equal(estimate("remax").advantages)


def test_the_greedy_response_loses_the_penalty_of_its_own_length_and_is_clipped():
    config = replace(REMAX, response_length=10, overlong_buffer_len=4, overlong_penalty_factor=2.0)
    assert per_sample(compute_advantages(SCORES, GROUPS, MASK, config, greedy=GREEDY)) == [0.5, -0.5, 0.5, 4.5]
    clipped = compute_advantages(SCORES, GROUPS, MASK, replace(REMAX, reward_clip=2.5), greedy=GREEDY)
    assert per_sample(clipped) == [0.5, -0.5, -0.5, 0.0]


def test_the_token_kl_counts_for_samples_and_not_for_the_greedy_response():
    config = replace(REMAX, add_token_level_kl=True, kl_penalty="k1")
    penalty = {"log_probs": torch.zeros(4, 4), "ref_log_probs": torch.full((4, 4), -1.0), "kl_coef": 0.1}
    result = compute_advantages(SCORES, GROUPS, MASK, config, greedy=GREEDY, **penalty)
    assert per_sample(result) == pytest.approx([0.5 - 0.2, -0.5 - 0.3, -1.0 - 0.1, 3.0 - 0.2])


def test_remax_without_greedy_responses_is_refused():
    with pytest.raises(
        ValueError, match="remax needs the score of a greedy response to each prompt.*use grpo, rloo or"
    ):
        compute_advantages(SCORES, GROUPS, MASK, REMAX)


def test_greedy_responses_are_read_from_a_batch_that_has_them():
    assert read_greedy({"scores": SCORES}) is None
    assert read_greedy({"scores": SCORES, **vars(GREEDY)}) == GREEDY


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_equal_scores_of_single_responses_have_no_advantage(name):
    scores, config = torch.ones(4), replace(GRPO, adv_estimator=name)
    turns = single_turns(scores, MASK)
    flat = compute_advantages(scores, torch.arange(4), MASK, config, turns=turns, **GIVEN)
    assert torch.isfinite(flat.advantages).all()
    without_baseline = ADV_ESTIMATORS[name].needs in ("values", "baselines", "teacher_kl")
    assert name == "reinforce" or without_baseline or (flat.advantages == 0).all()


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
@pytest.mark.parametrize("whiten", [False, True])
def test_no_estimator_depends_on_order_or_padding(name, whiten):
    order, config = torch.tensor([3, 0, 2, 1]), replace(GRPO, adv_estimator=name, whiten_advantages=whiten)
    scores, mask = SCORES[order], torch.nn.functional.pad(MASK[order], (0, 3))
    values, turns = torch.nn.functional.pad(VALUES[order], (0, 3), value=9.0), single_turns(scores, mask)
    greedy = GreedyResponses(*(tensor[order] for tensor in vars(GREEDY).values()))
    tables = {"log_probs": POLICY, "ref_log_probs": TEACHER, "sum_pi_squared": SQUARES}
    given = {name: torch.nn.functional.pad(each[order], (0, 3), value=-9.0) for name, each in tables.items()}
    given |= {"values": values, "greedy": greedy, "reward_parts": PARTS[order]}
    moved = compute_advantages(scores, GROUPS[order], mask, config, turns=turns, **given)
    plain = compute_advantages(SCORES, GROUPS, MASK, config, turns=single_turns(SCORES, MASK), **GIVEN)
    torch.testing.assert_close(moved.advantages[:, :4], plain.advantages[order])


@pytest.mark.parametrize("name", RESPONSE_ESTIMATORS)
def test_single_turns_have_the_same_advantages_as_responses_without_turns(name):
    config = replace(GRPO, adv_estimator=name)
    turns = compute_advantages(SCORES, GROUPS, MASK, config, turns=single_turns(SCORES, MASK), **GIVEN)
    assert turns.metrics == estimate(name).metrics
    assert torch.equal(turns.advantages, estimate(name).advantages)


@pytest.mark.parametrize("name", [name for name in ADV_ESTIMATORS if name != "opd"])
def test_token_kl_changes_the_advantages_of_every_estimator(name):
    config = replace(GRPO, adv_estimator=name, add_token_level_kl=True, kl_penalty="k1", pass_k=2)
    log_probs, ref = torch.zeros(4, 4), -torch.arange(16.0).reshape(4, 4) / 16
    groups, turns = torch.zeros(4, dtype=torch.int64), single_turns(SCORES, MASK)
    given = {"turns": turns, "values": VALUES, "greedy": GREEDY, "reward_parts": PARTS}
    given |= {"log_probs": log_probs, "sum_pi_squared": SQUARES + 1}
    moved = compute_advantages(SCORES, groups, MASK, config, **given, ref_log_probs=ref, kl_coef=0.5)
    plain = compute_advantages(SCORES, groups, MASK, replace(GRPO, adv_estimator=name, pass_k=2), **given)
    assert not torch.allclose(moved.advantages, plain.advantages)


def test_token_kl_is_subtracted_from_the_reward_of_every_token():
    log_probs, ref = torch.zeros(4, 4), torch.full((4, 4), -0.5)
    config = replace(REINFORCE, gamma=1.0, add_token_level_kl=True, kl_penalty="k1")
    result = compute_advantages(SCORES, GROUPS, MASK, config, log_probs=log_probs, ref_log_probs=ref, kl_coef=0.2)
    assert result.advantages[1].tolist() == pytest.approx([0, -0.3, -0.2, -0.1])
    assert result.metrics["advantage/token_kl"] == pytest.approx(0.5)


def test_grpo_uses_the_sum_of_rewards_with_token_kl():
    config = replace(GRPO, add_token_level_kl=True, kl_penalty="k1", grpo_norm_by_std=False)
    zeros, ref = torch.zeros(4, 4), torch.full((4, 4), -1.0)
    result = compute_advantages(SCORES, GROUPS, MASK, config, log_probs=zeros, ref_log_probs=ref, kl_coef=0.1)
    assert per_sample(result) == pytest.approx([0.55, -0.55, -1.95, 1.95])
    with pytest.raises(ValueError, match="add_token_level_kl: true needs the log-probs"):
        compute_advantages(SCORES, GROUPS, MASK, config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reward_clip", 1.5),
        ("advantage_clip", 0.5),
        ("whiten_rewards", True),
        ("whiten_advantages", True),
        ("gamma", 1.0),
    ],
)
def test_every_key_changes_the_advantages(key, value):
    before = compute_advantages(SCORES, GROUPS, MASK, REINFORCE).advantages
    after = compute_advantages(SCORES, GROUPS, MASK, replace(REINFORCE, **{key: value})).advantages
    assert not torch.allclose(before, after)
    assert (after[MASK == 0] == 0).all()


def test_whitened_advantages_have_zero_mean_over_the_tokens_of_the_batch():
    result = compute_advantages(SCORES, GROUPS, MASK, replace(REINFORCE, whiten_advantages=True))
    assert result.metrics["advantage/mean"] == pytest.approx(0.0, abs=1e-6)


def test_a_score_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match=r"samples \[1\] are not finite"):
        compute_advantages(torch.tensor([1.0, float("nan"), 0.0, 0.0]), GROUPS, MASK, GRPO)


def test_rewards_sit_on_the_last_response_token_and_gaps_are_not_discounted():
    mask = torch.tensor([[1, 0, 1, 0]])
    rewards = token_rewards(torch.tensor([4.0]), torch.zeros(1, 4), mask)
    assert rewards.tolist() == [[0, 0, 4, 0]]
    assert return_to_go(rewards, mask, 0.5).tolist() == [[2, 0, 4, 0]]
    assert return_to_go(rewards, mask, 1.0).tolist() == [[4, 0, 4, 0]]


def test_long_responses_lose_a_rising_part_of_their_score():
    config = replace(GRPO, response_length=10, overlong_buffer_len=4, overlong_penalty_factor=2.0)
    lengths = torch.tensor([0, 5, 6, 7, 8, 10, 12])
    assert overlong_penalty(lengths, config).tolist() == pytest.approx([0, 0, 0, 0.5, 1.0, 2.0, 2.0])
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[0, :6], mask[1, :8] = True, True
    plain = replace(config, adv_estimator="reinforce")
    result = compute_advantages(torch.tensor([1.0, 1.0]), torch.tensor([0, 0]), mask, plain)
    assert result.advantages[:, 0].tolist() == [1.0, 0.0]
    assert result.metrics["advantage/overlong_penalty"] == 0.5
    assert "advantage/overlong_penalty" not in compute_advantages(SCORES, GROUPS, MASK, GRPO).metrics


def test_turns_of_agents_have_no_overlong_penalty():
    agents = AgenticConfig(response_length=10, overlong_buffer_len=4)
    assert agents.advantages.overlong_buffer_len is None
    responses = RLVRConfig(response_length=10, overlong_buffer_len=4).advantages
    assert (responses.response_length, responses.overlong_buffer_len) == (10, 4)


def test_the_score_of_a_response_without_a_token_counts_in_its_group():
    mask = MASK.clone()
    mask[0] = 0
    result = compute_advantages(SCORES, GROUPS, mask, replace(GRPO, grpo_norm_by_std=False))
    assert result.advantages[0].abs().sum() == 0 and per_sample(result)[1] == -0.5


def test_a_batch_without_a_column_is_refused():
    with pytest.raises(ValueError, match=r"response_mask of shape \[4, 0\] has no token; nothing was generated"):
        compute_advantages(SCORES, GROUPS, MASK[:, :0], GRPO)


def test_a_sample_without_response_tokens_has_no_reward():
    assert token_rewards(torch.tensor([4.0]), torch.zeros(1, 3), torch.zeros(1, 3)).abs().sum() == 0


def test_settings_come_from_the_configuration():
    assert RLVRConfig(gamma=0.9, reward_clip=2.0).advantages == AdvantageSettings(gamma=0.9, reward_clip=2.0)


def learned(scores, groups, trajectories, truncated, **options):
    tensors = (torch.tensor(scores), torch.tensor(groups), torch.tensor(trajectories), torch.tensor(truncated))
    return learned_samples(*tensors, SampleMaskOptions(**options)).tolist()


def test_responses_cut_at_their_length_are_left_out():
    cut = [True, False, False, True]
    assert learned([1.0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 2, 3], cut, max_len_mask=True) == [False, True, True, False]
    assert learned([1.0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 2, 3], cut) == [True] * 4


def test_groups_outside_the_thresholds_of_difficulty_are_left_out():
    scores, groups = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1, 2, 2]
    options = {"difficulty_mask": True, "difficulty_low_threshold": 0.1, "difficulty_high_threshold": 0.95}
    assert learned(scores, groups, range(6), [False] * 6, **options) == [False, False, True, True, False, False]
    at_a_threshold = options | {"difficulty_high_threshold": 0.5}
    assert learned(scores, groups, range(6), [False] * 6, **at_a_threshold) == [False] * 6


def test_the_samples_of_one_trajectory_count_once_in_the_difficulty_of_their_group():
    options = {"difficulty_mask": True, "difficulty_low_threshold": 0.3}
    assert learned([0.0, 0.0, 0.0, 1.0], [0] * 4, [0, 0, 0, 1], [False] * 4, **options) == [True] * 4


def test_a_sample_left_out_counts_in_the_group_but_not_in_whitening():
    keep = torch.tensor([True, False, True, True])
    result = compute_advantages(SCORES, GROUPS, MASK, GRPO, learned=keep)
    assert per_sample(result) == pytest.approx([2**-0.5, 0, -(2**-0.5), 2**-0.5], abs=1e-5)
    whitened = compute_advantages(SCORES, GROUPS, MASK, replace(GRPO, whiten_advantages=True), learned=keep)
    kept = whitened.advantages[(MASK == 1) & keep[:, None]]
    assert float(kept.mean()) == pytest.approx(0, abs=1e-5)
    assert (whitened.advantages[1] == 0).all()


def test_a_teacher_alone_rates_every_token_whatever_the_scores_are():
    result = estimate("opd", opd_kl_coef=0.5)
    expected = -0.5 * (POLICY - TEACHER) * MASK
    torch.testing.assert_close(result.advantages, expected)
    other = compute_advantages(-SCORES, GROUPS, MASK, replace(GRPO, adv_estimator="opd", opd_kl_coef=0.5), **GIVEN)
    assert torch.equal(other.advantages, result.advantages)
    mean = float((POLICY - TEACHER)[MASK.bool()].mean())
    assert result.metrics["advantage/teacher_kl"] == pytest.approx(mean)


@pytest.mark.parametrize("whiten", [False, True])
def test_a_teacher_beside_scores_is_subtracted_before_advantages_are_whitened(whiten):
    result = estimate("grpo", use_opd=True, opd_kl_coef=0.25, whiten_advantages=whiten)
    expected = estimate("grpo").advantages - 0.25 * (POLICY - TEACHER) * MASK
    if whiten:
        tokens = expected[MASK.bool()]
        expected = (expected - tokens.mean()) / (tokens.std() + 1e-6) * MASK
    torch.testing.assert_close(result.advantages, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(result.returns, estimate("grpo").returns)


@pytest.mark.parametrize("settings", [{"adv_estimator": "opd"}, {"use_opd": True}])
@pytest.mark.parametrize("lacking", ["log_probs", "ref_log_probs"])
def test_a_teacher_without_log_probs_is_an_error(settings, lacking):
    with pytest.raises(ValueError, match="needs its log-probs and those of the policy"):
        compute_advantages(SCORES, GROUPS, MASK, replace(GRPO, **settings), **GIVEN | {lacking: None})


def test_the_gradient_of_a_teacher_is_that_of_the_kl_divergence_to_it():
    """Over all tokens of a vocabulary, each weighted by its probability, at a policy of one token."""
    logits, teacher = torch.tensor([0.3, -1.0, 2.0], requires_grad=True), torch.tensor([0.5, 0.2, 0.3]).log()
    log_probs = logits.log_softmax(-1)
    divergence = (log_probs.exp() * (log_probs - teacher)).sum()
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    config, column = replace(GRPO, adv_estimator="opd"), torch.ones(3, 1)
    given = {"log_probs": log_probs.detach()[:, None], "ref_log_probs": teacher[:, None]}
    advantages = compute_advantages(torch.zeros(3), torch.arange(3), column, config, **given).advantages[:, 0]
    loss = -(log_probs.exp().detach() * advantages * log_probs).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], exact)
