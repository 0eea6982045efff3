"""What a run records beside its metrics: spans.jsonl, who did what when, and groups.jsonl, what became of each group.

Every process of the run may append; what it adds for a step is one write. Neither file is needed to continue a run: an
error while one is written is a warning, and that file gets no further lines.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

from roll.base.errors import RunError
from roll.base.events import append_line
from roll.trackers.files import write_whole

logger = logging.getLogger(__name__)

SPANS_FILE, GROUPS_FILE = "spans.jsonl", "groups.jsonl"

TRAINER, ROLLOUT, ENGINE = "trainer", "rollout", "engine"
"""Who did what in a span; an engine is `engine` and its number."""

_encode = json.JSONEncoder(separators=(",", ":")).encode

Span = tuple[str, float, float]
"""What was done, from when and until when, in seconds since 1970."""


class Recording:
    """Appends to spans.jsonl and groups.jsonl in a folder."""

    def __init__(self, folder: str | Path) -> None:
        """Writes nothing yet."""
        self._folder = Path(folder)
        self._failed: set[str] = set()

    def begin(self, step: int) -> None:
        """Removes what was recorded after `step`, where the run resumes; everything for 0, a new run."""
        for name in (SPANS_FILE, GROUPS_FILE):
            path = self._folder / name
            if not path.exists():
                continue
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = "".join(f"{line}\n" for line in lines if 0 < _step(line) <= step)
            try:
                write_whole(path, partial(_write, kept))
            except RunError as error:
                self._stop_writing(name, error)

    def spans(self, who: str, step: int, spans: Iterable[Span]) -> None:
        """Appends `{"who", "what", "step", "start", "end"}` for each span."""
        self._append(
            SPANS_FILE,
            (
                {"who": who, "what": what, "step": step, "start": round(start, 4), "end": round(end, 4)}
                for what, start, end in spans
            ),
        )

    def groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Appends groups; `roll.rollout.recording` says what is known of one."""
        self._append(GROUPS_FILE, groups)

    def _append(self, name: str, entries: Iterable[Mapping[str, Any]]) -> None:
        lines = [_encode(entry) for entry in entries]
        if not lines or name in self._failed:
            return
        try:
            descriptor = os.open(self._folder / name, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                append_line(descriptor, "\n".join(lines))
            finally:
                os.close(descriptor)
        except OSError as error:
            self._stop_writing(name, error)

    def _stop_writing(self, name: str, error: Exception) -> None:
        self._failed.add(name)
        logger.warning("%s: not written from now on: %s", self._folder / name, error)


def _write(text: str, file: IO[str]) -> None:
    file.write(text)


def _step(line: str) -> int:
    """The step of a line; 0, which no run keeps, for one that a killed process wrote partially."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0
