"""Chat templates: from prompts and conversations to token ids."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roll.datasets.prompts import Message, Prompt, Question
from roll.datasets.records import DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NATIVE, NONE = "native", "none"


@dataclass(frozen=True)
class Template:
    """A built-in chat template.

    Attributes:
        jinja: the template, in the Jinja format of Hugging Face tokenizers.
        markers: its special tokens. A tokenizer that lacks one would encode it as plain text.
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
"""Templates that do not depend on the tokenizer's own."""

TEMPLATES = (NATIVE, NONE, *BUILT_IN)
"""Values of `data_args.template`: `native` is the tokenizer's own template, `none` leaves a text unchanged."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A `Prompt` with its token ids; the other attributes are those of `Prompt`."""

    id: str
    tag: str
    ids: list[int]
    ground_truth: Any
    question: Question = Question(text="")
    row: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


def template_problem(template: str, has_chat_template: bool, vocabulary: Collection[str]) -> str | None:
    """Why a tokenizer cannot apply a template; None if it can.

    Args:
        template: value of `data_args.template`.
        has_chat_template: the tokenizer has a template of its own.
        vocabulary: its tokens, special ones included.
    """
    if template not in TEMPLATES:
        near = difflib.get_close_matches(template, TEMPLATES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"{template!r} is not one of {', '.join(TEMPLATES)}{hint}"
    if template == NATIVE and not has_chat_template:
        return f"the tokenizer has no chat template; use {', '.join(TEMPLATES[1:])}"
    missing = set(BUILT_IN[template].markers) - set(vocabulary) if template in BUILT_IN else set()
    if missing:
        return (
            f"{template!r} needs the special tokens {', '.join(sorted(missing))}, which this tokenizer does not have; "
            "use native or none"
        )
    return None


class PromptEncoder:
    """Applies a chat template and a tokenizer to prompts.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: one of TEMPLATES.

    Raises:
        DatasetError: the template is unknown, or the tokenizer lacks it or one of its special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        problem = template_problem(template, bool(tokenizer.chat_template), tokenizer.get_vocab())
        if problem is not None:
            raise DatasetError(f"data_args.template: {problem}")
        self._tokenizer = tokenizer
        self._template = template

    def encode(self, questions: Sequence[Question]) -> list[list[int]]:
        """Token ids of each prompt, ready for the response to follow.

        Raises:
            DatasetError: the template is `none` and a prompt consists of messages.
        """
        return self.encode_text([self.render(question) for question in questions])

    def encode_text(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens added."""
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return ids

    def render(self, question: Question, open_answer: bool = True) -> str:
        """Text of a prompt; `open_answer` adds the start of the assistant's turn."""
        if self._template == NONE:
            if question.text is None:
                raise DatasetError("data_args.template: 'none' needs a text, and this prompt consists of messages")
            return question.text
        messages = question.messages or ({"role": "user", "content": question.text or ""},)
        jinja = BUILT_IN[self._template].jinja if self._template in BUILT_IN else None
        text = self._tokenizer.apply_chat_template(
            list(messages), chat_template=jinja, tokenize=False, add_generation_prompt=open_answer
        )
        return str(text)


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, template: str, prompt_length: int
) -> tuple[list[EncodedPrompt], int]:
    """Encodes prompts and drops those longer than `prompt_length` tokens.

    Returns:
        The encoded prompts that fit, in order, and the number that were dropped.

    Raises:
        DatasetError: none fits (the message gives the shortest and longest length), or as PromptEncoder.
    """
    encoded = PromptEncoder(tokenizer, template).encode([prompt.question for prompt in prompts])
    kept = [
        EncodedPrompt(prompt.id, prompt.tag, ids, prompt.ground_truth, prompt.question, prompt.row)
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


PLACEHOLDER = "stand-in"
"""Assistant message with which a template is rendered to find the text around it; it is never tokenized."""


_BEFORE: tuple[Message, ...] = ({"role": "user", "content": "first"}, {"role": "assistant", "content": PLACEHOLDER})
"""A conversation that ends with a response, to which later messages are appended for rendering."""


class ConversationEncoder:
    """Applies a chat template to the new messages of a conversation only.

    The ids of turn n, as the engine sampled them, are a prefix of the ids of turn n + 1, because no response is decoded
    and encoded again. The text with which the template closes an assistant's turn is found once, by rendering a
    placeholder.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        """Args as PromptEncoder.

        Raises:
            DatasetError: as PromptEncoder, or the template omits or changes assistant messages.
        """
        self._encoder = PromptEncoder(tokenizer, template)
        self._end = tokenizer.eos_token
        self._end_id = tokenizer.eos_token_id
        self._closed = self._encoder.render(Question(messages=_BEFORE), open_answer=False)
        self._closing = self._after_placeholder()

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the first messages, ready for a response."""
        return self._encoder.encode([Question(messages=tuple(messages))])[0]

    def follow(self, last: int, messages: Sequence[Message]) -> list[int]:
        """Token ids after a response: the end of its turn, the messages, and the start of the next response.

        Args:
            last: the last token of the response. If it is the end token, the template's own is not repeated.
            messages: the next messages, with role `user` or `tool`.

        Raises:
            DatasetError: the template renders earlier turns differently when messages follow.
        """
        closing = self._closing
        if last == self._end_id and closing.startswith(self._end):
            closing = closing.removeprefix(self._end)
        continued, closed = self._encoder.render(Question(messages=(*_BEFORE, *messages))), self._closed
        if not continued.startswith(closed):
            became = continued[: len(closed)][-40:]
            raise DatasetError(
                "data_args.template: the template renders earlier turns differently when later ones follow "
                f"({closed[-40:]!r} became {became!r}), so turns cannot be appended; use a built-in template"
            )
        return self._encoder.encode_text([closing + continued[len(closed) :]])[0]

    def _after_placeholder(self) -> str:
        _, found, closing = self._closed.rpartition(PLACEHOLDER)
        if not found:
            raise DatasetError("data_args.template: the template omits or changes assistant messages")
        return closing
