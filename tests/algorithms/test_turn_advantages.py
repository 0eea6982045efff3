"""Turns of trajectories, and the advantage estimators that use them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.advantages import AdvantageSettings, GreedyResponses
from roll.algorithms.estimators import ADV_ESTIMATORS
from roll.algorithms.estimators.turn_returns import RewardNormalization
from roll.algorithms.turns import TURN_KEYS, episodes_of, read_turns
from tests.algorithms.trajectories import TURN_ESTIMATORS, Trajectory, make_batch

TWO = [Trajectory(0, [1.0, 2.0], [0, 1]), Trajectory(0, [0.0], [0])]


def test_turns_are_read_if_the_batch_has_them():
    tensors = make_batch(TWO).tensors
    turns = read_turns(tensors)
    assert turns is not None and all(getattr(turns, key) is tensors[key] for key in TURN_KEYS)
    assert read_turns({"response_mask": tensors["response_mask"]}) is None


def test_an_error_names_the_missing_tensors_of_turns():
    tensors = make_batch(TWO).tensors
    del tensors["state_ids"], tensors["tag_ids"]
    with pytest.raises(ValueError, match="turn_index but not state_ids, tag_ids"):
        read_turns(tensors)


def test_a_trajectory_of_several_samples_is_one_episode():
    batch = make_batch(TWO, steps=True, padding=1)
    episodes = episodes_of(batch.tensors["response_mask"], read_turns(batch.tensors))
    assert episodes.of_row.tolist() == [0, 0, 1, -1]
    assert episodes.per_episode(batch.tensors["scores"]).tolist() == [3.0, 0.0]
    assert episodes.sum_samples(torch.tensor([1.0, 2.0, 4.0, 8.0])).tolist() == [3.0, 4.0]
    assert episodes.to_samples(torch.tensor([5.0, 6.0])).tolist() == [5.0, 5.0, 6.0, 0.0]


def test_without_turns_every_sample_is_an_episode():
    episodes = episodes_of(torch.tensor([[1, 0], [0, 0]]), None)
    assert episodes.rows.tolist() == episodes.of_row.tolist() == [0, 1]


INCONSISTENT = {
    "turn_index": (2, "samples \\[1\\] have response tokens of no turn"),
    "turn_count": (9, "samples \\[1\\] have more turns than the 1 of turn_rewards"),
    "turn_rewards": (float("nan"), "samples \\[1\\] have turn_rewards that are not finite"),
    "state_ids": (-1, "samples \\[1\\] have turns without a state"),
    "scores": (4.0, "samples \\[1\\] differ in scores from the first sample of their trajectory"),
    "group_ids": (7, "samples \\[1\\] differ in group_ids from the first sample of their trajectory"),
}


@pytest.mark.parametrize("key", INCONSISTENT)
def test_turns_that_are_inconsistent_with_the_batch_are_refused(key):
    batch = make_batch(TWO, steps=True)
    value, message = INCONSISTENT[key]
    row = batch.tensors[key][1]
    row[...] = torch.where(batch.tensors["response_mask"][1], value, row) if key == "turn_index" else value
    with pytest.raises(ValueError, match=message):
        batch.advantages(AdvantageSettings())


ROOT = 2**-0.5
"""Two different values normalize to this and its negative."""

PAIR = [
    Trajectory(group=0, rewards=[0.0, 1.0], states=[0, 1]),
    Trajectory(group=0, rewards=[0.0, 0.0], states=[0, 2]),
]


def settings_of(name, mean="group", std="group", grouping="traj_group_id", **more):
    norm = RewardNormalization(grouping, mean, std)
    return AdvantageSettings(adv_estimator=name, reward_normalization=norm, step_reward_gamma=0.5, **more)


def advantages(trajectories, config, **more):
    batch = make_batch(trajectories)
    return batch.per_turn(batch.advantages(config, **more).advantages)


def close(expected):
    return pytest.approx(expected, abs=1e-5)


def test_gigpo_adds_the_normalized_score_and_the_normalized_return():
    config = settings_of("gigpo", episode_reward_weight=3.0, step_reward_weight=2.0)
    episode, step = 3 * ROOT, 2 * ROOT
    expected = {(0, 0): episode + step, (0, 1): episode, (1, 0): -episode - step, (1, 1): -episode}
    assert advantages(PAIR, config) == close(expected)


def test_gigpo_compares_states_only_within_a_group():
    other = [replace(one, group=1, rewards=[reward + 5 for reward in one.rewards]) for one in PAIR]
    config = settings_of("gigpo")
    both = advantages([*PAIR, *other], config)
    assert {key: value for key, value in both.items() if key[0] < 2} == close(advantages(PAIR, config))


def test_gigpo_compares_two_turns_of_one_trajectory_from_the_same_state():
    repeated = [Trajectory(0, rewards=[0.0, 4.0], states=[7, 7]), Trajectory(0, rewards=[4.0], states=[8])]
    found = advantages(repeated, settings_of("gigpo"))
    assert found == close({(0, 0): -ROOT, (0, 1): ROOT, (1, 0): 0.0})


def test_step_reinforce_normalizes_the_discounted_returns_of_turns():
    returns = {(0, 0): 0.5, (0, 1): 1.0, (1, 0): 0.0, (1, 1): 0.0}
    assert advantages(PAIR, settings_of("step_reinforce", None, None)) == close(returns)
    mean, std = 0.375, torch.tensor(list(returns.values())).std().item()
    assert advantages(PAIR, settings_of("step_reinforce")) == close({k: (g - mean) / std for k, g in returns.items()})


def test_agentic_reinforce_is_the_return_to_go():
    found = advantages(
        [Trajectory(0, [1.0, 2.0, 4.0], [0, 1, 2])], settings_of("agentic_reinforce", None, None, gamma=0.5)
    )
    assert found == close({(0, 0): 3.0, (0, 1): 4.0, (0, 2): 4.0})


def test_agentic_reinforce_of_a_reward_at_the_end_discounts_the_normalized_score():
    found = advantages(PAIR, settings_of("agentic_reinforce", gamma=0.5))
    assert found == close({(0, 0): ROOT / 2, (0, 1): ROOT, (1, 0): -ROOT / 2, (1, 1): -ROOT})


def test_agentic_reinforce_uses_the_clipped_score():
    clipped = settings_of("agentic_reinforce", None, None, gamma=1.0, reward_clip=2.0)
    found = advantages([Trajectory(0, [1.0, 2.0, 4.0], [0, 1, 2])], clipped)
    assert found == close({(0, 0): 2.0, (0, 1): 1.0, (0, 2): -1.0})


def test_undiscounted_rewards_sum_to_the_normalized_score():
    many = [Trajectory(0, [1.0, 5.0], [0, 1]), Trajectory(0, [2.0, -1.0, 3.0], [0, 1, 2]), Trajectory(0, [0.5], [0])]
    scores = torch.tensor([6.0, 4.0, 0.5])
    found = advantages(many, settings_of("agentic_reinforce"))
    assert [found[number, 0] for number in range(3)] == close(((scores - scores.mean()) / scores.std()).tolist())


GROUPINGS = {
    "traj_group_id": {(0, 0): -0.5, (1, 0): 0.5, (2, 0): -2.0, (2, 1): 2.0},
    "traj_id": {(0, 0): 0.0, (1, 0): 0.0, (2, 0): -2.0, (2, 1): 2.0},
    "batch": {(0, 0): -1.5, (1, 0): -0.5, (2, 0): -1.0, (2, 1): 3.0},
}


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_turns_are_compared_within_their_group(grouping):
    many = [Trajectory(0, [1.0], [0]), Trajectory(0, [2.0], [0]), Trajectory(1, [-1.25, 5.5], [0, 0])]
    found = advantages(many, settings_of("step_reinforce", std=None, grouping=grouping))
    assert found == close(GROUPINGS[grouping])


def test_trajectories_are_compared_within_their_tag():
    many = [Trajectory(group, [float(group**2)], [0], tag=group % 2) for group in range(4)]
    found = advantages(many, settings_of("agentic_reinforce", std=None, grouping="tags"))
    assert found == close({(0, 0): -2.0, (1, 0): -4.0, (2, 0): 2.0, (3, 0): 4.0})


def test_the_mean_of_the_batch_can_be_combined_with_the_std_of_the_group():
    many = [Trajectory(group, [reward], [0]) for group, reward in ((0, 0.0), (0, 2.0), (1, 10.0), (1, 20.0))]
    found = advantages(many, settings_of("agentic_reinforce", mean="batch"))
    expected = [-8 / math.sqrt(2), -6 / math.sqrt(2), 2 / math.sqrt(50), 12 / math.sqrt(50)]
    assert found == close({(number, 0): value for number, value in enumerate(expected)})


@pytest.mark.parametrize("name", TURN_ESTIMATORS)
@pytest.mark.parametrize("difference", [0.0, 1e-7])
def test_almost_equal_or_single_values_have_no_advantage(name, difference):
    many = [
        Trajectory(0, [0.1], [0]),
        Trajectory(0, [0.1 + difference], [0]),
        Trajectory(1, [3.0], [0]),
    ]
    assert set(advantages(many, settings_of(name)).values()) == {0.0}


@pytest.mark.parametrize("name", TURN_ESTIMATORS)
def test_the_kl_of_a_turn_is_subtracted_from_its_reward(name):
    batch = make_batch([Trajectory(0, [0.0, 1.0], [0, 1], lengths=[1, 3])])
    log_probs = torch.zeros(batch.tensors["response_mask"].shape)
    config = replace(
        settings_of(name, None, None, gamma=0.5, episode_reward_weight=0.0), add_token_level_kl=True, kl_penalty="k1"
    )
    result = batch.advantages(config, log_probs=log_probs, ref_log_probs=log_probs - 1.0, kl_coef=0.1)
    last = 1.0 - 0.3
    assert batch.per_turn(result.advantages) == close({(0, 0): -0.1 + 0.5 * last, (0, 1): last})


KEYS = {
    "gigpo": {"episode_reward_weight": 0.5, "step_reward_weight": 0.5, "step_reward_gamma": 0.1},
    "step_reinforce": {"step_reward_gamma": 0.1},
    "agentic_reinforce": {"gamma": 0.1},
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in KEYS.items() for key in keys])
def test_every_key_changes_only_the_estimators_that_have_it(name, key):
    many = [Trajectory(0, [1.0, 2.0], [0, 1]), Trajectory(0, [0.0, 4.0, 1.0], [0, 1, 0]), Trajectory(0, [3.0], [0])]
    changed = {key: KEYS[name][key]}
    for other in TURN_ESTIMATORS:
        before, after = (
            advantages(many, config) for config in (settings_of(other), replace(settings_of(other), **changed))
        )
        assert (before != pytest.approx(after)) == (key in KEYS[other]), other


@pytest.mark.parametrize("name", TURN_ESTIMATORS)
def test_an_error_names_the_missing_turns(name):
    batch = make_batch(PAIR)
    del batch.tensors["turn_index"]
    with pytest.raises(ValueError, match=f"adv_estimator {name} needs the turns of trajectories .*use grpo"):
        batch.advantages(settings_of(name))


REWARDS = st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.0])


@st.composite
def trajectories(draw):
    many = []
    for _ in range(draw(st.integers(1, 5))):
        turns = draw(st.integers(1, 4))
        rewards, states, lengths = (
            draw(st.lists(values, min_size=turns, max_size=turns))
            for values in (REWARDS, st.integers(0, 2), st.integers(1, 3))
        )
        many.append(Trajectory(draw(st.integers(0, 1)), rewards, states, lengths, draw(st.integers(0, 1))))
    return many


TYPES = st.sampled_from(["batch", "group", None])
CONFIGS = st.builds(
    settings_of,
    st.sampled_from([name for name, each in ADV_ESTIMATORS.items() if each.needs in ("", "turns")]),
    TYPES,
    TYPES,
    st.sampled_from(["traj_group_id", "traj_id", "tags", "batch"]),
    norm_mean_type=TYPES,
    norm_std_type=TYPES,
    whiten_rewards=st.booleans(),
    whiten_advantages=st.booleans(),
)


@settings(deadline=None, max_examples=150)
@given(trajectories(), CONFIGS)
def test_step_sampling_gives_the_same_advantages_as_whole_trajectories(many, config):
    whole, steps = make_batch(many), make_batch(many, steps=True)
    one, each = whole.advantages(config), steps.advantages(config)
    assert each.metrics == pytest.approx(one.metrics, abs=1e-4)
    assert steps.per_turn(each.advantages) == pytest.approx(whole.per_turn(one.advantages), abs=1e-4)
    assert torch.isfinite(each.advantages).all() and torch.isfinite(each.returns).all()


@settings(deadline=None, max_examples=100)
@given(trajectories(), CONFIGS, st.booleans(), st.integers(1, 3))
def test_samples_without_response_tokens_are_ignored(many, config, steps, padding):
    plain, padded = make_batch(many, steps), make_batch(many, steps, padding)
    one, other = plain.advantages(config), padded.advantages(config)
    assert other.metrics == pytest.approx(one.metrics, abs=1e-5)
    torch.testing.assert_close(other.advantages[: len(plain.rows)], one.advantages)
    assert (other.advantages[len(plain.rows) :] == 0).all()


@settings(deadline=None, max_examples=60)
@given(trajectories(), CONFIGS, st.randoms())
def test_the_order_of_trajectories_does_not_matter(many, config, random):
    order = list(range(len(many)))
    random.shuffle(order)
    plain, moved = advantages(many, config), advantages([many[number] for number in order], config)
    assert {(order[number], turn): value for (number, turn), value in moved.items()} == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_a_batch_of_padding_has_zero_advantages(name):
    batch = make_batch([], padding=2)
    values = torch.ones(batch.tensors["response_mask"].shape)
    greedy = GreedyResponses(torch.zeros(2), torch.zeros(2))
    given = {"values": values, "greedy": greedy, "log_probs": values, "ref_log_probs": values}
    given["sum_pi_squared"] = values
    given["reward_parts"] = torch.zeros(2, 0)
    result = batch.advantages(settings_of(name, whiten_rewards=True), **given)
    assert (result.advantages == 0).all() and all(map(math.isfinite, result.metrics.values()))
