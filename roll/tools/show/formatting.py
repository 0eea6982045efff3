"""Numbers as they are shown everywhere: scores, advantages, weight versions."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import groupby

from rich.text import Text

MOST_SCORES = 16
"""Scores of a group that are listed; the mean is of all."""


def counted(count: int, noun: str) -> str:
    """`1 group`, `2 trajectories`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun.removesuffix('y')}ies" if noun.endswith("y") else f"{count:,} {noun}s"


def number(value: float) -> str:
    """Four digits, no zeros at the end."""
    return f"{value:.4g}"


def scores(values: Sequence[float]) -> str:
    """`1 0 0 1, mean 0.5`, shortened with a count."""
    listed = " ".join(number(value) for value in values[:MOST_SCORES])
    more = f" and {len(values) - MOST_SCORES} more" if len(values) > MOST_SCORES else ""
    return f"{listed}{more}, mean {number(sum(values) / len(values))}"


def advantage(value: float | None, name: str = "advantage") -> Text:
    """Signed, green above zero and red below."""
    if value is None:
        return Text(f"{name} not in the dump", "dim")
    return Text.assemble(f"{name} ", (f"{value:+.3f}", "green" if value > 0 else "red" if value < 0 else ""))


def versions(values: Sequence[int]) -> Text:
    """`version 3`; several stand out, since weights changed while the model wrote."""
    if len(values) == 1:
        return Text(f"version {values[0]}", "dim")
    return Text(f"versions {', '.join(map(str, values)) or 'unknown'}", "yellow")


HEAD_CHARACTERS, TAIL_CHARACTERS = 1500, 500
"""Of a longer text these remain; more of the head, some of the tail because an answer stands there."""

HEAD_LINES, TAIL_LINES = 30, 10
"""The same in lines, for texts of many short ones."""

NAME_CHARACTERS = 120
"""Of a longer name these remain."""

UNSEEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories that move the cursor, turn the direction of writing, are invisible, or cannot be encoded."""

ESCAPE_STYLE = "bold magenta"
"""Of escapes, which tells them from a backslash that stands in the text."""

LEFT_OUT_STYLE = "italic yellow"


def safe(text: str, style: str = "", keep: str = "\n") -> Text:
    """The text, in which only `keep` acts: everything else in UNSEEN is shown as Python would escape it."""
    shown = Text(style=style)
    for unseen, run in groupby(text, key=lambda character: character not in keep and _unseen(character)):
        piece = "".join(run)
        shown.append(piece.encode("unicode_escape").decode() if unseen else piece, ESCAPE_STYLE if unseen else None)
    return shown


def safe_line(text: str, style: str = "") -> Text:
    """A name on one line: line breaks are escaped too, and the end of a long one is left out, and counted."""
    shown = safe(text[:NAME_CHARACTERS], style, keep="")
    left_out = len(text) - NAME_CHARACTERS
    return shown.append(f"... {left_out:,} characters left out", LEFT_OUT_STYLE) if left_out > 0 else shown


def safe_short(text: str, style: str = "") -> Text:
    """The same, of which the middle is left out where it is long, and counted."""
    head, left_out, tail = shortened(text)
    if not left_out:
        return safe(text, style)
    told = Text(f"\n... {left_out:,} characters left out ...\n", LEFT_OUT_STYLE)
    return Text.assemble(safe(head, style), told, safe(tail, style))


def shortened(text: str) -> tuple[str, int, str]:
    """Head, number of characters left out, tail; the whole text, 0 and nothing where it is short enough."""
    few_lines = text.count("\n") < HEAD_LINES + TAIL_LINES
    if len(text) <= HEAD_CHARACTERS + TAIL_CHARACTERS and few_lines:
        return text, 0, ""
    head = "\n".join(text[:HEAD_CHARACTERS].split("\n")[:HEAD_LINES])
    rest = text[len(head) :]
    tail = "\n".join(rest[-TAIL_CHARACTERS:].split("\n")[-TAIL_LINES:])
    return head, len(rest) - len(tail), tail


def _unseen(character: str) -> bool:
    return unicodedata.category(character) in UNSEEN
