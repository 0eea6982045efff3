"""A recipe of another framework while it is translated, with a remark on everything that was changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any, TypeGuard

from roll.base.errors import Problem
from roll.base.schema import Tree
from roll.configs.devices.parallel_layout import parse_device_mapping

SGLANG = "actor_infer.strategy_args.strategy_config"
MEGATRON = "actor_train.strategy_args.strategy_config"
TRAINING = "actor_train.training_args"
SAMPLING = "actor_infer.generating_args"

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

    def error(self, path: str, message: str) -> None:
        self.problems.append(Problem(path, message))

    def refuse(self, path: str, value: Any, expected: str) -> None:
        self.error(path, f"{value!r} is not {expected}")

    def two_spellings(self, path: str, ours: str) -> None:
        """Adds the problem that a key is given in the spelling of another framework and in the one used here."""
        self.error(path, f"is another spelling of {ours}, which is given too; keep one")

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

    def devices(self, role: str) -> list[int]:
        """The devices of a role; none where they are not given or wrong, which conversion reports."""
        try:
            parsed = parse_device_mapping(self.get(f"{role}.device_mapping", []))
        except ValueError:
            return []
        return parsed if isinstance(parsed, list) and all(type(rank) is int for rank in parsed) else []

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

    def take_switch(self, path: str) -> bool | None:
        """Takes a key that is true or false; None where it is absent, null or refused."""
        value = self.take(path)
        if not isinstance(value, bool | None):
            self.refuse(path, value, "true or false")
            return None
        return value

    def take_count(self, path: str) -> int | None:
        """Takes a whole number of at least 1; None where it is absent, null or refused."""
        value = self.take(path)
        if value is not None and not is_count(value):
            self.refuse(path, value, NO_COUNT)
        return value if is_count(value) else None

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

    def move(self, path: str, ours: str, name: str = "") -> None:
        """Takes a key and sets ours if it is not given, which the remark calls `name`."""
        value = self.take(path)
        if value is not None and self.put_new(ours, value):
            self.note(path, f"is read as {name or ours}")

    def drop(self, path: str, reason: str) -> None:
        """Takes a key with the remark that it has no effect."""
        if self.has(path):
            self.take(path)
            self.note(path, f"has no effect: {reason}")


NO_COUNT = "a whole number of at least 1"


def is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 1


def shown(value: Any) -> str:
    """A value as a remark shows it, in the spelling of YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
