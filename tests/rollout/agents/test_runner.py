"""Groups of episodes: which are kept, what is cancelled, what drops a group; timing changes no trajectory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.base.timers import StepClock
from roll.configs.pipeline import role_seed
from roll.rollout.agents.runner import run_all
from roll.rollout.types import NOT_SAMPLED, GenerateRequest, Group, SamplingParams
from tests.rollout.agents.agent_setup import (
    SAMPLING,
    STEP_TIMEOUT_S,
    Engines,
    Setup,
    in_turn,
    one_of,
    run,
    task,
    tokenizer,
)

WALK = task(max_steps=3)
ANSWERS = one_of("left", "right", "gold", "fall", "x" * 40)


def group(number: int = 0) -> Group:
    return Group(number, "Steps", role_seed(5, "env", number), f"Steps-{number}")


def member(request: GenerateRequest) -> int:
    return int(request.request_id.split("-")[2])


def by_member(*texts: str | None) -> Any:
    return lambda request: texts[member(request)]


async def run_and_check(
    setup: Setup, groups: list[Group], group_size: int, redundancy: int = 0, lockstep: bool = False
):
    """Runs groups, either way, and checks that nothing is left."""
    try:
        return await run_groups(setup, groups, group_size, redundancy, lockstep)
    finally:
        await nothing_left(setup)


async def run_groups(
    setup: Setup,
    groups: list[Group],
    group_size: int,
    redundancy: int = 0,
    lockstep: bool = False,
    sampling: SamplingParams = SAMPLING,
):
    """Runs groups, either way."""
    runner, count = setup.runner, group_size + redundancy
    runs = [(one, runner.episodes(one, "train", WALK, count, 3, sampling)) for one in groups]
    places = asyncio.Semaphore(count * len(groups))
    if lockstep:
        await runner.run_lockstep(runs, group_size, StepClock())
    else:
        await run_all(runner.run_group(one, episodes, group_size, StepClock(), places) for one, episodes in runs)
    return groups


async def nothing_left(setup: Setup) -> None:
    await setup.all_left()
    await asyncio.sleep(0)  # a cancelled call that ends
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert setup.open == 0


@pytest.mark.parametrize("lockstep", [False, True])
def test_episodes_of_a_group_share_the_environment_and_have_their_own_seeds(lockstep):
    engines = Engines(one_of("left"))
    first, second = run(run_and_check(Setup(engines), [group(0), group(1)], 2, lockstep=lockstep))
    seen = [{trajectory.turns[0].observation for trajectory in each.trajectories} for each in (first, second)]
    assert all(len(each) == 1 for each in seen) and seen[0] != seen[1]
    assert (
        len({request.seed for request in engines.requests})
        == len({r.request_id for r in engines.requests})
        == 2 * 2 * 3
    )


def trajectories(seconds: list[int], lockstep: bool, engines: int = 1) -> list[Group]:
    """Three groups, with answers and environments that take their time."""
    slow = Engines(ANSWERS, lambda request: float(seconds[len(request.request_id) % len(seconds)]), engines)
    pause = [float(second) / 4 for second in seconds]
    setup = Setup(slow, lambda method, key, *args: pause[key % len(pause)] if method == "step" else 0.0)
    return run(run_and_check(setup, [group(number) for number in range(3)], 4, lockstep=lockstep))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=7), st.integers(1, 3))
def test_lockstep_and_any_timing_give_the_same_trajectories(seconds, engines):
    assert trajectories(seconds, lockstep=False, engines=engines) == trajectories([0], lockstep=True)


def test_lockstep_sends_the_requests_of_a_turn_in_one_call():
    engines = Engines(ANSWERS)
    groups = run(run_and_check(Setup(engines), [group(number) for number in range(3)], 4, lockstep=True))
    turns = [len(trajectory.turns) for each in groups for trajectory in each.trajectories]
    assert [len(call) for call in engines.calls] == [sum(count > turn for count in turns) for turn in range(max(turns))]


@settings(max_examples=40, deadline=None)
@given(st.permutations([1.0, 2.0, 3.0, 4.0, 5.0]))
def test_the_first_to_succeed_are_kept_in_the_order_of_their_start(seconds):
    engines = Engines(by_member(*(f"gold {index}" for index in range(5))), lambda request: seconds[member(request)])
    [one] = run(run_and_check(Setup(engines), [group()], 3, redundancy=2))
    first = sorted(range(5), key=lambda index: seconds[index])[:3]
    assert [trajectory.turns[0].text for trajectory in one.trajectories] == [f"gold {index}" for index in sorted(first)]


def test_of_episodes_that_succeed_at_one_time_the_first_are_kept():
    """The environments of members 1 and 2 answer before that of 0, all without time passing."""
    setup = Setup(Engines(by_member("gold 0", "gold 1", "gold 2")))
    turns = {0: 9, 1: 0, 2: 0}

    async def answer(request, original=setup.engines.answer):
        for _ in range(turns[member(request)]):
            await asyncio.sleep(0)
        return await original(request)

    setup.engines.answer = answer
    [one] = run(run_and_check(setup, [group()], 2, redundancy=1))
    assert [trajectory.turns[0].text for trajectory in one.trajectories] == ["gold 1", "gold 2"]


def test_a_cancelled_episode_sends_no_more_requests():
    engines = Engines(
        lambda request: "left" if member(request) == 2 else "gold", lambda r: 5.0 if member(r) == 2 else 1.0
    )
    [one] = run(run_and_check(Setup(engines), [group()], 2, redundancy=1))
    assert one.drop_reason is None and len(one.trajectories) == 2
    assert [request.request_id for request in engines.requests if member(request) == 2] == ["train-0-2-0"]


@pytest.mark.parametrize("slow", ["step", "close"])
def test_a_complete_group_does_not_wait_for_its_other_environments(slow):
    """Member 2 hangs, or all close slowly; the next group runs nevertheless."""
    pause = {"step": lambda key: 100.0 * (key == 2), "close": lambda key: STEP_TIMEOUT_S - 1}[slow]
    setup = Setup(Engines(one_of("gold")), lambda method, key, *args: pause(key) if method == slow else 0.0, capacity=3)

    async def scenario() -> float:
        await run_groups(setup, [one := group()], 2, redundancy=1)
        seconds = asyncio.get_running_loop().time()
        await run_groups(setup, [other := group(1)], 2)
        assert one.drop_reason is None and other.drop_reason is None
        await setup.all_left()
        return seconds

    assert run(scenario()) < 1


def test_lockstep_keeps_the_first_successful_episodes():
    setup = Setup(Engines(by_member("gold", "boom", "gold", "gold")))
    [one] = run(run_and_check(setup, [group()], 2, redundancy=2, lockstep=True))
    assert one.drop_reason is None and len(one.trajectories) == 2 and one.failure is None


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize(
    "text, reason, message",
    [
        (None, "generation_failed", "out of memory"),
        ("boom", "env_raised", ": ArithmeticError: the ground gave way"),
        ("treasure", "env_raised", "turn 2: tests/rollout/agents/agent_setup.py:"),
        ("treasure", "env_raised", "Steps.act: the rewards of the episode add up to 1.2e+18, it must be at most 1e+18"),
        ("hang", "env_hung", "turn 1: no answer within env_step_timeout_s = 10"),
    ],
)
def test_a_failure_drops_the_whole_group_and_no_other(lockstep, text, reason, message):
    def pause(method: str, key: int, *args: Any) -> float:
        return 2 * STEP_TIMEOUT_S if args == ("hang",) else 0.0

    def respond(request: GenerateRequest) -> str | None:
        return text if request.request_id.startswith("train-1-2") else "gold"

    setup = Setup(Engines(respond), pause)
    whole, failed = run(run_groups(setup, [group(0), group(1)], 3, lockstep=lockstep))
    assert (whole.drop_reason, len(whole.trajectories)) == (None, 3)
    assert (failed.drop_reason, failed.trajectories) == (reason, [])
    assert message in failed.failure


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_first_message_without_room_drops_the_group(lockstep):
    setup = Setup(Engines(one_of("gold")), sequence_length=10)
    [one] = run(run_and_check(setup, [group()], 2, lockstep=lockstep))
    assert one.drop_reason == "prompt_too_long" and not setup.engines.calls


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_trajectory_past_its_deadline_drops_the_group(lockstep):
    seconds = Engines(one_of("left"), lambda request: 9.0 if member(request) == 1 else 0.0)
    [one] = run(run_and_check(Setup(seconds, timeout_s=20.0), [group()], 2, lockstep=lockstep))
    assert one.drop_reason == "trajectory_timeout"
    assert one.failure == "a trajectory was not over after 20 s (trajectory_timeout_s)"
    [one] = run(run_and_check(Setup(seconds, timeout_s=28.0), [group()], 2, lockstep=lockstep))
    assert one.drop_reason is None


def test_failures_up_to_the_redundancy_cost_nothing_and_one_more_ends_the_group_at_once():
    def seconds(request: GenerateRequest) -> float:
        return 50.0 if member(request) == 3 else 1.0

    setup = Setup(Engines(by_member("gold", None, "gold", "gold"), seconds))
    [one] = run(run_and_check(setup, [group()], 3, redundancy=1))
    assert one.drop_reason is None and len(one.trajectories) == 3

    async def timed() -> float:
        [one] = await run_and_check(setup, [group()], 3, redundancy=1)
        assert one.drop_reason == "generation_failed"
        return asyncio.get_running_loop().time()

    setup = Setup(Engines(by_member("gold", None, None, "gold"), seconds))
    assert run(timed()) == 1.0


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_bug_is_raised_and_nothing_is_left_running(lockstep):
    def respond(request: GenerateRequest) -> str:
        return str(1 // 0) if request.request_id == "train-1-1-1" else "left"

    setup = Setup(Engines(respond, lambda request: float(member(request))), lambda *call: 0.5)
    with pytest.raises(ZeroDivisionError):
        run(run_and_check(setup, [group(0), group(1)], 3, lockstep=lockstep))


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_bug_while_environments_open_is_raised_and_nothing_is_left_running(lockstep):
    async def first_message_breaks() -> None:
        groups = [group(0)]
        runs = [(one, setup.runner.episodes(one, "train", WALK, 3, 3, SAMPLING)) for one in groups]
        runs[0][1][1]._chat = None
        if lockstep:
            await setup.runner.run_lockstep(runs, 3, StepClock())
        else:
            await setup.runner.run_group(*runs[0], 3, StepClock(), asyncio.Semaphore(3))

    async def then_settles() -> None:
        with pytest.raises(AttributeError, match="start"):
            await first_message_breaks()
        await asyncio.sleep(5.0)
        await nothing_left(setup)

    setup = Setup(Engines(one_of("gold")), lambda method, key, *args: float(key) if method == "open" else 0.0)
    run(then_settles())


@pytest.mark.parametrize("lockstep", [False, True])
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40))
def test_cancelling_at_any_time_closes_everything(lockstep, halves):
    async def cancelled() -> None:
        running = asyncio.create_task(run_groups(setup, [group(0), group(1)], 3, lockstep=lockstep))
        await asyncio.sleep(halves / 2)
        running.cancel()
        await asyncio.wait([running])
        await asyncio.sleep(2.0)  # an environment that was opening when it was cancelled
        await nothing_left(setup)

    setup = Setup(Engines(one_of("left"), lambda request: 2.0 + member(request)), lambda *call: 1.0)
    run(cancelled())


@pytest.mark.parametrize("members", [1, 4])
def test_groups_that_start_at_one_time_are_spread_over_the_engines(members):
    engines = Engines(one_of("left"), lambda request: 1.0, world_size=3)
    run(run_and_check(Setup(engines), [group(number) for number in range(6)], members))
    assert engines.by_engine == {engine: 2 * members * 3 for engine in range(3)}


def test_a_group_stays_on_one_engine():
    class Noting(Engines):
        async def generate(self, rank, requests):
            homes.setdefault(requests[0].request_id.split("-")[1], set()).add(rank)
            return await super().generate(rank, requests)

    homes: dict[str, set[int]] = {}
    engines = Noting(ANSWERS, lambda request: float(member(request) + 1), world_size=3)
    run(run_and_check(Setup(engines), [group(number) for number in range(7)], 4))
    assert len(homes) == 7 and all(len(ranks) == 1 for ranks in homes.values())


def test_environments_cancelled_while_they_open_free_their_slot():
    """Member 2 of the first group is still opening when the group is complete; the next group needs its slot."""

    async def two_groups() -> list[Group]:
        groups, runner = [group(0), group(1)], setup.runner
        for one in groups:
            episodes = runner.episodes(one, "train", WALK, 3, 3, SAMPLING)
            await runner.run_group(one, episodes, 2, StepClock(), asyncio.Semaphore(3))
        await asyncio.sleep(10.0)
        await nothing_left(setup)
        return groups

    def pause(method: str, key: int, *args: Any) -> float:
        return 5.0 if method == "open" and key == 2 else 0.0

    setup = Setup(Engines(one_of("gold")), pause, capacity=3)
    assert [one.drop_reason for one in run(two_groups())] == [None, None]


@pytest.mark.parametrize("lockstep", [False, True])
def test_an_environment_reads_a_response_up_to_its_stop_string(lockstep):
    """The token in which it ends may go on; its ids are kept as they were sampled."""
    sampling = replace(SAMPLING, stop_strings=("gold",))
    [one] = run(run_groups(Setup(Engines(one_of("golden"))), [group()], 1, lockstep=lockstep, sampling=sampling))
    [turn] = one.trajectories[0].turns
    assert (turn.text, turn.reward, one.trajectories[0].stop) == ("gold", 1.0, "terminated")
    assert tokenizer().decode(one.trajectories[0].ids[turn.start : turn.end - 1]) == "golden"


CALLED = '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>'


def test_a_tool_call_is_a_turn_whose_result_is_context_and_is_not_trained():
    """The call ends with a stop string in the middle of its text; what the tool returned has no log-prob."""
    engines = Engines(in_turn(CALLED, "gold"))
    setup, what = Setup(engines), task(max_steps=3, max_tokens=99, tools={"python": {}})
    sampling = replace(SAMPLING, max_new_tokens=99, stop_strings=("</tool_call>",))
    episodes = setup.runner.episodes(one := group(), "train", what, 1, 3, sampling)
    run(setup.runner.run_lockstep([(one, episodes)], 1, StepClock()))
    [trajectory] = one.trajectories
    call, answer = trajectory.turns
    assert (call.text, call.reward, call.metrics) == (CALLED, 0.0, {"tool_calls": 1.0, "tool_errors": 0.0})
    assert answer.observation == "<tool_response>\n42\n</tool_response>" and answer.reward == 1.0
    between = trajectory.ids[call.end : answer.start]
    assert "<tool_response>\n42\n</tool_response>" in tokenizer().decode(between)
    assert set(trajectory.versions[call.end : answer.start]) == {NOT_SAMPLED}
    sampled = [*trajectory.ids[call.start : call.end], *trajectory.ids[answer.start : answer.end]]
    assert tokenizer().decode(sampled, skip_special_tokens=True) == CALLED + "gold"
    assert one.generated_tokens == len(sampled)
    assert trajectory.metrics == {"tool_calls": 1.0, "tool_errors": 0.0, "letters": 4.0, "gold": 1.0}
