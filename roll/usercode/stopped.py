"""Which processes live, and which a signal has stopped for too long: their calls do not fail before the deadline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

import psutil

INTERVAL_S = 1.0
"""Seconds between two looks, each of which reads two small files for every process."""

STOPPED_GRACE_S = 10.0
"""How long a process may be stopped: what stops one for a moment, such as a snapshot of its stack, is done by then."""

GAP_S = 5.0
"""More seconds than this between two looks mean that the process that looks was stopped too, as by Ctrl-Z."""

STOPPED_TOO_LONG = f"was stopped by a signal for {STOPPED_GRACE_S:g} s, and was killed"
"""What happened to such a process, for messages."""


KeyT = TypeVar("KeyT", bound=Hashable)


class StopTimes(Generic[KeyT]):
    """How long each process has been stopped; counts from 0 again after the watch itself did not run."""

    def __init__(
        self, is_stopped: Callable[[KeyT], bool], grace_s: float = STOPPED_GRACE_S, gap_s: float = GAP_S
    ) -> None:
        self._is_stopped, self._grace_s, self._gap_s = is_stopped, grace_s, gap_s
        self._since: dict[KeyT, float] = {}
        self._last = 0.0

    def overdue(self, now: float, processes: Iterable[KeyT]) -> list[KeyT]:
        """The processes that have been stopped for longer than the grace; call it regularly."""
        known = self._since if now - self._last <= self._gap_s else {}
        self._last = now
        self._since = {each: known.get(each, now) for each in processes if self._is_stopped(each)}
        return [each for each, since in self._since.items() if now - since >= self._grace_s]


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; its last threads may still be ending where it does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_stopped(process_id: int) -> bool:
    """Whether a signal has stopped a process; False in a debugger, and where its status cannot be read."""
    try:
        return bool(psutil.Process(process_id).status() == psutil.STATUS_STOPPED)
    except (OSError, psutil.Error):
        return False
