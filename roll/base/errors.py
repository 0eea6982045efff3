"""Errors written for the user, and the report that configuration rules fill."""

from __future__ import annotations

import difflib
import errno
import os
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Problem:
    """One thing to change: the path of the key, and a message with the value, what is allowed and what to write."""

    path: str
    message: str

    def __str__(self) -> str:
        """`path: message`, or the message where no path applies."""
        return f"{self.path}: {self.message}" if self.path else self.message


@dataclass(frozen=True)
class Finding(Problem):
    """What a check of one subject yields: a problem and what it stops (see `Report`)."""

    kind: Literal["error", "warning", "missing"]


def error(path: str, message: str) -> Finding:
    """Stops planning and running."""
    return Finding(path, message, "error")


def warning(path: str, message: str) -> Finding:
    """Stops nothing: it runs, but perhaps not as intended."""
    return Finding(path, message, "warning")


def missing(path: str, message: str) -> Finding:
    """Stops a run on this machine, but not a plan."""
    return Finding(path, message, "missing")


class RunError(RuntimeError):
    """Ends a run with a sentence instead of a traceback: what happened, where, and what to change."""


class RunInterrupted(Exception):
    """A signal ended the run after a whole step.

    Attributes:
        checkpoint: that holds this step; None where the run saves none.
    """

    def __init__(self, checkpoint: Path | None) -> None:
        super().__init__("interrupted")
        self.checkpoint = checkpoint


class ConfigError(ValueError):
    """All problems found in one configuration."""

    def __init__(self, problems: Sequence[Problem], source: str = "") -> None:
        self.problems = list(problems)
        self.source = source
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        head = f"{source}: {count}\n" if source else ""
        super().__init__(head + "\n".join(str(problem) for problem in self.problems))


@dataclass
class Report:
    """Findings of the rules about one configuration.

    Errors stop planning and running. Missing resources (a model, dataset or checkpoint that is not on this machine)
    stop a run but not a plan. Warnings stop nothing.
    """

    errors: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    missing: list[Problem] = field(default_factory=list)

    def add(self, findings: Iterable[Finding]) -> None:
        add = {"error": self.error, "warning": self.warn, "missing": self.missing_resource}
        for each in findings:
            add[each.kind](each.path, each.message)

    def include(self, other: Report) -> None:
        self.errors += [problem for problem in other.errors if problem not in self.errors]
        self.warnings += other.warnings
        self.missing += other.missing

    def error(self, path: str, message: str) -> None:
        """Adds a problem that stops planning and running."""
        if (problem := Problem(path, message)) not in self.errors:
            self.errors.append(problem)

    def warn(self, path: str, message: str) -> None:
        """Adds a remark about something that runs, but perhaps not as intended."""
        self.warnings.append(Problem(path, message))

    def missing_resource(self, path: str, message: str) -> None:
        """Adds a problem that stops a run on this machine, but not a plan."""
        self.missing.append(Problem(path, message))


SEARCHED_NAMES = 2_000
"""Entries of a folder that are compared with a name; more would take seconds."""


def similar_path(path: Path, fits: Callable[[Path], bool]) -> Path | None:
    """The path in the same folder with the most similar name that fits; None if there is none."""
    try:
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry in islice(entries, SEARCHED_NAMES)]
    except OSError:
        return None
    fitting = [path.parent / name for name in names if fits(path.parent / name)]
    fitting.sort(key=lambda each: difflib.SequenceMatcher(None, path.name, each.name).ratio(), reverse=True)
    close = difflib.get_close_matches(path.stem, [each.stem for each in fitting], n=1)  # endings are alike anyway
    return next((each for each in fitting if each.stem in close), None)


def unreachable(path: str | Path) -> str | None:
    """The operating system's reason why nothing at `path` can be read; None if it can be read or does not exist."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.strerror
    except ValueError as error:  # a null byte, or half of a character
        return f"no file can have this name ({error})"
    needed = os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK
    return None if os.access(path, needed) else os.strerror(errno.EACCES)


def obstacle(folder: Path) -> str | None:
    """Why a folder cannot be made or written; None if it can."""
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path) or path == path.parent)
    if not there.is_dir():
        return f"cannot be a folder, since {there} is a file"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"cannot be written, since this user has no access to {there}"
    if there.resolve().parts[1:2] in (("proc",), ("sys",)):
        return f"cannot be made, since {there} belongs to the kernel"
    for path in (folder, *(there / name for name in folder.relative_to(there).parts)):
        if (why := unreachable(path)) is not None:
            return f"cannot be used, since {reprlib.repr(path.name)} cannot be reached: {why}"
    return None


GIT_LFS_POINTER = b"version https://git-lfs"
"""Beginning of the small text file that git leaves where git-lfs is not installed."""


def git_lfs_pointer(file: Path) -> str | None:
    """Why a file has no content of its own, if it is a git-lfs pointer; raises OSError if it cannot be read."""
    with file.open("rb") as opened:
        is_pointer = opened.read(len(GIT_LFS_POINTER)) == GIT_LFS_POINTER
    return "is a git-lfs pointer, not the file itself; run git lfs pull" if is_pointer else None
