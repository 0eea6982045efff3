"""Chat templates: from prompts and conversations to token ids."""

from __future__ import annotations

import difflib
import json
import os
import re
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from roll.datasets.prompts import ANSWER_FIELDS, Message, Prompt, Question
from roll.datasets.records import DatasetError
from roll.models.families.chat_template import NATIVE, NONE
from roll.models.families.registry import chat_templates, template_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
MARK, CHECKED_MESSAGES = 7_310_000_000, 20
"""Number that is put after the first message of a prompt to see whether it is rendered, and how many are put singly."""

RENDERED_FIELDS = ("tools", "tool_calls", "function_call", "name", *THOUGHTS)
"""Parts of a prompt that a template may not leave out; templates match a tool's answer to its call by their order."""


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
    """Why a tokenizer cannot apply a template; None if it can."""
    names, built_in = template_names(), chat_templates().get(template)
    if template not in names:
        near = difflib.get_close_matches(template, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"{template!r} is not one of {', '.join(names)}{hint}"
    if template == NATIVE and not has_chat_template:
        return f"the tokenizer has no chat template; use {', '.join(names[1:])}"
    missing = set(built_in.markers) - set(vocabulary) if built_in else set()
    if missing:
        return (
            f"{template!r} needs the special tokens {', '.join(sorted(missing))}, which this tokenizer does not have; "
            "use native or none"
        )
    return None


def template_variables(template_kwargs: Mapping[str, Any], time: str | None) -> dict[str, Any]:
    """What a chat template may read beside messages; `time` (ISO 8601) is the one it takes for now."""
    now = datetime.fromisoformat(time) if time else datetime.now()
    return {"strftime_now": now.strftime} | dict(template_kwargs)


def chat_messages(question: Question) -> tuple[Message, ...]:
    """The messages of a prompt; a text is a message of the user."""
    return question.messages or ({"role": "user", "content": question.text or ""},)


class PromptEncoder:
    """Applies a chat template and a tokenizer to prompts.

    `template` is one of `template_names()`, and `variables` are those of `template_variables`.

    Raises:
        DatasetError: the template is unknown, or the tokenizer lacks it or one of its special tokens.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str, variables: Mapping[str, Any] | None = None
    ) -> None:
        problem = template_problem(template, bool(tokenizer.chat_template), tokenizer.get_vocab())
        if problem is not None:
            raise DatasetError(f"data_args.template: {problem}")
        self._tokenizer = tokenizer
        self._template = template
        self._variables = dict(variables or {})
        built_in = chat_templates().get(template)
        self._jinja = built_in.jinja if built_in else None
        self._first = _first_tokens(tokenizer) if template == NONE else []

    def encode(self, questions: Sequence[Question]) -> list[list[int]]:
        """Token ids of each prompt, ready for the response to follow.

        With template `none`, they begin with the tokens that the tokenizer puts before a text, such as BOS.

        Raises:
            DatasetError: as `render`.
        """
        first = self._first
        encoded = self.encode_text([self.render(question) for question in questions])
        return [ids if ids[: len(first)] == first else [*first, *ids] for ids in encoded]

    def encode_text(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return ids

    def render(self, question: Question, open_answer: bool = True) -> str:
        """Text of a prompt; `open_answer` adds the start of the assistant's turn, or leaves a last one of it open.

        Raises:
            DatasetError: the template fails or leaves out a part of the messages; or it is `none` and the prompt
                consists of messages.
        """
        if self._template == NONE:
            if question.text is None:
                raise DatasetError("data_args.template: 'none' needs a text, and this prompt consists of messages")
            return question.text
        text = self._apply(question, open_answer)
        for name in RENDERED_FIELDS:
            if self._leaves_out(name, question, text, open_answer):
                raise DatasetError(
                    f"{_at(question)}the chat template leaves out {name!r}; use one that renders it, or remove it"
                )
        return text

    def check_contents(self, question: Question, open_answer: bool = True) -> None:
        """Checks that the text of a prompt depends on the end of each of its messages; empty ones may be left out.

        Raises:
            DatasetError: the template leaves out a message, or cuts it.
        """
        messages = chat_messages(question)
        filled = [number for number, each in enumerate(messages) if str(each["content"] or "").strip()]
        if self._template == NONE or not filled:
            return
        marked = self._with_endings(question, filled, open_answer) or ""
        missing = [number for number in filled if str(MARK + number) not in marked]
        text = self._apply(question, open_answer) if missing else ""
        for number in missing[:CHECKED_MESSAGES]:
            if self._with_endings(question, [number], open_answer) == text:
                raise DatasetError(
                    f"{_at(question)}the chat template leaves out message {number + 1} ({messages[number]['role']}), "
                    "or its end; use one that renders every message whole"
                )

    def _with_endings(self, question: Question, numbers: Sequence[int], open_answer: bool) -> str | None:
        """The text of a prompt with a mark after some messages; None where the template refuses it."""
        messages = list(chat_messages(question))
        for number in numbers:
            messages[number] = messages[number] | {"content": f"{messages[number]['content']} {MARK + number}"}
        try:
            return self._apply(replace(question, text=None, messages=tuple(messages)), open_answer)
        except DatasetError:
            return None

    def render_answer(self, question: Question, response: str | Message) -> str:
        """Text of a response to a prompt: of more than a text, what the template makes of it, without its end."""
        if isinstance(response, str):
            return response
        if not response.keys() & ANSWER_FIELDS:
            return str(response["content"])
        before = self.render(question)
        whole = self.render(replace(question, messages=(*chat_messages(question), response)), open_answer=False)
        if not whole.startswith(before):
            raise DatasetError(
                f"{_at(question)}the chat template renders the prompt differently when the response follows: "
                f"{first_difference(before, whole)}"
            )
        return whole[len(before) :].removesuffix(self.closing)

    @cached_property
    def closing(self) -> str:
        """The text after a message of the assistant.

        Raises:
            DatasetError: the template omits or changes assistant messages.
        """
        _, found, closing = self.render(Question(messages=_BEFORE), open_answer=False).rpartition(PLACEHOLDER)
        if not found:
            raise DatasetError("data_args.template: the template omits or changes assistant messages")
        return closing

    @cached_property
    def source(self) -> str:
        """The chat template."""
        return self._jinja or str(self._tokenizer.chat_template)

    def _apply(self, question: Question, open_answer: bool) -> str:
        none = None if re.search(r"\bis (not )?none\b", self.source) else ""
        messages = [each | {"content": none} if each["content"] is None else each for each in chat_messages(question)]
        continues = open_answer and messages[-1]["role"] == "assistant"
        try:
            text = str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=list(question.tools) or None,
                    chat_template=self._jinja,
                    tokenize=False,
                    add_generation_prompt=open_answer and not continues,
                    continue_final_message=continues,
                    **self._variables,
                )
            )
        except Exception as error:  # a template can raise any error
            raise DatasetError(f"{_at(question)}{_template_failure(error)}") from error
        content = messages[-1]["content"] if continues else ""
        return text if text.endswith(content) else text + content[len(content.rstrip()) :]

    def _leaves_out(self, name: str, question: Question, text: str, open_answer: bool) -> bool:
        """Whether the text of a prompt with this field would be the same without it."""
        messages = chat_messages(question)
        if name in THOUGHTS and name in self.source:
            return False  # templates leave out thoughts of earlier turns
        if name == "tools":
            without = replace(question, tools=())
        else:
            holders = [each for each in messages if each.get(name) and (name, each["role"]) != ("name", "tool")]
            kept = tuple(
                {key: value for key, value in each.items() if key != name or each not in holders} for each in messages
            )
            without = replace(question, text=None, messages=kept) if holders else question
        try:
            return without != question and self._apply(without, open_answer) == text
        except DatasetError:  # the template needs the field
            return False


def first_difference(before: str, after: str) -> str:
    at = len(os.path.commonprefix([before, after]))
    return " became ".join(repr(text[max(0, at - 20) : at + 40]) for text in (before, after))


def _at(question: Question) -> str:
    return f"{question.source}: " if question.source else "data_args.template: "


def _template_failure(error: Exception) -> str:
    """The message of an error of a chat template, with the template's line where it is known."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [getattr(error, "lineno", None), *(frame.lineno for frame in frames if frame.filename == "<template>")]
    line = next((f", line {line}" for line in reversed(lines) if line), "")
    message = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return f"the chat template fails{line}: {message}"


def _first_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text, whole = (list(tokenizer("a", add_special_tokens=added)["input_ids"]) for added in (False, True))
    starts = (start for start in range(len(whole)) if whole[start : start + len(text)] == text)
    return whole[: next(starts, 0)]


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    prompt_length: int,
    variables: Mapping[str, Any] | None = None,
) -> tuple[list[EncodedPrompt], int]:
    """Encodes prompts and drops those longer than `prompt_length` tokens.

    Returns:
        The encoded prompts that fit, in order, and the number that were dropped.

    Raises:
        DatasetError: none fits (the message gives the shortest and longest length), or as PromptEncoder.
    """
    encoded = PromptEncoder(tokenizer, template, variables).encode([prompt.question for prompt in prompts])
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

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str, variables: Mapping[str, Any] | None = None
    ) -> None:
        """Args as PromptEncoder.

        Raises:
            DatasetError: as PromptEncoder, or the template omits or changes assistant messages.
        """
        self.encoder = PromptEncoder(tokenizer, template, variables)
        self._end = tokenizer.eos_token
        self._end_id = tokenizer.eos_token_id
        self._closed: dict[str, str] = {}
        self._closing = self.encoder.closing

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        return self.encoder.encode([Question(messages=tuple(messages), tools=tuple(tools))])[0]

    def follow(self, last: int, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Token ids after a response: the end of its turn, the messages, and the start of the next response.

        Args:
            last: the last token of the response. If it is the end token, the template's own is not repeated.
            messages: the next messages, with role `user` or `tool`.
            tools: of the conversation.

        Raises:
            DatasetError: the template renders earlier turns differently when messages follow.
        """
        closing = self._closing
        if last == self._end_id and closing.startswith(self._end):
            closing = closing.removeprefix(self._end)
        before, name = Question(messages=_BEFORE, tools=tuple(tools)), json.dumps(tools) if tools else ""
        if name not in self._closed:
            self._closed[name] = self.encoder.render(before, open_answer=False)
        continued, closed = self.encoder.render(replace(before, messages=(*_BEFORE, *messages))), self._closed[name]
        if not continued.startswith(closed):
            raise DatasetError(
                "data_args.template: the template renders earlier turns differently when later ones follow "
                f"({first_difference(closed, continued)}), so turns cannot be appended; use a built-in template"
            )
        return self.encoder.encode_text([closing + continued[len(closed) :]])[0]
