r"""Reward for problems with one exact answer: right or wrong, by mathematical equality."""

from __future__ import annotations

import logging
import re
from decimal import Decimal

from roll.configs.pipeline import RewardConfig
from roll.rewards.answers import boxed, extract_answer

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
