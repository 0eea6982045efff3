"""Texts that a model or an environment wrote, made harmless to print and short enough to read."""

from __future__ import annotations

import unicodedata
from itertools import groupby

from rich.text import Text

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
