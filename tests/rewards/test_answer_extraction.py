from __future__ import annotations

import pytest

from roll.rewards.math_rule import boxed, extract_answer, last_number


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
