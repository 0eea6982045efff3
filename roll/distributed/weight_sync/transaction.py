"""One publish as a transaction: it becomes visible whole or not at all, and never waits without end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from roll.distributed.deadlines import calls_end_by

T = TypeVar("T")
logger = logging.getLogger(__name__)


class PublishError(RuntimeError):
    """The weights could not be published; once an update was opened, engines stay paused and serve nothing."""


class VerificationError(RuntimeError):
    """What an engine holds is not what was sent."""


@dataclass(frozen=True)
class Transfer:
    """What was moved: bytes, and the checksums of each tensor under the engine's name where they were asked for."""

    bytes: int
    checksums: dict[str, str]


@dataclass(frozen=True)
class PublishReport:
    """One publish.

    Attributes:
        version: of the weights.
        seconds: from the first pause to the last resume, retries included.
        pause_seconds: that engines stood still in the attempt that succeeded, from the end of their last step on.
        bytes: of weights sent, once for all engines.
        verified: whether names and checksums were compared.
        attempts: 1 when nothing failed.
    """

    version: int
    seconds: float
    pause_seconds: float
    bytes: int
    verified: bool
    attempts: int


GRACE_S = 1.0
"""What a step gets beyond the deadline of its calls, to say whom it waited for."""


class Transport(Protocol):
    """The steps of one publish, each for all engines."""

    async def connect(self) -> None:
        """Makes sure that sources and engines can reach each other; at once where they do already."""

    async def pause(self) -> None:
        """Stops generation."""

    async def begin(self, version: int) -> None:
        """Opens the update; engines are dirty from here on."""

    async def transfer(self, digest: bool) -> Transfer:
        """Moves every tensor; with `digest` takes the checksums of what is sent."""

    async def end(self, version: int) -> None:
        """Closes the update and names the version."""

    async def flush(self) -> None:
        """Forgets everything computed under older weights."""

    async def verify(self, checksums: dict[str, str]) -> None:
        """Compares with what the engines hold; raises VerificationError."""

    async def accept(self) -> None:
        """Declares the engines whole."""

    async def resume(self) -> None:
        """Lets generation go on."""

    async def abandon(self) -> None:
        """After a failure: frees whoever still waits for a peer; `connect` starts anew."""

    async def give_up(self) -> None:
        """After the last failure: refuses whoever waits for the weights."""


class Transaction:
    """Publishes through a transport with a deadline for each attempt and a bound on attempts.

    From `begin` to `accept` the state is dirty. Nothing leads from dirty to resumed but a complete attempt: after the
    last failed one the engines stay paused and refuse to serve.
    """

    def __init__(
        self,
        transport: Transport,
        timeout_s: float,
        retries: int,
        retry_delay_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Takes the bounds; `sleep` is replaced in tests."""
        self._transport = transport
        self._timeout_s, self._retries, self._delay_s = timeout_s, retries, retry_delay_s
        self._sleep = sleep
        self.dirty = False

    async def run(self, version: int, verify: bool) -> PublishReport:
        """One publish.

        Raises:
            PublishError: every attempt failed; the message names each cause.
        """
        start = time.perf_counter()
        causes: list[str] = []
        last: Exception | None = None
        for attempt in range(1, self._retries + 2):
            if attempt > 1:
                await self._sleep(self._delay_s)
            try:
                pause_seconds, sent = await self._attempt(version, verify)
                return PublishReport(version, time.perf_counter() - start, pause_seconds, sent.bytes, verify, attempt)
            except Exception as error:
                last = error
                causes.append(f"attempt {attempt}: {type(error).__name__}: {error}")
                logger.warning("publish of version %d failed, %s", version, causes[-1])
                await self._after_failure(self._transport.abandon(), "abandon", causes)
        await self._after_failure(self._transport.give_up(), "give up", causes)
        state = "the engines are paused and serve nothing" if self.dirty else "nothing was sent"
        raise PublishError(
            f"version {version} could not be published in {len(causes)} attempt(s) (max_sync_retries); {state}\n"
            + "\n".join(causes)
        ) from last

    async def _attempt(self, version: int, verify: bool) -> tuple[float, Transfer]:
        transport, until = self._transport, time.monotonic() + self._timeout_s
        await self._bounded(transport.connect(), "connect", until)
        await self._bounded(transport.pause(), "pause", until)
        self.dirty = True
        await self._bounded(transport.begin(version), "begin", until)
        paused = time.perf_counter()  # an engine answers once the step it was computing is done
        sent = await self._bounded(transport.transfer(verify), "transfer", until)
        await self._bounded(transport.end(version), "end", until)
        await self._bounded(transport.flush(), "flush", until)
        if verify:
            await self._bounded(transport.verify(sent.checksums), "verify", until)
        await self._bounded(transport.accept(), "accept", until)
        self.dirty = False
        await self._bounded(transport.resume(), "resume", until)
        return time.perf_counter() - paused, sent

    async def _after_failure(self, step: Awaitable[None], name: str, causes: list[str]) -> None:
        """Frees who waits; that this fails as well is one more cause, and the next attempt will tell."""
        try:
            await self._bounded(step, name, time.monotonic() + self._timeout_s)
        except Exception as error:
            causes[-1] += f"\nand then {name}: {type(error).__name__}: {error}"

    async def _bounded(self, step: Awaitable[T], name: str, until: float) -> T:
        try:
            with calls_end_by(until):
                return await asyncio.wait_for(step, max(0.0, until - time.monotonic()) + GRACE_S)
        except TimeoutError as error:
            raise PublishError(f"{name} was not done {self._timeout_s:g} s (sync_timeout_s) after the start") from error
