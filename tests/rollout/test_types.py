"""Trajectories: ids that only grow, and which of them were sampled."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.rollout.types import NOT_SAMPLED, GenerateResult, Trajectory, TrajectoryError


def result(ids: list[int], version: int = 0, cached: int = 0, **parts: list) -> GenerateResult:
    parts = {"log_probs": [-0.5] * len(ids), "versions": [version] * len(ids)} | parts
    return GenerateResult("r", ids, **parts, finish_reason="stop", cached_prompt_tokens=cached)


token = st.integers(0, 9)
turns = st.lists(
    st.tuples(st.lists(token, max_size=5), st.lists(token, min_size=1, max_size=5), st.integers(0, 3)),
    min_size=1,
    max_size=6,
)


@given(turns)
def test_every_turn_is_an_exact_prefix_of_the_next_and_sampled_tokens_are_those_of_turns(script):
    trajectory, prompts, sampled = Trajectory(), [], []
    for context, answered, version in script:
        trajectory.add_context(context)
        prompt = list(trajectory.ids)
        trajectory.add_response(prompt, result(answered, version), "seen", "text")
        prompts.append(prompt)
        sampled += answered
        assert trajectory.ids == prompt + answered
    assert all(later[: len(earlier)] == earlier for earlier, later in zip(prompts, prompts[1:], strict=False))
    assert [i for i, v in zip(trajectory.ids, trajectory.versions, strict=True) if v != NOT_SAMPLED] == sampled
    assert [i for turn in trajectory.turns for i in trajectory.ids[turn.start : turn.end]] == sampled
    assert all(lp == 0 for lp, v in zip(trajectory.log_probs, trajectory.versions, strict=True) if v == NOT_SAMPLED)
    assert trajectory.oldest_version == min(version for _, _, version in script)
    assert Trajectory.from_state(json.loads(json.dumps(trajectory.state_dict()))) == trajectory


def test_a_response_to_another_prompt_is_refused_with_the_first_difference():
    trajectory = Trajectory()
    trajectory.add_context([5, 6, 7])
    with pytest.raises(
        TrajectoryError, match="the request had 3 prompt tokens and the trajectory has 3, different from position 1"
    ):
        trajectory.add_response([5, 9, 7], result([1]), "", "")
    with pytest.raises(
        TrajectoryError, match="the request had 2 prompt tokens and the trajectory has 3, different from position 2"
    ):
        trajectory.add_response([5, 6], result([1]), "", "")


def test_a_response_whose_parts_do_not_match_is_refused():
    trajectory = Trajectory()
    with pytest.raises(TrajectoryError, match=r"not \(2, 1, 2\)"):
        trajectory.add_response([], result([1, 2], log_probs=[-0.1]), "", "")
    with pytest.raises(TrajectoryError, match=r"not \(0, 0, 0\)"):
        trajectory.add_response([], result([]), "", "")


def test_sampling_masks_stand_at_the_sampled_tokens():
    trajectory = Trajectory()
    trajectory.add_context([5, 6])
    trajectory.add_response([5, 6], result([1, 2], sampling_mask=[[1, 3], [2]]), "", "")
    trajectory.add_context([7])
    trajectory.add_response([5, 6, 1, 2, 7], result([3], sampling_mask=[[3, 4]]), "", "")
    trajectory.add_context([8])
    assert trajectory.sampling_mask == [[], [], [1, 3], [2], [], [3, 4]]
    assert Trajectory.from_state(json.loads(json.dumps(trajectory.state_dict()))) == trajectory
    with pytest.raises(TrajectoryError, match="turn 2: 2 tokens and 1 masks"):
        trajectory.add_response(trajectory.ids, result([1, 2], sampling_mask=[[1]]), "", "")


def test_a_prefix_could_be_reused_only_under_the_weights_of_the_turn_before():
    trajectory = Trajectory()
    trajectory.add_context([1, 2])
    first = trajectory.add_response(trajectory.ids, result([3], version=0), "", "")
    trajectory.add_context([4])
    same = trajectory.add_response(trajectory.ids, result([5], version=0, cached=3), "", "")
    trajectory.add_context([6])
    other = trajectory.add_response(trajectory.ids, result([7], version=1), "", "")
    assert (first.reusable, same.reusable, other.reusable) == (0, 3, 0)
    assert same.cached == 3


def test_the_score_is_the_sum_of_the_turns():
    trajectory = Trajectory()
    for reward in (0.25, -0.5, 1.0):
        trajectory.add_response(trajectory.ids, result([1]), "", "").reward = reward
    assert trajectory.score == 0.75
