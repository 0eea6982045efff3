"""Length penalties, normalisation and weights in closed form; neither padding nor the order of samples changes them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
import torch

from roll.algorithms.advantages import AdvantageSettings, GreedyResponses, compute_advantages
from roll.algorithms.shaping import (
    RunStatistics,
    ScoreStatistics,
    length_reward,
    sample_weights,
)
from roll.algorithms.turns import episodes_of
from roll.configs.agentic import AgenticConfig
from roll.configs.pipeline import RLVRConfig
from tests.algorithms.trajectories import single_turns

PLAIN = AdvantageSettings(adv_estimator="reinforce")
"""Advantages are the shaped scores."""


def responses(*lengths: int, columns: int = 12) -> torch.Tensor:
    """A response mask [B, columns] with these numbers of tokens, after one of the prompt."""
    position = torch.arange(columns)
    return torch.stack([(position >= 1) & (position <= length) for length in lengths])


def shaped(scores, groups, mask, config=PLAIN, **more):
    """The score of each sample after shaping, and the metrics."""
    result = compute_advantages(torch.tensor(scores), torch.tensor(groups), mask, config, **more)
    return result.advantages[:, 1].tolist(), result.metrics


def test_every_token_costs_the_same():
    config = replace(PLAIN, length_penalty_per_token=0.01)
    scores, metrics = shaped([1.0, 0.0, 1.0], [0, 0, 1], responses(2, 10, 5), config)
    assert scores == pytest.approx([0.98, -0.1, 0.95])
    assert metrics["advantage/length_penalty"] == pytest.approx(0.17 / 3)


def test_the_shortest_correct_response_gains_most_and_wrong_ones_gain_nothing():
    lengths, groups = torch.tensor([10, 20, 30, 10, 20, 30]), torch.zeros(6, dtype=torch.int64)
    correct = torch.tensor([True, True, True, False, False, False])
    assert length_reward(lengths, correct, groups).tolist() == [0.5, 0.0, -0.5, 0.0, 0.0, -0.5]


def test_lengths_are_compared_within_a_prompt():
    lengths, groups = torch.tensor([10, 1000, 20, 3000]), torch.tensor([0, 1, 0, 1])
    assert length_reward(lengths, torch.ones(4, dtype=torch.bool), groups).tolist() == [0.5, 0.5, -0.5, -0.5]


@pytest.mark.parametrize("lengths", [[7], [7, 7, 7], [0, 0]])
def test_equal_lengths_have_no_length_reward(lengths):
    count = len(lengths)
    reward = length_reward(torch.tensor(lengths), torch.ones(count).bool(), torch.zeros(count).long())
    assert reward.tolist() == [0.0] * count


def test_the_length_reward_is_added_to_the_score_with_its_weight():
    config = replace(PLAIN, length_reward_coef=0.2)
    scores, metrics = shaped([1.0, 1.0, 0.0, 0.0], [0, 0, 0, 0], responses(2, 10, 2, 6), config)
    assert scores == pytest.approx([1.1, 0.9, 0.0, 0.0])
    assert metrics["advantage/length_reward"] == pytest.approx(0.0, abs=1e-7)


def test_a_response_is_correct_above_the_threshold():
    config = replace(PLAIN, length_reward_coef=1.0, length_reward_threshold=0.5)
    scores, _ = shaped([0.5, 0.6, 0.0], [0, 0, 0], responses(2, 2, 10), config)
    assert scores == pytest.approx([0.5, 1.1, -0.5])


def test_length_penalties_add_up_and_come_before_the_clip_of_scores():
    config = replace(PLAIN, response_length=10, overlong_buffer_len=4, length_penalty_per_token=0.1, reward_clip=0.9)
    scores, metrics = shaped([1.0, 1.0], [0, 0], responses(8, 2), config)
    assert scores == pytest.approx([1 - 0.5 - 0.8, 0.8])
    assert metrics["advantage/overlong_penalty"] == pytest.approx(0.25)
    both = replace(config, length_reward_coef=1.0)
    assert shaped([1.0, 1.0], [0, 0], responses(8, 2), both)[0] == pytest.approx([-0.8, 0.9])


def test_a_greedy_response_pays_for_its_own_tokens():
    config = AdvantageSettings(adv_estimator="remax", length_penalty_per_token=0.1)
    greedy = GreedyResponses(torch.tensor([1.0]), torch.tensor([4]))
    assert shaped([1.0], [0], responses(2), config, greedy=greedy)[0] == pytest.approx([0.8 - 0.6])


def test_gdpo_subtracts_length_penalties_in_their_own_unit():
    config = AdvantageSettings(adv_estimator="gdpo", reward_weights=(1.0,), length_penalty_per_token=0.5)
    parts = torch.tensor([[1.0], [1.0]])
    longer, shorter = shaped([1.0, 1.0], [0, 0], responses(4, 2), config, reward_parts=parts)[0]
    assert (longer, shorter) == pytest.approx((-(2**-0.5), 2**-0.5), abs=1e-4)


def test_turns_of_agents_have_no_length_penalty():
    keys = {"length_penalty_per_token": 0.1, "length_reward_coef": 0.5}
    agents, responses_of = (cls(**keys).advantages for cls in (AgenticConfig, RLVRConfig))
    assert (agents.length_penalty_per_token, agents.length_reward_coef) == (0.0, 0.0)
    assert (responses_of.length_penalty_per_token, responses_of.length_reward_coef) == (0.1, 0.5)


WEIGHTED = replace(PLAIN, difficulty_loss_weight=True)


def weights_of(scores, groups, learned=None, config=WEIGHTED):
    mask = responses(*[3] * len(scores))
    kept = None if learned is None else torch.tensor(learned)
    tensors = torch.tensor(scores), torch.tensor(groups), mask.sum(-1), kept, episodes_of(mask, None)
    return sample_weights(*tensors, config)


def test_the_weight_of_a_prompt_falls_evenly_with_its_mean_score():
    weights, metrics = weights_of([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1, 2, 2])
    assert weights.tolist() == pytest.approx([0.4, 0.4, 1.0, 1.0, 1.6, 1.6])
    assert metrics["advantage/difficulty"] == pytest.approx(0.5)
    assert metrics["advantage/difficulty_weight_min"] == pytest.approx(0.4)
    assert metrics["advantage/difficulty_weight_max"] == pytest.approx(1.6)


def test_mean_scores_beyond_0_and_1_are_cut():
    weights, _ = weights_of([5.0, -3.0], [0, 1])
    assert weights.tolist() == pytest.approx([0.4, 1.6])


def test_the_weights_of_samples_that_stay_in_the_loss_have_mean_1():
    weights, _ = weights_of([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], [True, False, True, True])
    assert float(weights[[0, 2, 3]].mean()) == pytest.approx(1.0)
    assert weights.tolist() == pytest.approx([1 / 3, 1 / 3, 4 / 3, 4 / 3])


@pytest.mark.parametrize("learned", [None, [False, False]])
def test_a_batch_without_a_weight_is_not_learned_from(learned):
    config = replace(WEIGHTED, difficulty_weight_easy=0.0)
    assert weights_of([1.0, 1.0], [0, 0], learned, config)[0].tolist() == [0.0, 0.0]


def test_advantages_are_weighted_after_they_are_whitened_and_before_they_are_clipped():
    scores, groups, mask = [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0], [0] * 4 + [1] * 4, responses(*[3] * 8)
    config = AdvantageSettings(adv_estimator="grpo", whiten_advantages=True)
    plain, _ = shaped(scores, groups, mask, config)
    weights, _ = weights_of(scores, groups)
    weighted, metrics = shaped(scores, groups, mask, replace(config, difficulty_loss_weight=True))
    assert weighted == pytest.approx([a * w for a, w in zip(plain, weights.tolist(), strict=True)])
    assert metrics["advantage/difficulty"] == pytest.approx(0.375)
    clipped, _ = shaped(scores, groups, mask, replace(config, difficulty_loss_weight=True, advantage_clip=0.5))
    assert clipped == pytest.approx([min(max(a, -0.5), 0.5) for a in weighted])


def test_the_difficulty_is_that_of_raw_scores():
    shorter = replace(WEIGHTED, length_penalty_per_token=0.1, reward_clip=0.5)
    assert shaped([1.0, 0.0], [0, 1], responses(3, 3), shorter)[0] == pytest.approx([0.5 * 0.4, -0.3 * 1.6])


def test_a_trajectory_counts_once_in_the_difficulty_whatever_its_turns_are():
    """The first trajectory is split into two samples."""
    mask, scores = responses(3, 3, 3), torch.tensor([1.0, 1.0, 0.0])
    turns = replace(single_turns(scores, mask), trajectory_ids=torch.tensor([0, 0, 1]))
    groups = torch.tensor([0, 0, 1])
    weights, metrics = sample_weights(scores, groups, mask.sum(-1), None, episodes_of(mask, turns), WEIGHTED)
    assert weights.tolist() == pytest.approx([0.4, 0.4, 1.6])
    assert metrics["advantage/difficulty"] == 0.5


def test_returns_have_no_weight():
    tensors = torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), responses(3, 3)
    weighted, plain = (compute_advantages(*tensors, config) for config in (WEIGHTED, PLAIN))
    assert torch.equal(weighted.returns, plain.returns)


BY_LENGTH = replace(PLAIN, length_loss_weight=True)


def weights_by_length(lengths, learned=None, config=BY_LENGTH):
    kept = None if learned is None else torch.tensor(learned)
    episodes = episodes_of(responses(*lengths), None)
    none = torch.zeros(len(lengths))
    weights, metrics = sample_weights(none, none.long(), torch.tensor(lengths), kept, episodes, config)
    return weights.tolist(), metrics


def test_the_weight_of_a_response_falls_evenly_with_its_length():
    weights, metrics = weights_by_length([2, 10, 6, 2])
    assert weights == pytest.approx([each / 1.125 for each in (1.5, 0.5, 1.0, 1.5)])
    assert metrics["advantage/length_weight_min"] == pytest.approx(0.5 / 1.125)
    assert metrics["advantage/length_weight_max"] == pytest.approx(1.5 / 1.125)


def test_long_responses_may_have_the_larger_weight():
    config = replace(BY_LENGTH, length_weight_short=0.0, length_weight_long=3.0)
    assert weights_by_length([2, 6, 10], config=config)[0] == pytest.approx([0.0, 1.0, 2.0])


@pytest.mark.parametrize(("short", "long"), [(1.5, 0.5), (0.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("lengths", [[4], [4, 4, 4]])
def test_responses_of_one_length_have_weight_1(short, long, lengths):
    config = replace(BY_LENGTH, length_weight_short=short, length_weight_long=long)
    assert weights_by_length(lengths, config=config)[0] == [1.0] * len(lengths)


def test_lengths_are_compared_among_the_samples_that_stay_in_the_loss_and_their_weights_have_mean_1():
    weights, _ = weights_by_length([2, 4, 6, 12], [True, True, True, False])
    assert weights == pytest.approx([1.5, 1.0, 0.5, 0.5])
    assert weights_by_length([2, 4], [False, False])[0] == [0.0, 0.0]


def test_weights_by_difficulty_and_length_are_multiplied_and_have_mean_1():
    scores, groups, lengths = [1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], (2, 10, 2, 10)
    both = replace(BY_LENGTH, difficulty_loss_weight=True)
    mask, learned = responses(*lengths), torch.tensor([True, True, True, False])
    tensors = torch.tensor(scores), torch.tensor(groups), mask.sum(-1), learned, episodes_of(mask, None)
    weights, metrics = sample_weights(*tensors, both)
    products = [0.5 * 1.5, 0.5 * 0.5, 2.0 * 1.5, 2.0 * 0.5]
    mean = sum(products[:3]) / 3
    assert weights.tolist() == pytest.approx([product / mean for product in products])
    assert "advantage/difficulty_weight_min" in metrics and "advantage/length_weight_min" in metrics
    assert sample_weights(*tensors, PLAIN) == (None, {})


def test_weights_by_length_come_after_whitening_and_before_the_clip_and_returns_have_none():
    scores, groups, mask = [1.0, 0.0, 0.0, 1.0], [0, 0, 1, 1], responses(2, 10, 6, 6)
    config = AdvantageSettings(adv_estimator="grpo", whiten_advantages=True)
    weighted = replace(config, length_loss_weight=True)
    plain, _ = shaped(scores, groups, mask, config)
    expected = [a * w for a, w in zip(plain, (1.5, 0.5, 1.0, 1.0), strict=True)]
    assert shaped(scores, groups, mask, weighted)[0] == pytest.approx(expected)
    clipped = [min(max(each, -0.6), 0.6) for each in expected]
    assert shaped(scores, groups, mask, replace(weighted, advantage_clip=0.6))[0] == pytest.approx(clipped)
    tensors = torch.tensor(scores), torch.tensor(groups), mask
    assert torch.equal(compute_advantages(*tensors, config).returns, compute_advantages(*tensors, weighted).returns)


@pytest.mark.parametrize(
    ("keys", "metric"),
    [
        ({"length_penalty_per_token": 0.1}, "length_penalty"),
        ({"length_reward_coef": 0.5}, "length_reward"),
        ({"difficulty_loss_weight": True}, "difficulty"),
        ({"length_loss_weight": True}, "length_weight_max"),
    ],
)
def test_neither_padding_nor_the_order_of_samples_changes_a_shaped_score(keys, metric):
    config, scores, groups = replace(PLAIN, **keys), [1.0, 0.0, 1.0, 1.0, 0.5], [0, 0, 0, 1, 1]
    lengths, order = [2, 5, 9, 1, 4], [4, 1, 3, 0, 2]
    plain, metrics = shaped(scores, groups, responses(*lengths), config)
    moved = responses(*(lengths[i] for i in order), columns=20)
    other, _ = shaped([scores[i] for i in order], [groups[i] for i in order], moved, config)
    assert other == pytest.approx([plain[i] for i in order])
    mask = responses(*lengths, 0, 0)
    turns = single_turns(torch.tensor([*scores, 0.0, 0.0]), mask)
    padded, with_padding = shaped([*scores, 0.0, 0.0], [*groups, 2, 3], mask, config, turns=turns)
    assert padded == [*plain, 0.0, 0.0]
    assert with_padding[f"advantage/{metric}"] == metrics[f"advantage/{metric}"]


def test_trajectories_of_agents_have_no_weight_by_length():
    assert not AgenticConfig(length_loss_weight=True).advantages.length_loss_weight
    assert RLVRConfig(length_loss_weight=True).advantages.length_loss_weight


def normalised(mean, std, scores, groups, tags=None, statistics=None, names=None, **more):
    config = replace(PLAIN, norm_mean_type=mean, norm_std_type=std, **more)
    mask = responses(*[3] * len(scores))
    turns = single_turns(torch.tensor(scores), mask)
    if tags is not None:
        turns = replace(turns, tag_ids=torch.tensor(tags))
    tensors = torch.tensor(scores), torch.tensor(groups), mask
    return compute_advantages(*tensors, config, turns=turns, statistics=statistics, tag_names=names)


def values(result):
    return result.advantages[:, 1].tolist()


SCORES, GROUPS, TAGS = [1.0, 3.0, 10.0, 30.0, 20.0], [0, 0, 1, 1, 2], [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        ("tag", None, [-1.0, 1.0, -10.0, 10.0, 0.0]),
        ("tag", "tag", [-(2**-0.5), 2**-0.5, -1.0, 1.0, 0.0]),
        (None, "tag", [2**-0.5, 3 * 2**-0.5, 1.0, 3.0, 2.0]),
        ("group", "tag", [-(2**-0.5), 2**-0.5, -1.0, 1.0, 0.0]),
    ],
)
def test_scores_are_normalised_within_a_tag(mean, std, expected):
    assert values(normalised(mean, std, SCORES, GROUPS, TAGS)) == pytest.approx(expected, abs=1e-5)


def test_one_tag_is_the_batch():
    for mean, std in (("tag", "tag"), ("tag", None), (None, "tag")):
        batch = ("batch" if kind else None for kind in (mean, std))
        torch.testing.assert_close(
            normalised(mean, std, SCORES, GROUPS).advantages, normalised(*batch, SCORES, GROUPS).advantages
        )


def test_a_tag_with_equal_scores_has_no_advantage():
    assert values(normalised(None, "tag", [2.0, 2.0, 1.0, 3.0], [0, 0, 1, 1], [0, 0, 1, 1]))[:2] == [0.0, 0.0]


def test_scores_without_tags_cannot_be_normalised_by_tag():
    with pytest.raises(ValueError, match="need the tag of each sample"):
        shaped([1.0, 0.0], [0, 0], responses(3, 3), replace(PLAIN, norm_mean_type="tag"))


@pytest.mark.parametrize(("mean", "std"), [("running", "running"), ("running", None), (None, "running")])
@pytest.mark.parametrize("estimator", ["reinforce", "gae"])
def test_scores_are_normalised_by_all_scores_of_the_run_so_far(mean, std, estimator):
    seen, statistics = [], RunStatistics()
    for scores in ([1.0, 0.0, 5.0], [2.0, 2.0], [0.0, 7.0, 3.0, 1.0]):
        tensors = torch.tensor(scores), torch.zeros(len(scores)).long(), responses(*[3] * len(scores))
        config = replace(PLAIN, adv_estimator=estimator, lambd=1.0, norm_mean_type=mean, norm_std_type=std)
        result = compute_advantages(*tensors, config, statistics=statistics, values=torch.zeros(len(scores), 12))
        statistics = result.statistics
        seen += scores
        run = torch.tensor(seen, dtype=torch.float64)
        expected = (tensors[0] - (run.mean() if mean else 0)) / (run.std() + 1e-6 if std else 1)
        assert values(result) == pytest.approx(expected.tolist(), rel=1e-5)
        assert result.metrics["advantage/running_score_mean"] == pytest.approx(float(run.mean()))
        assert result.metrics["advantage/running_score_std"] == pytest.approx(float(run.std()))


@pytest.mark.parametrize("bounds", [(0, 1, 2, 1000), (0, 500, 500, 1000), (0, 999, 1000), tuple(range(0, 1001, 50))])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_statistics_do_not_depend_on_how_the_scores_are_split(bounds, offset):
    scores = torch.randn(1000, generator=torch.Generator().manual_seed(3)) + offset
    merged = ScoreStatistics()
    for start, end in pairwise(bounds):
        merged = merged.merged(ScoreStatistics.of(scores[start:end]))
    assert merged.count == 1000
    assert merged.mean == pytest.approx(float(scores.double().mean()), rel=1e-12, abs=1e-12)
    assert merged.std == pytest.approx(float(scores.double().std()), rel=1e-9)


def test_statistics_of_no_score_or_one_have_no_deviation():
    empty, one = ScoreStatistics.of(torch.zeros(0)), ScoreStatistics.of(torch.tensor([3.0]))
    assert (empty.std, one.std, empty.merged(empty), empty.merged(one), one.merged(empty)) == (0, 0, empty, one, one)
    assert ScoreStatistics(**asdict(one)) == one


@pytest.mark.parametrize(("mean", "std"), [("running", "running"), (None, "running"), ("running", None)])
def test_a_run_with_equal_scores_so_far_has_no_advantage(mean, std):
    assert values(normalised(mean, std, [0.1] * 3, [0, 0, 1])) == [0.0] * 3


def test_statistics_are_of_clipped_scores_and_mix_with_those_of_other_sets():
    result = normalised("group", "running", [1.0, 9.0, 0.0], [0, 0, 1], reward_clip=3.0)
    run = torch.tensor([1.0, 3.0, 0.0])
    assert result.statistics.all_tags == ScoreStatistics.of(run)
    expected = torch.tensor([-1.0, 1.0, 0.0]) / (run.std() + 1e-6)
    assert values(result) == pytest.approx(expected.tolist(), rel=1e-5)


def of_tags(result):
    """The numbers of the statistics of each tag over the run."""
    by_tag = result.statistics.by_tag
    return {f"{tag} {name}": value for tag, each in by_tag.items() for name, value in asdict(each).items()}


@pytest.mark.parametrize(
    ("mean", "std"), [("running_tag", "running_tag"), ("running_tag", None), (None, "running_tag")]
)
@pytest.mark.parametrize("estimator", ["reinforce", "gae"])
def test_scores_are_normalised_by_those_of_their_tag_in_the_run_so_far(mean, std, estimator):
    """Tags are numbered anew in each batch, `code` begins in the second one and is missing in the third."""
    seen, statistics = {"math": [], "code": []}, RunStatistics()
    batches = [
        ([1.0, 0.0, 5.0], ["math"] * 3),
        ([200.0, 2.0, 500.0], ["code", "math", "code"]),
        ([0.0, 7.0, 3.0, 1.0], ["math"] * 4),
        ([4.0, 300.0], ["math", "code"]),
    ]
    for scores, names in batches:
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        mask = responses(*[3] * len(scores))
        turns = replace(
            single_turns(torch.tensor(scores), mask), tag_ids=torch.tensor([numbers[name] for name in names])
        )
        config = replace(PLAIN, adv_estimator=estimator, lambd=1.0, norm_mean_type=mean, norm_std_type=std)
        tensors = torch.tensor(scores), torch.arange(len(scores)), mask
        more = {"values": torch.zeros(len(scores), 12), "turns": turns, "tag_names": names}
        result = compute_advantages(*tensors, config, statistics=statistics, **more)
        statistics = result.statistics
        for score, name in zip(scores, names, strict=True):
            seen[name].append(score)
        run = {name: torch.tensor(each, dtype=torch.float64) for name, each in seen.items() if each}
        expected = [
            (score - (float(run[name].mean()) if mean else 0)) / (float(run[name].std()) + 1e-6 if std else 1)
            for score, name in zip(scores, names, strict=True)
        ]
        assert values(result) == pytest.approx(expected, rel=1e-5, abs=1e-4)
        for name, each in run.items():
            assert result.metrics[f"advantage/running_score_mean/{name}"] == pytest.approx(float(each.mean()))
            assert result.metrics[f"advantage/running_score_std/{name}"] == pytest.approx(float(each.std()))
        assert result.statistics.by_tag.keys() == run.keys() and result.statistics.all_tags == ScoreStatistics()


def test_one_tag_over_the_run_is_all_of_the_run_and_the_two_sets_mix():
    names, before = ["math"] * 5, ScoreStatistics(4, 2.0, 8.0)
    known = RunStatistics(before, {"math": before})
    both = [
        normalised(*types, SCORES, GROUPS, [0] * 5, known, names)
        for types in (("running",) * 2, ("running_tag",) * 2, ("running", "running_tag"), ("running_tag", "running"))
    ]
    for result in both[1:]:
        assert values(result) == values(both[0])
    assert both[2].statistics.all_tags == both[2].statistics.by_tag["math"] == both[0].statistics.all_tags


@pytest.mark.parametrize(("mean", "std"), [("running_tag", None), (None, "running_tag")])
def test_a_tag_with_equal_scores_in_the_run_has_no_advantage(mean, std):
    result = normalised(mean, std, [2.0, 2.0, 1.0, 3.0], GROUPS[:4], TAGS[:4], names=["a", "a", "b", "b"])
    assert values(result)[:2] == [0.0, 0.0] and values(result)[2] != values(result)[3]


@pytest.mark.parametrize(("kind", "read"), [("running", "all_tags"), ("running_tag", "by_tag")])
def test_statistics_that_a_run_does_not_read_are_not_kept_for_a_later_one(kind, read):
    before = ScoreStatistics(4, 2.0, 8.0)
    known = RunStatistics(before, {"math": before})
    found = normalised(kind, kind, SCORES, GROUPS, [0] * 5, known, ["math"] * 5).statistics
    assert {name for name in ("all_tags", "by_tag") if getattr(found, name) != getattr(RunStatistics(), name)} == {read}


def test_scores_of_a_run_cannot_be_normalised_by_tags_without_names():
    with pytest.raises(ValueError, match="need the tag of each sample"):
        normalised("running_tag", None, SCORES, GROUPS, TAGS)


def test_statistics_of_tags_are_restored_and_those_of_an_older_checkpoint_begin_anew():
    one = ScoreStatistics.of(torch.tensor([1.0, 2.0, 4.0]))
    known = RunStatistics(one, {"math": one, "code": ScoreStatistics(2, 0.5, 0.5)})
    assert RunStatistics.from_state(json.loads(json.dumps(known.state_dict()))) == known
    assert RunStatistics.from_state({"score_statistics": asdict(one)}) == RunStatistics(one)
    assert RunStatistics.from_state({}) == RunStatistics()


@pytest.mark.parametrize(("mean", "std"), [("running", "running"), ("tag", "tag"), ("running_tag", "running_tag")])
def test_neither_padding_nor_the_order_of_samples_changes_a_normalised_score(mean, std):
    statistics, names = ScoreStatistics(4, 2.0, 8.0), [f"tag {number}" for number in TAGS]
    before = RunStatistics(statistics, {"tag 1": statistics, "another": statistics})
    plain = normalised(mean, std, SCORES, GROUPS, TAGS, before, names)
    order = [4, 1, 3, 0, 2]
    moved = normalised(
        mean, std, *([each[i] for i in order] for each in (SCORES, GROUPS, TAGS)), before, [names[i] for i in order]
    )
    assert values(moved) == pytest.approx([values(plain)[i] for i in order])
    assert asdict(moved.statistics.all_tags) == pytest.approx(asdict(plain.statistics.all_tags))
    assert of_tags(moved) == pytest.approx(of_tags(plain))
    mask = responses(*[3] * 5, 0, 0)
    scores = torch.tensor([*SCORES, 99.0, 99.0])
    turns = replace(single_turns(scores, mask), tag_ids=torch.tensor([*TAGS, 2, 2]))
    config = replace(PLAIN, norm_mean_type=mean, norm_std_type=std)
    groups = torch.tensor([*GROUPS, 3, 4])
    names = [*names, "", ""]
    padded = compute_advantages(scores, groups, mask, config, turns=turns, statistics=before, tag_names=names)
    assert values(padded)[:5] == values(plain) and padded.statistics == plain.statistics


def test_statistics_count_a_trajectory_once():
    """The first trajectory is split into two samples."""
    mask, scores = responses(3, 3, 3), torch.tensor([1.0, 1.0, 4.0])
    turns = replace(single_turns(scores, mask), trajectory_ids=torch.tensor([0, 0, 1]))
    config = replace(PLAIN, norm_mean_type="running")
    result = compute_advantages(scores, torch.tensor([0, 0, 1]), mask, config, turns=turns)
    assert result.statistics.all_tags == ScoreStatistics.of(torch.tensor([1.0, 4.0]))
    assert values(result) == [-1.5, -1.5, 1.5]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "remax", "reinforce_plus_plus"])
def test_estimators_with_their_own_normalisation_read_no_other(estimator):
    config = AdvantageSettings(adv_estimator=estimator)
    greedy = GreedyResponses(torch.tensor([0.5, 0.5, 0.5]), torch.tensor([1, 1, 1]))
    tensors = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 0]), responses(3, 3, 3)
    plain, other = (
        compute_advantages(*tensors, each, greedy=greedy)
        for each in (config, replace(config, norm_mean_type="running", norm_std_type="tag"))
    )
    assert torch.equal(plain.advantages, other.advantages) and other.statistics == RunStatistics()
