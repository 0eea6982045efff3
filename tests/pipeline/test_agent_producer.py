"""Which environments play, how often, what a validation is, what a checkpoint holds, and what is told of a batch."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from agents import SAMPLING, Engines, Table, one_of, run, task
from hypothesis import given
from hypothesis import strategies as st

from roll.configs.agentic import AgenticConfig, EnvManagerConfig
from roll.configs.errors import RunError
from roll.pipeline.agentic.groups import TagCycle, TrajectoryGroup
from roll.pipeline.agentic.metrics import rollout_metrics, validation_metrics
from roll.pipeline.agentic.producer import AgenticProducer
from roll.pipeline.agentic.runner import side_by_side
from roll.pipeline.rollout_types import Unmeasured
from roll.rollout.policy import Ticket
from roll.rollout.types import GenerateResult, Trajectory

ANSWERS = one_of("left", "right", "gold", "fall")


def config(**options: Any) -> AgenticConfig:
    train = EnvManagerConfig(num_env_groups=2, group_size=3, tags=["Near", "Far"], num_groups_partition=[1, 1])
    val = EnvManagerConfig(num_env_groups=2, group_size=1, tags=["Far"], num_groups_partition=[2])
    return replace(AgenticConfig(train_env_manager=train, val_env_manager=val, val_batch_size=5), **options)


def producer(table: Table, made: AgenticConfig | None = None, multiple: int = 1) -> AgenticProducer:
    tasks = {"Near": task(max_steps=1), "Far": task(max_steps=3)}
    val_sampling = replace(SAMPLING, max_new_tokens=3, temperature=0.0)
    return AgenticProducer(made or config(), tasks, table.player, table.pool, SAMPLING, val_sampling, multiple)


def drawn(made: AgenticProducer, numbers: range) -> list[TrajectoryGroup]:
    return made.draw(Ticket(number, 0, 0) for number in numbers)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 1000))
def test_tags_are_dealt_in_proportion_anywhere_and_evenly_mixed(partition, start):
    tags = [f"tag {number}" for number in range(len(partition))]
    cycle, whole = TagCycle(tags, partition), sum(partition)
    assert Counter(cycle.tag(start + number) for number in range(whole)) == dict(zip(tags, partition, strict=True))
    for length in range(whole):
        dealt = Counter(cycle.tag(number) for number in range(length))
        for tag, part in zip(tags, partition, strict=True):
            assert abs(dealt[tag] - length * part / whole) < len(tags)


def test_a_number_alone_decides_tag_and_seed():
    made, other = producer(Table(Engines(ANSWERS))), producer(Table(Engines(ANSWERS)), config(seed=1))
    first = drawn(made, range(10))
    assert [group.tag for group in first] == ["Near", "Far"] * 5
    assert len({group.seed for group in first}) == 10
    assert drawn(made, range(4, 7)) == first[4:7]
    assert not {group.seed for group in drawn(other, range(10))} & {group.seed for group in first}


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_more_groups_play_at_a_time_than_there_are_places_whoever_asks(deterministic):
    """Two calls at once of four groups of 3, and a pool with places for two groups."""
    most = 0

    def seen(method: str, *args: Any) -> float:
        nonlocal most
        most = max(most, table.open)
        return 0.5

    table = Table(Engines(ANSWERS, lambda request: 1.0), seen, capacity=6)
    made = producer(table, config(deterministic=deterministic))
    groups = drawn(made, range(8))
    run(side_by_side(made.produce(share, Unmeasured()) for share in (groups[:4], groups[4:])))
    assert most == 6 and all(len(group.trajectories) == 3 for group in groups)


def test_both_ways_to_play_produce_the_same_groups():
    found = []
    for deterministic in (False, True):
        made = producer(Table(Engines(ANSWERS)), config(deterministic=deterministic))
        groups = drawn(made, range(6))
        run(made.produce(groups, Unmeasured()))
        found.append(groups)
    assert found[0] == found[1]


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_validation_plays_the_same_and_nothing_that_is_trained_on(deterministic):
    table = Table(Engines(ANSWERS))
    made = producer(table, config(deterministic=deterministic))

    async def thrice() -> list[Any]:
        first = await made.validate(0)
        asked = list(table.engines.asked)
        groups = drawn(made, range(5))
        await made.produce(groups, Unmeasured())
        trained = table.engines.asked[len(asked) :]
        again = await made.validate(1)
        return [first, again, asked, trained, table.engines.asked[len(asked) + len(trained) :]]

    first, again, asked, trained, asked_again = run(thrice())
    assert first == again and list(first)[0] == "val/Far/score"
    assert sorted(asked, key=str) == sorted(asked_again, key=str)
    assert {request.request_id.split("-")[1] for request in asked} == set("01234")
    assert all(request.sampling.temperature == 0 and request.sampling.max_new_tokens <= 3 for request in asked)
    assert all(request.sampling.temperature == 1 for request in trained)
    for what in ("seed", "request_id"):
        assert not {getattr(each, what) for each in asked} & {getattr(each, what) for each in trained}
    assert not {tuple(each.prompt_ids) for each in asked} & {tuple(each.prompt_ids) for each in trained}


def test_a_validation_that_fails_in_part_is_no_validation_and_tells_its_own_cause():
    def say(request: Any) -> str | None:
        return "gold" if not request.request_id.startswith("val-1-") else None

    made = producer(Table(Engines(say)))
    said = "validation environment 1: failed 3 times, last with generation_failed: val-1-0-0: out of memory"
    with pytest.raises(RunError, match=f"^{said}$"):
        run(made.validate(0))


def test_a_group_that_fails_in_a_validation_is_played_again_with_the_same_seeds():
    broken = ["val-1-0-0"]

    def say(request: Any) -> str | None:
        return None if request.request_id in broken and not broken.clear() else "gold"

    unbroken, mended = producer(Table(Engines(lambda request: "gold"))), producer(Table(Engines(say)))
    told = run(unbroken.validate(0))
    assert told["val/replayed_groups"] == 0
    assert run(mended.validate(0)) == told | {"val/replayed_groups": 1.0}


def test_groups_travel_through_a_checkpoint():
    made = producer(Table(Engines(ANSWERS)))
    groups = drawn(made, range(3))
    run(made.produce(groups, Unmeasured()))
    assert [made.decode(json.loads(json.dumps(made.encode(group)))) for group in groups] == groups


@pytest.mark.parametrize(
    "change, said",
    [
        ({"seed": 9}, "seed: 9 cannot go on from a checkpoint with 42; use that"),
        ({"train_env_manager": EnvManagerConfig(group_size=4, tags=["Near", "Far"], num_groups_partition=[1, 1])}, "4"),
        ({"train_env_manager": EnvManagerConfig(group_size=3, tags=["Far"], num_groups_partition=[1])}, "tags: "),
    ],
)
def test_what_a_checkpoint_depends_on_must_be_the_same(change, said):
    state = json.loads(json.dumps(producer(Table(Engines(ANSWERS))).state_dict()))
    producer(Table(Engines(ANSWERS))).load_state_dict(state)
    with pytest.raises(ValueError, match=said):
        producer(Table(Engines(ANSWERS)), config(**change)).load_state_dict(state)


def test_a_batch_has_a_row_for_what_is_sampled_and_divides():
    for sample_by in ("traj", "step"):
        made = producer(Table(Engines(ANSWERS)), config(sample_by=sample_by), multiple=4)
        groups = drawn(made, range(3))
        run(made.produce(groups, Unmeasured()))
        turns = sum(len(one.turns) for group in groups for one in group.trajectories)
        mask = made.batch(groups).batch["response_mask"]
        assert int(mask.any(-1).sum()) == (9 if sample_by == "traj" else turns) and len(mask) % 4 == 0


def test_failures_of_environments_are_told_by_reason():
    made = producer(Table(Engines(lambda request: "boom" if request.request_id == "train-1-0-0" else "gold")))
    groups = drawn(made, range(2))
    run(made.produce(groups, Unmeasured()))
    assert [group.drop_reason for group in groups] == [None, "env_raised"]
    assert made.metrics(groups[:1], 0)["env/failures_raised"] == 1.0
    assert "ArithmeticError" in (made.last_failure or "")


def spoken(*turns: tuple[int, int, float, int], metrics: dict[str, float], stop: str = "terminated") -> Trajectory:
    """Turns of (tokens, version, reward, cached), with three tokens said before each."""
    made = Trajectory(stop=stop)
    for tokens, version, reward, cached in turns:
        made.say([7, 7, 7])
        result = GenerateResult("r", [5] * tokens, [-1.0] * tokens, [version] * tokens, "stop", cached)
        made.answer(made.ids, result, "", "").reward = reward
    made.metrics = metrics
    return made


def test_metrics_of_a_batch():
    cut = spoken((1, 3, 0.0, 3), metrics={}, stop="sequence_length")
    near = [spoken((2, 3, 0.5, 3), (2, 3, 0.5, 4), (4, 4, 1.0, 0), metrics={"gold": 1.0}), cut]
    far = [spoken((2, 2, 0.0, 3), (1, 2, 0.0, 5), metrics={"gold": 0.0, "letters": 8.0})]
    groups = [TrajectoryGroup(0, "Near", 0, near), TrajectoryGroup(1, "Far", 0, far)]
    told = rollout_metrics(groups, version=4)
    assert told["rollout/reward_mean"] == pytest.approx(2 / 3)
    assert told["rollout/response_length_mean"] == 4 and told["rollout/response_length_max"] == 8
    assert told["rollout/sequence_length_mean"] == pytest.approx((17 + 4 + 9) / 3)
    assert told["rollout/truncated_fraction"] == pytest.approx(1 / 3)
    assert told["rollout/turns_mean"] == 2 and told["rollout/versions_max"] == 2
    assert told["rollout/prefix_reuse"] == (4 + 5) / (8 + 8), "the third turn has other weights than the second"
    assert told["env/Near/gold"] == 1.0, "an episode without the metric has no part in it"
    assert told["env/Near/num_actions"] == 2 and told["env/Far/letters"] == 8
    assert told["staleness/max"] == 2 and told["staleness/mean"] == pytest.approx((1 + 1 + 2) / 3)
    assert told["staleness/token_mean"] == pytest.approx((4 + 0 + 1 + 6) / 12)


def test_nothing_is_told_of_what_nobody_did():
    groups = [TrajectoryGroup(0, "Near", 0, [spoken((1, 0, 0.0, 0), metrics={}, stop="sequence_length")])]
    told = rollout_metrics(groups, version=0)
    assert "rollout/prefix_reuse" not in told
    assert [name for name in told if name.startswith("env/")] == ["env/Near/num_actions"]


def test_a_validation_tells_scores_by_tag_and_over_all_trajectories():
    groups = [
        TrajectoryGroup(0, "Near", 0, [spoken((1, 0, 1.0, 0), metrics={"gold": 1.0})]),
        TrajectoryGroup(1, "Far", 0, [spoken((1, 0, 0.0, 0), metrics={"gold": 0.0})]),
        TrajectoryGroup(2, "Near", 0, [spoken((4, 0, 0.5, 0), metrics={"gold": 0.0})]),
    ]
    told = validation_metrics(groups)
    assert (told["val/Near/score"], told["val/Far/score"], told["val/score"]) == (0.75, 0.0, 0.5)
    assert told["val/response_length_mean"] == 2 and told["val/Near/gold"] == 0.5
