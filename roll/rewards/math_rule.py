r"""Reward of problems with one exact answer: extracts the answer of a response and compares it mathematically."""

from __future__ import annotations

import logging
import re
from decimal import Decimal

from roll.configs.rewards import RewardConfig

BOXED = re.compile(r"\\f?boxed\s*\{")
NUMBER = re.compile(
    r"""
    (?:(?<![\w)\].])[-+\u2212])?               # a sign, unless it is the minus of a difference such as 12-5
    (?:
        (?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)       # digits, with or without thousands separators
        (?:\.\d+)?                             # decimals, but not the full stop of a sentence
      | (?<![\w.])\.\d+                        # decimals without a leading zero
    )
    (?:[eE][-+]?\d{1,3}(?!\w))?                # a power of ten
    (?:/(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?)?  # a fraction
    """,
    re.VERBOSE,
)
SCIENTIFIC = re.compile(r"([-+]?[\d.]+[eE][-+]?\d+)")

BRACES = re.compile(r"\\.|[{}]", re.DOTALL)

LONGEST_ANSWER = 2_000
"""Characters of an answer that is compared with math-verify."""

DEEPEST_ANSWER = 12
"""Brackets inside of each other in an answer that math-verify compares: its time doubles with each fraction."""


def boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` with balanced braces, or None.

    An incomplete box is skipped. Of nested boxes, the innermost counts as the last.
    """
    boxes = {match.end() for match in BOXED.finditer(text)}
    if not boxes:
        return None
    opened: list[int] = []
    last: tuple[int, int] | None = None
    for match in BRACES.finditer(text):
        if match[0] == "{":
            opened.append(match.end())
        elif match[0] == "}" and opened:
            start = opened.pop()
            if start in boxes and (last is None or start > last[0]):
                last = start, match.start()
    return text[slice(*last)].strip() if last else None


def last_number(text: str) -> str | None:
    """The last number as written, without thousands separators; None if there is none.

    "1,234.50." gives 1234.50, "12-5=7" gives 7, "x = -3" gives -3, "about 3/4" gives 3/4, "-.5" gives -.5 and "1.5e3"
    gives 1500.
    """
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    number = numbers[-1].replace(",", "").replace("\u2212", "-").lstrip("+")
    return SCIENTIFIC.sub(lambda match: f"{Decimal(match[1]).normalize():f}", number)


def extract_answer(text: str, pattern: str) -> str | None:
    r"""The answer of a response, or None if it has none.

    Args:
        text: the response.
        pattern: `boxed`, `last_number`, or `boxed_or_last_number`: the box if there is one, else the last number.

    Raises:
        ValueError: the pattern is not one of these.
    """
    if pattern == "boxed":
        return boxed(text)
    if pattern == "last_number":
        return last_number(text)
    if pattern == "boxed_or_last_number":
        content = boxed(text)
        return last_number(text) if content is None else content
    raise ValueError(f"answer_pattern: {pattern!r} is not one of boxed, last_number, boxed_or_last_number")


PLAIN_INTEGER = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:,\d{3})+)")

SELF_TEST: tuple[tuple[str, str, bool], ...] = (
    (r"12 + 34 = \boxed{46}", "46", True),
    (r"12 + 34 = \boxed{47}", "46", False),
    (r"It is \boxed{0.5}", r"\frac{1}{2}", True),
    (r"It is \boxed{0.5}", r"\frac{1}{3}", False),
    (r"That makes \boxed{-1234}.", "-1,234", True),
    ("I do not know.", "7", False),
)
"""(response, ground truth, whether it is right), valid for every `answer_pattern`; scored before the first step."""


def math_reward(response: str, ground_truth: str, config: RewardConfig) -> float:
    r"""`correct_score` if the answer of the response equals the ground truth, else `wrong_score`.

    The answer is extracted by `config.answer_pattern`; a response without one is wrong. Two plain integers are compared
    by value, hundreds of thousands per second. Everything else is compared with math-verify (parse and verify), whose
    own timeouts are off because the pool has a deadline.

    Args:
        response: the decoded response, without the prompt.
        ground_truth: the answer, or a worked solution with the answer in `\boxed{}` or, as in GSM8K, after `####`.
        config: `answer_pattern`, `correct_score` and `wrong_score` are used.

    Raises:
        ValueError: the ground truth cannot be parsed as mathematics.
    """
    expected = (boxed(ground_truth) or ground_truth.rpartition("####")[2]).strip()
    answer = extract_answer(response, config.answer_pattern)
    right = answer is not None and equal(answer, expected)
    return config.correct_score if right else config.wrong_score


def equal(answer: str, expected: str) -> bool:
    """Whether two answers are the same number, expression or set.

    Raises:
        ValueError: `expected` cannot be parsed as mathematics.
    """
    if answer == expected:
        return True
    if PLAIN_INTEGER.fullmatch(answer) and PLAIN_INTEGER.fullmatch(expected):
        return _integer(answer) == _integer(expected)
    if len(answer) > max(LONGEST_ANSWER, len(expected)) or _depth(answer) > max(DEEPEST_ANSWER, _depth(expected)):
        return False
    return _verify(answer, expected)


def warm_up() -> None:
    """Loads math-verify, which takes seconds that must not count towards the deadline of a sample."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _verify("0.5", r"\frac{1}{2}")


def _depth(text: str) -> int:
    """The most brackets that are open at one place."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest


def _integer(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def _verify(answer: str, expected: str) -> bool:
    from math_verify import parse, verify

    gold = parse(_as_latex(expected), parsing_timeout=None) or parse(expected, parsing_timeout=None)
    if not gold:
        raise ValueError(f"ground truth {expected!r} cannot be parsed as mathematics")
    given = parse(_as_latex(answer), parsing_timeout=None) or parse(answer, parsing_timeout=None)
    return bool(given) and bool(verify(gold, given, timeout_seconds=None))


def _as_latex(text: str) -> str:
    return rf"\boxed{{{text}}}"
