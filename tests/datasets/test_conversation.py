"""Conversations whose ids only grow."""

from __future__ import annotations

import pytest

from examples.tiny_math.prepare import ANSWER, END, make_tokenizer
from roll.datasets.prompts import Question
from roll.datasets.records import DatasetError
from roll.datasets.sft import Pair, encode_pairs
from roll.datasets.templates import BUILT_IN, ConversationEncoder, QuestionEncoder

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": " 4\n"},
    {"role": "tool", "content": "four"},
]


def with_markers(template: str):
    """The tiny tokenizer with a template's markers, the end of a turn being its end token."""
    tokenizer = make_tokenizer()
    if template in BUILT_IN:
        markers = list(BUILT_IN[template].markers)
        tokenizer.add_tokens(markers, special_tokens=True)
        tokenizer.eos_token = markers[-1]
    return tokenizer


@pytest.mark.parametrize("template", ["native", *BUILT_IN])
def test_turn_by_turn_gives_the_ids_of_the_whole_rendered_at_once(template):
    tokenizer = with_markers(template)
    chat, whole = ConversationEncoder(tokenizer, template), QuestionEncoder(tokenizer, template)
    ids = chat.start(CHAT[:2])
    assert ids == whole.encode([Question(messages=tuple(CHAT[:2]))])[0]
    for end in (3, 5):
        answer = [*whole.encode_text([CHAT[end - 1]["content"]])[0], tokenizer.eos_token_id]
        before = [*ids, *answer]
        ids = before + chat.follow(answer[-1], [CHAT[end]])
        assert ids == whole.encode([Question(messages=tuple(CHAT[: end + 1]))])[0]
        assert ids[: len(before)] == before


@pytest.mark.parametrize("template", ["native", *BUILT_IN])
def test_an_answer_that_was_cut_off_is_closed_by_the_template(template):
    tokenizer = with_markers(template)
    chat = ConversationEncoder(tokenizer, template)
    cut, ended = chat.follow(70, [CHAT[3]]), chat.follow(tokenizer.eos_token_id, [CHAT[3]])
    assert cut == [tokenizer.eos_token_id, *ended]


def test_a_template_that_rewrites_earlier_turns_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = ConversationEncoder(tokenizer, "native")
    with pytest.raises(DatasetError, match="renders earlier turns differently once later ones follow"):
        chat.follow(1, [CHAT[1]])
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(DatasetError, match="leaves out or changes what the assistant said"):
        ConversationEncoder(tokenizer, "native")


def test_sft_learns_every_answer_and_nothing_between_them():
    tokenizer = make_tokenizer()
    pair = Pair("a", Question(messages=tuple(CHAT[:4])), "4")
    [last], _ = encode_pairs([pair], tokenizer, "native", 100, 200)
    [every], _ = encode_pairs([pair], tokenizer, "native", 100, 200, mask_history=False)
    assert last.prompt_ids + last.answer_ids == every.prompt_ids + every.answer_ids
    assert tokenizer.decode(every.prompt_ids) == "Be brief.What is 1+1?" + ANSWER
    learned = [token for token, learn in zip(every.answer_ids, every.learned, strict=True) if learn]
    assert tokenizer.decode(learned) == f"2{END}4{END}"
    assert last.learned is None and tokenizer.decode(last.answer_ids) == "4" + END
