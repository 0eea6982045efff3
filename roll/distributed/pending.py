"""An answer that ranks are still working on: awaited or waited for, always with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from roll.distributed.actors import Failure
from roll.distributed.deadlines import seconds_left

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
