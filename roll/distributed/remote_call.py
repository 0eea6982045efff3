"""Remote calls: the actor that runs them, and what the caller awaits."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import inspect
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from roll.distributed.process_groups import hold_port
from roll.distributed.processes import freeze_heap
from roll.distributed.rpc_batching import Inbox, Mailed

GRACE_S = 1.0
"""After a first failure, how long others may still fail: a broken collective fails on several ranks within milliseconds
and the earliest is the cause."""


class ClusterError(RuntimeError):
    """A call on a cluster failed or passed its deadline.

    Attributes:
        role: of the cluster.
        method: that was called.
        rank: the first to fail, or the first that did not answer.
        kind: class of the exception there, `Timeout` at a deadline, or `ProcessDied`.
    """

    def __init__(self, role: str, method: str, rank: int, kind: str, message: str) -> None:
        """Says where and what."""
        super().__init__(message)
        self.role, self.method, self.rank, self.kind = role, method, rank, kind

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles with all its parts."""
        return ClusterError, (self.role, self.method, self.rank, self.kind, str(self))


@dataclass(frozen=True)
class CallSite:
    """What was called where, for messages: `places` says for each rank its process, node and log."""

    role: str
    method: str
    places: Mapping[int, str]

    def failed(self, failures: Sequence[Failure]) -> ClusterError:
        """The error of a call on which these ranks failed; a process that ended comes first, then the earliest."""
        ordered = sorted(failures, key=lambda f: (f.kind != "ProcessDied", f.time))
        first, others = ordered[0], ordered[1:]
        lines = [f"{self.role}.{self.method} failed on rank {first.rank} ({self.places[first.rank]})"]
        if len(failures) < len(self.places):
            lines[0] += f"; {len(self.places) - len(failures)} of {len(self.places)} ranks did not fail"
        lines.append(first.traceback.rstrip())
        lines.extend(f"then rank {f.rank}: {f.kind}: {f.message}" for f in others)
        return ClusterError(self.role, self.method, first.rank, first.kind, "\n".join(lines))

    def late(self, ranks: Sequence[int], seconds: float) -> ClusterError:
        """The error of a call on which these ranks did not answer in time."""
        waited = "; ".join(f"rank {rank} ({self.places[rank]})" for rank in ranks)
        message = f"{self.role}.{self.method}: no answer within {seconds:g} s from {waited}"
        return ClusterError(self.role, self.method, ranks[0], "Timeout", message)


class Pending:
    """What a call returns at once. `await` it, or `get` it where there is no event loop.

    All ranks are waited for, also those whose answer is not wanted: their failure is the call's failure. The first
    failure ends the wait, since the other ranks may be waiting for the one that failed.
    """

    def __init__(
        self, site: CallSite, refs: list[ray.ObjectRef], collect: Callable[[list[Any]], Any], timeout_s: float
    ) -> None:
        """Starts the clock, which a block of `calls_end_by` may shorten.

        Args:
            site: what was called where.
            refs: the answer of each rank of the site.
            collect: takes the answers in that order.
            timeout_s: until all must be there.
        """
        self._site, self._refs, self._collect = site, dict(zip(site.places, refs, strict=True)), collect
        self._timeout_s, self._start = seconds_left(timeout_s), time.monotonic()

    def within(self, timeout_s: float) -> Pending:
        """The same with another deadline, counted from the call."""
        self._timeout_s = timeout_s
        return self

    def get(self, timeout_s: float | None = None) -> Any:
        """The collected answer.

        Raises:
            ClusterError: a rank raised, died, or did not answer in time.
        """
        if timeout_s is not None:
            self.within(timeout_s)
        answers: dict[int, Any] = {}
        while len(answers) < len(self._refs):
            open_ranks = [rank for rank in self._refs if rank not in answers]
            ready, _ = ray.wait([self._refs[rank] for rank in open_ranks], timeout=self._remaining())
            if not ready:
                raise self._site.late(open_ranks, self._timeout_s)
            self._fetch(answers, ready)
            if _failures(answers):
                rest = [ref for rank, ref in self._refs.items() if rank not in answers]
                more = ray.wait(rest, num_returns=len(rest), timeout=GRACE_S)[0] if rest else []
                self._fetch(answers, more)
                raise self._site.failed(_failures(answers))
        return self._collect([answers[rank] for rank in self._refs])

    def __await__(self) -> Generator[Any, None, Any]:
        """The collected answer; raises as `get` does."""
        return self._wait().__await__()

    async def _wait(self) -> Any:
        waits = {rank: asyncio.wrap_future(ref.future()) for rank, ref in self._refs.items()}
        answers: dict[int, Any] = {}
        while len(answers) < len(waits):
            open_ranks = [rank for rank in waits if rank not in answers]
            done, _ = await asyncio.wait(
                [waits[rank] for rank in open_ranks], timeout=self._remaining(), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise self._site.late(open_ranks, self._timeout_s)
            self._settle(answers, waits)
            if _failures(answers):
                if len(answers) < len(waits):
                    await asyncio.wait(waits.values(), timeout=GRACE_S)
                self._settle(answers, waits)
                raise self._site.failed(_failures(answers))
        return self._collect([answers[rank] for rank in waits])

    def _settle(self, answers: dict[int, Any], waits: dict[int, asyncio.Future]) -> None:
        for rank, wait in waits.items():
            if wait.done() and rank not in answers:
                error = wait.exception()
                answers[rank] = wait.result() if error is None else died(rank, error)

    def _fetch(self, answers: dict[int, Any], ready: list[ray.ObjectRef]) -> None:
        ranks = {ref: rank for rank, ref in self._refs.items()}
        for ref in ready:
            rank = ranks[ref]
            try:
                answers[rank] = ray.get(ref)
            except ray.exceptions.RayError as error:
                answers[rank] = died(rank, error)

    def _remaining(self) -> float:
        return max(0.0, self._start + self._timeout_s - time.monotonic())


def _failures(answers: dict[int, Any]) -> list[Failure]:
    return [answer for answer in answers.values() if isinstance(answer, Failure)]


def died(rank: int, error: BaseException) -> Failure:
    """Ray's own error about a call: as a rule the process has ended."""
    kind = "ProcessDied" if isinstance(error, ray.exceptions.RayActorError) else type(error).__name__
    return Failure(rank, time.time(), kind, str(error).splitlines()[0], str(error))


_until: ContextVar[float] = ContextVar("until", default=math.inf)


@contextmanager
def calls_end_by(until: float) -> Iterator[None]:
    """Calls on clusters made in this block, and in tasks it starts, end by `until` on the monotonic clock."""
    token = _until.set(until)
    try:
        yield
    finally:
        _until.reset(token)


def seconds_left(timeout_s: float) -> float:
    """`timeout_s`, or what the block around leaves of it."""
    return max(0.0, min(timeout_s, _until.get() - time.monotonic()))


_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Failure:
    """An exception in a worker, as a value: exceptions of every kind survive the way to the driver.

    Attributes:
        rank: of the worker.
        time: seconds since the epoch; the earliest failure is the cause of the others.
        kind: name of the exception's class.
        message: its text.
        traceback: as Python prints it.
    """

    rank: int
    time: float
    kind: str
    message: str
    traceback: str


class Host:
    """Runs one worker in a process of its own; one call at a time, in the main thread."""

    def __init__(self, name: str, rank: int, cores: tuple[int, ...], log_file: str) -> None:
        """Pins the process to its cores and sends what it prints to its log file."""
        self._name, self._rank = name, rank
        self._worker: Any = None
        end_with_parent()
        _pin(cores)
        print_to(log_file)

    def process(self) -> int:
        """The process id."""
        return os.getpid()

    def hold_port(self) -> int:
        """A TCP port of this process's node, held by it until its worker's store serves on it."""
        return hold_port()

    def build(self, make: Callable[..., Any], environment: dict[str, str], *args: Any) -> Failure | None:
        """Makes the worker, with these variables set."""
        os.environ.update(environment)
        try:
            self._worker = make(*args)
        except Exception as error:
            return self._failed(error)
        freeze_heap()
        return None

    def call(self, method: str, keep: bool, *args: Any, **kwargs: Any) -> Any:
        """The worker's answer where it is wanted, None where it is not, a Failure where it raised."""
        try:
            result = getattr(self._worker, method)(*args, **kwargs)
        except Exception as error:
            return self._failed(error)
        return result if keep else None

    def _failed(self, error: Exception) -> Failure:
        text = "".join(traceback.format_exception(error))
        print(f"{self._name} failed:\n{text}", file=sys.stderr, flush=True)
        return Failure(self._rank, time.time(), type(error).__name__, str(error), text)


class ConcurrentHost(Mailed, Host):
    """Runs one worker whose methods are coroutines, side by side on one event loop; also calls that come by mail."""

    def __init__(self, *args: Any) -> None:
        """As in Host."""
        super().__init__(*args)
        self._inbox = Inbox(lambda method, *args: self.call(method, True, *args))

    async def process(self) -> int:  # type: ignore[override]
        """The process id."""
        return os.getpid()

    async def call(self, method: str, keep: bool, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """As in Host, awaiting the worker's coroutine."""
        try:
            result = getattr(self._worker, method)(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
        except Exception as error:
            return self._failed(error)
        return result if keep else None


def end_with_parent() -> None:
    """Asks the kernel to end this process with the Ray daemon that started it, however that one ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _pin(cores: tuple[int, ...]) -> None:
    """Pins every thread there is; later ones inherit it."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def print_to(log_file: str) -> None:
    """Sends stdout and stderr, those of child processes too, to the log; SIGUSR1 adds the stack of every thread."""
    path = Path(log_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
