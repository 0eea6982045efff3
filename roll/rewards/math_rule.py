r"""Reward of problems with one exact answer: extracts the answer of a response and compares it mathematically."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal

from roll.configs.scoring.rewards import RewardConfig
from roll.rewards.calling import TooLong, without_reasoning
from roll.rewards.math_answers import NO_UNITS, UNITS, same_answer
from roll.rewards.math_values import TooLongError

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
FORMULA = re.compile(r"\$\$([^$]+)\$\$|\$(?=\S)([^$\n]+)(?<=\S)\$(?!\d)|\\[\[(\])]")
"""A formula between $ signs, which two prices are not, or one end of a formula in brackets."""

VARIABLE = re.compile(r"\s*[a-z]\s*")

PART_BEFORE = re.compile(
    r"""
    (?: (?: [\w)}\]]\$?\s*[+±∓×÷∗∙·⋅∕⁄⊕⊗∘∈→/^] | [\d)}\]]\$?\s*(?:[-\u2212–*]|[xX])   # an operand and an operator
          | \b[A-Za-z][ ]?[-\u2212–*] | \\times | \\cdot )\s*\$?
      | [^-=\s]\s*(?:[≤≥≠]|(?<![-=])[<>]=?|!=)\s*                               # a relation other than `=`
      | \d[ ]?[%)]?\$?\s*(?:plus|minus|times|(?:divided|multiplied)\ by|over|mod(?:ulo)?|choose|%?\ ?of)\s+\$?
      | \b(?:sqrt|log|ln|sin|cos|tan|exp)\s* | [±∓]\s* | [^\W_] | [^_]_ | [√∛∜^π)\]}°²³] | \d\s?: | \d\s:\s
      | \w\(  | [(\[]\s*(?:(?:[^\sA-Za-z,;()]+|[A-Za-z])\s*[,;]\s*)+                # arguments, tuples, intervals
    )-?\Z""",
    re.VERBOSE,
)
"""What precedes a number that is part of an expression, a relation, a tuple or an interval."""

PART_AFTER = re.compile(
    rf"""
    \s*(?:[+^!×÷∗∙·⋅∕⁄≤≥≠√∛π²³±] | _(?!_) | <(?![/!\w]*>) | >=?\s*[\w-])
  | \s*[-\u2212–*/](?!\*)\s*(?:[A-Za-z]\b|[(√π\\])
  | (?!(?:{UNITS})\b)[A-Za-z(] | [ ](?![aAImgshlLKCFJNWV]\b)[A-Za-z]\b | \s*,\s*[^\s\d)\]]{{1,6}}\s*[)\]]
  | \s+(?:{NO_UNITS})\b""",
    re.VERBOSE,
)
"""What follows a number that is part of another number or an expression."""

TAG = re.compile(r"</?[a-z]\w*>")

LONGEST_PART = 60
"""Characters before and after a number in which the rest of an expression is looked for."""

LATEX = re.compile(r"[\\^_{]")

BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


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
    return _plain(numbers[-1]) if numbers else None


def _plain(number: str) -> str:
    number = number.replace(",", "").replace("\u2212", "-").lstrip("+")
    return f"{Decimal(number).normalize():f}" if "e" in number.lower() and "/" not in number else number


def last_formula_or_number(text: str) -> str | None:
    r"""The last formula in `$...$`, `$$...$$`, `\(...\)` or `\[...\]`; the last number, if it stands behind that.

    A number inside of LaTeX without such marks, as in `\sqrt{2}`, stands for all of it, and one that is part of an
    expression, a relation other than `=`, a tuple, an interval or a larger number, as in `23+45`, `3x` and `7 million`,
    for nothing. A formula that is a variable, as in "5 values of $n$", is no answer.
    """
    number = next(reversed(list(NUMBER.finditer(text))), None)
    formulas = [each for each in _formulas(text) if number is None or not VARIABLE.fullmatch(each[1])]
    end, formula = max(formulas, default=(-1, ""))
    if number is None or end > number.start():
        return formula or None
    start = max(text.rfind(space, 0, number.start()) for space in " \t\n") + 1
    ends = [text.find(space, number.end()) for space in " \t\n"]
    word = text[start : min((end for end in ends if end >= 0), default=len(text))].strip("_*.,;:!?'\"")
    if LATEX.search(word):
        return word
    return None if _is_part(text, number.start(), number.end()) else _plain(number[0])


def _is_part(text: str, start: int, end: int) -> bool:
    before = TAG.sub("", text[max(0, start - LONGEST_PART) : start].rpartition("\n")[2])
    after = text[end : end + LONGEST_PART].partition("\n")[0]
    return bool(PART_BEFORE.search(before) or PART_AFTER.match(after))


def _formulas(text: str) -> Iterator[tuple[int, str]]:
    """The end and the content of each formula; of aligned lines, what follows the last sign of equality."""
    opened = 0
    for match in FORMULA.finditer(text):
        if match[0] in (r"\[", r"\("):
            opened = match.end()
            continue
        content = match[1] or match[2] or text[opened : match.start()]
        if r"\begin{a" in content:
            content = content.rpartition("=")[2].partition(r"\end")[0]
        yield match.end(), content.strip()


def extract_answer(text: str, pattern: str) -> str | None:
    r"""The answer of a response, or None if it has none.

    Args:
        text: the response.
        pattern: `boxed`, `last_number`, or `boxed_or_last_number`: the box if there is one, else
            `last_formula_or_number`.

    Raises:
        ValueError: the pattern is not one of these.
    """
    if pattern == "boxed":
        return boxed(text)
    if pattern == "last_number":
        return last_number(text)
    if pattern == "boxed_or_last_number":
        content = boxed(text)
        return last_formula_or_number(text) if content is None else content
    raise ValueError(f"answer_pattern: {pattern!r} is not one of boxed, last_number, boxed_or_last_number")


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

    The answer is extracted by `config.answer_pattern` and compared by `same_answer`; a response without one is wrong,
    and so is one that is too long to compare. What precedes `</think>`, or follows an open `<think>`, does not count.

    Args:
        response: the decoded response, without the prompt.
        ground_truth: the answer, or a worked solution with the answer in `\boxed{}` or, as in GSM8K, after `####`.
        config: `answer_pattern`, `correct_score` and `wrong_score` are used.

    Raises:
        ValueError: the ground truth is empty.
    """
    expected = (boxed(ground_truth) or ground_truth.rpartition("####")[2]).strip()
    if not expected:
        raise ValueError(f"ground truth {ground_truth!r} cannot be parsed: it has no answer")
    answer = extract_answer(without_reasoning(response), config.answer_pattern)
    try:
        right = answer is not None and same_answer(answer, expected)
    except TooLongError:
        return TooLong(config.wrong_score)
    return config.correct_score if right else config.wrong_score
