from __future__ import annotations

import pytest

from examples.tiny_math.prepare import ANSWER, make_tokenizer
from roll.configs import roles
from roll.datasets.prompts import Prompt, Question
from roll.datasets.records import DatasetError
from roll.datasets.templates import TEMPLATES, QuestionEncoder, encode_prompts

ASKED = Question(text="1+1=")
CHAT = Question(messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}))


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def qwen_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def test_the_configuration_knows_exactly_these_templates():
    assert set(TEMPLATES) == set(roles.TEMPLATES)


def test_native_is_the_tokenizers_own_template_ready_for_the_answer(tokenizer):
    (ids,) = QuestionEncoder(tokenizer, "native").encode([ASKED])
    assert tokenizer.decode(ids) == "1+1=" + ANSWER
    assert ids[-1] == tokenizer.convert_tokens_to_ids(ANSWER)


def test_none_takes_the_text_as_it_is(tokenizer):
    (ids,) = QuestionEncoder(tokenizer, "none").encode([ASKED])
    assert tokenizer.decode(ids) == "1+1="
    with pytest.raises(DatasetError, match="'none' takes a text"):
        QuestionEncoder(tokenizer, "none").encode([CHAT])


def test_qwen2_5_adds_its_system_message_unless_there_is_one(qwen_tokenizer):
    encoder = QuestionEncoder(qwen_tokenizer, "qwen2_5")
    assert encoder.render(CHAT) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert encoder.render(ASKED).startswith("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud.")
    assert encoder.render(ASKED).endswith("<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n")
    (ids,) = encoder.encode([ASKED])
    assert qwen_tokenizer.decode(ids) == encoder.render(ASKED)


def test_llama3_has_its_headers(tokenizer):
    markers = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    assert QuestionEncoder(tokenizer, "llama3").render(ASKED) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1+1=<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_a_template_that_does_not_fit_the_tokenizer_is_an_error(tokenizer):
    with pytest.raises(DatasetError, match=r"'qwen2\.5' is none of native, none, .*did you mean 'qwen2_5'"):
        QuestionEncoder(tokenizer, "qwen2.5")
    with pytest.raises(DatasetError, match=r"'qwen3' is made of <\|im_end\|>, <\|im_start\|>, which this tokenizer"):
        QuestionEncoder(tokenizer, "qwen3")
    bare = make_tokenizer()
    bare.chat_template = None
    with pytest.raises(DatasetError, match="the tokenizer has no chat template; use none"):
        QuestionEncoder(bare, "native")


def test_prompts_too_long_are_dropped_and_counted_and_all_of_them_is_an_error(tokenizer):
    prompts = [Prompt(str(size), "t", Question(text="1" * size), "1") for size in (3, 9, 5)]
    encoded, dropped = encode_prompts(prompts, tokenizer, "none", prompt_length=5)
    assert [prompt.id for prompt in encoded] == ["3", "5"] and dropped == 1
    assert (encoded[0].tag, encoded[0].ground_truth, len(encoded[0].ids)) == ("t", "1", 3)
    with pytest.raises(DatasetError, match="all 3 prompts are longer than 2 tokens; they have 3 to 9"):
        encode_prompts(prompts, tokenizer, "none", prompt_length=2)
