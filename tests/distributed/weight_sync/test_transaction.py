"""A publish is whole or nothing: deadlines, retries, and engines that serve nothing until a publish succeeds.

The transport here exists to fail on demand; the real ones are tested in tests/integration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.distributed.remote_call import seconds_left
from roll.distributed.weight_sync.synchronizer import PublishError, Transaction, Transfer, VerificationError

STEPS = ("connect", "pause", "begin", "transfer", "end", "flush", "verify", "accept", "resume")


class FaultyTransport:
    """Records its steps; `faults` holds for each attempt the step that fails and how."""

    def __init__(self, faults: Sequence[tuple[str, str] | None]) -> None:
        self.faults, self.steps, self.attempt = list(faults), [], 0  # type: ignore[var-annotated]

    async def _step(self, name: str) -> None:
        self.steps.append(name)
        fault = self.faults[self.attempt] if self.attempt < len(self.faults) else None
        if fault is not None and fault[0] == name:
            if fault[1] == "hang":
                await asyncio.sleep(60)
            raise VerificationError(f"{name} broke")

    async def pause(self) -> None:
        await self._step("pause")

    async def begin(self, version: int) -> None:
        await self._step("begin")

    async def transfer(self, digest: bool) -> Transfer:
        await self._step("transfer")
        return Transfer(10, {"w": "1"} if digest else {})

    async def end(self, version: int) -> None:
        await self._step("end")

    async def flush(self) -> None:
        await self._step("flush")

    async def verify(self, checksums: dict[str, str]) -> None:
        assert checksums == {"w": "1"}
        await self._step("verify")

    async def accept(self) -> None:
        await self._step("accept")

    async def resume(self) -> None:
        await self._step("resume")

    async def connect(self) -> None:
        await self._step("connect")

    async def abandon(self) -> None:
        await self._step("abandon")
        self.attempt += 1

    async def give_up(self) -> None:
        await self._step("give_up")


def publish(transport: FaultyTransport, retries: int = 2, timeout_s: float = 5.0, verify: bool = True):
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    transaction = Transaction(transport, timeout_s, retries, 1.5, sleep)
    try:
        return asyncio.run(transaction.run(3, verify)), transaction, waits
    except PublishError as error:
        return error, transaction, waits


def test_a_publish_pauses_transfers_verifies_and_resumes_in_that_order() -> None:
    transport = FaultyTransport([])
    report, transaction, waits = publish(transport)
    assert transport.steps == list(STEPS)
    assert (report.bytes, report.verified, report.attempts, waits) == (10, True, 1, [])
    assert 0 < report.pause_seconds <= report.seconds and not transaction.dirty


def test_verification_is_left_out_when_not_due() -> None:
    transport = FaultyTransport([])
    publish(transport, verify=False)
    assert "verify" not in transport.steps


@settings(deadline=None)
@given(st.lists(st.sampled_from([None, *[(step, "raise") for step in STEPS]]), max_size=5), st.integers(0, 3))
def test_engines_resume_only_after_a_complete_attempt(faults: list[tuple[str, str] | None], retries: int) -> None:
    transport = FaultyTransport(faults)
    outcome, transaction, waits = publish(transport, retries)
    attempts = [attempt.split() for attempt in " ".join(transport.steps).split("abandon")]
    planned = [*faults, *[None] * (retries + 1)][: retries + 1]
    if None in planned:
        failed = planned.index(None)
        assert attempts[-1] == list(STEPS) and outcome.attempts == failed + 1 and not transaction.dirty
    else:
        failed = retries + 1
        assert attempts[-1] == ["give_up"] and f"{failed} attempt(s)" in str(outcome)
    assert waits == [1.5] * min(failed, retries)
    for fault, steps in zip(planned, attempts[:failed], strict=False):
        assert steps == list(STEPS[: STEPS.index(fault[0]) + 1])


@pytest.mark.parametrize(
    ("step", "said"),
    [("connect", "nothing was sent"), ("pause", "nothing was sent"), ("begin", "paused and serve nothing")],
)
def test_the_error_says_whether_the_engines_were_touched(step: str, said: str) -> None:
    error, _, _ = publish(FaultyTransport([(step, "raise")]), retries=0)
    assert said in str(error)


def test_calls_of_a_step_end_with_its_attempt() -> None:
    transport, left = FaultyTransport([]), []

    async def slow_pause() -> None:
        await asyncio.sleep(0.05)

    async def end(version: int) -> None:
        left.append(seconds_left(60.0))

    transport.pause, transport.end = slow_pause, end
    publish(transport, timeout_s=5.0)
    assert 0 < left[0] <= 4.95 and seconds_left(60.0) == 60.0


def test_an_engine_that_failed_half_way_is_dirty_and_not_resumed() -> None:
    transport = FaultyTransport([("transfer", "raise")] * 3)
    error, transaction, _ = publish(transport, retries=2)
    assert transaction.dirty and "resume" not in transport.steps and "accept" not in transport.steps
    assert str(error).count("transfer broke") == 3


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_hangs_is_ended_by_the_deadline_and_named(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.distributed.weight_sync.synchronizer.GRACE_S", 0.0)
    error, _, _ = publish(FaultyTransport([(step, "hang")]), retries=0, timeout_s=0.3)
    assert f"{step} was not done 0.3 s (sync_timeout_s) after the start" in str(error)
