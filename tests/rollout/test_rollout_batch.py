"""From groups to tensors: which tokens are learned from, as part of which turn, and how a batch is padded."""

from __future__ import annotations

import pickle
from itertools import count, cycle, groupby

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.advantages import AdvantageSettings, compute_advantages
from roll.algorithms.estimators.turn_returns import RewardNormalization
from roll.algorithms.turns import check_turns, read_turns
from roll.datasets.batch import POLICY, ROUTING
from roll.rollout.rollout_batch import NO_TURN, batch_of_groups
from roll.rollout.types import NOT_SAMPLED, GenerateResult, Group, Trajectory


def trajectory(turns: list[tuple[str, int, float]], ids: count) -> Trajectory:
    """Turns of (observation, tokens, reward); no two tokens of `ids` are equal."""
    made = Trajectory()
    for number, (observation, tokens, reward) in enumerate(turns):
        made.add_context([next(ids) for _ in range(2 + number)])
        sampled = [next(ids) for _ in range(tokens)]
        result = GenerateResult("r", sampled, [-0.5 - n for n in range(tokens)], [number] * tokens, "stop")
        made.add_response(made.ids, result, observation, f"{tokens} tokens").reward = reward
    made.stop, made.outcome, made.metrics = "terminated", "the end", {"gold": 1.0}
    return made


@pytest.mark.parametrize("sample_by", ["traj", "step"])
def test_sampling_masks_are_in_the_columns_of_their_tokens(sample_by):
    """The mask of a token here is the token itself and the next id."""
    groups = groups_of(SCRIPT)
    for group in groups:
        for one in group.trajectories:
            sampled = zip(one.ids, one.versions, strict=True)
            one.sampling_mask = [[] if v == NOT_SAMPLED else [token, token + 1] for token, v in sampled]
    batch = batch_of_groups(groups, sample_by, multiple=3).batch
    sizes, mask = batch["sampling_mask_sizes"], batch["response_mask"]
    assert torch.equal((sizes == 2) & mask, mask)
    for row in range(len(mask)):
        ids = batch["sampling_mask"][row]
        kept = batch["input_ids"][row][sizes[row] > 0]
        assert ids[: 2 * len(kept)].tolist() == torch.stack([kept, kept + 1], 1).flatten().tolist()
        assert bool((ids[2 * len(kept) :] == -1).all())
    assert "sampling_mask" not in batch_of_groups(groups_of(SCRIPT), sample_by).batch.keys()


@pytest.mark.parametrize("sample_by", ["traj", "step"])
def test_a_row_has_the_experts_of_its_tokens_also_in_another_process(sample_by):
    """The expert of a token here is its id."""
    groups = groups_of(SCRIPT)
    for group in groups:
        for one in group.trajectories:
            one.routing = np.array(one.ids[:-1], np.int16).reshape(-1, 1, 1)
    batch = pickle.loads(pickle.dumps(batch_of_groups(groups, sample_by, multiple=3)))
    chosen = batch.select("input_ids", "response_mask", "attention_mask").with_column(ROUTING, batch)
    chosen = chosen.select_idxs(list(reversed(range(len(batch)))))
    for row, routing in enumerate(chosen.non_tensor_batch[ROUTING]):
        length = int(chosen.batch["attention_mask"][row].sum())
        padding = not chosen.batch["response_mask"][row].any()
        assert routing[:, 0, 0].tolist() == ([] if padding else chosen.batch["input_ids"][row, : length - 1].tolist())
    assert ROUTING not in batch_of_groups(groups_of(SCRIPT), sample_by)


def test_rows_of_each_policy_are_together_and_padded():
    policies = {"Room": "math", "Lake": "code"}
    batch = batch_of_groups(groups_of(SCRIPT), multiple=4, policies=policies)
    owners, tags = (batch.non_tensor_batch[name].tolist() for name in (POLICY, "tag"))
    assert [name for name, _ in groupby(owners)] == ["math", "code"]
    assert all(not tag or policies[tag] == owner for owner, tag in zip(owners, tags, strict=True))
    assert [owners.count(name) % 4 for name in policies.values()] == [0, 0]
    rows = batch_of_groups(groups_of(SCRIPT))
    assert sorted(tag for tag in tags if tag) == sorted(rows.non_tensor_batch["tag"])
    assert POLICY not in rows


def groups_of(script: list[list[list[tuple[str, int, float]]]]) -> list[Group]:
    ids = count(1)
    return [
        Group(10 + number, tag, number, f"{tag}-{10 + number}", [trajectory(one, ids) for one in members])
        for number, (tag, members) in enumerate(zip(cycle(("Room", "Lake")), script, strict=False))
    ]


turn = st.tuples(st.sampled_from(["ice", "hole", "goal"]), st.integers(1, 4), st.sampled_from([-0.5, 0.0, 0.25, 1.0]))
scripts = st.integers(1, 3).flatmap(
    lambda size: st.lists(
        st.lists(st.lists(turn, min_size=1, max_size=4), min_size=size, max_size=size), min_size=1, max_size=4
    )
)
SCRIPT = [
    [[("ice", 2, 0.0), ("hole", 1, 1.0)], [("ice", 3, 0.25)]],
    [[("ice", 1, 0.0), ("ice", 1, 0.5), ("goal", 2, 0.0)], [("goal", 1, 0.0), ("ice", 2, 0.0)]],
]


@settings(max_examples=60, deadline=None)
@given(scripts, st.sampled_from(["traj", "step"]), st.integers(1, 5))
def test_every_sampled_token_is_learned_from_once_as_part_of_its_turn(script, sample_by, multiple):
    groups = groups_of(script)
    batch = batch_of_groups(groups, sample_by, multiple).batch
    mask, index = batch["response_mask"], batch["turn_index"]
    assert len(mask) % multiple == 0
    trajectories = [one for group in groups for one in group.trajectories]
    sampled = [
        token for one in trajectories for token, v in zip(one.ids, one.versions, strict=True) if v != NOT_SAMPLED
    ]
    assert batch["input_ids"][mask].tolist() == sampled
    assert batch["behavior_log_probs"][mask].tolist() == [lp for one in trajectories for lp in one.log_probs if lp]
    assert batch["weight_version"][mask].tolist() == [v for one in trajectories for v in one.sampled_versions]
    assert torch.equal(index != NO_TURN, mask)
    assert bool((batch["behavior_log_probs"][~mask] == 0).all() and (batch["weight_version"][~mask] == -1).all())
    assert bool((mask <= batch["attention_mask"].bool()).all())
    assert batch["input_ids"].dtype == index.dtype == batch["state_ids"].dtype == torch.int64
    assert batch["turn_rewards"].dtype == batch["scores"].dtype == torch.float32
    rows = range(len(mask))
    by_turn = [batch["input_ids"][r][index[r] == k].tolist() for r in rows for k in range(int(index[r].max()) + 1)]
    assert by_turn == [one.ids[each.start : each.end] for one in trajectories for each in one.turns]
    rewards = [batch["turn_rewards"][r, : batch["turn_count"][r]].tolist() for r in rows]
    assert [reward for row in rewards for reward in row] == [each.reward for one in trajectories for each in one.turns]
    check_turns(read_turns(batch), batch["scores"], batch["group_ids"], mask)


@settings(max_examples=60, deadline=None)
@given(scripts, st.sampled_from(["traj", "step"]))
def test_state_ids_are_equal_for_turns_of_one_group_with_one_observation(script, sample_by):
    groups = groups_of(script)
    batch = batch_of_groups(groups, sample_by, 4).batch
    places = [(row, k) for row, many in enumerate(batch["turn_count"].tolist()) for k in range(many)]
    met = [
        (number, each.observation)
        for number, group in enumerate(groups)
        for one in group.trajectories
        for each in one.turns
    ]
    states = [int(batch["state_ids"][place]) for place in places]
    assert len(set(zip(met, states, strict=True))) == len(set(met)) == len(set(states)) and min(states) >= 0


def test_a_row_of_a_trajectory_is_all_of_it():
    batch = batch_of_groups(groups_of(SCRIPT), "traj").batch
    first = batch_of_groups(groups_of(SCRIPT), "traj", episodes=True).non_tensor_batch["episode"][0]
    assert batch["input_ids"][0].tolist()[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert batch["turn_index"][0].tolist()[:8] == [-1, -1, 0, 0, -1, -1, -1, 1]
    assert batch["turn_rewards"][0].tolist() == [0.0, 1.0, 0.0]
    assert batch["state_ids"][:2].tolist() == [[0, 1, NO_TURN], [0, NO_TURN, NO_TURN]]
    assert batch["turn_count"].tolist() == [2, 1, 3, 2]
    assert batch["scores"].tolist() == [1.0, 0.25, 0.5, 0.0]
    assert batch["group_ids"].tolist() == [0, 0, 1, 1]
    assert batch["trajectory_ids"].tolist() == [0, 1, 2, 3]
    assert batch["tag_ids"].tolist() == [0, 0, 1, 1]
    padded = batch_of_groups(groups_of(SCRIPT), "traj", multiple=3).non_tensor_batch["tag"]
    assert sorted(padded) == ["", "", "Lake", "Lake", "Room", "Room"]
    assert (first["tag"], first["stop"], first["outcome"], first["metrics"]) == (
        "Room",
        "terminated",
        "the end",
        {"gold": 1.0},
    )
    assert first["turns"][1] == {"observation": "hole", "text": "1 tokens", "reward": 1.0, "versions": [1]}


def test_rows_are_named_after_prompt_or_after_trajectory_and_turn():
    groups = groups_of(SCRIPT)
    of_trajectories = ["Room-10-0", "Room-10-1", "Lake-11-0", "Lake-11-1"]

    def names(*args, episodes):
        return list(batch_of_groups(groups, *args, episodes=episodes).non_tensor_batch["id"])

    assert names("traj", 5, episodes=False) == ["Room-10", "Room-10", "Lake-11", "Lake-11", "padding"]
    assert names("traj", 5, episodes=True) == [*of_trajectories, "padding"]
    assert names("step", episodes=True)[:4] == [
        "Room-10-0-0",
        "Room-10-0-1",
        "Room-10-1-0",
        "Lake-11-0-0",
    ]


def test_a_row_of_a_turn_ends_with_it_and_has_the_score_of_the_whole():
    batch = batch_of_groups(groups_of(SCRIPT), "step").batch
    lengths = batch["attention_mask"].sum(-1).tolist()
    whole = [one for group in groups_of(SCRIPT) for one in group.trajectories]
    assert lengths == [each.end for one in whole for each in one.turns]
    assert batch["turn_count"].tolist() == [1] * 8
    assert batch["trajectory_ids"].tolist() == [0, 0, 1, 2, 2, 2, 3, 3]
    assert batch["scores"].tolist() == [1.0, 1.0, 0.25, 0.5, 0.5, 0.5, 0.0, 0.0]
    assert batch["turn_rewards"].flatten().tolist() == [0.0, 1.0, 0.25, 0.0, 0.5, 0.0, 0.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(scripts, st.sampled_from(["traj", "step"]), st.integers(1, 9))
def test_padding_rows_belong_to_no_group_and_are_spread_evenly(script, sample_by, multiple):
    groups = groups_of(script)
    alone = batch_of_groups(groups, sample_by, episodes=True)
    filled = batch_of_groups(groups, sample_by, multiple, episodes=True)
    rows = len(alone.batch["scores"])
    batch = filled.batch
    extra = batch["turn_count"] == 0
    assert len(batch["scores"]) == -(-rows // multiple) * multiple
    steps = (~extra).view(-1, multiple).sum(-1)
    assert steps.max() - steps.min() <= 1, "one optimizer step learns from more samples than another"
    for name, values in alone.batch.items():
        if name != "tag_ids":
            assert torch.equal(batch[name][~extra], values)
    assert not batch["response_mask"][extra].any() and batch["attention_mask"][extra].any(-1).all()
    assert (batch["turn_index"][extra] == NO_TURN).all() and (batch["state_ids"][extra] == NO_TURN).all()
    assert (batch["turn_count"][extra] == 0).all() and (batch["scores"][extra] == 0).all()
    for name in ("group_ids", "trajectory_ids"):
        fresh = batch[name][extra].tolist()
        assert len(set(fresh)) == len(fresh) and not set(fresh) & set(batch[name][~extra].tolist())
    assert all((name == "") == row for name, row in zip(filled.non_tensor_batch["tag"], extra.tolist(), strict=True))
    ids = filled.non_tensor_batch["id"]
    assert len(set(ids[~extra.numpy()])) == rows and set(ids[extra.numpy()]) <= {"padding"}
    assert all(description == {} for description in filled.non_tensor_batch["episode"][extra.numpy()])


@pytest.mark.parametrize("grouping", ["traj_group_id", "traj_id", "tags", "batch"])
@pytest.mark.parametrize("name", ["gigpo", "step_reinforce", "agentic_reinforce", "grpo"])
def test_advantages_do_not_depend_on_sample_by_and_padding(name, grouping):
    """With `multiple` 3 both kinds of batch have padding: 4 trajectories make 6 rows, 8 turns make 9."""
    config = AdvantageSettings(adv_estimator=name, reward_normalization=RewardNormalization(grouping, "group", "group"))
    advantages = {}
    for sample_by in ("traj", "step"):
        for multiple in (1, 3):
            batch = batch_of_groups(groups_of(SCRIPT), sample_by, multiple).batch
            found = compute_advantages(
                batch["scores"], batch["group_ids"], batch["response_mask"], config, turns=read_turns(batch)
            )
            assert bool((found.advantages[~batch["response_mask"]] == 0).all())
            advantages[sample_by, multiple] = found.advantages[batch["response_mask"]]
    first = advantages["traj", 1]
    assert len(first) == 13 and bool(first.isfinite().all())
    assert grouping == "traj_id" or bool(first.any())
    for other in advantages.values():
        torch.testing.assert_close(other, first)


def test_a_group_of_a_checkpoint_keeps_its_ground_truth():
    group = Group(4, "math", 31, "train:31", ground_truth="19")
    assert Group.from_state(group.state_dict()) == group
