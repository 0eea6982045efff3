"""Rewards that compare the answer of a response with the ground truth as text: a choice, an exact text, a pattern."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from functools import cache

from roll.configs.scoring.built_in_rewards import built_in_of
from roll.configs.scoring.rewards import RewardConfig
from roll.rewards.calling import SelfTest, without_reasoning
from roll.rewards.math_rule import boxed

STATED = re.compile(r"(?i)\banswer\b[^\w\n:=]{0,4}(?:\b(?:is|would be|should be)\b|:|=)[^\w\n]{0,4}")
"""Words before an answer, such as "answer is" or "Answer:", with the marks after them."""

STATED_LETTER = re.compile(r"([A-Za-z])(?:[).,:;*]|\s*$)")
"""A choice directly after such words, which is neither the article nor the pronoun I."""

LETTER = re.compile(r"(?<![A-Za-z0-9'\u2019])([A-Za-z])(?![A-Za-z0-9'\u2019])")
"""A letter that is not part of a word."""

SEVERAL = re.compile(r"(?i)[A-Z]\)?\s*(?:,|/|&|\bor\b|\band\b)\s*\(?[A-Z](?![A-Za-z0-9])")
"""Two choices at once."""

ONLY_SEVERAL = re.compile(r"\(?[A-Z]\)?(?:\s*(?:,|/|&|\bor\b|\band\b)\s*\(?[A-Z]\)?)+[\s.*]*$")
"""A statement that is nothing but several choices."""

DENIED = re.compile(r"\bnot \(?[A-Z]\b\)?")
"""A choice that a statement excludes."""

CORRECTED = re.compile(
    r"(?m)\b(?i:wait|actually|correction|sorry|no)\b[,:!] (?i:no, |i mean |it is |it's )*\(?([A-HJ-Z])\)?(?=[.!*]|\s*$)"
)
"""A choice that takes the place of an earlier one, as in "Wait, B."."""

LATEX_TEXT = re.compile(r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}")
"""Text inside of LaTeX mathematics."""

QUOTES_AND_STOPS = " \t\n\"'`*_.,;:!\u201c\u201d\u2018\u2019"
"""Characters around an answer that do not belong to it."""


def multiple_choice(response: str, ground_truth: str, config: RewardConfig) -> float:
    r"""`correct_score` if the response chooses the letter of the ground truth, else `wrong_score`.

    The choice of the response is, in this order: the letter in the last `\boxed{}`; the first letter after the last
    "answer is" or "Answer:", in lower case only directly after it; the last capital letter that stands alone. A
    correction such as "Wait, B." is the same as "Answer: B". I counts in the box, directly after these words and in
    parentheses, and is the pronoun elsewhere. A response without a letter is wrong, and so is a box that holds
    something else or several letters; so are several after these words. What precedes `</think>` does not count.

    Args:
        response: the decoded response.
        ground_truth: a letter, alone or at the start, such as `B`, `(B)` or `B. Paris`.
        config: `correct_score` and `wrong_score` are used.

    Raises:
        ValueError: the ground truth begins with no letter that stands alone.
    """
    wanted = LETTER.match(ground_truth.strip().lstrip("([").strip())
    if wanted is None:
        raise ValueError(f"the ground truth {ground_truth!r} is not the letter of a choice, such as B")
    right = choice(response) == wanted[1].upper()
    return config.correct_score if right else config.wrong_score


def choice(response: str) -> str | None:
    """The letter that a response chooses, in upper case; None if it chooses none. See `multiple_choice`."""
    text = unicodedata.normalize("NFKC", without_reasoning(response))
    in_box = boxed(text)
    if in_box is not None:
        content = LATEX_TEXT.sub(r"\1", in_box).strip().lstrip("([").strip()
        letter = None if SEVERAL.match(content) else LETTER.match(content)
        return letter[1].upper() if letter else None
    for stated in (DENIED.sub("", each) for each in _statements(CORRECTED.sub(r"\nAnswer: \1", text))):
        if ONLY_SEVERAL.match(stated):
            return None
        direct, capitals = STATED_LETTER.match(stated), _capitals(stated)
        if direct or capitals:
            return direct[1].upper() if direct else capitals[0]
    standalone = _capitals(text)
    return standalone[-1] if standalone else None


def _capitals(text: str) -> list[str]:
    found = (match for match in LETTER.finditer(text) if match[1].isupper())
    return [match[1] for match in found if match[1] != "I" or text[match.start() - 1 : match.end() + 1] == "(I)"]


def exact_match(response: str, ground_truth: str | list[str], config: RewardConfig) -> float:
    r"""`correct_score` if the answer of the response is the ground truth after normalization, else `wrong_score`.

    The answer is the content of the last `\boxed{}`; else the rest of the line after the last "answer is" or "Answer:";
    else the whole response. What precedes `</think>` does not count. `normalized` says which differences are ignored.

    Args:
        response: the decoded response.
        ground_truth: the answer, or a JSON list of texts any of which is right.
        config: `correct_score` and `wrong_score` are used.

    Raises:
        ValueError: the ground truth is empty after normalization.
    """
    accepted = {normalized(text) for text in _accepted(ground_truth)}
    if "" in accepted or not accepted:
        raise ValueError(f"the ground truth {ground_truth!r} holds no text to compare with")
    right = normalized(stated_answer(response)) in accepted
    return config.correct_score if right else config.wrong_score


def stated_answer(response: str) -> str:
    """The answer of a response as it is written there; see `exact_match`."""
    text = without_reasoning(response)
    in_box = boxed(text)
    if in_box is not None:
        return LATEX_TEXT.sub(r"\1", in_box)
    return next(_statements(text), text)


def _statements(text: str) -> Iterator[str]:
    """What follows every STATED in its line, up to the next one; the last first."""
    next_start = len(text)
    for match in reversed(list(STATED.finditer(text))):
        line_end = text.find("\n", match.end(), next_start)
        yield LATEX_TEXT.sub(r"\1", text[match.end() : next_start if line_end < 0 else line_end])
        next_start = match.start()


def normalized(text: str) -> str:
    """Text in Unicode's form NFKC, in lower case, with single spaces, without quotes and punctuation around it."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(folded.split()).strip(QUOTES_AND_STOPS)


def _accepted(ground_truth: str | list[str]) -> list[str]:
    """The items of a list of texts, which may be JSON; any other ground truth as it is."""
    if isinstance(ground_truth, list):
        return [str(item) for item in ground_truth]  # items may be numbers
    if ground_truth.lstrip().startswith("["):
        try:
            items = json.loads(ground_truth)
        except (ValueError, RecursionError):
            return [ground_truth]
        if isinstance(items, list) and items and all(isinstance(item, str) for item in items):
            return items
    return [ground_truth]


def regex(response: str, ground_truth: str, config: RewardConfig) -> float:
    """`correct_score` if a regular expression agrees with the response, else `wrong_score`.

    Without `config.pattern` the ground truth is the expression, and a response is right where it matches anywhere. With
    it, all prompts share the expression: one with a group is right if the first group of its last match is the ground
    truth after normalization (`exact_match`); one without groups is right where it matches. `.` matches line ends too.

    Args:
        response: the decoded response.
        ground_truth: the expression, or the text of its group.
        config: `pattern`, `correct_score` and `wrong_score` are used.

    Raises:
        ValueError: the ground truth is not a regular expression.
    """
    expression = _compiled(config.pattern or ground_truth)
    if config.pattern is None or not expression.groups:
        right = expression.search(response) is not None
    else:
        matches = [match[1] for match in expression.finditer(response)]
        accepted = {normalized(text) for text in _accepted(ground_truth)}
        right = bool(matches) and normalized(matches[-1] or "") in accepted
    return config.correct_score if right else config.wrong_score


@cache
def _compiled(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression, re.DOTALL)
    except re.error as error:
        raise ValueError(f"the ground truth {expression!r} is not a regular expression: {error}") from None


def SELF_TEST(config: RewardConfig) -> SelfTest:
    """(response, ground truth, whether it is right) for the reward of `config`."""
    samples: dict[str | None, SelfTest] = {
        "multiple_choice": (
            (r"So it is \boxed{B}.", "B", True),
            ("The answer is (c) because A is wrong.", "C", True),
            ("I think D", "(D) Paris", True),
            (r"The answer is A, so \boxed{B}", "A", False),
            ("I do not know.", "A", False),
        ),
        "exact_match": (
            (r"\boxed{\text{New York}}", "new  york.", True),
            ("The answer is: Paris.", '["Lyon", "Paris"]', True),
            ("Paris or Lyon", "Paris", False),
        ),
        "regex": (("call 555-0199 now", r"\d{3}-\d{4}", True), ("call me", r"\d{3}-\d{4}", False)),
    }
    return () if config.pattern else samples.get(built_in_of(config.function), ())
