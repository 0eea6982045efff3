"""Memory of the whole run: this process and everything it started."""

from __future__ import annotations

import threading

import psutil

INTERVAL_S = 1.0
"""Seconds between samples: the large allocations here live for many seconds, and a sample costs milliseconds."""


def resident_bytes() -> int:
    """Resident memory of this process and its descendants, in bytes.

    A page that several processes share counts for each of them, so this is an upper bound of what is in use; the share
    of each (PSS) would cost a hundred times as much to ask for.
    """
    own = psutil.Process()
    total = 0
    for process in [own, *own.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


class PeakMemory:
    """Samples `resident_bytes` on a thread; use as a context manager."""

    def __init__(self) -> None:
        """Starts at zero."""
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        """Begins sampling."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stops sampling."""
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, resident_bytes())
            if self._stop.wait(INTERVAL_S):
                return
