r"""Where the answer stands in a response: the last `\boxed{...}`, or the last number."""

from __future__ import annotations

import re

BOXED = re.compile(r"\\f?boxed\s*\{")
NUMBER = re.compile(
    r"""
    (?:(?<![\w)\].])[-+\u2212])?               # a sign, unless it is the minus of a difference such as 12-5
    (?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)           # digits, with or without thousands separators
    (?:\.\d+)?                                 # decimals; a full stop ending a sentence is none
    (?:/\d+(?:\.\d+)?)?                        # a fraction
    """,
    re.VERBOSE,
)


def boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` whose braces balance, or None.

    A box that was cut off does not count. Of nested boxes the innermost is the last to open.
    """
    for match in reversed(list(BOXED.finditer(text))):
        content = _balanced(text, match.end())
        if content is not None:
            return content.strip()
    return None


def last_number(text: str) -> str | None:
    """The last number as written, without thousands separators; None where there is none.

    "1,234.50." gives 1234.50, "12-5=7" gives 7, "x = -3" gives -3, "about 3/4" gives 3/4.
    """
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "").replace("\u2212", "-").lstrip("+") if numbers else None


def extract_answer(text: str, pattern: str) -> str | None:
    r"""The answer of a response, or None where it gives none.

    Args:
        text: the response.
        pattern: `boxed`, `last_number`, or `boxed_or_last_number`: the box where there is one, else the last number.

    Raises:
        ValueError: the pattern is none of these.
    """
    if pattern == "boxed":
        return boxed(text)
    if pattern == "last_number":
        return last_number(text)
    if pattern == "boxed_or_last_number":
        content = boxed(text)
        return last_number(text) if content is None else content
    raise ValueError(f"answer_pattern: {pattern!r} is none of boxed, last_number, boxed_or_last_number")


def _balanced(text: str, start: int) -> str | None:
    """Text from `start` up to the brace that closes the one before it; escaped braces do not count."""
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:position]
        position += 1
    return None
