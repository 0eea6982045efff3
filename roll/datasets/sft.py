"""Prompts with the response to learn (SFT data), as text and as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from roll.configs.arguments import DataArguments
from roll.datasets.prompts import Message, Question, answer, answer_in, question, record_id, with_unique_ids
from roll.datasets.records import DatasetError, Record, read_records
from roll.datasets.templates import ConversationEncoder, PromptEncoder, chat_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PromptResponse:
    """A prompt and the response that the model should give."""

    id: str
    question: Question
    response: str | Message


@dataclass(frozen=True)
class SFTExample:
    """A prompt and its response as token ids.

    Attributes:
        id: as in the data.
        prompt_ids: the prompt, ready for the response to follow.
        response_ids: the response and the tokenizer's end token, so that the model learns to stop. It may hold several
            assistant messages and the messages between them.
        loss_mask: which of `response_ids` are learned: those of assistant messages; None means all.
    """

    id: str
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: tuple[bool, ...] | None = None


def load_sft_data(files: str | list[str], data_args: DataArguments) -> list[PromptResponse]:
    """Reads prompts and responses from all files, in order.

    The response is the column `data_args.response`. If that is missing and the last message is the assistant's, the
    response is that message.

    Raises:
        DatasetError: as `load_prompts`.
    """
    return with_unique_ids([read_prompt_response(record, data_args) for record in read_records(files)])


def encode_sft_data(
    data: Sequence[PromptResponse],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    prompt_length: int,
    sequence_length: int,
    mask_history: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> tuple[list[SFTExample], int]:
    """Encodes prompts and responses, and drops samples that are too long.

    `sequence_length` bounds prompt and response together with the end token. With `mask_history` only the last
    assistant message of a conversation is learned; else each of them, and the prompt is what precedes the first.

    Returns:
        The examples that fit, in order, and the number that were dropped.

    Raises:
        DatasetError: none fits (the message gives the longest lengths), the tokenizer has no end token, or as
            PromptEncoder.
    """
    encode = encode_last_messages if mask_history else _all_messages
    _require_end_token(tokenizer)
    encoded = encode(data, tokenizer, template, variables)
    examples = [
        example
        for example in encoded
        if len(example.prompt_ids) <= prompt_length
        and len(example.prompt_ids) + len(example.response_ids) <= sequence_length
    ]
    if not examples:
        prompts = [len(example.prompt_ids) for example in encoded]
        longest = max((len(example.prompt_ids) + len(example.response_ids) for example in encoded), default=0)
        raise DatasetError(
            f"none of {len(data)} examples fits prompt_length {prompt_length} and sequence_length {sequence_length}; "
            f"the longest prompt has {max(prompts, default=0)} tokens, the longest example {longest}"
        )
    return examples, len(data) - len(examples)


def _require_end_token(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.eos_token_id is None:
        raise DatasetError("the tokenizer has no end token (eos_token), so the model could not learn to end a response")


def encode_last_messages(
    data: Sequence[PromptResponse],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    variables: Mapping[str, Any] | None = None,
) -> list[SFTExample]:
    """Encodes the last assistant message of each conversation as the response, with the end token.

    Raises:
        DatasetError: the tokenizer has no end token, or as PromptEncoder.
    """
    _require_end_token(tokenizer)
    encoder = PromptEncoder(tokenizer, template, variables)
    prompts = encoder.encode([item.question for item in data])
    responses = encoder.encode_text([encoder.render_answer(item.question, item.response) for item in data])
    return [
        SFTExample(item.id, prompt, [*response, tokenizer.eos_token_id])
        for item, prompt, response in zip(data, prompts, responses, strict=True)
    ]


def _all_messages(
    data: Sequence[PromptResponse],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    variables: Mapping[str, Any] | None = None,
) -> list[SFTExample]:
    """Encodes everything from the first assistant message as the response, with a loss mask."""
    chat = ConversationEncoder(tokenizer, template, variables)
    examples = []
    for item in data:
        *messages, last = [*chat_messages(item.question), _message_of(item.response)]
        if messages[-1]["role"] == "assistant":  # continued by the response
            last = last | {"content": f"{messages.pop()['content']}{last['content'] or ''}"}
        context: list[Message] = []
        prompt: list[int] = []
        ids: list[int] = []
        loss_mask: list[bool] = []
        for index, message in enumerate([*messages, last]):
            if message["role"] != "assistant":
                context.append(message)
                continue
            before = replace(item.question, text=None, messages=tuple(messages[:index]))
            between = chat.follow(ids[-1], context) if prompt else []
            prompt = prompt or chat.encoder.encode([before])[0]
            text = chat.encoder.render_answer(before, message)
            response = [*chat.encoder.encode_text([text])[0], tokenizer.eos_token_id]
            ids += [*between, *response]
            loss_mask += [False] * len(between) + [True] * len(response)
            context = []
        examples.append(SFTExample(item.id, prompt, ids, tuple(loss_mask)))
    return examples


def _message_of(response: str | Message) -> Message:
    return {"role": "assistant", "content": response} if isinstance(response, str) else response


def read_prompt_response(record: Record, data_args: DataArguments) -> PromptResponse:
    """The prompt and response of one row; see `load_sft_data`."""
    if record.row.get(data_args.response) is None:
        prompt = question(record, data_args)
        *earlier, last = prompt.messages or ({"role": "user"},)
        if not earlier or last["role"] != "assistant":
            record.fail_missing(data_args.response, key="response")
        response = answer_in(record, data_args.messages, last)
        return PromptResponse(record_id(record, data_args), replace(prompt, messages=tuple(earlier)), response)
    before, response = answer(record, data_args.response, "response")
    return PromptResponse(record_id(record, data_args), question(record, data_args, before), response)
