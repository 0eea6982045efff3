r"""Where the answer stands in a response: the last `\boxed{...}`, or the last number."""

from __future__ import annotations

import logging
import re
from decimal import Decimal

from roll.configs.pipeline import RewardConfig

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


PLAIN_INTEGER = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:,\d{3})+)")

SELF_TEST: tuple[tuple[str, str, bool], ...] = (
    (r"12 + 34 = \boxed{46}", "46", True),
    (r"12 + 34 = \boxed{47}", "46", False),
    (r"It is \boxed{0.5}", r"\frac{1}{2}", True),
    (r"It is \boxed{0.5}", r"\frac{1}{3}", False),
    (r"That makes \boxed{-1234}.", "-1,234", True),
    ("I do not know.", "7", False),
)
"""(response, ground truth, whether it is right), true under every answer_pattern; run before the first step."""


def math_reward(response: str, ground_truth: str, config: RewardConfig) -> float:
    r"""`correct_score` if the answer of the response equals the ground truth, else `wrong_score`.

    The answer stands where `config.answer_pattern` says; a response without one is wrong. Two plain integers are equal
    exactly when their values are, so those are compared as such, at hundreds of thousands a second; everything else
    goes through math-verify (parse and verify), with its own alarms off, because the pool has the deadline.

    Args:
        response: the decoded response, without the prompt.
        ground_truth: the answer, or a worked solution that has it in `\boxed{}`.
        config: the pattern and the two scores.

    Raises:
        ValueError: the ground truth is not readable as mathematics; then no response can be judged.
    """
    expected = (boxed(ground_truth) or ground_truth).strip()
    answer = extract_answer(response, config.answer_pattern)
    right = answer is not None and equal(answer, expected)
    return config.correct_score if right else config.wrong_score


def equal(answer: str, expected: str) -> bool:
    """Whether two answers are the same number, expression or set.

    Raises:
        ValueError: `expected` is not readable as mathematics.
    """
    if answer == expected:
        return True
    if PLAIN_INTEGER.fullmatch(answer) and PLAIN_INTEGER.fullmatch(expected):
        return _integer(answer) == _integer(expected)
    return _verify(answer, expected)


def warm_up() -> None:
    """Loads math-verify, which takes a second or two, so that no sample's deadline has to pay for it."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _verify("0.5", r"\frac{1}{2}")


def _integer(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def _verify(answer: str, expected: str) -> bool:
    from math_verify import parse, verify

    gold = parse(_as_latex(expected), parsing_timeout=None) or parse(expected, parsing_timeout=None)
    if not gold:
        raise ValueError(f"ground truth {expected!r} is not readable as mathematics")
    given = parse(_as_latex(answer), parsing_timeout=None) or parse(answer, parsing_timeout=None)
    return bool(given) and verify(gold, given, timeout_seconds=None)


def _as_latex(text: str) -> str:
    return rf"\boxed{{{text}}}"
