"""Generates docs/other_spellings.md, what becomes of other systems' keys: `python -m roll.compat.reference`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from roll.compat.rules import PIPELINES_WITH_RULES
from roll.compat.systems.verl import VERL_KEYS
from roll.compat.translate import MOVED, RENAMED, RULES, VALUES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "other_spellings.md"
"""The generated page."""

INTRODUCTION = """# Keys of other systems

Generated from `roll/compat` by `python -m roll.compat.reference`.

Files of other systems may keep these spellings; `roll convert FILE` prints a file with the keys of this project, and
[coming_from.md](coming_from.md) explains how the systems differ.
"""


def render_spellings() -> str:
    """The whole page as Markdown."""
    rules = ((f"`{rule.pattern}`{_only(rule.pipelines)}", rule.reason) for rule in RULES.rules)
    return "\n".join(
        [
            INTRODUCTION,
            "## Other spellings\n\n" + _rows(("in other recipes", "here"), _spellings()),
            "## Keys without a counterpart\n\nA value that changes nothing is a warning, any other an error.\n\n"
            + _rows(("key", "reason"), rules),
        ]
    )


def _rows(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    return "".join(f"| {left} | {right} |\n" for left, right in (head, ("---", "---"), *rows))


def _only(pipelines: tuple[str, ...]) -> str:
    return "" if pipelines == PIPELINES_WITH_RULES else f" ({', '.join(pipelines)})"


def _spellings() -> Iterator[tuple[str, str]]:
    for other, name in RENAMED.items():
        yield f"`{other}`", f"`{name}`"
    for other, name in MOVED.items():
        if other in VERL_KEYS:  # docs/coming_from.md has them
            continue
        if other not in VALUES:
            yield f"`{other}`", f"`{name}`"
        for value, ours in VALUES.get(other, {}).items():
            yield f"`{other}: {json.dumps(value)}`", f"`{name}: {ours}`"
    yield (
        "`importance_sampling: true` with `is_clip_range: [0.5, 2.0]`",
        "`correction.weights: {level: token, mode: clamp, lower: 0.5, upper: 2.0}`",
    )
    for key, values in VALUES.items():
        for other, value in values.items() if key not in MOVED else ():
            yield f"`{key}: {other}`", f"`{key}: {value}`"


if __name__ == "__main__":
    PAGE.write_text(render_spellings(), encoding="utf-8")
    sys.exit(0)
