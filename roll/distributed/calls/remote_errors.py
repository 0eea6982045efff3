"""Failures of remote calls as values, the errors made of them, and the deadline of calls made together.

Every error names the rank, its node, devices and log, except where a RunError says all that a user needs.
"""

from __future__ import annotations

import math
import re
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import ray

from roll.base.errors import RunError
from roll.distributed.processes import how_ended

PROCESS_DIED = "ProcessDied"
"""Kind of the failure of a process that died, or that was started again and has no worker yet."""

TIMEOUT = "Timeout"
"""Kind of a call without an answer at its deadline."""

WATCH = "watch"
"""Name of no method: of the error of a process that was found dead while no call was made of it."""

_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


@contextmanager
def deadline_scope(deadline: float) -> Iterator[None]:
    """Remote calls made in this block, and in tasks it starts, end by `deadline` on the monotonic clock."""
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)


def seconds_left(timeout_s: float) -> float:
    """`timeout_s`, or the time to the deadline of the enclosing `deadline_scope` where that is shorter."""
    return max(0.0, min(timeout_s, _deadline.get() - time.monotonic()))


@dataclass(frozen=True)
class Failure:
    """An exception in a worker, as a value, so that exceptions that cannot be pickled reach the driver too.

    Attributes:
        rank: of the worker.
        time: seconds since the epoch; the earliest failure is the cause of the others.
        kind: name of the exception's class.
        message: text of the exception.
        traceback: as Python prints it.
        is_run_error: whether it is a RunError, whose message says all that a user needs.
        inner: the exception itself where it is a ClusterError: a call failed that the worker made.
    """

    rank: int
    time: float
    kind: str
    message: str
    traceback: str
    is_run_error: bool = False
    inner: ClusterError | None = None


def failure_of(rank: int, error: Exception) -> Failure:
    text = "".join(traceback.format_exception(error))
    inner = error if isinstance(error, ClusterError) else None
    return Failure(rank, time.time(), type(error).__name__, str(error), text, isinstance(error, RunError), inner)


RAY_GUESSES = re.compile(r"There are some potential root causes|Some common causes")
"""Beginning of what Ray adds to the death of a process for a reason that it does not know: causes that are possible."""


def ray_failure(rank: int, error: BaseException) -> Failure:
    """The error of a call that its worker did not answer: as a rule its process died, else the text is a traceback."""
    died = isinstance(error, ray.exceptions.RayActorError)
    kind = PROCESS_DIED if died else type(error).__name__
    text = RAY_GUESSES.split(str(error))[0].rstrip() if died else str(error)
    text = text.strip() or kind
    message = text.splitlines()[-1 if text.startswith("Traceback") else 0]
    return Failure(rank, time.time(), kind, message, text)


class ClusterError(RuntimeError):
    """A call on a cluster failed or passed its deadline.

    Attributes:
        role: of the cluster.
        method: that was called.
        rank: the first to fail, or the first without an answer.
        kind: class of the exception there, TIMEOUT, or PROCESS_DIED.
        cause: the message of that exception, in one line.
    """

    def __init__(self, role: str, method: str, rank: int, kind: str, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.role, self.method, self.rank, self.kind = role, method, rank, kind
        self.cause = cause or message

    @property
    def process_failed(self) -> bool:
        """Whether the process died or does not answer, so that a new one may succeed."""
        return self.kind in (PROCESS_DIED, TIMEOUT)

    def __reduce__(self) -> tuple[Any, ...]:
        return ClusterError, (self.role, self.method, self.rank, self.kind, str(self), self.cause)


def one_line(error: BaseException) -> str:
    """Class and cause of an error in one line, without the stack of another process."""
    if isinstance(error, ClusterError):
        name = f"{error.role}-{error.rank}: "
        died = error.kind == PROCESS_DIED and not error.cause.startswith("its process")  # Ray's words otherwise
        cause = f"its process {how_ended(name[:-2])}" if died else error.cause.removeprefix(name)
        return f"{name}{cause}"
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


@dataclass(frozen=True)
class CallContext:
    """What was called where, for error messages; `locations` describes the node, devices and log of each rank."""

    role: str
    method: str
    locations: Mapping[int, str]

    def failed(self, failures: Sequence[Failure]) -> ClusterError:
        """The error of a call that failed on these ranks; a dead process comes first, then the earliest failure.

        Where the first to fail had made a call that failed, the error is that call's, as if the caller had made it. A
        RunError has its message alone; its traceback is in the log of the rank.
        """
        ordered = sorted(failures, key=lambda f: ((f.inner or f).kind != PROCESS_DIED, f.time))
        first, others = ordered[0], ordered[1:]
        if first.inner is not None:
            return first.inner
        cause = " ".join(first.message.split())
        if first.is_run_error:
            return ClusterError(self.role, self.method, first.rank, first.kind, first.message, cause)
        lines = [f"{self.role}.{self.method} failed on rank {first.rank} ({self.locations[first.rank]})"]
        if len(failures) < len(self.locations):
            lines[0] += f"; {len(self.locations) - len(failures)} of {len(self.locations)} ranks did not fail"
        lines.append(first.traceback.rstrip())
        lines.extend(f"then rank {f.rank}: {f.kind}: {f.message}" for f in others)
        return ClusterError(self.role, self.method, first.rank, first.kind, "\n".join(lines), cause)

    def died(self, rank: int, text: str) -> ClusterError:
        """The error of a process that was found dead, without a call that failed."""
        return self.failed([Failure(rank, time.time(), PROCESS_DIED, text, text)])

    def timed_out(self, ranks: Sequence[int], seconds: float) -> ClusterError:
        """The error of a call that these ranks did not answer in time."""
        waited = "; ".join(f"rank {rank} ({self.locations[rank]})" for rank in ranks)
        message = f"{self.role}.{self.method}: no answer within {seconds:g} s from {waited}"
        return ClusterError(self.role, self.method, ranks[0], TIMEOUT, message)
