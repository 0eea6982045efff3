from __future__ import annotations

import pytest
import torch

from roll.algorithms.advantages import AdvantageConfig
from roll.algorithms.turn_advantages import TURN_KEYS, episodes_of, read_turns
from tests.algorithms.trajectories import Trajectory, make_batch

PAIR = [Trajectory(0, [1.0, 2.0], [0, 1]), Trajectory(0, [0.0], [0])]


def test_turns_are_read_where_there_are_any():
    tensors = make_batch(PAIR).tensors
    turns = read_turns(tensors)
    assert turns is not None and all(getattr(turns, key) is tensors[key] for key in TURN_KEYS)
    assert read_turns({"response_mask": tensors["response_mask"]}) is None


def test_turns_that_are_not_all_there_are_named():
    tensors = make_batch(PAIR).tensors
    del tensors["state_ids"], tensors["tag_ids"]
    with pytest.raises(ValueError, match="turn_index but not state_ids, tag_ids"):
        read_turns(tensors)


def test_a_trajectory_is_counted_once_in_however_many_samples_it_stands():
    batch = make_batch(PAIR, steps=True, padding=1)
    episodes = episodes_of(batch.tensors["response_mask"], read_turns(batch.tensors))
    assert episodes.of_row.tolist() == [0, 0, 1, -1]
    assert episodes.per_episode(batch.tensors["scores"]).tolist() == [3.0, 0.0]
    assert episodes.sum_samples(torch.tensor([1.0, 2.0, 4.0, 8.0])).tolist() == [3.0, 4.0]
    assert episodes.to_samples(torch.tensor([5.0, 6.0])).tolist() == [5.0, 5.0, 6.0, 0.0]


def test_without_turns_every_sample_is_an_episode():
    episodes = episodes_of(torch.tensor([[1, 0], [0, 0]]), None)
    assert episodes.rows.tolist() == episodes.of_row.tolist() == [0, 1]


SPOILED = {
    "turn_index": (2, "samples \\[1\\] have response tokens of no turn"),
    "turn_count": (9, "samples \\[1\\] have more turns than the 1 of turn_rewards"),
    "turn_rewards": (float("nan"), "samples \\[1\\] have turn_rewards that are not finite"),
    "state_ids": (-1, "samples \\[1\\] have turns without a state"),
    "scores": (4.0, "samples \\[1\\] differ in scores from the first sample of their trajectory"),
    "group_ids": (7, "samples \\[1\\] differ in group_ids from the first sample of their trajectory"),
}


@pytest.mark.parametrize("key", SPOILED)
def test_turns_that_contradict_the_batch_are_refused(key):
    batch = make_batch(PAIR, steps=True)
    value, said = SPOILED[key]
    row = batch.tensors[key][1]
    row[...] = torch.where(batch.tensors["response_mask"][1], value, row) if key == "turn_index" else value
    with pytest.raises(ValueError, match=said):
        batch.advantages(AdvantageConfig())
