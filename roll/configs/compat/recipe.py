"""A recipe of another framework while it is translated, with a remark on everything that was changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any

from roll.base.errors import Problem
from roll.configs.compat import Tree

ABSENT: Any = object()
"""Default of `get`, to tell an absent key from one that is null."""


class Recipe:
    """A tree whose keys are taken, put and remarked on.

    `tree` is a copy, so the tree given is unchanged; `overridden` has the paths that the command line sets.
    """

    def __init__(self, tree: Mapping[str, Any], overridden: Collection[str] = ()) -> None:
        self.tree: Tree = deepcopy(dict(tree))
        self.overridden = frozenset(overridden)
        self.notes: list[Problem] = []
        self.problems: list[Problem] = []

    def note(self, path: str, message: str) -> None:
        self.notes.append(Problem(path, message))

    def refuse(self, path: str, value: Any, expected: str) -> None:
        """Adds the problem that a value is not what is expected."""
        self.problems.append(Problem(path, f"{value!r} is not {expected}"))

    def take_switch(self, path: str) -> bool | None:
        """Takes a key that is true or false; None where it is absent, null or refused."""
        value = self.take(path)
        if not isinstance(value, bool | None):
            self.refuse(path, value, "true or false")
            return None
        return value

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a dotted path, or the default where there is none."""
        value: Any = self.tree
        for part in path.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value

    def has(self, path: str) -> bool:
        """Whether the path is given, null included."""
        return self.get(path, ABSENT) is not ABSENT

    def section(self, path: str) -> Tree:
        """The section at a path; an empty one where there is none."""
        value = self.get(path)
        return value if isinstance(value, dict) else {}

    def take(self, path: str, default: Any = None) -> Any:
        """Removes a key, and a section that it leaves empty; returns its value, or the default where there is none."""
        head, _, key = path.rpartition(".")
        section = self.get(head) if head else self.tree
        if not isinstance(section, dict) or key not in section:
            return default
        value = section.pop(key)
        if head and not section:
            self.take(head)
        return value

    def put(self, path: str, value: Any) -> None:
        """Sets a key, and makes the sections around it; a value in place of such a section is left for conversion."""
        section: Any = self.tree
        *heads, key = path.split(".")
        for part in heads:
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
            if not isinstance(section, dict):
                return
        section[key] = value

    def put_new(self, path: str, value: Any) -> bool:
        """Sets a key that is not given; returns whether it was set."""
        if self.has(path):
            return False
        self.put(path, value)
        return True

    def drop(self, path: str, reason: str) -> Any:
        """Takes a key with the remark that it has no effect; returns its value."""
        if not self.has(path):
            return None
        value = self.take(path)
        self.note(path, f"has no effect: {reason}")
        return value
