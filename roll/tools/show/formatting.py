"""Short texts for the terminal: numbers, scores, weight versions, and sanitized texts of models and environments."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import groupby

from rich.text import Text

MAX_SCORES = 16
"""Scores of a group that are listed; the mean covers all."""

HEAD_CHARACTERS, TAIL_CHARACTERS = 1500, 500
"""Characters kept of a longer text. The tail is kept because it often holds the answer."""

HEAD_LINES, TAIL_LINES = 30, 10
"""Lines kept of a longer text."""

NAME_CHARACTERS = 120
"""Characters kept of a longer name."""

ESCAPED_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories that move the cursor, change the writing direction, are invisible, or cannot be encoded."""

ESCAPE_STYLE = "bold magenta"
"""Style of escapes, which distinguishes them from a backslash in the text."""

OMITTED_STYLE = "italic yellow"


def format_number(value: float) -> str:
    """Four significant digits, without trailing zeros."""
    return f"{value:.4g}"


def format_scores(values: Sequence[float]) -> str:
    """Scores and their mean, `1 0 0 1, mean 0.5`; lists at most MAX_SCORES."""
    listed = " ".join(format_number(value) for value in values[:MAX_SCORES])
    more = f" and {len(values) - MAX_SCORES} more" if len(values) > MAX_SCORES else ""
    return f"{listed}{more}, mean {format_number(sum(values) / len(values))}"


def format_advantage(value: float | None, name: str = "advantage") -> Text:
    """A signed advantage, green above zero and red below."""
    if value is None:
        return Text(f"{name} not in the dump", "dim")
    return Text.assemble(f"{name} ", (f"{value:+.3f}", "green" if value > 0 else "red" if value < 0 else ""))


def format_versions(values: Sequence[int]) -> Text:
    """`version 3`; several versions, of weights updated during generation, are highlighted."""
    if len(values) == 1:
        return Text(f"version {values[0]}", "dim")
    return Text(f"versions {', '.join(map(str, values)) or 'unknown'}", "yellow")


def sanitize(text: str, style: str = "", keep: str = "\n") -> Text:
    """The text with characters of ESCAPED_CATEGORIES written as Python escapes, except those in `keep`."""
    sanitized = Text(style=style)
    for escaped, run in groupby(text, key=lambda character: character not in keep and _is_escaped(character)):
        piece = "".join(run)
        sanitized.append(
            piece.encode("unicode_escape").decode() if escaped else piece, ESCAPE_STYLE if escaped else None
        )
    return sanitized


def sanitize_line(text: str, style: str = "") -> Text:
    """A name on one line: line breaks are escaped too, and a long name is cut."""
    sanitized = sanitize(text[:NAME_CHARACTERS], style, keep="")
    omitted = len(text) - NAME_CHARACTERS
    return sanitized.append(f"... {omitted:,} characters omitted", OMITTED_STYLE) if omitted > 0 else sanitized


def cut_middle(text: Text) -> Text:
    """The text; the middle of a long one is replaced by the number of characters omitted."""
    plain = text.plain
    if len(plain) <= HEAD_CHARACTERS + TAIL_CHARACTERS and plain.count("\n") < HEAD_LINES + TAIL_LINES:
        return text
    head = "\n".join(plain[:HEAD_CHARACTERS].split("\n")[:HEAD_LINES])
    tail = "\n".join(plain[len(head) :][-TAIL_CHARACTERS:].split("\n")[-TAIL_LINES:])
    omitted = len(plain) - len(head) - len(tail)
    gap = Text(f"\n... {omitted:,} characters omitted ...\n", OMITTED_STYLE)
    return Text.assemble(text[: len(head)], gap, text[len(head) + omitted :])


def _is_escaped(character: str) -> bool:
    return unicodedata.category(character) in ESCAPED_CATEGORIES
