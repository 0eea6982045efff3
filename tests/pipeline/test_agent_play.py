"""Groups of episodes: who is taken, what is given up, what drops a group, and that timing changes no trajectory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agents import SAMPLING, STEP_TIMEOUT_S, Engines, Table, one_of, run, task
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.configs.pipeline import role_seed
from roll.pipeline.agentic.groups import TrajectoryGroup
from roll.pipeline.agentic.side_by_side import side_by_side
from roll.pipeline.rollout_types import Unmeasured
from roll.rollout.types import GenerateRequest

WALK = task(max_steps=3)
ANSWERS = one_of("left", "right", "gold", "fall", "x" * 40)


def group(number: int = 0) -> TrajectoryGroup:
    return TrajectoryGroup(number, "Steps", role_seed(5, "env", number))


def member(request: GenerateRequest) -> int:
    return int(request.request_id.split("-")[2])


def by_member(*texts: str | None) -> Any:
    return lambda request: texts[member(request)]


async def play(table: Table, groups: list[TrajectoryGroup], wanted: int, extra: int = 0, together: bool = False):
    """Plays groups, either way, and sees to it that nothing is left."""
    try:
        return await play_on(table, groups, wanted, extra, together)
    finally:
        await nothing_left(table)


async def play_on(table: Table, groups: list[TrajectoryGroup], wanted: int, extra: int = 0, together: bool = False):
    """Plays groups, either way."""
    player = table.player
    plays = [(one, player.episodes(one, "train", WALK, wanted + extra, 3, SAMPLING)) for one in groups]
    if together:
        await player.play_together(plays, wanted, Unmeasured())
    else:
        await side_by_side(player.play(one, episodes, wanted, Unmeasured()) for one, episodes in plays)
    return groups


async def nothing_left(table: Table) -> None:
    await table.all_left()
    await asyncio.sleep(0)  # a worker that starts to be watched, a cancelled call that ends
    assert {task.get_name() for task in asyncio.all_tasks()} <= {asyncio.current_task().get_name()}
    assert table.open == 0


@pytest.mark.parametrize("together", [False, True])
def test_members_share_the_environment_and_differ_in_their_seeds(together):
    engines = Engines(one_of("left"))
    first, second = run(play(Table(engines), [group(0), group(1)], 2, together=together))
    seen = [{trajectory.turns[0].observation for trajectory in each.trajectories} for each in (first, second)]
    assert all(len(each) == 1 for each in seen) and seen[0] != seen[1]
    assert len({request.seed for request in engines.asked}) == len({r.request_id for r in engines.asked}) == 2 * 2 * 3


def trajectories(seconds: list[int], together: bool, engines: int = 1) -> list[TrajectoryGroup]:
    """Three groups, with answers and environments that take their time."""
    slow = Engines(ANSWERS, lambda request: float(seconds[len(request.request_id) % len(seconds)]), engines)
    pause = [float(second) / 4 for second in seconds]
    table = Table(slow, lambda method, key, *args: pause[key % len(pause)] if method == "step" else 0.0)
    return run(play(table, [group(number) for number in range(3)], 4, together=together))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=7), st.integers(1, 3))
def test_lock_step_and_any_timing_give_the_same_trajectories(seconds, engines):
    assert trajectories(seconds, together=False, engines=engines) == trajectories([0], together=True)


def test_in_lock_step_every_turn_is_one_call():
    engines = Engines(ANSWERS)
    groups = run(play(Table(engines), [group(number) for number in range(3)], 4, together=True))
    turns = [len(trajectory.turns) for each in groups for trajectory in each.trajectories]
    assert [len(call) for call in engines.calls] == [sum(count > turn for count in turns) for turn in range(max(turns))]


@settings(max_examples=40, deadline=None)
@given(st.permutations([1.0, 2.0, 3.0, 4.0, 5.0]))
def test_the_first_that_end_are_taken_in_the_order_they_were_begun(seconds):
    engines = Engines(by_member(*(f"gold {index}" for index in range(5))), lambda request: seconds[member(request)])
    [one] = run(play(Table(engines), [group()], 3, extra=2))
    first = sorted(range(5), key=lambda index: seconds[index])[:3]
    assert [trajectory.turns[0].text for trajectory in one.trajectories] == [f"gold {index}" for index in sorted(first)]


def test_of_those_that_end_at_one_moment_the_first_to_end_are_taken():
    """The environments of members 1 and 2 answer before that of 0, all without time passing."""
    table = Table(Engines(by_member("gold 0", "gold 1", "gold 2")))
    turns = {0: 9, 1: 0, 2: 0}

    async def answer(request, original=table.engines.answer):
        for _ in range(turns[member(request)]):
            await asyncio.sleep(0)
        return await original(request)

    table.engines.answer = answer
    [one] = run(play(table, [group()], 2, extra=1))
    assert [trajectory.turns[0].text for trajectory in one.trajectories] == ["gold 1", "gold 2"]


def test_what_is_given_up_is_asked_nothing_more():
    engines = Engines(
        lambda request: "left" if member(request) == 2 else "gold", lambda r: 5.0 if member(r) == 2 else 1.0
    )
    [one] = run(play(Table(engines), [group()], 2, extra=1))
    assert one.drop_reason is None and len(one.trajectories) == 2
    assert [request.request_id for request in engines.asked if member(request) == 2] == ["train-0-2-0"]


@pytest.mark.parametrize("slow", ["step", "close"])
def test_a_group_does_not_wait_for_an_environment_it_does_not_need(slow):
    """Member 2 hangs, or all take their time to close; the next group comes into its own all the same."""
    pause = {"step": lambda key: 100.0 * (key == 2), "close": lambda key: STEP_TIMEOUT_S - 1}[slow]
    table = Table(Engines(one_of("gold")), lambda method, key, *args: pause(key) if method == slow else 0.0, capacity=3)

    async def scenario() -> float:
        await play_on(table, [one := group()], 2, extra=1)
        seconds = asyncio.get_running_loop().time()
        await play_on(table, [other := group(1)], 2)
        assert one.drop_reason is None and other.drop_reason is None
        await table.all_left()
        return seconds

    assert run(scenario()) < 1


def test_lock_step_takes_the_first_that_ended_well():
    table = Table(Engines(by_member("gold", "boom", "gold", "gold")))
    [one] = run(play(table, [group()], 2, extra=2, together=True))
    assert one.drop_reason is None and len(one.trajectories) == 2 and table.player.last_failure is None


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    "text, reason, words",
    [
        (None, "generation_failed", "out of memory"),
        ("boom", "env_raised", "turn 1: ArithmeticError: the ground gave way"),
        ("hang", "env_hung", "turn 1: no answer within step_timeout_s = 10"),
    ],
)
def test_a_failure_drops_the_whole_group_and_no_other(together, text, reason, words):
    def pause(method: str, key: int, *args: Any) -> float:
        return 2 * STEP_TIMEOUT_S if args == ("hang",) else 0.0

    def say(request: GenerateRequest) -> str | None:
        return text if request.request_id.startswith("train-1-2") else "gold"

    table = Table(Engines(say), pause)
    whole, failed = run(play_on(table, [group(0), group(1)], 3, together=together))
    assert (whole.drop_reason, len(whole.trajectories)) == (None, 3)
    assert (failed.drop_reason, failed.trajectories) == (reason, [])
    assert words in failed.failure and table.player.last_failure == failed.failure


@pytest.mark.parametrize("together", [False, True])
def test_a_first_message_without_room_drops_the_group(together):
    table = Table(Engines(one_of("gold")), sequence_length=10)
    [one] = run(play(table, [group()], 2, together=together))
    assert one.drop_reason == "prompt_too_long" and not table.engines.calls


@pytest.mark.parametrize("together", [False, True])
def test_a_trajectory_past_its_deadline_drops_the_group(together):
    seconds = Engines(one_of("left"), lambda request: 9.0 if member(request) == 1 else 0.0)
    [one] = run(play(Table(seconds, timeout_s=20.0), [group()], 2, together=together))
    assert one.drop_reason == "trajectory_timeout"
    assert one.failure == "a trajectory was not over after 20 s (trajectory_timeout_s)"
    [one] = run(play(Table(seconds, timeout_s=28.0), [group()], 2, together=together))
    assert one.drop_reason is None


def test_failures_up_to_the_redundancy_cost_nothing_and_one_more_ends_the_group_at_once():
    def seconds(request: GenerateRequest) -> float:
        return 50.0 if member(request) == 3 else 1.0

    table = Table(Engines(by_member("gold", None, "gold", "gold"), seconds))
    [one] = run(play(table, [group()], 3, extra=1))
    assert one.drop_reason is None and len(one.trajectories) == 3

    async def timed() -> float:
        [one] = await play(table, [group()], 3, extra=1)
        assert one.drop_reason == "generation_failed"
        return asyncio.get_running_loop().time()

    table = Table(Engines(by_member("gold", None, None, "gold"), seconds))
    assert run(timed()) == 1.0


@pytest.mark.parametrize("together", [False, True])
def test_a_mistake_of_ours_is_raised_and_nothing_is_left(together):
    def say(request: GenerateRequest) -> str:
        return str(1 // 0) if request.request_id == "train-1-1-1" else "left"

    table = Table(Engines(say, lambda request: float(member(request))), lambda *call: 0.5)
    with pytest.raises(ZeroDivisionError):
        run(play(table, [group(0), group(1)], 3, together=together))


@pytest.mark.parametrize("together", [False, True])
def test_a_mistake_while_environments_open_is_raised_and_nothing_is_left(together):
    async def first_message_breaks() -> None:
        groups = [group(0)]
        plays = [(one, table.player.episodes(one, "train", WALK, 3, 3, SAMPLING)) for one in groups]
        plays[0][1][1]._first = lambda instruction: str(1 // 0)
        if together:
            await table.player.play_together(plays, 3, Unmeasured())
        else:
            await table.player.play(*plays[0], 3, Unmeasured())

    async def then_settles() -> None:
        with pytest.raises(ZeroDivisionError):
            await first_message_breaks()
        await asyncio.sleep(5.0)
        await nothing_left(table)

    table = Table(Engines(one_of("gold")), lambda method, key, *args: float(key) if method == "open" else 0.0)
    run(then_settles())


@pytest.mark.parametrize("together", [False, True])
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40))
def test_cancelled_at_any_moment_it_closes_everything(together, halves):
    async def cancelled() -> None:
        playing = asyncio.create_task(play_on(table, [group(0), group(1)], 3, together=together))
        await asyncio.sleep(halves / 2)
        playing.cancel()
        await asyncio.wait([playing])
        await asyncio.sleep(2.0)  # an environment that was opening when it was given up
        await nothing_left(table)

    table = Table(Engines(one_of("left"), lambda request: 2.0 + member(request)), lambda *call: 1.0)
    run(cancelled())


@pytest.mark.parametrize("members", [1, 4])
def test_groups_that_begin_together_are_spread_over_the_engines(members):
    engines = Engines(one_of("left"), lambda request: 1.0, world_size=3)
    run(play(Table(engines), [group(number) for number in range(6)], members))
    assert engines.by_engine == {engine: 2 * members * 3 for engine in range(3)}


def test_a_group_stays_on_one_engine():
    class Noting(Engines):
        async def call(self, rank, method, requests):
            homes.setdefault(requests[0].request_id.split("-")[1], set()).add(rank)
            return await super().call(rank, method, requests)

    homes: dict[str, set[int]] = {}
    engines = Noting(ANSWERS, lambda request: float(member(request) + 1), world_size=3)
    run(play(Table(engines), [group(number) for number in range(7)], 4))
    assert len(homes) == 7 and all(len(ranks) == 1 for ranks in homes.values())


def test_environments_given_up_while_they_open_hold_no_place_that_others_need():
    """Member 2 of the first group is still opening when the group is whole; the next group needs its place."""

    async def two_groups() -> list[TrajectoryGroup]:
        groups, player = [group(0), group(1)], table.player
        for one in groups:
            await player.play(one, player.episodes(one, "train", WALK, 3, 3, SAMPLING), 2, Unmeasured())
        await asyncio.sleep(10.0)
        await nothing_left(table)
        return groups

    def pause(method: str, key: int, *args: Any) -> float:
        return 5.0 if method == "open" and key == 2 else 0.0

    table = Table(Engines(one_of("gold")), pause, capacity=3)
    assert [one.drop_reason for one in run(two_groups())] == [None, None]
