"""Prompts with the response to learn (SFT data), as text and as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll.configs.roles import DataArguments
from roll.datasets.prompts import Message, Question, question, record_id, with_unique_ids
from roll.datasets.records import DatasetError, Record, read_records
from roll.datasets.templates import ConversationEncoder, PromptEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PromptResponse:
    """A prompt and the response that the model should give."""

    id: str
    question: Question
    response: str


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
) -> tuple[list[SFTExample], int]:
    """Encodes prompts and responses, and drops samples that are too long.

    Args:
        data: prompts and responses.
        tokenizer: a tokenizer with an end token.
        template: chat template of the prompt; see `roll.datasets.templates`.
        prompt_length: maximum tokens of a prompt.
        sequence_length: maximum tokens of prompt and response together, end token included.
        mask_history: learn only the last assistant message of a conversation; else learn each of them, and the prompt
            is what precedes the first.

    Returns:
        The examples that fit, in order, and the number that were dropped.

    Raises:
        DatasetError: none fits (the message gives the longest lengths), the tokenizer has no end token, or as
            PromptEncoder.
    """
    encode = encode_last_messages if mask_history else _all_messages
    _require_end_token(tokenizer)
    encoded = encode(data, tokenizer, template)
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
    data: Sequence[PromptResponse], tokenizer: PreTrainedTokenizerBase, template: str
) -> list[SFTExample]:
    """Encodes the last assistant message of each conversation as the response, with the end token.

    Raises:
        DatasetError: the tokenizer has no end token, or as PromptEncoder.
    """
    _require_end_token(tokenizer)
    encoder = PromptEncoder(tokenizer, template)
    prompts = encoder.encode([item.question for item in data])
    responses = encoder.encode_text([item.response for item in data])
    return [
        SFTExample(item.id, prompt, [*response, tokenizer.eos_token_id])
        for item, prompt, response in zip(data, prompts, responses, strict=True)
    ]


def _all_messages(
    data: Sequence[PromptResponse], tokenizer: PreTrainedTokenizerBase, template: str
) -> list[SFTExample]:
    """Encodes everything from the first assistant message as the response, with a loss mask."""
    chat, encoder = ConversationEncoder(tokenizer, template), PromptEncoder(tokenizer, template)
    examples = []
    for item in data:
        messages = item.question.messages or ({"role": "user", "content": item.question.text or ""},)
        context: list[Message] = []
        prompt: list[int] = []
        ids: list[int] = []
        loss_mask: list[bool] = []
        for message in [*messages, {"role": "assistant", "content": item.response}]:
            if message["role"] != "assistant":
                context.append(message)
                continue
            between = chat.follow(ids[-1], context) if prompt else []
            prompt = prompt or chat.start(context)
            response = [*encoder.encode_text([message["content"]])[0], tokenizer.eos_token_id]
            ids += [*between, *response]
            loss_mask += [False] * len(between) + [True] * len(response)
            context = []
        examples.append(SFTExample(item.id, prompt, ids, tuple(loss_mask)))
    return examples


def read_prompt_response(record: Record, data_args: DataArguments) -> PromptResponse:
    """The prompt and response of one row; see `load_sft_data`."""
    prompt, response = question(record, data_args), record.row.get(data_args.response)
    messages = prompt.messages or ()
    if response is None and len(messages) > 1 and messages[-1]["role"] == "assistant":
        prompt, response = Question(messages=messages[:-1]), messages[-1]["content"]
    if response is None:
        record.fail_missing(data_args.response, key="response")
    if not isinstance(response, str):
        record.fail(f"column {data_args.response!r} holds a {type(response).__name__}; a response is a text")
    return PromptResponse(record_id(record, data_args), prompt, response)
