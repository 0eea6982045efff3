"""Rewards that compare answers as text: choices, exact texts and patterns."""

from __future__ import annotations

import pytest

from roll.configs.scoring.built_in_rewards import BUILT_IN
from roll.configs.scoring.rewards import RewardConfig
from roll.rewards.answers import SELF_TEST, choice, exact_match, multiple_choice, normalized, regex, stated_answer


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{C}}", "C"),
        (r"\boxed{(d) Paris}", "D"),
        (r"\boxed{A} or rather \boxed{B}", "B"),
        (r"The answer is A, but \boxed{17}", None),
        ("The answer is (B).", "B"),
        ("the correct answer is: c", "C"),
        ("**Answer:** D", "D"),
        ("Answer: I would say B", "B"),
        ("The answer is a dog. B", "B"),
        ("The answer is (c) because A is wrong.", "C"),
        ("The answer is A. No: the answer is B because of C.", "B"),
        ("A, B and C are wrong, so D", "D"),
        ("So I choose B and I am sure", "B"),
        ("A plan of the BBC", "A"),
        ("no letter, don't ask", None),
        ("The answer is not B, it is C", "C"),
        ("The answer is B, not C.", "B"),
        ("The answer is A. Wait, B.", "B"),
        ("The answer is A.\nActually, no, it is (B).", "B"),
        ("Wait, B. The answer is A.", "A"),
        ("The answer is A. Wait, B is wrong.", "A"),
        ("The answer is D. No, A, B and C are wrong.", "D"),
        ("Answer: A and B", None),
        ("Answer: (A), (B).", None),
        ("The answer is A, B is wrong", "A"),
        ("<think>The answer is A</think> It must be B", "B"),
        ("", None),
        ("The answer is I.", "I"),
        ("B is wrong. The answer is (I).", "I"),
        ("so (I) it is", "I"),
        ("The answer is I think B", "B"),
        (r"\boxed{\textit{B}}", "B"),
        ("The answer is \uff22", "B"),
        (r"\boxed{A, B}", None),
        (r"\boxed{A or B}", None),
        (r"\boxed{(A) and (B)}", None),
        (r"\boxed{A. Vitamin C}", "A"),
    ],
)
def test_the_choice_of_a_response(response, letter):
    assert choice(response) == letter


@pytest.mark.parametrize("ground_truth", ["B", "(B)", "b", "B. Paris", " B) "])
def test_a_ground_truth_begins_with_its_letter(ground_truth):
    config = RewardConfig(correct_score=2.0, wrong_score=-1.0)
    assert multiple_choice("It is B", ground_truth, config) == 2.0
    assert multiple_choice("It is C", ground_truth, config) == -1.0


@pytest.mark.parametrize("ground_truth", ["42", "Paris", ""])
def test_a_ground_truth_without_a_letter_is_an_error_and_not_a_wrong_answer(ground_truth):
    with pytest.raises(ValueError, match="is not the letter of a choice"):
        multiple_choice("B", ground_truth, RewardConfig())


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{New York}", "New York"),
        ("The answer is: Paris.\nThat is in France.", "Paris."),
        ("Answer: one\nAnswer: two", "two"),
        ("Paris", "Paris"),
        ("<think>The answer is Lyon</think>Paris", "Paris"),
    ],
)
def test_the_stated_answer(response, answer):
    assert stated_answer(response) == answer


def test_normalization_ignores_case_spaces_width_and_punctuation_around():
    assert normalized(" \u201cNew\u3000 YORK\u201d. ") == "new york"
    assert normalized("3.5") == "3.5" and normalized("a-b") == "a-b"


def test_any_of_several_texts_is_right():
    config = RewardConfig()
    assert exact_match("The answer is Lyon", '["Paris", "lyon."]', config) == 1.0
    assert exact_match("The answer is Nice", '["Paris", "lyon."]', config) == 0.0
    assert exact_match("[1, 2]", "[1, 2]", config) == 1.0


@pytest.mark.parametrize("ground_truth", ["...", '["a", ""]'])
def test_a_ground_truth_without_text_is_an_error(ground_truth):
    with pytest.raises(ValueError, match="holds no text to compare with"):
        exact_match("a", ground_truth, RewardConfig())


def test_the_ground_truth_is_a_pattern():
    assert regex("call\n555-0199", r"^call.*\d{4}$", RewardConfig()) == 1.0
    assert regex("call 555", r"\d{4}", RewardConfig()) == 0.0
    with pytest.raises(ValueError, match="is not a regular expression"):
        regex("a", "(", RewardConfig())


def test_a_pattern_of_the_reward_compares_the_group_of_its_last_match():
    config = RewardConfig(pattern="<answer>(.*?)</answer>")
    assert regex("<answer>4</answer> no, <answer> 5 </answer>", "5", config) == 1.0
    assert regex("<answer>5</answer> no, <answer>4</answer>", "5", config) == 0.0
    assert regex("5", "5", config) == 0.0


def test_a_pattern_without_a_group_is_a_check_of_the_format():
    config = RewardConfig(pattern="<think>.*</think>")
    assert regex("<think>hm\n</think> 5", "7", config) == 1.0
    assert regex("5", "5", config) == 0.0


@pytest.mark.parametrize("name", ["multiple_choice", "exact_match", "regex"])
def test_the_self_test_holds(name):
    config = RewardConfig(function=BUILT_IN[name].function)
    reward = {"multiple_choice": multiple_choice, "exact_match": exact_match, "regex": regex}[name]
    samples = SELF_TEST(config)
    assert {right for _, _, right in samples} == {True, False}
    assert [reward(response, truth, config) for response, truth, _ in samples] == [float(item[2]) for item in samples]
