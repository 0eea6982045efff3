"""No built-in comparison takes more than linear time, whatever a response repeats."""

from __future__ import annotations

import contextlib
import json
import time

import pytest

from roll.configs.scoring.rewards import RewardConfig
from roll.rewards.answers import exact_match, multiple_choice
from roll.rewards.code_sandbox import _same_result, program_in, same_output
from roll.rewards.ifeval import INSTRUCTIONS
from roll.rewards.llm_judge import JudgeError, grade_in
from roll.rewards.math_rule import math_reward

CHARACTERS = 100_000
LIMIT_S = 20.0
"""Processor time for one response; quadratic time would be minutes."""

REPEATED = [
    *("1", "111,", "1,", "1.", "1/", "-", "- ", "e1", "٤", "½", "1+1", "x ", "= ", "±", "2^", "|", "A ", "A or ", "I "),
    *(
        "\\boxed{",
        "\\boxed{1}",
        "{",
        "}",
        "{}",
        "(",
        "[",
        "[]",
        "\\",
        "\\\\",
        "\\frac{",
        "\\text{",
        "$",
        "$$",
        "$1",
        "\\[",
    ),
    *(
        " ",
        "\n",
        "\n\n",
        "\t",
        "\u00a0",
        "\u2028",
        '"',
        "'",
        '"a',
        "*",
        "**",
        "***",
        "*a*",
        "<<",
        ">>",
        "- a\n",
        ". ",
        "! ) ",
    ),
    *(
        "answer is ",
        "Answer: ",
        "Answer: A\n",
        "```\n",
        "```python\n",
        "~~~\n",
        "<think>",
        "</think>",
        "P. ",
        "p. s. ",
        "Section 1 ",
    ),
    *("Grade: ", "Grade: 1", "1.0e9 ", "\ud800", "ﷺ"),
]

ARGUMENTS = {
    "Sequence[str]": ["a", "b c"],
    "str": "a",
    **{name: "at least" for name in ("relation", "let_relation", "capital_relation", "quantifier")},
    **{"language": "zh", "postscript_marker": "P.S.", "section_spliter": "Section", "section_splitter": "Section"},
}


def instruction(name: str, text: str) -> bool:
    check = INSTRUCTIONS[name]
    kinds = {key: kind for key, kind in check.__annotations__.items() if key not in ("text", "return")}
    return check(text.strip(), **{key: ARGUMENTS.get(key, ARGUMENTS.get(kind, 3)) for key, kind in kinds.items()})


def grade(text: str) -> None:
    with contextlib.suppress(JudgeError):
        grade_in(text, RewardConfig(function="roll.rewards.llm_judge:judge_reward"))


CONFIG = RewardConfig()
COMPARISONS = {
    "math_rule": lambda text: math_reward(text, "7", CONFIG),
    "math_rule of an expression": lambda text: math_reward(text, r"\sqrt{2}", CONFIG),
    "math_rule in a box": lambda text: math_reward(r"\boxed{" + text + "}", r"\{1, 2\}", CONFIG),
    "last_number": lambda text: math_reward(text, "7", RewardConfig(answer_pattern="last_number")),
    "multiple_choice": lambda text: multiple_choice(text, "B", CONFIG),
    "exact_match": lambda text: exact_match("The answer is " + text, "B", CONFIG),
    "program": lambda text: program_in(text, CONFIG),
    "program in a block": lambda text: program_in(f"```python\n{text}\n```", CONFIG),
    "program in a line": lambda text: program_in(f"```{text}```", CONFIG),
    "output": lambda text: same_output(text, "5"),
    "long output": lambda text: same_output(text, text + "1"),
    "result": lambda text: _same_result(json.dumps(text), 5),
    "judge": grade,
    **{name: (lambda text, name=name: instruction(name, text)) for name in INSTRUCTIONS},
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_time_grows_with_the_length_of_a_response_at_most(name):
    compare, slow = COMPARISONS[name], {}
    for repeated in REPEATED:
        text = (repeated * CHARACTERS)[:CHARACTERS]
        start = time.process_time()
        compare(text + "x")
        compare(text + "1")
        took = time.process_time() - start
        if took > LIMIT_S:
            slow[repeated] = took
    assert not slow


def test_a_set_of_keys_with_equal_hashes_is_no_result():
    start = time.process_time()
    keys = [number * (2**61 - 1) for number in range(50_000)]
    assert not _same_result(json.dumps({"type": "set", "items": keys}), keys)
    assert not _same_result(json.dumps({"type": "dict", "items": [[key, 1] for key in keys]}), keys)
    assert time.process_time() - start < LIMIT_S
    assert _same_result(json.dumps({"type": "set", "items": keys[:9]}), keys[:9]) is False
    assert _same_result(json.dumps({"type": "set", "items": [1, 2]}), {1, 2})
