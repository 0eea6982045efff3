from __future__ import annotations

import pytest

from examples.tiny_math.prepare import ANSWER, END, make_tokenizer
from roll.configs.arguments import DataArguments
from roll.datasets.prompts import Question
from roll.datasets.records import DatasetError
from roll.datasets.sft import PromptResponse, encode_sft_data, load_sft_data
from tests.datasets.files import jsonl

DATA = [PromptResponse("a", Question(text="1+1="), "2"), PromptResponse("b", Question(text="10+10="), "20")]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_the_response_is_the_solution_or_the_last_assistant_message(tmp_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    file = jsonl(tmp_path, {"id": 1, "prompt": "1+1=", "solution": "2"}, {"id": 2, "messages": chat})
    first, second = load_sft_data(file, DataArguments())
    assert first == PromptResponse("1", Question(text="1+1="), "2")
    assert second == PromptResponse("2", Question(messages=(chat[0],)), "Hello")


def test_a_missing_or_invalid_response_is_an_error(tmp_path):
    with pytest.raises(DatasetError, match="data.jsonl:1: no column 'solution'; the columns are prompt"):
        load_sft_data(jsonl(tmp_path, {"prompt": "q"}), DataArguments())
    with pytest.raises(DatasetError, match="column 'solution' holds 2; use a text, not empty"):
        load_sft_data(jsonl(tmp_path, {"prompt": "q", "solution": 2}), DataArguments())


def test_an_example_is_the_prompt_and_the_response_with_an_end_token(tokenizer):
    examples, dropped = encode_sft_data(DATA, tokenizer, "native", 10, 20)
    assert dropped == 0
    assert tokenizer.decode(examples[0].prompt_ids) == "1+1=" + ANSWER
    assert tokenizer.decode(examples[0].response_ids) == "2" + END


def test_long_examples_are_dropped_and_dropping_all_is_an_error(tokenizer):
    examples, dropped = encode_sft_data(DATA, tokenizer, "none", prompt_length=4, sequence_length=6)
    assert [example.id for example in examples] == ["a"] and dropped == 1
    with pytest.raises(DatasetError, match="none of 2 examples fits .* prompt has 6 tokens, the longest example 9"):
        encode_sft_data(DATA, tokenizer, "none", prompt_length=6, sequence_length=5)


def test_a_tokenizer_without_an_end_token_is_an_error():
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DatasetError, match="has no end token"):
        encode_sft_data(DATA, tokenizer, "native", 10, 20)
