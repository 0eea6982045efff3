"""Verifiable instructions in the formats of IFEval and ROLL."""

from __future__ import annotations

import json
import time

import pytest

from roll.configs.scoring.rewards import RewardConfig
from roll.rewards.ifeval import SELF_TEST, ifeval_reward, instructions
from roll.rewards.instructions import IFEVAL, ROLL

STRICT, SOFT = RewardConfig(), RewardConfig(reward_type="soft")

CASES = {
    "keywords:existence": ({"keywords": ["sun", "Moon"]}, "Moons and the SUN", "the sun"),
    "keywords:frequency": ({"keyword": "a", "frequency": 2, "relation": "at least"}, "a A", "a"),
    "keywords:forbidden_words": ({"forbidden_words": ["cat"]}, "concatenate", "a Cat."),
    "keywords:letter_frequency": ({"letter": "e", "let_frequency": 2, "let_relation": "less than"}, "One", "Eve"),
    "language:response_language": ({"language": "ru"}, "Привет, мир!", "Hello"),
    "length_constraints:number_sentences": ({"num_sentences": 2, "relation": "at least"}, "One. Two!", "One, two."),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    "length_constraints:number_words": ({"num_words": 3, "relation": "less than"}, "two words", "now three words"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "First.\n\nThen, second.",
        "Then.\n\nSecond.",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name] of [city]", "[name]"),
    "detectable_content:postscript": ({"postscript_marker": "P.P.S"}, "Bye\nP.P.S. more", "Bye\nP.S. more"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n- b\n* c"),
    "detectable_format:constrained_response": ({}, "My answer is maybe.", "Maybe."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* and **b**", "*a* and **"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section 1\na",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "{a: 1}"),
    "detectable_format:title": ({}, "<<Ode to joy>>\nO", "<< >> O"),
    "combination:two_responses": ({}, "one\n******\ntwo", "one\n******\none"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "What is it?"}, "what is it? A cat.", "A cat."),
    "startend:end_checker": ({"end_phrase": "Any questions?"}, "So. any questions?", "Any questions? No."),
    "startend:quotation": ({}, '"quoted"', "quoted"),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        "BIG and LOUD",
        "BIG and loud",
    ),
    "change_case:english_capital": ({}, "LOUD 1", "Loud"),
    "change_case:english_lowercase": ({}, "quiet 1", "Quiet"),
    "punctuation:no_comma": ({}, "none here", "one, here"),
    "verify_keywords": ({"keyword_list": ["sun"]}, "SUNNY", "moon"),
    "verify_keyword_frequency": ({"word": "Sun", "N": 2}, "sun, sun; sunny", "sun"),
    "validate_forbidden_words": ({"forbidden_words": ["cat"]}, "a dog", "Concatenate"),
    "verify_letter_frequency": ({"letter": "e", "N": 1}, "eE", "ee"),
    "validate_response_language": ({"language": "zh"}, "你好，世界", "hello 世界"),
    "verify_paragraph_count": ({"N": 2}, "one * * * two", "one * * *"),
    "validate_word_constraint": ({"N": 20, "quantifier": "around"}, "w " * 18, "w " * 17),
    "verify_sentence_constraint": ({"N": 1, "quantifier": "at most"}, "One, two.", "One. Two."),
    "validate_paragraphs": ({"N": 2, "first_word": "Then", "i": 2}, "First\n\nThen", "First\n\nthen"),
    "verify_postscript": ({"postscript_marker": "P.S."}, "Bye. P.S. more", "Bye. P.S."),
    "validate_placeholders": ({"N": 1}, "[name]", "name"),
    "verify_bullet_points": ({"N": 1}, " * one", "one"),
    "validate_title": ({}, "<<Ode>>", "Ode"),
    "validate_choice": ({"options": ["yes", "no"]}, "yes", "ye"),
    "validate_highlighted_sections": ({"N": 1}, "*a*", "a"),
    "validate_sections": ({"N": 2, "section_splitter": "###"}, "### a ### b", "### a"),
    "validate_json_format": ({}, "[1]", "[1"),
    "validate_repeat_prompt": ({"original_prompt": "Why?"}, "Why? So.", "why? So."),
    "validate_two_responses": ({}, "a ****** b", "a ****** b ****** c"),
    "validate_uppercase": ({}, "LOUD", "Loud"),
    "validate_lowercase": ({}, "quiet", "Quiet"),
    "validate_frequency_capital_words": ({"N": 1, "quantifier": "at most"}, "ONE word", "TWO WORDS"),
    "validate_end": ({"end_phrase": "The end."}, "So. The end.", "So. the end."),
    "validate_quotation": ({}, '"a"', '"a'),
    "validate_no_commas": ({}, "none", "a, b"),
}


def one(name: str, arguments: dict[str, object]) -> str:
    return json.dumps({"instruction_id_list": [name], "kwargs": [{**arguments, "unused": None, "N_other": 3}]})


@pytest.mark.parametrize(("name", "case"), CASES.items())
def test_an_instruction_is_followed_or_not(name, case):
    arguments, good, bad = case
    for truth in [one(name, arguments), json.dumps({"func_name": name, **arguments, "language_": None})]:
        assert ifeval_reward(good, truth, {}, STRICT) == {"score": 1.0, "followed": 1.0}
        assert ifeval_reward(bad, truth, {}, STRICT) == {"score": 0.0, "followed": 0.0}


def test_every_instruction_has_a_case():
    assert CASES.keys() == IFEVAL.keys() | ROLL.keys() and len(IFEVAL) == len(ROLL) == 25


ROW = {"instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase"], "kwargs": [{}, {"x": None}]}


def test_columns_of_ifeval_go_before_the_ground_truth():
    assert ifeval_reward("all small", "1", ROW, STRICT)["score"] == 1.0
    texts = {key: json.dumps(value) for key, value in ROW.items()}
    assert instructions("1", texts) == [("punctuation:no_comma", {}), ("change_case:english_lowercase", {})]


def test_a_soft_score_is_the_share_between_the_two_scores():
    half = ifeval_reward("Big", "1", ROW, RewardConfig(reward_type="soft", wrong_score=-1.0))
    assert half == {"score": 0.0, "followed": 0.5}
    assert ifeval_reward("Big", "1", ROW, STRICT) == {"score": 0.0, "followed": 0.5}
    assert ifeval_reward("", "1", ROW, SOFT)["score"] == 0.0


def test_reasoning_is_not_part_of_the_response():
    truth = one("punctuation:no_comma", {})
    assert ifeval_reward("<think>well, hm</think>\nyes", truth, {}, STRICT)["score"] == 1.0


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (one("punctuation:no_coma", {}), "'punctuation:no_coma' is not known; did you mean punctuation:no_comma"),
        (one("keywords:existence", {}), "keywords:existence cannot be checked with"),
        (one("keywords:frequency", {"keyword": "a", "frequency": 1, "relation": "often"}), "relation 'often' is not"),
        (one("language:response_language", {"language": "fr"}), "language 'fr' cannot be verified by its letters"),
        ('{"instruction_id_list": ["a"], "kwargs": []}', "1 instructions need as many objects"),
        ("[]", "there are no instructions"),
        ("no commas", "is not JSON with instructions"),
        ('{"a": 1}', "there are no instructions"),
    ],
)
def test_data_that_cannot_be_verified_is_an_error_and_not_a_wrong_answer(truth, message):
    with pytest.raises(ValueError, match=message):
        ifeval_reward("text", truth, {}, STRICT)


def test_several_instructions_in_a_list():
    truth = json.dumps([{"func_name": "validate_no_commas"}, {"instruction_id": "startend:quotation", "kwargs": {}}])
    assert ifeval_reward("text", truth, {}, SOFT)["followed"] == 0.5


@pytest.mark.parametrize("config", [STRICT, SOFT])
def test_the_self_test_holds(config):
    for response, truth, right in SELF_TEST:
        assert ifeval_reward(response, truth, {}, config)["score"] == float(right)


@pytest.mark.parametrize(
    ("instruction", "problem"),
    [
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": "abc"}]}, "keywords is 'abc'"),
        ({"func_name": "verify_keywords", "keyword_list": "abc"}, "keyword_list is 'abc'"),
        ({"func_name": "validate_paragraphs", "N": "2", "first_word": "a", "i": 1}, "N is '2', and a number"),
        ({"func_name": "verify_postscript", "postscript_marker": ""}, "postscript_marker is ''"),
        ({"func_name": "validate_sections", "N": 1, "section_splitter": ""}, "section_splitter is ''"),
        ({"func_name": "verify_paragraph_count", "N": float("nan")}, "N is nan"),
        ({"instruction_id_list": 5}, "a list of names"),
    ],
)
def test_arguments_of_another_kind_are_an_error(instruction, problem):
    with pytest.raises(ValueError, match=problem):
        ifeval_reward("a b\n\nc", json.dumps(instruction), {}, RewardConfig(function="ifeval"))


def test_a_whole_number_may_be_written_with_decimals():
    instruction = {"func_name": "validate_paragraphs", "N": 2.0, "first_word": "c", "i": 2.0}
    assert ifeval_reward("a b\n\nc", json.dumps(instruction), {}, RewardConfig(function="ifeval"))["score"] == 1


@pytest.mark.parametrize(
    ("text", "instruction", "followed"),
    [
        ("<<A title>> and text", {"func_name": "validate_title"}, True),
        ("text\n<< a < b >>", {"func_name": "validate_title"}, True),
        ("<< >>", {"func_name": "validate_title"}, False),
        ("<" * 100_000, {"func_name": "validate_title"}, False),
        ("[" * 100_000 + "a] [b]", {"func_name": "validate_placeholders", "N": 2}, True),
        ("- a" + "\n" * 100_000 + "* b", {"func_name": "verify_bullet_points", "N": 2}, True),
    ],
)
def test_long_texts_are_checked_in_time(text, instruction, followed):
    start = time.perf_counter()
    score = ifeval_reward(text, json.dumps(instruction), {}, RewardConfig(function="ifeval"))["score"]
    assert score == followed and time.perf_counter() - start < 5  # quadratic time would be minutes


def test_bullets_of_ifeval_are_lines():
    text = "- a" + "\n" * 100_000 + "  * b\n**c**"
    names = {"instruction_id_list": ["detectable_format:number_bullet_lists"], "kwargs": [{"num_bullets": 2}]}
    assert ifeval_reward(text, json.dumps(names), {}, RewardConfig(function="ifeval"))["score"] == 1
