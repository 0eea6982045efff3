"""Generation ahead of training: bounds hold under any timing, no prompt is lost, waits name what they wait for."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.base.errors import RunError
from roll.base.timers import Timer
from roll.configs.asynchronous import AsyncTrainingConfig
from roll.configs.run_options import RolloutOptions
from roll.rollout.admission import AdmissionSettings
from roll.rollout.engine_pool import EnginePool
from roll.rollout.ledger import PromptRequest
from roll.rollout.recording import RolloutRecording
from roll.rollout.rollout_worker import Purpose, RolloutWorker
from roll.rollout.rollouter import Rollouter
from roll.rollout.source import SampleBatch
from roll.rollout.types import GenerateResult, Group, Trajectory
from roll.trackers.recording import GROUPS_FILE, Recording
from tests.usercode.fake_processes import JumpingLoop

BATCH = 4


class Scripted(RolloutWorker):
    """Groups of two samples take `turns` turns of the event loop, and fail or are filtered as given.

    The index of a prompt is its `problem`.
    """

    work = ("generate", "reward")

    def __init__(self, turns: list[int], failing: Collection[int] = (), filtered: Collection[int] = ()) -> None:
        super().__init__(samples_multiple=1, staleness_threshold=3)
        self.turns, self.failing, self.filtered = turns, failing, filtered
        self.drawn = self.version = 0
        self.closed = self.validating = False

    def draw(self, requests: Sequence[PromptRequest]) -> list[Group]:
        assert not (self.validating and requests), "a prompt was submitted during a validation"
        groups = [Group(request.number, "math", self.drawn + i, "") for i, request in enumerate(requests)]
        self.drawn += len(groups)
        return groups

    def validation_groups(self) -> list[Group]:
        return []

    async def generate(self, groups: Sequence[Group], purpose: Purpose, timer: Timer) -> None:
        with timer.measure("generate"):
            versions = [self.version for _ in groups]
            for _ in range(max(self.turns[group.number % len(self.turns)] for group in groups)):
                await asyncio.sleep(0)
        for group, version in zip(groups, versions, strict=True):
            result = GenerateResult("r", [5], [-1.0], [version], "stop")
            group.trajectories = [Trajectory.of_response([1, group.problem + 1], result, "") for _ in range(2)]
            if group.number in self.failing:
                group.drop("generation_failed", "out of memory")

    def filter_reason(self, group: Group) -> tuple[str, str] | None:
        return ("filtered_zero_variance", "rewards.dull") if group.number in self.filtered else None

    async def validate(self) -> dict[str, float]:
        self.validating = True
        for _ in range(5):
            await asyncio.sleep(0)
        self.validating = False
        return {"val/score": float(self.version)}

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]

    def close(self) -> None:
        self.closed = True


def prompts_of(batch: SampleBatch) -> list[int]:
    """Index of the prompt of each group."""
    return [ids[1] - 1 for ids in batch.data.batch["input_ids"].tolist()][::2]


def options(background: bool = True, rate: float = 1.0, deterministic: bool = False, **waits: float) -> RolloutOptions:
    """Options for groups of two samples; `waits` are keys of `async_training`."""
    kind = "actor" if background else "inline"
    waits = {"batch_timeout_s": 0.05, "batch_deadline_s": 5.0, **waits}
    return RolloutOptions(
        num_return_sequences_in_group=2,
        max_failure_rate=rate,
        max_resample_factor=2.0,
        deterministic=deterministic,
        async_training=AsyncTrainingConfig(rollouter=kind, **waits),
    )


def rollouter(worker: Scripted, ratio: float, steps: int, **changed: Any) -> Rollouter:
    bounds = AdmissionSettings(batch_size=BATCH, ratio=ratio, total=steps * BATCH)
    return Rollouter(worker, bounds, options(**changed))


async def train(made: Rollouter, worker: Scripted, steps: range, pause: int = 1) -> list[list[int]]:
    """Takes batches and updates the weights after some turns of the event loop; the prompts of every batch."""
    await made.advance(steps.start)
    batches = []
    for step in steps:
        batch = await made.next_batch()
        assert batch.metrics["staleness/max"] <= made.admission.settings.versions_ahead
        batches.append(prompts_of(batch))
        for _ in range(pause):
            await asyncio.sleep(0)
        worker.version = step + 1
        await made.advance(step + 1)
    return batches


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0.0, 0.5, 1.0, 2.0, 2.7]),
    st.lists(st.integers(0, 30), min_size=1, max_size=11),
    st.sets(st.integers(0, 30), max_size=4),
    st.integers(0, 20),
)
def test_under_any_timing_every_prompt_is_used_once_and_none_is_too_old(ratio, turns, failing, pause):
    async def run() -> None:
        worker = Scripted(turns, failing)
        made = rollouter(worker, ratio, steps=6)
        batches = await train(made, worker, range(6), pause)
        used = [prompt for batch in batches for prompt in batch]
        assert len(set(used)) == len(used) == 6 * BATCH
        ledger = made.admission.ledger
        ledger.check()
        assert (ledger.consumed, ledger.buffered, ledger.in_flight) == (6 * BATCH, 0, 0)
        assert ledger.submitted == worker.drawn == 6 * BATCH + ledger.dropped_total
        await made.close()
        assert worker.closed

    asyncio.run(run())


@pytest.mark.parametrize("deterministic", [True, False])
def test_at_ratio_0_background_and_inline_give_the_same_batches(deterministic):
    async def batches(background: bool) -> list[list[int]]:
        worker = Scripted([3, 1, 7], failing={2, 5, 9}, filtered={6})
        made = rollouter(worker, 0.0, steps=4, background=background, deterministic=deterministic)
        found = await train(made, worker, range(4))
        await made.close()
        return found

    assert asyncio.run(batches(True)) == asyncio.run(batches(False))


@pytest.mark.parametrize("ratio", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("cut", [0, 3, 9])
def test_buffered_and_running_prompts_survive_a_restart(ratio, cut):
    async def run() -> None:
        worker = Scripted([2, 25, 4])
        made = rollouter(worker, ratio, steps=6)
        before = await train(made, worker, range(3))
        for _ in range(cut):
            await asyncio.sleep(0)
        state = json.loads(json.dumps(await made.state_dict()))
        await made.close()
        again = Scripted([2, 25, 4])
        again.version = 3
        restored = rollouter(again, ratio, steps=6)
        await restored.load_state_dict(state)
        versions = {number: request.version for number, request in restored.admission._running.items()}
        assert {group.number: group.version for group in restored._to_regenerate} == versions
        after = await train(restored, again, range(3, 6))
        used = [prompt for batch in [*before, *after] for prompt in batch]
        assert sorted(used) == list(range(6 * BATCH))
        restored.admission.ledger.check()
        assert restored.admission.ledger.consumed == restored.admission.ledger.submitted == 6 * BATCH
        await restored.close()

    asyncio.run(run())


class OfTwoPolicies(Scripted):
    """Prompts of two policies in turn."""

    def policy_of(self, group: Group) -> str:
        return ("math", "code")[group.problem % 2]


@pytest.mark.parametrize("ratio", [0.0, 1.0, 2.5])
def test_ledgers_of_policies_add_up_to_that_of_the_run_also_after_a_restart(ratio):
    def check(made: Rollouter) -> None:
        run, own = made.admission.ledger, made._ledgers
        for count in ("submitted", "consumed", "buffered", "in_flight"):
            assert sum(getattr(each, count) for each in own.values()) == getattr(run, count)
        assert sum((each.dropped for each in own.values()), Counter()) == run.dropped

    async def run() -> None:
        worker = OfTwoPolicies([2, 25, 4], failing=[3], filtered=[5, 6])
        made = rollouter(worker, ratio, steps=6)
        await train(made, worker, range(3))
        check(made)
        state = json.loads(json.dumps(await made.state_dict()))
        await made.close()
        again = OfTwoPolicies([2, 25, 4])
        again.version = 3
        restored = rollouter(again, ratio, steps=6)
        await restored.load_state_dict(state)
        check(restored)
        await restored.advance(3)
        metrics = (await restored.next_batch()).metrics
        check(restored)
        assert metrics["math/ledger/consumed"] + metrics["code/ledger/consumed"] == metrics["ledger/consumed"]
        await restored.close()

    asyncio.run(run())


def test_a_checkpoint_of_batches_of_another_size_is_refused_with_a_reason():
    async def run() -> None:
        state = await rollouter(Scripted([1]), 1.0, steps=6).state_dict()
        larger = Rollouter(Scripted([1]), AdmissionSettings(batch_size=2 * BATCH, ratio=1.0), options())
        message = "resume_from_checkpoint: rollout_batch_size: batches of 8 prompts cannot continue from a checkpoint"
        with pytest.raises(RunError, match=message):
            await larger.load_state_dict(state)

    asyncio.run(run())


def test_validation_pauses_submission():
    """The prompts that run when it begins fail before it ends, so that new ones are admissible."""

    async def run() -> None:
        worker = Scripted([1] * BATCH + [3] * BATCH, failing=set(range(BATCH, 2 * BATCH)))
        made = rollouter(worker, 1.0, steps=3)
        await made.advance(0)
        await made.next_batch()
        drawn = worker.drawn
        metrics = await made.validate()
        assert metrics["val/score"] == 0.0 and metrics["val/seconds"] >= 0
        assert made.admission.ledger.dropped == {"generation_failed": BATCH}
        assert worker.drawn == drawn and made.admission.admissible() == BATCH
        await made.next_batch()
        assert worker.drawn > drawn
        await made.close()

    asyncio.run(run())


class Timed(Scripted):
    """Generating takes 3 s on its own clock, validating 2 s."""

    now = 0.0

    async def generate(self, groups: Sequence[Group], purpose: Purpose, timer: Timer) -> None:
        with timer.measure("generate"):
            self.now += 3.0
        await super().generate(groups, purpose, timer)

    async def validate(self) -> dict[str, float]:
        self.now += 2.0
        return {}


def test_the_engines_idle_while_training_and_not_while_validating():
    async def run() -> list[float]:
        worker, idle_fractions = Timed([1]), []
        bounds = AdmissionSettings(batch_size=BATCH, ratio=0, total=3 * BATCH)
        made = Rollouter(worker, bounds, options(background=False), lambda: worker.now)
        worker.now = 100.0
        for version in range(3):
            worker.version = version
            await made.advance(version)
            idle_fractions.append((await made.next_batch()).metrics["throughput/rollout_idle"])
            worker.now += 5.0
            with made.measure("generate"):
                await made.validate()
        return idle_fractions

    assert asyncio.run(run()) == pytest.approx([0.0, 0.5, 0.5])


class Waiting(Scripted):
    """A batch takes 10 s to generate on a wall clock that the test moves."""

    wall = 1000.0

    async def generate(self, groups: Sequence[Group], purpose: Purpose, timer: Timer) -> None:
        await super().generate(groups, purpose, timer)
        self.wall += 10.0 / BATCH


class NoEngines:
    """One engine, which is not asked."""

    world_size = 1


def test_samples_that_waited_too_long_for_the_trainer_are_dropped_counted_recorded_and_replaced(tmp_path):
    async def run() -> None:
        worker = Waiting([1])
        bounds = AdmissionSettings(batch_size=BATCH, ratio=1.0, total=3 * BATCH, max_age_s=60.0)
        recording = RolloutRecording(Recording(tmp_path), EnginePool(NoEngines(), 0, 1))
        made = Rollouter(worker, bounds, options(), wall_clock=lambda: worker.wall, recording=recording)
        await made.advance(0)
        first = await made.next_batch()
        assert prompts_of(first) == [0, 1, 2, 3] and first.metrics["dropped_expired_samples"] == 0
        while made.admission.ledger.buffered < BATCH:
            await asyncio.sleep(0)
        worker.wall += 100.0  # a slow step of the trainer
        worker.version = 1
        await made.advance(1)
        second = await made.next_batch()
        assert prompts_of(second) == [8, 9, 10, 11]
        assert second.metrics["dropped_expired_samples"] == second.metrics["queue/dropped_samples"] == 2 * BATCH
        assert second.metrics["ledger/dropped_expired"] == BATCH
        assert 0 < second.metrics["time/sample_age_mean"] <= second.metrics["time/sample_age_max"] <= 60
        made.admission.ledger.check()
        await made.close()

    asyncio.run(run())
    groups = [json.loads(line) for line in (tmp_path / GROUPS_FILE).read_text().splitlines()]
    ends = [(group["step"], group["number"], group.get("dropped", "consumed")) for group in groups]
    assert ends[:BATCH] == [(1, number, "consumed") for number in range(4)]
    assert ends[BATCH:] == [(2, n, "expired") for n in range(4, 8)] + [(2, n, "consumed") for n in range(8, 12)]


def test_a_limit_on_the_age_that_no_batch_can_meet_is_named_at_the_deadline():
    async def run() -> None:
        worker = Waiting([1])
        bounds = AdmissionSettings(batch_size=BATCH, ratio=1.0, total=3 * BATCH, max_age_s=1.0)
        made = Rollouter(worker, bounds, options(batch_deadline_s=0.2), wall_clock=lambda: worker.wall)
        await made.advance(0)
        try:
            await made.next_batch()
        finally:
            await made.close()

    with pytest.raises(RunError, match=r"no batch within 0.2 s .* so far were dropped for their age"):
        asyncio.run(run())


def error_of(worker: Scripted, ratio: float = 1.0, **options: Any) -> str:
    async def run() -> None:
        made = rollouter(worker, ratio, steps=6, **options)
        try:
            await train(made, worker, range(6))
        finally:
            await made.close()

    with pytest.raises(RunError) as caught:
        asyncio.run(run())
    return str(caught.value)


@pytest.mark.parametrize("background", [True, False])
def test_too_many_failures_end_the_run_with_the_last_cause(background):
    message = error_of(Scripted([1], failing=set(range(100))), ratio=float(background), background=background)
    assert "generation_failed" in message and "max_failure_rate" in message and "last cause: out of memory" in message


@pytest.mark.parametrize("background", [True, False])
def test_a_filter_that_starves_the_batch_is_named(background):
    message = error_of(Scripted([1], filtered=set(range(1000))), ratio=float(background), background=background)
    assert "rewards.dull: filtered_zero_variance starves the batch" in message and "max_resample_factor 2" in message


@pytest.mark.parametrize("background", [True, False])
def test_a_batch_that_is_never_ready_ends_the_run_and_names_the_prompts(caplog, background):
    message = error_of(Scripted([10**9]), ratio=float(background), batch_deadline_s=0.2, background=background)
    running = 8 if background else 4
    assert "no batch within 0.2 s (batch_deadline_s)" in message
    assert f"0 of 4 prompts are ready, {running} are running; it waits for {running} (prompt 0 of version 0" in message
    assert "still waiting for a batch" in caplog.text


def test_an_exception_in_generation_is_raised_by_next_batch():
    class Broken(Scripted):
        async def generate(self, groups: Sequence[Group], purpose: Purpose, timer: Timer) -> None:
            raise RunError("the engine died")

    assert error_of(Broken([1])) == "the engine died"


def test_the_failure_rate_is_a_share_of_all_completed_prompts():
    async def run(failing: set[int]) -> None:
        worker = Scripted([1], failing=failing)
        made = rollouter(worker, 4.0, steps=6, rate=0.25)
        await made.advance(0)
        for _ in range(200):
            await asyncio.sleep(0)
        assert made.admission.ledger.buffered == 5 * BATCH
        try:
            await made.next_batch()
        finally:
            await made.close()

    asyncio.run(run({3, 9, 14, 19}))
    with pytest.raises(
        RunError, match="more than max_failure_rate 0.25 allows of .*; fix it, or raise max_failure_rate$"
    ):
        asyncio.run(run({3, 4}))


@pytest.mark.parametrize(("rate", "failing", "allowed"), [(0.1, {1}, True), (0.1, {1, 2}, False), (0.0, {1}, False)])
def test_a_rate_above_0_allows_one_failure_in_a_small_batch(rate, failing, allowed):
    async def run() -> None:
        made = rollouter(Scripted([1], failing=failing), 0.0, steps=1, background=False, rate=rate)
        await made.advance(0)
        await made.next_batch()

    if allowed:
        asyncio.run(run())
    else:
        with pytest.raises(RunError, match="more than max_failure_rate"):
            asyncio.run(run())


@pytest.mark.parametrize("background", [True, False])
def test_an_exception_in_draw_is_raised_by_next_batch(background):
    class Empty(Scripted):
        def draw(self, requests: Sequence[PromptRequest]) -> list[Group]:
            raise RunError("there are no prompts")

    assert error_of(Empty([1]), ratio=float(background), background=background) == "there are no prompts"


def test_a_checkpoint_taken_after_a_filter_starved_the_batch_can_be_restored():
    async def run() -> None:
        worker = Scripted([1], filtered=set(range(4, 1000)))
        made = rollouter(worker, 1.0, steps=6)
        await made.advance(0)
        for _ in range(200):
            await asyncio.sleep(0)
        assert "starves the batch" in ((await made.health())["error"] or "")
        state = json.loads(json.dumps(await made.state_dict()))
        await made.close()
        restored = rollouter(Scripted([1]), 1.0, steps=6)
        await restored.load_state_dict(state)
        assert len(await train(restored, restored._worker, range(1))) == 1
        await restored.close()

    asyncio.run(run())


def test_submissions_keep_the_minimum_interval():
    class Noting(Scripted):
        times: list[float] = []

        def draw(self, requests: Sequence[PromptRequest]) -> list[Group]:
            self.times.append(asyncio.get_running_loop().time())
            return super().draw(requests)

    async def run() -> None:
        worker, bounds = Noting([1]), AdmissionSettings(batch_size=BATCH, ratio=2.0, total=4 * BATCH)
        clock = asyncio.get_running_loop().time
        made = Rollouter(worker, bounds, options(batch_generation_interval_s=0.05), clock)
        await train(made, worker, range(4))
        await made.close()
        gaps = [later - earlier for earlier, later in zip(worker.times, worker.times[1:], strict=False)]
        assert len(gaps) >= 3 and min(gaps) == pytest.approx(0.05)

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:  # real time would include other load of the machine
        runner.run(run())


def test_health_has_ready_running_and_blocking_prompts_and_seconds_without_progress():
    async def run() -> None:
        now = [100.0]
        worker = Scripted(turns=[1, 1, 1, 10**9])
        made = Rollouter(worker, AdmissionSettings(batch_size=BATCH, ratio=0, total=BATCH), options(), lambda: now[0])
        made.admission.pause("validation")
        assert (await made.health())["paused_for"] == ["validation"]
        made.admission.resume("validation")
        await made.advance(0)
        for _ in range(20):
            await asyncio.sleep(0)
        now[0] += 7
        health = await made.health()
        assert json.loads(json.dumps(health)) == {
            "buffered": 3,
            "in_flight": 1,
            "blocking": 1,
            "paused_for": [],
            "seconds_since_progress": 7.0,
            "error": None,
        }
        await made.close()

    asyncio.run(run())


@pytest.mark.parametrize("background", [False, True])
def test_a_rollouter_that_stops_takes_no_batch_and_its_state_has_every_prompt(background):
    """The batch that was waited for is in the state, in flight or finished, and is the next one after a restart."""

    async def go() -> dict[str, Any]:
        worker = Scripted([50])
        made = rollouter(worker, 1.0 if background else 0.0, 3, background=background)
        await made.advance(0)
        waiting = asyncio.create_task(made.next_batch())
        for _ in range(5):
            await asyncio.sleep(0)
        await made.stop()
        assert await waiting is None and await made.next_batch() is None
        state = await made.state_dict()
        await made.close()
        return state

    state = json.loads(json.dumps(asyncio.run(go())))
    assert state["policy"]["consumed"] == 0 and len(state["in_flight"]) >= BATCH

    async def resume() -> list[list[int]]:
        worker = Scripted([1])
        made = rollouter(worker, 1.0 if background else 0.0, 3, background=background)
        await made.load_state_dict(state)
        batches = await train(made, worker, range(3))
        await made.close()
        return batches

    assert sorted(sum(asyncio.run(resume()), [])) == list(range(3 * BATCH))
