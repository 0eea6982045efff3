"""Spellings of other frameworks, one table each, and `apply`, which reads files that use them.

A table has any of: `NAMES` (refused keys, with their names here), `RENAMED_KEYS` and `MOVED_KEYS` (other spellings that
take effect), `RENAMED_VALUES`, and `UNSUPPORTED_KEYS` (keys without a counterpart). To support another spelling, add it
to the table of its framework.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class UnsupportedKey:
    """A key without a counterpart here, in the pipelines given.

    Harmless values are dropped with a warning, others are errors. `reason` names the alternative.
    """

    pattern: str
    harmless: Callable[[Any], bool]
    reason: str
    pipelines: tuple[str, ...] = ("rlvr", "sft", "agentic")
