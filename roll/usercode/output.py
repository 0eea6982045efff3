"""What reward functions print: shown up to a limit, so that no function can fill the log of a run."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import threading
import time
from multiprocessing.connection import wait

logger = logging.getLogger(__name__)

LIMIT_BYTES = 64 * 2**10
"""Bytes that the processes of a reward may print in LIMIT_WINDOW_S seconds."""

LIMIT_WINDOW_S = 60.0

READ_BYTES = 2**16
"""Bytes that are read at once: all that a pipe of Linux holds."""

JOIN_S = 1.0
"""Deadline to show what was printed last; stderr may be a pipe that is not read."""


class OutputLimit:
    """Counts bytes in windows of LIMIT_WINDOW_S seconds."""

    def __init__(self) -> None:
        self._window_start, self._used = 0.0, 0

    def admit(self, count: int, now: float) -> int:
        """How many of the next `count` bytes are within the limit, at `now` seconds of a monotonic clock."""
        if now - self._window_start >= LIMIT_WINDOW_S:
            self._window_start, self._used = now, 0
        admitted = min(count, LIMIT_BYTES - self._used)
        self._used += admitted
        return admitted


class RewardOutput:
    """A pipe for what the processes of one reward print, and a thread that passes it on to stderr.

    The pipe is always read, so that no process waits to print. What is beyond the limit is discarded, with one warning.
    A process that outlives its pool, and inherits the pipe, keeps nothing open: the pipe is closed with the pool.
    """

    def __init__(self, function: str) -> None:
        """Reads nothing before `start`; `function` is named in the warning."""
        self._function = function
        self._reader, self.writer = multiprocessing.Pipe(duplex=False)
        self._stopped, self._stop = multiprocessing.Pipe(duplex=False)
        os.set_blocking(self._reader.fileno(), False)
        self._limit, self._warned = OutputLimit(), False
        self._thread = threading.Thread(target=self._pass_on, name=f"output of {function}", daemon=True)

    def start(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Shows what was printed until now, and closes the pipe. Safe to call twice."""
        self._stop.close()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
        self.writer.close()

    def _pass_on(self) -> None:
        with self._reader, self._stopped:
            stopped = False
            while not stopped:
                stopped = self._stopped in wait([self._reader, self._stopped])
                with contextlib.suppress(BlockingIOError):
                    self._show(os.read(self._reader.fileno(), READ_BYTES))

    def _show(self, printed: bytes) -> None:
        admitted = self._limit.admit(len(printed), time.monotonic())
        if admitted:
            _write_all(printed[:admitted])
        if admitted < len(printed) and not self._warned:
            self._warned = True
            logger.warning(
                "reward function %r: it printed more than %d KiB within %g s; the rest is not shown",
                self._function,
                LIMIT_BYTES // 2**10,
                LIMIT_WINDOW_S,
            )


def _write_all(shown: bytes) -> None:
    with contextlib.suppress(OSError):  # stderr is closed
        while shown:
            shown = shown[os.write(2, shown) :]
