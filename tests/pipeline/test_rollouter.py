"""Producing ahead: bounds hold under any timing, nothing is lost, and every wait ends with what it waited for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.distributed.protocol import DataProto
from roll.pipeline.errors import RunError
from roll.pipeline.rollout_types import Meter
from roll.pipeline.rollouter import Rollouter, RolloutOptions
from roll.rollout.policy import PolicySettings, Ticket
from tests.distributed.env_workers import JumpingLoop

BATCH = 4


@dataclass
class Draft:
    """A prompt that stands for itself; its scores are what the producer was told."""

    number: int
    prompt: int
    oldest_version: int = 0
    scores: list[float] = field(default_factory=list)
    drop_reason: str | None = None


class Scripted:
    """Prompts take as many turns of the event loop as `turns` says, and fail or are dull where told."""

    work = ("generate", "reward")

    def __init__(self, turns: list[int], failing: set[int] = frozenset(), dull: set[int] = frozenset()) -> None:
        self.turns, self.failing, self.dull = turns, failing, dull
        self.drawn = self.version = self.running = self.validations = 0
        self.last_failure: str | None = "the oven was cold"
        self.closed = False
        self.validating = False

    def draw(self, tickets: Iterable[Ticket]) -> list[Draft]:
        assert not self.validating, "a prompt was submitted while validating"
        drafts = [Draft(ticket.number, self.drawn + i) for i, ticket in enumerate(tickets)]
        self.drawn += len(drafts)
        return drafts

    async def produce(self, items: list[Draft], meter: Meter) -> None:
        with meter.measure("generate"):
            self.running += len(items)
            for item in items:
                item.oldest_version = self.version
            for _ in range(max(self.turns[item.number % len(self.turns)] for item in items)):
                await asyncio.sleep(0)
            self.running -= len(items)
        for item in items:
            item.scores = [0.0, 0.0 if item.number in self.dull else 1.0]
            item.drop_reason = "generation_failed" if item.number in self.failing else None

    def filtered(self, item: Draft) -> tuple[str, str] | None:
        return ("filtered_no_spread", "rewards.dull") if item.number in self.dull else None

    async def validate(self, version: int) -> dict[str, float]:
        self.validating = True
        for _ in range(5):
            await asyncio.sleep(0)
        self.validating = False
        return {"val/score": float(version)}

    def batch(self, items: list[Draft]) -> DataProto:
        return DataProto.from_dict({"prompts": torch.tensor([item.prompt for item in items])})

    def metrics(self, items: list[Draft], version: int) -> dict[str, float]:
        return {"rollout/response_length_mean": 1.0, "age": max(version - item.oldest_version for item in items)}

    def encode(self, item: Draft) -> Any:
        return vars(item)

    def decode(self, state: Any) -> Draft:
        return Draft(**state)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]

    def close(self) -> None:
        self.closed = True


OPTIONS = RolloutOptions(
    background=True,
    together=False,
    samples_per_item=2,
    failure_rate=1.0,
    resample_factor=2.0,
    report_s=0.05,
    deadline_s=5.0,
    interval_s=0.0,
    stale_from=3,
)


def rollouter(producer: Scripted, ratio: float, steps: int, **options: Any) -> Rollouter[Draft]:
    bounds = PolicySettings(batch_size=BATCH, ratio=ratio, total=steps * BATCH)
    return Rollouter(producer, bounds, replace(OPTIONS, **options))


async def train(made: Rollouter[Draft], producer: Scripted, steps: range, pause: int = 1) -> list[list[int]]:
    """Takes a batch, learns for some turns, publishes; the prompts of every batch."""
    await made.advance(steps.start)
    batches = []
    for step in steps:
        batch = await made.take()
        assert batch.metrics["age"] <= made.policy.settings.versions_ahead
        batches.append(batch.data.batch["prompts"].tolist())
        for _ in range(pause):
            await asyncio.sleep(0)
        producer.version = step + 1
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
        producer = Scripted(turns, failing)
        made = rollouter(producer, ratio, steps=6)
        batches = await train(made, producer, range(6), pause)
        used = [prompt for batch in batches for prompt in batch]
        assert len(set(used)) == len(used) == 6 * BATCH
        ledger = made.policy.ledger
        ledger.check()
        assert (ledger.consumed, ledger.buffered, ledger.in_flight) == (6 * BATCH, 0, 0)
        assert ledger.submitted == producer.drawn == 6 * BATCH + ledger.dropped_total
        await made.close()
        assert producer.closed

    asyncio.run(run())


@pytest.mark.parametrize("together", [True, False])
def test_at_ratio_0_the_background_gives_the_batches_of_the_inline_way(together):
    async def batches(background: bool) -> list[list[int]]:
        producer = Scripted([3, 1, 7], failing={2, 5, 9}, dull={6})
        made = rollouter(producer, 0.0, steps=4, background=background, together=together)
        found = await train(made, producer, range(4))
        await made.close()
        return found

    assert asyncio.run(batches(True)) == asyncio.run(batches(False))


@pytest.mark.parametrize("ratio", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("cut", [0, 3, 9])
def test_what_was_buffered_or_running_survives_a_restart(ratio, cut):
    async def run() -> None:
        producer = Scripted([2, 25, 4])
        made = rollouter(producer, ratio, steps=6)
        before = await train(made, producer, range(3))
        for _ in range(cut):
            await asyncio.sleep(0)
        state = json.loads(json.dumps(await made.state_dict()))
        await made.close()
        again = Scripted([2, 25, 4])
        again.version = 3
        restored = rollouter(again, ratio, steps=6)
        await restored.load_state_dict(state)
        after = await train(restored, again, range(3, 6))
        used = [prompt for batch in [*before, *after] for prompt in batch]
        assert sorted(used) == list(range(6 * BATCH))
        restored.policy.ledger.check()
        assert restored.policy.ledger.consumed == restored.policy.ledger.submitted == 6 * BATCH
        await restored.close()

    asyncio.run(run())


def test_a_checkpoint_of_batches_of_another_size_is_refused_with_a_reason():
    async def run() -> None:
        state = await rollouter(Scripted([1]), 1.0, steps=6).state_dict()
        larger = Rollouter(Scripted([1]), PolicySettings(batch_size=2 * BATCH, ratio=1.0), OPTIONS)
        with pytest.raises(RunError, match="resume_from_checkpoint: batch_size: 8 cannot go on from a checkpoint"):
            await larger.load_state_dict(state)

    asyncio.run(run())


def test_validation_holds_submission_and_lets_it_go_again():
    """The prompts that run when it begins fail before it ends, so that there is room to submit into."""

    async def run() -> None:
        producer = Scripted([1] * BATCH + [3] * BATCH, failing=set(range(BATCH, 2 * BATCH)))
        made = rollouter(producer, 1.0, steps=3)
        await made.advance(0)
        await made.take()
        drawn = producer.drawn
        metrics = await made.validate(0)
        assert metrics["val/score"] == 0.0 and metrics["val/seconds"] >= 0
        assert made.policy.ledger.dropped == {"generation_failed": BATCH}
        assert producer.drawn == drawn and made.policy.admissible() == BATCH
        await made.take()
        assert producer.drawn > drawn
        await made.close()

    asyncio.run(run())


class Timed(Scripted):
    """Generating takes 3 s on a clock of its own, validating 2."""

    now = 0.0

    async def produce(self, items: list[Draft], meter: Meter) -> None:
        with meter.measure("generate"):
            self.now += 3.0
        await super().produce(items, meter)

    async def validate(self, version: int) -> dict[str, float]:
        self.now += 2.0
        return {}


def test_the_engines_idle_while_training_and_not_while_validating():
    async def run() -> list[float]:
        producer, shares = Timed([1]), []
        bounds = PolicySettings(batch_size=BATCH, ratio=0, total=3 * BATCH)
        made = Rollouter(producer, bounds, replace(OPTIONS, background=False, together=True), lambda: producer.now)
        producer.now = 100.0
        for version in range(3):
            producer.version = version
            await made.advance(version)
            shares.append((await made.take()).metrics["throughput/rollout_idle"])
            producer.now += 5.0
            with made.measure("generate"):
                await made.validate(version)
        return shares

    assert asyncio.run(run()) == pytest.approx([0.0, 0.5, 0.5])


def error_of(producer: Scripted, ratio: float = 1.0, **options: Any) -> str:
    async def run() -> None:
        made = rollouter(producer, ratio, steps=6, **options)
        try:
            await train(made, producer, range(6))
        finally:
            await made.close()

    with pytest.raises(RunError) as caught:
        asyncio.run(run())
    return str(caught.value)


@pytest.mark.parametrize("background", [True, False])
def test_too_many_failures_end_the_run_with_the_last_cause(background):
    said = error_of(Scripted([1], failing=set(range(100))), ratio=float(background), background=background)
    assert "generation_failed" in said and "max_failure_rate" in said and "the oven was cold" in said


@pytest.mark.parametrize("background", [True, False])
def test_a_filter_that_starves_the_batch_is_named(background):
    said = error_of(Scripted([1], dull=set(range(1000))), ratio=float(background), background=background)
    assert "rewards.dull: filtered_no_spread starves the batch" in said and "max_resample_factor 2" in said


@pytest.mark.parametrize("background", [True, False])
def test_a_batch_that_never_comes_ends_the_run_with_what_it_waited_for(caplog, background):
    said = error_of(Scripted([10**9]), ratio=float(background), deadline_s=0.2, background=background)
    running = 8 if background else 4
    assert "no batch within 0.2 s (batch_deadline_s)" in said
    assert f"0 of 4 prompts are ready, {running} are running; it waits for {running} (prompt 0 of version 0" in said
    assert "still waiting for a batch" in caplog.text


def test_an_exception_while_producing_reaches_whoever_waits():
    class Broken(Scripted):
        async def produce(self, items: list[Draft], meter: Meter) -> None:
            raise RunError("the engine died")

    assert error_of(Broken([1])) == "the engine died"


def test_failures_are_a_share_of_all_that_is_made_ahead():
    async def run(failing: set[int]) -> None:
        producer = Scripted([1], failing=failing)
        made = rollouter(producer, 4.0, steps=6, failure_rate=0.25)
        await made.advance(0)
        for _ in range(200):
            await asyncio.sleep(0)
        assert made.policy.ledger.buffered == 5 * BATCH
        try:
            await made.take()
        finally:
            await made.close()

    asyncio.run(run({3, 9, 14, 19}))
    with pytest.raises(RunError, match="more than max_failure_rate 0.25 allows of"):
        asyncio.run(run({3, 4}))


@pytest.mark.parametrize(("rate", "failing", "allowed"), [(0.1, {1}, True), (0.1, {1, 2}, False), (0.0, {1}, False)])
def test_a_rate_above_nought_allows_one_failure_however_small_the_batch(rate, failing, allowed):
    async def run() -> None:
        made = rollouter(Scripted([1], failing=failing), 0.0, steps=1, background=False, failure_rate=rate)
        await made.advance(0)
        await made.take()

    if allowed:
        asyncio.run(run())
    else:
        with pytest.raises(RunError, match="more than max_failure_rate"):
            asyncio.run(run())


@pytest.mark.parametrize("background", [True, False])
def test_an_exception_while_drawing_prompts_reaches_whoever_waits(background):
    class Empty(Scripted):
        def draw(self, tickets: Iterable[Ticket]) -> list[Draft]:
            raise RunError("there are no prompts")

    assert error_of(Empty([1]), ratio=float(background), background=background) == "there are no prompts"


def test_a_checkpoint_taken_after_a_filter_starved_the_batch_can_be_restored():
    async def run() -> None:
        producer = Scripted([1], dull=set(range(4, 1000)))
        made = rollouter(producer, 1.0, steps=6)
        await made.advance(0)
        for _ in range(200):
            await asyncio.sleep(0)
        assert "starves the batch" in ((await made.health())["error"] or "")
        state = json.loads(json.dumps(await made.state_dict()))
        await made.close()
        restored = rollouter(Scripted([1]), 1.0, steps=6)
        await restored.load_state_dict(state)
        assert len(await train(restored, restored._producer, range(1))) == 1
        await restored.close()

    asyncio.run(run())


def test_submissions_keep_their_distance():
    class Noting(Scripted):
        times: list[float] = []

        def draw(self, tickets: Iterable[Ticket]) -> list[Draft]:
            self.times.append(asyncio.get_running_loop().time())
            return super().draw(tickets)

    async def run() -> None:
        producer, bounds = Noting([1]), PolicySettings(batch_size=BATCH, ratio=2.0, total=4 * BATCH)
        clock = asyncio.get_running_loop().time
        made = Rollouter(producer, bounds, replace(OPTIONS, interval_s=0.05), clock)
        await train(made, producer, range(4))
        await made.close()
        gaps = [later - earlier for earlier, later in zip(producer.times, producer.times[1:], strict=False)]
        assert len(gaps) >= 3 and min(gaps) == pytest.approx(0.05)

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:  # real time would add what the machine does beside
        runner.run(run())


def test_health_says_what_is_ready_what_runs_and_since_when_nothing_moved():
    async def run() -> None:
        now = [100.0]
        producer = Scripted(turns=[1, 1, 1, 10**9])
        made = Rollouter(producer, PolicySettings(batch_size=BATCH, ratio=0, total=BATCH), OPTIONS, lambda: now[0])
        made.policy.hold("validation")
        assert (await made.health())["held_by"] == ["validation"]
        made.policy.release("validation")
        await made.advance(0)
        for _ in range(20):
            await asyncio.sleep(0)
        now[0] += 7
        health = await made.health()
        assert json.loads(json.dumps(health)) == {
            "buffered": 3,
            "in_flight": 1,
            "awaited": 1,
            "held_by": [],
            "seconds_since_progress": 7.0,
            "error": None,
        }
        await made.close()

    asyncio.run(run())
