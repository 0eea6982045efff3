"""Sessions of agents, as the gateway serves them: what one is opened with, how an agent reaches it, what it leaves."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Protocol

from roll.base.timers import BusyTimer, Timer
from roll.rollout.types import SamplingParams, Trajectory

VALIDATION, TRAINING, ENGINE = "val", "train", "engine"
"""Who does something: a session of this purpose, or an engine; `train:generate` is the name of an activity."""


@dataclass(frozen=True)
class SessionSpec:
    """What a session is opened with.

    Attributes:
        name: unique among open sessions; seeds of its answers derive from it.
        seed: of the run.
        version: weight version when its group was submitted; None for validation.
        sampling: of the run; `max_new_tokens` is the longest answer.
        sequence_length: most tokens of a conversation.
        max_requests: after which further ones are refused; None: any number.
        engine: that its requests prefer.
        ends_at: seconds since 1970 when its trajectory is over; for messages.
    """

    name: str
    seed: int
    version: int | None
    sampling: SamplingParams
    sequence_length: int
    max_requests: int | None = None
    engine: int | None = None
    ends_at: float | None = None

    def begun(self, engine: int | None, ends_at: float) -> SessionSpec:
        return replace(self, engine=engine, ends_at=ends_at)

    @property
    def purpose(self) -> str:
        return VALIDATION if self.version is None else TRAINING


@dataclass(frozen=True)
class SessionAddress:
    """Where an agent reaches its session; the key opens no other."""

    base_url: str
    key: str

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that `openai` and most agent frameworks read."""
        local = "127.0.0.1,localhost"
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.key,
            "NO_PROXY": local,
            "no_proxy": local,
        }


@dataclass
class SessionEnd:
    """What a session leaves.

    Attributes:
        trajectory: its last branch, with the others in `branches`; without rewards. None if nothing was sampled.
        failure: drop reason and message of what the gateway refused or could not do, for an agent that failed.
        metrics: sums over its requests, by name.
        seconds: that the gateway took for each request, without generation.
        warnings: what the gateway refused or ignored, by kind.
    """

    trajectory: Trajectory | None
    failure: tuple[str, str] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    warnings: dict[str, str] = field(default_factory=dict)


class GatewayDiedError(RuntimeError):
    """The gateway process of a session ended, and the session with it."""


class Gateway(Protocol):
    """Opens and ends sessions."""

    def open(self, spec: SessionSpec, /) -> Awaitable[SessionAddress]:
        """A session of its own key, until `finish` or `discard`.

        Raises:
            GatewayDiedError: no gateway serves.
        """

    def finish(self, address: SessionAddress, /) -> Awaitable[SessionEnd]:
        """Ends the session: its key is over, and answers that are being generated are cancelled.

        Raises:
            GatewayDiedError: its process ended.
        """

    def discard(self, address: SessionAddress, why: str, /) -> None:
        """Ends a session without a result; does not wait, and does nothing if it is over."""

    def close(self) -> None:
        """Ends every session and process."""


SUMMED = (
    "requests",
    "context_tokens_repeated",
    "overridden_sampling",
    "retries_joined",
    "unread_tool_calls",
    "cut_answers",
)
"""Numbers of a session whose sums are metrics, `gateway/<name>`."""


class SessionTotals:
    """Sums over the sessions that ended since the metrics were taken last."""

    def __init__(self) -> None:
        self._sums, self._sessions = Counter[str](), 0
        self._seconds: list[float] = []

    def add(self, end: SessionEnd) -> None:
        """Counts a session."""
        self._sums.update(end.metrics)
        self._seconds += end.seconds
        self._sessions += 1

    def metrics(self) -> dict[str, float]:
        """`gateway/...` and `env/agent_seconds`, none without a session; the sums begin again."""
        sums, sessions, seconds = self._sums, self._sessions, sorted(self._seconds)
        self._sums, self._sessions, self._seconds = Counter(), 0, []
        if not sessions:
            return {}
        found = {f"gateway/{name}": float(sums[name]) for name in SUMMED}
        found["gateway/branches_per_session"] = sums["branches"] / sessions
        if sums["prompt_tokens"]:
            found["gateway/cached_prompt_fraction"] = sums["cached_tokens"] / sums["prompt_tokens"]
        if seconds:
            found["gateway/seconds_in_gateway_p50"] = statistics.median(seconds)
            found["gateway/seconds_in_gateway_p99"] = seconds[int(0.99 * (len(seconds) - 1))]
        return found | {"env/agent_seconds": sums["agent_seconds"] / sessions}


class ActivityTimers:
    """Times what the sessions of a run do, as gateway processes report it.

    Attributes:
        timer: of the work of training; None before the first.
    """

    def __init__(self, engines: Sequence[BusyTimer]) -> None:
        """`engines` has the timer of each engine, on the clock `time.monotonic`."""
        self._engines = engines
        self._running: dict[tuple[int, str], ExitStack] = {}
        self.timer: Timer | None = None

    def changed(self, process: int, active: frozenset[str]) -> None:
        """Records that a gateway process now does `active`, and nothing else."""
        before = {name for owner, name in self._running if owner == process}
        for name in before - active:
            self._running.pop((process, name)).close()
        for name in active - before:
            self._running[process, name] = self._measure(*name.split(":"))

    def _measure(self, who: str, what: str) -> ExitStack:
        stack = ExitStack()
        if who == ENGINE:
            engine = self._engines[int(what)]
            engine.enter(time.monotonic())
            stack.callback(lambda: engine.exit(time.monotonic()))
        elif who == TRAINING and self.timer is not None:
            stack.enter_context(self.timer.measure(what))
        return stack
