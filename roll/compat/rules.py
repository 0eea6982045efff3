"""The language in which the keys of another system are described, and what applies it to a tree.

A `Table` has five verbs: `rename` a name at any depth, `move` a path, read a value as one of ours, `drop` a key that
changes nothing, with a remark, and `refuse` a key that has no counterpart. The last two are text, one rule a line:

    [<role>.] sft dpo                 begins a part: a prefix, and pipelines (none: all)
    key other_key: reason             dropped, whatever the value
    key if 1 adam* off: reason        dropped if the value is one of these, else refused
    refuse key: reason                refused

An indented line continues the one before. In a key `*` stands for any text inside one part of the path, and a part of
PLACEHOLDERS for each of its sections. The first rule that matches a path applies. Null is never refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from roll.base.errors import Problem
from roll.base.schema import Tree

PLACEHOLDERS = {
    "<role>": ("actor_train", "actor_infer", "reference", "critic", "reward", "judge", "validation"),
    "<megatron_role>": ("actor_train", "reference", "critic", "reward"),
}
"""Part of a pattern -> the sections that it stands for."""

PIPELINES_WITH_RULES = ("rlvr", "sft", "agentic", "dpo", "reward_model")

USER_SECTIONS = ("env_config",)
"""Sections whose keys belong to a class of the user."""

Test = Callable[[Any], bool]

TESTS: dict[str, Test] = {"on": bool, "off": lambda value: not value, "never": lambda value: False}
LITERALS: dict[str, Any] = {"true": True, "false": False, "null": None}
"""Words after `if` that are not patterns of text."""


@dataclass(frozen=True)
class Rule:
    """Drops or refuses the keys of a pattern, in the pipelines given; `reason` names the alternative."""

    pattern: str
    accepts: Test
    reason: str
    pipelines: tuple[str, ...] = PIPELINES_WITH_RULES

    def matches(self, path: str) -> bool:
        """Whether the pattern has as many parts as the path and each of them matches."""
        parts, wanted = path.split("."), self.pattern.split(".")
        return len(parts) == len(wanted) and all(map(_part_matches, parts, wanted))


@dataclass(frozen=True)
class Table:
    """The keys of one system: `values` by name at any depth, or by a path of `move`."""

    rename: Mapping[str, str] = field(default_factory=dict)
    move: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()


def read_rules(text: str, tests: Mapping[str, Test] | None = None) -> tuple[Rule, ...]:
    """The rules of a text in the language above; `tests` are further words after `if`."""
    rules: list[Rule] = []
    prefix, words = "", list[str]()
    for line in re.sub(r"\n[ \t]+", " ", text.strip()).splitlines():
        if line.startswith("["):
            prefix, _, rest = line[1:].partition("]")
            words = rest.split()
            continue
        keys, _, reason = line.partition(": ")
        names, _, accepted = keys.removeprefix("refuse ").partition(" if ")
        accepted = "never" if keys.startswith("refuse ") else accepted
        accepts = _any_of(accepted.split(), TESTS | dict(tests or {}))
        pipelines = tuple(words) or PIPELINES_WITH_RULES
        rules += [Rule(prefix + name, accepts, reason, pipelines) for name in names.split()]
    return tuple(rules)


def _any_of(words: list[str], tests: Mapping[str, Test]) -> Test:
    def accepts(value: Any) -> bool:
        return not words or any(_is_one(value, word) for word in words)

    def _is_one(value: Any, word: str) -> bool:
        if word in tests:
            return tests[word](value)
        literal = int(word) if word.isdigit() else LITERALS.get(word, word)
        return bool(value == literal) or (isinstance(literal, str) and fnmatchcase(str(value), literal))

    return accepts


def _part_matches(part: str, wanted: str) -> bool:
    return part in PLACEHOLDERS[wanted] if wanted in PLACEHOLDERS else fnmatchcase(part, wanted)


class RuleBook:
    """The rules of all tables, found by the last part of a path."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        self._by_name: dict[str, list[Rule]] = {}

    def find(self, path: str, pipeline: str) -> Rule | None:
        """The rule that applies to a path in any spelling of an argument."""
        path = path.replace("-", "_").lstrip("_")
        name = path.rpartition(".")[2]
        if name not in self._by_name:
            ends = [(rule, rule.pattern.rpartition(".")[2]) for rule in self.rules]
            self._by_name[name] = [rule for rule, end in ends if _part_matches(name, end)]
        return next((rule for rule in self._by_name[name] if pipeline in rule.pipelines and rule.matches(path)), None)

    def apply(self, tree: Tree, pipeline: str, path: str = "") -> tuple[Tree, list[Problem], list[Problem]]:
        """The tree without the keys that have a rule, remarks on what was dropped, and problems of what was refused."""
        kept: Tree = {}
        notes: list[Problem] = []
        problems: list[Problem] = []
        for key, value in tree.items():
            where = f"{path}.{key}" if path else str(key)
            rule = self.find(where, pipeline)
            if rule is None and isinstance(value, dict) and key not in USER_SECTIONS:
                inner, inner_notes, inner_problems = self.apply(value, pipeline, where)
                if inner or not value:
                    kept[key] = inner
                notes += inner_notes
                problems += inner_problems
            elif rule is None:
                kept[key] = value
            elif value is not None and not rule.accepts(value):
                shown = "this section" if isinstance(value, dict) else str(value)
                problems.append(Problem(where, f"{shown} is not available: {rule.reason}"))
            else:
                notes.append(Problem(where, f"has no effect: {rule.reason}"))
        return kept, notes, problems


def translate_values(tree: Tree, values: Mapping[str, Mapping[Any, Any]], path: str = "") -> tuple[Tree, list[Problem]]:
    """The tree with the values of keys, at any depth, in the spelling of this project, and a remark on each."""
    translated: Tree = {}
    notes: list[Problem] = []
    for key, value in tree.items():
        where = f"{path}.{key}" if path else key
        translated[key] = value
        if isinstance(value, dict) and key not in USER_SECTIONS:
            translated[key], inner = translate_values(value, values, where)
            notes += inner
        elif isinstance(value, str | int) and not isinstance(value, bool) and value in values.get(key, {}):
            translated[key] = values[key][value]
            notes.append(Problem(where, f"{value} is read as {translated[key]}"))
    return translated, notes
