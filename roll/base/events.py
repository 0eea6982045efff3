"""events.jsonl: what failed in a run, what was done about it, and what it cost; one JSON object per line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roll.base.redaction import redact

logger = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"

DRIVER = "driver"
"""Component of events about the whole run."""

CONTROL_GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""The file with the control groups of this process, and the folder of all."""

VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
"""What differs between two messages with one cause."""

REPLACEMENT_INTERVAL_S = 60.0
"""Least time between two events with one cause: many processes may hang."""


def set_aside_events(output_dir: str | Path) -> None:
    """Renames the events of an earlier run in this folder to `events.jsonl.old`, in place of older ones."""
    path = Path(output_dir) / EVENTS_FILE
    with contextlib.suppress(OSError):
        path.replace(path.with_suffix(".jsonl.old"))


class EventLog:
    """Appends events to output_dir/events.jsonl and logs each in one line.

    Every process of the run on the driver's machine may have its own; a line is one write.
    """

    def __init__(self, output_dir: str | Path, clock: Callable[[], float] = time.time) -> None:
        """Writes nothing yet; `clock` gives seconds since 1970."""
        self._path, self._clock = Path(output_dir) / EVENTS_FILE, clock
        self._last: dict[tuple[str, ...], float] = {}
        self._omitted: dict[tuple[str, ...], int] = {}
        self._oom_kills = oom_kills()

    def record(
        self,
        component: str,
        event: str,
        message: str,
        seconds: float | None = None,
        level: int = logging.WARNING,
        *,
        steps_lost: int | None = None,
        interval_s: float = 0.0,
    ) -> None:
        """Writes one event; a file that cannot be written is a warning, since the event is logged as well.

        Args:
            component: such as `actor_infer-0`.
            event: what happened in a word or two, such as `died` or `serving again`.
            message: the same for people, with the cause; written in one line.
            seconds: that it took or cost, where that is known.
            level: of the line in the log.
            steps_lost: finished steps that are repeated.
            interval_s: from the last event of the component with this cause, the message but for numbers and quoted
                texts; until then events are only counted, and the next one that is written says how many.
        """
        now, key = self._clock(), (component, event, VARIABLE.sub("", message)[:200])
        if now - self._last.get(key, -interval_s) < interval_s:
            self._omitted[key] = self._omitted.get(key, 0) + 1
            return
        self._last[key] = now
        message = redact(" ".join(message.split()))
        if omitted := self._omitted.pop(key, 0):
            message += f" (and {omitted} more since the last such event)"
        if level >= logging.WARNING and (killed := oom_kills()) > self._oom_kills:
            message += f" (the kernel killed {killed - self._oom_kills} of the run's processes for lack of memory)"
            self._oom_kills = killed
        logger.log(level, "%s %s", component, message)
        entry: dict[str, Any] = {"time": now, "component": component, "event": event, "message": message}
        if seconds is not None:
            entry["seconds"] = round(seconds, 3)
        if steps_lost is not None:
            entry["steps_lost"] = steps_lost
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                append_line(descriptor, json.dumps(entry))
            finally:
                os.close(descriptor)
        except OSError as error:
            logger.warning("%s: not written: %s", self._path, error)

    def process_replaced(self, component: str, cause: str) -> None:
        """Writes that a process of a reward or of environments is replaced, one cause in REPLACEMENT_INTERVAL_S."""
        self.record(component, "process replaced", f"replaces a process: {cause}", interval_s=REPLACEMENT_INTERVAL_S)


def oom_kills() -> int:
    """Processes of the control group of this one that the kernel has killed for lack of memory; 0 if unknown."""
    (own, root), killed = CONTROL_GROUPS, 0
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            file = f"memory{path}/memory.oom_control" if kinds == "memory" else f".{path}/memory.events"
            with contextlib.suppress(OSError):
                counts = dict(entry.split() for entry in (root / file).read_text().splitlines())
                killed += int(counts.get("oom_kill", 0))
    return killed


class Repeats:
    """Logs a failure that repeats once, then with its count at 10, 100, 1000."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self._counts = logger, Counter[str]()

    def warn(self, cause: str, message: str, traceback: bool = False) -> None:
        """Logs `message`, whose details may differ each time, if the count of `cause` is a power of ten."""
        self._counts[cause] += 1
        count = self._counts[cause]
        if count == 10 ** (len(str(count)) - 1):
            times = f" ({count} times so far)" if count > 1 else ""
            self._logger.warning("%s%s", message, times, exc_info=traceback)


def append_line(descriptor: int, text: str) -> None:
    """Appends a line to a file that is open for reading and appending: the whole line or, on a full disk, nothing.

    A last line without an end, which a process was killed in, is ended first, so that it does not spoil this one.
    """
    before = os.fstat(descriptor).st_size
    line = text.encode() + b"\n"
    if before and os.pread(descriptor, 1, before - 1) != b"\n":
        line = b"\n" + line
    written = 0
    try:
        while written < len(line):
            written += os.write(descriptor, line[written:])
    except OSError:
        if written and os.fstat(descriptor).st_size == before + written:  # no other process has appended a line
            os.ftruncate(descriptor, before)
        raise
