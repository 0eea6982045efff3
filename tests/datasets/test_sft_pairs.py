from __future__ import annotations

import pytest

from examples.tiny_math.prepare import ANSWER, END, make_tokenizer
from roll.configs.roles import DataArguments
from roll.datasets.prompts import Question
from roll.datasets.records import DatasetError
from roll.datasets.sft import Pair, encode_pairs, load_pairs
from tests.datasets.files import jsonl

PAIRS = [Pair("a", Question(text="1+1="), "2"), Pair("b", Question(text="10+10="), "20")]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_the_answer_is_the_solution_or_the_assistants_last_message(tmp_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    file = jsonl(tmp_path, {"id": 1, "prompt": "1+1=", "solution": "2"}, {"id": 2, "messages": chat})
    first, second = load_pairs(file, DataArguments())
    assert first == Pair("1", Question(text="1+1="), "2")
    assert second == Pair("2", Question(messages=(chat[0],)), "Hello")


def test_a_missing_or_odd_answer_is_an_error(tmp_path):
    with pytest.raises(DatasetError, match="data.jsonl:1: no column 'solution'; the columns are prompt"):
        load_pairs(jsonl(tmp_path, {"prompt": "q"}), DataArguments())
    with pytest.raises(DatasetError, match="column 'solution' holds a int; the answer is a text"):
        load_pairs(jsonl(tmp_path, {"prompt": "q", "solution": 2}), DataArguments())


def test_an_example_is_the_prompt_and_the_answer_with_its_end(tokenizer):
    examples, dropped = encode_pairs(PAIRS, tokenizer, "native", 10, 20)
    assert dropped == 0
    assert tokenizer.decode(examples[0].prompt_ids) == "1+1=" + ANSWER
    assert tokenizer.decode(examples[0].answer_ids) == "2" + END


def test_pairs_that_do_not_fit_are_dropped_and_all_of_them_is_an_error(tokenizer):
    examples, dropped = encode_pairs(PAIRS, tokenizer, "none", prompt_length=4, sequence_length=6)
    assert [example.id for example in examples] == ["a"] and dropped == 1
    with pytest.raises(DatasetError, match="none of 2 pairs fits .*longest prompt has 6 tokens, the longest pair 9"):
        encode_pairs(PAIRS, tokenizer, "none", prompt_length=6, sequence_length=5)


def test_a_tokenizer_without_an_end_token_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DatasetError, match="has no end token"):
        encode_pairs(PAIRS, tokenizer, "native", 10, 20)
