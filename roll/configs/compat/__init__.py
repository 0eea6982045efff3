"""Spellings of other frameworks, one table each, and `apply`, which reads files that use them.

A table has any of: `NAMES` (refused keys, with their names in this project), `RENAMED_KEYS` and `MOVED_KEYS` (other
spellings that take effect), `RENAMED_VALUES`, and `UNSUPPORTED_KEYS` (keys without a counterpart). To support another
spelling, add it to the table of its framework.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from roll.base.errors import Problem

Tree = dict[str, Any]
"""A configuration as nested plain mappings."""

SGLANG = "actor_infer.strategy_args.strategy_config"
MEGATRON = "actor_train.strategy_args.strategy_config"
TRAINING = "actor_train.training_args"
SAMPLING = "actor_infer.generating_args"

Names = dict[str, str | tuple[str, ...]]
"""Name in another framework -> key or keys of this project. A name is the end of a path; `.*` is any key."""


def two_spellings(path: str, ours: str) -> Problem:
    """The problem of a key that is given in the spelling of another framework and in the one used here."""
    return Problem(path, f"is another spelling of {ours}, which is given too; keep one")


def without(tree: Tree, path: str) -> Tree:
    """The tree without the key at a dotted path, which it has, and without sections that this empties."""
    name, dot, rest = path.partition(".")
    others = {key: value for key, value in tree.items() if key != name}
    inner = without(tree[name], rest) if dot else {}
    return {key: inner if key == name else value for key, value in tree.items()} if inner else others


def set_at(tree: Tree, path: str, value: Any) -> Tree:
    """The tree with a value at a dotted path; missing sections are added."""
    name, dot, rest = path.partition(".")
    return {**tree, name: set_at(tree.get(name) or {}, rest, value) if dot else value}


def always(value: Any) -> bool:
    """For keys of which every value is harmless."""
    return True


def never(value: Any) -> bool:
    """For keys of which no value is harmless."""
    return False


def if_off(value: Any) -> bool:
    """For keys of which false, null and 0 are harmless."""
    return not value


PLACEHOLDERS = {
    "<role>": ("actor_train", "actor_infer", "reference", "critic", "reward", "judge", "validation"),
    "<megatron role>": ("actor_train", "reference", "critic", "reward"),
}
"""Part of a pattern -> the sections that it stands for."""


@dataclass(frozen=True)
class UnsupportedKey:
    """A key without a counterpart here, in the pipelines given.

    Harmless values are dropped with a warning (without one if `silent`), others are errors. `reason` names the
    alternative. In `pattern`, `*` stands for any text inside one part of the path, and a part of PLACEHOLDERS for each
    of its sections.
    """

    pattern: str
    harmless: Callable[[Any], bool]
    reason: str
    pipelines: tuple[str, ...] = ("rlvr", "sft", "agentic", "dpo", "reward_model")
    silent: bool = False

    def matches(self, path: str) -> bool:
        """Whether the pattern has as many parts as the path and each of them matches."""
        parts, wanted = path.split("."), self.pattern.split(".")
        return len(parts) == len(wanted) and all(map(_part_matches, parts, wanted))

    def matches_name(self, name: str) -> bool:
        """Whether the last part of the pattern matches the last part of a path."""
        return _part_matches(name, self.pattern.rpartition(".")[2])


def _part_matches(part: str, wanted: str) -> bool:
    return part in PLACEHOLDERS[wanted] if wanted in PLACEHOLDERS else fnmatchcase(part, wanted)
