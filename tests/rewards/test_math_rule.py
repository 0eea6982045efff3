from __future__ import annotations

import subprocess
import sys
import time

import pytest

from roll.configs.scoring.rewards import RewardConfig
from roll.rewards.math_rule import SELF_TEST, boxed, extract_answer, last_number, math_reward


def test_an_invalid_ground_truth_is_an_error_not_a_wrong_answer():
    with pytest.raises(ValueError, match="ground truth '' cannot be parsed"):
        math_reward("46", "", RewardConfig())


def test_scores_are_those_of_the_configuration():
    config = RewardConfig(correct_score=2.0, wrong_score=-1.0)
    assert math_reward("12+34=46", "46", config) == 2.0
    assert math_reward("12+34=47", "46", config) == -1.0
    assert math_reward("no idea", "46", config) == -1.0


def test_the_ground_truth_may_be_a_worked_solution():
    assert math_reward(r"\boxed{46}", r"12 + 34 is \boxed{46}", RewardConfig()) == 1.0
    assert math_reward(r"\boxed{1046}", "1012 + 34 = <<1012+34=1046>>1046\n#### 1,046", RewardConfig()) == 1.0


@pytest.mark.parametrize("pattern", ["boxed", "last_number", "boxed_or_last_number"])
def test_the_self_test_holds_for_every_answer_pattern(pattern):
    config = RewardConfig(answer_pattern=pattern)
    for response, ground_truth, right in SELF_TEST:
        assert math_reward(response, ground_truth, config) == float(right), response


def test_importing_rewards_imports_neither_torch_nor_sympy():
    code = "import sys, roll.usercode.reward_pool, roll.rewards.math_rule; print({'torch', 'sympy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{46}", "46"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ \{1, 2\} }", r"\{1, 2\}"),
        (r"\boxed{4} and \boxed{4", "4"),
        (r"\fbox{3} \fboxed{5}", "5"),
        (r"\boxed{}", ""),
        ("46", None),
        (r"\boxed{4", None),
    ],
)
def test_the_last_balanced_box(text, answer):
    assert boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12+34=46", "46"),
        ("12-5=7", "7"),
        ("12-5", "5"),
        ("x = -3", "-3"),
        ("x=-3.", "-3"),
        ("-3", "-3"),
        ("+8", "8"),
        ("costs $1,234.50.", "1234.50"),
        ("1,2", "2"),
        ("about 3/4 of it", "3/4"),
        ("\u22125", "-5"),
        ("7%", "7"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number(text, answer):
    assert last_number(text) == answer


def test_answer_patterns():
    text = r"\boxed{5} which is 6"
    assert extract_answer(text, "boxed") == extract_answer(text, "boxed_or_last_number") == "5"
    assert extract_answer(text, "last_number") == "6"
    assert extract_answer("just 6", "boxed") is None
    assert extract_answer("just 6", "boxed_or_last_number") == "6"
    with pytest.raises(ValueError, match="answer_pattern: 'first' is not one of"):
        extract_answer(text, "first")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("is .5", ".5"),
        ("is -.5", "-.5"),
        ("is 1.5e-3", "0.0015"),
        ("is 1.5e3", "1500"),
        ("is 2E10.", "20000000000"),
        ("is 1,000/2,000", "1000/2000"),
        ("a 3e b", "3"),
        ("version 1.2.3", "3"),
    ],
)
def test_numbers_without_a_leading_zero_and_with_a_power_of_ten(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    "answer",
    ["(" * 3000 + "1" + ")" * 3000, r"\frac{" * 40 + "1" + "}{2}" * 40, "1+" * 3000 + "1", r"\boxed{" * 20_000],
)
def test_a_degenerate_answer_is_wrong_and_takes_no_time(answer):
    start = time.perf_counter()
    assert math_reward(r"\boxed{" + answer + "}", "7", RewardConfig()) == 0
    assert time.perf_counter() - start < 5


def test_a_deep_answer_counts_where_the_ground_truth_is_as_deep():
    answer, expected = (r"\frac{" * 13 + number + "}{1}" * 13 for number in ("7", "7.0"))
    assert math_reward(r"\boxed{" + answer + "}", expected, RewardConfig()) == 1


PARTS = [
    *(("The answer is √2", "2"), ("2π.", "2"), ("2√3", "3"), ("3x", "3"), ("3i", "3"), ("5!", "5"), ("3²", "3")),
    *(("sqrt(2)", "2"), ("log 2", "2"), ("f(3)", "3"), ("2(3)", "3"), ("C(5,2)", "2"), ("10 / 2", "2"), ("6÷3", "3")),
    *((f"17 {sign} 23", "23") for sign in "⋅∗−–×x·*+-/∕^:<>≤≠±⊕→"),
    *(("(1, 2).", "2"), ("[0, 5]", "5"), ("(x, 5)", "5"), ("(5, x)", "5"), ("x < 5", "5"), ("x>5", "5")),
    *(
        ("n = 2k+1", "1"),
        ("n - 5", "5"),
        ("5 - n", "5"),
        ("3:4", "4"),
        ("x_7", "7"),
        ("± 2", "2"),
        ("∛8", "8"),
        ("3 n", "3"),
        ("5 < x", "5"),
    ),
    *(("7 million", "7"), ("7 plus x", "7"), ("5 times 3", "3"), ("100 divided by 4", "4"), ("50 % of 10", "10")),
]
"""A response whose last number is part of something else, and this number."""

WHOLE = [
    *("about 5 apples.", "x=5", "x = 5,", "**5**", "(5)", "Answer:5", "Answer - 5", "$5.", "€5", "5%", "5 cm", "5cm"),
    *(
        "5 - that is it",
        "> 5",
        "=> 5",
        "<b>5</b>",
        "#5",
        '"5"',
        "1. 5",
        "5 a day",
        "from 3 to 5",
        "5 m",
        "5/day",
        "- 5",
    ),
    *(
        "5; done",
        "step 3: 5",
        "3, 4, 5",
        "*5* is it",
        "5 eggs/day",
        "5-year",
        "5°",
        "18 - 13 = 5",
        "• 5",
        "__5__",
        "5/day",
    ),
]
"""Responses with 5 as their answer."""


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        (r"The answer is $\frac{3}{2}$.", "3/2", True),
        (r"The answer is $\frac{3}{2}$.", "2", False),
        (r"It is $\sqrt{2}$", "2", False),
        (r"Thus \(x = \frac{1}{2}\).", "0.5", True),
        (r"\[ x = 7 \]", "7", True),
        ("$$\n\\frac{7}{2}\n$$", "3.5", True),
        (r"\[\begin{aligned} x &= 3+4 \\ &= 7 \end{aligned}\]", "7", True),
        (r"The answer is \frac{3}{2}.", "2", False),
        (r"The answer is \frac{3}{2}.", "3/2", True),
        (r"so 2\sqrt{3}", "3", False),
        ("it is 2^{10}", "10", False),
        ("23 + 45", "45", False),
        ("23 + 45 = 68", "68", True),
        *((text, number, False) for text, number in PARTS),
        *((text, "5", True) for text in WHOLE),
        ("#### 42", "42", True),
        ("#### 1,042", "1042", True),
        ("The answer is **$42$**.", "42", True),
        ("there are 42 integers $n$.", "42", True),
        ("$5 each make $15.", "15", True),
        (r"We pay \$15.", "15", True),
        ("three of them:\n1\n- 5", "5", True),
        (r"<think>\boxed{4}</think> The answer is 3.", "4", False),
        (r"<think>\boxed{4}</think> The answer is 3.", "3", True),
        (r"<think>so \boxed{4}", "4", False),
        (r"so 4</think> \boxed{5}", "5", True),
    ],
)
def test_the_answer_of_a_response_without_a_box(response, truth, right):
    assert math_reward(response, truth, RewardConfig()) == float(right)
