"""Remote calls: the Ray actor that runs a worker's methods, and the handle of a call that the caller awaits.

Every call has a deadline, and every error names the rank, its node, devices and log. Imports no torch: the actor pins
its process before torch counts the cores.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray

from roll.distributed.process_groups import hold_port
from roll.distributed.processes import end_with_parent, gc_freeze, pin, print_to
from roll.distributed.rpc_batching import RpcActor, RpcServer

T = TypeVar("T")

FAILURE_GRACE_S = 1.0
"""After a first failure, how long other ranks may still fail: a broken collective fails on several ranks within
milliseconds and the earliest failure is the cause."""

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
    """

    rank: int
    time: float
    kind: str
    message: str
    traceback: str


class WorkerActor:
    """The Ray actor that runs one worker in its own process; one call at a time, in the main thread."""

    def __init__(self, name: str, rank: int, cores: tuple[int, ...], log_file: str) -> None:
        """Pins the process to its cores and redirects its output to its log file."""
        self._name, self._rank = name, rank
        self._worker: object = None
        end_with_parent()
        pin(cores)
        print_to(log_file)

    def process_id(self) -> int:
        """Id of the worker's process."""
        return os.getpid()

    def hold_port(self) -> int:
        """A TCP port of this node, held by this process until its worker's store serves on it."""
        return hold_port()

    def build(self, make: Callable[..., object], environment: dict[str, str], *args: Any) -> Failure | None:
        """Makes the worker with these environment variables set."""
        os.environ.update(environment)
        try:
            self._worker = make(*args)
        except Exception as error:
            return self._failure(error)
        gc_freeze()
        return None

    def call(self, method: str, keep: bool, *args: Any, **kwargs: Any) -> Any:
        """The worker's answer, None where `keep` is false, or a Failure where the method raised."""
        try:
            result = getattr(self._worker, method)(*args, **kwargs)
        except Exception as error:
            return self._failure(error)
        return result if keep else None

    def _failure(self, error: Exception) -> Failure:
        text = "".join(traceback.format_exception(error))
        print(f"{self._name} failed:\n{text}", file=sys.stderr, flush=True)
        return Failure(self._rank, time.time(), type(error).__name__, str(error), text)


class ConcurrentWorkerActor(RpcActor, WorkerActor):
    """Runs one worker whose methods are coroutines, concurrently on one event loop; serves batched calls too."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._server = RpcServer(lambda method, *args: self.call(method, True, *args))

    async def process_id(self) -> int:  # type: ignore[override]
        """Id of the worker's process."""
        return os.getpid()

    async def call(self, method: str, keep: bool, *args: Any, **kwargs: Any) -> Any:
        """As in WorkerActor, awaiting the worker's coroutine."""
        try:
            result = getattr(self._worker, method)(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
        except Exception as error:
            return self._failure(error)
        return result if keep else None


class ClusterError(RuntimeError):
    """A call on a cluster failed or passed its deadline.

    Attributes:
        role: of the cluster.
        method: that was called.
        rank: the first to fail, or the first without an answer.
        kind: class of the exception there, `Timeout` at a deadline, or `ProcessDied`.
    """

    def __init__(self, role: str, method: str, rank: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.role, self.method, self.rank, self.kind = role, method, rank, kind

    def __reduce__(self) -> tuple[Any, ...]:
        return ClusterError, (self.role, self.method, self.rank, self.kind, str(self))


@dataclass(frozen=True)
class CallContext:
    """What was called where, for error messages; `locations` describes the node, devices and log of each rank."""

    role: str
    method: str
    locations: Mapping[int, str]

    def failed(self, failures: Sequence[Failure]) -> ClusterError:
        """The error of a call that failed on these ranks; a dead process comes first, then the earliest failure."""
        ordered = sorted(failures, key=lambda f: (f.kind != "ProcessDied", f.time))
        first, others = ordered[0], ordered[1:]
        lines = [f"{self.role}.{self.method} failed on rank {first.rank} ({self.locations[first.rank]})"]
        if len(failures) < len(self.locations):
            lines[0] += f"; {len(self.locations) - len(failures)} of {len(self.locations)} ranks did not fail"
        lines.append(first.traceback.rstrip())
        lines.extend(f"then rank {f.rank}: {f.kind}: {f.message}" for f in others)
        return ClusterError(self.role, self.method, first.rank, first.kind, "\n".join(lines))

    def timed_out(self, ranks: Sequence[int], seconds: float) -> ClusterError:
        """The error of a call that these ranks did not answer in time."""
        waited = "; ".join(f"rank {rank} ({self.locations[rank]})" for rank in ranks)
        message = f"{self.role}.{self.method}: no answer within {seconds:g} s from {waited}"
        return ClusterError(self.role, self.method, ranks[0], "Timeout", message)


class RemoteCall(Generic[T]):
    """A call in progress: `await` it, or `get()` its result where there is no event loop.

    The call waits for all ranks, also those whose answer is discarded: their failure is the call's failure. The first
    failure ends the wait, since the other ranks may be blocked on the failed one.
    """

    def __init__(
        self,
        context: CallContext,
        refs: Sequence[ray.ObjectRef[Any]],
        collect: Callable[[list[Any]], T],
        timeout_s: float,
    ) -> None:
        """Starts the clock; an enclosing `deadline_scope` may shorten the timeout.

        Args:
            context: what was called where.
            refs: the answer of each rank of the context.
            collect: makes the result of the answers in that order.
            timeout_s: until all answers must have arrived.
        """
        self._context, self._refs, self._collect = context, dict(zip(context.locations, refs, strict=True)), collect
        self._timeout_s, self._start = seconds_left(timeout_s), time.monotonic()

    def get(self) -> T:
        """The result.

        Raises:
            ClusterError: a rank raised, died, or did not answer in time.
        """
        answers: dict[int, Any] = {}
        while len(answers) < len(self._refs):
            open_ranks = [rank for rank in self._refs if rank not in answers]
            ready, _ = ray.wait([self._refs[rank] for rank in open_ranks], timeout=self._remaining())
            if not ready:
                raise self._context.timed_out(open_ranks, self._timeout_s)
            self._fetch(answers, ready)
            if _failures(answers):
                rest = [ref for rank, ref in self._refs.items() if rank not in answers]
                more = ray.wait(rest, num_returns=len(rest), timeout=FAILURE_GRACE_S)[0] if rest else []
                self._fetch(answers, more)
                raise self._context.failed(_failures(answers))
        return self._collect([answers[rank] for rank in self._refs])

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        waits = {rank: asyncio.wrap_future(_future(ref)) for rank, ref in self._refs.items()}
        answers: dict[int, Any] = {}
        while len(answers) < len(waits):
            open_ranks = [rank for rank in waits if rank not in answers]
            done, _ = await asyncio.wait(
                [waits[rank] for rank in open_ranks], timeout=self._remaining(), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise self._context.timed_out(open_ranks, self._timeout_s)
            _take_done(answers, waits)
            if _failures(answers):
                if len(answers) < len(waits):
                    await asyncio.wait(waits.values(), timeout=FAILURE_GRACE_S)
                _take_done(answers, waits)
                raise self._context.failed(_failures(answers))
        return self._collect([answers[rank] for rank in waits])

    def _fetch(self, answers: dict[int, Any], ready: Sequence[ray.ObjectRef[Any]]) -> None:
        ranks = {ref: rank for rank, ref in self._refs.items()}
        for ref in ready:
            rank = ranks[ref]
            try:
                answers[rank] = ray.get(ref)
            except ray.exceptions.RayError as error:
                answers[rank] = ray_failure(rank, error)

    def _remaining(self) -> float:
        return max(0.0, self._start + self._timeout_s - time.monotonic())


def _future(ref: ray.ObjectRef[Any]) -> Future[Any]:
    return ref.future()


def _take_done(answers: dict[int, Any], waits: Mapping[int, asyncio.Future[Any]]) -> None:
    for rank, wait in waits.items():
        if wait.done() and rank not in answers:
            error = wait.exception()
            answers[rank] = wait.result() if error is None else ray_failure(rank, error)


def _failures(answers: Mapping[int, Any]) -> list[Failure]:
    return [answer for answer in answers.values() if isinstance(answer, Failure)]


def ray_failure(rank: int, error: BaseException) -> Failure:
    """Ray's own error about a call, as a rule that the process has died."""
    kind = "ProcessDied" if isinstance(error, ray.exceptions.RayActorError) else type(error).__name__
    return Failure(rank, time.time(), kind, str(error).splitlines()[0], str(error))
