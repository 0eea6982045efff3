"""Which processes a signal has stopped, and for how long: a call of one does not fail before its deadline."""

from __future__ import annotations

from collections.abc import Collection, Hashable
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

    def __init__(self, grace_s: float = STOPPED_GRACE_S, gap_s: float = GAP_S) -> None:
        self._grace_s, self._gap_s = grace_s, gap_s
        self._since: dict[KeyT, float] = {}
        self._last = 0.0

    def overdue(self, now: float, stopped: Collection[KeyT]) -> list[KeyT]:
        """Keys of the processes that have been stopped longer than the grace; `stopped` are those stopped at `now`."""
        known = self._since if now - self._last <= self._gap_s else {}
        self._last = now
        self._since = {key: known.get(key, now) for key in stopped}
        return [key for key, since in self._since.items() if now - since >= self._grace_s]


def status_of(process: psutil.Process) -> str:
    """Status of a process as psutil names it, STATUS_DEAD where it is gone; a debugger does not make it stopped."""
    try:
        return str(process.status() if process.is_running() else psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)


def is_stopped(process_id: int) -> bool:
    """Whether a signal has stopped a process; False where its status cannot be read."""
    try:
        return bool(psutil.Process(process_id).status() == psutil.STATUS_STOPPED)
    except (OSError, psutil.Error):
        return False
