"""Spellings of other frameworks, one table each, and `apply`, which reads files that use them.

A table has any of: `NAMES` (refused keys, with their names here), `RENAMED_KEYS` and `MOVED_KEYS` (other spellings that
take effect), `RENAMED_VALUES`, and `UNSUPPORTED_KEYS` (keys without a counterpart). To support another spelling, add it
to the table of its framework.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

Names = dict[str, str | tuple[str, ...]]
"""Name elsewhere -> key or keys here. A name is the end of a path; `.*` is any key of a section."""


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
    "<role>": ("actor_train", "actor_infer", "reference", "critic", "validation"),
    "<megatron role>": ("actor_train", "reference"),
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
    pipelines: tuple[str, ...] = ("rlvr", "sft", "agentic")
    silent: bool = False

    def matches(self, path: str) -> bool:
        """Whether the pattern has as many parts as the path and each of them matches."""
        parts, wanted = path.split("."), self.pattern.split(".")
        return len(parts) == len(wanted) and all(
            part in PLACEHOLDERS[want] if want in PLACEHOLDERS else fnmatchcase(part, want)
            for part, want in zip(parts, wanted, strict=True)
        )
