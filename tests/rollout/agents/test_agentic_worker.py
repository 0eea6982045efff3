"""Which environments run and when, validations, checkpoints, and metrics by environment."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.base.errors import RunError
from roll.base.timers import StepClock
from roll.configs.agentic import AgenticConfig
from roll.configs.environments import EnvManagerConfig
from roll.rollout.agents.agentic_worker import AgenticWorker, TagCycle
from roll.rollout.agents.runner import run_all
from roll.rollout.ledger import PromptRequest
from roll.rollout.types import Group
from tests.rollout.agents.agent_setup import SAMPLING, Engines, Setup, one_of, run, task

ANSWERS = one_of("left", "right", "gold", "fall")


def config(**options: Any) -> AgenticConfig:
    train = EnvManagerConfig(num_env_groups=2, group_size=3, tags=["Near", "Far"], num_groups_partition=[1, 1])
    val = EnvManagerConfig(num_env_groups=2, group_size=1, tags=["Far"], num_groups_partition=[2])
    return replace(AgenticConfig(train_env_manager=train, val_env_manager=val, val_batch_size=5), **options)


def worker(setup: Setup, made: AgenticConfig | None = None) -> AgenticWorker:
    tasks = {"Near": task(max_steps=1), "Far": task(max_steps=3)}
    val_sampling = replace(SAMPLING, max_new_tokens=3, temperature=0.0)
    sampling = {"train": SAMPLING, "val": val_sampling}
    return AgenticWorker(made or config(), tasks, sampling, setup.runner, setup.pool)


def drawn(made: AgenticWorker, numbers: range) -> list[Group]:
    return made.draw([PromptRequest(number, 0, 0) for number in numbers])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 1000))
def test_tags_are_assigned_in_proportion_and_evenly_mixed(partition, start):
    tags = [f"tag {number}" for number in range(len(partition))]
    manager = EnvManagerConfig(tags=tags, num_groups_partition=partition)
    cycle, whole = TagCycle(manager), sum(partition)
    assert Counter(cycle.tag(start + number) for number in range(whole)) == dict(zip(tags, partition, strict=True))
    for length in range(whole):
        dealt = Counter(cycle.tag(number) for number in range(length))
        assert cycle.place(length) == dealt[cycle.tag(length)]
        assert cycle.place(length + whole) == cycle.place(length) + partition[tags.index(cycle.tag(length))]
        for tag, part in zip(tags, partition, strict=True):
            assert abs(dealt[tag] - length * part / whole) < len(tags)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 4))
def test_the_order_of_tags_depends_on_their_proportions_alone(partition, times):
    tags = [f"tag {number}" for number in range(len(partition))]
    cycle, more = (
        TagCycle(EnvManagerConfig(tags=tags, num_groups_partition=[factor * part for part in partition]))
        for factor in (1, times)
    )
    assert cycle.order == more.order


def test_tag_and_seed_depend_only_on_the_number():
    made, other = worker(Setup(Engines(ANSWERS))), worker(Setup(Engines(ANSWERS)), config(seed=1))
    first = drawn(made, range(10))
    assert [group.tag for group in first] == ["Near", "Far"] * 5
    assert len({group.problem for group in first}) == 10
    assert drawn(made, range(4, 7)) == first[4:7]
    assert not {group.problem for group in drawn(other, range(10))} & {group.problem for group in first}


@pytest.mark.parametrize("deterministic", [False, True])
def test_concurrent_calls_run_no_more_environments_than_the_manager_has(deterministic):
    """Two calls at once of four groups of 3, and a pool with places for two groups."""
    most = 0

    def seen(method: str, *args: Any) -> float:
        nonlocal most
        most = max(most, setup.open)
        return 0.5

    setup = Setup(Engines(ANSWERS, lambda request: 1.0), seen, capacity=6)
    made = worker(setup, config(deterministic=deterministic))
    groups = drawn(made, range(8))
    run(run_all(made.generate(share, "train", StepClock()) for share in (groups[:4], groups[4:])))
    assert most == 6 and all(len(group.trajectories) == 3 for group in groups)


def test_an_environment_that_has_finished_runs_an_episode_of_the_next_group():
    """One episode of each of the first two groups is slow; with two groups at a time, no other group would begin."""
    began: dict[str, float] = {}

    def seconds(request: Any) -> float:
        _, group, episode, _ = request.request_id.split("-")
        began.setdefault(group, asyncio.get_running_loop().time())
        return 30.0 if group in "01" and episode == "0" else 1.0

    made = worker(Setup(Engines(ANSWERS, seconds), capacity=6))
    groups = drawn(made, range(5))
    run(made.generate(groups, "train", StepClock()))
    assert [*began] == [*"01234"] and max(began.values()) < min(began.values()) + 30
    assert all(len(group.trajectories) == 3 for group in groups)


def test_lockstep_and_concurrent_episodes_give_the_same_groups():
    found = []
    for deterministic in (False, True):
        made = worker(Setup(Engines(ANSWERS)), config(deterministic=deterministic))
        groups = drawn(made, range(6))
        run(made.generate(groups, "train", StepClock()))
        found.append(groups)
    assert found[0] == found[1]


def test_requests_have_the_version_of_their_environment_and_those_of_validation_none():
    setup = Setup(Engines(ANSWERS))
    made = worker(setup)

    async def both() -> None:
        await made.generate(made.draw([PromptRequest(0, 4, 5)]), "train", StepClock())
        trained = len(setup.engines.requests)
        await made.validate()
        versions = [request.version for request in setup.engines.requests]
        assert {*versions[:trained]} == {4} and {*versions[trained:]} == {None}

    run(both())


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_validation_uses_the_same_environments_and_none_of_training(deterministic):
    setup = Setup(Engines(ANSWERS))
    made = worker(setup, config(deterministic=deterministic))

    async def thrice() -> list[Any]:
        first = await made.validate()
        sent = list(setup.engines.requests)
        groups = drawn(made, range(5))
        await made.generate(groups, "train", StepClock())
        trained = setup.engines.requests[len(sent) :]
        again = await made.validate()
        return [first, again, sent, trained, setup.engines.requests[len(sent) + len(trained) :]]

    first, again, sent, trained, sent_again = run(thrice())
    assert first == again and list(first)[0] == "val/Far/score"
    assert sorted(sent, key=str) == sorted(sent_again, key=str)
    assert {request.request_id.split("-")[1] for request in sent} == set("01234")
    assert all(request.sampling.temperature == 0 and request.sampling.max_new_tokens <= 3 for request in sent)
    assert all(request.sampling.temperature == 1 for request in trained)
    for what in ("seed", "request_id"):
        assert not {getattr(each, what) for each in sent} & {getattr(each, what) for each in trained}
    assert not {tuple(each.prompt_ids) for each in sent} & {tuple(each.prompt_ids) for each in trained}


def test_a_validation_fails_with_the_cause_of_a_group_that_fails_every_time():
    def respond(request: Any) -> str | None:
        return "gold" if not request.request_id.startswith("val-1-") else None

    made = worker(Setup(Engines(respond)))
    message = "validation group Far-1: failed 3 times, last with generation_failed: val-1-0-0: out of memory"
    with pytest.raises(RunError, match=f"^{message}$"):
        run(made.validate())


def test_a_failed_validation_group_is_replayed_with_the_same_seeds():
    broken = ["val-1-0-0"]

    def respond(request: Any) -> str | None:
        return None if request.request_id in broken and not broken.clear() else "gold"

    unbroken, repaired = worker(Setup(Engines(lambda request: "gold"))), worker(Setup(Engines(respond)))
    expected = run(unbroken.validate())
    assert expected["val/replayed_groups"] == 0
    assert run(repaired.validate()) == expected | {"val/replayed_groups": 1.0}


def test_a_validation_group_that_timed_out_ends_the_run_without_another_try():
    setup = Setup(Engines(lambda request: "gold", lambda request: 30.0), timeout_s=20.0)
    with pytest.raises(RunError, match=r"failed 1 times, last with trajectory_timeout: a trajectory was not over"):
        run(worker(setup).validate())
    assert setup.engines.calls


def test_groups_are_restored_from_a_checkpoint_exactly():
    made = worker(Setup(Engines(ANSWERS)))
    groups = drawn(made, range(3))
    run(made.generate(groups, "train", StepClock()))
    assert [Group.from_state(json.loads(json.dumps(group.state_dict()))) for group in groups] == groups


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seed": 9}, "seed: 9 cannot continue from a checkpoint with 42; use that"),
        ({"train_env_manager": EnvManagerConfig(group_size=4, tags=["Near", "Far"], num_groups_partition=[1, 1])}, "4"),
        ({"train_env_manager": EnvManagerConfig(group_size=3, tags=["Far"], num_groups_partition=[1])}, "tags: "),
    ],
)
def test_a_checkpoint_with_other_settings_is_refused(change, message):
    state = json.loads(json.dumps(worker(Setup(Engines(ANSWERS))).state_dict()))
    worker(Setup(Engines(ANSWERS))).load_state_dict(state)
    with pytest.raises(ValueError, match=message):
        worker(Setup(Engines(ANSWERS)), config(**change)).load_state_dict(state)


def test_a_batch_has_a_row_for_each_sample_and_divides_into_optimizer_steps():
    for sample_by in ("traj", "step"):
        settings = config(sample_by=sample_by)
        settings.actor_train.training_args.gradient_accumulation_steps = 4
        made = worker(Setup(Engines(ANSWERS)), settings)
        groups = drawn(made, range(3))
        run(made.generate(groups, "train", StepClock()))
        turns = sum(len(one.turns) for group in groups for one in group.trajectories)
        mask = made.batch(groups).batch["response_mask"]
        assert int(mask.any(-1).sum()) == (9 if sample_by == "traj" else turns) and len(mask) % 4 == 0


def test_failures_of_environments_are_counted_by_reason():
    made = worker(Setup(Engines(lambda request: "boom" if request.request_id == "train-1-0-0" else "gold")))
    groups = drawn(made, range(2))
    run(made.generate(groups, "train", StepClock()))
    assert [group.drop_reason for group in groups] == [None, "env_raised"]
    assert made.metrics(groups[:1], 0)["env/failures_raised"] == 1.0
    assert "ArithmeticError" in (groups[1].failure or "")
