"""events.jsonl: what failed in a run, what was done about it, and what it cost; one JSON object per line."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"


class EventLog:
    """Appends events to output_dir/events.jsonl and logs each in one line."""

    def __init__(self, output_dir: str | Path, clock: Callable[[], float] = time.time) -> None:
        """Writes nothing yet; `clock` gives seconds since 1970."""
        self._path, self._clock = Path(output_dir) / EVENTS_FILE, clock

    def record(
        self, component: str, event: str, message: str, seconds: float | None = None, level: int = logging.WARNING
    ) -> None:
        """Writes one event; a file that cannot be written is a warning, since the event is logged as well.

        Args:
            component: such as `actor_infer-0`.
            event: what happened in a word or two, such as `died` or `serving again`.
            message: the same for people, in one line, with the cause.
            seconds: that it took or cost, where that is known.
            level: of the line in the log.
        """
        logger.log(level, "%s %s", component, message)
        entry: dict[str, Any] = {"time": self._clock(), "component": component, "event": event, "message": message}
        if seconds is not None:
            entry["seconds"] = round(seconds, 3)
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            logger.warning("%s: not written: %s", self._path, error)
