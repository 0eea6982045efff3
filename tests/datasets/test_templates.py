from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from examples.tiny_math.prepare import ANSWER, END, make_tokenizer
from roll.datasets.preferences import Preference, encode_preferences
from roll.datasets.prompts import Prompt, Question
from roll.datasets.records import DatasetError
from roll.datasets.sft import PromptResponse, encode_sft_data
from roll.datasets.templates import (
    ConversationEncoder,
    PromptEncoder,
    encode_prompts,
    template_variables,
)
from roll.models.families.registry import chat_templates

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


def test_native_is_the_tokenizers_own_template_with_the_start_of_a_response(tokenizer):
    (ids,) = PromptEncoder(tokenizer, "native").encode([ASKED])
    assert tokenizer.decode(ids) == "1+1=" + ANSWER
    assert ids[-1] == tokenizer.convert_tokens_to_ids(ANSWER)


def test_none_leaves_the_text_unchanged(tokenizer):
    (ids,) = PromptEncoder(tokenizer, "none").encode([ASKED])
    assert tokenizer.decode(ids) == "1+1="
    with pytest.raises(DatasetError, match="'none' needs a text"):
        PromptEncoder(tokenizer, "none").encode([CHAT])


def test_qwen2_5_adds_its_system_message_unless_one_is_given(qwen_tokenizer):
    encoder = PromptEncoder(qwen_tokenizer, "qwen2_5")
    assert encoder.render(CHAT) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert encoder.render(ASKED).startswith("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud.")
    assert encoder.render(ASKED).endswith("<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n")
    (ids,) = encoder.encode([ASKED])
    assert qwen_tokenizer.decode(ids) == encoder.render(ASKED)


def test_llama3_adds_its_headers(tokenizer):
    markers = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    assert PromptEncoder(tokenizer, "llama3").render(ASKED) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1+1=<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_a_template_the_tokenizer_cannot_apply_is_an_error(tokenizer):
    with pytest.raises(DatasetError, match=r"'qwen2\.5' is not one of native, none, .*did you mean 'qwen2_5'"):
        PromptEncoder(tokenizer, "qwen2.5")
    with pytest.raises(
        DatasetError, match=r"'qwen3' needs the special tokens <\|im_end\|>, <\|im_start\|>, which this tokenizer"
    ):
        PromptEncoder(tokenizer, "qwen3")
    bare = make_tokenizer()
    bare.chat_template = None
    with pytest.raises(DatasetError, match="the tokenizer has no chat template; use none"):
        PromptEncoder(bare, "native")


def test_long_prompts_are_dropped_and_dropping_all_is_an_error(tokenizer):
    prompts = [Prompt(str(size), "t", Question(text="1" * size), "1") for size in (3, 9, 5)]
    encoded, dropped = encode_prompts(prompts, tokenizer, "none", prompt_length=5)
    assert [prompt.id for prompt in encoded] == ["3", "5"] and dropped == 1
    assert (encoded[0].tag, encoded[0].ground_truth, len(encoded[0].ids)) == ("t", "1", 3)
    with pytest.raises(DatasetError, match="all 3 prompts are longer than 2 tokens; they have 3 to 9"):
        encode_prompts(prompts, tokenizer, "none", prompt_length=2)


def test_the_date_of_a_template_is_that_of_the_run(tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}: {{ messages[-1].content }}"
    variables = template_variables({}, "2024-02-29T23:59:59")
    assert PromptEncoder(tokenizer, "native", variables).render(ASKED) == "29 Feb 2024: 1+1="
    today = datetime.now().strftime("%d %b %Y")
    assert PromptEncoder(tokenizer, "native", template_variables({}, None)).render(ASKED).startswith(today)


@pytest.mark.parametrize("encode", ["prompts", "sft", "every answer", "pairs", "turns"])
def test_variables_of_a_template_count_wherever_it_is_rendered(encode):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% if not enable_thinking is defined or enable_thinking %}T{% endif %}{% for m in messages %}{{ m.content }}"
        "{% if m.role == 'assistant' %}\u00a7{% endif %}{% endfor %}"
    )

    def prompt_ids(variables):
        if encode == "prompts":
            prompt = Prompt("a", "t", ASKED, "2")
            return encode_prompts([prompt], tokenizer, "native", 9, variables)[0][0].ids
        if encode == "turns":
            return ConversationEncoder(tokenizer, "native", variables).start([{"role": "user", "content": "1+1="}])
        if encode == "pairs":
            pair = Preference("a", ASKED, "2", "3")
            return encode_preferences([pair], tokenizer, "native", 9, 20, variables=variables)[0][0].chosen.prompt_ids
        item, masked = PromptResponse("a", ASKED, "2"), encode == "sft"
        return encode_sft_data([item], tokenizer, "native", 9, 20, masked, variables)[0][0].prompt_ids

    assert tokenizer.decode(prompt_ids({})) == "T1+1="
    assert tokenizer.decode(prompt_ids({"enable_thinking": False})) == "1+1="


def with_bos(post_processor: str):
    """A tokenizer that puts BOS before a text, and with `pair` EOS after it, as those of Llama base models."""
    vocabulary = {"<s>": 0, "</s>": 1, **{character: number for number, character in enumerate("[]1+=ab2", start=2)}}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.post_processor = processors.TemplateProcessing(single=post_processor, special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "<s>[{{ messages[-1].content }}]"
    return tokenizer


@pytest.mark.parametrize("post_processor", ["<s> $A", "<s> $A </s>"])
def test_none_puts_bos_before_a_text_as_the_tokenizer_does_and_never_twice(post_processor):
    tokenizer = with_bos(post_processor)
    plain, written = PromptEncoder(tokenizer, "none").encode([ASKED, Question(text="<s>1+1=")])
    assert tokenizer.convert_ids_to_tokens(plain) == ["<s>", "1", "+", "1", "="] and written == plain
    assert PromptEncoder(tokenizer, "native").encode([ASKED])[0].count(0) == 1
    [example], _ = encode_sft_data([PromptResponse("a", ASKED, "2")], tokenizer, "none", 10, 20)
    assert (example.prompt_ids, example.response_ids[-1], 0 in example.response_ids) == (plain, 1, False)
    assert PromptEncoder(with_bos("$A"), "none").encode([ASKED])[0] == plain[1:]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages %}\n{{ raise_exception('no system message') }}{% endfor %}",
            "line 2: no system message",
        ),
        ("a\n\n{{ 1 + messages }}", "line 3: TypeError: "),
        ("{{ now() }}", "line 1: 'now' is undefined"),
        ("a\n{% if %}", "line 2: Expected an expression"),
        ("{{ ''.__class__.x }}", "line 1: access to attribute '__class__' of 'str' object is unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "line 1: OverflowError: "),
    ],
)
def test_an_error_of_a_template_has_its_line_and_that_of_the_data(template, message):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    asked = Question(messages=CHAT.messages, source="data.jsonl:7")
    with pytest.raises(DatasetError) as error:
        PromptEncoder(tokenizer, "native").encode([asked])
    assert str(error.value).startswith(f"data.jsonl:7: the chat template fails, {message}")


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": " 4\n"},
    {"role": "tool", "content": "four"},
]


def with_markers(template: str):
    """The tiny tokenizer with the special tokens of a template; the last of them is the end token."""
    tokenizer = make_tokenizer()
    if template in chat_templates():
        markers = list(chat_templates()[template].markers)
        tokenizer.add_tokens(markers, special_tokens=True)
        tokenizer.eos_token = markers[-1]
    return tokenizer


@pytest.mark.parametrize("template", ["native", *chat_templates()])
def test_ids_turn_by_turn_equal_those_of_the_whole_conversation(template):
    tokenizer = with_markers(template)
    chat, whole = ConversationEncoder(tokenizer, template), PromptEncoder(tokenizer, template)
    ids = chat.start(CONVERSATION[:2])
    assert ids == whole.encode([Question(messages=tuple(CONVERSATION[:2]))])[0]
    for end in (3, 5):
        answer = [*whole.encode_text([CONVERSATION[end - 1]["content"]])[0], tokenizer.eos_token_id]
        before = [*ids, *answer]
        ids = before + chat.follow(answer[-1], [CONVERSATION[end]])
        assert ids == whole.encode([Question(messages=tuple(CONVERSATION[: end + 1]))])[0]
        assert ids[: len(before)] == before


@pytest.mark.parametrize("template", ["native", *chat_templates()])
def test_a_truncated_response_is_closed_by_the_template(template):
    tokenizer = with_markers(template)
    chat = ConversationEncoder(tokenizer, template)
    cut, ended = chat.follow(70, [CONVERSATION[3]]), chat.follow(tokenizer.eos_token_id, [CONVERSATION[3]])
    assert cut == [tokenizer.eos_token_id, *ended]


def test_a_template_that_changes_earlier_turns_is_an_error():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = ConversationEncoder(tokenizer, "native")
    with pytest.raises(
        DatasetError, match="earlier turns differently .* \\('2firststand-in' became '3firststand-inWhat"
    ):
        chat.follow(1, [CONVERSATION[1]])
    tokenizer.chat_template = "".join(("x" * 99, tokenizer.chat_template))
    with pytest.raises(DatasetError, match="'x{20}2firststand-in' became 'x{20}3firststand-in"):
        ConversationEncoder(tokenizer, "native").follow(1, [CONVERSATION[1]])
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(DatasetError, match="omits or changes assistant messages"):
        ConversationEncoder(tokenizer, "native")


def test_without_mask_history_every_assistant_message_is_learned_and_nothing_between_them():
    tokenizer = make_tokenizer()
    item = PromptResponse("a", Question(messages=tuple(CONVERSATION[:4])), "4")
    [last], _ = encode_sft_data([item], tokenizer, "native", 100, 200)
    [every], _ = encode_sft_data([item], tokenizer, "native", 100, 200, mask_history=False)
    assert last.prompt_ids + last.response_ids == every.prompt_ids + every.response_ids
    assert tokenizer.decode(every.prompt_ids) == "Be brief.What is 1+1?" + ANSWER
    learned = [token for token, learn in zip(every.response_ids, every.loss_mask, strict=True) if learn]
    assert tokenizer.decode(learned) == f"2{END}4{END}"
    assert last.loss_mask is None and tokenizer.decode(last.response_ids) == "4" + END


QWEN2_5_WITH_TOOLS = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\n# Tools\n\nYou may "
    "call one or more functions to assist with the user query.\n\nYou are provided with function signatures within "
    '<tools></tools> XML tags:\n<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>\n\nFor each '
    "function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n2\n'
    "</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
"""What the template in the tokenizer of Qwen2.5 gives."""


def test_built_in_templates_show_tools_as_qwen2_5_does(qwen_tokenizer):
    tools = ({"type": "function", "function": {"name": "add"}},)
    calls = [{"type": "function", "function": {"name": "add", "arguments": each}} for each in ({"a": 1}, {})]
    results = [{"role": "tool", "content": "2"}, {"role": "tool", "content": "3"}]
    asked, called = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": None, "tool_calls": calls}
    question = Question(messages=(asked, called, *results), tools=tools)
    assert PromptEncoder(qwen_tokenizer, "qwen2_5").render(question) == QWEN2_5_WITH_TOOLS
    own = replace(question, messages=({"role": "system", "content": "Add."}, *question.messages))
    for template in ("qwen2_5", "chatml"):
        text = PromptEncoder(qwen_tokenizer, template).render(own)
        assert text == QWEN2_5_WITH_TOOLS.replace(
            "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "Add."
        )
    chat = ConversationEncoder(qwen_tokenizer, "chatml")
    following = qwen_tokenizer.decode(chat.follow(qwen_tokenizer.eos_token_id, results, tools))
    assert QWEN2_5_WITH_TOOLS.endswith(following.removeprefix("<|im_end|>"))
