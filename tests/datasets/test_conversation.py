"""ConversationEncoder: the ids of a turn are a prefix of the ids of the next."""

from __future__ import annotations

import pytest

from examples.tiny_math.prepare import ANSWER, END, make_tokenizer
from roll.datasets.prompts import Question
from roll.datasets.records import DatasetError
from roll.datasets.sft import PromptResponse, encode_sft_data
from roll.datasets.templates import BUILT_IN, ConversationEncoder, PromptEncoder

CHAT = [
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
    if template in BUILT_IN:
        markers = list(BUILT_IN[template].markers)
        tokenizer.add_tokens(markers, special_tokens=True)
        tokenizer.eos_token = markers[-1]
    return tokenizer


@pytest.mark.parametrize("template", ["native", *BUILT_IN])
def test_ids_turn_by_turn_equal_those_of_the_whole_conversation(template):
    tokenizer = with_markers(template)
    chat, whole = ConversationEncoder(tokenizer, template), PromptEncoder(tokenizer, template)
    ids = chat.start(CHAT[:2])
    assert ids == whole.encode([Question(messages=tuple(CHAT[:2]))])[0]
    for end in (3, 5):
        answer = [*whole.encode_text([CHAT[end - 1]["content"]])[0], tokenizer.eos_token_id]
        before = [*ids, *answer]
        ids = before + chat.follow(answer[-1], [CHAT[end]])
        assert ids == whole.encode([Question(messages=tuple(CHAT[: end + 1]))])[0]
        assert ids[: len(before)] == before


@pytest.mark.parametrize("template", ["native", *BUILT_IN])
def test_a_truncated_response_is_closed_by_the_template(template):
    tokenizer = with_markers(template)
    chat = ConversationEncoder(tokenizer, template)
    cut, ended = chat.follow(70, [CHAT[3]]), chat.follow(tokenizer.eos_token_id, [CHAT[3]])
    assert cut == [tokenizer.eos_token_id, *ended]


def test_a_template_that_changes_earlier_turns_is_an_error():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = ConversationEncoder(tokenizer, "native")
    with pytest.raises(DatasetError, match="renders earlier turns differently when later ones follow"):
        chat.follow(1, [CHAT[1]])
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(DatasetError, match="omits or changes assistant messages"):
        ConversationEncoder(tokenizer, "native")


def test_without_mask_history_every_assistant_message_is_learned_and_nothing_between_them():
    tokenizer = make_tokenizer()
    item = PromptResponse("a", Question(messages=tuple(CHAT[:4])), "4")
    [last], _ = encode_sft_data([item], tokenizer, "native", 100, 200)
    [every], _ = encode_sft_data([item], tokenizer, "native", 100, 200, mask_history=False)
    assert last.prompt_ids + last.response_ids == every.prompt_ids + every.response_ids
    assert tokenizer.decode(every.prompt_ids) == "Be brief.What is 1+1?" + ANSWER
    learned = [token for token, learn in zip(every.response_ids, every.loss_mask, strict=True) if learn]
    assert tokenizer.decode(learned) == f"2{END}4{END}"
    assert last.loss_mask is None and tokenizer.decode(last.response_ids) == "4" + END
