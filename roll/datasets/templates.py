"""From a question to the exact ids the engine is sent: the chat template, applied once."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.datasets.prompts import Message, Prompt, Question
from roll.datasets.records import DatasetError

NATIVE, NONE = "native", "none"


@dataclass(frozen=True)
class Template:
    """A chat format by name.

    Attributes:
        jinja: the format, in the language of tokenizer chat templates.
        markers: tokens it is made of; a tokenizer that lacks one would read it as plain text.
    """

    jinja: str
    markers: tuple[str, ...]


def _turns(opening: str, closing: str) -> str:
    return (
        "{% for message in messages %}"
        + opening.replace("ROLE", "{{ message.role }}")
        + "{{ message.content }}"
        + closing
        + "{% endfor %}{% if add_generation_prompt %}"
        + opening.replace("ROLE", "assistant")
        + "{% endif %}"
    )


_CHATML_MARKERS = ("<|im_start|>", "<|im_end|>")
_CHATML = _turns("<|im_start|>ROLE\n", "<|im_end|>\n")
_QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."

BUILT_IN: dict[str, Template] = {
    "chatml": Template(_CHATML, _CHATML_MARKERS),
    "qwen2_5": Template(
        "{% if messages[0].role != 'system' %}<|im_start|>system\n"
        + _QWEN_SYSTEM
        + "<|im_end|>\n{% endif %}"
        + _CHATML,
        _CHATML_MARKERS,
    ),
    "qwen3": Template(_CHATML, _CHATML_MARKERS),
    "llama3": Template(
        "<|begin_of_text|>" + _turns("<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>"),
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
}
"""Formats that do not depend on what the tokenizer brings along."""

TEMPLATES = (NATIVE, NONE, *BUILT_IN)
"""Every value of `data_args.template`: `native` is the tokenizer's own, `none` takes a text as it is."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the engine gets it: what `Prompt` holds, with the ids in place of the question."""

    id: str
    tag: str
    ids: list[int]
    ground_truth: str


class QuestionEncoder:
    """Applies one template with one tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: one of TEMPLATES.

    Raises:
        DatasetError: the template is unknown, or the tokenizer lacks it or a token it is made of.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        """Checks that tokenizer and template fit."""
        if template not in TEMPLATES:
            near = difflib.get_close_matches(template, TEMPLATES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise DatasetError(f"data_args.template: {template!r} is none of {', '.join(TEMPLATES)}{hint}")
        if template == NATIVE and not tokenizer.chat_template:
            raise DatasetError(
                f"data_args.template: the tokenizer has no chat template; use {', '.join(TEMPLATES[1:])}"
            )
        if template in BUILT_IN:
            missing = set(BUILT_IN[template].markers) - set(tokenizer.get_vocab())
            if missing:
                raise DatasetError(
                    f"data_args.template: {template!r} is made of {', '.join(sorted(missing))}, which this tokenizer "
                    "does not have; use native or none"
                )
        self._tokenizer = tokenizer
        self._template = template

    def encode(self, questions: Sequence[Question]) -> list[list[int]]:
        """Ids of each question, ready for the answer to follow.

        Raises:
            DatasetError: the template is `none` and a question is made of messages.
        """
        return self.encode_text([self.render(question) for question in questions])

    def encode_text(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text as it is, with nothing added."""
        return self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    def render(self, question: Question, open_answer: bool = True) -> str:
        """The text that the ids of `encode` stand for; the assistant's turn is opened at its end or not."""
        if self._template == NONE:
            if question.text is None:
                raise DatasetError("data_args.template: 'none' takes a text, and this prompt is made of messages")
            return question.text
        messages = question.messages or ({"role": "user", "content": question.text or ""},)
        jinja = BUILT_IN[self._template].jinja if self._template in BUILT_IN else None
        return self._tokenizer.apply_chat_template(
            list(messages), chat_template=jinja, tokenize=False, add_generation_prompt=open_answer
        )


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Any, template: str, prompt_length: int
) -> tuple[list[EncodedPrompt], int]:
    """Encodes prompts and drops those longer than `prompt_length` tokens.

    Returns:
        The encoded prompts that fit, in order, and how many did not.

    Raises:
        DatasetError: none fits, with the shortest and longest length seen; or as QuestionEncoder.
    """
    encoded = QuestionEncoder(tokenizer, template).encode([prompt.question for prompt in prompts])
    kept = [
        EncodedPrompt(prompt.id, prompt.tag, ids, prompt.ground_truth)
        for prompt, ids in zip(prompts, encoded, strict=True)
        if len(ids) <= prompt_length
    ]
    if not kept:
        lengths = [len(ids) for ids in encoded]
        raise DatasetError(
            f"prompt_length: all {len(prompts)} prompts are longer than {prompt_length} tokens; they have "
            f"{min(lengths, default=0)} to {max(lengths, default=0)}"
        )
    return kept, len(prompts) - len(kept)


STAND_IN = "stand-in"
"""Takes the assistant's place while the text around it is found; it never becomes a token."""


_BEFORE: tuple[Message, ...] = ({"role": "user", "content": "first"}, {"role": "assistant", "content": STAND_IN})
"""A conversation up to the end of a response, around which what follows is rendered."""


class ConversationEncoder:
    """Applies one chat template to the new messages of a conversation only.

    A template closes a turn of the assistant with some text (`closing`) and opens the next with the user's message.
    Both are found once by rendering around a stand-in, so no response is ever decoded and encoded again: the ids of
    turn n, as the engine sampled them, are a prefix of those of turn n + 1.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        """Checks that the template has a place for the assistant.

        Raises:
            DatasetError: as QuestionEncoder, or the template changes what the assistant said.
        """
        self._encoder = QuestionEncoder(tokenizer, template)
        self._end = tokenizer.eos_token
        self._end_id = tokenizer.eos_token_id
        self._closed = self._encoder.render(Question(messages=_BEFORE), open_answer=False)
        self._closing = self._after_stand_in()

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the first messages, ready for the assistant."""
        return self._encoder.encode([Question(messages=tuple(messages))])[0]

    def follow(self, last: int, messages: Sequence[Message]) -> list[int]:
        """Ids that come after a response: what closes it, the messages, and what opens the next response.

        Args:
            last: the response's last token. Where it is the end token, the template's own end is left out.
            messages: what is said next, by `user` or `tool`.
        """
        closing = self._closing
        if last == self._end_id and closing.startswith(self._end):
            closing = closing.removeprefix(self._end)
        opened, closed = self._encoder.render(Question(messages=(*_BEFORE, *messages))), self._closed
        if not opened.startswith(closed):
            became = opened[: len(closed)][-40:]
            raise DatasetError(
                "data_args.template: the template renders earlier turns differently once later ones follow "
                f"({closed[-40:]!r} became {became!r}), so turns cannot be added one by one; use a built-in one"
            )
        return self._encoder.encode_text([closing + opened[len(closed) :]])[0]

    def _after_stand_in(self) -> str:
        _, found, closing = self._closed.rpartition(STAND_IN)
        if not found:
            raise DatasetError("data_args.template: the template leaves out or changes what the assistant said")
        return closing
