"""Pairs of responses: as text or messages, encoded with one prompt, and dropped together."""

from __future__ import annotations

import pytest

from examples.tiny_math.prepare import ANSWER, END, make_tokenizer
from roll.configs.arguments import DataArguments
from roll.datasets.preferences import Preference, encode_preferences, load_preferences
from roll.datasets.prompts import Question
from roll.datasets.records import DatasetError
from tests.datasets.files import jsonl

USER = {"role": "user", "content": "Hi"}
PAIRS = [
    Preference("a", Question(text="1+1="), "2", "3"),
    Preference("b", Question(text="10+10="), "20", "1000"),
]


def answer(text):
    return {"role": "assistant", "content": text}


def test_responses_are_texts_or_the_last_of_messages(tmp_path):
    file = jsonl(
        tmp_path,
        {"id": 1, "prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"id": 2, "chosen": [USER, answer("Hello")], "rejected": [USER, answer("No")]},
        {"id": 3, "prompt": "Say hi", "chosen": [answer("Hello")], "rejected": "No"},
        {"id": 4, "messages": [USER, answer("x")], "chosen": [USER, answer("x")], "rejected": [USER, answer("y")]},
        {"id": 5, "prompt": "Hi", "chosen": [USER, answer("x")], "rejected": "y"},
    )
    assert load_preferences(file, DataArguments()) == [
        Preference("1", Question(text="1+1="), "2", "3"),
        Preference("2", Question(messages=(USER,)), "Hello", "No"),
        Preference("3", Question(text="Say hi"), "Hello", "No"),
        Preference("4", Question(messages=(USER,)), "x", "y"),
        Preference("5", Question(messages=(USER,)), "x", "y"),
    ]


def test_pairs_of_equal_responses_are_left_out(tmp_path):
    file = jsonl(tmp_path, *({"id": n, "prompt": "q", "chosen": "a", "rejected": text} for n, text in enumerate("ab")))
    assert [pair.id for pair in load_preferences(file, DataArguments())] == ["1"]
    with pytest.raises(DatasetError, match="all 1 pairs have two equal responses"):
        load_preferences(jsonl(tmp_path, {"prompt": "q", "chosen": "a", "rejected": "a"}), DataArguments())


def test_columns_have_the_names_that_the_configuration_gives(tmp_path):
    file = jsonl(tmp_path, {"id": 1, "prompt": "q", "good": "a", "bad": "b"})
    (pair,) = load_preferences(file, DataArguments(chosen="good", rejected="bad"))
    assert (pair.chosen, pair.rejected) == ("a", "b")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q", "chosen": "a"}, "data.jsonl:1: no column 'rejected'"),
        ({"chosen": "a", "rejected": "b"}, "no column 'prompt'"),
        (
            {"prompt": "q", "chosen": "a", "rejected": 3},
            "column 'rejected' holds 3; use a text, not empty, or messages",
        ),
        ({"prompt": "q", "chosen": [USER], "rejected": "b"}, "column 'chosen' ends with"),
        ({"prompt": "q", "chosen": "", "rejected": "b"}, "column 'chosen' holds ''"),
        ({"chosen": [USER, answer("a")], "rejected": [{**USER, "content": "Yo"}, answer("b")]}, "different messages"),
        ({"messages": [USER, answer("a")], "chosen": "a", "rejected": "b"}, "ends with a message of the assistant"),
    ],
)
def test_what_is_no_pair_is_an_error_with_its_line(tmp_path, row, message):
    with pytest.raises(DatasetError, match=message):
        load_preferences(jsonl(tmp_path, row), DataArguments())


def test_both_responses_follow_the_same_prompt_and_end():
    tokenizer = make_tokenizer()
    (first, second), dropped = encode_preferences(PAIRS, tokenizer, "native", 10, 20)
    assert dropped == 0 and first.chosen.prompt_ids == first.rejected.prompt_ids
    assert tokenizer.decode(first.chosen.prompt_ids) == "1+1=" + ANSWER
    assert [tokenizer.decode(one.response_ids) for one in (first.chosen, first.rejected)] == ["2" + END, "3" + END]
    assert second.tokens == len(second.rejected.prompt_ids) + len(second.rejected.response_ids)


def test_a_pair_is_dropped_if_one_response_is_too_long():
    tokenizer = make_tokenizer()
    longest = encode_preferences(PAIRS, tokenizer, "none", 10, 20)[0][1].tokens
    kept, dropped = encode_preferences(PAIRS, tokenizer, "none", 10, longest - 1)
    assert [pair.chosen.id for pair in kept] == ["a"] and dropped == 1
    with pytest.raises(DatasetError, match="none of 2 pairs fits .* longest prompt has 6 tokens"):
        encode_preferences(PAIRS, tokenizer, "none", 3, 20)
    tokenizer.eos_token = None
    with pytest.raises(DatasetError, match="has no end token"):
        encode_preferences(PAIRS, tokenizer, "none", 10, 20)


def test_tokens_that_follow_a_response_count_in_the_sequence_length():
    tokenizer = make_tokenizer()
    longest = encode_preferences(PAIRS, tokenizer, "none", 10, 20)[0][1].tokens
    assert encode_preferences(PAIRS, tokenizer, "none", 10, longest, appended=1)[1] == 1
    assert encode_preferences(PAIRS, tokenizer, "none", 10, longest + 1, appended=1)[1] == 0
    with pytest.raises(DatasetError, match=f"the longest prompt with a response {longest + 1}"):
        encode_preferences(PAIRS, tokenizer, "none", 3, 20, appended=1)
