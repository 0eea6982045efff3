"""Files of a run: metrics.jsonl, one JSON object per step, and run.json, its configuration and result.

A file is complete or absent, also when the disk is full; the error then names the file and the bytes.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import logging
import math
import os
import platform
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import IO, Any

from roll.base.errors import RunError
from roll.base.events import append_line
from roll.base.redaction import redact
from roll.trackers.base import Tracker

logger = logging.getLogger(__name__)

FULL_DISK = {errno.ENOSPC, errno.EDQUOT}
"""Errors of a disk without space, or of a user without a share of it."""

FULL_DISK_TEXTS = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "StorageFull")
"""How those errors appear in messages of other processes and of libraries that are not written in Python."""


LOCK_FILE = ".lock"
"""File in a folder that one process uses at a time; that process holds it locked, and its id is in it."""


class FolderInUseError(Exception):
    """Another process uses the folder.

    Attributes:
        process: its id, or `unknown`.
    """

    def __init__(self, folder: Path, process: str) -> None:
        super().__init__(f"{folder} is in use by process {process}")
        self.process = process


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Makes a folder and keeps other processes that lock it out while the block runs.

    The lock ends with the process, however that ends. A subprocess that inherits the file descriptor, which is yielded,
    keeps it.

    Raises:
        FolderInUseError: another process has locked it.
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise FolderInUseError(folder, file.read().strip() or "unknown") from None
        except OSError as error:  # a file system without locks
            logger.warning("%s: use by two processes would not be noticed: %s", folder, error.strerror or error)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield file.fileno()


class DiskFullError(RunError):
    """A file of the run does not fit on its disk; the message names the file and the bytes."""

    def __init__(self, path: Path, needed: str = "", free: int | None = None) -> None:
        """Explains what could not be written; `needed` is how much, where that is known, such as `52.3 MB needed`.

        `free` bytes were free before the write; None: the bytes that are free now.
        """
        known = [needed] if needed else []
        free = free_bytes(path) if free is None else free
        known += [f"{megabytes(free)} free"] if free is not None else []
        super().__init__(
            f"no space left to write {path}{': ' if known else ''}{', '.join(known)}; free some space or move "
            "output_dir to another disk, then continue with resume_from_checkpoint=true"
        )


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, raised in this process or reported by another one, is that of a full disk."""
    if isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in FULL_DISK):
        return True
    return any(text in str(error) for text in FULL_DISK_TEXTS)


def free_bytes(path: Path) -> int | None:
    """Bytes that this user may still write on the disk of a path that may not exist; None if it cannot be asked."""
    there = next((each for each in (path, *path.absolute().parents) if each.exists()), None)
    try:
        return None if there is None else shutil.disk_usage(there).free
    except OSError:
        return None


def megabytes(count: int) -> str:
    """A number of bytes for people, in powers of 10."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turns an error of the operating system while `path` is written into a sentence.

    Raises:
        DiskFullError: its disk is full.
        RunError: it cannot be written for another reason.
    """
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise DiskFullError(path) from error
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error


def write_whole(
    path: Path,
    write: Callable[[IO[Any]], object],
    flush: bool = False,
    mode: int | None = None,
    binary: bool = False,
) -> Path:
    """Replaces a file at once, so that no reader ever sees a part of it; creates its folder.

    With `flush` it is on the disk afterwards and outlives the machine; `mode` is that of a new file by default.

    Raises:
        RunError: it cannot be written; what was there before stays.
    """
    aside = path.with_suffix(".partial")
    with explain_write_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") if binary else aside.open("w", encoding="utf-8") as file:
                if mode is not None:
                    os.fchmod(file.fileno(), mode)
                write(file)
                if flush:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    return path


def write_in_place(path: Path, text: str) -> None:
    """Writes over a file where its disk has no space for another one; a reader may see a part of it for a moment.

    Raises:
        RunError: the file does not exist, or the text needs more space than there is; then nothing of it has changed.
    """
    content = text.encode()
    with explain_write_errors(path), path.open("r+b") as file:
        before = os.fstat(file.fileno()).st_size
        try:
            os.posix_fallocate(file.fileno(), 0, len(content))
        except OSError:
            file.truncate(before)
            raise
        file.write(content)
        file.truncate()


class JsonlTracker(Tracker):
    """Appends `{"step": 3, "actor/loss": ..., ...}` lines, with sorted names, so that equal runs write equal files.

    Each line is one write to a file opened for appending: a reader sees whole lines, and a killed run loses at most the
    last one. A new run empties the file; a resumed run keeps the lines up to its step. JSON has no NaN and infinity,
    which are written as null. The folder is created with the first line.
    """

    every_step = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._kept: list[str] = []

    def resume(self, step: int) -> None:
        """Keeps the complete lines of steps up to and including `step`."""
        self._kept = [line for line in _lines(self._path) if _step(line) <= step]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the line of the step to the operating system before returning."""
        if self._descriptor is None:
            self._descriptor = self._begin()
        rest = {name: _number(value) for name, value in sorted(metrics.items()) if name != "step"}
        with explain_write_errors(self._path):
            append_line(self._descriptor, json.dumps({"step": step, **rest}))

    def close(self) -> None:
        """Flushes the file to disk."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _begin(self) -> int:
        write_whole(self._path, lambda file: file.writelines(f"{line}\n" for line in self._kept))
        return os.open(self._path, os.O_RDWR | os.O_APPEND)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The complete lines of a metrics.jsonl in file order; skips a line that a killed process wrote partially.

    Raises:
        ValueError: a line is not one object with a number as `step`; the message begins with file and line.
    """
    rows = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: is damaged: {error}; delete the line") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int | float):
            raise ValueError(f"{path}:{number}: is not a line of metrics; delete it")
        rows.append(row)
    return rows


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return path.read_text().split("\n")[:-1]


def _step(line: str) -> int:
    return int(json.loads(line)["step"])


def _number(value: float) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


RUN_FILE, HEALTH_FILE = "run.json", "health.json"

SUMMARY_BYTES = 1 << 14
"""Spaces at the end of run.json until the summary is known, which then fits there also on a full disk."""

PRIVATE = 0o600
"""Mode of a file that its owner alone reads: a configuration may hold more secrets than names tell."""


def write_run_json(
    folder: Path,
    config: Any,
    plan: Any,
    versions: Mapping[str, str] | None = None,
    summary: Mapping[str, Any] | None = None,
    origin: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `folder`/run.json and returns its path: atomically or, with a summary on a full disk, in place.

    Configuration and plan are dataclasses or mappings; `versions` are by default those of this process, and `origin` is
    what `find_origin` gives.

    Raises:
        RunError: the file cannot be written.
    """
    record = {
        "config": without_secrets(config),
        "versions": dict(versions or dependency_versions()),
        "origin": origin,
        "plan": plan,
        "summary": summary,
    }
    text = json.dumps(record, indent=2, default=plain) + "\n"
    return _write_private(folder / RUN_FILE, text if summary is not None else text + " " * SUMMARY_BYTES)


def _write_private(path: Path, text: str) -> Path:
    try:
        return write_whole(path, lambda file: file.write(text), flush=True, mode=PRIVATE)
    except DiskFullError:
        if not path.exists():
            raise
        write_in_place(path, text)
        return path


def replace_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Replaces the summary in `folder`/run.json.

    Raises:
        RunError: the file cannot be written.
        OSError, ValueError: it cannot be read.
    """
    path = folder / RUN_FILE
    record = json.loads(path.read_text()) | {"summary": summary}
    _write_private(path, json.dumps(record, indent=2, default=plain) + "\n")


@cache
def dependency_versions() -> dict[str, str]:
    """Versions of Python and of all installed distributions, by name."""
    installed = {found.metadata["Name"]: found.version for found in distributions()}
    ordered = dict(sorted(installed.items(), key=lambda entry: entry[0].lower()))
    return {"python": platform.python_version(), **ordered}


def find_origin(folder: Path) -> dict[str, Any]:
    """When a run begins, the git commit of its recipe's folder, and how many devices of each name this machine has.

    What cannot be found out is absent; a commit ends in `-dirty` where files have changed since.
    """
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    found: dict[str, Any] = {"start": round(time.time(), 3)}
    with suppress(OSError, subprocess.SubprocessError):
        found["commit"] = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    with suppress(OSError):
        files = [*Path("/proc/driver/nvidia/gpus").glob("*/information")] or [Path("/proc/cpuinfo")]
        text = "".join(file.read_text() for file in files)
        found["devices"] = Counter(re.findall(r"^(?:Model|model name)\s*:\s*(.*\S)", text, re.MULTILINE))
    return found


def without_secrets(config: Any) -> Any:
    """A configuration as nested mappings, with `***` for secrets."""
    return redact(json.loads(json.dumps(config, default=plain)))


def plain(value: Any) -> Any:
    """Converts values that `json.dump` cannot write.

    Raises:
        TypeError: `value` is neither a dataclass, a path nor a number of another library.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"run.json cannot hold {value!r} of type {type(value).__name__}")
