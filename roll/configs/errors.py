"""Errors of a configuration, and the error that ends a run with a sentence instead of a traceback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing to change: where it stands, and the value, what is allowed and what to write instead."""

    path: str
    message: str

    def __str__(self) -> str:
        """`path: message`, or the message where no path applies."""
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(ValueError):
    """Every problem found in one configuration, told together."""

    def __init__(self, problems: Sequence[Problem], source: str = "") -> None:
        """Takes the problems in the order found and the file they come from."""
        self.problems = list(problems)
        self.source = source
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        head = f"{source}: {count}\n" if source else ""
        super().__init__(head + "\n".join(str(problem) for problem in self.problems))


class Report:
    """What the rules say about a configuration.

    `missing` holds what stops a run but not a plan: models, datasets and checkpoints that are not on this machine, and
    what cannot be run yet.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self.errors: list[Problem] = []
        self.warnings: list[Problem] = []
        self.missing: list[Problem] = []

    def error(self, path: str, message: str) -> None:
        """Nothing can be planned or run before this is changed."""
        self.errors.append(Problem(path, message))

    def warn(self, path: str, message: str) -> None:
        """It runs, but perhaps not as meant."""
        self.warnings.append(Problem(path, message))

    def absent(self, path: str, message: str) -> None:
        """It plans, but cannot run on this machine."""
        self.missing.append(Problem(path, message))


class RunError(RuntimeError):
    """The run cannot go on; the message says what happened, where, and what to change."""
